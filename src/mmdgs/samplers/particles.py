"""Draws of p(x | y) that are exact in the limit: bridges given y, weighted as particles.

Gaussian moments of p(x | x_t) give the evidence of measurements, p^(y | x_t) = N(y; A m, A C A' +
tau^2), besides the bridge given y. With the evidence as the twisting function of a particle filter
(Wu et al., 2023, take that of the point x = m) and the bridge as its proposal a step has the weight

    w = q(x_s | x_t) / q(x_s | x_t, y)  p^(y | x_s) / p^(y | x_t) = p^(y | x_s) / q(y | x_s, x_t)

by Bayes' rule, where q(y | x_s, x_t) is the evidence under the moments at x_t once x_s was seen:
two Gaussians in the space of y, and none in that of x. With many particles the draws are those of
the chain without measurements, given y, whatever the quality of q; with finer levels those of p(x |
y). The weights are 1 where q is right, and their mean is an unbiased estimate of p(y).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmdgs.linalg.evidence import factored, log_evidence, rows_of, seen
from mmdgs.moments import GivenMoments
from mmdgs.noise import CLEAN, NoiseLevel, transition
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, uniforms
from mmdgs.samplers.kernel import Info, State, finite

RESAMPLED_BELOW = 0.5
"""The effective share of the particles of a run below which they are resampled, unless told.

Where q is wrong for good it must be: with a fitted spectrum of images one particle would carry the
run. Where q has the right moments and the wrong shape, as of mixtures, weights err at the middle
levels and come right again: resampling then throws away what was right, and 0, never, is better.
"""


@dataclass(frozen=True)
class _Weighted(State):
    """Particles (chains, ...) with their log weights, and what the next evidence is held against.

    `log_evidence` is that of the weights that resampling took away, `shares` (chains, steps) the
    effective share of the particles at each step.
    """

    log_weights: Tensor = field(compare=False)
    predicted: Tensor = field(compare=False)
    log_evidence: Tensor = field(compare=False)
    shares: Tensor = field(compare=False)


@dataclass(frozen=True)
class TwistedParticles:
    """Chains given y in runs of `count` particles, neighbouring rows; at the clean level draws.

    The last step draws a particle by its weight in every row: rows of a run are then draws of equal
    weight, though not independent ones. Its info has "log_evidence", an estimate of log p(y) by the
    run, and "effective", (chains, steps): the effective share of the particles. With one particle
    it is the bridge.
    """

    given: GivenMoments
    count: int
    resampled_below: float = RESAMPLED_BELOW

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        x, runs = state.x, len(state.x) // self.count
        if runs * self.count != len(x):
            raise ValueError(f"{len(x)} chains are no runs of {self.count} particles")
        operator, y, variances = self.given.checked
        q = self.given.moments(x, level, generator=generator)
        y, variances = y.to(q.mean), variances.to(q.mean)
        cov = factored(q.mean, q.cov, y, operator, variances)
        none = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        if not isinstance(state, _Weighted):
            state = _Weighted(x, none, none, none, none[:, None][:, :0])
        evidence = log_evidence(q.mean, cov, y, operator, variances)
        weights = (state.log_weights + evidence - state.predicted).view(runs, self.count)
        share = effective_share(weights)
        shares = torch.cat([state.shares, share.repeat_interleave(self.count)[:, None]], 1)
        last = following == CLEAN
        resampled = (share < self.resampled_below) | last
        mean, repaired = q.mean, q.repaired
        if self.count > 1:  # always: what a row draws may not depend on the rows beside it
            u = uniforms((len(x), 1), x, generator)[:, 0].double().view(runs, self.count)
            index = resampled_rows(weights, u if last else u[:, :1], resampled)
            x, mean, cov = x[index], mean[index], rows_of(cov, index)
            repaired = None if repaired is None else repaired[index]
        gained = torch.where(resampled, weights.logsumexp(1) - math.log(self.count), 0.0)
        total = state.log_evidence + gained.repeat_interleave(self.count)
        log_weights = torch.where(resampled[:, None], 0.0, weights).flatten()

        posterior = Gaussian(mean, cov, repaired)  # type: ignore[arg-type]  # no Updated here
        bridge = posterior.given_checked(y, operator, variances).bridge(x, level, following)
        x_s, info = bridge.sample_with_info(generator=generator)
        if last:
            return State(finite(x_s)), {**info, "log_evidence": total, "effective": shares}
        predicted = seen_evidence(self.given, posterior, (x, x_s), (level, following))
        return _Weighted(finite(x_s), log_weights, predicted, total, shares), info


def seen_evidence(
    given: GivenMoments,
    posterior: Gaussian,
    states: tuple[Tensor, Tensor],
    levels: tuple[NoiseLevel, NoiseLevel],
) -> Tensor:
    """log q(y | x_s, x_t), (B,), of the posterior at x_t: x_s = g x + c x_t + sqrt(v) e sees x.

    `states` are x_t and x_s, `levels` theirs; the posterior's covariance is a factored one.
    """
    (x_t, x_s), (level, cleaner) = states, levels
    operator, y, variances = given.checked
    a, b = transition(cleaner, level)
    gain = cleaner.alpha * b**2 / level.sigma**2
    noise = (cleaner.sigma * b / level.sigma / gain) ** 2
    seen_x = (x_s - (a * cleaner.sigma**2 / level.sigma**2) * x_t) / gain
    mean, left = seen(posterior.mean, posterior.cov, seen_x, noise)  # type: ignore[arg-type]
    return log_evidence(mean, left, y.to(mean), operator, variances.to(mean))


def effective_share(weights: Tensor) -> Tensor:
    """The effective share (runs,) of particles with log weights (runs, count): 1 / count to 1."""
    return (2 * weights.logsumexp(1) - (2 * weights).logsumexp(1)).exp() / weights.shape[1]


def resampled_rows(weights: Tensor, u: Tensor, resampled: Tensor) -> Tensor:
    """The rows to go on with, of runs that are resampled: by uniforms u for log weights (runs, n).

    With one u a run (runs, 1) systematic, with one a row (runs, n) each row by itself.
    """
    runs, count = weights.shape
    rows = torch.arange(count, device=u.device)
    places = (rows + u) / count if u.shape[1] == 1 else u
    shares = weights.softmax(1).cumsum(1)
    index = torch.searchsorted(shares.contiguous(), places.contiguous()).clamp(max=count - 1)
    index = torch.where(resampled[:, None], index, rows)
    return (index + count * torch.arange(runs, device=u.device)[:, None]).flatten()
