"""The networks of the MNIST experiment with their training runs, and what samples are judged by.

A run lives in models/NAME (a model's folder, which `mmdgs.load` reads) and, once it is over, in a
part with its losses. A run that was stopped goes on from its checkpoint; one that ended in a loss
that is not finite stays ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.experiment import Context
from experiments.grid import together
from mmdgs.covariances import RademacherDiagonal, named
from mmdgs.data import dequantised, load_images, midpoints, spread, to_uint8
from mmdgs.data.transforms import LEVELS
from mmdgs.errors import NonFiniteError, UsageError
from mmdgs.metrics import FeatureMoments, class_shares, entropy, frechet_distance, total_variation
from mmdgs.models import CONFIG, Model, load
from mmdgs.moments import FLOOR, Moments
from mmdgs.networks.classifier import ConvClassifier
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Streams
from mmdgs.training import Recipe, TrainingSettings, last_step, metrics, train_model
from mmdgs.workspace import Part

SIGMA = 0.5
SIGMAS = (0.3, 0.5, 0.8)
ENERGY, LEARNED = f"energy-{SIGMA:g}", f"kl-{SIGMA:g}"
CURVES = {"loss-dsm": "energy", "loss-kl": "mean-std"}
METHODS = {"diagonal": "diagonal", "isotropic": "isotropic", "learned": "learned by KL"}
"""The posteriors compared: two from the energy trained by DSM, and a network trained by KL."""
QUANTISATION = 1 / math.sqrt(12) / LEVELS
"""The standard deviation within one grey level: the noise of a pixel that is always black."""
TRAINING = TrainingSettings(
    steps=6_000, batch_size=128, learning_rate=1e-3, warmup=500, decay=True, ema=0.999,
    precision="tf32",
)  # fmt: skip
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
    map_probes: int = 100  # for the covariances that are drawn


QUICK = MnistSettings(
    model="unet-tiny",
    # A third level of 7 x 7 pixels makes the middle's attention cheap, and sees more of the digit.
    network={"multipliers": [1, 2, 2]},
    training=TrainingSettings(
        steps=260, batch_size=16, learning_rate=4e-3, warmup=20, decay=True, ema=0.95
    ),
    curves=TrainingSettings(steps=200, batch_size=8, learning_rate=2e-3),
    spike_window=50,
    chains=32,
    probes=4,
)


def mnist_settings(context: Context) -> MnistSettings:
    """The sizes a run asks for."""
    settings = context.sized(MnistSettings(), QUICK)
    training = replace(settings.training, seed=context.seed)
    return replace(settings, training=training, curves=replace(settings.curves, seed=context.seed))


@dataclass(frozen=True)
class Training:
    """A run that is over: its losses (the last one NaN if it ended in that), and its model, if it
    left one.
    """

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
            "recipe": self.recipe.to_dict(),
            "steps": int(torch.isfinite(self.losses).sum()),
            "seconds": self.seconds,
            "validation_loss": self.validation_loss,
            "stopped_at": self.stopped_at,
        }


def recipes(context: Context, settings: MnistSettings) -> dict[str, Recipe]:
    """What is trained, by name."""
    known: Any = {"model": settings.model, "network": settings.network}
    base = Recipe(data_dir=context.data_dir, training=settings.training, **known)
    by_name = {f"energy-{sigma:g}": replace(base, sigma=sigma) for sigma in SIGMAS}
    by_name[LEARNED] = replace(base, sigma=SIGMA, param="mean-std", loss=None)
    for name, param in CURVES.items():
        by_name[name] = replace(base, sigma=SIGMA, param=param, loss=None, training=settings.curves)
    return by_name


def train_all(context: Context, settings: MnistSettings) -> dict[str, Training]:
    """Train every model that the folder does not have, side by side on a CPU."""
    networks = recipes(context, settings)
    jobs = [partial(trained, context, name, recipe) for name, recipe in networks.items()]
    together(context, jobs, "training")
    return {name: trained(context, name, recipe) for name, recipe in networks.items()}


def trained(context: Context, name: str, recipe: Recipe) -> Training:
    """A run of this recipe in models/NAME: finished, gone on with, or begun."""
    folder = context.workspace.out / "models" / name

    def compute() -> Part:
        go_on = context.workspace.resumed and last_step(folder) is not None
        stopped_at, seconds = None, math.nan
        try:
            options: Any = {"device": context.device, "progress": f"training {name}"}
            _, run = train_model(recipe, folder, resume=go_on, overwrite=not go_on, **options)
            seconds = run.seconds
        except NonFiniteError as error:
            stopped_at = error.step or 0
        lines = metrics(folder)
        losses = [line["loss"] for line in lines if "loss" in line]
        losses += [math.nan] * (stopped_at is not None)
        validated = [line["validation_loss"] for line in lines if "validation_loss" in line]
        values = {"stopped_at": stopped_at, "seconds": seconds}
        values["validation_loss"] = validated[-1] if validated else None
        return Part(values, {"losses": torch.tensor(losses, dtype=torch.float64)})

    # Where the data files are does not matter.
    part = context.workspace.part(f"train-{name}", replace(recipe, data_dir=None), compute)
    where = folder if part.values["stopped_at"] is None else folder / "best"
    model = load(where, device=context.device) if (where / CONFIG).is_file() else None
    if model is None and part.values["stopped_at"] is None:
        raise UsageError(f"the model in {where} is gone; use --overwrite to start anew")
    return Training(name, recipe, part.tensors["losses"], model=model, **part.values)


def source(runs: Mapping[str, Training], method: str) -> Training:
    """The run that a posterior comes from."""
    return runs[LEARNED if method == "learned" else ENERGY]


def moments_of(model: Model, method: str, probes: int) -> Moments:
    """The estimator of one of METHODS; the diagonal by the paper's probes."""
    if method == "diagonal":
        return model.posterior(RademacherDiagonal(probes, floor=FLOOR))
    return model.posterior(named(method, {"calibrated": False}))


