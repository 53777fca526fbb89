"""What can be measured, and with what caution: refusals before any work is done, and warnings for the record."""

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

LEAST = {"fid": 2, "kid": 2, "precision-recall": NEIGHBOURS + 1, "is": SPLITS, "diversity": 2, "classes": 1}
"""Images that a measure needs."""
OF_ROWS = ("kid", "precision-recall")
"""Those that compare features themselves with the reference's, and not their moments alone."""
ENOUGH = 10_000
"""Samples below which the bias of a Fréchet distance is larger than most differences that are reported."""


def check_metrics(metrics: Sequence[str], classifier: Model | None) -> None:
    """Refuse measures that there are not, and a classifier without its measure or the measure without it."""
    if not metrics:
        raise UsageError(f"name at least one metric of {', '.join(METRICS)}")
    for name in metrics:
        if name not in METRICS:
            raise unknown_name("metric", name, METRICS, choose="choose some of")
    if "classes" in metrics and classifier is None:
        raise UsageError("the metric classes needs a classifier, such as --classifier mnist-classifier")
    if classifier is not None and "classes" not in metrics:
        raise UsageError("a classifier is for the metric classes; add it to --metrics, or leave --classifier out")
    if classifier is not None and classifier.config.param != CLASSES:
        raise UsageError(f"the classifier must be a model of classes, got one of {classifier.config.param!r}")


def check_images(
    samples: ImageSet, reference: ImageSet, metrics: Sequence[str], classifier: Model | None = None
) -> None:
    """Refuse images that cannot be compared: of another size or range, or too few of them."""
    least = max(LEAST[name] for name in metrics)
    who = " and ".join(name for name in metrics if LEAST[name] == least)
    for what, images in (("samples", samples), ("reference", reference)):
        # The Inception score is of the samples alone.
        needed = least if what == "samples" else max([2, *(LEAST[name] for name in metrics if name != "is")])
        if len(images) < needed:
            raise UsageError(
                f"the {what} {images.name} hold {len(images)} images; expected at least {needed}"
                + (f" for {who}" if needed > 2 else "")
            )
    if samples.shape != reference.shape:
        raise UsageError(
            f"the samples {samples.name} are {_size(samples)} (channels x height x width) but the reference "
            f"{reference.name} is {_size(reference)}; bring them to one size (--size resizes image files)"
        )
    if classifier is not None and classifier.config.shape != samples.shape:
        wanted = "x".join(map(str, classifier.config.shape))
        raise UsageError(f"the classifier is for images {wanted}, but the samples are {_size(samples)}")
    ours, theirs = int(samples.images.max()), int(reference.images.max())
    if ours <= 1 < theirs:
        raise UsageError(
            f"the samples {samples.name} hold levels 0 to {ours} of 255, the reference {reference.name} up to "
            f"{theirs}: their range differs; 8-bit images must lie in 0..255, floating-point ones in [0, 1]"
        )


def check_groups(groups: int, samples: int) -> None:
    """Refuse groups that the samples cannot be divided into."""
    if groups < 1 or 2 * groups > samples:
        raise UsageError(f"groups must be 1 or more, of at least 2 samples each, got {groups} of {samples:,} samples")


def _size(images: ImageSet) -> str:
    return "x".join(map(str, images.shape))


def cautions(samples: ImageSet, reference: ImageSet, metrics: Sequence[str]) -> tuple[str, ...]:
    """What a reader of the numbers has to know."""
    said = []
    if len(samples) < ENOUGH:
        said.append(
            f"{len(samples):,} samples are few: such numbers are biased by the count (below {ENOUGH:,}) and compare "
            "only with those of as many samples"
        )
    if "fid" in metrics and len(reference) < FEATURES:
        said.append(
            f"the reference has {len(reference):,} images, fewer than the {FEATURES:,} features: its covariance "
            "is singular and the Fréchet distance far too large"
        )
    if reference.skipped:
        said.append(f"{len(reference.skipped):,} unreadable files of the reference were left out")
    return tuple(said)
