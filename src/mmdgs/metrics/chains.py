"""Diagnostics of Markov chains: effective sample size, and how often a chain changes mode."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


def effective_sample_size(chain: Float[Tensor, "steps chains ..."]) -> float:
    """The number of independent draws a set of chains is worth, for its worst coordinate.

    steps x chains / tau with the autocorrelation time tau from Geyer's initial monotone sequence over the
    combined chains, as in Vehtari et al. (2021), whose `bulk` variant ranks first; here the values are
    used as they are. Between-chain variance counts, so chains stuck in different modes score low. NaN where
    a coordinate never moves.
    """
    if chain.ndim < 2 or chain.numel() == 0:
        raise ValueError(f"a chain must be (steps, chains, ...), got shape {tuple(chain.shape)}")
    n, m = chain.shape[:2]
    x = chain.double().reshape(n, m, -1)
    if n < 4:
        raise ValueError(f"an effective sample size needs at least 4 steps, got {n}")
    centred = x - x.mean(0)
    size = 1 << (2 * n - 1).bit_length()
    spectrum = torch.fft.rfft(centred, n=size, dim=0)
    covariance = torch.fft.irfft(spectrum.abs().square(), n=size, dim=0)[:n] / n  # (n, m, d)
    within = covariance[0].mean(0) * n / (n - 1)
    between = x.mean(0).var(0) if m > 1 else torch.zeros_like(within)
    total = within * (n - 1) / n + between
    rho = 1 - (within - covariance.mean(1) * n / (n - 1)) / total
    rho[0] = 1
    sizes = [_size(rho[:, k], n * m) for k in range(rho.shape[1])]
    return math.nan if any(map(math.isnan, sizes)) else min(sizes)


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