def noisy_digits(context: Context, level: NoiseLevel, count: int) -> tuple[Tensor, Tensor]:
    """Test digits, spread over the test set, dequantised, and noised at a level."""
    test = load_images("mnist", "test", data_dir=context.data_dir).images
    streams = Streams(context.seed, count, purpose="held out")
    x = dequantised(test[spread(len(test), count)], streams)
    return x, add_noise(x, level, generator=Streams(context.seed, count, purpose="noise"))


# --- what samples are judged by

CLASSIFIER = "mnist-classifier"
BLACK_SHARE = 0.99
"""A background pixel is black in at least this share of the training images."""
BATCH = 500


@dataclass(frozen=True)
class Yardstick:
    """A classifier with what it says of half of the test images, and the mask of background pixels.

    Samples are judged as stored images would be, in 256 grey levels; only the background's noise is
    measured on the samples as they are.
    """

    classifier: Model
    accuracy: float
    reference: FeatureMoments
    shares: Tensor
    background: Tensor  # (1, H, W)

    def record(self) -> dict[str, Any]:
        """The numbers for records.json."""
        return {
            "classifier_accuracy": self.accuracy,
            "classifier_sha256": self.classifier.digest,
            "reference_images": self.reference.count,
            "test_class_shares": self.shares.tolist(),
            "background_pixels": int(self.background.sum()),
        }

    def score(self, x: Tensor, groups: int) -> dict[str, Any]:
        """The numbers of samples (n, 1, H, W): one of each for every group, and of all together.

        The background's noise is the standard deviation of a pixel over images, the median over the
        background's pixels: strokes do not count.
        """
        features, probabilities = features_and_classes(self.classifier, midpoints(to_uint8(x)))
        labels = probabilities.argmax(1)
        size = len(x) // groups
        cuts = [slice(i * size, (i + 1) * size) for i in range(groups)]
        shares = [class_shares(labels[cut], len(self.shares)) for cut in cuts]
        black = x[:, self.background].double()
        return {
            "count": len(x),
            "group_size": size,
            "frechet": [frechet_distance(features[cut], self.reference) for cut in cuts],
            "class_distance": [total_variation(share, self.shares) for share in shares],
            "entropy": [entropy(share) for share in shares],
            "confidence": [probabilities[cut].max(1).values.double().mean().item() for cut in cuts],
            "background": [black[cut].std(0).median().item() for cut in cuts],
            "class_shares": class_shares(labels, len(self.shares)).tolist(),
        }


def features_and_classes(classifier: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """A classifier's features (n, f) and class probabilities (n, c) of images in [0, 1), on the
    CPU.
    """
    network = classifier.network
    assert isinstance(network, ConvClassifier)
    with torch.no_grad():
        features = [network.features(some.to(classifier.device)) for some in x.split(BATCH)]
        probabilities = [network.head(batch).softmax(1).cpu() for batch in features]
    return torch.cat([batch.cpu() for batch in features]), torch.cat(probabilities)


def scored_test_images(context: Context, count: int) -> Tensor:
    """Test images to be scored like samples, dequantised: of the half that nothing is compared
    with.
    """
    images = load_images("mnist", "test", data_dir=context.data_dir).images[0::2][:count]
    return dequantised(images, Streams(context.seed, len(images), purpose="scored test images"))


def yardstick(context: Context) -> Yardstick:
    """The classifier that ships, with its accuracy; half of the test images is the reference."""
    model = load(CLASSIFIER, device=context.device)

    def compute() -> Part:
        test, train = (
            load_images("mnist", split, data_dir=context.data_dir) for split in ("test", "train")
        )
        assert test.labels is not None
        features, probabilities = features_and_classes(model, midpoints(test.images))
        half = FeatureMoments.of(features[1::2])
        black = (train.images == 0).sum(0, dtype=torch.float64) / len(train)
        tensors = {"mean": half.mean, "scatter": half.scatter}
        tensors["shares"] = class_shares(test.labels, len(test.classes))
        tensors["background"] = (black >= BLACK_SHARE).to(torch.uint8)
        accuracy = (probabilities.argmax(1) == test.labels).double().mean().item()
        return Part({"accuracy": accuracy, "count": half.count}, tensors)

    part = context.workspace.part("yardstick", model, compute)
    tensors, accuracy = part.tensors, part.values["accuracy"]
    reference = FeatureMoments(part.values["count"], tensors["mean"], tensors["scatter"])
    return Yardstick(model, accuracy, reference, tensors["shares"], tensors["background"].bool())
