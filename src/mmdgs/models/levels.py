"""A network at levels that it was not trained at, by their ratio sigma / alpha.

With another alpha it is the same problem rescaled: D(x_t; alpha, sigma) = D(c x_t; c alpha, c sigma).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdgs.compiled import Pure
from mmdgs.denoisers import Denoiser, HasPure, has_symmetric_jacobian, subtracts_noise
from mmdgs.errors import UsageError
from mmdgs.models.config import check_levels
from mmdgs.noise import AnyLevel, LevelTable, NoiseLevel, NoiseLevels

SAME_PLACE = 1e-3
"""How near to a trained level a place is that level itself, in steps between levels: rounding leaves less."""
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
    """The levels a network was trained at, the noisiest first, with the alpha and the place of any other.

    A level outside the range counts as the nearest end, and the log says so once.
    """

    def __init__(self, levels: Sequence[NoiseLevel]) -> None:
        check_levels([level.sigma for level in levels], [level.alpha for level in levels])
        self.levels = tuple(levels)
        self._alphas = LevelTable.of({level: level.alpha for level in levels}, "the network was trained at")

    def place(self, level: AnyLevel) -> float | Tensor:
        """0 at the cleanest trained level, 1 at the next, fractions between; near a trained level its place."""
        place = self._alphas.place(level)
        if isinstance(place, Tensor):
            return torch.where((place - place.round()).abs() < SAME_PLACE, place.round(), place)
        return float(round(place)) if abs(place - round(place)) < SAME_PLACE else place

    def alpha(self, level: AnyLevel) -> float | Tensor:
        """The alpha that the network was trained with at the ratio of a level."""
        found = self._alphas.at(self.place(level))
        return found.to(level.alpha) if isinstance(level, NoiseLevels) else found


@dataclass(frozen=True)
class AtAnyLevel:
    """A denoiser at any level: x_t rescaled to the alpha that it was trained with at the level's ratio.

    One that was trained at a single level answers at its ratio alone.
    """

    denoiser: Denoiser
    trained: TrainedLevels

    @property
    def symmetric_jacobian(self) -> bool:
        return has_symmetric_jacobian(self.denoiser)

    @property
    def subtracts(self) -> bool:
        return subtracts_noise(self.denoiser)

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        factor, own = self._own(level)
        return self.denoiser(factor * x_t, own)

    def pure(self, level: AnyLevel) -> Pure | None:
        """For the fast path: the denoiser's own, with the factor before its numbers."""
        factor, own = self._own(level)
        inner = self.denoiser.pure(own) if isinstance(self.denoiser, HasPure) else None
        if inner is None:
            return None
        function = inner.function
        return Pure(
            lambda x, f, *rest: function(f * x, *rest), level.alpha, (factor, *inner.numbers), inner.network, self
        )

    def mean_and_jacobian(self, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor] | None:
        """In closed form, where the denoiser has one."""
        known = getattr(self.denoiser, "mean_and_jacobian", None)
        factor, own = self._own(level)
        found = None if known is None else known(factor * x_t, own)
        return None if found is None else (found[0], factor * found[1])

    def _own(self, level: Any) -> tuple[Any, Any]:
        """The factor to rescale x_t by, and the network's level there: for all rows, or for each."""
        if len(self.trained.levels) == 1:
            self._require_same_ratio(level)
        alpha = self.trained.alpha(level)
        factor = alpha / level.alpha
        return factor, type(level)(alpha=alpha, sigma=factor * level.sigma)

    def _require_same_ratio(self, level: AnyLevel) -> None:
        (own,) = self.trained.levels
        off = torch.as_tensor((level.sigma / level.alpha) / own.ratio - 1).abs().max().item()
        if off > SAME_RATIO:
            raise UsageError(
                f"this model was trained at {own} alone and knows no other sigma / alpha; got {level}: "
                "use a model of many levels"
            )
