"""Scores of features and classes: kernel distance, Inception score, and how balanced classes are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmdgs.randomness import seeded

SUBSETS, SUBSET_SIZE = 100, 1000
"""The convention of Bińkowski et al. (2018)."""
SPLITS = 10
"""The convention of Salimans et al. (2016)."""


@dataclass(frozen=True)
class Spread:
    """A number measured on several parts: its mean and (population) standard deviation over them, and their size."""

    mean: float
    std: float
    parts: int
    size: int


def kernel_distance(
    a: Float[Tensor, "n d"],
    b: Float[Tensor, "m d"],
    *,
    subsets: int = SUBSETS,
    subset_size: int = SUBSET_SIZE,
    seed: int = 0,
) -> Spread:
    """The squared MMD with k(x, y) = (x'y / d + 1)^3, unbiased (it may be negative), over random subsets.

    The KID of Bińkowski et al. (2018). Subsets are drawn without replacement, no larger than the smaller
    set; sets that are both one subset are taken as they are, once.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"features must be (n, d) of one dimension, got {tuple(a.shape)} and {tuple(b.shape)}")
    size = min(subset_size, len(a), len(b))
    if size < 2 or subsets < 1:
        raise ValueError(f"need subsets of at least 2 rows, at least one of them, got {size} rows, {subsets=}")
    if size == len(a) == len(b):
        subsets = 1  # there is nothing to draw: all would be alike
    generator = seeded(seed, "subsets")

    def part(x: Tensor) -> Tensor:
        return x[torch.randperm(len(x), generator=generator)[:size].to(x.device)]

    found = torch.tensor([_unbiased(part(a), part(b)) for _ in range(subsets)], dtype=torch.float64)
    return Spread(found.mean().item(), found.std(correction=0).item(), subsets, size)


def _unbiased(x: Tensor, y: Tensor) -> float:
    """The U-statistic: pairs of a row with itself are left out."""
    n, dimension = x.shape

    def kernel(left: Tensor, right: Tensor) -> Tensor:
        return (left @ right.mT / dimension + 1).pow_(3)

    within = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows in (x, y):
        matrix = kernel(rows, rows)
        within += matrix.sum(dtype=torch.float64) - matrix.diagonal().sum(dtype=torch.float64)
    return (within / (n * (n - 1)) - 2 * kernel(x, y).mean(dtype=torch.float64)).item()


def inception_score(probabilities: Float[Tensor, "n classes"], *, splits: int = SPLITS) -> Spread:
    """exp E_x KL(p(y | x) || p(y)), over successive parts of the rows (Salimans et al., 2016).

    Between 1 (all rows alike) and the number of classes. Shuffle rows that are sorted: a part should be like the whole.
    """
    n = len(probabilities)
    if probabilities.ndim != 2 or not 1 <= splits <= n:
        raise ValueError(f"need at least {splits} rows of probabilities (n, classes), got {tuple(probabilities.shape)}")
    scores = []
    for i in range(splits):
        p = probabilities[i * n // splits : (i + 1) * n // splits].double()
        marginal = p.mean(0)
        gain = torch.special.xlogy(p, p).sum(1).mean() - torch.special.xlogy(marginal, marginal).sum()
        scores.append(gain.exp())
    found = torch.stack(scores)
    return Spread(found.mean().item(), found.std(correction=0).item(), splits, n // splits)


def class_shares(labels: Int[Tensor, " n"], classes: int) -> Float[Tensor, " classes"]:
    """The share of each class among labels 0 .. classes - 1, float64."""
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"need labels between 0 and {classes - 1}, at least one")
    return torch.bincount(labels, minlength=classes).double() / len(labels)


def entropy(shares: Float[Tensor, " classes"]) -> float:
    """-sum p log p in nats; log(classes) where all are alike."""
    return torch.special.entr(shares).sum().item()


def total_variation(p: Float[Tensor, " classes"], q: Float[Tensor, " classes"]) -> float:
    """Half the sum of |p - q|: the share that would have to change class."""
    return 0.5 * (p - q).abs().sum().item()
