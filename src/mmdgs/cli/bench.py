"""`mmdgs bench`: mmdgs against a plain implementation, in one run."""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer

from mmdgs import bench
from mmdgs.cli.common import Debug, Device, app, device_named, output, plain_errors
from mmdgs.experiments.report import Table

bench_app = typer.Typer(help="Measure mmdgs against a plain implementation, in one run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


Quick = Annotated[bool, typer.Option("--quick", help="A tenth of the work; rougher numbers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@bench_app.command("chain")
def bench_chain(device: Device = "auto", quick: Quick = False, as_json: AsJson = False, debug: Debug = False) -> None:
    """Gibbs chains in 2-D and the probe diagonal at d = 3,072, as ratios to the plain way."""
    with plain_errors(debug):
        where = device_named(device)
        _show(bench.chain(where, quick=quick), where, as_json)


@bench_app.command("train")
def bench_train(device: Device = "auto", quick: Quick = False, as_json: AsJson = False, debug: Debug = False) -> None:
    """Training by denoising score matching, images a second, as ratios to a plain float32 loop."""
    with plain_errors(debug):
        where = device_named(device)
        _show(bench.train(where, quick=quick), where, as_json)


def _show(rows: list[bench.Row], device: torch.device, as_json: bool) -> None:
    found = bench.record(rows, device)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(
        f"{found['device_name']}, {found['threads']} threads, torch {found['torch']}",
        ["work", "unit", "plain", "mmdgs", "ratio"],
        [[r.name, r.unit, f"{r.plain:,.0f}", f"{r.ours:,.0f}", f"{r.ratio:.1f}x"] for r in rows],
    )
    output.print(table.to_rich())
