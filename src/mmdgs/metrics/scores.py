"""Scores of features and classes: kernel distance, Inception score, balance of classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmdgs.randomness import seeded

SUBSETS, SUBSET_SIZE = 100, 1000  # the convention of Bińkowski et al. (2018)
SPLITS = 10  # the convention of Salimans et al. (2016)


@dataclass(frozen=True)
class Spread:
    """A number measured on parts of some size: its mean and (population) standard deviation."""

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
    """The KID of Bińkowski et al. (2018): unbiased squared MMD with k(x, y) = (x'y / d + 1)^3.

    Over random subsets, drawn without replacement, no larger than the smaller set; sets that are
    both one subset are taken as they are, once.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"features must be (n, d) of one dimension, got {shapes}")
    size = min(subset_size, len(a), len(b))
    if size < 2 or subsets < 1:
        raise ValueError(f"need a subset of 2 rows or more, got {size} rows, {subsets=}")
    if size == len(a) == len(b):
        subsets = 1  # there is nothing to draw: all would be alike
    generator = seeded(seed, "subsets")

    def part(x: Tensor) -> Tensor:
        return x[torch.randperm(len(x), generator=generator)[:size].to(x.device)]

    values = [_unbiased(part(a), part(b)) for _ in range(subsets)]
    return _spread(torch.tensor(values, dtype=torch.float64), size)


def _spread(values: Tensor, size: int) -> Spread:
    return Spread(values.mean().item(), values.std(correction=0).item(), len(values), size)


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

    Between 1 (all rows alike) and the number of classes. Shuffle rows that are sorted.
    """
    n = len(probabilities)
    if probabilities.ndim != 2 or not 1 <= splits <= n:
        got = tuple(probabilities.shape)
        raise ValueError(f"need at least {splits} rows of probabilities (n, classes), got {got}")
    scores = []
    for i in range(splits):
        p = probabilities[i * n // splits : (i + 1) * n // splits].double()
        marginal = p.mean(0)
        whole = torch.special.xlogy(marginal, marginal).sum()
        scores.append((torch.special.xlogy(p, p).sum(1).mean() - whole).exp())
    return _spread(torch.stack(scores), n // splits)


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
