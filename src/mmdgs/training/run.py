"""Training a recipe into a folder: data, model, loss, the loop, and the model's files at the end.

A run with `init` takes the averaged weights of an earlier model: tensors of the same names and
shapes, for the same kind of output. A residual U-Net may have other `blocks`: new ones begin as
the identity, and those it lacks are left out. The optimiser starts anew. A checkpoint keeps the
origin, so that a resumed run does not need the earlier model any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import yaml

from mmdgs import models
from mmdgs.errors import UsageError, shown
from mmdgs.files import write_atomically
from mmdgs.folders import output_folder
from mmdgs.models import Model, ModelConfig
from mmdgs.moments import OcmMoments
from mmdgs.moments.calibrated import fitted_floors
from mmdgs.reading import reading
from mmdgs.runtime import device_name
from mmdgs.training.checkpoint import BEST, IMAGES, RECIPE_FILE, WATCH, RunFolder, last_step
from mmdgs.training.examples import Sets, read_sets, some
from mmdgs.training.loop import Trained, Trainer, Validation, summed
from mmdgs.training.objective import PerExampleLoss, loss_of
from mmdgs.training.recipe import Recipe
from mmdgs.training.untrained import new_head, new_model
from mmdgs.training.watching import SampleWatcher, one_variance, sample_watcher

if TYPE_CHECKING:
    from accelerate import Accelerator

Report = Callable[[str], None]
"""What shows a line to the user."""
ISOTROPIC_EXAMPLES = {"cuda": 50_000, "cpu": 1_000}
"""For the isotropic variance: the paper's number on a GPU; 1% standard error on a CPU."""
HEAD_EXAMPLES = {"cuda": 128, "cpu": 32}
"""Examples for the floors of a head's variances."""
FEW_EXAMPLES = 2_000
"""Examples for the isotropic variance of the best model so far, which may be kept often."""
FREE_TO_CHANGE = {
    "data_dir", "compile", "steps", "epochs", "minutes", "split", "checkpoint_every",
    "validate_every", "watch_every",
}  # fmt: skip
"""Keys that a resumed run may be given anew."""


def train_model(
    recipe: Recipe,
    out: Path | str,
    *,
    device: torch.device | str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    accelerator: Accelerator | None = None,
    progress: str | None = "training",
    report: Report | None = None,
) -> tuple[Model, Trained]:
    """Train a recipe into a folder; returns the model with its averaged weights, and how it went.

    The folder then is a model's folder (`mmdgs.load`), with `best/` beside it, recipe.yaml and
    metrics.jsonl. Ctrl-C and SIGTERM write a checkpoint, from which `resume=True` goes on, and
    raise `Interrupted`.
    """
    out, device = Path(out), torch.device(device)
    main = accelerator is None or accelerator.is_main_process
    denoiser = models.load(recipe.denoiser, device=device) if recipe.denoiser is not None else None
    settings = {key: value for key, value in recipe.to_dict().items() if key not in FREE_TO_CHANGE}
    if denoiser is not None:
        settings["weights of the denoiser"] = denoiser.digest
    folder = RunFolder(out, settings)
    with output_folder(out) if main else contextlib.nullcontext():
        resumed = main and folder.begin(resume=resume, overwrite=overwrite)
        resumed = summed(resumed, accelerator) > 0
        run = RecipeRun.start(recipe, folder, device, denoiser, resumed=resumed)
        if report:
            report(run.title())
        if report and resume:
            nothing = f"no checkpoint in {out}: starting at step 1"
            report(f"resuming after step {last_step(out):,}" if resumed else nothing)
        compiled = device.type == "cuda" if recipe.compile is None else recipe.compile
        trainer = Trainer(
            run.model.network,
            run.loss(compiled=compiled),
            run.sets.train,
            recipe.training,
            validation=Validation(run.sets.held_out, run.loss()),
            watcher=run.watcher(report) if main and recipe.training.watch is not None else None,
            keep=run.keep,
            folder=folder,
            accelerator=accelerator,
            runs_before=len(run.origin.runs),
        )
        if main:  # nothing is refused from here on
            if not resumed:
                folder.clear()
            content = yaml.safe_dump(recipe.to_dict(), sort_keys=False)
            write_atomically(out / RECIPE_FILE, content.encode())
        if accelerator:
            accelerator.wait_for_everyone()
        try:
            trained = trainer.run(progress)
        finally:
            folder.close()
        model = run.finished(len(trained.losses), trained.seconds)
        if main:
            model.save_pretrained(out, card=model.describe(_numbers(recipe, trained, device)))
        if accelerator:
            accelerator.wait_for_everyone()
    model.network.requires_grad_(False)
    return model, trained


