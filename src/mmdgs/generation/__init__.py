"""Samples of a model by any plan, returned or written as they come; samplers by name."""

from mmdgs.generation.engine import Generated, generate
from mmdgs.generation.methods import SAMPLERS, Method, make_plan, resolved
from mmdgs.generation.spectra import fitted_moments, spectral_moments
from mmdgs.generation.variances import FitData, isotropic_moments

__all__ = [
    "SAMPLERS",
    "FitData",
    "Generated",
    "Method",
    "fitted_moments",
    "generate",
    "isotropic_moments",
    "make_plan",
    "resolved",
    "spectral_moments",
]
