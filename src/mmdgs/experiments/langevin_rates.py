"""The step size of annealed Langevin dynamics: what NCSNv2's analysis suggests, and what a search finds.

Where the data are a point, T steps of rate r at a level sigma take the variance gamma^2 sigma^2 of the level above to

    sigma^2 [ (1 - r)^(2 T) (gamma^2 - v) + v ],    v = 2 / (2 - r)

(Song and Ermon, 2020, Proposition 3). They take the r that brings the bracket nearest to 1: with 232 levels from 50 to
0.01 and T = 5 that is their 0.062 for CIFAR-10, with 500 from 90 their 0.033 for CelebA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scipy.optimize import minimize_scalar

from mmdgs.noise import NoiseLevel

LARGEST = 1.9
"""Beyond 2 the noise itself diverges."""


def variance_factor(rate: float, gamma: float, steps: int) -> float:
    """The bracket above: variance after the steps, over sigma^2."""
    stationary = 2 / (2 - rate)
    return (1 - rate) ** (2 * steps) * (gamma**2 - stationary) + stationary


def suggested_rate(levels: Sequence[NoiseLevel], steps: int) -> float:
    """The rate whose variance is nearest to the level's, for geometric levels."""
    gamma = (levels[0].sigma / levels[-1].sigma) ** (1 / (len(levels) - 1))
    found = minimize_scalar(
        lambda rate: abs(variance_factor(rate, gamma, steps) - 1), bounds=(1e-5, LARGEST), method="bounded"
    )
    return float(found.x)


def best_rate(values: Mapping[float, float]) -> tuple[float, bool]:
    """The rate of the smallest value, and whether it lies inside the rates that were tried."""
    rates = sorted(values)
    best = min(rates, key=lambda rate: values[rate])
    return best, rates[0] < best < rates[-1]
