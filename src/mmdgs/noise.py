"""Noise levels and the forward kernel.

A level says how a clean x was noised: `x_t = alpha x + sigma e` with e standard normal. The paper has
alpha = 1; diffusion models have alpha < 1. Between a cleaner level s and a noisier level t

    x_t = a x_s + b e,    a = alpha_t / alpha_s,    b^2 = sigma_t^2 - a^2 sigma_s^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdgs.randomness import Generator, randn_like


@dataclass(frozen=True, kw_only=True)
class NoiseLevel:
    """How a clean x was noised: x_t = alpha x + sigma e, e standard normal."""

    alpha: float = 1.0
    sigma: float

    def __post_init__(self) -> None:
        for name in ("alpha", "sigma"):
            given = getattr(self, name)
            try:
                value = float(given)
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be a positive number, got {given!r}") from None
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")
            object.__setattr__(self, name, value)

    @property
    def variance(self) -> float:
        """The variance of the noise in the units of x: (sigma / alpha)^2, what a flat prior would leave."""
        return (self.sigma / self.alpha) ** 2

    @property
    def tweedie(self) -> float:
        """sigma^2 / alpha, which turns the denoiser's Jacobian into the posterior covariance."""
        return self.sigma**2 / self.alpha


@dataclass(frozen=True, kw_only=True)
class NoiseLevels:
    """A level for each row of a batch, which training at many levels draws: alpha and sigma (B, 1, ..., 1).

    It stands wherever arithmetic with a `NoiseLevel` broadcasts over rows: denoisers, networks, the DSM loss.
    """

    alpha: Tensor
    sigma: Tensor

    @classmethod
    def of(cls, levels: Sequence[NoiseLevel], like: Tensor) -> NoiseLevels:
        """Levels, one a row, to go with a batch (B, ...) such as `like`."""
        if len(levels) != len(like):
            raise ValueError(f"need one level for each of {len(like)} rows, got {len(levels)}")
        shape = (-1, *[1] * (like.ndim - 1))
        return cls(
            alpha=like.new_tensor([level.alpha for level in levels]).reshape(shape),
            sigma=like.new_tensor([level.sigma for level in levels]).reshape(shape),
        )


AnyLevel = NoiseLevel | NoiseLevels
"""One level for all rows, or one for each."""


def _clean() -> NoiseLevel:
    level = object.__new__(NoiseLevel)
    object.__setattr__(level, "alpha", 1.0)
    object.__setattr__(level, "sigma", 0.0)
    return level


CLEAN = _clean()
"""The level of clean data, x itself: the only level with sigma = 0, and only a place to arrive at or start from."""


def transition(cleaner: NoiseLevel, noisier: NoiseLevel) -> tuple[float, float]:
    """(a, b) of the forward kernel x_t = a x_s + b e from a cleaner level s to a noisier level t."""
    a = noisier.alpha / cleaner.alpha
    variance = noisier.sigma**2 - (a * cleaner.sigma) ** 2
    if variance <= 0:
        raise ValueError(
            f"levels are in the wrong order: {noisier} is not noisier than {cleaner}; "
            "give the cleaner level (smaller sigma / alpha) first"
        )
    return a, math.sqrt(variance)


def add_noise(x: Tensor, level: NoiseLevel | NoiseLevels, *, generator: Generator, start: NoiseLevel = CLEAN) -> Tensor:
    """Draw x_t given x at the cleaner level `start`; x (B, ...) -> x_t (B, ...)."""
    if not x.is_floating_point():
        raise ValueError(f"x must be a floating-point tensor, got {x.dtype}")
    if isinstance(level, NoiseLevels):
        if start != CLEAN:
            raise ValueError("a level for each row starts from clean data")
        return level.alpha * x + level.sigma * randn_like(x, generator)
    a, b = transition(start, level)
    noise = randn_like(x, generator)
    return x.add(noise, alpha=b) if a == 1.0 else a * x + b * noise


def between_levels(ratios: Tensor, values: Tensor, ratio: Tensor) -> Tensor:
    """Positive values (K, ...), known at rising ratios sigma / alpha (K,), taken to others (*shape); (*shape, ...).

    Logarithms are interpolated linearly in log(sigma / alpha); beyond the ends it is as there.
    """
    if len(ratios) == 1:
        return values[0].expand((*ratio.shape, *values.shape[1:]))
    knots, position = ratios.log(), ratio.log().contiguous()
    above = torch.searchsorted(knots, position).clamp(1, len(knots) - 1)
    low, high = knots[above - 1], knots[above]
    share = ((position - low) / (high - low)).clamp(0, 1).reshape((*ratio.shape, *[1] * (values.ndim - 1)))
    return values[above - 1].log().lerp(values[above].log(), share).exp()
