"""A denoiser of one size at any other: larger images in overlapping tiles, smaller ones padded.

The blend of the tiles' means is itself a denoiser of the whole image,

    D(x_t) = sum_i P_i' W_i D_tile(P_i x_t),    P_i cuts tile i out, the smooth W_i sum to 1

and everything else comes from its Jacobian as ever: one covariance of the whole image, with draws
whose noise tiles share, components that reach over tiles, and nothing to be stitched. The Jacobian
is symmetrised, since W_i J_i is not symmetric. Pixels that a reflection adds are held fixed when it
is differentiated: they are context, not evidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmdgs.denoisers import Denoiser, has_symmetric_jacobian, subtracts_noise
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.noise import NoiseLevel

OVERLAP = 0.25
"""Least share of a tile's side that it has in common with the next one."""
MOST_TILES = 400
AT_ONCE = {"cpu": 12, "cuda": 64}
"""Tiles whose intermediate values are kept; with more, products compute them again."""


def starts(size: int, tile: int) -> list[int]:
    """Where tiles begin along a side: evenly from one end to the other."""
    if size <= tile:
        return [0]
    count = math.ceil((size - tile) / (tile - round(OVERLAP * tile))) + 1
    return [round(i * (size - tile) / (count - 1)) for i in range(count)]


def weights_along(size: int, tile: int) -> Tensor:
    """Smooth weights of each tile along a side, (tiles, size): sin^2 ramps that sum to 1."""
    begins = starts(size, tile)
    weights = torch.zeros(len(begins), size, dtype=torch.float64)
    for i, begin in enumerate(begins):
        end = min(begin + tile, size)
        weights[i, begin:end] = 1
        if i > 0:
            low, high = begin, begins[i - 1] + tile
            weights[i, low:high] *= _ramp(high - low)
        if i + 1 < len(begins):
            low, high = begins[i + 1], end
            weights[i, low:high] *= _ramp(high - low).flip(0)
    return weights / weights.sum(0)


def _ramp(count: int) -> Tensor:
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return (math.pi / 2 * places).sin().square()


@dataclass(frozen=True, eq=False)
class TiledDenoiser:
    """The denoiser of images (C, height, width) that a model of another size makes."""

    model: Model
    height: int
    width: int

    def __post_init__(self) -> None:
        if len(self._places) > MOST_TILES:
            _, h, w = self.model.shape
            raise UsageError(
                f"an image of {self.width} x {self.height} pixels takes {self.tiles:,} tiles of "
                f"{w} x {h}, and the limit is {MOST_TILES}: crop it, or make it smaller"
            )

    @property
    def interval(self) -> tuple[float, float]:
        return self.model.interval

    @property
    def symmetric_jacobian(self) -> bool:
        return len(self._places) == 1 and has_symmetric_jacobian(self.model)

    @property
    def subtracts(self) -> bool:
        return subtracts_noise(self.model)

    @property
    def tiles(self) -> int:
        """How many there are."""
        return len(self._places)

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        _, h, w = self.model.shape
        return [(top, left) for top in starts(self.height, h) for left in starts(self.width, w)]

    @cached_property
    def _weights(self) -> Tensor:
        """(tiles, 1, tile height, tile width)."""
        _, h, w = self.model.shape
        rows, columns = weights_along(self.height, h), weights_along(self.width, w)
        whole = torch.einsum("ih,jw->ijhw", rows, columns).flatten(0, 1)
        places = zip(whole, self._places, strict=True)
        cut = [tile[top : top + h, left : left + w] for tile, (top, left) in places]
        return torch.stack(cut)[:, None]

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        if tuple(x_t.shape[-2:]) != (self.height, self.width):
            raise ValueError(
                f"x_t must be {self.height} x {self.width} images, got {tuple(x_t.shape)}"
            )
        _, h, w = self.model.shape
        x = _reflected(_reflected(x_t, h, -2), w, -1)
        cut = torch.stack([x[..., top : top + h, left : left + w] for top, left in self._places], 1)
        means = self._means(cut.flatten(0, 1), level).unflatten(0, (len(x_t), -1))
        means = means[..., : self.height, : self.width]  # one tile along a side that was padded
        weighted = means * self._weights.to(means)
        whole = torch.zeros_like(x_t)
        for i, (top, left) in enumerate(self._places):
            below = self.height - top - weighted.shape[-2]
            right = self.width - left - weighted.shape[-1]
            whole = whole + torch.nn.functional.pad(weighted[:, i], (left, right, top, below))
        return whole

    def _means(self, x: Tensor, level: NoiseLevel) -> Tensor:
        size = AT_ONCE.get(x.device.type, AT_ONCE["cpu"])
        if len(x) <= size:
            return self.model(x, level)
        again = torch.is_grad_enabled() and x.requires_grad
        parts = [
            checkpoint(self.model, part, level, use_reentrant=False)
            if again
            else self.model(part, level)
            for part in x.split(size)
        ]
        return torch.cat(parts)


def _reflected(x: Tensor, size: int, dim: int) -> Tensor:
    """x with a side filled up by reflection, as often as it takes, without its derivative."""
    own = x.shape[dim]
    if own >= size:
        return x
    period = max(1, 2 * own - 2)
    places = torch.arange(own, size) % period
    places = torch.where(places < own, places, period - places)
    return torch.cat([x, x.detach().index_select(dim, places.to(x.device))], dim)


def fitted_denoiser(model: Model, height: int, width: int) -> Denoiser:
    """A model's denoiser for images of a size: the model itself where they have its own."""
    fits = (height, width) == tuple(model.shape[1:])
    return model if fits else TiledDenoiser(model, height, width)
