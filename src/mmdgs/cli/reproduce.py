"""`mmdgs reproduce` and `mmdgs demo`: run experiments and show what they found."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.markup import escape

from mmdgs.cli.app import (
    INTERRUPTED,
    Debug,
    Device,
    Out,
    Overwrite,
    Resume,
    Seed,
    app,
    device_named,
    messages,
    needs_lab,
    output,
    plain_errors,
)
from mmdgs.errors import UsageError
from mmdgs.lab import DEMO, EXPERIMENTS, Context, Experiment, Workspace, experiment

OPTIONS = {one.name: one for one in dataclasses.fields(Context) if "help" in one.metadata}
"""The fields of Context that are options of some experiments."""


def _takers(option: str) -> list[str]:
    """The experiments that take an option."""
    return [name for name, one in EXPERIMENTS.items() if option in one.options]


def _parameters() -> list[inspect.Parameter]:
    """A parameter of the command for each of OPTIONS, from the field's type and help."""
    types = get_type_hints(Context)
    found = []
    for name, one in OPTIONS.items():
        told = {"show_default": False, **one.metadata, "help": f"{one.metadata['help']} ({', '.join(_takers(name))})"}
        kind = list[str] | None if types[name] == tuple[str, ...] | None else types[name]
        annotation: Any = Annotated[kind, typer.Option(**told)]
        found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return found


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"What to make: {', '.join(EXPERIMENTS)}.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the results.", show_default="runs/NAME")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small version: shorter training and chains.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where image files are.", envvar="MMDGS_DATA")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    with plain_errors(debug):
        chosen = experiment(name)
        given: dict[str, Any] = {
            key: tuple(dict.fromkeys(v)) if isinstance(v, list) else v for key, v in options.items()
        }
        given = {key: value for key, value in given.items() if value not in (None, ())}
        for option in given:
            if option not in chosen.options:
                *rest, last = _takers(option)
                names = f"{', '.join(rest)} and {last}" if rest else last
                raise UsageError(f"--{option} is for {names}, not for {name}")
        where = device_named(device)
        workspace = Workspace(out or Path("runs") / name, overwrite=overwrite, resume=resume)
        files = None if data_dir is None else str(data_dir)
        _perform(chosen, Context(workspace, where, seed=seed, quick=quick, data_dir=files, **given))


# The command's options are those of the function above and those of the Context that it fills.
_own = inspect.signature(reproduce, eval_str=True)
_listed = [one for one in _own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD] + _parameters()
reproduce.__signature__ = _own.replace(parameters=_listed)  # type: ignore[attr-defined]
reproduce.__annotations__ = {one.name: one.annotation for one in _listed}
app.command(
    help="Reproduce a table or figure of the paper: numbers, pictures and a report.\n\n"
    + "\n".join(f"- **{one.name}**: {one.summary}" for one in EXPERIMENTS.values())
)(reproduce)


@app.command()
def demo(
    out: Out = Path("demo"),
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    """Figure 1, Table 1 on the rings, Figure 2 and digits, in two minutes on a laptop."""
    with plain_errors(debug):
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
    for table in report.tables():
        output.print(table.to_rich())
        output.print()
    output.print(f"report: [bold]{escape(str(path.resolve()))}[/bold]", soft_wrap=True)
