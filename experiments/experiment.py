"""What every experiment is given, and how it ends: records.json, PNG figures and report.html."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from mmdgs.errors import UsageError
from mmdgs.options import option
from mmdgs.report.page import Outcome
from mmdgs.workspace import Workspace

Settings = TypeVar("Settings")
QUICK_NOTE = "The quick version shows that everything runs; its numbers decide no claim."


class TimeIsUp(UsageError):  # noqa: N818 - not an error: a run ends as it was told to
    """The minutes of a run are over; what is finished is kept for --resume."""


@dataclass(frozen=True)
class Context:
    """Where an experiment works, on what, from which seed, and how large. The last fields are
    options of some.
    """

    workspace: Workspace
    device: torch.device
    seed: int = 0
    quick: bool = False
    data_dir: str | None = None  # where image files are; None: MMDGS_DATA or the cache
    settings: Any = None  # in place of the experiment's full or quick ones
    seeds: int | None = option(None, "Independent runs a row.", min=1)
    short_training: bool | None = option(
        None, "Networks trained as --quick trains them.", flag="--short-training"
    )
    data: tuple[str, ...] | None = option(
        None, "Only this data set (mog, rings, roll); may be given again."
    )
    model: str | None = option(None, "A pretrained model in place of the experiment's own.")
    head: str | None = option(
        None, "The model's head, a folder that `mmdgs train --loss ocm` made."
    )
    many: str | None = option(None, "A model of many noise levels beside it.")
    classifier: str | None = option(None, "A classifier, to count the classes of samples.")
    ffdnet: str | None = option(None, "The file of FFDNet's colour weights, ffdnet_color.pth.")
    weights_dir: str | None = option(
        None, "A folder with the files of other people's denoisers, at any depth."
    )
    images: int | None = option(None, "Images a cell.", min=2)
    skip_seeds: int | None = option(
        None, "Leave so many seeds of each row to another run, whose parts --resume adds.", min=1
    )
    minutes: float | None = option(
        None, "Begin no new cell, and no new seed of one, after so long; --resume goes on.", min=0
    )
    only: tuple[str, ...] | None = option(
        None, "Only this row of the table; may be given again.", metavar="ROW"
    )
    case: tuple[str, ...] | None = option(
        None, "Only columns whose name begins so; may be given again.", metavar="NAME"
    )
    started: float = field(default_factory=time.perf_counter)

    def sized(self, full: Settings, quick: Settings) -> Settings:
        """An experiment's settings, full or quick, with the number of images asked for."""
        settings: Settings = self.settings or (quick if self.quick else full)
        if self.images is None:
            return settings
        return replace(settings, images=self.images)  # type: ignore[type-var]

    def check_only(self, rows: Sequence[str]) -> None:
        """Raise UsageError where --only names no row of the table."""
        for name in self.only or ():
            if name not in rows:
                known = "; ".join(rows)
                raise UsageError(f"--only must be a row of the table ({known}), got {name!r}")

    def columns(self, names: Iterable[str]) -> list[str]:
        """The columns that --case names by how they begin, or all; UsageError where none does."""
        every = list(names)
        for start in self.case or ():
            if not any(name.startswith(start) for name in every):
                known = "; ".join(every)
                raise UsageError(f"--case must begin a column's name ({known}), got {start!r}")
        return [name for name in every if self.case is None or name.startswith(self.case)]

    def check_time(self) -> None:
        """Raise TimeIsUp where the minutes are over."""
        if self.minutes is not None and time.perf_counter() - self.started > 60 * self.minutes:
            raise TimeIsUp(f"the {self.minutes:g} minutes are over; --resume goes on from there")


@dataclass(frozen=True)
class Experiment:
    """A table or figure: the module `experiments.NAME`, whose `run` makes it, and the options of
    Context it takes. Its docstring begins with what it shows.
    """

    name: str
    options: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def summary(self) -> str:
        """The first paragraph of the module's docstring, which is read and not imported."""
        source = Path(__file__).with_name(f"{self.module}.py").read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(source)) or ""
        return " ".join(text.partition("\n\n")[0].split())

    @property
    def title(self) -> str:
        return self.summary.partition(": ")[0].removesuffix(".")

    def run(self, context: Context) -> Outcome:
        """Run the experiment's module, which is imported here."""
        outcome: Outcome = import_module(f"experiments.{self.module}").run(context)
        return outcome

    def perform(self, context: Context) -> tuple[Path, Outcome]:
        """Run it and write records.json, the figures and report.html; returns the report's path,
        and the outcome.
        """
        with contextlib.closing(context.workspace) as workspace:
            outcome = self.run(context)
            first, *others = outcome.sections
            notes = [QUICK_NOTE] if context.quick else []
            if outcome.left:
                notes.append(f"Not finished yet; --resume adds: {'; '.join(outcome.left)}.")
            sections = [replace(first, text=[*first.text, *notes]), *others]
            if context.quick:
                sections = [replace(section, claims=()) for section in sections]
            outcome = replace(outcome, sections=sections)
            asked = {"seed": context.seed, "quick": context.quick}
            where = context.device, asked, context.started
            return outcome.write(workspace, self.title, self.summary, *where), outcome
