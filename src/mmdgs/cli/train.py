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
    Quiet,
    app,
    device_named,
    messages,
    no_sets,
    output,
    plain_errors,
    refuse_idle,
)
from mmdgs.cli.options import options_of
from mmdgs.errors import UsageError
from mmdgs.training.recipe import Recipe, TrainingSettings, parse_override, read_recipe


@app.command()
@options_of(Recipe, TrainingSettings)
def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model, its checkpoints and metrics.")],
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A recipe: YAML or TOML.")] = None,
    *,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Any key of the recipe, as key=value; may be given again.")
    ] = None,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **given: Any,
) -> None:
    """Train a model on images or points; killed or stopped, it goes on with --resume.

    Several processes: `accelerate launch -m mmdgs train ...` or `torchrun --nproc-per-node 2 -m mmdgs train ...`.
    """
    with plain_errors(debug):
        from accelerate import Accelerator, DistributedDataParallelKwargs

        from mmdgs.data import TOYS
        from mmdgs.training.run import train_model
        from mmdgs.training.stopping import Interrupted

        overrides = dict(parse_override(one) for one in override or [])
        for name in (given.keys() & overrides.keys()) - {"data_dir"}:  # that may come from the environment
            raise UsageError(f"{name} is given twice, as an option and by --set: leave one of them out")
        recipe = read_recipe(config, given | overrides)
        idle = recipe.data in TOYS or no_sets(recipe.data)
        refuse_idle(context, (idle, ("data_dir",), "sets such as cifar10"))
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
            )
        except KeyboardInterrupt as stop:
            if main:
                messages.print(f"\n{escape(_stopped(out))}", soft_wrap=True)
            raise typer.Exit(128 + stop.signal if isinstance(stop, Interrupted) else INTERRUPTED) from None
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


def _stopped(out: Path) -> str:
    """What a run that was stopped leaves, and how to go on."""
    from mmdgs.training.checkpoint import RECIPE_FILE, last_step

    step = last_step(out)
    if step is not None:
        return f"stopped; the checkpoint in {out} is of step {step:,}. To go on from it: the same command with --resume"
    again = " with --overwrite" if (out / RECIPE_FILE).exists() else ""
    return f"stopped before the first checkpoint; to start again: the same command{again}"
