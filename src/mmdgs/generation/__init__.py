"""Samples of a model: single-level chains in memory, and any plan for many samples, written as they come."""

from mmdgs.generation.chains import Sampled, sample, start_from_noise
from mmdgs.generation.engine import Generated, generate
from mmdgs.generation.methods import SAMPLERS, Method, make_plan, resolved

__all__ = [
    "SAMPLERS",
    "Generated",
    "Method",
    "Sampled",
    "generate",
    "make_plan",
    "resolved",
    "sample",
    "start_from_noise",
]
