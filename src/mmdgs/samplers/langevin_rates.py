"""The step size of annealed Langevin dynamics that NCSNv2's analysis suggests.

Where the data are a point, T steps of rate r at a level sigma take the variance gamma^2 sigma^2 of the level above to

    sigma^2 [ (1 - r)^(2 T) (gamma^2 - v) + v ],    v = 2 / (2 - r)

(Song and Ermon, 2020, Proposition 3). They take the r that brings the bracket nearest to 1: with 232 levels from 50 to
0.01 and T = 5 that is their 0.062 for CIFAR-10, with 500 from 90 their 0.033 for CelebA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mmdgs.noise import NoiseLevel

LARGEST = 1.5
"""Few levels ask for large steps; those near 2 would only add noise, and beyond it the noise itself diverges."""
OF_ONE_LEVEL = 0.062
"""NCSNv2's on CIFAR-10, where there is no level above."""


def variance_factor(rate: float, gamma: float, steps: int) -> float:
    """The bracket above: variance after the steps, over sigma^2."""
    stationary = 2 / (2 - rate)
    return (1 - rate) ** (2 * steps) * (gamma**2 - stationary) + stationary


def suggested_rate(levels: Sequence[NoiseLevel], steps: int) -> float:
    """The rate whose variance is nearest to the level's, for geometric levels; for others, that of their mean ratio."""
    if len(levels) < 2:
        return OF_ONE_LEVEL
    largest, smallest = (level.sigma / level.alpha for level in (levels[0], levels[-1]))
    gamma = (largest / smallest) ** (1 / (len(levels) - 1))
    return _minimiser(lambda rate: abs(variance_factor(rate, gamma, steps) - 1), 1e-5, LARGEST)


def _minimiser(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum between low and high has it, to 1e-8, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    below, above = function(left), function(right)
    while high - low > 1e-8:
        if below <= above:
            high, right, above = right, left, below
            left = high - ratio * (high - low)
            below = function(left)
        else:
            low, left, below = left, right, above
            right = low + ratio * (high - low)
            above = function(right)
    return (low + high) / 2
