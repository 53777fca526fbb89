"""Posterior fidelity in 16 dimensions, the benchmark of Qiu et al. (2026, arXiv 2602.04189), by our
chains with every covariance and by azula's and deepinv's solvers, beside the printed numbers.

The problems and their numbers are those of `mmdgs judge --suite` (mmdgs/metrics/suite.py, A). One
mode of two is seen by no measurement of A1. Rows have the exact denoiser, or a perceptron that was
trained here. Of rivals the one setting is that with the least CRPS on other measurements (of draws
of the prior) with the exact denoiser; ours have none.

    RMSE         of draws to the one x, over coordinates
    score-KSD    over that of as many exact draws in the same code: what is printed elsewhere can be
                 compared in these units only, since the text leaves details of it open
    mode         share of draws in the mode x_1 + x_2 > 3, which score-KSD does not see
    coverage     share of exact draws in the draws' central 90% intervals, coordinate by coordinate
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments import rivals
from experiments.drawing import legend, plain_logs
from experiments.exact import EXACT, Other, Ours
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results, axis
from mmdgs.denoisers import Denoiser, edm_denoiser
from mmdgs.metrics.suite import CELLS_16, case_16, matrix_16, prior_16
from mmdgs.moments import (
    DiagonalMoments,
    FullMoments,
    IsotropicMoments,
    KrylovMoments,
    LowRankMoments,
    SpectralMoments,
)
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevels
from mmdgs.randomness import randn_like, seeded, uniforms
from mmdgs.report.drawing import labelled, new_figure
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.restoration.settings import MULTISTEP
from mmdgs.runtime import progress_bar
from mmdgs.schedules import edm, geometric
from mmdgs.workspace import Part

LAST, KNOTS, FIT = 0.01, 12, 2_000
NETWORK = ", network"
RMSE = Measure("rmse", "RMSE", 2)
RATIO = Measure("ksd_ratio", "score-KSD over exact draws'", 2, "one")
MODE = Measure("mode", "mode's weight", 3)
COVERAGE = Measure("coverage", "coverage", 1, percent=True)
EVALUATIONS = Measure("evaluations", "evaluations a draw", 0)
PUBLISHED: dict[str, list[tuple[float, float]]] = {
    "posterior reference": [(1.13, 0.35), (1.30, 0.24), (1.17, 1.31), (1.20, 0.64)],
    "MCG-Diff, N runs": [(1.07, 0.28), (1.26, 0.25), (1.10, 1.19), (1.13, 0.44)],
    "DPS": [(1.14, 0.74), (1.23, 0.25), (1.17, 0.50), (1.17, 0.44)],
    "DiffPIR": [(1.20, 0.50), (1.69, 0.99), (1.24, 0.67), (1.25, 0.44)],
    "DDRM": [(1.08, 0.51), (1.29, 0.60), (1.05, 0.73), (1.06, 0.44)],
    "DAPS": [(1.04, 0.64), (1.57, 1.10), (1.10, 0.60), (1.11, 0.48)],
    "FPS, N runs": [(1.27, 0.96), (1.76, 1.20), (0.95, 2.02), (0.98, 0.71)],
    "PnPDM": [(1.19, 1.04), (1.83, 1.61), (0.96, 0.68), (0.97, 0.52)],
    "DDNM": [(1.23, 1.23), (1.86, 2.12), (0.89, 1.46), (0.82, 0.89)],
    "RED-Diff": [(1.11, 1.57), (1.65, 2.14), (0.85, 1.16), (0.86, 1.18)],
}
"""RMSE and score-KSD with the exact score of their tables 1 and 4, in the order of `CELLS_16`."""


@dataclass(frozen=True)
class Settings:
    """Draws of each measurement, levels; a rival's search and the network's training."""

    draws: int = 500
    levels: int = 25
    steps: int = 64
    tuned_on: int = 6
    tuned_draws: int = 40
    width: int = 128
    training: int = 4_000
    rows: int = axis(100)  # of the table, at most


FULL = Settings()
QUICK = Settings(
    draws=40, levels=5, steps=8, tuned_on=2, tuned_draws=4, width=32, training=50, rows=3
)


def _fitted(kind: type[IsotropicMoments] | type[SpectralMoments]) -> Callable[[Denoiser], Any]:
    def fit(denoiser: Denoiser) -> Any:
        x = prior_16().sample(FIT, generator=seeded(0, "fit"))
        levels = geometric(KNOTS, 40.0, LAST)
        return kind.fit(denoiser, x, levels, generator=seeded(0, "fit noise"))

    return fit


def _low_rank(denoiser: Denoiser) -> LowRankMoments:
    return LowRankMoments(denoiser, _fitted(IsotropicMoments)(denoiser), 2)


def _full(denoiser: Denoiser) -> FullMoments:
    return FullMoments(denoiser, most_products=None)


OURS = {
    "bridge, full": Ours(_full),
    "bridge, full, 4 particles": Ours(_full, particles=4),
    "bridge, Krylov, 16 steps": Ours(lambda denoiser: KrylovMoments(denoiser, steps=16)),
    "bridge, low rank, 2 products": Ours(_low_rank),
    "bridge, diagonal": Ours(lambda denoiser: DiagonalMoments(denoiser, probes=None)),
    "bridge, diagonal, 3 probes": Ours(lambda denoiser: DiagonalMoments(denoiser, probes=3)),
    "bridge, spectral": Ours(_fitted(SpectralMoments)),
    "bridge, isotropic": Ours(_fitted(IsotropicMoments)),
    "multistep, full": Ours(_full, MULTISTEP),
    "multistep, spectral": Ours(_fitted(SpectralMoments), MULTISTEP),
}
WITH_NETWORK = ("bridge, full", "multistep, full")
OTHERS = {"MMPS": "MMPS", "PiGDM": "PiGDM", "DPS": "DPS", "DiffPIR": rivals.PIR, "DDRM": "DDRM"}


def run(context: Context) -> Outcome:
    """All four cells, with the exact denoiser and with a network."""
    settings = context.sized(FULL, QUICK)
    network = cache(partial(_network, context, settings))
    methods: dict[str, Any] = {EXACT: None, **OURS}
    others = {n: Other(o, settings.steps) for n, o in OTHERS.items() if rivals.installed(o)}
    methods |= others
    methods |= {name + NETWORK: methods[name] for name in (*WITH_NETWORK, *others)}
    methods = dict(list(methods.items())[: settings.rows])
    names = {f"{matrix}, {noise:g}": (matrix, noise) for matrix, noise in CELLS_16}
    cells = {
        (row, name): (how, names[name])
        for row, how in methods.items()
        for name in names
        # A2 leaves no mode open to particles, and its measurements little to a network.
        if name.startswith("A1") or not ("particles" in row or row.endswith(NETWORK))
    }
    measure = partial(_measured, settings=settings, network=network)
    results = Grid("score-ksd", cells, measure, settings, "case").run(context)
    records = {"settings": asdict(settings), "cells": results.records(), "published": _published()}
    return Outcome(records, [_section(results, settings)], left=results.open())


def _measured(cell: Cell, settings: Settings, network: Callable[[], Denoiser]) -> Part:
    method, (matrix, noise) = cell.what
    denoiser = network() if cell.row.endswith(NETWORK) else None
    case = case_16(matrix, noise, cell.seed, denoiser)
    evaluations, own = 0.0, {}
    if method is None:
        draws = case.exact(settings.draws, seeded(cell.seed, EXACT))
    elif isinstance(method, Ours):
        levels = edm(settings.levels, case.problem.noisiest, LAST)
        draws, evaluations = method.draws(case.problem, levels, settings.draws, cell.seed)
    else:
        own = _tuned(method, matrix, noise, settings, cell.seed + 1)
        known = (settings.draws, cell.seed, own["setting"])
        draws, evaluations = method.draws(case.problem, 1.0, *known)
    return Part(case.numbers(draws) | {"evaluations": evaluations} | own)


@cache
def _tuned(method: Other, matrix: str, noise: float, settings: Settings, seed: int) -> Any:
    """By measurements of draws of the prior, with the exact denoiser."""
    truth = prior_16().sample(settings.tuned_on, generator=seeded(seed, "tuning"))
    clean = truth @ matrix_16(matrix).mT
    y = clean + noise * randn_like(clean, seeded(seed, "tuning noise"))
    problem = replace(case_16(matrix, noise, seed).problem, y=y)
    return method.tuned(problem, truth, 1.0, settings.tuned_draws, seed)


def _network(context: Context, settings: Settings) -> Denoiser:
    """A perceptron's denoiser, trained on draws of the prior at levels of equal ratio."""
    deviation = prior_16().covariance().diagonal().mean().sqrt().item()
    network = MLP(16, 16, width=settings.width, depth=3, conditional=True)

    def compute() -> Part:
        train(network, lambda n, g: prior_16().sample(n, generator=g), deviation, settings.training)
        return Part(tensors=dict(network.state_dict()))

    depends = {"width": settings.width, "steps": settings.training}
    network.load_state_dict(context.workspace.part("network", depends, compute).tensors)
    return edm_denoiser(network.double().requires_grad_(False), data_std=deviation)


