"""Levy processes, the benchmark of Zach, Haouchat and Unser (2026, arXiv 2509.12821): the gap of
the mean to E[x | y] and the coverage of draws, for six laws of increments and four tasks.

The problems and their numbers are those of `mmdgs judge --suite` (mmdgs/metrics/suite.py, B):
signals of 64 places, noise 25 dB below the median power, E[x | y] and exact draws by Gibbs sampling
(mmdgs/levy.py). The denoiser is that by Gibbs sampling too, with its covariance: what is left of an
error is that of the chains.

    gap        10 log10 |m - x|^2 / |E[x | y] - x|^2 of the mean m of 50 draws, mean over signals,
               in dB: as printed. The mean of 50 exact draws has 10 log10 (1 + 1 / 50) = 0.09
    coverage   of central 90% intervals; theirs is that of regions of highest posterior density
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

from experiments.exact import EXACT, Ours
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results
from mmdgs.metrics.suite import INCREMENTS, SUITE_OF_B, TASKS, Case, Levy
from mmdgs.moments import FullMoments
from mmdgs.randomness import seeded
from mmdgs.report.page import Outcome, Section
from mmdgs.restoration.settings import MULTISTEP
from mmdgs.schedules import edm
from mmdgs.workspace import Part

GAP = Measure("gap", "gap of the mean, dB", 2)
COVERAGE = Measure("coverage", "coverage", 1, percent=True)
EVALUATIONS = Measure("evaluations", "evaluations a draw", 0)
LAST = 0.2  # level, over the noise of the measurements
PUBLISHED = {
    "C-DPS": {"identity": (0.12, 0.12, 2.22, 3.26), "deconvolution": (0.12, 0.12, 4.30, 18.30)},
    "DiffPIR": {"identity": (0.16, 0.09, 0.72, 0.93), "deconvolution": (0.07, 0.07, 1.09, 10.45)},
    "DPnP": {"identity": (0.24, 0.11, 1.33, 1.19), "deconvolution": (0.10, 0.13, 1.71, 7.84)},
}
"""Their gaps in dB with a trained denoiser, for the laws of `OF_THEIRS`."""
OF_THEIRS = ("Gauss", "Laplace", "Bernoulli-Laplace", "Student 1")


def _full(denoiser: Any) -> FullMoments:
    return FullMoments(denoiser, most_products=None)


OURS = {"bridge, full": Ours(_full), "multistep, full": Ours(_full, MULTISTEP)}


@dataclass(frozen=True)
class Settings:
    """Signals, draws of each, levels."""

    signals: int = 12
    draws: int = 50
    levels: int = 10


FULL = Settings()
QUICK = Settings(signals=2, draws=4, levels=3)


def run(context: Context) -> Outcome:
    """Every law on every task, by each method."""
    settings = context.sized(FULL, QUICK)
    every = {f"{law}, {task}": Levy(law, task) for law in INCREMENTS for task in TASKS}
    methods: dict[str, Ours | None] = {EXACT: None, **OURS}
    if context.quick:
        last = SUITE_OF_B[-1]
        every = {f"{last.law}, {last.task}": last}
        methods = dict(list(methods.items())[:2])
    cells = {  # case by case: its E[x | y] takes as long as its draws
        (name, case): (how, every[case])
        for case in context.columns(every)
        for name, how in methods.items()
    }
    results = Grid("levy", cells, partial(_measured, settings=settings), settings, "case")
    measured = results.run(context)
    records = {"settings": asdict(settings), "cells": measured.records(), "published": _published()}
    return Outcome(records, [_section(measured, settings)], left=measured.open())


@lru_cache(maxsize=1)
def _case(levy: Levy, signals: int, seed: int) -> Case:
    return levy.case(signals, seed)


def _measured(cell: Cell, settings: Settings) -> Part:
    method, levy = cell.what
    case = _case(levy, settings.signals, cell.seed)
    if method is None:
        draws, evaluations = case.exact(settings.draws, seeded(cell.seed, EXACT)), 0.0
    else:
        levels = edm(settings.levels, case.problem.noisiest, LAST * case.problem.noise)
        draws, evaluations = method.draws(case.problem, levels, settings.draws, cell.seed)
    return Part(case.numbers(draws) | {"evaluations": evaluations})


def _published() -> list[dict[str, Any]]:
    return [
        {"row": name, "case": f"{law}, {task}", "gap": gap}
        for name, tasks in PUBLISHED.items()
        for task, gaps in tasks.items()
        for law, gap in zip(OF_THEIRS, gaps, strict=True)
    ]


def _section(results: Results, settings: Settings) -> Section:
    text = [
        f"{settings.signals} signals, {settings.draws} draws of each, {settings.levels} levels; "
        "± 95% over signals."
    ]
    tables = [
        results.table(f"{law}: {measure.title}", [measure], head="draws by", columns=own)
        for law in INCREMENTS
        for measure in (GAP, COVERAGE, EVALUATIONS)
        if (own := {c: c for c in results.columns if c.startswith(f"{law},")})
    ]
    return Section("Levy processes", text, tables)
