"""Moment estimators: from a denoiser to the Gaussian that stands for p(x | x_t). One file a way to the covariance."""

from mmdgs.moments.calibrated import CalibratedMoments
from mmdgs.moments.clipped import ClippedDenoiser, ClippedMoments
from mmdgs.moments.contract import FLOOR, Moments, fitted_in_parts, require_batch, require_input
from mmdgs.moments.diagonal import DiagonalMoments
from mmdgs.moments.full import ExactMoments, FullMoments
from mmdgs.moments.given import GivenDenoiser, GivenMoments
from mmdgs.moments.higher import HigherMoments, higher_moments
from mmdgs.moments.isotropic import IsotropicMoments
from mmdgs.moments.krylov import KrylovMoments, components
from mmdgs.moments.learned import LearnedMoments
from mmdgs.moments.modulated import ModulatedMoments, SpectralHead
from mmdgs.moments.ocm import OcmMoments
from mmdgs.moments.spectral import SpectralMoments

__all__ = [
    "FLOOR",
    "CalibratedMoments",
    "ClippedDenoiser",
    "ClippedMoments",
    "DiagonalMoments",
    "ExactMoments",
    "FullMoments",
    "GivenDenoiser",
    "GivenMoments",
    "HigherMoments",
    "IsotropicMoments",
    "KrylovMoments",
    "LearnedMoments",
    "ModulatedMoments",
    "Moments",
    "OcmMoments",
    "SpectralHead",
    "SpectralMoments",
    "components",
    "fitted_in_parts",
    "higher_moments",
    "require_batch",
    "require_input",
]
