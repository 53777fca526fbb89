"""`mmdgs reproduce` and `mmdgs demo`: run experiments and show what they found."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from mmdgs.cli.app import (
    INTERRUPTED,
    Debug,
    Device,
    Out,
    Overwrite,
    Quiet,
    Resume,
    Seed,
    app,
    device_named,
    messages,
    needs_lab,
    output,
    plain_errors,
    refuse_idle,
)
from mmdgs.cli.options import options_of
from mmdgs.errors import UsageError
from mmdgs.lab import DEMO, EXPERIMENTS, Context, Experiment, Outcome, experiment
from mmdgs.tables import plain

if TYPE_CHECKING:
    from mmdgs.lab.report import Report

TABLES = "tables"
"""Not an experiment: writes the tables of the docs from what experiments found."""


def _takers(option: str) -> list[str]:
    """The experiments that take an option."""
    return [name for name, one in EXPERIMENTS.items() if option in one.options]


@app.command(
    help="Reproduce a table or figure of the paper: numbers, pictures and a report.\n\n"
    + "\n".join(f"- **{one.name}**: {one.summary}" for one in EXPERIMENTS.values())
    + f"\n- **{TABLES}**: Write the tables of README.md and docs/ from docs/records (--out: the source tree)."
)
@options_of(Context, told=lambda name, text: f"{text} ({', '.join(_takers(name))})")
def reproduce(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"What to make: {', '.join((*EXPERIMENTS, TABLES))}.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the results.", show_default="runs/NAME")
    ] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A small version: shorter training and chains.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where image files are.", envvar="MMDGS_DATA")] = None,
    taken: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="NAME=RUN", help=f"Of {TABLES}: first take a run's cells into a record."),
    ] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help=f"Of {TABLES}: a run's rows keep nothing of an earlier network.")
    ] = False,
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **given: Any,
) -> None:
    with plain_errors(debug):
        if name == TABLES:
            idle = ("quick", "data_dir", "seed", "device", "overwrite", "resume", *given)
            refuse_idle(context, (True, idle, f"experiments, not for {TABLES}"))
            _write_tables(out or Path(), taken or [], anew)
            return
        if taken or anew:
            raise UsageError(f"{'--from' if taken else '--anew'} is for {TABLES}, not for {name}")
        from mmdgs.lab.workspace import Workspace

        chosen = experiment(name)
        given = {key: tuple(dict.fromkeys(one)) if isinstance(one, list) else one for key, one in given.items()}
        for option in given:
            if option not in chosen.options:
                *rest, last = _takers(option)
                names = f"{', '.join(rest)} and {last}" if rest else last
                raise UsageError(f"--{option.replace('_', '-')} is for {names}, not for {name}")
        where = device_named(device)
        workspace = Workspace(out or Path("runs") / name, overwrite=overwrite, resume=resume)
        files = None if data_dir is None else str(data_dir)
        _perform(chosen, Context(workspace, where, seed=seed, quick=quick, data_dir=files, **given))


def _write_tables(root: Path, runs: list[str], anew: bool) -> None:
    with needs_lab():
        from mmdgs.lab.documents import take, write_tables

        for one in runs:
            record, _, run = one.partition("=")
            if not run:
                raise UsageError(f"--from must be NAME=RUN, such as table2=runs/table2, got {one!r}")
            output.print(f"{take(root, record, Path(run), anew=anew):,} cells of {escape(run)} into {escape(record)}")
        changed = write_tables(root)
    output.print("\n".join(f"written: {escape(str(page))}" for page in changed) or "every table is as its record says")


@app.command()
def demo(
    out: Out = Path("demo"),
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Figures 1 and 2 of the paper, its Table 1 on the rings, and digits, in two minutes on a laptop."""
    with plain_errors(debug):
        from mmdgs.lab.workspace import Workspace

        where = device_named(device)
        workspace = Workspace(out, overwrite=overwrite, resume=resume)
        _perform(DEMO, Context(workspace, where, seed=seed, quick=True))


def _perform(chosen: Experiment, context: Context) -> None:
    """Run an experiment, write what it found, and print its tables and the path of its report."""
    out = escape(str(context.workspace.out))
    size = "quick" if context.quick else "full size"
    messages.print(f"[bold]{chosen.title}[/bold] on {context.device}, {size}, into {out}")
    try:
        with needs_lab():
            path, report = chosen.perform(context)
    except KeyboardInterrupt:
        messages.print(
            f"\nstopped; what is finished is in {out}. To go on: the same command with [bold]--resume[/bold] "
            "(and without --overwrite)."
        )
        raise typer.Exit(INTERRUPTED) from None
    show_report(path, report)


def write_page(title: str, question: str, out: Path, made: Outcome, *, overwrite: bool, seed: int = 0) -> None:
    """Write what a command found as report.html and records.json, and print it."""
    import torch

    from mmdgs.lab.workspace import Workspace

    with contextlib.closing(Workspace(out, overwrite=overwrite)) as workspace:
        context = Context(workspace, torch.device("cpu"), seed=seed)
        show_report(*Experiment("page", title, question).write(context, made))


def show_report(path: Path, report: Report) -> None:
    """Print the tables and the takeaway of a report, its path, and what to try next."""
    for table in report.tables():
        output.print(table.to_rich())
        output.print()
    if report.takeaway:
        output.print(f"{escape(plain(report.takeaway))}\n")
    output.print(f"report: [bold]{escape(str(path.resolve()))}[/bold]", soft_wrap=True)
    if report.following:
        first = report.following[0]
        output.print(f"next: [bold]{escape(f'{called()} {first.command}')}[/bold]  ({first.purpose})", soft_wrap=True)


def called() -> str:
    """How to call mmdgs from the user's shell: its path where the environment is not active."""
    script = Path(sys.executable).with_name("mmdgs")
    if shutil.which("mmdgs") or not script.exists():
        return "mmdgs"
    return os.path.relpath(script)
