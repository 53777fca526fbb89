"""Samples against data, in numbers: Fréchet and kernel distance, precision and recall, Inception score, diversity.

Images are judged as they would be stored, in 256 levels. Every number depends on how many samples there are, so the
record holds the counts, and evaluations of different counts are not compared (`check_comparable`).
"""

from mmdgs.evaluation.checks import METRICS, OF_FEATURES
from mmdgs.evaluation.record import Evaluation, Images, check_comparable, check_equal, read_evaluations
from mmdgs.evaluation.run import evaluate, random_subset

__all__ = [
    "METRICS",
    "OF_FEATURES",
    "Evaluation",
    "Images",
    "check_comparable",
    "check_equal",
    "evaluate",
    "random_subset",
    "read_evaluations",
]
