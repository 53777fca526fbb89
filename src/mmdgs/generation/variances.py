"""Isotropic variances, one a level: estimated once from data, and kept beside the model.

They are in isotropic.json in the model's folder, or where that cannot be written in the cache folder (MMDGS_CACHE, else
~/.cache/mmdgs). A variance belongs to the weights, the data, the number of images and the seed, and to its level alone:
every level is estimated with the same noise, so that levels may be added in any order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mmdgs.data import load_images, midpoints, spread
from mmdgs.data.images import NAMES
from mmdgs.data.sources import cache_folder
from mmdgs.errors import UsageError
from mmdgs.files import read_json, to_json, write_atomically
from mmdgs.moments import IsotropicMoments
from mmdgs.noise import NoiseLevel
from mmdgs.pretrained import Pretrained
from mmdgs.randomness import Streams
from mmdgs.runtime import progress_bar

logger = logging.getLogger("mmdgs")

FILE = "isotropic.json"
ANYONE_WRITES = 0o222
FIT_IMAGES = {"cuda": 2_000, "cpu": 100}
"""Images to estimate from: each has as many numbers as pixels, so a variance's standard error is some percent."""


@dataclass(frozen=True)
class FitData:
    """What variances are estimated from: a set of `load_images` by name or path, how many images, the noise's seed."""

    name: str
    images: int
    data_dir: Path | None = None
    seed: int = 0

    @property
    def key(self) -> dict[str, Any]:
        """What a kept variance is known by, besides the weights: where the files are does not matter."""
        name = self.name if self.name in NAMES else str(Path(self.name).expanduser().resolve())
        return {"data": name, "images": self.images, "seed": self.seed, "of": "errors"}

    def load(self, pretrained: Pretrained) -> Tensor:
        """Images spread over the set, in the model's shape, scaled to its interval."""
        if len(pretrained.shape) != 3:
            raise UsageError(f"variances are estimated from images, and this model's are {pretrained.shape}")
        channels, height, width = pretrained.shape
        size = height if height == width else None
        found = load_images(self.name, data_dir=self.data_dir, size=size, channels=channels)
        if found.shape != pretrained.shape:
            raise UsageError(f"the images of {self.name} are {found.shape}, and the model's {pretrained.shape}")
        return pretrained.scaled(midpoints(found.take(spread(len(found), self.images)).images))


def isotropic_moments(
    pretrained: Pretrained,
    levels: Sequence[NoiseLevel],
    data: FitData | None = None,
    *,
    progress: str | None = "isotropic variances",
) -> IsotropicMoments:
    """The estimator with one variance a level: those that are kept, and from data those that are not.

    Without `data` whatever is kept for all the levels will do, that of the most images first.
    """
    kept = _kept(pretrained)
    if data is None:
        return _any_of(kept, pretrained, levels)
    found: Table = {}
    for fit in kept:
        found |= _table(fit) if fit["key"] == data.key else {}
    missing = [level for level in dict.fromkeys(levels) if level not in found]
    if missing:
        x = data.load(pretrained).to(next(pretrained.network.parameters()).device)
        keeping = True
        with progress_bar(len(missing), progress, unit="level") as bar:
            for level in missing:
                one = IsotropicMoments.fit_errors(pretrained, x, level, generator=Streams(data.seed, len(x)))
                found[level] = (one.variances[level], bool(one.lifted))
                keeping = keeping and _keep(pretrained, data, found)
                bar.update()
    return _estimator(pretrained, found, levels)


def _any_of(kept: list[dict[str, Any]], pretrained: Pretrained, levels: Sequence[NoiseLevel]) -> IsotropicMoments:
    for fit in sorted(kept, key=lambda fit: -fit["key"]["images"]):
        found = _table(fit)
        if all(level in found for level in levels):
            return _estimator(pretrained, found, levels)
    raise UsageError(
        f"no isotropic variances are kept for {pretrained.source} at these {len(levels)} levels: give the data to "
        "estimate them from, such as --data cifar10"
    )


Table = dict[NoiseLevel, tuple[float, bool]]
"""The variance at each level, and whether it was lifted to the floor."""


def _table(fit: Mapping[str, Any]) -> Table:
    return {NoiseLevel(alpha=a, sigma=s): (v, lifted) for a, s, v, lifted in fit["levels"]}


def _estimator(pretrained: Pretrained, found: Table, levels: Sequence[NoiseLevel]) -> IsotropicMoments:
    lifted = frozenset(level for level in levels if found[level][1])
    return IsotropicMoments(pretrained, {level: found[level][0] for level in levels}, lifted)


def variance_files(pretrained: Pretrained) -> list[Path]:
    """Where variances may be kept: beside the model, and in the cache folder."""
    folder = Path(pretrained.source).expanduser()
    files = [folder / FILE] if pretrained.source and folder.is_dir() else []
    return [*files, cache_folder() / "isotropic" / f"{pretrained.digest[:32]}.json"]


def _writable(folder: Path) -> bool:
    """Whether to write in a folder: one that is marked as read-only is left alone, by the superuser too."""
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & ANYONE_WRITES)


def _kept(pretrained: Pretrained) -> list[dict[str, Any]]:
    """All fits that are kept for these weights, wherever they are."""
    return [fit for file in variance_files(pretrained) for fit in _read(file) if fit["digest"] == pretrained.digest]


def _read(file: Path) -> list[dict[str, Any]]:
    """The fits in a file, checked; a damaged one is as good as none, and the log says so."""
    if not file.exists():
        return []
    try:
        fits = read_json(file)["fits"]
        for fit in fits:
            if not (isinstance(fit["digest"], str) and isinstance(fit["key"]["images"], int)):
                raise ValueError("a fit without its digest or its number of images")
            if not all(variance > 0 for variance, _ in _table(fit).values()):
                raise ValueError("a variance that is not positive")
    except (UsageError, KeyError, TypeError, ValueError) as error:
        logger.warning("the isotropic variances in %s cannot be read (%s); they are estimated anew", file, error)
        return []
    return fits


def _keep(pretrained: Pretrained, data: FitData, found: Table) -> bool:
    """Write a fit into the first file that can be written, beside the others that are there; whether there is one."""
    entry = {
        "digest": pretrained.digest,
        "key": data.key,
        "levels": [[level.alpha, level.sigma, *value] for level, value in found.items()],
    }
    for file in variance_files(pretrained):
        others = [fit for fit in _read(file) if (fit["digest"], fit["key"]) != (pretrained.digest, data.key)]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if _writable(file.parent):
                write_atomically(file, to_json({"fits": [*others, entry]}))
                return True
        except OSError as error:
            logger.info("isotropic variances cannot be kept in %s: %s", file, error)
    logger.warning("isotropic variances could not be kept anywhere; set MMDGS_CACHE to a folder that can be written")
    return False
