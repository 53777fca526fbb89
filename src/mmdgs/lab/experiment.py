"""What every experiment is given, and how it ends: records.json, PNG figures and report.html."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from mmdgs.lab.report import Report, Section
from mmdgs.lab.workspace import Workspace
from mmdgs.runtime import environment

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Context:
    """Where an experiment works, on what, from which seed, and how large."""

    workspace: Workspace
    device: torch.device
    seed: int = 0
    seeds: int | None = None
    quick: bool = False
    datasets: tuple[str, ...] | None = None
    data_dir: str | None = None  # where image files are; none: MMDGS_DATA or the cache
    model: str | None = None  # a pretrained model in place of the experiment's own
    head: str | None = None  # of that model: a folder that `mmdgs train --loss ocm` made
    many: str | None = None  # a model of many noise levels beside one of a single level
    classifier: str | None = None  # a model of classes, to count those of samples
    images: int | None = None  # samples a cell, in place of the experiment's own number
    minutes: float | None = None  # after which no new cell, and no new seed of one, is begun
    only: tuple[str, ...] | None = None  # rows of the table, in place of all
    started: float = field(default_factory=time.perf_counter)

    def sized(self, full: Settings, quick: Settings) -> Settings:
        """An experiment's settings, full or quick, with the number of images where one is asked for."""
        chosen = quick if self.quick else full
        return chosen if self.images is None else replace(chosen, images=self.images)  # type: ignore[type-var]

    @property
    def time_is_up(self) -> bool:
        return self.minutes is not None and time.perf_counter() - self.started > 60 * self.minutes


@dataclass(frozen=True)
class Outcome:
    """What an experiment found: JSON-ready numbers, and the sections that show them."""

    records: dict[str, Any]
    sections: list[Section]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    name: str
    title: str
    summary: str
    run: Callable[[Context], Outcome]


def conclude(context: Context, title: str, summary: str, outcome: Outcome) -> tuple[Path, Report]:
    """Write records.json, the figures and report.html; returns the path of the report, and the report."""
    asked = {"seed": context.seed, "quick": context.quick}
    taken = {"seconds_of_this_run": round(time.perf_counter() - context.started, 1)}
    made = environment(context.device) | asked | taken
    report = Report(title, summary, outcome.sections, made)
    report.write(context.workspace)
    figures = [f"{figure.name}.png" for section in outcome.sections for figure in section.figures]
    whole = {"title": title, "environment": made, "figures": figures, **outcome.records}
    context.workspace.write_json("records.json", whole)
    return context.workspace.out / "report.html", report
