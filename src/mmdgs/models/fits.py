"""What is fitted on data and kept: variances and calibrations.

Variances are one a noise level (isotropic), or one a level and frequency (spectral). A calibration is the floor, scale
and reach of an estimator at each level (models/calibration.py). Each is a table over levels (`LevelTable`) in one file
of safetensors:

    ratios (K,), log_variances (K, ...)        and as metadata the digest of the weights and the key of the data

It is isotropic.safetensors, spectral.safetensors or calibration-ESTIMATOR.safetensors in the model's folder, or in the
cache folder (MMDGS_CACHE, else ~/.cache/mmdgs) where that cannot be written, came with mmdgs or from the hub, or holds
a fit on other data. A fit belongs to the weights, the data (a public set by its name, others by their pixels), the
number of images and the seed. Every level is fitted with the same noise, so that levels may be added in any order.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor

from mmdgs.data import load_images, midpoints, spread
from mmdgs.data.images import NAMES
from mmdgs.data.sources import cache_folder
from mmdgs.errors import UsageError
from mmdgs.files import tensors_opened, write_atomically
from mmdgs.models.shipped import shipped_roots
from mmdgs.moments import IsotropicMoments, SpectralMoments
from mmdgs.moments.calibrated import WIDTHS
from mmdgs.moments.isotropic import FITTED_AT
from mmdgs.moments.spectral import fitted_spectrum
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.reading import parse_json, reading
from mmdgs.runtime import progress_bar
from mmdgs.schedules import geometric

if TYPE_CHECKING:
    from mmdgs.models.model import Model

logger = logging.getLogger("mmdgs")

ISOTROPIC, SPECTRAL, CALIBRATION = "isotropic", "spectral", "calibration"
FIT_FILES = (*(f"{kind}.safetensors" for kind in (ISOTROPIC, SPECTRAL)), f"{CALIBRATION}-*.safetensors")
"""What the folder of a model may hold of fits."""
KNOTS = 32
"""Levels at which variances are fitted between the ends of a model's range, where none are asked for: from 50 to 0.01
the noise falls by a quarter from one to the next."""
DIGEST = 32
ANYONE_WRITES = 0o222
SAME_RATIO = 1e-9
"""How much sigma / alpha of two levels may differ by rounding, relatively."""
FIT_IMAGES = {"cuda": 2_000, "cpu": 100}
"""Images to estimate from: each has as many numbers as pixels, so a variance's standard error is some percent."""

Fit = Callable[[Tensor, NoiseLevel, Streams], Any]
"""The variances at a level, (...), from clean data x and the streams of its noise."""


@dataclass(frozen=True)
class FitData:
    """What variances are estimated from: a set of `load_images` by name or path, how many images, the noise's seed."""

    name: str
    images: int
    data_dir: Path | None = None
    seed: int = 0

    def record(self) -> dict[str, Any]:
        """What was asked for."""
        return {"data": self.name, "images": self.images, "seed": self.seed}

    @property
    def public(self) -> bool:
        """Whether the data are a public set, which its name says all of."""
        return self.name in NAMES

    def key(self, x: Tensor | None) -> dict[str, Any]:
        """What a kept fit is known by, besides the weights: a public set by its name, others by the images x.

        Where the files are does not matter.
        """
        return {**self.record(), "data": self.name if self.public or x is None else digest_of(x), "of": "errors"}

    def load(self, model: Model) -> Tensor:
        """Images spread over the set, in the model's shape, scaled to its interval."""
        if len(model.shape) != 3:
            raise UsageError(f"variances are estimated from images, and this model's are {model.shape}")
        channels, height, width = model.shape
        size = height if height == width else None
        found = load_images(self.name, data_dir=self.data_dir, size=size, channels=channels)
        if found.shape != model.shape:
            raise UsageError(f"the images of {self.name} are {found.shape}, and the model's {model.shape}")
        return model.scaled(midpoints(found.take(spread(len(found), self.images)).images))


def digest_of(x: Tensor) -> str:
    """The first digits of a SHA-256 of data (N, ...): shape, type and bytes."""
    x = x.detach().cpu().contiguous()
    found = hashlib.sha256(f"{tuple(x.shape)} {x.dtype}".encode())
    found.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:DIGEST]


