"""`mmdgs bench`: mmdgs against a plain implementation, in one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from mmdgs.cli.app import App, Device, Quiet, app, device_named, output
from mmdgs.tables import Table

if TYPE_CHECKING:
    import torch

    from mmdgs.bench import Row

bench_app = App(help="Measure mmdgs against a plain implementation, in one run.")
app.add_typer(bench_app, name="bench")

Quick = Annotated[bool, Option("--quick", help="A tenth of the work; rougher numbers.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Batch = Annotated[int | None, Option(min=1, help="Images at once.", show_default="by the device")]


@bench_app.command("chain")
def bench_chain(
    device: Device = "auto", quick: Quick = False, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Gibbs chains in 2-D with the full covariance, as ratios to the plain way."""
    from mmdgs import bench

    where = device_named(device)
    show_rows(bench.chain(where, quick=quick), where, as_json)


@bench_app.command("moments")
def bench_moments(
    batch: Batch = None,
    probes: int | None = Option(None, min=1, help="Probes of the diagonal.", show_default="10"),
    size: int | None = Option(
        None, min=8, help="Side of the images, in eights.", show_default="the model's"
    ),
    device: Device = "auto",
    quick: Quick = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """The mean and the probe diagonal of a batch of images, as ratios to the plain way."""
    from mmdgs import bench

    where = device_named(device)
    rows = bench.moments(where, batch=batch, probes=probes, size=size, quick=quick)
    show_rows(rows, where, as_json)


def show_rows(rows: Sequence[Row], device: torch.device, as_json: bool) -> None:
    """Print the rows of a benchmark as a table or as JSON."""
    from mmdgs import bench

    record = bench.record(rows, device)
    if as_json:
        print(json.dumps(record, indent=1))
        return
    cells = [_cells(row) for row in rows]
    shown = [name for name in cells[0] if any(line[name] for line in cells)]  # no empty columns
    title = f"{record['device_name']}, {record['threads']} threads, torch {record['torch']}"
    output.print(Table(title, shown, [[line[name] for name in shown] for line in cells]).to_rich())


def _cells(row: Row) -> dict[str, str]:
    return {
        "work": row.name,
        "precision": row.precision,
        "unit": row.unit,
        "plain": _number(row.plain),
        "mmdgs": _number(row.ours),
        "ratio": f"{row.ratio:.1f}x",
        "1 + probes forwards": _number(row.floor),
        "first call s": _number(row.first_call),
        "plain GiB": _memory(row.plain_memory),
        "GiB": _memory(row.memory),
        "error": _number(row.error),
    }


def _number(value: float | None) -> str:
    """Three digits, or all before the point; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


def _memory(value: int | None) -> str:
    return "" if value is None else _number(value / 2**30)
