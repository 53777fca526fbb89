"""The public names of mmdgs.metrics, and where each lives: read by type checkers, and by __init__.py."""

from mmdgs.metrics.comparison import Compared, compare_diagonals, relative_error
from mmdgs.metrics.coverage import (
    EXPECTED_COVERAGE,
    Calibration,
    Reliability,
    calibration,
    fitted_floor,
    reliability,
    standardised,
)
from mmdgs.metrics.densities import Deconvolution, deconvolve, kl_divergence
from mmdgs.metrics.diagnostics import Instability, ModeStatistics, effective_sample_size, instability, mode_statistics
from mmdgs.metrics.discrepancy import mmd
from mmdgs.metrics.frechet import FeatureMoments, frechet_distance, gaussian_frechet_distance
from mmdgs.metrics.inception_file import Inception, load_inception
from mmdgs.metrics.intervals import interval, jackknife_interval
from mmdgs.metrics.neighbours import Diversity, PrecisionRecall, diversity, precision_recall
from mmdgs.metrics.scores import Spread, class_shares, entropy, inception_score, kernel_distance, total_variation

__all__ = [
    "EXPECTED_COVERAGE",
    "Calibration",
    "Compared",
    "Deconvolution",
    "Diversity",
    "FeatureMoments",
    "Inception",
    "Instability",
    "ModeStatistics",
    "PrecisionRecall",
    "Reliability",
    "Spread",
    "calibration",
    "class_shares",
    "compare_diagonals",
    "deconvolve",
    "diversity",
    "effective_sample_size",
    "entropy",
    "fitted_floor",
    "frechet_distance",
    "gaussian_frechet_distance",
    "inception_score",
    "instability",
    "interval",
    "jackknife_interval",
    "kernel_distance",
    "kl_divergence",
    "load_inception",
    "mmd",
    "mode_statistics",
    "precision_recall",
    "relative_error",
    "reliability",
    "standardised",
    "total_variation",
]
