"""Moment estimators: from a denoiser to the Gaussian that stands for p(x | x_t).

By where the covariance comes from: products with the Jacobian, a fit to data, a head.
"""

from mmdgs.moments.calibrated import CalibratedMoments
from mmdgs.moments.clipped import ClippedDenoiser, ClippedMoments
from mmdgs.moments.contract import FLOOR, Moments, require_batch, require_input
from mmdgs.moments.fitted import IsotropicMoments, SpectralMoments
from mmdgs.moments.given import GivenDenoiser, GivenMoments
from mmdgs.moments.heads import LearnedMoments, ModulatedMoments, SpectralHead
from mmdgs.moments.higher import HigherMoments, higher_moments
from mmdgs.moments.ocm import OcmMoments
from mmdgs.moments.products import (
    DiagonalMoments,
    ExactMoments,
    FullMoments,
    KrylovMoments,
    LowRankMoments,
    components,
)

# fmt: off
__all__ = [
    "FLOOR", "CalibratedMoments", "ClippedDenoiser", "ClippedMoments", "DiagonalMoments",
    "ExactMoments", "FullMoments", "GivenDenoiser", "GivenMoments", "HigherMoments",
    "IsotropicMoments", "KrylovMoments", "LearnedMoments", "LowRankMoments", "ModulatedMoments",
    "Moments", "OcmMoments", "SpectralHead", "SpectralMoments", "components",
    "higher_moments", "require_batch", "require_input",
]
# fmt: on
