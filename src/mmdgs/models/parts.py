"""A large image through a network of any size, part by part, as if it went through whole.

A network that looks no farther than its `reach` (pixels) gives the middle of a part what it gives
that place of the whole image: parts are cut with a margin of the reach, and only their cores are
kept, which cover the image. There is nothing to blend and no seam: mean, Jacobian and its products
are those of the whole, but for rounding. Each part is computed again for its products, so memory
is that of one part; margins are computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmdgs.denoisers import Derived
from mmdgs.models import Model
from mmdgs.noise import NoiseLevel

LEAST = 4
"""Least side of a part, in reaches: its core is then half as wide, and margins cost three times as
much again."""


def part_side(model: Model, pixels: float) -> int | None:
    """The side of square parts of at most so many pixels; None where they would be too small, or
    it is not known how far the network looks.
    """
    network = _local(model)
    if network is None:
        return None
    side = math.isqrt(int(pixels)) // network.multiple * network.multiple
    return side if side >= LEAST * network.reach else None


def _local(model: Model) -> Any:
    """The network that knows its reach: a model's own, or inside that of grey or complex images."""
    return next((part for part in model.network.modules() if getattr(part, "reach", None)), None)


@dataclass(frozen=True, eq=False)
class PartedDenoiser(Derived):
    """The denoiser of images (C, height, width) by parts of at most `side` pixels a side."""

    denoiser: Model
    height: int
    width: int
    side: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.denoiser.shape[0], self.height, self.width

    @property
    def interval(self) -> tuple[float, float]:
        return self.denoiser.interval

    @property
    def tiles(self) -> int:
        """How many parts there are."""
        return len(list(self._spans(self.height))) * len(list(self._spans(self.width)))

    def _spans(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Of each part along a side: where it is cut from the image, and its core within it.

        It begins where the network's pyramid does, at a multiple of its coarsest pixel.
        """
        network = _local(self.denoiser)
        multiple: int = network.multiple
        margin = math.ceil(network.reach / multiple) * multiple
        count = math.ceil(size / (self.side - 2 * margin)) if size > self.side else 1
        edges = [round(i * size / count / multiple) * multiple for i in range(count)] + [size]
        for first, last in pairwise(edges):
            start, stop = max(0, first - margin), min(size, last + margin)
            yield slice(start, stop), slice(first - start, last - start)

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        if tuple(x_t.shape[-2:]) != (self.height, self.width):
            size = f"{self.height} x {self.width} images, got {tuple(x_t.shape)}"
            raise ValueError(f"x_t must be {size}")
        again = torch.is_grad_enabled() and x_t.requires_grad

        def core(rows: tuple[slice, slice], columns: tuple[slice, slice]) -> Tensor:
            part = x_t[..., rows[0], columns[0]]
            mean: Tensor = (
                checkpoint(self.denoiser, part, level, use_reentrant=False)
                if again
                else self.denoiser(part, level)
            )
            return mean[..., rows[1], columns[1]]

        return torch.cat(
            [
                torch.cat([core(rows, columns) for columns in self._spans(self.width)], -1)
                for rows in self._spans(self.height)
            ],
            -2,
        )
