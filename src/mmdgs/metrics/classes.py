"""Balance of classes: shares, their entropy, and the distance between two sets of shares."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
