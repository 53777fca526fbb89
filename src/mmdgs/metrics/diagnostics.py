"""Diagnostics of runs: effective sample size and changes of mode of chains, instability of loss curves."""

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


def effective_sample_size(chain: Float[Tensor, "steps chains ..."]) -> float:
    """The number of independent draws a set of chains is worth, for its worst coordinate.

    steps x chains / tau with the autocorrelation time tau from Geyer's initial monotone sequence over the
    combined chains, as in Vehtari et al. (2021), whose `bulk` variant ranks first; here the values are
    used as they are. Between-chain variance counts, so chains stuck in different modes score low. NaN where
    a coordinate never moves.
    """
    sizes = effective_sample_sizes(chain)
    return math.nan if any(map(math.isnan, sizes)) else min(sizes)


def effective_sample_sizes(chain: Float[Tensor, "steps chains ..."]) -> list[float]:
    """The same for each coordinate; NaN for one that never moves."""
    if chain.ndim < 2 or chain.numel() == 0:
        raise ValueError(f"a chain must be (steps, chains, ...), got shape {tuple(chain.shape)}")
    n, m = chain.shape[:2]
    x = chain.double().reshape(n, m, -1)
    if n < 4:
        raise ValueError(f"an effective sample size needs at least 4 steps, got {n}")
    covariance = autocovariances(x)
    within = covariance[0].mean(0) * n / (n - 1)
    between = x.mean(0).var(0) if m > 1 else torch.zeros_like(within)
    total = within * (n - 1) / n + between
    rho = 1 - (within - covariance.mean(1) * n / (n - 1)) / total
    rho[0] = 1
    return [_size(rho[:, k], n * m) for k in range(rho.shape[1])]


def autocovariances(x: Float[Tensor, "steps chains d"]) -> Float[Tensor, "steps chains d"]:
    """The autocovariance of each chain at lags 0 to steps - 1, by a Fourier transform; sums are over `steps`."""
    n = len(x)
    size = 1 << (2 * n - 1).bit_length()
    spectrum = torch.fft.rfft(x - x.mean(0), n=size, dim=0)
    return torch.fft.irfft(spectrum.abs().square(), n=size, dim=0)[:n] / n


def _size(rho: Tensor, draws: int) -> float:
    """draws / tau from autocorrelations rho (steps,)."""
    if not torch.isfinite(rho).all():
        return math.nan  # a coordinate that never moves
    pairs = rho[: len(rho) // 2 * 2].reshape(-1, 2).sum(1)
    positive = int((pairs > 0).long().cumprod(0).sum())
    monotone = pairs[:positive].cummin(0).values
    tau = max(-1 + 2 * monotone.sum().item(), 1 / math.log10(draws))
    return draws / tau


@dataclass(frozen=True)
class ModeStatistics:
    """How chains spread over modes: the weight of each, and the number of changes of mode per chain."""

    weights: list[float]
    switches: list[int]


def mode_statistics(chain: Float[Tensor, "steps chains d"], modes: Float[Tensor, "modes d"]) -> ModeStatistics:
    """Assign each state to the nearest mode; weights over all states, and changes of mode in each chain."""
    label = torch.cdist(chain, modes.to(chain).expand(len(chain), -1, -1)).argmin(-1)  # (steps, chains)
    weights = torch.bincount(label.flatten(), minlength=len(modes)).double() / label.numel()
    return ModeStatistics(weights.tolist(), (label[1:] != label[:-1]).sum(0).tolist())


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
