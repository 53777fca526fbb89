"""Exact chains for a clean density that is known up to a constant, by a Metropolis step.

A step at a level draws x_t ~ N(alpha x, sigma^2 I), which leaves the joint law p(x) p(x_t | x) as
it is, and then x' ~ q(x' | x_t) from a Gaussian of any estimator. With probability

    min(1, p(x') p(x_t | x') q(x | x_t) / (p(x) p(x_t | x) q(x' | x_t)))

x' is the next state, else x stays (Metropolis-Hastings). The chain leaves p invariant whatever q
is: a poor one costs acceptance, not exactness. Probes that q draws are fine, since they do not
depend on x once x_t is given.

Chen et al. (2024, "Diffusive Gibbs Sampling") take q = N(x_t / alpha, (sigma / alpha)^2 I), then
Langevin steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmdgs.errors import NonFiniteError, UsageError
from mmdgs.linalg.given import Given
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.lowrank import LowRank
from mmdgs.linalg.operators import Covariance
from mmdgs.moments import Moments
from mmdgs.noise import CLEAN, NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, uniforms
from mmdgs.samplers.kernel import Info, State, finite

LogDensity = Callable[[Tensor], Tensor]
"""log p(x) up to a constant: x (B, ...) -> (B,)."""


@dataclass(frozen=True)
class _Evaluated(State):
    """A state whose log density is known already, and of which density it is."""

    log_density: Tensor = field(compare=False)
    of: LogDensity = field(compare=False)


@dataclass(frozen=True)
class MetropolisGibbs:
    """Gibbs with a Metropolis step: leaves the density exp(log_density) invariant.

    `log_density` maps x (B, ...) to (B,), up to a constant; -inf is a density of zero, NaN and +inf
    are refused. A step takes one posterior and one log density (two in the first).
    `info["accepted"]` is 1 where x' was taken: its average over a run is the acceptance rate of
    each chain.
    """

    moments: Moments
    log_density: LogDensity

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        if following != CLEAN:
            raise ValueError(f"the density is that of clean data; got a step to {following}")
        x = state.x
        if isinstance(state, _Evaluated) and state.of == self.log_density:
            here = state.log_density
        else:
            here = log_density_at(self.log_density, x, "at the start")
            if torch.isneginf(here).any():
                chains = torch.isneginf(here).nonzero().flatten().tolist()
                advice = "it is -inf: start chains where the density is positive"
                raise NonFiniteError("log density", chains, advice=advice)
        x_t = add_noise(x, level, generator=generator)
        q = self.moments(x_t, level, generator=generator)
        require_exact_draws(q.cov)
        drawn, info = q.sample_with_info(generator=generator)
        there = log_density_at(self.log_density, finite(drawn), "at a proposed state")
        ratio = there - here + _weight(x, x_t, level, q) - _weight(drawn, x_t, level, q)
        accepted = uniforms((len(x), 1), x, generator)[:, 0].double().log() < ratio
        kept = torch.where(accepted.reshape(-1, *[1] * (x.ndim - 1)), drawn, x)
        after = _Evaluated(kept, torch.where(accepted, there, here), self.log_density)
        return after, {"accepted": accepted.to(x.dtype), **info}


def log_density_at(log_density: LogDensity, x: Tensor, where: str) -> Tensor:
    """log p(x) in float64, (B,): of the right shape, not NaN and not +inf."""
    density = log_density(x)
    if not isinstance(density, Tensor) or density.shape != x.shape[:1]:
        got = tuple(density.shape) if isinstance(density, Tensor) else type(density).__name__
        raise ValueError(f"log_density must return a tensor ({len(x)},), one a row, got {got}")
    bad = torch.isnan(density) | torch.isposinf(density)
    if bad.any():
        rows = bad.nonzero().flatten().tolist()
        advice = f"it is {density[rows[0]].item():g} {where}; return -inf where the density is zero"
        raise NonFiniteError("log density", rows, advice=advice)
    return density.detach().double()


def require_exact_draws(cov: Covariance) -> None:
    """Refuse a covariance whose draws do not follow its own density, which the step needs."""
    inner = cov.prior if isinstance(cov, Given) else cov
    iterated = isinstance(cov, Given) and cov.solver.logdet() is None
    along_draws = isinstance(inner, LowRank) and not inner.fixed
    if iterated or along_draws or (isinstance(inner, Krylov) and not inner.exact):
        raise UsageError(
            "MetropolisGibbs needs the density of its proposal, which a Krylov covariance, one of "
            "low rank along draws, or one given measurements by iteration knows only nearly; use "
            "FullMoments, DiagonalMoments, SpectralMoments, or LowRankMoments(along_draws=False)"
        )


def _weight(x: Tensor, x_t: Tensor, level: NoiseLevel, q: Gaussian) -> Tensor:
    """log q(x | x_t) - log p(x_t | x) but for a constant, in float64; (B,)."""
    error = (x_t.double() - level.alpha * x.double()).flatten(1).square().sum(1)
    return q.log_prob(x).double() + error / (2 * level.sigma**2)
