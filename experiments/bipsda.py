"""Mixtures of BIPSDA (Crafts and Villa, 2025, arXiv 2503.03007): draws of p(x | y) in 10 dimensions
with three modes, by our chains and by azula's and deepinv's solvers.

    inpainting   8 of 10 coordinates measured with noise 0.1 (one mode is left) or 5 (all are)
    X-ray        counts y ~ Poisson(1000 exp(-A (x + 10))) of 15 rays. The solvers have the
                 logarithm, -log(y / 1000) = A (x + 10) + e / sqrt(y), which is linear; exact draws
                 are of the counts' own posterior, by importance resampling

The denoiser is exact. Measured are the distances of means and of variances (norms over coordinates)
from those of other exact draws, the squared MMD with their kernels, and the error of the modes'
weights (total variation). Of rivals the one setting is that with the least CRPS on other trials.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from experiments import rivals
from experiments.exact import EXACT, Other, Ours
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results
from experiments.score_ksd import OTHERS
from mmdgs.metrics import mmd
from mmdgs.metrics.suite import Problem
from mmdgs.moments import FullMoments
from mmdgs.randomness import randn_like, seeded, uniforms
from mmdgs.report.page import Outcome, Section
from mmdgs.restoration.settings import MULTISTEP
from mmdgs.schedules import edm
from mmdgs.targets import GaussianMixture
from mmdgs.workspace import Part

D, RAYS, PHOTONS, OFFSET = 10, 15, 1_000.0, 10.0
SEEN = (0, 1, 2, 4, 5, 6, 7, 9)
TASKS = {"inpainting, 0.1": 0.1, "inpainting, 5": 5.0, "X-ray": 0.0}
BANDWIDTH = {"inpainting, 0.1": 4.9753, "inpainting, 5": 4.9753, "X-ray": 4.3266}
"""Of the middle one of five kernels, as in their code."""
PROPOSALS = 40_000
NOISIEST, LAST, WIDTH = 100.0, 0.01, 5.0
MEAN = Measure("mean", "error of the mean", 3, "less")
VARIANCE = Measure("variance", "error of the variances", 3, "less")
MMD = Measure("mmd", "squared MMD", 4, "less")
MODES = Measure("modes", "error of the modes' weights", 3, "less")
EVALUATIONS = Measure("evaluations", "evaluations a draw", 0)
PUBLISHED = {
    "reference": (0.03, 0.22, 0.07),
    "RTO-TU": (0.06, 4.05, 0.19),
    "MAP-TU (DiffPIR)": (0.95, 1.41, 1.67),
}
"""Their errors of the variances, 10,000 draws, a trained score; in the order of `TASKS`."""


def _full(denoiser: Any) -> FullMoments:
    return FullMoments(denoiser, most_products=None)


OURS = {
    "bridge, full": Ours(_full),
    "multistep, full": Ours(_full, MULTISTEP),
    "bridge, full, 8 particles": Ours(_full, particles=8),
}


@dataclass(frozen=True)
class Settings:
    """Trials, draws of each, levels; a rival's steps, trials and draws of its search."""

    trials: int = 8
    draws: int = 1_000
    levels: int = 25
    steps: int = 64
    tuned_on: int = 4
    tuned_draws: int = 40


FULL = Settings()
QUICK = Settings(trials=2, draws=20, levels=4, steps=4, tuned_on=2, tuned_draws=4)


@cache
def prior() -> GaussianMixture:
    """Modes around -5, 0 and 5; the last one's axes are turned at random."""
    turn = torch.linalg.qr(torch.randn(D, D, generator=seeded(0, "axes")).double()).Q
    stretched = torch.linspace(1, 2, D).double()
    eye, axes = torch.eye(D).double(), torch.diag(stretched)
    covariances = torch.stack([eye, axes, turn.mT @ axes @ turn])
    means = torch.tensor([-5.0, 0.0, 5.0]).double()[:, None].expand(-1, D)
    return GaussianMixture([0.4, 0.3, 0.3], means, 0.5 * (covariances + covariances.mT))


@dataclass(frozen=True)
class Trial:
    """A measurement: the linear problem that solvers have, and counts where there are some."""

    truth: Tensor  # (1, d)
    problem: Problem
    counts: Tensor | None = None

    def exact(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, 1, d) of p(x | y), or of the counts' posterior by resampling."""
        p, linear = self.problem, prior().given(self.problem.y, self.problem.matrix, 1.0)
        if self.counts is None:
            return linear.sample(count, generator=generator)
        x = linear.sample(PROPOSALS, generator=generator)[:, 0]
        rays = rays_matrix()
        likelihood = self.counts * -((x + OFFSET) @ rays.mT)
        likelihood = (likelihood - PHOTONS * (-(x + OFFSET) @ rays.mT).exp()).sum(1)
        gaussian = -0.5 * (p.y - x @ p.matrix.mT).square().sum(1)
        chosen = torch.multinomial(
            (likelihood - gaussian).softmax(0), count, replacement=True, generator=generator
        )
        return x[chosen][:, None]


def rays_matrix() -> Tensor:
    return 0.01 + 0.04 * uniforms((RAYS, D), torch.empty(0).double(), seeded(0, "rays"))


