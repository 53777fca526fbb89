"""Noise levels and the forward kernel.

A level says how a clean x was noised: `x_t = alpha x + sigma e` with e standard normal. The paper
has alpha = 1; diffusion models have alpha < 1. Between a cleaner level s and a noisier level t

    x_t = a x_s + b e,    a = alpha_t / alpha_s,    b^2 = sigma_t^2 - a^2 sigma_s^2.

What is fitted by level (variances, spectra, the alphas a network was trained with) is in a
`LevelTable`.
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
    """x_t = alpha x + sigma e, e standard normal: `NoiseLevel(0.2)` has sigma = 0.2."""

    alpha: float = field(default=1.0, kw_only=True)
    sigma: float

    def __post_init__(self) -> None:
        for name in ("alpha", "sigma"):
            value = getattr(self, name)
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be a positive number, got {value!r}") from None
            if not 0 < number < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {number}")
            object.__setattr__(self, name, number)

    @property
    def ratio(self) -> float:
        """sigma / alpha, all that matters to a denoiser: another alpha rescales x_t."""
        return self.sigma / self.alpha

    @property
    def variance(self) -> float:
        """(sigma / alpha)^2: the noise's variance in the units of x, what a flat prior leaves."""
        return (self.sigma / self.alpha) ** 2

    @property
    def tweedie(self) -> float:
        """sigma^2 / alpha, which turns the denoiser's Jacobian into the posterior covariance."""
        return self.sigma**2 / self.alpha


@dataclass(frozen=True, kw_only=True)
class NoiseLevels:
    """A level for each row of a batch, as training draws them: alpha and sigma (B, 1, ..., 1).

    It stands wherever arithmetic with a `NoiseLevel` broadcasts over rows: denoisers, networks, the
    DSM loss.
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


CLEAN: NoiseLevel = object.__new__(NoiseLevel)
"""The level of clean data, x itself: the only one with sigma = 0, to arrive at or start from."""
vars(CLEAN).update(alpha=1.0, sigma=0.0)


def transition(cleaner: NoiseLevel, noisier: NoiseLevel) -> tuple[float, float]:
    """(a, b) of the forward kernel x_t = a x_s + b e from a cleaner to a noisier level."""
    a = noisier.alpha / cleaner.alpha
    variance = noisier.sigma**2 - (a * cleaner.sigma) ** 2
    if variance <= 0:
        raise ValueError(
            f"levels are in the wrong order: {noisier} is not noisier than {cleaner}; "
            "the cleaner one has the smaller sigma / alpha"
        )
    return a, math.sqrt(variance)


def add_noise(
    x: Tensor, level: NoiseLevel | NoiseLevels, *, generator: Generator, start: NoiseLevel = CLEAN
) -> Tensor:
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
    """Values (K, ...) known at rising ratios sigma / alpha, interpolated between: `table[level]`.

    Logarithms are interpolated linearly in log(sigma / alpha); beyond the ends the value is that of
    the end. At a known ratio the value is the known one, exactly. A `known_as` (such as "the
    network was trained at") makes the log say once that a level lies outside the range.
    """

    def __init__(
        self,
        ratios: Tensor | Sequence[float],
        values: Tensor | Sequence[float],
        known_as: str | None = None,
    ) -> None:
        self.ratios = torch.as_tensor(ratios, dtype=torch.float64).cpu()
        self.values = torch.as_tensor(values, dtype=torch.float64).cpu()
        self._known_as = known_as
        if self.ratios.ndim != 1 or self.values.shape[:1] != self.ratios.shape or not len(ratios):
            got = f"{tuple(self.ratios.shape)} and {tuple(self.values.shape)}"
            raise ValueError(f"need ratios (K,) and values (K, ...), K at least 1, got {got}")
        finite = ((self.ratios > 0) & self.ratios.isfinite()).all()
        if not finite or not (self.ratios.diff() > 0).all():
            raise ValueError("the ratios sigma / alpha must be positive, finite and rising")
        for ratio, row in zip(self.ratios, self.values, strict=True):
            if not ((row >= 0) & row.isfinite()).all():
                got = f"{row.min():g} to {row.max():g} at sigma / alpha {ratio:g}"
                raise ValueError(f"values at levels must be finite and none negative, got {got}")
        self._positions: list[float] = self.ratios.log().tolist()
        self._rows: list[Any] = self.values.tolist() if self.values.ndim == 1 else list(self.values)

    def __repr__(self) -> str:
        ends = f"{self.ratios[0]:.4g} to {self.ratios[-1]:.4g}"
        levels = f"{len(self.ratios)} levels, sigma / alpha {ends}"
        return f"LevelTable({levels}, values {tuple(self.values.shape)})"

    @classmethod
    def of(cls, values: Mapping[NoiseLevel, Any], known_as: str | None = None) -> LevelTable:
        """The table of a value, a number or a tensor, for each level."""
        if not values:
            raise ValueError("need a value at one level or more, got none")
        levels = sorted(values, key=lambda level: level.ratio)
        rows = [torch.as_tensor(values[level], dtype=torch.float64) for level in levels]
        return cls([level.ratio for level in levels], torch.stack(rows), known_as)

    def __getitem__(self, level: AnyLevel) -> Any:
        """The value at a level, a float or a tensor (...); for levels of rows (B, 1, ..., 1, ...).

        Of one number a level it has the shape, type and device of `level.sigma`.
        """
        value = self.at(self.place(level))
        return value.to(level.sigma) if isinstance(level, NoiseLevels) else value

    def place(self, level: AnyLevel) -> float | Tensor:
        """Where a level lies among the known ones: 0 at the cleanest, 1 at the next, and so on."""
        last = len(self._positions) - 1
        if isinstance(level, NoiseLevels):
            positions = (level.sigma.double() / level.alpha.double()).log()
            if self._known_as is not None:
                for end in positions.aminmax():
                    self._warn_outside(end.item())
            if last == 0:
                return torch.zeros_like(positions)
            known = torch.tensor(self._positions, dtype=positions.dtype, device=positions.device)
            upper = torch.searchsorted(known, positions.contiguous()).clamp(1, last)
            start, end = known[upper - 1], known[upper]
            return upper - 1 + ((positions - start) / (end - start)).clamp(0, 1)
        position = math.log(level.ratio)
        self._warn_outside(position)
        if last == 0:
            return 0.0
        above = min(max(bisect.bisect_left(self._positions, position), 1), last)
        low, high = self._positions[above - 1 : above + 1]
        return above - 1 + min(max((position - low) / (high - low), 0.0), 1.0)

    def at(self, place: float | Tensor) -> Any:
        """The value at a place, (...); for places (*shape) a tensor (*shape, ...)."""
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
        return all(self._inside(math.log(level.ratio)) for level in levels)

    def _inside(self, position: float) -> bool:
        return self._positions[0] - SAME_LEVEL <= position <= self._positions[-1] + SAME_LEVEL

    def _warn_outside(self, position: float) -> None:
        if self._known_as is not None and not self._inside(position):
            low, high = math.exp(self._positions[0]), math.exp(self._positions[-1])
            ends = (math.exp(position), self._known_as, low, high)
            logger.warning("sigma / alpha of %.4g lies outside what %s, %.4g to %.4g", *ends)
            self._known_as = None  # said once
