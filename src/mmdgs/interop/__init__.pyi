"""The public names of mmdgs.interop: read by type checkers, and by __init__.py."""

from mmdgs.interop.azula import from_azula as from_azula, to_azula as to_azula
from mmdgs.interop.deepinv import (
    CovarianceFidelity as CovarianceFidelity,
    Restorer as Restorer,
    to_deepinv as to_deepinv,
    to_physics as to_physics,
)
from mmdgs.interop.diffusers import MomentScheduler as MomentScheduler
