"""The measures of samples against a reference, from images to a record."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mmdgs.data import ImageSet, midpoints
from mmdgs.errors import UsageError
from mmdgs.evaluation.checks import OF_ROWS, cautions, check_images, check_metrics
from mmdgs.evaluation.names import OF_FEATURES
from mmdgs.evaluation.record import Evaluation, Images
from mmdgs.memory import Batches
from mmdgs.metrics import scores
from mmdgs.metrics.features import ImageFeatures, image_features
from mmdgs.metrics.frechet import frechet_distance, left_out_distances
from mmdgs.metrics.inception import RESIZE
from mmdgs.metrics.inception_file import HEAD_ADVICE, Inception, load_inception
from mmdgs.metrics.neighbours import diversity, precision_recall
from mmdgs.models import Model
from mmdgs.randomness import seeded
from mmdgs.runtime import environment, progress_bar

CLASSIFIER_BATCH = 500


def evaluate(
    samples: ImageSet,
    reference: ImageSet,
    *,
    metrics: Sequence[str] = OF_FEATURES,
    inception: Inception | None = None,
    classifier: Model | None = None,
    limit: int | None = None,
    seed: int = 0,
    groups: int = 1,
    reference_features: ImageFeatures | None = None,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    cache: bool = True,
    progress: str | None = "evaluating",
) -> Evaluation:
    """Measure samples against a reference.

    `metrics` are some of fid, kid, precision-recall, is (all of `inception`'s features; None: the
    standard file is looked for), diversity (of pixels) and classes (by `classifier`). `limit` takes
    a random subset of the samples. With several `groups`, equal parts of the samples in their
    order, the FID is also taken with each of them left out, for `jackknife_interval`. Features of
    the reference are cached in MMDGS_CACHE, unless cache=False; to measure many sets against one,
    give `reference_features` (`metrics.features.image_features`).
    """
    check_metrics(metrics, classifier)
    subset, device = random_subset(samples, limit, seed), torch.device(device)
    check_images(subset, reference, metrics, classifier, groups)
    run = _Run(
        subset, reference, reference_features, seed, groups, device, batch_size, cache, progress
    )
    of_features = [name for name in metrics if name in OF_FEATURES]
    network = (inception or load_inception()) if of_features else None
    reasons: dict[str, str] = {}
    if network is not None and network.head is None and "is" in of_features:
        of_features.remove("is")
        reasons["is"] = f"{network.file} has no classification head; {HEAD_ADVICE}"
    values: dict[str, Any] = {}
    left_out: dict[str, list[float]] = {}
    if network and of_features:
        values, left_out = run.of_features(network, of_features)
    if "diversity" in metrics:
        values["diversity"] = run.diversity()
    if classifier is not None:
        values["classes"] = run.classes(classifier)
    return Evaluation(
        samples=_described(subset, len(samples)),
        reference=_described(reference, len(reference)),
        values={name: values[name] for name in metrics if name in values},
        open=reasons,
        warnings=cautions(subset, reference, metrics),
        seed=seed,
        resize=RESIZE if network else None,
        inception=_network(network) if network else None,
        classifier=_classifier(classifier) if classifier else None,
        environment=environment(run.device),
        left_out=left_out,
    )


@dataclass(frozen=True, eq=False)
class _Run:
    """What all measures of one evaluation share."""

    samples: ImageSet
    reference: ImageSet
    reference_features: ImageFeatures | None
    seed: int
    groups: int
    device: torch.device
    batch_size: int | None
    cache: bool
    progress: str | None

    def of_features(
        self, inception: Inception, metrics: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """The measures, and those with each group left out."""
        rows = torch.arange(len(self.samples)).tensor_split(self.groups)
        sets = [self.samples] if self.groups == 1 else [self.samples.take(part) for part in rows]
        how = self._how("samples") | {"keep": list(metrics) != ["fid"]}
        parts = [image_features(part, inception, **how) for part in sets]
        ours = reduce(ImageFeatures.__add__, parts)
        theirs = self._reference_features(inception, metrics) if list(metrics) != ["is"] else None
        values: dict[str, Any] = {}
        label = self.progress and f"{self.progress}: distances"
        with progress_bar(len(metrics), label, unit="metric") as bar:
            for name in metrics:
                values[name] = self._measure(name, ours, theirs, inception)
                bar.update()
        left_out = {}
        if theirs is not None and "fid" in metrics and len(parts) > 1:
            moments = [part.moments.to(self.device) for part in parts]
            left_out["fid"] = left_out_distances(moments, theirs.moments.to(self.device))
        return values, left_out

    def _how(self, what: str) -> dict[str, Any]:
        label = self.progress and f"{self.progress}: {what}"
        return {"device": self.device, "batch_size": self.batch_size, "progress": label}

    def _reference_features(self, inception: Inception, metrics: Sequence[str]) -> ImageFeatures:
        keep = any(name in OF_ROWS for name in metrics)
        known = self.reference_features
        if known is not None and (known.features is not None or not keep):
            return known
        how = self._how("reference")
        return image_features(self.reference, inception, keep=keep, cache=self.cache, **how)

    def _measure(
        self, name: str, ours: ImageFeatures, theirs: ImageFeatures | None, inception: Inception
    ) -> Any:
        if theirs is not None and name == "fid":
            return frechet_distance(ours.moments.to(self.device), theirs.moments.to(self.device))
        assert ours.features is not None
        features = ours.features.to(self.device)
        if name == "is":
            # Sets may be sorted by class, and a part should be like the whole.
            order = torch.randperm(len(features), generator=seeded(self.seed, "order"))
            probabilities = inception.probabilities(features).cpu()[order]
            return dataclasses.asdict(scores.inception_score(probabilities))
        assert theirs is not None
        assert theirs.features is not None
        others = theirs.features.to(self.device)
        if name == "kid":
            return dataclasses.asdict(scores.kernel_distance(features, others, seed=self.seed))
        return dataclasses.asdict(precision_recall(features, others))

    def diversity(self) -> dict[str, Any]:
        """That of samples, of as many reference images, and their ratio."""
        count = min(len(self.samples), len(self.reference))
        ours, theirs = (
            diversity(random_subset(images, count, self.seed).images.to(self.device))
            for images in (self.samples, self.reference)
        )
        ratio = ours.distance / theirs.distance if theirs.distance > 0 else None
        both = {"samples": dataclasses.asdict(ours), "reference": dataclasses.asdict(theirs)}
        return {**both, "ratio": ratio}

    def classes(self, classifier: Model) -> dict[str, Any]:
        """Shares of the classes in samples and reference by the classifier, and their distance."""
        names = classifier.config.classes
        classifier.to(self.device)
        ours, theirs = (
            scores.class_shares(self._labels(classifier, images, what), len(names))
            for images, what in ((self.samples, "samples"), (self.reference, "reference"))
        )
        return {
            "names": list(names),
            "samples": ours.tolist(),
            "reference": theirs.tolist(),
            "distance": scores.total_variation(ours, theirs),
            "entropy": scores.entropy(ours),
            "reference_entropy": scores.entropy(theirs),
        }

    @torch.no_grad()
    def _labels(self, classifier: Model, images: ImageSet, what: str) -> Tensor:
        label = self.progress and f"{self.progress}: classes of {what}"
        with progress_bar(len(images), label, unit="image") as bar:

            def labels(first: int, last: int) -> Tensor:
                x = midpoints(images.images[first:last].to(self.device))
                numbers = classifier.network(x).argmax(1).cpu()
                bar.update(last - first)
                return numbers

            return torch.cat(list(Batches(CLASSIFIER_BATCH, "images").over(len(images), labels)))


def random_subset(images: ImageSet, limit: int | None, seed: int) -> ImageSet:
    """So many images drawn without replacement, in their order; all of them without a limit."""
    if limit is None or limit >= len(images):
        return images
    if limit < 1:
        raise UsageError(f"limit must be at least 1, got {limit}")
    order = torch.randperm(len(images), generator=seeded(seed, "subset"))
    return images.take(order[:limit].sort().values)


def _described(images: ImageSet, available: int) -> Images:
    return Images(images.name, images.split, len(images), available, images.digest)


def _network(inception: Inception) -> dict[str, Any]:
    return {"file": inception.file, "sha256": inception.sha256, "head": inception.head is not None}


def _classifier(model: Model) -> dict[str, Any]:
    config = model.config
    return {"network": config.network, "trained_on": config.trained_on, "sha256": model.digest}
