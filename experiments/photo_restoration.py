"""Photographs restored: the denoiser of photographs beside the methods of azula and deepinv, on a
folder of images (--data-dir).

    python -m experiments photo-restoration --data-dir photos/val

All rows have the same network in the same precision, the same images of 256 x 256 and the same
number of draws (inverse_networks.py, rivals.py). They are of the second half of the folder by name;
the one setting of each rival is that of the least CRPS on images of the first half, of five values.
A rival takes at most 300 evaluations a draw, a product counted as two: the steps of its library or
paper where they fit. DPIR has no draws: all are alike, and CRPS is the absolute error.

`--case 'SR x2'` and `--only 'DPS (azula)'` measure a part; --resume adds the others.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from experiments import inverse_networks, rivals
from experiments.experiment import Context
from experiments.grid import Grid
from experiments.inverse_networks import (
    LOW_RANK,
    NetworkSettings,
    Ours,
    Restorations,
    Rival,
    section,
)
from experiments.photographs import PHOTO, photographs
from mmdgs.data import spread
from mmdgs.models import load
from mmdgs.report.page import Outcome
from mmdgs.restoration.settings import MULTISTEP

OPERATORS = {
    "SR x2": "sr:2",
    "SR x4": "sr:4",
    "blur 1.6": "blur:1.6",
    "motion 15": "motion:15",
    "70% missing": "random:0.7",
}
TASKS = {f"{name}, noise {n}": (text, n) for name, text in OPERATORS.items() for n in (0.02, 0.05)}
"""Operators and noise, of values in [0, 1]."""
ROWS: dict[str, Ours | Rival] = {
    "spectral, 10 levels": Ours("spectral", 10, chains=MULTISTEP),
    "spectral, 25 levels": Ours("spectral", 25, chains=MULTISTEP),
    "spectral, 25 levels, not inflated": Ours("spectral", 25, chains=MULTISTEP, inflation=1.0),
    **{
        f"low rank, {levels} levels": Ours("low-rank", levels, LOW_RANK, MULTISTEP)
        for levels in (11, 16, 25)
    },
    "low rank, 16 levels, not inflated": Ours("low-rank", 16, LOW_RANK, MULTISTEP, inflation=1.0),
    "DPIR (deepinv)": Rival("DPIR", 8),
    "DiffPIR (deepinv)": Rival("DiffPIR", 100),
    "MMPS (azula)": Rival("MMPS", 10),
    "PiGDM (azula)": Rival("PiGDM", 50),
    "DPS (azula)": Rival("DPS", 100),
}
TRIED = inverse_networks.TRIED | {"MMPS": (1, 2, 3, 5, 8)}
MOST = 10_000  # photographs of a folder
SIDE, QUICK_SIDE = 256, 64
FULL = NetworkSettings(
    images=20, draws=4, rival_batch=40, batch_size=40,
    tuned_on=3, tuned_draws=2, seeds=1, scored=1, rows=tuple(ROWS), tasks=tuple(TASKS), shown=1,
)  # fmt: skip
QUICK = NetworkSettings(
    images=2, draws=4, rival_batch=4, batch_size=4, tuned_on=1, tuned_draws=2,
    seeds=1, scored=1, precision="float32", shown=1,
    rows=("spectral, 10 levels", "DPIR (deepinv)", "MMPS (azula)"), tasks=("SR x2, noise 0.05",),
)  # fmt: skip


def run(context: Context) -> Outcome:
    """Every row on every task."""
    settings = context.sized(FULL, QUICK)
    side = QUICK_SIDE if context.quick else SIDE
    model = load(context.model or PHOTO, device=context.device).sized(side, side)
    halves = photographs(context.data_dir, MOST, side)
    others, truths = (
        torch.stack([*half.values()])[spread(len(half), count)]
        for half, count in zip(halves, (settings.tuned_on, settings.images), strict=True)
    )
    asked = ROWS if context.only else settings.rows
    rows = {row: ROWS[row] for row in asked if rivals.installed(ROWS[row].name)}
    tasks = {task: TASKS[task] for task in context.columns(TASKS)}
    tasks = tasks if context.case else {task: TASKS[task] for task in settings.tasks}
    work = Restorations(context, model, settings, tasks, truths, others, TRIED)
    cells = {(row, task): what for row, what in rows.items() for task in tasks}
    depends = {"model": model, "settings": settings, "images": (truths, others), "tried": TRIED}
    results = Grid("photo", cells, work, depends, "task").run(context)
    named = asdict(settings) | {"model": model.source, "side": side}
    text = [f"{len(truths)} photographs of {side} x {side} pixels. Intervals are over images."]
    text += rivals.left_out("deepinv", "DPIR")
    page = section(work, results, "Photographs restored", text)
    records = {"settings": named, "restored": results.records()}
    return Outcome(records, [page], left=results.open())
