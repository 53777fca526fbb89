"""`mmdgs bench`: mmdgs against a plain implementation, in one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from mmdgs.cli.app import App, Debug, Device, Quiet, app, device_named, needs_lab, output, plain_errors
from mmdgs.tables import Table

if TYPE_CHECKING:
    import torch

    from mmdgs.lab.bench import Point, Row

bench_app = App(help="Measure mmdgs against a plain implementation, in one run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Quick = Annotated[bool, typer.Option("--quick", help="A tenth of the work; rougher numbers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Images at once.", show_default="by the device")]


def _bench() -> ModuleType:
    """The benchmarks, imported when they are asked for."""
    with needs_lab():
        from mmdgs.lab import bench
    return bench


@bench_app.command("chain")
def bench_chain(
    device: Device = "auto", quick: Quick = False, as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False
) -> None:
    """Gibbs chains in 2-D with the full covariance, as ratios to the plain way."""
    with plain_errors(debug):
        where = device_named(device)
        _show(_bench().chain(where, quick=quick), where, as_json)


@bench_app.command("moments")
def bench_moments(
    batch: Batch = None,
    probes: Annotated[int | None, typer.Option(min=1, help="Probes of the diagonal.", show_default="10")] = None,
    size: Annotated[
        int | None, typer.Option(min=8, help="Side of the images, in eights.", show_default="the model's")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also the cost against batch, probes and size, beside 1 + S forward passes.")
    ] = False,
    device: Device = "auto",
    quick: Quick = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The mean and the probe diagonal of a batch of images, as ratios to the plain way."""
    with plain_errors(debug):
        where = device_named(device)
        asked = _bench().Sizes(batch, probes, size)
        rows = _bench().moments(where, asked, quick=quick)
        points = _bench().sweep(where, asked, quick=quick) if sweep else []
        _show(rows, where, as_json, points)


@bench_app.command("sampler")
def bench_sampler(
    model: Annotated[
        str | None, typer.Option(help="A pretrained model: a name or folder.", show_default="random weights")
    ] = None,
    levels_count: Annotated[int, typer.Option(min=2, help="How many noise levels.")] = 4,
    sweeps: Annotated[int, typer.Option(min=1, help="Sweeps at each pair of levels.")] = 3,
    probes: Annotated[int, typer.Option(min=1, help="Probes of the diagonal.")] = 3,
    batch: Batch = None,
    precision: Annotated[str, typer.Option(help="Our network's: float32, tf32 or bf16.")] = "float32",
    device: Device = "auto",
    quick: Quick = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Multi-level Gibbs with probes, seconds a step of an image, as a ratio to a plain float32 loop."""
    with plain_errors(debug):
        where = device_named(device)
        rows = _bench().sampler(
            where, model=model, levels_count=levels_count, sweeps=sweeps, probes=probes, batch=batch,
            precision=precision, quick=quick,
        )  # fmt: skip
        _show(rows, where, as_json)


@bench_app.command("restore")
def bench_restore(
    model: Annotated[str, typer.Option(help="A pretrained model of many levels: a name or folder.")] = "cifar10",
    operator: Annotated[str, typer.Option(help="sr:4, box:16, random:0.8, blur:1.5, motion:9 or gray.")] = "sr:4",
    noise: Annotated[float, typer.Option(help="Standard deviation of the noise, for values in [0, 1].")] = 0.05,
    images: Annotated[int, typer.Option(min=1, help="Images, one draw of each.")] = 2,
    device: Device = "auto",
    quick: Quick = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Restoration, seconds a draw, as a ratio to deepinv's moment matching (needs deepinv), with the PSNR of both."""
    with plain_errors(debug):
        where = device_named(device)
        rows = _bench().restoration(where, model=model, operator=operator, noise=noise, images=images, quick=quick)
        _show(rows, where, as_json)


@bench_app.command("train")
def bench_train(
    device: Device = "auto", quick: Quick = False, as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False
) -> None:
    """Training by denoising score matching, images a second, as ratios to a plain float32 loop."""
    with plain_errors(debug):
        where = device_named(device)
        _show(_bench().train(where, quick=quick), where, as_json)


def _show(rows: Sequence[Row], device: torch.device, as_json: bool, points: Sequence[Point] = ()) -> None:
    found = _bench().record(rows, device)
    if as_json:
        swept = [asdict(point) | {"floor": point.floor, "ratio": point.ratio} for point in points]
        print(json.dumps(found | ({"sweep": swept} if swept else {}), indent=1))
        return
    _print(f"{found['device_name']}, {found['threads']} threads, torch {found['torch']}", [
        {
            "work": row.name, "precision": row.precision, "unit": row.unit, "plain": _number(row.plain),
            "mmdgs": _number(row.ours), "ratio": f"{row.ratio:.1f}x", "first call s": _number(row.first_call),
            "plain GiB": _memory(row.plain_memory), "GiB": _memory(row.memory), "error": _number(row.error),
            "plain PSNR": _number(row.plain_psnr), "PSNR": _number(row.psnr),
        }
        for row in rows
    ])  # fmt: skip
    _print("The cost of one call", [
        {
            "work": f"{one.name}, {one.precision}", "batch": str(one.batch), "probes": str(one.probes),
            "size": str(one.size), "s a call": _number(one.seconds), "(1 + probes) forwards": _number(one.floor),
            "ratio": f"{one.ratio:.2f}", "GiB": _memory(one.memory),
        }
        for one in points
    ])  # fmt: skip


def _print(title: str, lines: Sequence[dict[str, str]]) -> None:
    """Print a table without the columns that hold nothing; nothing at all where there are no lines."""
    shown = [name for name in (lines[0] if lines else ()) if any(line[name] for line in lines)]
    if shown:
        output.print(Table(title, shown, [[line[name] for name in shown] for line in lines]).to_rich())


def _number(value: float | None) -> str:
    """Three digits, or all before the point; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


def _memory(value: int | None) -> str:
    return "" if value is None else _number(value / 2**30)
