"""Noise levels and the forward kernel.

A level says how a clean x was noised: `x_t = alpha x + sigma e` with e standard normal. The paper has
alpha = 1; diffusion models have alpha < 1. Between a cleaner level s and a noisier level t

    x_t = a x_s + b e,    a = alpha_t / alpha_s,    b^2 = sigma_t^2 - a^2 sigma_s^2.

What is fitted by level (variances, spectra, the alphas a network was trained with) is in a `LevelTable`.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmdgs.randomness import Generator, randn_like

logger = logging.getLogger("mmdgs")

SAME_LEVEL = 1e-3
"""How far apart in log(sigma / alpha) two levels may lie by rounding alone."""


@dataclass(frozen=True)
class NoiseLevel:
    """How a clean x was noised: x_t = alpha x + sigma e, e standard normal. `NoiseLevel(0.2)` has sigma = 0.2."""

    alpha: float = field(default=1.0, kw_only=True)
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
    def ratio(self) -> float:
        """sigma / alpha, on which alone it depends what a level asks of a denoiser: another alpha rescales x_t."""
        return self.sigma / self.alpha

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


class LevelTable:
    """Values (K, ...) known at rising ratios sigma / alpha, and interpolated between them: `table[level]`.

    Logarithms are interpolated linearly in log(sigma / alpha); beyond the ends the value is that of the end. At a known
    ratio the value is the known one, exactly. A `known_as` (such as "the network was trained at") makes the log say
    once that a level lies outside the range.
    """

    def __init__(
        self, ratios: Tensor | Sequence[float], values: Tensor | Sequence[float], known_as: str | None = None
    ) -> None:
        self.ratios = torch.as_tensor(ratios, dtype=torch.float64).cpu()
        self.values = torch.as_tensor(values, dtype=torch.float64).cpu()
        self._known_as = known_as
        shapes = f"{tuple(self.ratios.shape)} and {tuple(self.values.shape)}"
        if self.ratios.ndim != 1 or not len(self.ratios) or self.values.shape[:1] != self.ratios.shape:
            raise ValueError(f"need ratios (K,) and as many values (K, ...), K at least 1, got {shapes}")
        if not ((self.ratios > 0) & self.ratios.isfinite()).all() or not (self.ratios.diff() > 0).all():
            raise ValueError("the ratios sigma / alpha must be positive and finite, and rise from one to the next")
        for ratio, row in zip(self.ratios, self.values, strict=True):
            if not ((row >= 0) & row.isfinite()).all():
                raise ValueError(
                    f"the values at levels must be finite, and none negative; got {row.min():g} to {row.max():g} at "
                    f"sigma / alpha {ratio:g}"
                )
        self._positions: list[float] = self.ratios.log().tolist()
        self._rows: list[Any] = self.values.tolist() if self.values.ndim == 1 else list(self.values)

    def __repr__(self) -> str:
        ends = f"{self.ratios[0]:.4g} to {self.ratios[-1]:.4g}"
        return f"LevelTable({len(self.ratios)} levels, sigma / alpha {ends}, values {tuple(self.values.shape)})"

    @classmethod
    def of(cls, values: Mapping[NoiseLevel, Any], known_as: str | None = None) -> LevelTable:
        """The table of a value, a number or a tensor, for each level."""
        if not values:
            raise ValueError("need a value at one level or more, got none")
        levels = sorted(values, key=lambda level: level.ratio)
        rows = [torch.as_tensor(values[level], dtype=torch.float64) for level in levels]
        return cls([level.ratio for level in levels], torch.stack(rows), known_as)

    def __getitem__(self, level: AnyLevel) -> Any:
        """The value at a level: a float or a tensor (...); for a level each row (B, 1, ...), with values (...) after.

        Of one number a level it has the shape, type and device of `level.sigma`.
        """
        found = self.at(self.place(level))
        return found.to(level.sigma) if isinstance(level, NoiseLevels) else found

    def place(self, level: AnyLevel) -> float | Tensor:
        """Where a level lies among the known ones: 0 at the cleanest, 1 at the next, fractions between."""
        if isinstance(level, NoiseLevels):
            return self._places((level.sigma.double() / level.alpha.double()).log())
        position = math.log(level.ratio)
        self._warn_outside(position)
        last = len(self._positions) - 1
        if last == 0:
            return 0.0
        above = min(max(bisect.bisect_left(self._positions, position), 1), last)
        low, high = self._positions[above - 1 : above + 1]
        return above - 1 + min(max((position - low) / (high - low), 0.0), 1.0)

    def at(self, place: float | Tensor) -> Any:
        """The value at a place: a float or a tensor (...), for places (*shape) a tensor (*shape, ...)."""
        last = len(self._rows) - 1
        if not isinstance(place, Tensor):
            below = int(place)
            share: Any = place - below
            return self._rows[below] ** (1 - share) * self._rows[min(below + 1, last)] ** share
        below_each = place.long()
        share = (place - below_each).reshape((*place.shape, *[1] * (self.values.ndim - 1)))
        values = self.values.to(place.device)
        return values[below_each] ** (1 - share) * values[(below_each + 1).clamp(max=last)] ** share

    def covers(self, levels: Sequence[NoiseLevel]) -> bool:
        """Whether no level lies outside the known range, by more than rounding."""
        low, high = self._positions[0] - SAME_LEVEL, self._positions[-1] + SAME_LEVEL
        return all(low <= math.log(level.ratio) <= high for level in levels)

    def _places(self, positions: Tensor) -> Tensor:
        if self._known_as is not None:
            for end in positions.aminmax():
                self._warn_outside(end.item())
        last = len(self._positions) - 1
        if last == 0:
            return torch.zeros_like(positions)
        known = torch.tensor(self._positions, dtype=positions.dtype, device=positions.device)
        above = torch.searchsorted(known, positions.contiguous()).clamp(1, last)
        low, high = known[above - 1], known[above]
        return above - 1 + ((positions - low) / (high - low)).clamp(0, 1)

    def _warn_outside(self, position: float) -> None:
        low, high = self._positions[0], self._positions[-1]
        if self._known_as is None or low - SAME_LEVEL <= position <= high + SAME_LEVEL:
            return
        ends = (math.exp(position), self._known_as, math.exp(low), math.exp(high))
        logger.warning("sigma / alpha of %.4g lies outside what %s, %.4g to %.4g", *ends)
        self._known_as = None  # said once
