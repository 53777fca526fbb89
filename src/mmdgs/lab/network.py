"""Every table of the docs that names one network of CIFAR-10: its experiments, the cheapest first.

    mmdgs reproduce network --model cifar10 --out runs/network --minutes 25
    mmdgs reproduce network --model cifar10 --out runs/network --minutes 25 --resume      # again, until nothing is open

Each experiment has a folder of its own below --out, as `mmdgs reproduce NAME` makes it, named as the record of the docs
that takes its cells. They share one clock: after --minutes none begins a cell, and each shows what it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmdgs.lab import EXPERIMENTS, calibration
from mmdgs.lab.documents import are_cells
from mmdgs.lab.experiment import Context, Outcome, TimeIsUp
from mmdgs.lab.report import Section, Step
from mmdgs.lab.workspace import Workspace
from mmdgs.tables import Table

MODEL = "cifar10"
MOST_IMAGES = 50_000
"""Of the rows of Table 2 that have more seeds: the paper's number."""

NAMED = 3
"""Open cells that the table names."""


@dataclass(frozen=True)
class Job:
    """An experiment with options of its Context, whose cells docs/records/RECORD.json takes."""

    record: str
    experiment: str
    given: Mapping[str, Any] = field(default_factory=dict)
    case: str | None = None  # columns whose name begins with the model's and this
    seed: int = 0  # more than the context's
    others: tuple[str, ...] = ()  # further records that take its cells
    accelerator: bool = False  # left out on a CPU


JOBS = (
    Job("covariances", "covariances", others=("modulated",)),
    Job(
        "calibration", "calibration", {"only": (calibration.ISOTROPIC, calibration.SPECTRAL, calibration.PROBED)},
        case="", seed=1,
    ),
    Job("few-steps", "few-steps"),
    Job(
        "calibration_h200", "calibration", {"only": (calibration.KRYLOV, calibration.FULL_ROW, calibration.EXACT)},
        case=" 1", seed=1, accelerator=True,
    ),
    Job("inverse", "inverse"),
    Job("table2", "table2"),
)  # fmt: skip
"""With the seeds and rows of the docs."""


def run(context: Context) -> Outcome:
    """Perform every job until the time is up; say what is finished and what is open."""
    jobs = [one for one in JOBS if not one.accelerator or context.device.type != "cpu"]
    found = [{"row": one.record, **_performed(one, context)} for one in jobs]
    table = Table(
        "Experiments of one network",
        ["record", "finished cells", "open"],
        [[one["row"], f"{one['cells']:,}", _few(one["open"])] for one in found],
    )
    unfinished = [one["row"] for one in found if one["open"]]
    takeaway = f"Open, for --resume: {', '.join(unfinished)}." if unfinished else "Every experiment is finished."
    taken = {name: one.record for one in jobs for name in (one.record, *one.others)}
    ready = [one["row"] for one in found if one["cells"]]
    places = " ".join(f"--from {name}={context.workspace.out / job}" for name, job in taken.items() if job in ready)
    steps = (
        [Step(f"reproduce tables --out . --anew {places}", "takes what is finished into the docs")] if places else []
    )
    left = [f"{one['row']}: {name}" for one in found for name in one["open"]]
    records = {"settings": {"model": context.model or MODEL}, "experiments": found}
    return Outcome(records, [Section("What is finished", tables=[table])], takeaway, steps, left)


def _few(names: Sequence[str]) -> str:
    """The first of the open cells, and how many more there are; all of them are in records.json."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return "; ".join(names[:NAMED]) + more or "nothing"


def _performed(job: Job, context: Context) -> dict[str, Any]:
    """A job in its own folder: how many cells are finished, and which are open."""
    chosen, resumed = EXPERIMENTS[job.experiment], context.workspace.resumed
    model = context.model or MODEL
    most = context.most_images or (None if context.quick else MOST_IMAGES)
    own: dict[str, Any] = {
        "model": model, "seed": context.seed + job.seed, "most_images": most,
        "case": None if job.case is None else (f"{model}{job.case}",),
    }  # fmt: skip
    workspace = Workspace(context.workspace.out / job.record, overwrite=not resumed, resume=resumed)
    with contextlib.closing(workspace):
        inside = replace(context, workspace=workspace, **own, **job.given)
        try:
            outcome = chosen.run(inside)
        except TimeIsUp:
            return {"cells": 0, "open": ["all of it"]}
        chosen.write(inside, outcome)
    cells = sum(len(one) for one in outcome.records.values() if are_cells(one))
    return {"cells": cells, "open": list(outcome.left)}
