"""Training a recipe into a folder: data, model, loss, the loop, and the model's files at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor
from torch.nn import functional

from mmdgs import losses
from mmdgs.data import spread
from mmdgs.denoisers import Compiled, Denoiser, EnergyDenoiser, takes_level
from mmdgs.errors import UsageError
from mmdgs.files import LOCK, output_folder, write_atomically
from mmdgs.models import CLASSES, DENOISERS, MEAN_STD, Model, ModelConfig
from mmdgs.moments import IsotropicMoments, LearnedMoments
from mmdgs.networks.registry import conditional_options, preset
from mmdgs.randomness import Generator, Streams
from mmdgs.runtime import device_name
from mmdgs.schedules import parse_levels
from mmdgs.training.contract import PerExampleLoss, Trained, Validation, Watch
from mmdgs.training.energies import CompiledEnergy
from mmdgs.training.engine import Trainer
from mmdgs.training.examples import Examples
from mmdgs.training.folder import BEST, WATCH, RunFolder
from mmdgs.training.heads import frozen_denoiser, new_head, ocm_loss_of
from mmdgs.training.levels import jittered, level_draw
from mmdgs.training.origin import Origin, start_from
from mmdgs.training.recipe import Recipe
from mmdgs.training.sets import Sets, read_sets
from mmdgs.training.watchers import MakeWatcher

if TYPE_CHECKING:
    from accelerate import Accelerator

RECIPE_FILE = "recipe.yaml"
ISOTROPIC_EXAMPLES = {"cuda": 50_000, "cpu": 1_000}
"""Examples for the isotropic variance: the paper's number on a GPU, fewer on a CPU (a standard error below 1%)."""
FEW_EXAMPLES = 2_000
"""For that of a model that is kept as the best so far, which may be kept often."""
FREE_TO_CHANGE = {
    "data_dir", "compile", "steps", "epochs", "minutes", "split", "checkpoint_every", "validate_every", "watch_every"
}  # fmt: skip
"""Keys that a resumed run may be given anew."""


def loss_of(
    model: Model,
    *,
    weighting: str | None = None,
    draw: str | None = None,
    jitter: float | None = None,
    compiled: bool = False,
) -> PerExampleLoss:
    """The loss that goes with a model's parametrisation, its network through torch.compile if asked.

    `weighting` (losses.WEIGHTINGS), `draw` (levels.DRAWS) and `jitter` are for denoisers, and for many levels.
    """
    network = model.network
    if model.config.param == CLASSES:

        def cross_entropy(batch: tuple[Tensor, Tensor], generator: Generator) -> Tensor:
            return functional.cross_entropy(network(batch[0]), batch[1], reduction="none")

        return cross_entropy
    drawn = level_draw(model.levels, draw)
    if model.config.param == MEAN_STD:
        moments = LearnedMoments(Compiled(network) if compiled else network)
        return lambda x, generator: losses.kl(moments, x, drawn(x, generator), generator=generator)
    denoiser = _compiled(model) if compiled else model.denoiser_of(model.network)
    weigh = losses.WEIGHTINGS[weighting or "score"]

    def dsm(x: Tensor, generator: Generator) -> Tensor:
        level = drawn(x, generator)
        told = jittered(level, jitter, x, generator) if jitter else None
        return losses.dsm(denoiser, x, level, generator=generator, weighting=weigh, told=told)

    return dsm


def _compiled(model: Model) -> Denoiser:
    denoiser = model.denoiser_of(model.network)
    return CompiledEnergy(denoiser, model.network) if isinstance(denoiser, EnergyDenoiser) else Compiled(denoiser)


def new_model(recipe: Recipe, shape: tuple[int, ...], classes: tuple[str, ...] = ()) -> Model:
    """The untrained model of a recipe, for data of this shape."""
    network, options = preset(recipe.model)
    levels = parse_levels(recipe.levels) if recipe.levels is not None else ()
    if levels:
        options |= conditional_options(network)
    alphas = [level.alpha for level in levels]
    config = ModelConfig(
        network=network,
        options=options | recipe.network,
        param=recipe.param,
        shape=shape,
        sigma=recipe.sigma,
        alpha=recipe.alpha,
        sigmas=tuple(level.sigma for level in levels),
        alphas=() if set(alphas) <= {1.0} else tuple(alphas),
        classes=classes if recipe.param == CLASSES else (),
        trained_on=recipe.published().data,
    )
    if (len(shape) == 3) == (network == "mlp"):
        raise UsageError(
            f"the model {recipe.model!r} does not fit data of shape {shape}: use an mlp for points, a unet for images"
        )
    model = Model.build(config, seed=recipe.training.seed)
    if levels and not takes_level(model.network):
        raise UsageError(f"the model {recipe.model!r} takes no noise level: train it at one, with sigma")
    return model


