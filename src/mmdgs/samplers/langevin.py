"""Samplers that follow the score with noise: annealed Langevin, consistent annealed sampling.

The step size that NCSNv2's analysis suggests: where the data are a point, T steps of rate r at a
level sigma take the variance gamma^2 sigma^2 of the level above to

    sigma^2 [ (1 - r)^(2 T) (gamma^2 - v) + v ],    v = 2 / (2 - r)

(Song and Ermon, 2020, Proposition 3). They take the r that brings the bracket nearest to 1: with
232 levels from 50 to 0.01 and T = 5 that is their 0.062 for CIFAR-10, with 500 from 90 their 0.033
for CelebA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmdgs.denoisers import Denoiser, denoise, score
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.randomness import Generator, randn_like
from mmdgs.samplers.kernel import Info, State, finite

LARGEST = 1.5
"""Few levels ask for large steps; those near 2 would only add noise, which diverges beyond it."""
OF_ONE_LEVEL = 0.062
"""NCSNv2's on CIFAR-10, where there is no level above."""


@dataclass(frozen=True)
class Langevin:
    """x + a s(x) + sqrt(2 a) z, a = rate sigma^2: Algorithm 1's step (Song and Ermon, 2019).

    The state is at `level`, and stays there where `following` is the same; else it becomes the next
    level's start, scaled to its alpha. NCSNv2's step size d is a rate of d / sigma_last^2: 6.2e-6
    at sigma_last = 0.01 is 0.062.
    """

    denoiser: Denoiser
    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < 2:
            raise ValueError(f"rate must lie in (0, 2), else the noise diverges, got {self.rate}")

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        a = self.rate * level.sigma**2
        x = state.x + a * score(self.denoiser, state.x, level)
        x = x + math.sqrt(2 * a) * randn_like(x, generator)
        return State(finite(x * (following.alpha / level.alpha))), {}


@dataclass(frozen=True)
class ConsistentAnnealed:
    """Consistent annealed sampling (Jolicoeur-Martineau et al., 2021): noise falls as levels do.

    With y = x / alpha: y_s = y_t + eta (D - y_t) + b z, b^2 = sigma_s^2 - (1 - eta)^2 sigma_t^2, so
    that where D is the clean x the noise of y_s is that of level s. eta must be at least 1 -
    sigma_s / sigma_t: None takes `factor` times that. As levels grow, a factor of 1 is the
    probability-flow ODE and 2 the reverse diffusion; a fixed eta keeps a bias, for D has less
    spread than x.
    """

    denoiser: Denoiser
    eta: float | None = None
    factor: float = 2.0

    def __post_init__(self) -> None:
        if self.eta is not None and not 0 < self.eta <= 1:
            raise ValueError(f"eta must lie in (0, 1], got {self.eta}")
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}")

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        mean = denoise(self.denoiser, state.x, level)
        if following == CLEAN:
            return State(finite(mean)), {}
        now, then = math.sqrt(level.variance), math.sqrt(following.variance)
        least = 1 - then / now
        eta = min(1.0, self.factor * least) if self.eta is None else self.eta
        if eta < least - 1e-9:
            step = f"from sigma {now:g} to {then:g}: at least {least:g}, or more levels, are needed"
            raise ValueError(f"eta {eta:g} is too small for a step {step}")
        y = state.x / level.alpha
        noise = math.sqrt(max(0.0, then**2 - (1 - eta) ** 2 * now**2))
        y = y + eta * (mean - y) + noise * randn_like(y, generator)
        return State(finite(y * following.alpha)), {}


def variance_factor(rate: float, gamma: float, steps: int) -> float:
    """The bracket above: variance after the steps, over sigma^2."""
    stationary = 2 / (2 - rate)
    return (1 - rate) ** (2 * steps) * (gamma**2 - stationary) + stationary


def suggested_rate(levels: Sequence[NoiseLevel], steps: int) -> float:
    """The rate whose variance is nearest to the level's, by the levels' mean ratio."""
    if len(levels) < 2:
        return OF_ONE_LEVEL
    largest, smallest = (level.sigma / level.alpha for level in (levels[0], levels[-1]))
    gamma = (largest / smallest) ** (1 / (len(levels) - 1))
    return _minimiser(lambda rate: abs(variance_factor(rate, gamma, steps) - 1), 1e-5, LARGEST)


def _minimiser(function: Callable[[float], float], low: float, high: float) -> float:
    """The one minimum of a function between low and high, to 1e-8, by golden sections."""
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
