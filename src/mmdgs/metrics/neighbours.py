"""Measures by nearest neighbours, in blocks that bound their memory: precision and recall, diversity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmdgs.metrics.discrepancy import squared_distances

NEIGHBOURS = 3
"""The convention of Kynkäänniemi et al. (2019)."""
BLOCK = 2048
"""A block of 2048 x 2048 float32 distances is 16 MB."""
ROUNDING = 32
"""Units of rounding, relative to the squared norms, by which a squared distance from a product may be off."""


@dataclass(frozen=True)
class PrecisionRecall:
    """The share of samples that lie among the reference, and the share of the reference that samples reach."""

    precision: float
    recall: float


def precision_recall(
    samples: Float[Tensor, "n d"], reference: Float[Tensor, "m d"], *, neighbours: int = NEIGHBOURS
) -> PrecisionRecall:
    """Improved precision and recall (Kynkäänniemi et al., 2019).

    A point lies among a set if some point of the set is no further from it than from its own k-th nearest neighbour
    in the set.
    """
    if samples.ndim != 2 or reference.ndim != 2 or samples.shape[1] != reference.shape[1]:
        raise ValueError(
            f"features must be (n, d) of one dimension, got {tuple(samples.shape)} and {tuple(reference.shape)}"
        )
    if not 1 <= neighbours < min(len(samples), len(reference)):
        raise ValueError(
            f"{neighbours} neighbours need more than {neighbours} rows, got {len(samples)} and {len(reference)}"
        )
    centre = reference.mean(0)  # small numbers keep ||x||^2 + ||y||^2 - 2 x'y accurate
    samples, reference = samples - centre, reference - centre
    return PrecisionRecall(_share_within(samples, reference, neighbours), _share_within(reference, samples, neighbours))


def _share_within(points: Tensor, centres: Tensor, neighbours: int) -> float:
    """The share of points within the ball of some centre."""
    radii = torch.cat([_radii(part, centres, neighbours) for part in centres.split(BLOCK)])
    squares = centres.square().sum(1)
    slack = ROUNDING * torch.finfo(points.dtype).eps
    covered = 0
    for part in points.split(BLOCK):
        inside = torch.zeros(len(part), dtype=torch.bool, device=part.device)
        for first in range(0, len(centres), BLOCK):
            rows = slice(first, first + BLOCK)
            limit = radii[rows] + slack * (squares[rows] + part.square().sum(1)[:, None])
            inside |= (squared_distances(part, centres[rows]) <= limit).any(1)
        covered += int(inside.sum())
    return covered / len(points)


def _radii(part: Tensor, centres: Tensor, neighbours: int) -> Tensor:
    """The squared distance of each row to its k-th nearest other: the nearest of all is the row itself."""
    nearest = torch.empty(len(part), 0, dtype=part.dtype, device=part.device)
    for columns in centres.split(BLOCK):
        candidates = torch.cat([nearest, squared_distances(part, columns)], 1)
        nearest = candidates.topk(min(neighbours + 1, candidates.shape[1]), largest=False).values
    return nearest.max(1).values


@dataclass(frozen=True)
class Diversity:
    """How far images are from their nearest other: root mean square over pixels, white less black being 1.

    `duplicates` is the share of images that are identical to another.
    """

    distance: float
    duplicates: float
    count: int


def diversity(images: UInt8[Tensor, "n c h w"]) -> Diversity:
    """The mean distance of an image to the nearest other one: it falls where samples collapse onto few images.

    It falls with the number of images, too: compare it with that of as many images of the data.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) < 2:
        raise ValueError(f"need at least 2 uint8 images (n, c, h, w), got {images.dtype} {tuple(images.shape)}")
    levels = images.flatten(1)
    centre = levels.sum(0, dtype=torch.float64).div(len(levels)).float()
    distances = []
    for first in range(0, len(levels), BLOCK):
        part = levels[first : first + BLOCK]
        other = _nearest_other(part, first, levels, centre)
        # The product finds the neighbour; its distance comes from the difference, which is exact for a duplicate.
        squares = (part.float() - levels[other].float()).square().mean(1, dtype=torch.float64)
        distances.append(squares.sqrt() / 255)
    found = torch.cat(distances)
    return Diversity(found.mean().item(), (found == 0).double().mean().item(), len(found))


def _nearest_other(part: Tensor, first: int, levels: Tensor, centre: Tensor) -> Tensor:
    """The index of each row's nearest other; `first` is the index of the part's first row."""
    x = part.float() - centre
    best = torch.full((len(part),), torch.inf, device=part.device)
    index = torch.zeros(len(part), dtype=torch.long, device=part.device)
    own = torch.arange(first, first + len(part), device=part.device)
    for start in range(0, len(levels), BLOCK):
        columns = levels[start : start + BLOCK].float() - centre
        squares = squared_distances(x, columns)
        squares[own[:, None] == torch.arange(start, start + len(columns), device=part.device)] = torch.inf
        nearest = squares.min(1)
        closer = nearest.values < best
        best = torch.where(closer, nearest.values, best)
        index = torch.where(closer, nearest.indices + start, index)
    return index
