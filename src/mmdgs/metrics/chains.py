"""Have chains converged? R-hat and effective sample sizes by rank, autocorrelations, and the modes that were visited.

Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), "Rank-normalization, folding, and localization: an improved
R-hat". Each chain is cut into two halves; values are replaced by the normal quantiles of their ranks among all S,

    z = Phi^-1((rank - 3/8) / (S + 1/4)),      R-hat = sqrt(((n - 1) / n W + B / n) / W)

with the variances W within and B / n between the halves of n steps. The larger of that for x and for |x - median|
counts: the second sees chains that differ in spread alone. No R-hat sees a mode that no chain has been to:
`mode_coverage` does, where the modes are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.metrics.diagnostics import autocovariances, effective_sample_sizes, mode_statistics

LEAST_STEPS = 4


def _coordinates(chain: Tensor) -> Tensor:
    """A chain (steps, chains, ...) as (steps, chains, d) in float64, checked."""
    if chain.ndim < 2 or chain.numel() == 0:
        raise ValueError(f"a chain must be (steps, chains, ...), got shape {tuple(chain.shape)}")
    if len(chain) < LEAST_STEPS:
        raise ValueError(f"a chain needs at least {LEAST_STEPS} steps to be judged, got {len(chain)}")
    if not torch.isfinite(chain).all():
        raise ValueError("a chain must hold finite numbers")
    return chain.double().reshape(*chain.shape[:2], -1)


def _halves(x: Tensor) -> Tensor:
    """Both halves of each chain side by side, (steps // 2, 2 chains, d); the middle step of an odd number is left."""
    half = len(x) // 2
    return torch.cat([x[:half], x[-half:]], dim=1)


def _normalised(x: Tensor) -> Tensor:
    """The normal quantiles of the ranks of x (steps, chains, d) among all numbers of a coordinate; ties share one."""
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
    """The rank-normalised split R-hat of each coordinate, (d,): near 1 where chains agree, NaN where none moves."""
    x = _halves(_coordinates(chain))
    middle = x.flatten(0, 1).quantile(0.5, dim=0)
    return torch.maximum(_rhat(_normalised(x)), _rhat(_normalised((x - middle).abs())))


def bulk_sample_sizes(chain: Float[Tensor, "steps chains ..."]) -> Float[Tensor, " d"]:
    """The effective sample size of each coordinate, of ranks (Vehtari's `bulk`), (d,); NaN where none moves."""
    x = _coordinates(chain)
    if len(x) < 2 * LEAST_STEPS:
        raise ValueError(f"effective sample sizes of halves need at least {2 * LEAST_STEPS} steps, got {len(x)}")
    return torch.tensor(effective_sample_sizes(_normalised(_halves(x))), dtype=torch.float64)


def autocorrelations(chain: Float[Tensor, "steps chains ..."], lags: int) -> Float[Tensor, "lags d"]:
    """Autocorrelations at lags 0 to lags - 1, averaged over chains, (lags, d); each chain about its own mean."""
    covariance = autocovariances(_coordinates(chain)).mean(1)[:lags]
    return covariance / covariance[0]


@dataclass(frozen=True)
class ModeCoverage:
    """Which of the known modes chains have been to.

    weights: the share of all states in each mode (the nearest); expected: what it should be
    missed: the modes that no state is in; distance: the total variation between weights and expected, 0 to 1
    switches: the mean number of changes of mode in a chain
    """

    weights: list[float]
    expected: list[float]
    missed: list[int]
    distance: float
    switches: float


def mode_coverage(
    chain: Float[Tensor, "steps chains ..."],
    modes: Float[Tensor, "modes ..."],
    weights: Float[Tensor, " modes"] | None = None,
) -> ModeCoverage:
    """Assign each state to the nearest of the known modes (K, ...), and compare the shares with `weights` (K,).

    Chains that all sit in one mode have a perfect R-hat; here they miss all others. Without weights the modes count
    as equally likely.
    """
    x, centres = _coordinates(chain), modes.double().reshape(len(modes), -1)
    if centres.shape[1] != x.shape[2]:
        raise ValueError(f"modes of {centres.shape[1]} numbers do not fit states of {x.shape[2]}")
    expected = torch.full((len(modes),), 1 / len(modes)) if weights is None else weights
    expected = expected.double()
    if expected.shape != (len(modes),) or not (expected >= 0).all() or not expected.sum() > 0:
        raise ValueError(f"weights must be {len(modes)} numbers that are not negative, got {weights}")
    expected = expected / expected.sum()
    found = mode_statistics(x, centres)
    shares = torch.tensor(found.weights, dtype=torch.float64)
    missed = ((shares == 0) & (expected > 0)).nonzero().flatten().tolist()
    distance = 0.5 * (shares - expected).abs().sum().item()
    switches = sum(found.switches) / len(found.switches)
    return ModeCoverage(found.weights, expected.tolist(), missed, distance, switches)
