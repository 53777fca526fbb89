"""Numbers that say how good samples are, and tests of densities on grids."""

from mmdgs.metrics.chains import ModeStatistics, effective_sample_size, mode_statistics
from mmdgs.metrics.densities import kl_divergence
from mmdgs.metrics.existence import Deconvolution, deconvolve
from mmdgs.metrics.mmd import mmd

__all__ = [
    "Deconvolution",
    "ModeStatistics",
    "deconvolve",
    "effective_sample_size",
    "kl_divergence",
    "mmd",
    "mode_statistics",
]
