"""The command line: parses, calls experiments and benchmarks, and shows what they return."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from mmdgs import bench
from mmdgs.data import toy
from mmdgs.errors import UsageError
from mmdgs.experiments import DEMO, EXPERIMENTS, Context, Experiment, Workspace, conclude, experiment
from mmdgs.experiments.report import Table
from mmdgs.version import __version__

MISUSE, FAILURE, INTERRUPTED = 2, 1, 130
WITH_DATASETS = ("table1", "fig2")

app = typer.Typer(
    name="mmdgs",
    help="From a denoiser to the denoising posterior p(x | noisy x), and from that posterior to samplers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure mmdgs against a plain implementation, in one run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

# Off a terminal rich would assume 80 columns and break the tables.
output = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
messages = Console(stderr=True, highlight=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        output.print(f"mmdgs {__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None: ...


Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for records.json, figures and report.html.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto takes a GPU where there is one.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of everything random.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start anew in a folder that is not empty.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the finished parts in the folder.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


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
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    with _plain_errors(debug):
        chosen = experiment(name)
        for option, given in (("--data", data), ("--seeds", seeds)):
            if given and name not in WITH_DATASETS:
                raise UsageError(f"{option} is for {' and '.join(WITH_DATASETS)}, not for {name}")
        for one in data or []:
            toy(one)
        where = _device(device)
        workspace = Workspace(out or Path("runs") / name, overwrite=overwrite, resume=resume)
        datasets = tuple(dict.fromkeys(data)) if data else None
        _perform(chosen, Context(workspace, where, seed=seed, seeds=seeds, quick=quick, datasets=datasets))


@app.command()
def demo(
    out: Out = Path("demo"),
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    """Figure 1, Table 1 on the rings and Figure 2, in two minutes on a laptop."""
    with _plain_errors(debug):
        where = _device(device)
        workspace = Workspace(out, overwrite=overwrite, resume=resume)
        _perform(DEMO, Context(workspace, where, seed=seed, quick=True))


@bench_app.command("chain")
def bench_chain(
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the work; rougher numbers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Gibbs chains in 2-D and the probe diagonal at d = 3,072, as ratios to the plain way."""
    with _plain_errors(debug):
        where = _device(device)
        rows = bench.chain(where, quick=quick)
        found = bench.record(rows, where)
        if as_json:
            print(json.dumps(found, indent=1))
            return
        table = Table(
            f"{found['device_name']}, {found['threads']} threads, float32, torch {found['torch']}",
            ["work", "unit", "plain", "mmdgs", "ratio"],
            [[r.name, r.unit, f"{r.plain:,.0f}", f"{r.ours:,.0f}", f"{r.ratio:.1f}x"] for r in rows],
        )
        output.print(table.to_rich())


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


@contextlib.contextmanager
def _plain_errors(debug: bool) -> Iterator[None]:
    """Turn errors into one line and an exit status: 2 for misuse, 1 for failure."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        messages.print("\nstopped")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        said = str(error) or type(error).__name__
        messages.print(f"[bold red]error:[/bold red] {escape(said)}", soft_wrap=True)
        raise typer.Exit(MISUSE if isinstance(error, UsageError) else FAILURE) from None


def _device(name: str) -> torch.device:
    """The device asked for, checked; auto: CUDA, else the CPU (Apple's MPS has no float64, which metrics need)."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"device {name!r} cannot be used here ({reason}); try --device cpu") from error
    return device


def main() -> Any:
    """The entry point of the `mmdgs` command."""
    return app()


if __name__ == "__main__":
    sys.exit(main())
