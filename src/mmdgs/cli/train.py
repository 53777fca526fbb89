"""`mmdgs train`: from data to a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from typer import Option

from mmdgs.cli.app import (
    INTERRUPTED,
    Device,
    Overwrite,
    Quiet,
    app,
    device_named,
    no_sets,
    refuse_idle,
    show,
    show_path,
    tell,
)
from mmdgs.cli.options import options_of
from mmdgs.errors import UsageError
from mmdgs.training.recipe import Recipe, TrainingSettings, parse_override, read_recipe


@app.command()
@options_of(Recipe, TrainingSettings)
def train(
    context: typer.Context,
    out: Path = Option(
        ..., "--out", "-o", help="Folder for the model, its checkpoints and metrics."
    ),
    config: Path | None = Option(None, "--config", "-c", help="A recipe: YAML or TOML."),
    *,
    override: list[str] | None = Option(
        None, "--set", help="Any key of the recipe, as key=value; may be given again."
    ),
    device: Device = "auto",
    resume: bool = Option(False, "--resume", help="Go on from the folder's last checkpoint."),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    **values: Any,
) -> None:
    """Train a model on images or points; killed or stopped, it goes on with --resume.

    Several processes: `accelerate launch -m mmdgs train ...` or `torchrun --nproc-per-node 2 -m
    mmdgs train ...`.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from mmdgs.data import TOYS
    from mmdgs.training.run import train_model
    from mmdgs.training.stopping import Interrupted

    overrides = dict(parse_override(text) for text in override or [])
    twice = (values.keys() & overrides.keys()) - {"data_dir"}  # which the environment may set
    for name in twice:
        raise UsageError(f"{name} is given twice, as an option and by --set: leave one out")
    recipe = read_recipe(config, values | overrides)
    idle = recipe.data in TOYS or no_sets(recipe.data)
    refuse_idle(context, (idle, ("data_dir",), "sets such as cifar10"))
    where = device_named(device)
    # An energy's last bias has no gradient: data-parallel training must not wait for it.
    parallel = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=where.type == "cpu", kwargs_handlers=[parallel])
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
            report=(lambda line: tell(escape(line))) if main else None,
        )
    except KeyboardInterrupt as stop:
        if main:
            tell(f"\n{escape(_stopped(out))}")
        code = 128 + stop.signal if isinstance(stop, Interrupted) else INTERRUPTED
        raise typer.Exit(code) from None
    finally:
        accelerator.end_training()
    if main:
        window = trained.losses[-100:]
        loss = f"loss {window.mean():.4g} over the last {len(window)}"
        words = [f"{len(trained.losses):,} steps", loss]
        words += [f"validation {value:.4g}" for _, value in trained.validations[-1:]]
        words.append(f"{trained.examples_a_second:,.0f} examples/s")
        for name, value in trained.watches[-1][1].items() if trained.watches else ():
            words.append(f"{name} {value:.4g}")
        if trained.split > 1:
            words.append(f"each step in {trained.split} parts to fit in memory")
        show(", ".join(words))
        show_path("model", out)


def _stopped(out: Path) -> str:
    """What a run that was stopped leaves, and how to go on."""
    from mmdgs.training.checkpoint import RECIPE_FILE, last_step

    step = last_step(out)
    if step is not None:
        again = "To go on from it: the same command with --resume"
        return f"stopped; the checkpoint in {out} is of step {step:,}. {again}"
    again = " with --overwrite" if (out / RECIPE_FILE).exists() else ""
    return f"stopped before the first checkpoint; to start again: the same command{again}"
