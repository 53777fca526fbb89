"""Samples of a model: single-level chains in memory, and any plan for many samples, written as they come."""

from mmdgs.sampling.chains import Sampled, sample, start_from_noise
from mmdgs.sampling.generation import Generated, generate
from mmdgs.sampling.methods import SAMPLERS, Method, make_plan, resolved
from mmdgs.sampling.spectra import fitted_moments, spectral_moments
from mmdgs.sampling.variances import FitData, isotropic_moments

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