def trials(task: str, count: int, seed: int) -> list[Trial]:
    """Measurements of draws of the prior, in units of their noise."""
    truth, noise = prior().sample(count, generator=seeded(seed, "truth")), TASKS[task]
    if noise > 0:
        a = torch.eye(D).double()[list(SEEN)] / noise
        clean = truth @ a.mT
        y = clean + randn_like(clean, seeded(seed, f"{task} noise"))
        return [Trial(x[None], _problem(task, row, a)) for x, row in zip(truth, y, strict=True)]
    rays, measured = rays_matrix(), []
    counts = torch.poisson(
        PHOTONS * (-(truth + OFFSET) @ rays.mT).exp(), generator=seeded(seed, "photons")
    )
    for x, n in zip(truth, counts.clamp(min=1), strict=True):
        data = -(n / PHOTONS).log() - OFFSET * rays.sum(1)
        problem = _problem(task, n.sqrt() * data, n.sqrt()[:, None] * rays)
        measured.append(Trial(x[None], problem, n))
    return measured


def _problem(task: str, y: Tensor, a: Tensor) -> Problem:
    return Problem(task, y[None], a, 1.0, prior().denoiser(), NOISIEST)


def run(context: Context) -> Outcome:
    """Every method on the three tasks."""
    settings = context.sized(FULL, QUICK)
    methods: dict[str, Any] = {EXACT: None, **OURS}
    if not context.quick:
        installed = (name for name, own in OTHERS.items() if rivals.installed(own))
        methods |= {name: Other(OTHERS[name], settings.steps) for name in installed}
    cells = {(row, task): how for row, how in methods.items() for task in TASKS}
    measure = partial(_measured, settings=settings)
    results = Grid("bipsda", cells, measure, settings, "task").run(context)
    published = [
        {"row": row, "task": task, "variance": number}
        for row, numbers in PUBLISHED.items()
        for task, number in zip(TASKS, numbers, strict=True)
    ]
    records = {"settings": asdict(settings), "cells": results.records(), "published": published}
    return Outcome(records, [_section(results, settings)], left=results.open())


def _measured(cell: Cell, settings: Settings) -> Part:
    method, task, own = cell.what, cell.column, {}
    if isinstance(method, Other):
        own = _tuned(method, task, settings, cell.seed + 1)
    names = (MEAN, VARIANCE, MMD, MODES)
    values: dict[str, Any] = {measure.key: [] for measure in names}
    for number, trial in enumerate(trials(task, settings.trials, cell.seed)):
        seed = cell.seed + 100 * number
        draws, evaluations = _drawn(method, trial, settings.draws, seed, settings, own)
        exact = trial.exact(settings.draws, seeded(seed, "compared"))
        for key, value in compared(draws[:, 0], exact[:, 0], BANDWIDTH[task]).items():
            values[key].append(value)
    return Part(values | {"evaluations": evaluations} | own)


def _drawn(
    method: Any, trial: Trial, count: int, seed: int, settings: Settings, own: dict[str, Any]
) -> tuple[Tensor, float]:
    if method is None:
        return trial.exact(count, seeded(seed, EXACT)), 0.0
    if isinstance(method, Ours):
        return method.draws(trial.problem, edm(settings.levels, NOISIEST, LAST), count, seed)
    draws, evaluations = method.draws(trial.problem, WIDTH, count, seed, own["setting"])
    return draws, evaluations


def _tuned(method: Other, task: str, settings: Settings, seed: int) -> dict[str, Any]:
    others = trials(task, settings.tuned_on, seed)

    def score(setting: float) -> tuple[Tensor, Tensor]:
        known = (WIDTH, settings.tuned_draws, seed, setting)
        each = [method.draws(trial.problem, *known)[0] for trial in others]
        return torch.cat(each, 1), torch.cat([trial.truth for trial in others])

    return rivals.tuned(method.name, score)


def compared(draws: Tensor, exact: Tensor, bandwidth: float) -> dict[str, float]:
    """Distances between two sets of draws (n, d)."""
    edges = torch.tensor([-2.5, 2.5]).to(draws)
    shares = [
        torch.bucketize(x.mean(1), edges).bincount(minlength=3).double() / len(x)
        for x in (draws, exact)
    ]
    return {
        "mean": (draws.mean(0) - exact.mean(0)).norm().item(),
        "variance": (draws.var(0) - exact.var(0)).norm().item(),
        "mmd": mmd(draws, exact, [bandwidth * 2.0**k for k in range(-2, 3)]),
        "modes": 0.5 * (shares[0] - shares[1]).abs().sum().item(),
    }


def _section(results: Results, settings: Settings) -> Section:
    text = [
        f"{settings.draws:,} draws for each of {settings.trials} measurements; ± 95% over these. "
        f"Ours: {settings.levels} levels; others: {settings.steps} steps. Exact draws show what "
        "the number of draws alone does.",
        *rivals.left_out(),
        *rivals.settings_said(results.records()),
    ]
    rows = [row for row in results.rows if row != EXACT]
    measures = (MEAN, VARIANCE, MMD, MODES, EVALUATIONS)
    return Section(
        "BIPSDA's mixtures", text, results.tables(measures, head="draws by", compared=rows)
    )
