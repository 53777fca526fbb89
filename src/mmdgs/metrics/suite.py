"""Problems with known posteriors, to judge any sampler: `mmdgs judge --suite SAMPLER.py`.

    mixture      four Gaussians in 6 dimensions, three measured: p(x | y) has several modes
    field        a Gaussian field of 32 places, blurred: p(x | y) is a Gaussian
    piecewise    a piecewise-constant signal of 24 places, measured but for a gap: a new level,
                 N(0, 1), begins at each place with probability 0.15. Draws of p(x | y) are exact by
                 recursion over the last change (Fearnhead, 2006), and so is E[x | x_t].

A sampler's file defines

    def sample(problem, draws, seed):      # -> (draws, N, d), a tensor or an array

with `problem` as below. It knows the measurements and the prior, and not the truth.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmdgs.errors import UsageError, first_line
from mmdgs.metrics import Judgement, judge
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, randn, randn_like, seeded, uniforms
from mmdgs.runtime import progress_bar
from mmdgs.targets import GaussianMixture


@dataclass(frozen=True)
class Problem:
    """y = A x + noise e for N measurements: y (N, m), A (m, d), and the prior of x.

    denoiser(x_t, level) is the exact E[x | x_t] (B, d), differentiable; log_prior(x) is None where
    there is no density (the piecewise-constant signal).
    """

    name: str
    y: Tensor
    matrix: Tensor
    noise: float
    denoiser: Callable[[Tensor, NoiseLevel], Tensor]
    log_prior: Callable[[Tensor], Tensor] | None

    @property
    def cases(self) -> int:
        return len(self.y)

    @property
    def dim(self) -> int:
        return self.matrix.shape[1]


@dataclass(frozen=True)
class Case:
    """A problem, its truth (N, d), and exact draws (S, N, d) by count and generator."""

    problem: Problem
    truth: Tensor
    exact: Callable[[int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Steps:
    """Piecewise-constant signals of d places: a new level, N(0, 1), begins by chance at each."""

    dim: int = 24
    change: float = 0.15

    def sample(self, count: int, generator: Generator) -> Tensor:
        """Signals (count, d)."""
        like = torch.empty(0, dtype=torch.float64)
        new = uniforms((count, self.dim), like, generator) < self.change
        new[:, 0] = True
        levels = randn((count, self.dim), like, generator)
        return levels.gather(1, (new.cumsum(1) - 1))

    def segments(self, y: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log evidence, mean and variance of every segment i..j, (B, d, d), of y (B, d).

        The evidence is relative to that of noise around zero, and has the chance of no change
        inside; -inf for j < i.
        """
        first = torch.cat([y.new_zeros(len(y), 1), (y * precision).cumsum(1)], 1)
        weight = torch.cat([y.new_zeros(1), precision.cumsum(0)])
        total = first[:, None, 1:] - first[:, :-1, None]
        known = 1 + (weight[None, 1:] - weight[:-1, None])
        places = torch.arange(self.dim)
        length = places[None] - places[:, None]
        inside = length >= 0
        known = torch.where(inside, known, 1.0)
        log = 0.5 * (total.square() / known - known.log()) + length.to(y) * math.log1p(-self.change)
        log = torch.where(inside, log, -torch.inf)
        return log, total / known, (1 / known).expand_as(total)

    def forward(self, log: Tensor) -> Tensor:
        """log p of all up to place j - 1, where a segment ends there, (B, d + 1): from the left."""
        sums = [log.new_zeros(len(log))]
        for j in range(self.dim):
            before = torch.stack(sums, 1)  # (B, j + 1): segments that begin at 0 ... j
            chance = before.new_tensor([0.0] + [math.log(self.change)] * j)
            sums.append(torch.logsumexp(before + chance + log[:, : j + 1, j], 1))
        return torch.stack(sums, 1)

    def mean(self, y: Tensor, precision: Tensor) -> Tensor:
        """E[x | y], (B, d), by the chance of every segment."""
        log, means, _ = self.segments(y, precision)
        ahead = self.forward(log)
        back = self.forward(log.flip(1, 2).mT).flip(1)  # back[:, j]: all from place j on
        chance = math.log(self.change)
        starts = ahead[:, :-1] + ahead.new_tensor([0.0] + [chance] * (self.dim - 1))
        ends = back[:, 1:] + ahead.new_tensor([chance] * (self.dim - 1) + [0.0])
        weights = (starts[:, :, None] + log + ends[:, None] - ahead[:, -1, None, None]).exp()
        part = weights * means
        # Place k is in segment i..j where i <= k <= j.
        return torch.stack([part[:, : k + 1, k:].sum((1, 2)) for k in range(self.dim)], 1)

    def draw(self, y: Tensor, precision: Tensor, generator: Generator) -> Tensor:
        """Exact draws of p(x | y), (B, d), from the last segment to the first."""
        log, means, variances = self.segments(y, precision)
        ahead = self.forward(log)
        rows = torch.arange(len(y))
        chance = ahead.new_tensor([0.0] + [math.log(self.change)] * (self.dim - 1))
        x, end = torch.zeros_like(y), torch.full((len(y),), self.dim - 1)
        for j in range(self.dim - 1, -1, -1):
            logits = ahead[:, : j + 1] + chance[: j + 1] + log[:, : j + 1, j]
            u = uniforms((len(y), 1), y, generator)
            start = torch.searchsorted(logits.softmax(1).cumsum(1), u, right=True)[:, 0]
            start, e = start.clamp(max=j), randn((len(y),), y, generator)
            level = means[rows, start, j] + variances[rows, start, j].sqrt() * e
            place = torch.arange(self.dim)
            filled = (end == j)[:, None] & (place >= start[:, None]) & (place <= j)
            x = torch.where(filled, level[:, None], x)
            end = torch.where(end == j, start - 1, end)
        return x

    def denoise(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        """E[x | x_t]."""
        places = torch.ones(self.dim, dtype=x_t.dtype)
        return self.mean(x_t / level.alpha, places / level.variance)


def suite(cases: int, seed: int) -> list[Case]:
    """The problems with so many measurements each."""
    return [_mixture(cases, seed), _field(cases, seed), _piecewise(cases, seed)]


def _of_mixture(
    name: str, prior: GaussianMixture, matrix: Tensor, noise: float, cases: int, seed: int
) -> Case:
    truth = prior.sample(cases, generator=seeded(seed, f"{name} truth"))
    clean = truth @ matrix.mT
    y = clean + noise * randn_like(clean, seeded(seed, f"{name} noise"))
    posterior = prior.given(y, matrix, noise)
    problem = Problem(name, y, matrix, noise, prior.denoiser(), prior.log_prob)
    return Case(problem, truth, lambda count, g: posterior.sample(count, generator=g))


def _mixture(cases: int, seed: int) -> Case:
    generator = seeded(0, "suite mixture")
    means = 2 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    root = 0.4 * torch.randn(4, 6, 6, generator=generator, dtype=torch.float64)
    covariances = root @ root.mT + 0.05 * torch.eye(6, dtype=torch.float64)
    matrix = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    prior = GaussianMixture([0.4, 0.3, 0.2, 0.1], means, covariances)
    return _of_mixture("mixture", prior, matrix, 0.5, cases, seed)


def _field(cases: int, seed: int) -> Case:
    places = torch.arange(32, dtype=torch.float64)
    apart = (places[:, None] - places).abs()
    covariance = (-apart / 6).exp()
    blur = (-0.5 * (apart / 2).square()).exp()
    matrix = (blur / blur.sum(1, keepdim=True))[::2]
    prior = GaussianMixture([1.0], torch.zeros(1, 32, dtype=torch.float64), covariance[None])
    return _of_mixture("field", prior, matrix, 0.1, cases, seed)


def _piecewise(cases: int, seed: int) -> Case:
    steps, noise = Steps(), 0.5
    seen = torch.ones(steps.dim, dtype=torch.bool)
    seen[10:14] = False
    truth = steps.sample(cases, seeded(seed, "piecewise truth"))
    matrix = torch.eye(steps.dim, dtype=torch.float64)[seen]
    clean = truth @ matrix.mT
    y = clean + noise * randn_like(clean, seeded(seed, "piecewise noise"))
    whole, precision = y @ matrix, seen.double() / noise**2

    def exact(count: int, generator: torch.Generator) -> Tensor:
        return steps.draw(whole.repeat(count, 1), precision, generator).unflatten(0, (count, -1))

    return Case(Problem("piecewise", y, matrix, noise, steps.denoise, None), truth, exact)


Sampler = Callable[[Problem, int, int], Tensor | np.ndarray]


def load_sampler(path: Path) -> Sampler:
    """The function `sample` of the user's own Python file, which is run."""
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(f"--suite needs a Python file with sample(problem, draws, seed): {path}")
    try:
        sampler: Sampler | None = runpy.run_path(str(path), run_name=f"_suite_{path.stem}").get(
            "sample"
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{path} failed when it was run: {reason}") from error
    if not callable(sampler):
        raise UsageError(f"{path} must define sample(problem, draws, seed) -> (draws, N, d)")
    return sampler


def sampled(sampler: Sampler, problem: Problem, draws: int, seed: int) -> Tensor:
    """Draws (draws, N, d) of a sampler, checked."""
    try:
        x = torch.as_tensor(sampler(problem, draws, seed)).detach()
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}; --debug shows where"
        raise UsageError(f"the sampler failed on {problem.name}: {reason}") from error
    shape = (draws, problem.cases, problem.dim)
    if x.shape != shape or not x.is_floating_point():
        need = f"floating-point draws {shape} of {problem.name}: (draws, N, d)"
        raise UsageError(f"sample(...) must return {need}; got {x.dtype} {tuple(x.shape)}")
    if not x.isfinite().all():
        raise UsageError(f"the draws of {problem.name} hold numbers that are not finite")
    return x.double().cpu()


def judged_suite(sampler: Sampler, cases: int, draws: int, seed: int) -> dict[str, Judgement]:
    """The judgement of a sampler against truths and exact draws, by the name of the problem."""
    judgements, problems = {}, suite(cases, seed)
    with progress_bar(len(problems), "judging", unit="problem") as bar:
        for case in problems:
            name = case.problem.name
            own = sampled(sampler, case.problem, draws, seed)
            exact = case.exact(draws, seeded(seed, f"{name} exact"))
            judgements[name] = judge(own, case.truth, exact=exact, tasks=len(problems), seed=seed)
            bar.update()
    return judgements
