"""Means kept within the interval where the data lie, as diffusers does (its `clip_sample`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from mmdgs.denoisers import Denoiser, fast_mean
from mmdgs.moments.contract import Moments
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator


@dataclass(frozen=True)
class ClippedDenoiser:
    """D(x_t) clamped to an interval; its Jacobian is zero outside: take covariances of D itself."""

    denoiser: Denoiser
    interval: tuple[float, float]

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        return fast_mean(self.denoiser, x_t, level).clamp(*self.interval)


@dataclass(frozen=True)
class ClippedMoments:
    """An estimator's posterior with its mean clamped to an interval, and its own covariance."""

    moments: Moments
    interval: tuple[float, float]

    @property
    def denoiser(self) -> ClippedDenoiser:
        """The mean alone."""
        return ClippedDenoiser(self.moments.denoiser, self.interval)

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        q = self.moments(x_t, level, generator=generator)
        return replace(q, mean=q.mean.clamp(*self.interval))
