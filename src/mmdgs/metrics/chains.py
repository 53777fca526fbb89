"""Have chains converged? R-hat, effective sample sizes, autocorrelations, and modes visited.

Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), "Rank-normalization, folding, and
localization: an improved R-hat". Each chain is cut into two halves; values are replaced by the
normal quantiles of their ranks among all S,

    z = Phi^-1((rank - 3/8) / (S + 1/4)),      R-hat = sqrt(((n - 1) / n W + B / n) / W)

with the variances W within and B / n between the halves of n steps. The larger of that for x and
for |x - median| counts: the second sees chains that differ in spread alone. No R-hat sees a mode
that no chain has been to: `mode_coverage` does, where the modes are known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

LEAST_STEPS = 4


def _coordinates(chain: Tensor, *, finite: bool = True) -> Tensor:
    """A chain (steps, chains, ...) as (steps, chains, d) in float64, checked."""
    if chain.ndim < 2 or chain.numel() == 0:
        raise ValueError(f"a chain must be (steps, chains, ...), got shape {tuple(chain.shape)}")
    if len(chain) < LEAST_STEPS:
        raise ValueError(f"a chain needs at least {LEAST_STEPS} steps, got {len(chain)}")
    if finite and not torch.isfinite(chain).all():
        raise ValueError("a chain must hold finite numbers")
    return chain.double().reshape(*chain.shape[:2], -1)


def _halves(x: Tensor) -> Tensor:
    """Both halves of each chain side by side, (steps // 2, 2 chains, d)."""
    half = len(x) // 2
    return torch.cat([x[:half], x[-half:]], dim=1)


def _normalised(x: Tensor) -> Tensor:
    """The normal quantiles of the ranks of x (steps, chains, d) in a coordinate; ties share one."""
    flat = x.flatten(0, 1).mT.contiguous()  # (d, S)
    ordered = flat.sort(dim=1).values
    below = torch.searchsorted(ordered, flat)
    up_to = torch.searchsorted(ordered, flat, right=True)
    rank = 0.5 * (below + up_to + 1).double()  # the mean of below + 1 ... up_to
    z = torch.special.ndtri((rank - 0.375) / (flat.shape[1] + 0.25))
    return z.mT.reshape(x.shape)


def _rhat(x: Tensor) -> Tensor:
    n = len(x)
    within, between = x.var(0).mean(0), x.mean(0).var(0)
    return (((n - 1) / n * within + between) / within).sqrt()


def rank_rhat(chain: Float[Tensor, "steps chains ..."]) -> Float[Tensor, " d"]:
    """The rank-normalised split R-hat of each coordinate: near 1 where chains agree."""
    x = _halves(_coordinates(chain))
    middle = x.flatten(0, 1).quantile(0.5, dim=0)
    return torch.maximum(_rhat(_normalised(x)), _rhat(_normalised((x - middle).abs())))


def bulk_sample_sizes(chain: Float[Tensor, "steps chains ..."]) -> Float[Tensor, " d"]:
    """The effective sample size of each coordinate, of ranks (Vehtari's `bulk`); NaN if still."""
    x = _coordinates(chain)
    if len(x) < 2 * LEAST_STEPS:
        raise ValueError(f"sample sizes need at least {2 * LEAST_STEPS} steps, got {len(x)}")
    return torch.tensor(_sample_sizes(_normalised(_halves(x))), dtype=torch.float64)


def effective_sample_size(chain: Float[Tensor, "steps chains ..."]) -> float:
    """The number of independent draws a set of chains is worth, for its worst coordinate.

    steps x chains / tau with the autocorrelation time tau from Geyer's initial monotone sequence
    over the combined chains; the values are used as they are, not their ranks. Between-chain
    variance counts, so chains stuck in different modes score low. NaN where a coordinate is still.
    """
    sizes = _sample_sizes(_coordinates(chain, finite=False))
    return math.nan if any(map(math.isnan, sizes)) else min(sizes)


def _sample_sizes(x: Tensor) -> list[float]:
    n, m = x.shape[:2]
    covariance = _autocovariances(x)
    within = covariance[0].mean(0) * n / (n - 1)
    between = x.mean(0).var(0) if m > 1 else torch.zeros_like(within)
    total = within * (n - 1) / n + between
    rho = 1 - (within - covariance.mean(1) * n / (n - 1)) / total
    rho[0] = 1
    return [_size(rho[:, k], n * m) for k in range(rho.shape[1])]


def _size(rho: Tensor, draws: int) -> float:
    """draws / tau from autocorrelations rho (steps,)."""
    if not torch.isfinite(rho).all():
        return math.nan  # a coordinate that never moves
    pairs = rho[: len(rho) // 2 * 2].reshape(-1, 2).sum(1)
    positive = int((pairs > 0).long().cumprod(0).sum())
    monotone = pairs[:positive].cummin(0).values
    return draws / max(-1 + 2 * monotone.sum().item(), 1 / math.log10(draws))


def _autocovariances(x: Tensor) -> Tensor:
    """The autocovariance of each chain (steps, chains, d) at lags 0 to steps - 1, by FFT."""
    n = len(x)
    size = 1 << (2 * n - 1).bit_length()
    spectrum = torch.fft.rfft(x - x.mean(0), n=size, dim=0)
    return torch.fft.irfft(spectrum.abs().square(), n=size, dim=0)[:n] / n


def autocorrelations(
    chain: Float[Tensor, "steps chains ..."], lags: int
) -> Float[Tensor, "lags d"]:
    """Autocorrelations at lags 0 to lags - 1, averaged over chains, each about its own mean."""
    covariance = _autocovariances(_coordinates(chain)).mean(1)[:lags]
    return covariance / covariance[0]


@dataclass(frozen=True)
class ModeCoverage:
    """Which of the known modes chains have been to."""

    weights: list[float]  # the share of all states in each mode (the nearest)
    expected: list[float]  # what it should be
    missed: list[int]  # the modes that no state is in
    distance: float  # the total variation between weights and expected, 0 to 1
    switches: list[int]  # changes of mode in each chain


def mode_coverage(
    chain: Float[Tensor, "steps chains ..."],
    modes: Float[Tensor, "modes ..."],
    weights: Float[Tensor, " modes"] | None = None,
) -> ModeCoverage:
    """Assign each state to the nearest of the known modes, and compare the shares with `weights`.

    Chains that all sit in one mode have a perfect R-hat; here they miss all others. Without weights
    the modes count as equally likely.
    """
    x = chain.double().reshape(*chain.shape[:2], -1)
    centres = modes.double().reshape(len(modes), -1)
    if centres.shape[1] != x.shape[2]:
        raise ValueError(f"modes of {centres.shape[1]} numbers do not fit states of {x.shape[2]}")
    expected = torch.ones(len(modes)) if weights is None else weights
    expected = expected.double()
    if expected.shape != (len(modes),) or not (expected >= 0).all() or not expected.sum() > 0:
        raise ValueError(f"weights must be {len(modes)} numbers, none negative, got {weights}")
    expected = expected / expected.sum()
    distances = torch.cdist(x, centres.to(x).expand(len(x), -1, -1))
    label = distances.argmin(-1)  # (steps, chains)
    shares = torch.bincount(label.flatten(), minlength=len(modes)).double().cpu() / label.numel()
    missed = ((shares == 0) & (expected > 0)).nonzero().flatten().tolist()
    distance = 0.5 * (shares - expected).abs().sum().item()
    switches = (label[1:] != label[:-1]).sum(0).tolist()
    return ModeCoverage(shares.tolist(), expected.tolist(), missed, distance, switches)
