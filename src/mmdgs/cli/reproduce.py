"""`mmdgs reproduce` and `mmdgs demo`: run experiments and show what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    output,
    plain_errors,
)
from mmdgs.data import toy
from mmdgs.errors import UsageError
from mmdgs.lab import DEMO, EXPERIMENTS, Context, Experiment, Workspace, conclude, experiment
from mmdgs.lab.table2 import chosen_rows

WITH_DATASETS = ("table1", "fig2")
WITH_SEEDS = (*WITH_DATASETS, "table2")
WITH_MODEL = ("few-steps", "probes", "ocm", "covariances", "cifar10", "table2", "celeba")
WITH_HEAD = ("few-steps", "ocm")
WITH_MANY = ("cifar10",)
WITH_MINUTES = WITH_ONLY = ("table2",)
WITH_IMAGES = ("ocm", "covariances", "cifar10", "table2", "celeba")


@app.command(
    help="Reproduce a table or figure of the paper: numbers, pictures and a report.\n\n"
    + "\n".join(f"- **{e.name}**: {e.summary}" for e in EXPERIMENTS.values())
)
def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"What to make: {', '.join(EXPERIMENTS)}.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the results.", show_default="runs/NAME")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Independent runs a row.", show_default="5")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Only this data set (mog, rings, roll); may be given again.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small version: shorter training and chains.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where image files are.", envvar="MMDGS_DATA")] = None,
    model: Annotated[
        str | None, typer.Option(help=f"A pretrained model ({', '.join(WITH_MODEL)}).", show_default="auto")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Its head (few-steps, ocm).", show_default="none; ocm: trained here")
    ] = None,
    many: Annotated[str | None, typer.Option(help="A model of many levels beside it (cifar10).")] = None,
    classifier: Annotated[
        str | None,
        typer.Option(help="A classifier, to count classes (cifar10).", show_default="cifar10-classifier at 32x32"),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(min=2, help=f"Images a cell ({', '.join(WITH_IMAGES)}).", show_default="the experiment's own"),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Begin no new seed of a row after so long; --resume does the rest (table2)."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ROW", help="Only this row (table2); may be given again.")
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    with plain_errors(debug):
        chosen = experiment(name)
        for option, given, where_it_goes in (
            ("--data", data, WITH_DATASETS),
            ("--seeds", seeds, WITH_SEEDS),
            ("--model", model, WITH_MODEL),
            ("--head", head, WITH_HEAD),
            ("--many", many, WITH_MANY),
            ("--classifier", classifier, WITH_MANY),
            ("--images", images, WITH_IMAGES),
            ("--minutes", minutes, WITH_MINUTES),
            ("--only", only, WITH_ONLY),
        ):
            if given is not None and name not in where_it_goes:
                *rest, last = where_it_goes
                names = f"{', '.join(rest)} and {last}" if rest else last
                raise UsageError(f"{option} is for {names}, not for {name}")
        for one in data or []:
            toy(one)
        rows = chosen_rows(only) if only else None
        where = device_named(device)
        workspace = Workspace(out or Path("runs") / name, overwrite=overwrite, resume=resume)
        datasets = tuple(dict.fromkeys(data)) if data else None
        files = None if data_dir is None else str(data_dir)
        context = Context(
            workspace, where, seed=seed, seeds=seeds, quick=quick, datasets=datasets, data_dir=files, model=model,
            head=head, many=many, classifier=classifier, images=images, minutes=minutes, only=rows,
        )  # fmt: skip
        _perform(chosen, context)


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
        path, report = conclude(context, chosen.title, chosen.summary, chosen.run(context))
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
