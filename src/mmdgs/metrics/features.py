"""Inception features of a set of images, and their cache.

It holds, under a key made of all that the features depend on, KEY.safetensors (the moments) and,
where features were asked for, KEY-features.safetensors.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load as load_tensors
from torch import Tensor

from mmdgs.data import ImageSet
from mmdgs.data.sources import cache_folder
from mmdgs.errors import UsageError
from mmdgs.files import read_tensor_bytes, sha256_of, tensors_to_bytes, write_atomically
from mmdgs.memory import Batches
from mmdgs.metrics.frechet import FeatureMoments
from mmdgs.metrics.inception import RESIZE
from mmdgs.metrics.inception_file import Inception
from mmdgs.runtime import progress_bar

logger = logging.getLogger("mmdgs")

BLOCK = 1024  # rows whose moments are added at a time: not the batch, on which sums may not depend
BATCH_SIZES = {"cuda": 256, "cpu": 16}


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """The moments of the features of some images and, if asked for, the features themselves."""

    moments: FeatureMoments
    features: Float[Tensor, "n features"] | None = None

    def __add__(self, other: ImageFeatures) -> ImageFeatures:
        """Those of both sets together, one after the other."""
        kept = [part.features for part in (self, other) if part.features is not None]
        features = torch.cat(kept) if len(kept) == 2 else None
        return ImageFeatures(self.moments + other.moments, features)


def image_features(
    images: ImageSet,
    inception: Inception,
    *,
    keep: bool = False,
    cache: bool = False,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    progress: str | None = None,
) -> ImageFeatures:
    """The moments of the features of all images and, with `keep`, the features (float32).

    With `cache` they come from the cache in MMDGS_CACHE, computed where absent or damaged there.
    """
    entry = _entry(images, inception) if cache else None
    features = None if entry is None else _load(entry, len(images), keep)
    if features is None:
        features = _computed(images, inception, keep, torch.device(device), batch_size, progress)
        if entry is not None:
            _store(entry, features)
    return features


def _computed(
    images: ImageSet,
    inception: Inception,
    keep: bool,
    device: torch.device,
    batch_size: int | None,
    progress: str | None,
) -> ImageFeatures:
    size = BATCH_SIZES.get(device.type, BATCH_SIZES["cpu"]) if batch_size is None else batch_size
    if size < 1:
        raise UsageError(f"batch_size must be at least 1, got {size}")
    if not len(images):
        raise UsageError(f"{images.name} holds no images; expected at least 2")
    inception.to(device)
    batches, moments, kept = Batches(size, "images"), [], []
    with progress_bar(len(images), progress, unit="image") as bar:

        def features(first: int, last: int) -> Tensor:
            part = inception.features(images.images[first:last].to(device))
            bar.update(last - first)
            return part

        for start in range(0, len(images), BLOCK):
            end = min(start + BLOCK, len(images))
            block = torch.cat(list(batches.over(end, features, start)))
            try:
                moments.append(FeatureMoments.of(block))
            except ValueError as error:
                raise UsageError(f"{inception.file} on {images.name}: {error}") from error
            kept += [block.cpu()] if keep else []
    whole = reduce(FeatureMoments.__add__, moments).to("cpu")
    return ImageFeatures(whole, torch.cat(kept) if keep else None)


def _entry(images: ImageSet, inception: Inception) -> Path:
    """The file of the moments in the cache."""
    settings = {
        "images": images.digest,
        "split": f"{images.name}:{images.split}",
        "count": len(images),
        "inception": inception.sha256,
        "resize": RESIZE,
    }
    return cache_folder() / "features" / f"{sha256_of(settings)[:32]}.safetensors"


def _rows(entry: Path) -> Path:
    """The file of the features beside that of their moments."""
    return entry.with_stem(f"{entry.stem}-features")


def _store(entry: Path, images: ImageFeatures) -> None:
    moments = {"mean": images.moments.mean, "scatter": images.moments.scatter}
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        if images.features is not None:
            write_atomically(_rows(entry), tensors_to_bytes({"features": images.features}))
        write_atomically(entry, tensors_to_bytes(moments))
    except OSError as error:  # hours of work are not thrown away for want of a disk
        reason = error.strerror or error
        logger.warning("the features could not be cached in %s: %s", entry.parent, reason)


def _load(entry: Path, count: int, keep: bool) -> ImageFeatures | None:
    tensors: dict[str, Tensor] = {}
    try:
        for file in (entry, _rows(entry)) if keep else (entry,):
            if not file.is_file():
                return None  # nor is it if an earlier run had no need of features
            tensors |= load_tensors(read_tensor_bytes(file))
        moments = FeatureMoments(count, tensors["mean"], tensors["scatter"])
    except (OSError, UsageError, KeyError) as error:
        logger.warning("cached features %s are damaged (%s); computing them again", entry, error)
        return None
    return ImageFeatures(moments, tensors.get("features"))