def isotropic_moments(
    model: Model,
    levels: Sequence[NoiseLevel] | None = None,
    data: FitData | None = None,
    *,
    progress: str | None = "isotropic variances",
) -> IsotropicMoments:
    """The estimator with one variance a level: those that are kept, and from data those that are not.

    With `data` it is fitted at each of the levels (by default at some between the ends of the model's range). Without,
    the variance that the model's configuration holds serves, or whatever is kept and covers the levels, that of the
    most images first; between its levels it is interpolated.
    """

    def fit(x: Tensor, level: NoiseLevel, streams: Streams) -> float:
        return IsotropicMoments.fit(model, x, level, generator=streams).variances[level]

    known = None if model.param is None else model.config.isotropic_variance
    if data is None and known is not None:
        return IsotropicMoments(model, LevelTable.of({model.level: known}, FITTED_AT))
    store = FitStore(model, ISOTROPIC)
    table = store.any_of(levels) if data is None else store.fitted(data, levels or _knots(model), fit, progress)
    return IsotropicMoments(model, table)


def spectral_moments(
    model: Model, data: FitData | None = None, *, progress: str | None = "spectra of errors"
) -> SpectralMoments:
    """The estimator with one variance a frequency: one that is kept, or from data.

    Without `data` whatever is kept for these weights will do, that of the most images first.
    """

    def fit(x: Tensor, level: NoiseLevel, streams: Streams) -> Tensor:
        return fitted_spectrum(model, x, level, generator=streams)

    store = FitStore(model, SPECTRAL)
    return SpectralMoments(model, store.any_of() if data is None else store.fitted(data, _knots(model), fit, progress))


def _knots(model: Model) -> list[NoiseLevel]:
    """Levels between the ends of a model's range, at which variances are fitted; its one level."""
    ends = [level.ratio for level in (model.levels[0], model.levels[-1])]
    return [*geometric(KNOTS, *ends)] if ends[0] > ends[1] else [model.levels[0]]


