"""Inception features of a set of images, and their cache: statistics of a reference are computed once.

The cache holds, under a key made of all that the features depend on, KEY.json (settings and checksums),
KEY.safetensors (the moments) and, where features were asked for, KEY-features.safetensors.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load as load_tensors
from torch import Tensor

from mmdgs.data import ImageSet
from mmdgs.data.sources import cache_folder
from mmdgs.errors import UsageError
from mmdgs.files import read_json, read_tensor_bytes, tensors_to_bytes, to_json, write_atomically
from mmdgs.memory import Batches
from mmdgs.metrics.frechet import FeatureMoments
from mmdgs.metrics.inception import RESIZE
from mmdgs.metrics.inception_file import Inception
from mmdgs.runtime import progress_bar
from mmdgs.version import __version__

logger = logging.getLogger("mmdgs")

BLOCK = 1024
"""Rows of features whose moments are added at a time. Not the batch, so that the sums do not depend on it."""
BATCH_SIZES = {"cuda": 256, "cpu": 16}


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """The moments of the features of some images and, where they were asked for, the features themselves."""

    moments: FeatureMoments
    features: Float[Tensor, "n features"] | None = None

    def __add__(self, other: ImageFeatures) -> ImageFeatures:
        """Those of both sets together, one after the other."""
        kept = [one.features for one in (self, other) if one.features is not None]
        return ImageFeatures(self.moments + other.moments, torch.cat(kept) if len(kept) == 2 else None)


def image_features(
    images: ImageSet,
    inception: Inception,
    *,
    keep: bool = False,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    progress: str | None = None,
) -> ImageFeatures:
    """The features of all images, in batches; only moments stay in memory, unless features are to be kept (float32)."""
    device = torch.device(device)
    size = BATCH_SIZES.get(device.type, BATCH_SIZES["cpu"]) if batch_size is None else batch_size
    if size < 1:
        raise UsageError(f"batch_size must be at least 1, got {size}")
    inception.to(device)
    moments: FeatureMoments | None = None
    kept = []
    for block in _blocks(images, inception, device, size, progress):
        try:
            part = FeatureMoments.of(block)
        except ValueError as error:
            raise UsageError(f"{inception.file} on {images.name}: {error}") from error
        moments = part if moments is None else moments + part
        kept += [block.cpu()] if keep else []
    if moments is None:
        raise UsageError(f"{images.name} holds no images; expected at least 2")
    return ImageFeatures(moments.to("cpu"), torch.cat(kept) if keep else None)


def _blocks(
    images: ImageSet, inception: Inception, device: torch.device, size: int, progress: str | None
) -> Iterator[Tensor]:
    """Features, in blocks of fixed length."""
    batches = Batches(size, "images")
    with progress_bar(len(images), progress, unit="image") as bar:

        def features(first: int, last: int) -> Tensor:
            found = inception.features(images.images[first:last].to(device))
            bar.update(last - first)
            return found

        for start in range(0, len(images), BLOCK):
            yield torch.cat(list(batches.over(min(start + BLOCK, len(images)), features, start)))


def cached_features(
    images: ImageSet,
    inception: Inception,
    folder: Path | None = None,
    *,
    keep: bool = False,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    progress: str | None = None,
) -> ImageFeatures:
    """`image_features`, from a cache where it holds them; what is absent or damaged there is computed again.

    The cache is a folder of its own in that of the environment's MMDGS_CACHE, unless another is given.
    """
    folder = folder or cache_folder() / "features"
    settings = {
        "images": images.digest,
        "split": f"{images.name}:{images.split}",
        "count": len(images),
        "inception": inception.sha256,
        "resize": RESIZE,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    found = _load(folder, key, settings, keep)
    if found is None:
        found = image_features(images, inception, keep=keep, device=device, batch_size=batch_size, progress=progress)
        try:
            _store(folder, key, settings, found)
        except OSError as error:  # hours of work are not thrown away for want of a disk
            logger.warning("the reference's features could not be cached in %s: %s", folder, error.strerror or error)
    return found


def _store(folder: Path, key: str, settings: dict[str, Any], found: ImageFeatures) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    contents = {key: tensors_to_bytes({"mean": found.moments.mean, "scatter": found.moments.scatter})}
    if found.features is not None:
        contents[f"{key}-features"] = tensors_to_bytes({"features": found.features})
    for name, content in contents.items():
        write_atomically(folder / f"{name}.safetensors", content)
    # The JSON comes last: an entry counts as finished only once it is there, and its checksums are right.
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    write_atomically(folder / f"{key}.json", to_json({"mmdgs": __version__, "settings": settings, "sha256": sums}))


def _load(folder: Path, key: str, settings: dict[str, Any], keep: bool) -> ImageFeatures | None:
    file = folder / f"{key}.json"
    if not file.is_file():
        return None
    try:
        entry = read_json(file)
        sums = entry["sha256"]
        if keep and f"{key}-features" not in sums:
            return None  # an earlier run had no need of them
        if entry["settings"] != settings:
            raise UsageError("it is of other settings")
        tensors: dict[str, Tensor] = {}
        for name in (key, f"{key}-features") if keep else (key,):
            content = read_tensor_bytes(folder / f"{name}.safetensors")
            if hashlib.sha256(content).hexdigest() != sums[name]:
                raise UsageError(f"the checksum of {name}.safetensors is wrong")
            tensors |= load_tensors(content)
    except (OSError, UsageError, KeyError, TypeError) as error:
        logger.warning("the cached features %s are damaged (%s) and are computed again", file, error)
        return None
    return ImageFeatures(
        FeatureMoments(settings["count"], tensors["mean"], tensors["scatter"]), tensors.get("features")
    )