def train(
    network: nn.Module, sample: Callable[[int, torch.Generator], Tensor], deviation: float,
    steps: int, ends: tuple[float, float] = (LAST / 2, 60.0), rows: int = 512,
) -> None:  # fmt: skip
    """Denoising score matching with EDM's weights, on fresh draws, by Adam with a cosine rate."""
    generator, denoiser = seeded(0, "training"), edm_denoiser(network, data_std=deviation)
    optimiser = torch.optim.Adam(network.parameters(), 2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    low, high = map(math.log, ends)
    with progress_bar(steps, "training", unit="step") as bar:
        for _ in range(steps):
            x = sample(rows, generator).float()
            sigma = (low + (high - low) * uniforms((rows, 1), x, generator)).exp()
            level = NoiseLevels(alpha=torch.ones_like(sigma), sigma=sigma)
            error = denoiser(x + sigma * randn_like(x, generator), level) - x
            weight = 1 / sigma.square() + 1 / deviation**2
            loss = (weight * error.square()).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            decay.step()
            bar.update()


def _published() -> list[dict[str, Any]]:
    reference = PUBLISHED["posterior reference"]
    return [
        {"row": name, "case": f"{matrix}, {noise:g}", "rmse": rmse, "ksd": ksd,
         "ksd_ratio": ksd / best, "rmse_ratio": rmse / truth}
        for name, numbers in PUBLISHED.items()
        for (matrix, noise), (rmse, ksd), (truth, best) in zip(
            CELLS_16, numbers, reference, strict=True
        )
    ]  # fmt: skip


def _section(results: Results, settings: Settings) -> Section:
    text = [
        f"{settings.draws} draws for each of five measurements of one x; ± 95% over these five. "
        f"Ours: {settings.levels} levels; others: {settings.steps} steps.",
        *rivals.left_out(),
        *rivals.settings_said([{**cell, "task": cell["case"]} for cell in results.records()]),
    ]  # fmt: skip
    tables = results.tables((RMSE, RATIO, MODE, COVERAGE, EVALUATIONS), head="draws by")
    return Section("Posterior fidelity in 16 dimensions", text, tables, [_figure(results)])


LOOKS = {
    "bridge": ("o", "#1f5fa8", "bridge, any covariance"),
    "multistep": ("s", "#2a9d8f", "multistep"),
    EXACT: ("*", "black", EXACT),
    **{name: (marker, "#b5562b", name) for name, marker in zip(OTHERS, "DvPX^", strict=True)},
}
"""Marker, colour and name of a row in the figure, by how its name begins."""


def _figure(results: Results) -> Figure:
    """Coverage against score-KSD, a panel for each cell."""
    canvas, axes = new_figure(1, len(results.columns), inches=(15, 3.6))
    rows = [row for row in results.rows if not row.endswith(NETWORK)]
    for panel, name in zip(axes[0], results.columns, strict=True):
        panel.axhline(90, color="0.75", linewidth=0.8, zorder=0)
        panel.axvline(1, color="0.75", linewidth=0.8, zorder=0)
        for row in (row for row in rows if results.has(row, name)):
            marker, colour, title = LOOKS[row.split(",")[0]]
            x, y = (measure.of(results.values(row, name)).value for measure in (RATIO, COVERAGE))
            look = {"marker": marker, "color": colour, "alpha": 0.8, "linestyle": ""}
            panel.plot([x], [100 * y], label=title, **look)
        panel.set(xscale="log")
        labelled(panel, name, RATIO.title, "coverage of 90% intervals, %", 9)
        plain_logs(panel)
    legend(canvas)
    caption = "Score-KSD over that of exact draws, and coverage; right draws are at the crossing."
    return Figure("score_ksd", caption, canvas)
