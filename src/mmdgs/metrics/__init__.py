"""Numbers that say how good samples and posteriors are, and tests of densities on grids."""

from mmdgs.metrics.calibration import Calibration, Reliability, calibration, fitted_floor, reliability, standardised
from mmdgs.metrics.chains import ModeStatistics, effective_sample_size, mode_statistics
from mmdgs.metrics.classes import class_shares, entropy, total_variation
from mmdgs.metrics.curves import Instability, instability
from mmdgs.metrics.densities import kl_divergence
from mmdgs.metrics.existence import Deconvolution, deconvolve
from mmdgs.metrics.frechet import FeatureMoments, frechet_distance, gaussian_frechet_distance
from mmdgs.metrics.mmd import mmd

__all__ = [
    "Calibration",
    "Deconvolution",
    "FeatureMoments",
    "Instability",
    "ModeStatistics",
    "Reliability",
    "calibration",
    "class_shares",
    "deconvolve",
    "effective_sample_size",
    "entropy",
    "fitted_floor",
    "frechet_distance",
    "gaussian_frechet_distance",
    "instability",
    "kl_divergence",
    "mmd",
    "mode_statistics",
    "reliability",
    "standardised",
    "total_variation",
]
