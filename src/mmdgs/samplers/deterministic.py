"""Samplers of the diffusion ODE: DDIM, two methods of higher order, and a denoising step.

In y = x / alpha and s = sigma / alpha the ODE is dy/ds = (y - D) / s (Karras et al., 2022): DDIM is
its Euler step. `eta` and `churn` add fresh noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise
from mmdgs.noise import CLEAN, NoiseLevel, transition
from mmdgs.randomness import Generator, randn_like
from mmdgs.samplers.kernel import Info, State, finite


@dataclass(frozen=True)
class Denoise:
    """D(x) in place of x: the last step of annealed Langevin dynamics and of multi-level Gibbs."""

    denoiser: Denoiser

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        return State(finite(denoise(self.denoiser, state.x, level))), {}


@dataclass(frozen=True)
class DDIM:
    """x_s = alpha_s D + sqrt(sigma_s^2 - v^2) e + v z, e = (x_t - alpha_t D) / sigma_t.

    Song et al. (2021). v^2 is `eta`^2 times the small variance of ancestral sampling: eta = 0 is
    deterministic, eta = 1 is DDPM. An `interval` clamps D as diffusers does: e is still the noise
    by the D that was not clamped.
    """

    denoiser: Denoiser
    eta: float = 0.0
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta must lie in [0, 1], got {self.eta}")

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        mean = denoise(self.denoiser, state.x, level)
        noise = (state.x - level.alpha * mean) / level.sigma
        mean = mean if self.interval is None else mean.clamp(*self.interval)
        if following == CLEAN:
            return State(finite(mean)), {}
        fresh = self.eta * following.sigma * transition(following, level)[1] / level.sigma
        x = following.alpha * mean + math.sqrt(following.sigma**2 - fresh**2) * noise
        return State(finite(x + fresh * randn_like(x, generator) if fresh else x)), {}


@dataclass(frozen=True)
class Heun:
    """Heun's second-order step with optional churn (Karras et al., 2022, Algorithms 1 and 2).

    `churn` lifts the noise by that share of it before a step, which then leads down from there.
    """

    denoiser: Denoiser
    churn: float = 0.0

    def __post_init__(self) -> None:
        if self.churn < 0:
            raise ValueError(f"churn must be at least 0, got {self.churn}")

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        transition(following, level)  # refuses levels in the wrong order
        if self.churn:
            # The same alpha and more noise: a level between the trained ones.
            lifted = NoiseLevel(alpha=level.alpha, sigma=level.sigma * (1 + self.churn))
            extra = math.sqrt(lifted.sigma**2 - level.sigma**2)
            state, level = State(state.x + extra * randn_like(state.x, generator)), lifted
        mean = denoise(self.denoiser, state.x, level)
        if following == CLEAN:
            return State(finite(mean)), {}
        now, then = level.sigma / level.alpha, following.sigma / following.alpha
        y = state.x / level.alpha
        slope = (y - mean) / now
        guess = y + (then - now) * slope
        corrected = (guess - denoise(self.denoiser, following.alpha * guess, following)) / then
        y = y + (then - now) * 0.5 * (slope + corrected)
        return State(finite(following.alpha * y)), {}


@dataclass(frozen=True)
class _WithMeans(State):
    """A state with the means of the steps before, the last first, and their -log(sigma / alpha)."""

    past: tuple[tuple[float, Tensor], ...]


@dataclass(frozen=True)
class Multistep:
    """A step of second or third order for one evaluation, by a polynomial through the last means.

    In l = -log(sigma / alpha) the ODE is dy/dl = D - y. With D + c (l - l_t) along the step, c by
    the last two means,

        y_s = D + e^-h (y_t - D) + (e^-h - 1 + h) c,    h = l_s - l_t,

    exactly; `order` 3 adds the square, by three means. The first step, and one after a step of
    another kernel, is DDIM's (with eta = 1, DDPM's). `midpoint` takes D where the polynomial is in
    the middle of the step for all of it, which puts (1 - e^-h) h / 2 in the place of the last
    factor (as Lu et al., 2022: DPM-Solver++, 2M). That is of second order too, and trusts the slope
    less: stochastic draws are less over-dispersed with few levels.

    `eta` > 0 is for the SDE of the same laws, dy = (1 + eta) (D - y) dl + noise (eta = 1: the time
    reversal of adding noise): a step lets y fall by e^-(1 + eta) h, and draws noise of the variance
    (1 - e^(-2 eta h)) sigma^2 anew. Fresh noise washes out errors of earlier steps. It is
    multiplied by `inflation`: a little above 1 makes up for a network that takes away more noise
    than there is (S_noise of Karras et al., 2022).
    """

    denoiser: Denoiser
    order: int = 2
    eta: float = 0.0
    midpoint: bool = False
    inflation: float = 1.0

    def __post_init__(self) -> None:
        if self.order not in (2, 3):
            raise ValueError(f"order must be 2 or 3, got {self.order}")
        if not 0 <= self.eta < math.inf:
            raise ValueError(f"eta must be at least 0 and finite, got {self.eta}")
        if not 0 < self.inflation < math.inf:
            raise ValueError(f"inflation must be positive and finite, got {self.inflation}")

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        transition(following, level)  # refuses levels in the wrong order
        mean = denoise(self.denoiser, state.x, level)
        if following == CLEAN:
            return State(finite(mean)), {}
        now, length = -math.log(level.ratio), math.log(level.ratio / following.ratio)
        rate = 1 + self.eta
        fall = math.exp(-rate * length)
        y = mean + fall * (state.x / level.alpha - mean)
        past = state.past if isinstance(state, _WithMeans) else ()
        if past:
            if self.midpoint:
                linear, square = (1 - fall) * length / 2, (1 - fall) * length**2 / 4
            else:  # the integrals of t and t^2 against rate e^(-rate (length - t))
                linear = length - (1 - fall) / rate
                square = length**2 - 2 * linear / rate
            earlier, last = past[0]
            slope = (mean - last) / (now - earlier)
            y = y + linear * slope
            if len(past) > 1:
                first, oldest = past[1]
                bend = (slope - (last - oldest) / (earlier - first)) / (now - first)
                y = y + (square + (now - earlier) * linear) * bend
        if self.eta:
            fresh = following.ratio * math.sqrt(-math.expm1(-2 * self.eta * length))
            y = y + self.inflation * fresh * randn_like(y, generator)
        return _WithMeans(finite(following.alpha * y), ((now, mean), *past)[: self.order - 1]), {}
