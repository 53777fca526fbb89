"""The networks of the MNIST experiment: its sizes, its recipes, and training runs in the output folder.

A run lives in models/NAME (a model's folder, which `mmdgs.load` reads) and, once it is over, in a part with its
losses. A run that was stopped goes on from its checkpoint; one that ended in a loss that is not finite stays ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from mmdgs.errors import NonFiniteError, UsageError
from mmdgs.lab.experiment import Context
from mmdgs.lab.toys import together
from mmdgs.lab.workspace import Part
from mmdgs.models import CONFIG, Model, load
from mmdgs.training import Recipe, TrainingSettings, metrics, train_model
from mmdgs.training.checkpoint import RECIPE_FILE

SIGMA = 0.5
SIGMAS = (0.3, 0.5, 0.8)
ENERGY, LEARNED = f"energy-{SIGMA:g}", f"kl-{SIGMA:g}"
CURVES = {"loss-dsm": "energy", "loss-kl": "mean-std"}
CLASSIFIER = "classifier"


@dataclass(frozen=True)
class MnistSettings:
    """Sizes of the MNIST experiment; where the paper has a number, it is the default."""

    model: str = "unet-small"
    network: dict[str, Any] = field(default_factory=dict)  # options over the model's preset
    training: TrainingSettings = field(
        default_factory=lambda: TrainingSettings(
            steps=6_000, batch_size=128, learning_rate=1e-3, warmup=500, decay=True, ema=0.999, precision="tf32"
        )
    )
    # Figure 5 wants the paper's constant rate: a decaying one would calm any loss. None: the models' own runs.
    curves: TrainingSettings | None = field(
        default_factory=lambda: TrainingSettings(steps=4_000, batch_size=128, learning_rate=1e-4, precision="tf32")
    )
    spike_window: int = 200
    classifier: str | None = "mnist-classifier"  # a shipped one; None, or where it is absent: trained here
    classifier_limit: int | None = None
    classifier_epochs: float = 5
    chains: int = 1_000
    groups: int = 4  # the chains are cut into so many, for intervals
    steps: int = 20
    probes: int = 10  # in chains
    map_probes: int = 100  # for single posteriors
    held_out: int = 500  # noisy test digits whose posteriors are looked at
    exact_images: int = 4  # of these, with their whole Jacobian
    most_probes: int = 256
    probe_repeats: int = 8


FULL = MnistSettings()
QUICK = MnistSettings(
    model="unet-tiny",
    # A third level of 7 x 7 pixels makes the middle's attention cheap, and sees more of the digit.
    network={"multipliers": [1, 2, 2]},
    training=TrainingSettings(steps=260, batch_size=16, learning_rate=4e-3, warmup=20, decay=True, ema=0.95),
    curves=TrainingSettings(steps=200, batch_size=8, learning_rate=2e-3),
    spike_window=50,
    classifier_limit=6_000,
    classifier_epochs=1,
    chains=32,
    probes=4,
    held_out=25,
    exact_images=2,
    most_probes=64,
    probe_repeats=2,
)


def settings_for(context: Context) -> MnistSettings:
    """The sizes a run asks for."""
    settings = QUICK if context.quick else FULL
    training = replace(settings.training, seed=context.seed)
    curves = None if settings.curves is None else replace(settings.curves, seed=context.seed)
    return replace(settings, training=training, curves=curves)


@dataclass(frozen=True)
class Training:
    """A run that is over: its losses (the last one NaN if it ended in that), and its model, if it left one."""

    name: str
    asked: dict[str, Any]
    losses: Tensor
    seconds: float
    validation_loss: float | None
    stopped_at: int | None = None
    model: Model | None = None

    def record(self) -> dict[str, Any]:
        """The numbers of the run for records.json."""
        return {
            "recipe": self.asked,
            "steps": int(torch.isfinite(self.losses).sum()),
            "seconds": self.seconds,
            "validation_loss": self.validation_loss,
            "stopped_at": self.stopped_at,
            "isotropic_variance": self.model.config.isotropic_variance if self.model else None,
        }


def recipes(context: Context, settings: MnistSettings) -> dict[str, Recipe]:
    """What is trained, by name."""
    base = Recipe(data_dir=context.data_dir, model=settings.model, network=settings.network, training=settings.training)
    found = {f"energy-{sigma:g}": replace(base, sigma=sigma) for sigma in SIGMAS}
    found[LEARNED] = replace(base, sigma=SIGMA, param="mean-std", loss=None)
    if settings.curves is not None:
        for name, param in CURVES.items():
            found[name] = replace(base, sigma=SIGMA, param=param, loss=None, training=settings.curves)
    return found


def train_all(context: Context, settings: MnistSettings) -> dict[str, Training]:
    """Train every model that the folder does not have, the classifier too."""
    begin(context)
    wanted = recipes(context, settings)
    quiet = shared(context)
    jobs: list[Callable[[], object]] = [partial(trained, context, n, r, quiet=quiet) for n, r in wanted.items()]
    each(context, [*jobs, partial(classifier, context, settings, quiet=quiet)], "training")
    return {name: trained(context, name, recipe) for name, recipe in wanted.items()}


def shared(context: Context) -> bool:
    """Whether jobs run side by side, under one bar."""
    return context.device.type == "cpu" and torch.get_num_threads() > 1


def each(context: Context, jobs: Sequence[Callable[[], object]], label: str) -> None:
    """Run jobs side by side where there are CPU threads for it, else one after the other with bars of their own."""
    if shared(context):
        together(context, jobs, label)
    else:
        for job in jobs:
            job()


def begin(context: Context) -> None:
    """Forget the models of an earlier run that was not resumed: --overwrite removes the parts, this one among them."""
    models = context.workspace.out / "models"

    def forget() -> Part:
        for name in (*recipes(context, FULL), CLASSIFIER):
            for file in (CONFIG, RECIPE_FILE):
                (models / name / file).unlink(missing_ok=True)
        return Part()

    context.workspace.part("models", {}, forget)


def trained(context: Context, name: str, recipe: Recipe, *, quiet: bool = False) -> Training:
    """A run of this recipe in models/NAME: finished, gone on with, or begun."""
    folder = context.workspace.out / "models" / name
    asked = _asked(recipe)

    def compute() -> Part:
        stopped_at = None
        if not (_same_recipe(folder, asked) and (folder / CONFIG).is_file()):
            stopped_at = _train(context, folder, recipe, asked, None if quiet else f"training {name}")
        lines = metrics(folder)
        losses = [line["loss"] for line in lines if "loss" in line] + [math.nan] * (stopped_at is not None)
        validations = [line["validation_loss"] for line in lines if "validation_loss" in line]
        values = {"stopped_at": stopped_at, "validation_loss": validations[-1] if validations else None}
        values["seconds"] = _seconds(folder)
        return Part(values, {"losses": torch.tensor(losses, dtype=torch.float64)})

    part = context.workspace.part(f"train-{name}", asked, compute)
    where = folder if part.values["stopped_at"] is None else folder / "best"
    found = load(where, device=context.device) if (where / CONFIG).is_file() else None
    if found is None and part.values["stopped_at"] is None:
        raise UsageError(f"the model in {where} is gone; use --overwrite to start anew, or another folder")
    return Training(name, asked, part.tensors["losses"], model=found, **part.values)


def _train(context: Context, folder: Path, recipe: Recipe, asked: dict[str, Any], progress: str | None) -> int | None:
    """Train into the folder; returns the step at which the loss stopped being finite, if it did."""
    go_on = _same_recipe(folder, asked)
    try:
        train_model(recipe, folder, device=context.device, resume=go_on, overwrite=not go_on, progress=progress)
    except NonFiniteError as error:
        return error.step or 0
    return None


def _asked(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON, without the place of the data."""
    table: dict[str, Any] = json.loads(json.dumps(recipe.to_dict()))
    table.pop("data_dir")
    return table


