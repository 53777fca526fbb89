"""Loss curves: how unstable a training run was, in numbers that do not depend on the loss's scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

WINDOW = 200
THRESHOLD = 10.0
MAD_TO_STD = 1.4826
"""A Gaussian's standard deviation is this many median absolute deviations."""


@dataclass(frozen=True)
class Instability:
    """What a loss curve did.

    spikes: the steps whose loss lies more than 10 robust standard deviations above the median of the window before it
    spike_fraction: their number, of all steps that have a whole window before them
    largest_jump: the largest rise above that median, relative to the improvement: first loss less lowest median
    failed_at: the first step with a loss that is not finite, or None; only the steps before it count
    """

    steps: int
    spikes: tuple[int, ...]
    spike_fraction: float
    largest_jump: float
    failed_at: int | None


def running_median(losses: Float[Tensor, " n"], window: int = WINDOW) -> tuple[Tensor, Tensor]:
    """For each step from `window` on, the median and a robust standard deviation of the `window` losses before it.

    The deviation is that of the differences between successive losses, over root two: a falling curve counts as quiet.
    """
    before = losses.double().unfold(0, window, 1)[:-1]
    changes = before.diff(dim=1)
    centred = changes - changes.median(dim=1, keepdim=True).values
    return before.median(dim=1).values, MAD_TO_STD / math.sqrt(2) * centred.abs().median(dim=1).values


def instability(losses: Float[Tensor, " n"], *, window: int = WINDOW, threshold: float = THRESHOLD) -> Instability:
    """How unstable a run was, from the loss of every step; it may end in values that are not finite."""
    if losses.ndim != 1 or window < 2:
        raise ValueError(f"need losses (steps,) and a window of at least 2, got {tuple(losses.shape)}, {window=}")
    bad = (~torch.isfinite(losses)).nonzero().flatten()
    failed_at = int(bad[0]) if len(bad) else None
    finite = losses[:failed_at].double()
    if len(finite) <= window:
        if failed_at is None:
            raise ValueError(f"{len(finite)} losses are too few for a window of {window}")
        return Instability(len(finite), (), 0.0, math.nan, failed_at)
    median, deviation = running_median(finite, window)
    rise = finite[window:] - median
    spikes = (rise > threshold * deviation).nonzero().flatten() + window
    improvement = (finite[0] - median.min()).item()
    jump = max(rise.max().item(), 0.0) / improvement if improvement > 0 else math.inf
    return Instability(len(finite), tuple(spikes.tolist()), len(spikes) / len(rise), jump, failed_at)