def placed(model: Model, device: torch.device) -> Model:
    """The model on a device, in the layout that trains fastest there: convolutions on a GPU like channels last."""
    model.to(device)
    if device.type == "cuda" and len(model.config.shape) == 3:
        model.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def train_model(
    recipe: Recipe,
    out: Path | str,
    *,
    device: torch.device | str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    accelerator: Accelerator | None = None,
    progress: str | None = "training",
    report: Callable[[str], None] | None = None,
    watcher: MakeWatcher | None = None,
) -> tuple[Model, Trained]:
    """Train a recipe into a folder; returns the model with its averaged weights, and how it went.

    The folder then is a model's folder (`mmdgs.load`), with `best/` beside it, recipe.yaml and metrics.jsonl. A recipe
    that watches samples needs a `watcher`, such as `mmdgs.watching.sample_watcher`.
    """
    out, device = Path(out), torch.device(device)
    if resume and overwrite:
        raise UsageError("choose one of --resume (go on) and --overwrite (start anew)")
    main = accelerator is None or accelerator.is_main_process
    denoiser = frozen_denoiser(recipe, device) if recipe.loss == "ocm" else None
    settings = {key: value for key, value in recipe.to_dict().items() if key not in FREE_TO_CHANGE}
    folder = RunFolder(out, settings | ({} if denoiser is None else {"weights of the denoiser": denoiser.digest}))
    with output_folder(out) if main else contextlib.nullcontext():
        begun = _on_all(main and _begun(folder, resume=resume, overwrite=overwrite), accelerator)
        sets = read_sets(recipe, device, denoiser)
        model, origin = _start(recipe, sets, denoiser, folder if begun else None)
        model = placed(model, device)
        if report:
            millions = sum(p.numel() for p in model.network.parameters()) / 1e6
            said = f"{recipe.model} ({millions:.2f} million parameters) on {len(sets.train):,} examples, {device}"
            report(said + (f", from {recipe.init}" if origin.runs else ""))
        job = _Job(recipe, folder, model, origin, sets, device, report if main else None)
        watch = job.watch(watcher, main)
        trainer = job.trainer(watch, denoiser, accelerator)
        if main:
            _begin(recipe, folder, anew=not begun)
        if accelerator:
            accelerator.wait_for_everyone()
        try:
            trained = trainer.run(progress)
        finally:
            folder.close()
        model = finished(job.as_of(len(trained.losses), trained.seconds), sets.train, recipe.training.seed)
        if main:
            model.save_pretrained(out, card=model.describe(_numbers(recipe, trained, device)))
        if accelerator:
            accelerator.wait_for_everyone()
    model.network.requires_grad_(False)
    return model, trained


def _start(recipe: Recipe, sets: Sets, denoiser: Model | None, begun: RunFolder | None) -> tuple[Model, Origin]:
    """The model a run starts with, and where it comes from. One that was begun has its weights in its checkpoint."""
    if denoiser is None:
        model = new_model(recipe, sets.shape, sets.classes)
    else:
        model = new_head(recipe, denoiser, sets.shape, sets.train)
    if begun is not None:
        state = begun.state() or {}
        origin = Origin.from_json(state.get("notes", {}).get("origin", {}))
    else:
        origin = Origin() if recipe.init is None else start_from(recipe.init, model)
    return origin.taken_over(model), origin


