"""Samplers that follow the score with noise: annealed Langevin dynamics and consistent annealed sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmdgs.denoisers import Denoiser, denoise, score
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.randomness import Generator, randn_like
from mmdgs.samplers.kernel import Info, State, finite


@dataclass(frozen=True)
class Langevin:
    """x + a s(x) + sqrt(2 a) z with a = rate sigma^2: one step of the paper's Algorithm 1 (Song & Ermon, 2019).

    The state is at `level`, and stays there where `following` is the same; else it becomes the next level's start,
    scaled to its alpha. NCSNv2's step size d is a rate of d / sigma_last^2: 6.2e-6 at sigma_last = 0.01 is 0.062.
    """

    denoiser: Denoiser
    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < 2:
            raise ValueError(f"rate must lie in (0, 2), else the noise itself diverges, got {self.rate}")

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        a = self.rate * level.sigma**2
        x = state.x + a * score(self.denoiser, state.x, level)
        x = x + math.sqrt(2 * a) * randn_like(x, generator)
        return State(finite(x * (following.alpha / level.alpha))), {}


@dataclass(frozen=True)
class ConsistentAnnealed:
    """Consistent annealed sampling (Jolicoeur-Martineau et al., 2021): the noise falls just as the levels say.

    With y = x / alpha: y_s = y_t + eta (D - y_t) + b z, b^2 = sigma_s^2 - (1 - eta)^2 sigma_t^2, so that where D is
    the clean x the noise of y_s is that of level s. eta must be at least 1 - sigma_s / sigma_t: None takes
    `factor` times that. As levels grow, a factor of 1 is the probability-flow ODE and 2 the reverse diffusion;
    a fixed eta keeps a bias, for D has less spread than x.
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
            raise ValueError(
                f"eta {eta:g} is too small for a step from sigma {now:g} to {then:g}: it must be at least "
                f"{least:g}; use more levels or a larger eta"
            )
        y = state.x / level.alpha
        noise = math.sqrt(max(0.0, then**2 - (1 - eta) ** 2 * now**2))
        y = y + eta * (mean - y) + noise * randn_like(y, generator)
        return State(finite(y * following.alpha)), {}
