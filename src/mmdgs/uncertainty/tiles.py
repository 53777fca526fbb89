"""A denoiser at the size of an image: whole, in overlapping tiles, or padded.

A model of any size takes an image whole, up to WHOLE pixels and as memory allows. Larger ones go
through it in parts with margins, with the same result (parts.py), or in large tiles where it is not
known how far the network looks, or memory is too small for its margins. A model of a fixed size
takes larger images in tiles of its own, and smaller ones padded by reflection.

The blend of the tiles' means is itself a denoiser of the whole image,

    D(x_t) = sum_i P_i' W_i D_tile(P_i x_t),    P_i cuts tile i out, the smooth W_i sum to 1

and everything else comes from its Jacobian as ever: one covariance of the whole image, with draws
whose noise tiles share, components that reach over tiles, and nothing to be stitched. The Jacobian
is symmetrised, since W_i J_i is not symmetric. Pixels that a reflection adds are held fixed when it
is differentiated: they are context, not evidence.

Memory, in bytes, for images of `pixels` in C channels (`bytes_needed`):

    GRAPH b        for each pixel that goes through a network of any size at once: the image, a part
                   or a tile; SYMMETRISED b in its place where draws take products with the Jacobian
    DERIVATIVES b  for each pixel that components see: a region and its margin
    4 C pixels (ARRAYS + 3 draws + 2 components), and by Krylov spaces 8 C pixels steps

b are the bytes a pixel that one pass keeps (`models.memory.bytes_kept`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmdgs.covariances import Krylov, Spectral
from mmdgs.denoisers import Denoiser, has_symmetric_jacobian, subtracts_noise
from mmdgs.errors import UsageError
from mmdgs.memory import memory_of
from mmdgs.models import Model
from mmdgs.models.memory import bytes_kept
from mmdgs.models.parts import PartedDenoiser, part_side
from mmdgs.noise import NoiseLevel
from mmdgs.uncertainty.settings import PosteriorSettings

OVERLAP = 0.25
"""Least share of a tile's side that it has in common with the next one."""
MOST_TILES = 400
"""Of models of a fixed size."""
WHOLE = 1 << 22
"""Pixels up to which a model of any size takes an image whole: 2048 x 2048."""
TILES = (1024, 512, 256)
"""Sides of the tiles of larger images: the largest that fits in memory."""
GRAPH, SYMMETRISED, DERIVATIVES = 1.75, 6.0, 14.0
"""Times what one pass keeps: of a pass and its products, of symmetrised products, and of three
nested derivatives along a component. `photo` took 1.2 to 1.7, 4.3 and 13.7, and a smaller network
1.6 to 1.95, 4.7 to 6.0 and 13.6: the most is that of 256 x 256 pixels, which fit anywhere."""
ARRAYS = 24
NETWORK = 0.75
"""The share of memory that a network may take; larger images go through it in tiles."""
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
    """The denoiser of images (C, height, width) by tiles: of a model's own size, or of a `side`."""

    model: Model
    height: int
    width: int
    side: int | None = None

    def __post_init__(self) -> None:
        if self.side is None and len(self._places) > MOST_TILES:
            _, h, w = self.model.shape
            raise UsageError(
                f"an image of {self.width} x {self.height} pixels takes {self.tiles:,} tiles of "
                f"{w} x {h}, and the limit is {MOST_TILES}: crop it, make it smaller, or use a "
                "model of any size, such as photo"
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

    @property
    def _sides(self) -> tuple[int, int]:
        """Of a tile: height and width."""
        if self.side is None:
            return self.model.shape[1], self.model.shape[2]
        return min(self.side, self.height), min(self.side, self.width)

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        h, w = self._sides
        return [(top, left) for top in starts(self.height, h) for left in starts(self.width, w)]

    @cached_property
    def _weights(self) -> Tensor:
        """(tiles, 1, tile height, tile width)."""
        h, w = self._sides
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
        h, w = self._sides
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
        size = AT_ONCE.get(x.device.type, AT_ONCE["cpu"]) if self.side is None else 1
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
    """A model's denoiser for images of a size: itself where it takes them whole."""
    if not model.any_size:
        fits = (height, width) == tuple(model.shape[1:])
        return model if fits else TiledDenoiser(model, height, width)
    whole = model.sized(height, width)
    pixels, most = height * width, NETWORK * memory_of(model.device) / (GRAPH * bytes_kept(model))
    if pixels <= min(WHOLE, most):
        return whole
    if (side_of_parts := part_side(model, min(WHOLE, most))) is not None:
        return PartedDenoiser(model, height, width, side_of_parts)
    side = next((side for side in TILES if side**2 <= most), TILES[-1])
    return TiledDenoiser(model, height, width, side)


def bytes_needed(model: Model, shape: Sequence[int], seen: int, settings: PosteriorSettings) -> int:
    """Bytes for the posterior of one image (C, H, W), `seen` pixels of it for its components."""
    channels, height, width = shape
    pixels, network = height * width, 0.0  # of a model of a fixed size, whose tiles are small
    if model.any_size:
        side = getattr(fitted_denoiser(model, height, width), "side", None)
        products = settings.draws and not isinstance(settings.draws_by, Spectral)
        network = (SYMMETRISED if products else GRAPH) * min(pixels, side**2 if side else pixels)
        network += DERIVATIVES * seen if settings.components else 0
        network *= bytes_kept(model)
    arrays = ARRAYS + 3 * (settings.draws or 0) + 2 * (settings.components or 0)
    if settings.draws and isinstance(settings.draws_by, Krylov):
        arrays += 2 * settings.draws_by.steps
    return round(network) + 4 * channels * pixels * arrays


def require_room(
    model: Model, shape: Sequence[int], seen: int, settings: PosteriorSettings
) -> None:
    """Refuse an image (C, H, W) whose posterior does not fit in memory."""
    needed, memory = bytes_needed(model, shape, seen, settings), memory_of(model.device)
    if needed > memory:
        raise UsageError(
            f"{shape[2]} x {shape[1]} pixels need about {needed / 1e9:.1f} GB of memory, and there "
            f"are {memory / 1e9:.1f}: crop the image, make it smaller, take fewer draws, or a "
            "smaller region"
        )
