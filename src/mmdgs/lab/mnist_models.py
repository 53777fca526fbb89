"""The networks of the MNIST experiment: its sizes, its recipes, its training runs, and their posteriors.

A run lives in models/NAME (a model's folder, which `mmdgs.load` reads) and, once it is over, in a part with its losses.
A run that was stopped goes on from its checkpoint; one that ended in a loss that is not finite stays ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmdgs.data import dequantised, load_images, spread
from mmdgs.data.transforms import LEVELS
from mmdgs.errors import NonFiniteError, UsageError
from mmdgs.lab.experiment import Context
from mmdgs.lab.grid import together
from mmdgs.lab.workspace import Part, described
from mmdgs.models import CONFIG, Model, load
from mmdgs.moments import FLOOR, Moments
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Streams
from mmdgs.training import Recipe, TrainingSettings, last_step, metrics, train_model

SIGMA = 0.5
SIGMAS = (0.3, 0.5, 0.8)
ENERGY, LEARNED = f"energy-{SIGMA:g}", f"kl-{SIGMA:g}"
CURVES = {"loss-dsm": "energy", "loss-kl": "mean-std"}
METHODS = {"diagonal": "diagonal", "isotropic": "isotropic", "learned": "learned by KL"}
"""The posteriors compared: two from the energy trained by DSM, and a network trained by KL."""
QUANTISATION = 1 / math.sqrt(12) / LEVELS
"""The standard deviation within one grey level: the noise of a pixel that is always black."""
TRAINING = TrainingSettings(
    steps=6_000, batch_size=128, learning_rate=1e-3, warmup=500, decay=True, ema=0.999, precision="tf32"
)
CURVE_TRAINING = TrainingSettings(steps=4_000, batch_size=128, learning_rate=1e-4, precision="tf32")
"""Figure 5 wants the paper's constant rate: a decaying one would calm any loss."""


@dataclass(frozen=True)
class MnistSettings:
    """Sizes of the MNIST experiment; where the paper has a number, it is the default."""

    model: str = "unet-small"
    network: dict[str, Any] = field(default_factory=dict)  # options over the model's preset
    training: TrainingSettings = TRAINING
    curves: TrainingSettings = CURVE_TRAINING
    spike_window: int = 200
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
    chains=32,
    probes=4,
    held_out=25,
    exact_images=2,
    most_probes=64,
    probe_repeats=2,
)


def mnist_settings(context: Context) -> MnistSettings:
    """The sizes a run asks for."""
    settings = QUICK if context.quick else FULL
    training, curves = (replace(one, seed=context.seed) for one in (settings.training, settings.curves))
    return replace(settings, training=training, curves=curves)


@dataclass(frozen=True)
class Training:
    """A run that is over: its losses (the last one NaN if it ended in that), and its model, if it left one."""

    name: str
    recipe: Recipe
    losses: Tensor
    seconds: float
    validation_loss: float | None
    stopped_at: int | None = None
    model: Model | None = None

    @property
    def left(self) -> Model:
        """The run's model, which is there."""
        assert self.model is not None
        return self.model

    def record(self) -> dict[str, Any]:
        """The numbers of the run for records.json."""
        return {
            "recipe": described(self.recipe.to_dict()),
            "steps": int(torch.isfinite(self.losses).sum()),
            "seconds": self.seconds,
            "validation_loss": self.validation_loss,
            "stopped_at": self.stopped_at,
        }


def recipes(context: Context, settings: MnistSettings) -> dict[str, Recipe]:
    """What is trained, by name."""
    base = Recipe(data_dir=context.data_dir, model=settings.model, network=settings.network, training=settings.training)
    found = {f"energy-{sigma:g}": replace(base, sigma=sigma) for sigma in SIGMAS}
    found[LEARNED] = replace(base, sigma=SIGMA, param="mean-std", loss=None)
    for name, param in CURVES.items():
        found[name] = replace(base, sigma=SIGMA, param=param, loss=None, training=settings.curves)
    return found


def train_all(context: Context, settings: MnistSettings) -> dict[str, Training]:
    """Train every model that the folder does not have, side by side on a CPU."""
    wanted = recipes(context, settings)
    together(context, [partial(trained, context, name, recipe) for name, recipe in wanted.items()], "training")
    return {name: trained(context, name, recipe) for name, recipe in wanted.items()}


def trained(context: Context, name: str, recipe: Recipe) -> Training:
    """A run of this recipe in models/NAME: finished, gone on with, or begun."""
    folder = context.workspace.out / "models" / name

    def compute() -> Part:
        go_on = context.workspace.resumed and last_step(folder) is not None
        stopped_at, seconds = None, math.nan
        try:
            _, run = train_model(
                recipe, folder, device=context.device, resume=go_on, overwrite=not go_on, progress=f"training {name}"
            )
            seconds = run.seconds
        except NonFiniteError as error:
            stopped_at = error.step or 0
        lines = metrics(folder)
        losses = [line["loss"] for line in lines if "loss" in line] + [math.nan] * (stopped_at is not None)
        validations = [line["validation_loss"] for line in lines if "validation_loss" in line]
        values = {"stopped_at": stopped_at, "seconds": seconds, "validation_loss": (validations or [None])[-1]}
        return Part(values, {"losses": torch.tensor(losses, dtype=torch.float64)})

    # Where the data files are does not matter.
    part = context.workspace.part(f"train-{name}", replace(recipe, data_dir=None), compute)
    where = folder if part.values["stopped_at"] is None else folder / "best"
    found = load(where, device=context.device) if (where / CONFIG).is_file() else None
    if found is None and part.values["stopped_at"] is None:
        raise UsageError(f"the model in {where} is gone; use --overwrite to start anew, or another folder")
    return Training(name, recipe, part.tensors["losses"], model=found, **part.values)


def source(runs: Mapping[str, Training], method: str) -> Training:
    """The run that a posterior comes from."""
    return runs[LEARNED if method == "learned" else ENERGY]


def moments_of(model: Model, method: str, probes: int) -> Moments:
    """The estimator of one of METHODS; the diagonal by the paper's probes."""
    if method == "diagonal":
        return model.posterior("rademacher", probes=probes, floor=FLOOR)
    return model.posterior(method, calibrated=False)


def noisy_digits(context: Context, level: NoiseLevel, count: int) -> tuple[Tensor, Tensor]:
    """Test digits, spread over the test set, dequantised, and noised at a level."""
    test = load_images("mnist", "test", data_dir=context.data_dir).images
    x = dequantised(test[spread(len(test), count)], Streams(context.seed, count, purpose="held out"))
    return x, add_noise(x, level, generator=Streams(context.seed, count, purpose="noise"))
