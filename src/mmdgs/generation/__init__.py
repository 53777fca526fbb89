"""Samples of a model: single-level chains in memory, and any plan for many samples, written as they come."""

from mmdgs.generation.chains import Sampled, sample, start_from_noise
from mmdgs.generation.engine import Generated, generate
from mmdgs.generation.methods import SAMPLERS, Method, make_plan, resolved
from mmdgs.generation.spectra import fitted_moments, spectral_moments
from mmdgs.generation.variances import FitData, isotropic_moments

__all__ = [
    "SAMPLERS",
    "FitData",
    "Generated",
    "Method",
    "Sampled",
    "fitted_moments",
    "generate",
    "isotropic_moments",
    "make_plan",
    "resolved",
    "sample",
    "spectral_moments",
    "start_from_noise",
]