@dataclass(frozen=True)
class Origin:
    """The runs before this one, the images they saw (None: unknown), an earlier head's scale."""

    runs: tuple[dict[str, Any], ...] = ()
    images: int | None = 0
    weights: str = ""  # the digest's first digits
    head: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeRun:
    """One run of a recipe: examples, model and its origin. It keeps the best model so far."""

    recipe: Recipe
    folder: RunFolder
    device: torch.device
    sets: Sets
    model: Model
    origin: Origin
    denoiser: Model | None

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        folder: RunFolder,
        device: torch.device,
        denoiser: Model | None,
        *,
        resumed: bool,
    ) -> RecipeRun:
        """Read the examples and make the model; a resumed one has its weights in its checkpoint."""
        if denoiser is not None:
            denoiser.network.requires_grad_(False).eval()
        sets = read_sets(recipe, device, denoiser)
        if sets.digest is not None:
            folder.settings[IMAGES] = sets.digest
        if denoiser is None:
            model = new_model(recipe, sets.shape, sets.classes)
        else:
            model = new_head(recipe, sets, denoiser)
        origin = Origin()
        if resumed:
            with reading(folder.path, "the folder of a run that this one can go on from"):
                kept = (folder.state() or {})["notes"]["origin"]
                origin = Origin(**{**kept, "runs": tuple(kept["runs"])})
                if type(origin.images) not in (int, NoneType) or not isinstance(origin.head, dict):
                    raise ValueError(f"its origin is {shown(kept)}")
                if origin.head and not model.config.head:
                    raise ValueError("its origin is a denoiser's head, and this run trains none")
        elif recipe.init is not None:
            origin = start_from(recipe.init, model)
        folder.notes = {"origin": dataclasses.asdict(origin)}
        if origin.head:
            model = _changed(model, head=origin.head | {"denoiser": model.config.head["denoiser"]})
        model = placed(model, device, recipe.training.precision)
        return cls(recipe, folder, device, sets, model, origin, denoiser)

    def title(self) -> str:
        """What is trained on what, in one line."""
        millions = sum(p.numel() for p in self.model.network.parameters()) / 1e6
        size = f"{self.recipe.model} ({millions:.2f} million parameters)"
        title = f"{size} on {len(self.sets.train):,} examples, {self.device}"
        return title + (f", from {self.recipe.init}" if self.origin.runs else "")

    def loss(self, *, compiled: bool = False) -> PerExampleLoss:
        """The recipe's loss."""
        recipe = self.recipe
        return loss_of(
            self.model,
            weighting=recipe.weighting,
            draw=recipe.level_draw,
            jitter=recipe.level_jitter,
            denoiser=self.denoiser,
            probes=recipe.probes,
            compiled=compiled,
        )

    def watcher(self, report: Report | None) -> SampleWatcher:
        """What looks at samples on the way."""
        images, data = self.sets.images, self.recipe.data
        if images is None:
            what = "crops" if self.recipe.crop else "points"
            raise UsageError(f"watch is for images, and {data!r} has {what}: leave it out")
        folder = self.folder.path / WATCH
        return sample_watcher(self.model, images, self.recipe.training, folder, report)

    def keep(self, what: str, value: float, step: int, seconds: float) -> None:
        """Write the model as it is now as the best so far."""
        model = self.finished(step, seconds, FEW_EXAMPLES)
        note = {"command": self.recipe.published().command(), "step": step, what: value}
        model.save_pretrained(self.folder.path / BEST, card=model.describe(note))

    def finished(self, steps: int, seconds: float, most: int | None = None) -> Model:
        """The model after so many steps, with its floors or variance fitted (on at most `most`)."""
        model, seed = self.after(steps, seconds), self.recipe.training.seed
        if self.denoiser is not None and model.config.param == models.VARIANCE_RATIO:
            x = self.denoiser.scaled(some(self.sets.train, HEAD_EXAMPLES, seed))
            moments = OcmMoments(self.denoiser, model.head_of(model.network))
            scale = fitted_floors(moments, x, model.config.ratio_scale, seed=seed)
            return _changed(model, head=model.config.head | {"scale": scale.to_json()})
        if model.config.param not in models.DENOISERS or len(model.levels) != 1:
            return model
        try:
            examples = some(self.sets.train, ISOTROPIC_EXAMPLES, seed, most)
            fitted = one_variance(model, examples, seed)
        except ValueError as error:
            where = f"the network of {self.folder.path} cannot be used"
            raise UsageError(f"{where} ({error}); train it with smaller steps") from error
        return _changed(model, isotropic_variance=fitted.variances[model.level])

    def after(self, steps: int, seconds: float) -> Model:
        """The model with the record of all its runs and images, this one after so many steps."""
        recipe, origin = self.recipe.published(), self.origin
        images = steps * min(recipe.training.batch_size, len(self.sets.train))
        record = {
            "command": recipe.command(),
            "steps": steps,
            "images": images,
            "minutes": round(seconds / 60, 2),
            "device": device_name(self.device),
        }
        if origin.runs:
            record["init"] = f"{recipe.init} ({origin.weights})"
        seen = None if origin.images is None else origin.images + images
        return _changed(self.model, runs=(*origin.runs, record), trained_images=seen)


