"""What samples of digits are judged by: a classifier, what it says of the test images, and the background's pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmdgs.data import dequantised, load_images, midpoints, to_uint8
from mmdgs.errors import UsageError
from mmdgs.lab.experiment import Context
from mmdgs.lab.mnist_models import trained
from mmdgs.lab.workspace import Part
from mmdgs.metrics import FeatureMoments, class_shares, entropy, frechet_distance, total_variation
from mmdgs.models import Model, load
from mmdgs.networks.classifier import ConvClassifier
from mmdgs.randomness import Streams
from mmdgs.training import Recipe, TrainingSettings

CLASSIFIER = "mnist-classifier"
TRAINING = TrainingSettings(steps=None, epochs=5, batch_size=64, learning_rate=2e-3, warmup=20, decay=True, ema=0.98)
"""Of a classifier, where the one that ships did not come along."""
BLACK_SHARE = 0.99
"""A background pixel is black in at least this share of the training images."""
BATCH = 500


@dataclass(frozen=True)
class Yardstick:
    """A classifier with what it says of half of the test images, and the mask of background pixels.

    Samples are judged as stored images would be, in 256 grey levels; only the background's noise is measured on the
    samples as they are.
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

        The background's noise is the standard deviation of a pixel over images, the median over the background's
        pixels: strokes do not count.
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
            "class_distance": [total_variation(one, self.shares) for one in shares],
            "entropy": [entropy(one) for one in shares],
            "confidence": [probabilities[cut].max(1).values.double().mean().item() for cut in cuts],
            "background": [black[cut].std(0).median().item() for cut in cuts],
            "frechet_all": frechet_distance(features, self.reference),
            "background_pooled": black.std().item(),
            "class_shares": class_shares(labels, len(self.shares)).tolist(),
        }


def features_and_classes(classifier: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """A classifier's features (n, f) and class probabilities (n, c) of images in [0, 1), on the CPU."""
    network = classifier.network
    assert isinstance(network, ConvClassifier)
    with torch.no_grad():
        features = [network.features(some.to(classifier.device)) for some in x.split(BATCH)]
        probabilities = [network.head(one).softmax(1).cpu() for one in features]
    return torch.cat([one.cpu() for one in features]), torch.cat(probabilities)


def scored_test_images(context: Context, count: int) -> Tensor:
    """Test images to be scored like samples, dequantised: of the half that nothing is compared with."""
    images = load_images("mnist", "test", data_dir=context.data_dir).images[0::2][:count]
    return dequantised(images, Streams(context.seed, len(images), purpose="scored test images"))


def yardstick(context: Context) -> Yardstick:
    """The classifier that ships, or one trained here, with its accuracy; half of the test images is the reference."""
    try:
        model = load(CLASSIFIER, device=context.device)
    except UsageError:
        training = replace(TRAINING, seed=context.seed)
        recipe = Recipe(data_dir=context.data_dir, model="classifier", param="classes", training=training)
        model = trained(context, CLASSIFIER, recipe).left

    def compute() -> Part:
        test, train = (load_images("mnist", split, data_dir=context.data_dir) for split in ("test", "train"))
        assert test.labels is not None
        features, probabilities = features_and_classes(model, midpoints(test.images))
        half = FeatureMoments.of(features[1::2])
        black = (train.images == 0).sum(0, dtype=torch.float64) / len(train)
        tensors = {
            "mean": half.mean,
            "scatter": half.scatter,
            "shares": class_shares(test.labels, len(test.classes)),
            "background": (black >= BLACK_SHARE).to(torch.uint8),
        }
        accuracy = (probabilities.argmax(1) == test.labels).double().mean().item()
        return Part({"accuracy": accuracy, "count": half.count}, tensors)

    part = context.workspace.part("yardstick", model, compute)
    found = part.tensors
    reference = FeatureMoments(part.values["count"], found["mean"], found["scatter"])
    return Yardstick(model, part.values["accuracy"], reference, found["shares"], found["background"].bool())
