"""`mmdgs train`: from data to a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from mmdgs.cli.app import (
    INTERRUPTED,
    Debug,
    Device,
    Overwrite,
    app,
    device_named,
    messages,
    output,
    plain_errors,
)
from mmdgs.training.job import train_model
from mmdgs.training.recipe import parse_override, read_recipe
from mmdgs.watching import sample_watcher


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model, its checkpoints and metrics.")],
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A recipe: YAML or TOML.")] = None,
    data: Annotated[
        str | None, typer.Option(help="mnist, cifar10, celeba, mog, rings, roll, or a folder or zip of images.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data files are.", envvar="MMDGS_DATA")] = None,
    size: Annotated[int | None, typer.Option(help="Crop and resize images to this many pixels.")] = None,
    unreadable: Annotated[str | None, typer.Option(help="An unreadable image: refuse it, or skip it.")] = None,
    model: Annotated[
        str | None, typer.Option(help="unet-small, unet-paper, unet-tiny, ncsnv2, mlp or classifier.")
    ] = None,
    param: Annotated[
        str | None,
        typer.Option(help="The output: energy, energy-squared, score, noise, clean, velocity, edm, mean-std, classes."),
    ] = None,
    loss: Annotated[str | None, typer.Option(help="dsm, kl, cross-entropy or ocm; goes with --param.")] = None,
    denoiser: Annotated[
        str | None, typer.Option(help="Of --loss ocm: the model whose variances a head learns (a folder, mnist ...).")
    ] = None,
    probes: Annotated[int | None, typer.Option(help="Of --loss ocm: Jacobian products for each example [3].")] = None,
    sigma: Annotated[float | None, typer.Option(help="Standard deviation of the noise.")] = None,
    levels: Annotated[
        str | None, typer.Option(help="Many levels in place of --sigma: geometric:232:50:0.01, linear, cosine, edm:18.")
    ] = None,
    weighting: Annotated[str | None, typer.Option(help="Of the levels in the loss: ncsnv2, noise, edm, score.")] = None,
    steps: Annotated[int | None, typer.Option(help="End after so many steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="End after so many passes over the data.")] = None,
    minutes: Annotated[float | None, typer.Option(help="End after so much time, watching included.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step, over all processes.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Adam's step size.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, tf32 or bf16.")] = None,
    init: Annotated[
        str | None, typer.Option(help="Start from the weights of a model of the same architecture (a folder, a name).")
    ] = None,
    watch: Annotated[
        int | None, typer.Option(help="Judge so many samples every watch_every steps [0: off].", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of everything random.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Any key of the recipe, as key=value; may be given again.")
    ] = None,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Train a model on images or points; killed or stopped, it goes on with --resume.

    Several processes: `accelerate launch -m mmdgs train ...` or `torchrun --nproc-per-node 2 -m mmdgs train ...`.
    """
    given: dict[str, Any] = {
        "data": data,
        "data_dir": None if data_dir is None else str(data_dir),
        "size": size,
        "unreadable": unreadable,
        "model": model,
        "param": param,
        "loss": loss,
        "denoiser": denoiser,
        "probes": probes,
        "sigma": sigma,
        "levels": levels,
        "weighting": weighting,
        "steps": steps,
        "epochs": epochs,
        "minutes": minutes,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "precision": precision,
        "init": init,
        "watch": watch,
        "seed": seed,
    }
    with plain_errors(debug):
        from accelerate import Accelerator, DistributedDataParallelKwargs

        overrides = {key: value for key, value in given.items() if value is not None}
        overrides |= dict(parse_override(one) for one in override or [])
        recipe = read_recipe(config, overrides)
        where = device_named(device)
        # An energy's last bias has no gradient: data-parallel training must not wait for it.
        accelerator = Accelerator(
            cpu=where.type == "cpu", kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
        )
        main = accelerator.is_main_process
        where = accelerator.device if accelerator.num_processes > 1 else where
        try:
            _, trained = train_model(
                recipe,
                out,
                device=where,
                resume=resume,
                overwrite=overwrite,
                accelerator=accelerator,
                report=(lambda line: messages.print(escape(line))) if main else None,
                watcher=sample_watcher,
            )
        except KeyboardInterrupt:
            if main:
                messages.print(
                    "\nstopped; to go on from the last checkpoint: the same command with [bold]--resume[/bold]"
                )
            raise typer.Exit(INTERRUPTED) from None
        finally:
            accelerator.end_training()
        if main:
            window = trained.losses[-100:]
            said = f"{len(trained.losses):,} steps, loss {window.mean():.4g} over the last {len(window)}"
            if trained.validations:
                said += f", validation {trained.validations[-1][1]:.4g}"
            said += f", {trained.examples_a_second:,.0f} examples/s"
            for name, value in trained.watches[-1][1].items() if trained.watches else ():
                said += f", {name} {value:.4g}"
            if trained.split > 1:
                said += f", each step in {trained.split} parts to fit in memory"
            output.print(said)
            output.print(f"model: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True)
