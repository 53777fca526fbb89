"""`python -m experiments`: run experiments and show what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from experiments import EXPERIMENTS, Context, Workspace
from mmdgs.cli.app import (
    App,
    Device,
    Overwrite,
    Quiet,
    Resume,
    Seed,
    device_named,
    messages,
    needs,
    resumable,
)  # fmt: skip
from mmdgs.cli.options import options_of
from mmdgs.cli.reports import show_report
from mmdgs.errors import UsageError, unknown_name

app = App()


def _takers(option: str) -> list[str]:
    """The experiments that take an option."""
    return [name for name, experiment in EXPERIMENTS.items() if option in experiment.options]


@app.command(
    help="Reproduce a table or figure of the paper: numbers, pictures and a report.\n\n"
    + "\n".join(f"- **{name}**: {experiment.summary}" for name, experiment in EXPERIMENTS.items())
)
@options_of(Context, extended=lambda name, text: f"{text} ({', '.join(_takers(name))})")
def main(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"What to make: {', '.join(EXPERIMENTS)}.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the results.", show_default="runs/NAME"),
    ] = None,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version: shorter training and chains.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where image files are.", envvar="MMDGS_DATA")
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    with needs("report"):
        if name not in EXPERIMENTS:
            raise unknown_name("experiment", name, EXPERIMENTS)
        experiment = EXPERIMENTS[name]
        for option in options:
            if option not in experiment.options:
                names = ", ".join(_takers(option))
                raise UsageError(f"--{option.replace('_', '-')} is for {names}, not for {name}")
        options = {
            key: tuple(dict.fromkeys(value)) if isinstance(value, list) else value
            for key, value in options.items()
        }
        where, folder = device_named(device), out or Path("runs") / name
        files = None if data_dir is None else str(data_dir)
        workspace = Workspace(folder, overwrite=overwrite, resume=resume)
        size = "quick" if quick else "full size"
        into = escape(str(folder))
        messages.print(f"[bold]{experiment.title}[/bold] on {where}, {size}, into {into}")
        with resumable():
            show_report(
                *experiment.perform(Context(workspace, where, seed, quick, files, **options))
            )


if __name__ == "__main__":
    app()