def _changed(model: Model, **changes: Any) -> Model:
    """The model with other values in its configuration."""
    return Model.build(dataclasses.replace(model.config, **changes), model.network)


def placed(model: Model, device: torch.device, precision: str) -> Model:
    """The model on a device; convolutions on a GPU, and in bf16, are fastest with channels last."""
    model.to(device)
    if (device.type == "cuda" or precision == "bf16") and len(model.config.shape) == 3:
        model.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def start_from(source: str, model: Model) -> Origin:
    """Put an earlier model's weights into a new one of the same architecture; its origin then."""
    earlier = models.load(source)
    difference = _difference(earlier.config, model.config)
    if difference:
        advice = "give the recipe it was trained with, or leave --init out"
        raise UsageError(f"the model {source} cannot be started from: {difference}; {advice}")
    tensors = earlier.network.state_dict()
    start = tensors
    if earlier.config.options != model.config.options:
        own = model.network.state_dict()
        start = {key: tensors.get(key, value) for key, value in own.items()}
    models.load_weights(model.network, start, f"the model {source}", than="this recipe's")
    return Origin(
        runs=earlier.config.runs or ({"command": "not recorded"},),
        images=earlier.config.trained_images,
        weights=models.weights_digest(tensors, source)[:12],
        head=earlier.config.head,
    )


def _difference(old: ModelConfig, now: ModelConfig) -> str | None:
    """The first difference of two models that weights depend on: not levels, sizes or dropout, nor
    how many blocks a residual U-Net has.
    """
    free = {"dropout"} | ({"blocks"} if now.network == "residual-unet" else set())
    pairs = {name: (getattr(old, name), getattr(now, name)) for name in ("network", "param")}
    for key in dict.fromkeys([*now.options, *old.options]):
        if key not in free:
            pairs[f"network.{key}"] = old.options.get(key), now.options.get(key)
    if old.param == models.CLASSES:
        pairs["classes"] = ", ".join(old.classes), ", ".join(now.classes)
    for name, (before, after) in pairs.items():
        if before != after:
            return f"its {name} is {before!r}, and the recipe's {after!r}"
    return None


def _numbers(recipe: Recipe, trained: Trained, device: torch.device) -> dict[str, Any]:
    """What a model's card says of its training."""
    steps = len(trained.losses)
    rows: dict[str, Any] = {
        "command": recipe.published().command(),
        "steps": f"{steps:,} of batch {recipe.training.batch_size}",
        "device": f"{device_name(device)}, torch {torch.__version__}",
        "minutes": round(trained.seconds / 60, 2),
    }
    rows |= {"of them watching": round(trained.watch_seconds / 60, 2)} if trained.watches else {}
    for end in sorted({max(1, steps * i // 8) for i in range(1, 9)}):
        rows[f"loss, mean to step {end:,}"] = trained.losses[max(0, end - 100) : end].mean().item()
    rows |= {f"validation loss at step {step:,}": value for step, value in trained.validations[-1:]}
    for step, values in trained.watches[-1:]:
        samples = f"{recipe.training.watch:,} samples at step {step:,}"
        rows |= {f"{name} of {samples}": value for name, value in values.items()}
    return rows
