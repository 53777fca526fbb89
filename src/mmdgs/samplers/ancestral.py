"""Ancestral sampling: down from level to level by the bridge of the denoising posterior.

    x_s ~ N(g m + (a sigma_s^2 / sigma_t^2) x_t,  v I + g^2 C),   v = sigma_s^2 b^2 / sigma_t^2

With C = 0 this is DDPM's small variance; with b^2 I in place of the covariance its large one (Ho et
al., 2020); with C from a moments estimator it is the optimal covariance of its kind (Bao et al.,
2022, and beyond). `posterior.py` has g, a and b.

What is drawn on the way into the cleanest level stays in the images, for nothing is left to remove
it. In few steps that is a visible grain, and Bao et al. (their appendix) keep its mean absolute
value to some grey levels.

Mirrored sampling draws clean data, and goes on with the noise that was there, turned round:

    x ~ q(x | x_t),      x_s = alpha_s x - (sigma_s / sigma_t) (x_t - alpha_t x)

Given x the noise e of x_t = alpha_t x + sigma_t e is Gaussian, and -e is as likely as e. So x_s has
the law of level s wherever x_t had that of level t and q is exact, as with the bridge, which keeps
sigma_s / sigma_t of the noise and draws the rest. They differ where q is not exact. What q takes
for noise by mistake is a part of x, such as the component of a mixture that x_t speaks for. The
bridge carries it on to the next level; here it changes its sign. Mirrored sampling is for few
levels and a covariance that is near the true one: each step is a whole draw of q, so that more
levels do not make up for a poor one, as they do with the bridge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise
from mmdgs.linalg.operators import Diagonal
from mmdgs.moments import Moments
from mmdgs.noise import CLEAN, NoiseLevel, transition
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, randn_like
from mmdgs.samplers.kernel import Info, State, finite

LAST_NOISE = 2.0
"""Grey levels, of 255, that Bao et al. (2022, appendix F) leave in samples of CIFAR-10."""


def grey_levels(count: float, interval: tuple[float, float]) -> float:
    """So many of 255 grey levels as a difference of values in the data's interval."""
    return count * (interval[1] - interval[0]) / 255


@dataclass(frozen=True)
class Ancestral:
    """Ancestral sampling with the covariance of any estimator; at the clean level it gives D.

    `most_noise` bounds the mean absolute value of what a chain's step draws. With `mean_last=False`
    it draws clean data too, as what is to have the spread of the posterior must.
    """

    moments: Moments
    most_noise: float | None = None
    mean_last: bool = True

    def __post_init__(self) -> None:
        if self.most_noise is not None and not self.most_noise >= 0:
            raise ValueError(f"most_noise must be at least 0, got {self.most_noise}")

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        if following == CLEAN and self.mean_last:
            return State(finite(denoise(self.moments.denoiser, state.x, level))), {}
        q = self.moments(state.x, level, generator=generator)
        bridge = q.bridge(state.x, level, following)
        x, info = bridge.sample_with_info(generator=generator)
        if self.most_noise is not None:
            x = bridge.mean + limited(x - bridge.mean, self.most_noise)
        return State(finite(x)), info


def limited(noise: Tensor, most: float) -> Tensor:
    """Noise (B, ...) scaled down, row by row, to a mean absolute value of at most `most`."""
    size = noise.flatten(1).abs().mean(1).clamp(min=torch.finfo(noise.dtype).tiny)
    return noise * (most / size).clamp(max=1).reshape(-1, *[1] * (noise.ndim - 1))


@dataclass(frozen=True)
class FixedVariance:
    """Ancestral sampling with DDPM's fixed variances: small (C = 0), or large (b^2)."""

    denoiser: Denoiser
    large: bool = False

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        mean = denoise(self.denoiser, state.x, level)
        if following == CLEAN:
            return State(finite(mean)), {}
        point = Gaussian(mean, Diagonal(mean.new_zeros(()).expand_as(mean)))
        bridge = point.bridge(state.x, level, following)
        std = transition(following, level)[1] if self.large else bridge.cov.diagonal().sqrt()
        return State(finite(bridge.mean + std * randn_like(mean, generator))), {}


@dataclass(frozen=True)
class Mirrored:
    """A draw of q(x | x_t), and the noise of x_t turned round; at the clean level the draw."""

    moments: Moments

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        q = self.moments(state.x, level, generator=generator)
        x, info = q.sample_with_info(generator=generator)
        if following != CLEAN:
            x = following.alpha * x - (following.sigma / level.sigma) * (state.x - level.alpha * x)
        return State(finite(x)), info
