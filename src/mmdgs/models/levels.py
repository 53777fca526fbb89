"""A network at levels that it was not trained at, by their ratio sigma / alpha.

With another alpha it is the same problem rescaled: D(x_t; alpha, sigma) = D(c x_t; c alpha, c
sigma).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdgs.compiled import Pure
from mmdgs.denoisers import Derived, HasPure
from mmdgs.errors import UsageError
from mmdgs.models.config import check_levels
from mmdgs.noise import AnyLevel, LevelTable, NoiseLevel, NoiseLevels

SAME_PLACE = 1e-3
"""How near to a trained level a place is that level, in steps: rounding leaves less."""
SAME_RATIO = 1e-4
"""How much a ratio sigma / alpha may differ from the one of a single-level model, relatively."""


def in_words(levels: Sequence[NoiseLevel]) -> str:
    """How many noise levels, and from where to where."""
    if not levels:
        return "no noise levels"
    name = "sigma" if all(level.alpha == 1 for level in levels) else "sigma / alpha"
    if len(levels) == 1:
        return f"{name} {levels[0].ratio:.4g}"
    return f"{len(levels)} levels, {name} {levels[0].ratio:.4g} to {levels[-1].ratio:.4g}"


class TrainedLevels:
    """The levels a network was trained at, the noisiest first; alpha and place of any other level.

    A level outside the range counts as the nearest end, and the log says so once.
    """

    def __init__(self, levels: Sequence[NoiseLevel]) -> None:
        check_levels([level.sigma for level in levels], [level.alpha for level in levels])
        self.levels = tuple(levels)
        alphas = {level: level.alpha for level in levels}
        self._alphas = LevelTable.of(alphas, "the network was trained at")

    def place(self, level: AnyLevel) -> float | Tensor:
        """0 at the cleanest trained level, 1 at the next, fractions between."""
        place = self._alphas.place(level)
        if isinstance(place, Tensor):
            return torch.where((place - place.round()).abs() < SAME_PLACE, place.round(), place)
        return float(round(place)) if abs(place - round(place)) < SAME_PLACE else place

    def alpha(self, level: AnyLevel) -> float | Tensor:
        """The alpha that the network was trained with at the ratio of a level."""
        alpha = self._alphas.at(self.place(level))
        return alpha.to(level.alpha) if isinstance(level, NoiseLevels) else alpha


@dataclass(frozen=True)
class AtAnyLevel(Derived):
    """A denoiser at any level: x_t rescaled to the alpha it was trained with at the level's ratio.

    One that was trained at a single level answers at its ratio alone.
    """

    trained: TrainedLevels

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        factor, own = self._own(level)
        return self.denoiser(factor * x_t, own)

    def pure(self, level: AnyLevel) -> Pure | None:
        """For the fast path: the denoiser's own, with the factor before its numbers."""
        factor, own = self._own(level)
        inner = self.denoiser.pure(own) if isinstance(self.denoiser, HasPure) else None
        if inner is None:
            return None
        inside, numbers = inner.function, (factor, *inner.numbers)

        def function(x: Tensor, factor: Any, *rest: Any) -> Tensor:
            return inside(factor * x, *rest)

        return Pure(function, level.alpha, numbers, inner.network, self)

    def mean_and_jacobian(self, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor] | None:
        """In closed form, where the denoiser has one."""
        known = getattr(self.denoiser, "mean_and_jacobian", None)
        factor, own = self._own(level)
        pair = None if known is None else known(factor * x_t, own)
        return None if pair is None else (pair[0], factor * pair[1])

    def _own(self, level: Any) -> tuple[Any, Any]:
        """The factor to rescale x_t by, and the network's level there, for all rows or each."""
        if len(self.trained.levels) == 1:
            (trained,) = self.trained.levels
            off = torch.as_tensor((level.sigma / level.alpha) / trained.ratio - 1).abs().max()
            if off.item() > SAME_RATIO:
                other = f"knows no other sigma / alpha; got {level}: use a model of many levels"
                raise UsageError(f"this model was trained at {trained} alone and {other}")
        alpha = self.trained.alpha(level)
        factor = alpha / level.alpha
        return factor, type(level)(alpha=alpha, sigma=factor * level.sigma)
