"""Training a recipe into a folder: data, model, loss, the loop, and the model's files at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor
from torch.nn import functional

from mmdgs import losses
from mmdgs.data import TOYS, ImageSet, load_images, spread, toy
from mmdgs.denoisers import Compiled, Denoiser, EnergyDenoiser, takes_level
from mmdgs.environment import device_name
from mmdgs.errors import UsageError
from mmdgs.files import LOCK, output_folder, write_atomically
from mmdgs.models import CLASSES, DENOISERS, MEAN_STD, Model, ModelConfig
from mmdgs.moments import IsotropicMoments, LearnedMoments
from mmdgs.networks.registry import conditional_options, preset
from mmdgs.pretrained import Pretrained
from mmdgs.randomness import Generator, Streams
from mmdgs.schedules import parse_levels
from mmdgs.training.energies import CompiledEnergy
from mmdgs.training.engine import PerExampleLoss, Trained, Trainer, Validation
from mmdgs.training.examples import Examples, TensorExamples, examples_of
from mmdgs.training.folder import RunFolder
from mmdgs.training.heads import frozen_denoiser, new_head, ocm_loss_of
from mmdgs.training.levels import level_draw
from mmdgs.training.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

FLIPPED = ("cifar10", "celeba")
"""Sets whose images may be mirrored; digits may not."""
RECIPE_FILE = "recipe.yaml"
VALIDATION_EXAMPLES = 2_000
HEAD_VALIDATION = {"cuda": 1_000, "cpu": 64}
"""Of a head, whose loss takes products with its denoiser's Jacobian."""
TOY_POINTS = 10_000
ISOTROPIC_EXAMPLES = {"cuda": 50_000, "cpu": 1_000}
"""Examples for the isotropic variance: the paper's number on a GPU, fewer on a CPU (a standard error below 1%)."""
FREE_TO_CHANGE = {
    "data_dir", "compile", "steps", "epochs", "minutes", "split", "checkpoint_every", "validate_every"
}  # fmt: skip
"""Keys that a resumed run may be given anew."""


@dataclass(frozen=True)
class _Sets:
    """Examples to train on and to validate on, with what the model must know of them."""

    train: Examples
    held_out: Examples
    shape: tuple[int, ...]
    classes: tuple[str, ...] = ()


def _sets(recipe: Recipe, device: torch.device, denoiser: Pretrained | None = None) -> _Sets:
    if recipe.data in TOYS:
        one = toy(recipe.data)
        points = recipe.limit or TOY_POINTS
        seed = recipe.training.seed
        held_out = one.sample(VALIDATION_EXAMPLES, seed + 1).to(device)
        return _Sets(TensorExamples(one.sample(points, seed).to(device)), TensorExamples(held_out), (2,))

    # A head's images are those of its denoiser, in size and colours.
    size, channels = recipe.size, None
    if denoiser is not None and len(denoiser.shape) == 3:
        channels, height, width = denoiser.shape
        size = height if size is None and height == width else size

    def read(split: str, limit: int | None) -> ImageSet:
        found = load_images(
            recipe.data,
            split,
            data_dir=recipe.data_dir,
            size=size,
            channels=channels,
            unreadable=recipe.unreadable,
            limit=limit,
        )
        return found.to(device)

    labelled = recipe.param == CLASSES
    train, test = read("train", recipe.limit), read("test", None)
    if labelled and train.labels is None:
        raise UsageError(f"the data {recipe.data!r} has no labels to train a classifier on")
    most = VALIDATION_EXAMPLES if denoiser is None else HEAD_VALIDATION.get(device.type, HEAD_VALIDATION["cpu"])
    validation = spread(len(test), most).to(device)
    flips = recipe.data in FLIPPED if recipe.flips is None else recipe.flips
    return _Sets(
        examples_of(train, flips=flips, labelled=labelled),
        examples_of(test.take(validation), labelled=labelled),
        train.shape,
        train.classes,
    )


