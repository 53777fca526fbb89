"""`mmdgs sample`: from a model to pictures, by any sampler."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from mmdgs.cli.app import (
    Debug,
    Device,
    Overwrite,
    Quiet,
    Resume,
    Seed,
    app,
    device_named,
    messages,
    no_sets,
    output,
    plain_errors,
    refuse_idle,
    resumable,
)
from mmdgs.cli.options import options_of
from mmdgs.errors import UsageError
from mmdgs.generation.settings import Method
from mmdgs.runtime import check_precision

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from mmdgs.generation import Generated
    from mmdgs.models import FitData, Model

PATIENCE = timedelta(days=7)
"""How long a process waits for the others at the end, where one of them has a batch more."""


@app.command()
@options_of(Method)
def sample(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A model that ships (mnist, mnist-kl), a folder (also of diffusers), or on the hub.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A picture of all (.png), an array (.npz), or a folder for PNG files.")
    ] = Path("samples.png"),
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Chains: one sample each.")] = 25,
    *,
    data: Annotated[str | None, typer.Option(help="Images to fit isotropic or spectral variances on.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data files are.", envvar="MMDGS_DATA")] = None,
    fit_images: Annotated[int | None, typer.Option(min=1, help="How many of them.", show_default="by device")] = None,
    floating: Annotated[
        bool, typer.Option("--float", help="Images in an .npz as float32, not clipped, in place of 8-bit pixels.")
    ] = False,
    chain_every: Annotated[
        int | None,
        typer.Option(min=1, help="In place of samples: states of all chains, every so many steps, for mmdgs diagnose."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Chains at a time.", show_default="by device")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Side of the images, where the model takes any.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="A checkpoint's raw weights, not their moving average.")] = False,
    precision: Annotated[str, typer.Option(help="The network's: float32, tf32 or bf16.")] = "float32",
    fast: Annotated[
        bool | None,
        typer.Option("--fast/--plain", help="Compile the network on a GPU, or not.", show_default="(in long runs)"),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **given: Any,
) -> None:
    """Draw samples from noise; killed or stopped, it goes on with --resume.

    Several processes: `accelerate launch -m mmdgs sample ...` or `torchrun --nproc-per-node 2 -m mmdgs sample ...`,
    with -n for the number of samples: these launchers take --n for an option of their own.
    """
    with plain_errors(debug):
        from mmdgs.diagnostics import save_chain
        from mmdgs.generation import generate, make_plan
        from mmdgs.generation.methods import settings_of
        from mmdgs.models import load
        from mmdgs.samplers.driver import repair_note
        from mmdgs.schedules import parse_levels

        refuse_idle(context, (no_sets(data), ("data_dir",), "--data with a set such as cifar10"))
        if chain_every is not None:
            _check_chain(out, floating, resume)
        _check_out(out, floating, resume, overwrite)
        check_precision(precision)
        if "levels" in given:
            given["levels"] = parse_levels(given["levels"])
        method = Method(**{name: value for name, value in given.items() if (name, value) != ("mean", False)})
        where = device_named(device)
        fit = _fit_data(method, data, data_dir, fit_images, where)
        accelerator = _accelerator(where)
        where = accelerator.device if accelerator.num_processes > 1 else where
        try:
            with resumable(told=chain_every is None and accelerator.is_main_process):
                found = load(model, ema=not raw, size=size, device=where)
                _check_shape(found, out)
                with accelerator.main_process_first():  # one fits variances, the others find them
                    plan = make_plan(method, found, data=fit)
                kept = None if chain_every is None else _kept(len(plan.steps), chain_every)
                result = generate(
                    found,
                    plan,
                    n,
                    out=out if kept is None else None,
                    seed=seed,
                    batch_size=batch_size,
                    keep=kept,
                    precision=precision,
                    fast=fast,
                    settings=settings_of(method, found, fit),
                    floating=floating,
                    resume=resume,
                    overwrite=overwrite,
                    accelerator=accelerator,
                )
        finally:
            accelerator.end_training()
        if result.states is not None:
            save_chain(out, result.states)
        if accelerator.is_main_process:
            messages.print(_said(result, "images" if len(found.shape) == 3 else "points"), soft_wrap=True)
            if result.repaired > 0:
                messages.print(f"note: {repair_note(result.repaired)}", soft_wrap=True)
            what = "samples" if kept is None else "chains"
            output.print(f"{what}: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True)


def _accelerator(where: torch.device) -> Accelerator:
    from accelerate import Accelerator, InitProcessGroupKwargs

    return Accelerator(cpu=where.type == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])


def _check_out(out: Path, floating: bool, resume: bool, overwrite: bool) -> None:
    """Refuse what is no place for samples, before the work that a plan may need."""
    from mmdgs.files import FILE_NAMES
    from mmdgs.generation.writers import destination

    if floating and out.suffix.lower() != ".npz":
        raise UsageError(f"--float is for an --out that ends in .npz, got {out}")
    if out.suffix.lower() in FILE_NAMES and out.suffix.lower() not in (".png", ".npz"):
        raise UsageError(f"--out must end in .png or .npz, or be a folder, got {out}")
    destination(out).check(resume=resume, overwrite=overwrite)


def _check_chain(out: Path, floating: bool, resume: bool) -> None:
    """Refuse what does not go with chains, which are written in one go."""
    if out.suffix.lower() != ".npz":
        raise UsageError(f"--chain-every writes chains to an --out that ends in .npz, got {out}")
    for option, asked in (("--float", floating), ("--resume", resume)):
        if asked:
            raise UsageError(f"{option} is for samples, not for chains: leave it or --chain-every out")


def _kept(steps: int, every: int) -> range:
    """The steps after which states are kept."""
    from mmdgs.diagnostics import LEAST_STEPS

    if steps // every < LEAST_STEPS:
        raise UsageError(
            f"--chain-every {every} keeps {steps // every} states of the {steps} steps of a chain, and mmdgs diagnose "
            f"needs {LEAST_STEPS}: give a smaller number, or more steps"
        )
    return range(every, steps + 1, every)


def _check_shape(found: Model, out: Path) -> None:
    if out.suffix != ".npz" and len(found.shape) != 3:
        raise UsageError(f"the model gives points of shape {found.shape}, not images: use an --out ending in .npz")


def _fit_data(
    method: Method, data: str | None, data_dir: Path | None, fit_images: int | None, where: torch.device
) -> FitData | None:
    """What variances are estimated from, where a covariance is asked for that has fitted ones."""
    from mmdgs.models.covariances import FITTED
    from mmdgs.models.fits import FIT_IMAGES, FitData

    for name, value in (("--data", data), ("--fit-images", fit_images)):
        if value is not None and method.covariance not in FITTED:
            given = method.covariance or "auto"
            raise UsageError(f"{name} is for --covariance {' or '.join(FITTED)}, got --covariance {given}")
    if data is None:
        if fit_images is not None:
            raise UsageError("--fit-images says how many images of --data are used: give --data too")
        return None
    return FitData(data, fit_images or FIT_IMAGES.get(where.type, FIT_IMAGES["cpu"]), data_dir)


def _said(result: Generated, what: str) -> str:
    cost = result.cost
    said = f"{result.count:,} {what}: {cost.forwards:,} forwards and {cost.products:,} Jacobian products each, "
    return said + f"{result.seconds:,.1f} seconds"