def _same_recipe(folder: Path, asked: dict[str, Any]) -> bool:
    try:
        found = yaml.safe_load((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return False
    return isinstance(found, dict) and {k: v for k, v in found.items() if k != "data_dir"} == asked


def _seconds(folder: Path) -> float:
    """How long the run took, from its last checkpoint."""
    try:
        return float(json.loads((folder / "checkpoints" / "last" / "state.json").read_text())["seconds"])
    except (OSError, ValueError, KeyError):
        return math.nan


def classifier(context: Context, settings: MnistSettings, *, quiet: bool = False) -> Model:
    """The classifier that serves as yardstick: the shipped one, or one trained here."""
    if settings.classifier is not None:
        try:
            return load(settings.classifier, device=context.device)
        except UsageError:
            pass
    training = TrainingSettings(
        steps=None, epochs=settings.classifier_epochs, batch_size=64, learning_rate=2e-3, warmup=20, decay=True,
        ema=0.98, seed=context.seed,
    )  # fmt: skip
    recipe = Recipe(
        data_dir=context.data_dir, model="classifier", param="classes", limit=settings.classifier_limit,
        training=training,
    )  # fmt: skip
    found = trained(context, CLASSIFIER, recipe, quiet=quiet).model
    if found is None:
        raise UsageError("the classifier's training ended in a loss that is not finite")
    return found
