"""Draws of problems with known posteriors (mmdgs.metrics.suite), by our chains and others' code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from experiments import rivals
from mmdgs.denoisers import Denoiser
from mmdgs.metrics.suite import Problem
from mmdgs.moments import GivenMoments, Moments
from mmdgs.operators import Matrix
from mmdgs.randomness import child_seed, randn_like, seeded
from mmdgs.restoration.chains import restoration_plan
from mmdgs.restoration.settings import BRIDGE
from mmdgs.samplers import run as run_chains
from mmdgs.schedules import Levels

EXACT = "exact draws"


@dataclass(frozen=True)
class Ours:
    """Chains with a covariance: of the denoiser, by a function that makes the estimator."""

    covariance: Callable[[Denoiser], Moments]
    chains: str = BRIDGE
    particles: int = 1

    def draws(
        self, problem: Problem, levels: Levels, count: int, seed: int
    ) -> tuple[Tensor, float]:
        """Draws (count, N, d), and the evaluations of one: a product with the Jacobian is two."""
        rows = problem.y.repeat(count, 1).repeat_interleave(self.particles, 0)
        moments = self.covariance(problem.denoiser)
        given = GivenMoments(moments, rows, Matrix(problem.matrix), problem.noise)
        plan = restoration_plan(given, levels, self.chains, self.particles)
        noise = randn_like(rows.new_empty(len(rows), problem.dim), seeded(seed, "start"))
        chains = run_chains(plan, levels[0].sigma * noise, seed=seed, progress=None)
        draws = chains.x[:: self.particles].unflatten(0, (count, -1))
        return draws, self.particles * chains.cost.evaluations


@dataclass(frozen=True)
class Other:
    """A rival's code, with one setting for all."""

    name: str
    steps: int = 100

    def draws(
        self, problem: Problem, scale: float, count: int, seed: int, setting: float | None = None
    ) -> tuple[Tensor, float]:
        """As `Ours.draws`; x about as wide as `scale`."""
        counted = rivals.Counted(problem.denoiser)
        case = rivals.Problem(
            counted, problem.y.repeat(count, 1) / scale, Matrix(problem.matrix),
            problem.noise / scale, problem.noisiest / scale, scale=scale,
        )  # fmt: skip
        setting = rivals.DEFAULTS[self.name] if setting is None else setting
        u = case.draw(self.name, self.steps, setting, child_seed(seed, self.name))
        return scale * u.unflatten(0, (count, -1)), counted.cost.evaluations

    def tuned(
        self, problem: Problem, truth: Tensor, scale: float, count: int, seed: int
    ) -> dict[str, Any]:
        """The setting with the least CRPS on a problem that is not judged."""
        return rivals.tuned(
            self.name, lambda setting: (self.draws(problem, scale, count, seed, setting)[0], truth)
        )