class _Job:
    """One run of a recipe: its trainer, and its model as it is on the way."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        model: Model,
        origin: Origin,
        sets: Sets,
        device: torch.device,
        report: Callable[[str], None] | None,
    ) -> None:
        self.recipe, self.folder, self.model, self.origin, self.sets = recipe, folder, model, origin, sets
        self.device, self.report = device, report
        self.batch_size = min(recipe.training.batch_size, len(sets.train))
        self.loop: Trainer | None = None
        folder.notes = {"origin": dataclasses.asdict(origin)}

    def trainer(self, watch: Watch | None, denoiser: Model | None, accelerator: Accelerator | None) -> Trainer:
        """The loop, with the loss that the recipe says; it is compiled on a GPU unless the recipe says otherwise."""
        recipe = self.recipe
        compiled = self.device.type == "cuda" if recipe.compile is None else recipe.compile
        loss: Callable[..., PerExampleLoss]
        if denoiser is None:
            loss = functools.partial(
                loss_of, self.model, weighting=recipe.weighting, draw=recipe.level_draw, jitter=recipe.level_jitter
            )
        else:
            loss = functools.partial(ocm_loss_of, self.model, denoiser, recipe)
        judged = watch is not None and watch.judged_by is not None
        keep_best = None if judged else functools.partial(self.keep_best, "validation loss")
        self.loop = Trainer(
            self.model.network,
            loss(compiled=compiled),
            self.sets.train,
            recipe.training,
            validation=Validation(self.sets.held_out, loss(), keep_best),
            watch=watch,
            folder=self.folder,
            accelerator=accelerator,
            runs_before=len(self.origin.runs),
        )
        return self.loop

    def watch(self, make: MakeWatcher | None, main: bool) -> Watch | None:
        """What looks at samples on the way, where the recipe asks for it; one process does it, the others wait."""
        count = self.recipe.training.watch
        if count is None:
            return None
        if make is None:
            raise UsageError(f"to watch {count} samples train_model needs a watcher: mmdgs.watching.sample_watcher")
        if self.sets.images is None:
            raise UsageError(f"watch is for images, and {self.recipe.data!r} has points: leave it out")
        if not main:
            return Watch(lambda step: {})
        watcher = make(self.model, self.sets.images, self.recipe.training)

        def look(step: int) -> dict[str, float]:
            seen = watcher(step)
            if seen.picture is not None:
                (self.folder.path / WATCH).mkdir(exist_ok=True)
                write_atomically(self.folder.path / WATCH / f"{step:07}.png", seen.picture)
            if self.report and seen.values:
                self.report(f"step {step:,}: " + ", ".join(f"{name} {v:.4g}" for name, v in seen.values.items()))
            return dict(seen.values)

        judged_by = watcher.judged_by
        said = f"{judged_by} of {count:,} samples"
        return Watch(look, judged_by, functools.partial(self.keep_best, said, variance=True) if judged_by else None)

    def keep_best(self, what: str, value: float, step: int, *, variance: bool = False) -> None:
        """Write the model as it is now as the best so far."""
        model = self.as_of(step, self.loop.seconds() if self.loop else 0.0)
        if variance:
            model = finished(model, self.sets.train, self.recipe.training.seed, FEW_EXAMPLES)
        note = {"command": self.recipe.published().command(), "step": step, what: value}
        model.save_pretrained(self.folder.path / BEST, card=model.describe(note))

    def as_of(self, steps: int, seconds: float) -> Model:
        """The model with the record of its runs, this one after so many steps and seconds."""
        record = {
            "command": self.recipe.published().command(),
            "steps": steps,
            "images": steps * self.batch_size,
            "minutes": round(seconds / 60, 2),
            "device": device_name(self.device),
        }
        if self.origin.runs:
            record["init"] = f"{self.recipe.published().init} ({self.origin.weights})"
        return self.origin.after(self.model, record)


def _on_all(value: bool, accelerator: Accelerator | None) -> bool:
    """Whether it holds on one of the processes, on all of them."""
    if accelerator is None or accelerator.num_processes == 1:
        return value
    return bool(accelerator.reduce(torch.tensor([float(value)], device=accelerator.device), "sum").item())


def _begun(folder: RunFolder, *, resume: bool, overwrite: bool) -> bool:
    """Whether to go on from a checkpoint; a folder in use is refused, unless to go on in it or to start anew."""
    out = folder.path
    if any(path.name != LOCK for path in out.iterdir()) and not (resume or overwrite):
        raise UsageError(
            f"the output folder {out} is not empty; use --resume to go on, --overwrite to start anew, or another folder"
        )
    return resume and folder.state() is not None


def _begin(recipe: Recipe, folder: RunFolder, *, anew: bool) -> None:
    """Clear the folder of what is in the way and note the recipe: the last that may be refused is behind."""
    folder.clear(everything=anew)
    write_atomically(folder.path / RECIPE_FILE, yaml.safe_dump(recipe.to_dict(), sort_keys=False).encode())


def finished(model: Model, examples: Examples, seed: int, most: int | None = None) -> Model:
    """The trained model with its isotropic variance fitted (on at most so many examples), if it has one level."""
    if model.config.param not in DENOISERS or len(model.levels) != 1:
        return model
    count = ISOTROPIC_EXAMPLES.get(examples.device.type, ISOTROPIC_EXAMPLES["cpu"])
    indices = spread(len(examples), count if most is None else min(count, most))
    streams = Streams(seed + 2, len(indices))
    x = examples.take(indices, streams)
    fitted = IsotropicMoments.fit_by_score(model, x, model.level, generator=streams)
    return Model.build(
        dataclasses.replace(model.config, isotropic_variance=fitted.variances[model.level]), model.network
    )


def _numbers(recipe: Recipe, trained: Trained, device: torch.device) -> dict[str, Any]:
    """What a model's card says of its training."""
    steps = len(trained.losses)
    rows: dict[str, Any] = {
        "command": recipe.published().command(),
        "steps": f"{steps:,} of batch {recipe.training.batch_size}",
    }
    rows |= {"device": f"{device_name(device)}, torch {torch.__version__}", "minutes": round(trained.seconds / 60, 2)}
    rows |= {"of them watching": round(trained.watch_seconds / 60, 2)} if trained.watches else {}
    for end in sorted({max(1, steps * i // 8) for i in range(1, 9)}):
        window = trained.losses[max(0, end - 100) : end]
        rows[f"loss, mean to step {end:,}"] = window.mean().item()
    rows |= {f"validation loss at step {step:,}": value for step, value in trained.validations[-1:]}
    for step, values in trained.watches[-1:]:
        samples = f"{recipe.training.watch:,} samples at step {step:,}"
        rows |= {f"{name} of {samples}": value for name, value in values.items()}
    return rows
