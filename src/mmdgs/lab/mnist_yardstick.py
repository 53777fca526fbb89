"""What samples of MNIST are judged by: a digit classifier's features and classes, and the noise of black pixels.

Samples are judged as stored images would be, in 256 grey levels between black and white; only the background's noise
is measured on the samples as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdgs.data import dequantised, load_images, midpoints, to_uint8
from mmdgs.data.transforms import LEVELS
from mmdgs.files import tensors_to_bytes
from mmdgs.lab.experiment import Context
from mmdgs.lab.mnist_models import MnistSettings, classifier
from mmdgs.lab.workspace import Part
from mmdgs.metrics import FeatureMoments, class_shares, entropy, frechet_distance, total_variation
from mmdgs.models import Model
from mmdgs.networks.classifier import ConvClassifier
from mmdgs.randomness import Streams

BLACK_SHARE = 0.99
"""A background pixel is black in at least this share of the training images."""
QUANTISATION = 1 / math.sqrt(12) / LEVELS
"""The standard deviation within one grey level: the noise of a pixel that is always black."""
BATCH = 500
FLOOR_SEED = 40


@dataclass(frozen=True)
class Yardstick:
    """A classifier with what it says of the test images, and the mask (1, H, W) of background pixels."""

    classifier: Model
    digest: str
    accuracy: float
    reference: FeatureMoments
    shares: Tensor
    background: Tensor
    floor: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """The numbers for records.json."""
        return {
            "classifier_accuracy": self.accuracy,
            "classifier_sha256": self.digest,
            "reference_images": self.reference.count,
            "test_class_shares": self.shares.tolist(),
            "background_pixels": int(self.background.sum()),
            "test_images": self.floor,
        }


def yardstick(context: Context, settings: MnistSettings) -> Yardstick:
    """The classifier, its accuracy on all test images, and the numbers of the test images themselves.

    The test images are halved: one half is what samples are compared with, the other is scored like samples.
    """
    model = classifier(context, settings)
    digest = hashlib.sha256(tensors_to_bytes(model.network.state_dict())).hexdigest()

    def compute() -> Part:
        test = load_images("mnist", "test", data_dir=context.data_dir)
        train = load_images("mnist", "train", data_dir=context.data_dir)
        assert test.labels is not None
        features, probabilities = judge(model, midpoints(test.images))
        half = FeatureMoments.of(features[1::2])
        black = (train.images == 0).sum(0, dtype=torch.float64) / len(train)
        values = {"accuracy": (probabilities.argmax(1) == test.labels).double().mean().item(), "count": half.count}
        return Part(
            values,
            {
                "mean": half.mean,
                "scatter": half.scatter,
                "shares": class_shares(test.labels, len(test.classes)),
                "background": (black >= BLACK_SHARE).to(torch.uint8),
            },
        )

    part = context.workspace.part("yardstick", {"classifier": digest}, compute)
    reference = FeatureMoments(part.values["count"], part.tensors["mean"], part.tensors["scatter"])
    made = Yardstick(
        model, digest, part.values["accuracy"], reference, part.tensors["shares"], part.tensors["background"].bool(), {}
    )

    def score_test_images() -> Part:
        images = load_images("mnist", "test", data_dir=context.data_dir).images[0::2][: settings.chains]
        x = dequantised(images, Streams(context.seed + FLOOR_SEED, len(images)))
        return Part(score(made, x, settings.groups))

    asked = {"classifier": digest, "count": settings.chains, "groups": settings.groups, "seed": context.seed}
    floor = context.workspace.part("score-test-images", asked, score_test_images).values
    return Yardstick(model, digest, made.accuracy, reference, made.shares, made.background, floor)


def judge(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """The classifier's features (n, 64) and class probabilities (n, 10) of images in [0, 1), on the CPU."""
    network = model.network
    assert isinstance(network, ConvClassifier)
    device = next(network.parameters()).device

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for part in x.split(BATCH):
            features = network.features(part.to(device))
            yield features.cpu(), network.head(features).softmax(1).cpu()

    with torch.no_grad():
        features, probabilities = zip(*batches(), strict=True)
    return torch.cat(features), torch.cat(probabilities)


def score(by: Yardstick, x: Tensor, groups: int) -> dict[str, Any]:
    """The numbers of samples (n, 1, H, W): one of each for every group, and of all together."""
    features, probabilities = judge(by.classifier, midpoints(to_uint8(x)))
    labels = probabilities.argmax(1)
    size = len(x) // groups
    values: dict[str, Any] = {"count": len(x), "group_size": size}
    cuts = [slice(i * size, (i + 1) * size) for i in range(groups)]
    shares = [class_shares(labels[cut], len(by.shares)) for cut in cuts]
    values["frechet"] = [frechet_distance(features[cut], by.reference) for cut in cuts]
    values["class_distance"] = [total_variation(one, by.shares) for one in shares]
    values["entropy"] = [entropy(one) for one in shares]
    values["confidence"] = [probabilities[cut].max(1).values.double().mean().item() for cut in cuts]
    values["background"] = [background_noise(x[cut], by.background) for cut in cuts]
    values["frechet_all"] = frechet_distance(features, by.reference)
    values["background_pooled"] = x[:, by.background].double().std().item()
    values["class_shares"] = class_shares(labels, len(by.shares)).tolist()
    return values


def background_noise(x: Tensor, background: Tensor) -> float:
    """The standard deviation of a background pixel over images, the median over these pixels: strokes do not count."""
    return x[:, background].double().std(0).median().item()
