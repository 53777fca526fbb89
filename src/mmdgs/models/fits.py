"""What is fitted on data and kept: variances and calibrations, each a table over levels.

Variances are one a noise level (isotropic), or one a level and frequency (spectral). A calibration
is the floor, scale and reach of an estimator at each level (models/estimators.py). A `LevelTable`
is one file of safetensors:

    ratios (K,), log_variances (K, ...)   and as metadata the digest of the weights, the data's key

It is isotropic.safetensors, spectral.safetensors or calibration-ESTIMATOR.safetensors in the
model's folder; or it is in the cache folder (MMDGS_CACHE, else ~/.cache/mmdgs) where that cannot be
written, came with mmdgs or from the hub, or holds a fit on other data. A fit belongs to the
weights, the data (a public set by its name, others by their pixels), the number of images and the
seed. Every level is fitted with the same noise, so that levels may be added in any order.
"""

from __future__ import annotations

import contextlib
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
from mmdgs.data.folders import load_pictures
from mmdgs.data.images import NAMES
from mmdgs.data.sources import cache_folder
from mmdgs.data.transforms import crops
from mmdgs.errors import UsageError
from mmdgs.files import sha256_of, tensors_opened, write_atomically
from mmdgs.identity import digest_of
from mmdgs.models.shipped import shipped_roots
from mmdgs.models.weights import CALIBRATION, ISOTROPIC, SPECTRAL
from mmdgs.moments import IsotropicMoments, SpectralMoments
from mmdgs.moments.calibrated import WIDTHS
from mmdgs.moments.fitted import FITTED_AT, fitted_spectrum
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.reading import parse_json, reading
from mmdgs.runtime import progress_bar
from mmdgs.schedules import geometric

if TYPE_CHECKING:
    from mmdgs.models.model import Model

logger = logging.getLogger("mmdgs")

KNOTS = 32
"""Levels at which variances are fitted if none are asked for: at 50 to 0.01 steps of a quarter."""
DIGEST = 32
ANYONE_WRITES = 0o222
SAME_RATIO = 1e-9
"""How much sigma / alpha of two levels may differ by rounding, relatively."""
FIT_IMAGES = {"cuda": 2_000, "cpu": 100}
"""Images to estimate from: as each has many pixels, a variance's standard error is some percent."""

CROP = 96
"""The side of the crops that a model of any size is fitted on. Spectra of crops of 64, 96 and 160
pixels gave whole photographs of 321 x 481 the same likelihood within 0.004 nats a number, and their
8 x 8 slowest waves had 2.0, 1.5 and 1.3 times the variance they said."""

Fit = Callable[[Tensor, NoiseLevel, Streams], Any]
"""The variances at a level, (...), from clean data x and the streams of its noise."""


@dataclass(frozen=True)
class FitData:
    """What variances are estimated from: a set of images, how many of it, the noise's seed."""

    name: str
    images: int
    data_dir: Path | None = None
    seed: int = 0

    def record(self) -> dict[str, Any]:
        """What was asked for."""
        return {"data": self.name, "images": self.images, "seed": self.seed}

    def key(self, x: Tensor | None) -> dict[str, Any]:
        """What a kept fit is known by, besides weights: a public set by name, others by x."""
        data = self.name if x is None or self.name in NAMES else digest_of(x)
        return {**self.record(), "data": data, "of": "errors"}

    def load(self, model: Model) -> Tensor:
        """Images spread over the set, in the model's shape, scaled to its interval.

        Of a model of any size they are crops of the images of a folder, or a public set's as it is.
        """
        if len(model.shape) != 3:
            raise UsageError(f"variances are estimated from images, not from data {model.shape}")
        channels, height, width = model.shape
        if model.any_size and self.name not in NAMES:
            return model.scaled(midpoints(self.crops("train", channels)))
        if model.any_size:
            height = width = None
        size = height if height == width else None
        images = load_images(self.name, data_dir=self.data_dir, size=size, channels=channels)
        if not model.any_size and images.shape != model.shape:
            shapes = f"{images.shape}, and the model's {model.shape}"
            raise UsageError(f"the images of {self.name} are {shapes}")
        return model.scaled(midpoints(images.take(spread(len(images), self.images)).images))

    def crops(self, split: str, channels: int) -> Tensor:
        """Parts (images, C, CROP, CROP) of the images of a folder or zip, as stored."""
        pictures = load_pictures(self.name, split, channels=channels, least=CROP)
        streams = Streams(self.seed, self.images, purpose=f"{split} crops")
        return crops(pictures, CROP, self.images, streams)


