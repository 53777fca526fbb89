"""`mmdgs sample`: from a model to pictures, by any sampler."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Context, Option

from mmdgs.cli import app as cli
from mmdgs.cli.app import DataDir, Device, Overwrite, Quiet, Resume, Seed, app
from mmdgs.cli.options import options_of
from mmdgs.covariances import COVARIANCES, OPTIONS, named
from mmdgs.errors import UsageError
from mmdgs.sampling.settings import SamplerSettings

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

PATIENCE = timedelta(days=7)
"""How long a process waits for the others at the end, where one of them has a batch more."""


@app.command()
@options_of(SamplerSettings, *COVARIANCES.values())
def sample(
    context: Context,
    model: str = Argument(
        help="A model that ships (mnist, mnist-kl), a folder (also diffusers'), or on the hub."
    ),
    out: Path = Option(
        Path("samples.png"),
        "--out",
        "-o",
        help="A picture of all (.png), an array (.npz), or a folder for PNG files.",
    ),
    n: int = Option(25, "--n", "-n", min=1, help="Chains: one sample each."),
    *,
    data: str | None = Option(None, help="Images to fit isotropic or spectral variances on."),
    data_dir: DataDir = None,
    fit_images: int | None = Option(
        None, min=1, help="How many of them.", show_default="by device"
    ),
    floating: bool = Option(
        False,
        "--float",
        help="Images in an .npz as float32, not clipped, in place of 8-bit pixels.",
    ),
    chain_every: int | None = Option(
        None,
        min=1,
        help="In place of samples: states of all chains, every so many steps, for diagnose.",
    ),
    batch_size: int | None = Option(
        None, min=1, help="Chains at a time.", show_default="by device"
    ),
    size: int | None = Option(None, min=1, help="Side of the images, where the model takes any."),
    raw: bool = Option(
        False, "--raw", help="A checkpoint's raw weights, not their moving average."
    ),
    precision: str = Option("float32", help="The network's: float32, tf32 or bf16."),
    fast: bool | None = Option(
        None,
        "--fast/--plain",
        help="Compile the network on a GPU, or not.",
        show_default="(in long runs)",
    ),
    seed: Seed = 0,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    **values: Any,
) -> None:
    """Draw samples from noise; killed or stopped, it goes on with --resume.

    Several processes: `accelerate launch -m mmdgs sample ...` or `torchrun --nproc-per-node 2 -m
    mmdgs sample ...`, with -n for the number of samples: these launchers take --n for an option of
    their own.
    """
    from mmdgs.diagnostics import save_chain
    from mmdgs.models import load
    from mmdgs.models.estimators import own_covariance
    from mmdgs.models.fits import FIT_IMAGES, FitData
    from mmdgs.samplers.driver import repair_note
    from mmdgs.sampling import generate
    from mmdgs.sampling.writers import destination
    from mmdgs.schedules import parse_levels

    rules = (
        (cli.no_sets(data), ("data_dir",), "--data with a set such as cifar10"),
        (data is None, ("fit_images",), "--data, whose images it counts"),
        (chain_every is not None, ("floating", "resume"), "samples, not for chains"),
    )
    cli.refuse_idle(context, *rules)
    if chain_every is not None and out.suffix.lower() != ".npz":
        raise UsageError(f"--chain-every writes chains to an --out that ends in .npz, got {out}")
    destination(out).check(resume=resume, overwrite=overwrite)
    options = {name: values.pop(name) for name in OPTIONS & values.keys()}
    name = values.pop("covariance", None)
    if "levels" in values:
        values["levels"] = parse_levels(values["levels"])
    if values.get("mean") is False:  # --draw, which is the default
        del values["mean"]
    settings = SamplerSettings(**values, covariance=name and named(name, options))
    where = cli.device_named(device)
    images = fit_images or FIT_IMAGES.get(where.type, FIT_IMAGES["cpu"])
    fit = None if data is None else FitData(data, images, data_dir)
    accelerator = _accelerator(where)
    where = accelerator.device if accelerator.num_processes > 1 else where
    kept = None if chain_every is None else partial(_kept, every=chain_every)
    try:
        with cli.resumable(advise=kept is None and accelerator.is_main_process):
            network = load(model, ema=not raw, size=size, device=where)
            if options and name is None:
                own = named(own_covariance(network).name, options)
                settings = replace(settings, covariance=own)
            result = generate(
                network,
                settings,
                n,
                out=out if kept is None else None,
                data=fit,
                seed=seed,
                batch_size=batch_size,
                keep=kept,
                precision=precision,
                fast=fast,
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
        what, cost = "images" if len(network.shape) == 3 else "points", result.cost
        cli.tell(
            f"{result.count:,} {what}: {cost.forwards:,} forwards and {cost.products:,} "
            f"Jacobian products each, {result.seconds:,.1f} seconds"
        )
        if result.repaired > 0:
            cli.tell(f"note: {repair_note(result.repaired)}")
        cli.show_path("samples" if kept is None else "chains", out)


def _accelerator(where: torch.device) -> Accelerator:
    from accelerate import Accelerator, InitProcessGroupKwargs

    patience = InitProcessGroupKwargs(timeout=PATIENCE)
    return Accelerator(cpu=where.type == "cpu", kwargs_handlers=[patience])


def _kept(steps: int, every: int) -> range:
    """The steps after which states are kept."""
    from mmdgs.diagnostics import LEAST_STEPS

    if steps // every < LEAST_STEPS:
        raise UsageError(
            f"--chain-every {every} keeps {steps // every} states of the {steps} steps of a chain, "
            f"and mmdgs diagnose needs {LEAST_STEPS}: give a smaller number, or more steps"
        )
    return range(every, steps + 1, every)
