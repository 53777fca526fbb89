"""Samples of a model by any plan, returned or written as they come; samplers by name."""

from mmdgs.generation.engine import Generated, generate
from mmdgs.generation.methods import SAMPLERS, Method, make_plan, resolved

__all__ = [
    "SAMPLERS",
    "Generated",
    "Method",
    "generate",
    "make_plan",
    "resolved",
]