def loss_of(
    model: Model, *, weighting: str | None = None, draw: str | None = None, compiled: bool = False
) -> PerExampleLoss:
    """The loss that goes with a model's parametrisation, its network through torch.compile if asked.

    `weighting` (losses.WEIGHTINGS) and `draw` (levels.DRAWS) are for the denoisers' loss, and for many levels.
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
    denoiser = _compiled(model) if compiled else model.denoiser
    weigh = losses.WEIGHTINGS[weighting or "score"]
    return lambda x, generator: losses.dsm(denoiser, x, drawn(x, generator), generator=generator, weighting=weigh)


def _compiled(model: Model) -> Denoiser:
    denoiser = model.denoiser
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
        trained_on=recipe.data,
    )
    if (len(shape) == 3) == (network == "mlp"):
        raise UsageError(
            f"the model {recipe.model!r} does not fit data of shape {shape}: use an mlp for points, a unet for images"
        )
    model = Model(config, seed=recipe.training.seed)
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
) -> tuple[Model, Trained]:
    """Train a recipe into a folder; returns the model with its averaged weights, and how it went.

    The folder then is a model's folder (`mmdgs.load`), with `best/` beside it, recipe.yaml and metrics.jsonl.
    """
    out, device = Path(out), torch.device(device)
    if resume and overwrite:
        raise UsageError("choose one of --resume (go on) and --overwrite (start anew)")
    main = accelerator is None or accelerator.is_main_process
    denoiser = frozen_denoiser(recipe, device) if recipe.loss == "ocm" else None
    settings = {key: value for key, value in recipe.to_dict().items() if key not in FREE_TO_CHANGE}
    folder = RunFolder(out, settings | ({} if denoiser is None else {"weights of the denoiser": denoiser.digest}))
    with output_folder(out) if main else contextlib.nullcontext():
        begun = main and _begun(folder, resume=resume, overwrite=overwrite)
        sets = _sets(recipe, device, denoiser)
        if denoiser is None:
            model = placed(new_model(recipe, sets.shape, sets.classes), device)
        else:
            model = placed(new_head(recipe, denoiser, sets.shape, sets.train), device)
        compiled = device.type == "cuda" if recipe.compile is None else recipe.compile
        if report:
            parameters = sum(p.numel() for p in model.network.parameters())
            report(
                f"{recipe.model} ({parameters / 1e6:.2f} million parameters) on {len(sets.train):,} examples, {device}"
            )

        def keep_best(value: float, step: int) -> None:
            note = {"command": recipe.command(), "step": step, "validation loss": value}
            model.save_pretrained(out / "best", card=model.describe(note))

        loss: Callable[..., PerExampleLoss]
        if denoiser is None:
            loss = functools.partial(loss_of, model, weighting=recipe.weighting, draw=recipe.level_draw)
        else:
            loss = functools.partial(ocm_loss_of, model, denoiser, recipe)
        validation = Validation(sets.held_out, loss(), keep_best)
        trainer = Trainer(
            model.network,
            loss(compiled=compiled),
            sets.train,
            recipe.training,
            validation=validation,
            folder=folder,
            accelerator=accelerator,
        )
        if main:
            _begin(recipe, folder, anew=not begun)
        if accelerator:
            accelerator.wait_for_everyone()
        try:
            trained = trainer.run(progress)
        finally:
            folder.close()
        model = finished(model, sets.train, recipe.training.seed)
        if main:
            model.save_pretrained(out, card=model.describe(_numbers(recipe, trained, device)))
        if accelerator:
            accelerator.wait_for_everyone()
    model.network.requires_grad_(False)
    return model, trained


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


def finished(model: Model, examples: Examples, seed: int) -> Model:
    """The trained model with its isotropic variance fitted, where it is a denoiser at one level."""
    if model.config.param not in DENOISERS or len(model.levels) != 1:
        return model
    indices = spread(len(examples), ISOTROPIC_EXAMPLES.get(examples.device.type, ISOTROPIC_EXAMPLES["cpu"]))
    streams = Streams(seed + 2, len(indices))
    x = examples.take(indices, streams)
    fitted = IsotropicMoments.fit(model.denoiser, x, model.level, generator=streams)
    return Model(dataclasses.replace(model.config, isotropic_variance=fitted.variances[model.level]), model.network)


def _numbers(recipe: Recipe, trained: Trained, device: torch.device) -> dict[str, Any]:
    """What a model's card says of its training."""
    steps = len(trained.losses)
    rows: dict[str, Any] = {"command": recipe.command(), "steps": f"{steps:,} of batch {recipe.training.batch_size}"}
    rows |= {"device": f"{device_name(device)}, torch {torch.__version__}", "minutes": round(trained.seconds / 60, 2)}
    for end in sorted({max(1, steps * i // 8) for i in range(1, 9)}):
        window = trained.losses[max(0, end - 100) : end]
        rows[f"loss, mean to step {end:,}"] = window.mean().item()
    rows |= {f"validation loss at step {step:,}": value for step, value in trained.validations[-1:]}
    return rows