def isotropic_moments(
    model: Model,
    levels: Sequence[NoiseLevel] | None = None,
    data: FitData | None = None,
    *,
    progress: str | None = "isotropic variances",
) -> IsotropicMoments:
    """The estimator with one variance a level: those that are kept, and from data the others.

    With `data` it is fitted at each of the levels (by default at some between the ends of the
    model's range). Without, the variance that the model's configuration holds serves, or whatever
    is kept and covers the levels, that of the most images first; between its levels it is
    interpolated.
    """

    def fit(x: Tensor, level: NoiseLevel, streams: Streams) -> float:
        return IsotropicMoments.fit(model, x, level, generator=streams).variances[level]

    known = None if model.param is None else model.config.isotropic_variance
    if data is None and known is not None:
        return IsotropicMoments(model, LevelTable.of({model.level: known}, FITTED_AT))
    store = FitStore(model, ISOTROPIC)
    if data is None:
        return IsotropicMoments(model, store.any_of(levels))
    return IsotropicMoments(model, store.fitted(data, levels or _knots(model), fit, progress))


def spectral_moments(
    model: Model, data: FitData | None = None, *, progress: str | None = "spectra of errors"
) -> SpectralMoments:
    """The estimator with one variance a frequency: from data, or what is kept (as above)."""

    def fit(x: Tensor, level: NoiseLevel, streams: Streams) -> Tensor:
        return fitted_spectrum(model, x, level, generator=streams)

    store = FitStore(model, SPECTRAL)
    if data is None:
        return SpectralMoments(model, store.any_of())
    return SpectralMoments(model, store.fitted(data, _knots(model), fit, progress))


def _knots(model: Model) -> list[NoiseLevel]:
    """Levels between the ends of a model's range, at which variances are fitted; its one level."""
    ends = [level.ratio for level in (model.levels[0], model.levels[-1])]
    return [*geometric(KNOTS, *ends)] if ends[0] > ends[1] else [model.levels[0]]


