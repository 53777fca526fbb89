"""Measures by nearest neighbours, in blocks: precision and recall, diversity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmdgs.metrics.discrepancy import squared_distances

NEIGHBOURS = 3  # the convention of Kynkäänniemi et al. (2019)
NUMBERS = 1 << 22  # distances at a time: 16 MB in float32
ROUNDING = 32
"""Units of rounding, relative to the squared norms, by which squared distances may be off."""


@dataclass(frozen=True)
class PrecisionRecall:
    """The share of samples that lie among the reference, and of the reference among samples."""

    precision: float
    recall: float


def precision_recall(
    samples: Float[Tensor, "n d"], reference: Float[Tensor, "m d"]
) -> PrecisionRecall:
    """Improved precision and recall (Kynkäänniemi et al., 2019).

    A point lies among a set if some point of the set is no further from it than from its own k-th
    nearest neighbour in the set.
    """
    got = f"got {tuple(samples.shape)} and {tuple(reference.shape)}"
    if samples.ndim != 2 or reference.ndim != 2 or samples.shape[1] != reference.shape[1]:
        raise ValueError(f"features must be (n, d) of one dimension, {got}")
    if min(len(samples), len(reference)) <= NEIGHBOURS:
        raise ValueError(f"{NEIGHBOURS} neighbours need more than {NEIGHBOURS} rows, {got}")
    centre = reference.mean(0)  # small numbers keep ||x||^2 + ||y||^2 - 2 x'y accurate
    samples, reference = samples - centre, reference - centre
    return PrecisionRecall(_share_within(samples, reference), _share_within(reference, samples))


def _share_within(points: Tensor, centres: Tensor) -> float:
    """The share of points within the ball of some centre."""
    own = (distances for _, distances in _rows(centres, centres))  # the nearest is the row itself
    radii = torch.cat([distances.kthvalue(NEIGHBOURS + 1).values for distances in own])
    slack = ROUNDING * torch.finfo(points.dtype).eps
    norms, squares = points.square().sum(1, keepdim=True), centres.square().sum(1)
    covered = 0
    for rows, distances in _rows(points, centres):
        limit = radii + slack * (squares + norms[rows])
        covered += int((distances <= limit).any(1).sum())
    return covered / len(points)


def _rows(x: Tensor, y: Tensor, numbers: int = NUMBERS) -> Iterator[tuple[slice, Tensor]]:
    """Some rows of x at a time, with their squared distances to all rows of y."""
    count = max(1, numbers // len(y))
    for first in range(0, len(x), count):
        rows = slice(first, min(first + count, len(x)))
        yield rows, squared_distances(x[rows], y)


@dataclass(frozen=True)
class Diversity:
    """How far images are from their nearest other: root mean square over pixels of 0 to 1."""

    distance: float
    duplicates: float  # the share of images that are identical to another
    count: int


def diversity(images: UInt8[Tensor, "n c h w"]) -> Diversity:
    """The mean distance of an image to the nearest other: it falls where samples collapse.

    It falls with the number of images, too: compare it with that of as many images of the data.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) < 2:
        got = f"{images.dtype} {tuple(images.shape)}"
        raise ValueError(f"need at least 2 uint8 images (n, c, h, w), got {got}")
    levels = images.flatten(1).float()
    centred = levels - levels.mean(0, dtype=torch.float64).float()
    distances = []
    for rows, squares in _rows(centred, centred):
        own = torch.arange(rows.start, rows.stop, device=images.device)
        squares[own - rows.start, own] = torch.inf
        # The product finds the neighbour; the difference is exact for a duplicate.
        apart = levels[rows] - levels[squares.argmin(1)]
        distances.append(apart.square().mean(1, dtype=torch.float64).sqrt() / 255)
    nearest = torch.cat(distances)
    duplicates = (nearest == 0).double().mean().item()
    return Diversity(nearest.mean().item(), duplicates, len(nearest))