class FitStore:
    """The fits of one kind that are kept for a model's weights, beside the model and in the cache folder.

    The kind of a calibration is "calibration-" and the name of its estimator.
    """

    def __init__(self, model: Model, kind: str) -> None:
        self.model, self.kind = model, kind
        calibration = [(width,) for width in WIDTHS] if kind.startswith(CALIBRATION) else [()]
        self.shapes = [model.shape] if kind == SPECTRAL else calibration  # of what is fitted at a level
        self.known_as = FITTED_AT if kind == ISOTROPIC else None
        self.beside = model.folder / f"{kind}.safetensors" if model.folder else None
        self.cache = cache_folder() / kind

    @cached_property
    def digest(self) -> str:
        """Of the model's weights: what the fits belong to."""
        return self.model.digest

    def might_hold(self) -> bool:
        """Whether there are files of this kind at all, of these weights or others: a digest takes a while."""
        return (self.beside is not None and self.beside.is_file()) or any(self.cache.glob("*.safetensors"))

    def files(self) -> list[Path]:
        """Where fits are: beside the model, and in the cache folder."""
        beside = [self.beside] if self.beside is not None and self.beside.is_file() else []
        return [*beside, *sorted(self.cache.glob(f"{self.digest[:DIGEST]}-*.safetensors"))]

    def any_of(self, levels: Sequence[NoiseLevel] | None = None) -> LevelTable:
        """What is kept and covers the levels, whatever the data; that of the most images first."""
        found = self.best_of(levels)
        if found is not None:
            return found
        where = "" if levels is None else f" that cover these {len(levels)} levels"
        raise UsageError(
            f"no {self.kind} variances are kept for {self.model.source}{where}: give the data to estimate them from, "
            "such as --data cifar10"
        )

    def best_of(self, levels: Sequence[NoiseLevel] | None = None) -> LevelTable | None:
        """The same, and None where nothing is kept."""
        found = [(key, table) for _, key, table in self._kept() if levels is None or table.covers(levels)]
        return max(found, key=lambda one: one[0]["images"])[1] if found else None

    def keep(self, key: dict[str, Any], table: LevelTable) -> Path | None:
        """Write a table that was fitted on the data of this key; where it went."""
        place = self._destination(key, taken={file for file, other, _ in self._kept() if other != key})
        if place is not None:
            self.write(place, key, table)
        return place

    def fitted(self, data: FitData, levels: Sequence[NoiseLevel], fit: Fit, progress: str | None) -> LevelTable:
        """The table of these data, fitted at the levels that are not kept; each is kept as soon as it is fitted."""
        kept, x = list(self._kept()), None if data.public else data.load(self.model)
        own = data.key(x)
        same = [table for _, key, table in kept if key == own]
        table = max(same, key=lambda one: len(one.ratios), default=None)
        missing = [level for level in dict.fromkeys(levels) if table is None or not _holds(table, level)]
        if missing:
            x = (data.load(self.model) if x is None else x).to(self.model.device)
            place = self._destination(own, taken={file for file, key, _ in kept if key != own})
            with progress_bar(len(missing), progress, unit="level") as bar:
                for level in missing:
                    if table is not None and _holds(table, level):  # the same ratio, with another alpha
                        continue
                    found = fit(x, level, Streams(data.seed, len(x), purpose="fit"))
                    table = self._added(table, level, torch.as_tensor(found, dtype=torch.float64))
                    if place is not None:
                        self.write(place, own, table)
                    bar.update()
        assert table is not None, "there are levels"
        return table

    def _added(self, table: LevelTable | None, level: NoiseLevel, values: Tensor) -> LevelTable:
        """A table with one level more, its values as they will be read back: logarithms are kept in float32."""
        values = values.log().float().double().exp()[None]
        if table is None:
            return LevelTable([level.ratio], values, self.known_as)
        ratios = torch.cat([table.ratios, table.ratios.new_tensor([level.ratio])])
        order = ratios.argsort()
        return LevelTable(ratios[order], torch.cat([table.values, values])[order], self.known_as)

    def _kept(self) -> Iterator[tuple[Path, dict[str, Any], LevelTable]]:
        """All fits that are kept for these weights: the file, the key of the data, the table.

        A damaged file is as good as none, and the log says so.
        """
        for file in self.files():
            try:
                with reading(file, "a fit"):
                    found = self._read(file)
            except UsageError as error:
                said = "the %s variances in %s cannot be read (%s); they are left aside"
                logger.warning(said, self.kind, file, error)
                continue
            if found is not None:
                yield file, *found

    def _read(self, file: Path) -> tuple[dict[str, Any], LevelTable] | None:
        """The fit in a file, checked; None where it is of other weights."""
        with tensors_opened(file) as stored:
            notes = stored.metadata() or {}
            if "digest" in notes and notes["digest"] != self.digest:
                return None
            key = parse_json(notes["key"], file)
            ratios, logs = (stored.get_tensor(name).double() for name in ("ratios", "log_variances"))
        if not isinstance(key["images"], int) or logs.shape[1:] not in self.shapes:
            raise ValueError("it does not say what it was estimated from, or is of another shape")
        values = logs.exp()
        if not ((values.float() > 0) & values.float().isfinite()).all():
            raise ValueError("its variances are not all positive and finite")
        return key, LevelTable(ratios, values, self.known_as)

    def _destination(self, key: dict[str, Any], taken: set[Path]) -> Path | None:
        """Where a fit is written: beside the model, or in the cache folder; None where neither can be."""
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:DIGEST]
        places = [self.cache / f"{self.digest[:DIGEST]}-{name}.safetensors"]
        if self.beside is not None and self.beside not in taken and _is_own_folder(self.model):
            places.insert(0, self.beside)
        for file in places:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                if _is_writable(file.parent):
                    return file
            except OSError as error:
                logger.info("%s variances cannot be kept in %s: %s", self.kind, file, error)
        said = "%s variances could not be kept anywhere; set MMDGS_CACHE to a folder that can be written"
        logger.warning(said, self.kind)
        return None

    def write(self, file: Path, key: dict[str, Any], table: LevelTable) -> None:
        """Write a table to a file; where that cannot be, the log says so."""
        notes = {"digest": self.digest, "key": json.dumps(key)}
        content = save({"ratios": table.ratios, "log_variances": table.values.log().float()}, notes)
        try:
            write_atomically(file, content)
        except OSError as error:
            logger.warning("%s variances could not be kept in %s: %s", self.kind, file, error)


def _holds(table: LevelTable, level: NoiseLevel) -> bool:
    """Whether a table was fitted at a level."""
    return bool(((table.ratios / level.ratio - 1).abs() < SAME_RATIO).any())


def _is_own_folder(model: Model) -> bool:
    """Whether a model's folder was given by its path: not one that ships, nor the hub's cache."""
    given = Path(model.source).expanduser().resolve()
    folder = model.folder.resolve() if model.folder else None
    return folder is not None and folder.is_relative_to(given) and folder.parent not in shipped_roots()


def _is_writable(folder: Path) -> bool:
    """Whether to write in a folder: one that is marked as read-only is left alone, by the superuser too."""
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & ANYONE_WRITES)
