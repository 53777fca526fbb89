"""What can be measured: refusals before any work is done, and warnings for the record."""

from __future__ import annotations

from collections.abc import Sequence

from mmdgs.data import ImageSet
from mmdgs.errors import UsageError, unknown_name
from mmdgs.evaluation.names import METRICS
from mmdgs.metrics.inception import FEATURES
from mmdgs.metrics.neighbours import NEIGHBOURS
from mmdgs.metrics.scores import SPLITS
from mmdgs.models import Model
from mmdgs.models.config import CLASSES

LEAST = {
    "fid": 2, "kid": 2, "precision-recall": NEIGHBOURS + 1, "is": SPLITS, "diversity": 2,
    "classes": 1,
}  # fmt: skip
"""Images that a metric needs."""
OF_ROWS = ("kid", "precision-recall")
"""Metrics that compare features themselves with the reference's, and not their moments alone."""
ENOUGH = 10_000
"""Samples below which the bias of a Fréchet distance exceeds most reported differences."""


def check_metrics(metrics: Sequence[str], classifier: Model | None) -> None:
    """UsageError for an unknown metric, and for a classifier without its metric or the reverse."""
    if not metrics:
        raise UsageError(f"name at least one metric of {', '.join(METRICS)}")
    for name in metrics:
        if name not in METRICS:
            raise unknown_name("metric", name, METRICS, choose="choose some of")
    if ("classes" in metrics) != (classifier is not None):
        need = "--classifier, such as mnist-classifier"
        raise UsageError(f"the metric classes needs {need}, which is for that metric alone")
    if classifier is not None and classifier.config.param != CLASSES:
        param = classifier.config.param
        raise UsageError(f"the classifier must be a model of classes, got one of {param!r}")


def check_images(
    samples: ImageSet,
    reference: ImageSet,
    metrics: Sequence[str],
    classifier: Model | None = None,
    groups: int = 1,
) -> None:
    """UsageError for images that cannot be compared: of another size or range, or too few."""
    of_samples = {"any": 1, **{name: LEAST[name] for name in metrics}}
    of_reference = {"any": 2, **of_samples, "is": 0}  # which is of the samples alone
    for what, images, least in (
        ("samples", samples, of_samples),
        ("reference", reference, of_reference),
    ):
        name = max(least, key=lambda name: least[name])
        if len(images) < least[name]:
            count = f"{len(images)} images; expected at least {least[name]} for {name}"
            raise UsageError(f"the {what} {images.name} hold {count}")
    if groups < 1 or 2 * groups > len(samples):
        got = f"{groups} of {len(samples):,} samples"
        raise UsageError(f"groups must be 1 or more, of at least 2 samples each, got {got}")
    if samples.shape != reference.shape:
        raise UsageError(
            f"the samples {samples.name} are {_size(samples)} (channels x height x width) but the "
            f"reference {reference.name} is {_size(reference)}; bring them to one size with --size"
        )
    if classifier is not None and classifier.config.shape != samples.shape:
        own = "x".join(map(str, classifier.config.shape))
        raise UsageError(f"the classifier is for images {own}, not for {_size(samples)}")
    ours, theirs = int(samples.images.max()), int(reference.images.max())
    if ours <= 1 < theirs:
        raise UsageError(
            f"the samples {samples.name} hold levels 0 to {ours} of 255, the reference up to "
            f"{theirs}: 8-bit images must lie in 0..255, floating-point ones in [0, 1]"
        )


def _size(images: ImageSet) -> str:
    return "x".join(map(str, images.shape))


def cautions(samples: ImageSet, reference: ImageSet, metrics: Sequence[str]) -> tuple[str, ...]:
    """What a reader of the numbers has to know."""
    warnings = []
    if len(samples) < ENOUGH:
        warnings.append(
            f"{len(samples):,} samples are few: such numbers are biased by the count (below "
            f"{ENOUGH:,}) and compare only with those of as many samples"
        )
    if "fid" in metrics and len(reference) < FEATURES:
        warnings.append(
            f"the reference has {len(reference):,} images, fewer than the {FEATURES:,} features: "
            "its covariance is singular and the Fréchet distance far too large"
        )
    if reference.skipped:
        warnings.append(f"{len(reference.skipped):,} unreadable reference files were left out")
    return tuple(warnings)