class FitStore:
    """The fits of one kind that are kept for a model's weights, beside it and in the cache folder.

    The kind of a calibration is "calibration-" and the name of its estimator.
    """

    def __init__(self, model: Model, kind: str) -> None:
        self.model, self.kind = model, kind
        self.known_as = FITTED_AT if kind == ISOTROPIC else None
        self.beside = model.folder / f"{kind}.safetensors" if model.folder else None
        self.cache = cache_folder() / kind

    @cached_property
    def digest(self) -> str:
        """Of the model's weights, which the fits belong to; not made where there are no files."""
        return self.model.digest

    def files(self) -> list[Path]:
        """Where fits are: beside the model, and in the cache folder."""
        beside = [self.beside] if self.beside is not None and self.beside.is_file() else []
        cached = sorted(self.cache.glob("*.safetensors"))
        return beside + [file for file in cached if file.name.startswith(self.digest[:DIGEST])]

    def any_of(self, levels: Sequence[NoiseLevel] | None = None) -> LevelTable:
        """What is kept and covers the levels, whatever the data; that of the most images first."""
        table = self.best_of(levels)
        if table is None:
            where = "" if levels is None else f" that cover these {len(levels)} levels"
            raise UsageError(
                f"no {self.kind} variances are kept for {self.model.source}{where}: give the data "
                "to estimate them from, such as --data cifar10 (mmdgs sample has this option, and "
                "keeps what it estimates for all commands)"
            )
        return table

    def best_of(self, levels: Sequence[NoiseLevel] | None = None) -> LevelTable | None:
        """The same, and None where nothing is kept."""
        tables = [
            (key["images"], table)
            for _, key, table in self._kept()
            if levels is None or table.covers(levels)
        ]
        if tables:
            return max(tables, key=lambda pair: pair[0])[1]
        table = self.model.inherited_fit(self.kind)
        return table if table is None or levels is None or table.covers(levels) else None

    def keep(self, key: dict[str, Any], table: LevelTable) -> None:
        """Write a table that was fitted on the data of this key."""
        place = self._destination(key, taken=[file for file, own, _ in self._kept() if own != key])
        if place is not None:
            self.write(place, key, table)

    def fitted(
        self, data: FitData, levels: Sequence[NoiseLevel], fit: Fit, progress: str | None
    ) -> LevelTable:
        """The table of these data, fitted where none is kept; each is kept at once."""
        kept, x = list(self._kept()), None if data.name in NAMES else data.load(self.model)
        own = data.key(x)
        same = [table for _, key, table in kept if key == own]
        table = max(same, key=lambda table: len(table.ratios), default=None)
        missing = [level for level in dict.fromkeys(levels) if not _holds(table, level)]
        if missing:
            x = (data.load(self.model) if x is None else x).to(self.model.device)
            place = self._destination(own, taken=[file for file, key, _ in kept if key != own])
            with progress_bar(len(missing), progress, unit="level") as bar:
                for level in missing:
                    if _holds(table, level):  # the same ratio, with another alpha
                        continue
                    values = fit(x, level, Streams(data.seed, len(x), purpose="fit"))
                    table = self._added(table, level, torch.as_tensor(values, dtype=torch.float64))
                    if place is not None:
                        self.write(place, own, table)
                    bar.update()
        assert table is not None, "there are levels"
        return table

    def _added(self, table: LevelTable | None, level: NoiseLevel, values: Tensor) -> LevelTable:
        """A table with one level more, its values as they are read back: float32 logarithms."""
        values = values.log().float().double().exp()[None]
        if table is None:
            return LevelTable([level.ratio], values, self.known_as)
        ratios = torch.cat([table.ratios, table.ratios.new_tensor([level.ratio])])
        order = ratios.argsort()
        return LevelTable(ratios[order], torch.cat([table.values, values])[order], self.known_as)

    def _kept(self) -> Iterator[tuple[Path, dict[str, Any], LevelTable]]:
        """All fits of these weights: file, key, table. Damaged files are logged and left aside."""
        for file in self.files():
            try:
                with reading(file, "a fit"):
                    fit = self._read(file)
            except UsageError as error:
                logger.warning("%s; these %s variances are left aside", error, self.kind)
                continue
            if fit is not None:
                yield file, *fit

    def _read(self, file: Path) -> tuple[dict[str, Any], LevelTable] | None:
        """The fit in a file, checked; None where it is of other weights."""
        with tensors_opened(file) as stored:
            notes = stored.metadata() or {}
            if "digest" in notes and notes["digest"] != self.digest:
                return None
            key = parse_json(notes["key"], file)
            tensors = (stored.get_tensor(name) for name in ("ratios", "log_variances"))
            ratios, logs = (tensor.double() for tensor in tensors)
        if not isinstance(key["images"], int) or not self._is_shape(logs.shape[1:]):
            raise ValueError("it does not say what it was estimated from, or is of another shape")
        values = logs.exp()
        if not ((values.float() > 0) & values.float().isfinite()).all():
            raise ValueError("its variances are not all positive and finite")
        return key, LevelTable(ratios, values, self.known_as)

    def _is_shape(self, shape: Sequence[int]) -> bool:
        """Whether what is fitted at a level may have this shape."""
        if self.kind.startswith(CALIBRATION):
            return tuple(shape) in [(width,) for width in WIDTHS]
        if self.kind == SPECTRAL and self.model.any_size:
            return len(shape) == len(self.model.shape) and shape[0] == self.model.shape[0]
        return tuple(shape) == (self.model.shape if self.kind == SPECTRAL else ())

    def _destination(self, key: dict[str, Any], taken: Sequence[Path]) -> Path | None:
        """Where a fit is written: beside the model, or in the cache; None if neither can be.

        A read-only folder is left alone, by the superuser too.
        """
        name = f"{self.digest[:DIGEST]}-{sha256_of(key)[:DIGEST]}.safetensors"
        places = [self.cache / name]
        if self.beside is not None and self.beside not in taken and _is_own_folder(self.model):
            places.insert(0, self.beside)
        for file in places:
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                if os.access(file.parent, os.W_OK) and file.parent.stat().st_mode & ANYONE_WRITES:
                    return file
        advice = "set MMDGS_CACHE to a folder that can be written"
        logger.warning("%s variances could not be kept anywhere; %s", self.kind, advice)
        return None

    def write(self, file: Path, key: dict[str, Any], table: LevelTable) -> None:
        """Write a table to a file; where that cannot be, the log says so."""
        notes = {"digest": self.digest, "key": json.dumps(key)}
        content = save({"ratios": table.ratios, "log_variances": table.values.log().float()}, notes)
        try:
            write_atomically(file, content)
        except OSError as error:
            logger.warning("%s variances could not be kept in %s: %s", self.kind, file, error)


def _holds(table: LevelTable | None, level: NoiseLevel) -> bool:
    """Whether a table was fitted at a level."""
    known = [] if table is None else table.ratios.tolist()
    return any(abs(ratio / level.ratio - 1) < SAME_RATIO for ratio in known)


def _is_own_folder(model: Model) -> bool:
    """Whether a model's folder was given by its path: not one that ships, nor the hub's cache."""
    if model.folder is None:
        return False
    folder, source = model.folder.resolve(), Path(model.source).expanduser().resolve()
    return folder.is_relative_to(source) and folder.parent not in shipped_roots()
