"""What every experiment is given, and how it ends: records.json, PNG figures and report.html."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmdgs.errors import UsageError
from mmdgs.options import option
from mmdgs.runtime import environment

if TYPE_CHECKING:
    import torch

    from mmdgs.lab.report import Report, Section, Step
    from mmdgs.lab.workspace import Workspace

Settings = TypeVar("Settings")


class TimeIsUp(UsageError):  # noqa: N818 - not an error: a run ends as it was told to
    """The minutes of a run are over; what is finished is kept for --resume."""


@dataclass(frozen=True)
class Context:
    """Where an experiment works, on what, from which seed, and how large. The last fields are options of some."""

    workspace: Workspace
    device: torch.device
    seed: int = 0
    quick: bool = False
    data_dir: str | None = None  # where image files are; None: MMDGS_DATA or the cache
    seeds: int | None = option(None, "Independent runs a row.", min=1)
    short_training: bool | None = option(None, "Networks trained as --quick trains them.", flag="--short-training")
    data: tuple[str, ...] | None = option(None, "Only this data set (mog, rings, roll); may be given again.")
    model: str | None = option(None, "A pretrained model in place of the experiment's own.")
    head: str | None = option(None, "The model's head, a folder that `mmdgs train --loss ocm` made.")
    many: str | None = option(None, "A model of many noise levels beside it.")
    classifier: str | None = option(None, "A classifier, to count the classes of samples.")
    images: int | None = option(None, "Images a cell.", min=2)
    most_images: int | None = option(None, "Images of the rows that have more seeds than others, at most.", min=2)
    skip_seeds: int | None = option(
        None, "Of these rows, leave so many seeds to another run; --resume puts the parts of both together.", min=1
    )
    minutes: float | None = option(
        None, "Begin no new cell, and no new seed of one, after so long; --resume goes on.", min=0
    )
    only: tuple[str, ...] | None = option(None, "Only this row of the table; may be given again.", metavar="ROW")
    case: tuple[str, ...] | None = option(
        None, "Only columns whose name begins so; may be given again.", metavar="NAME"
    )
    started: float = field(default_factory=time.perf_counter)

    def sized(self, full: Settings, quick: Settings) -> Settings:
        """An experiment's settings, full or quick, with the number of images where one is asked for."""
        chosen = quick if self.quick else full
        return chosen if self.images is None else replace(chosen, images=self.images)  # type: ignore[type-var]

    def check_only(self, rows: Sequence[str]) -> None:
        """Raise UsageError where --only names no row of the table."""
        for name in self.only or ():
            if name not in rows:
                raise UsageError(f"--only must be a row of the table ({'; '.join(rows)}), got {name!r}")

    def columns(self, names: Iterable[str]) -> list[str]:
        """Those of some columns that --case names by how they begin, or all; UsageError where one begins none."""
        every = list(names)
        for start in self.case or ():
            if not any(name.startswith(start) for name in every):
                raise UsageError(f"--case must begin a column's name ({'; '.join(every)}), got {start!r}")
        return [name for name in every if self.case is None or name.startswith(self.case)]

    def check_time(self) -> None:
        """Raise TimeIsUp where the minutes are over."""
        if self.minutes is not None and time.perf_counter() - self.started > 60 * self.minutes:
            raise TimeIsUp(f"the {self.minutes:g} minutes are over; --resume goes on from there")


@dataclass(frozen=True)
class Outcome:
    """What an experiment found: JSON-ready numbers, the sections that show them, the takeaway, and what to try next."""

    records: dict[str, Any]
    sections: list[Section]
    takeaway: str = ""
    following: Sequence[Step] = ()
    left: Sequence[str] = ()  # cells that --resume goes on with


@dataclass(frozen=True)
class Experiment:
    """A table or figure: the module `mmdgs.lab.NAME`, whose `run` makes it, and the options of Context it takes."""

    name: str
    title: str
    summary: str
    options: tuple[str, ...] = ()

    def run(self, context: Context) -> Outcome:
        """Run the experiment's module, which is imported here."""
        outcome: Outcome = import_module(f"mmdgs.lab.{self.name.replace('-', '_')}").run(context)
        return outcome

    def perform(self, context: Context) -> tuple[Path, Report]:
        """Run it and write records.json, the figures and report.html; returns the report's path, and the report."""
        with contextlib.closing(context.workspace):
            return self.write(context, self.run(context))

    def write(self, context: Context, outcome: Outcome) -> tuple[Path, Report]:
        """Write what was found; returns the report's path, and the report."""
        from mmdgs.lab.report import Report

        taken = round(time.perf_counter() - context.started, 1)
        asked = {"seed": context.seed, "quick": context.quick, "seconds_of_this_run": taken}
        settings = environment(context.device) | asked
        report = Report(self.title, self.summary, outcome.sections, settings, outcome.takeaway, outcome.following)
        whole = {
            "title": self.title,
            "environment": report.settings,
            "figures": [f"{figure.name}.png" for section in outcome.sections for figure in section.figures],
            "claims": [asdict(claim) for section in outcome.sections for claim in section.claims],
            **outcome.records,
        }
        path = report.write(context.workspace)
        context.workspace.write_json("records.json", whole)
        return path, report
