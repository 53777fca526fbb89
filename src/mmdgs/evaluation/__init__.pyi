"""The public names of mmdgs.evaluation: read by type checkers, and by __init__.py."""

from mmdgs.evaluation.names import METRICS as METRICS, OF_FEATURES as OF_FEATURES
from mmdgs.evaluation.record import (
    Evaluation as Evaluation,
    Images as Images,
    check_comparable as check_comparable,
    check_equal as check_equal,
    read_evaluations as read_evaluations,
)
from mmdgs.evaluation.run import evaluate as evaluate, random_subset as random_subset
