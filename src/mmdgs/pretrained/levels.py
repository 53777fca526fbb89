"""The levels a network was trained at, as a scale on which any level has a place.

What a level asks of a denoiser depends on the ratio sigma / alpha alone: with another alpha it is the same problem
rescaled, D(x_t; alpha, sigma) = D(c x_t; c alpha, c sigma). So log(sigma / alpha) is the scale.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmdgs.models import check_levels
from mmdgs.noise import NoiseLevel, NoiseLevels

logger = logging.getLogger("mmdgs")

SAME = 1e-3
"""How near to a trained level a place is that level itself, in steps between levels: rounding leaves less."""


class LevelScale:
    """Places of levels among the trained ones: 0 at the cleanest, 1 at the next, fractions between.

    A level outside the range gets the place of the nearest end, and the log says so once.
    """

    def __init__(self, levels: Sequence[NoiseLevel]) -> None:
        """`levels` as trained, the noisiest first."""
        check_levels([level.sigma for level in levels], [level.alpha for level in levels])
        self.levels = tuple(levels)
        self.log_ratios = [math.log(level.sigma / level.alpha) for level in reversed(self.levels)]
        self.log_alphas = [math.log(level.alpha) for level in reversed(self.levels)]
        self._warned = False

    def place(self, level: NoiseLevel | NoiseLevels) -> float | Tensor:
        """The place of a level; for a level each row a float64 tensor of their shape."""
        if isinstance(level, NoiseLevels):
            return self._places((level.sigma.double() / level.alpha.double()).log())
        position = math.log(level.sigma / level.alpha)
        above = bisect.bisect(self.log_ratios, position)
        if above == 0 or above == len(self.log_ratios):
            self._warn(position)
            return float(max(0, above - 1))
        low, high = self.log_ratios[above - 1 : above + 1]
        place = above - 1 + (position - low) / (high - low)
        return float(round(place)) if abs(place - round(place)) < SAME else place

    def alpha(self, level: NoiseLevel | NoiseLevels) -> float | Tensor:
        """The alpha that goes with the ratio of a level where the network was trained; log alpha is interpolated."""
        place, last = self.place(level), len(self.log_alphas) - 1
        if isinstance(level, NoiseLevels) and isinstance(place, Tensor):
            table = place.new_tensor(self.log_alphas)
            rows = place.long()
            return table[rows].lerp(table[(rows + 1).clamp(max=last)], place - rows).exp().to(level.alpha)
        below = int(place)
        start, end = self.log_alphas[below], self.log_alphas[min(below + 1, last)]
        return math.exp(start + (place - below) * (end - start))

    def _places(self, positions: Tensor) -> Tensor:
        table = torch.tensor(self.log_ratios, dtype=torch.float64, device=positions.device)
        if len(table) == 1:
            return torch.zeros_like(positions)
        for end in (positions.min(), positions.max()):
            self._warn(end.item())
        above = torch.searchsorted(table, positions.contiguous()).clamp(1, len(table) - 1)
        low, high = table[above - 1], table[above]
        places = (above - 1 + (positions - low) / (high - low)).clamp(0, len(table) - 1)
        return torch.where((places - places.round()).abs() < SAME, places.round(), places)

    def _warn(self, position: float) -> None:
        """Say once that a level lies outside the trained range, by more than rounding."""
        low, high = self.log_ratios[0], self.log_ratios[-1]
        if self._warned or low - SAME <= position <= high + SAME:
            return
        self._warned = True
        logger.warning(
            "sigma / alpha of %.4g lies outside what the network was trained at, %.4g to %.4g",
            math.exp(position),
            math.exp(low),
            math.exp(high),
        )
