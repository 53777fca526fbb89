"""Restorations of many measurements, into a folder as they come: a run that was killed goes on.

draws.npz      `draws` (draws, images, C, H, W), `mean` and `std` (images, C, H, W), float32, not
               clipped; for images of several sizes, and draws of more than a gigabyte, it is a
               folder, with draws/NAME.npz of each
mean/, std/    the same as PNG files, named as the images were; in std/ white is STD_WHITE
files/         of files of instruments (data/instruments.py): NAME-mean, NAME-std, NAME-draw-0 in
               their format, axes, type and units, with their metadata
restored.png   some images: measurement, mean, draws, standard deviation and, if known, the truth
restored.json  settings, cost and scores; for each image its name, the noise that was assumed, and
               with several particles log p(y) and the least effective share of the particles
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.cost import Cost
from mmdgs.data import to_uint8
from mmdgs.data.pictures import GAP, SCALE, image_grid, png
from mmdgs.data.single import NamedImage, file_names, write_results
from mmdgs.errors import UsageError
from mmdgs.files import file_written_atomically, remove, write_atomically
from mmdgs.identity import input_record
from mmdgs.memory import evenly
from mmdgs.metrics import calibration_ratio, coverage_of, crps, psnr, ssim
from mmdgs.models import Model
from mmdgs.moments.calibrated import calibration_record
from mmdgs.operators import Operator
from mmdgs.randomness import Streams, randn_like
from mmdgs.reading import reading
from mmdgs.restoration.checks import noise_of
from mmdgs.restoration.draws import Restoration, Restored
from mmdgs.restoration.settings import RestorationSettings
from mmdgs.runtime import environment, progress_bar
from mmdgs.sampling.engine import chains_at_once
from mmdgs.sampling.writers import FolderDestination, numbered, read_part, write_picture
from mmdgs.sensors import Bounds, Sensor

STD_WHITE = 0.25
SHOWN, SHOWN_DRAWS = 8, 4
"""Images and draws of each in restored.png."""
LARGEST_TILE = 256
"""Pixels a side of an image there."""
ARRAYS, RECORD, PICTURE, FILES = "draws.npz", "restored.json", "restored.png", "files"
HEADER = 16
TOGETHER = 1 << 30
"""Bytes of draws up to which they are one file, which is put together in memory."""
LEAST_SSIM = 11
"""Pixels a side that a structural similarity needs."""


class RestoredFolder(FolderDestination):
    """The folder of restorations; until all are there each image's draws are in a hidden folder.

    `names` are those of the images, `shapes` those of the draws of each, (draws, C, H, W), and
    `images` may say which files they came from.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str] = (),
        shapes: Sequence[tuple[int, ...]] = (),
        images: Sequence[NamedImage] = (),
    ) -> None:
        super().__init__(path, RECORD)
        self.names, self.shapes, self.images = list(names), list(shapes), list(images)

    def arrays(self) -> dict[Path, range]:
        """The files of arrays, and the images whose draws are in each."""
        count = len(self.names)
        size = 4 * sum(math.prod(shape) for shape in self.shapes)
        if len(set(self.shapes)) <= 1 and size <= TOGETHER:
            return {self.path / ARRAYS: range(count)}
        folder = self.path / Path(ARRAYS).stem
        return {folder / f"{self.names[i]}.npz": range(i, i + 1) for i in range(count)}

    def present(self, count: int) -> set[int]:
        if all(file.exists() for file in self.arrays()):
            return set(range(count))
        return {number for number in range(count) if self._part(number) is not None}

    def _part(self, number: int) -> numpy.ndarray | None:
        return read_part(self._file(number), self.shapes[number], numpy.float32)

    def _file(self, number: int) -> Path:
        return self.work / f"{numbered(number)}.npy"

    def draws(self, numbers: range) -> Tensor:
        """The draws of those of some images of one size that are there, (draws, images, ...)."""
        parts = [self._part(number) for number in numbers]
        return torch.from_numpy(numpy.stack([part for part in parts if part is not None], 1))

    def _write(self, first: int, images: Tensor, wanted: set[int]) -> None:
        for number, draws in enumerate(images, first):
            if number in wanted:
                with file_written_atomically(self._file(number)) as stream:
                    numpy.save(stream, draws.numpy())

    def _assemble(self, count: int) -> None:
        for file, numbers in self.arrays().items():
            draws = self.draws(numbers)
            arrays = {"draws": draws, "mean": draws.mean(0), "std": _spread(draws)}
            for kind, white in (("mean", 1.0), ("std", STD_WHITE)):
                (self.path / kind).mkdir(exist_ok=True)
                for number, image in zip(numbers, to_uint8(arrays[kind] / white), strict=True):
                    write_picture(self.path / kind, self.names[number], image)
            file.parent.mkdir(exist_ok=True)
            with file_written_atomically(file) as stream:
                values: Any = {name: x.numpy() for name, x in arrays.items()}
                numpy.savez_compressed(stream, **values)
        if any(image.stored for image in self.images):
            (self.path / FILES).mkdir(exist_ok=True)
            write_results(self.path / FILES, self.images, self._results_of)

    def _results_of(self, number: int) -> Tensor:
        draws = self.draws(range(number, number + 1))[:, 0]
        return torch.cat([draws.mean(0)[None], _spread(draws)[None], draws])

    def remove_arrays(self) -> None:
        """Those of a run that was killed before its record was complete."""
        for path in (self.path / ARRAYS, self.path / Path(ARRAYS).stem):
            remove(path)

    def _results(self) -> list[Path]:
        names = (ARRAYS, Path(ARRAYS).stem, PICTURE, "mean", "std", FILES)
        return [self.path / name for name in names]


@dataclass(frozen=True)
class Measurements:
    """Measurements y (B, *out_shape) in [0, 1] units by an operator; with a truth they are scored.

    Files have the `names` of the images, or numbers. `source` goes into the record: where they came
    from. `noise` is that of these measurements, where it is not the settings', and `bounds` are
    where they were clipped (`Restoration.of`); results of the `images` of instruments' files are
    written as such files, too.
    """

    y: Tensor
    operator: Any
    truth: Tensor | None = None
    names: Sequence[str] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    noise: Any = None
    bounds: Bounds | None = None
    images: Sequence[NamedImage] = ()


@dataclass(frozen=True)
class RestorationSummary:
    """What a run leaves: the cost of a draw, scores by name where the truth is known, and for each
    of the images its name and the standard deviation of its noise, given or estimated.
    """

    path: Path
    cost: Cost
    seconds: float
    scores: dict[str, float]
    images: list[dict[str, Any]]


def simulated(
    truth: Tensor, operator: Operator, noise: Any, *, seed: int, first: int = 0
) -> Tensor:
    """Measurements of A x for clean images x; those of image i depend on (seed, i) alone."""
    clean = operator(truth)
    streams = Streams(seed, len(truth), first, purpose="simulate")
    level = noise_of(noise, clean, operator)  # refuses what is not positive, or far too large
    if isinstance(level, Sensor):
        return level.simulated(clean, streams)
    return clean + noise * randn_like(clean, streams)


def restore_into(
    out: Path | str,
    model: Model,
    measurements: Measurements | Sequence[Measurements],
    settings: RestorationSettings,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> RestorationSummary:
    """`restore` for many measurements, into a folder; of several sizes they are a sequence.

    The numbers of measurements go on from one to the next.
    """
    sets = [measurements] if isinstance(measurements, Measurements) else list(measurements)
    works = _works(settings, model, sets)
    settings = replace(settings, inflation=works[0].settings.inflation)
    count, size = sum(len(work.y) for work in works), settings.draws
    names = file_names([name for part in sets for name in part.names])
    names = names or [*map(numbered, range(count))]
    shapes = [(size, *work.model.shape) for work in works for _ in work.y]
    pictures = [image for part in sets for image in part.images]
    place = RestoredFolder(Path(out), names, shapes, pictures)
    inputs = input_record(
        model=model,
        estimator=works[0].moments,
        operator=_one_or_all([work.operator for work in works]),
        y=_one_or_all([work.y for work in works]),
        truth=_one_or_all([part.truth for part in sets]),
        names=names,
        noise=_one_or_all([work.noise for work in works]),
    )
    calibration = calibration_record(works[0].moments, works[0].levels)
    record = {"count": count, "model": model.digest, **settings.record(), **sets[0].source}
    record |= {"inputs": inputs, "calibration": calibration}
    with place.held():
        place.begin(record, resume=resume, overwrite=overwrite)
        if (done := place.finished()) is not None:
            with reading(place.record, "a record of restorations"):
                kept = [done[name] for name in ("seconds", "scores", "images")]
                return RestorationSummary(place.path, Cost(**done["cost"]), *kept)
        place.remove_arrays()
        present = place.present(count)
        parts = [(work, part) for work in works for part in _parts(work)]
        pending = [(work, part) for work, part in parts if not present.issuperset(part)]
        alone = len(pending) == 1  # then its own steps are the progress
        total, words = sum(len(part) for _, part in pending), "restoring"
        with progress_bar(total, None if alone else words, unit="image") as bar:
            for work, part in pending:
                own = part.start - work.first, part.stop - work.first
                restored = work.draws(*own, progress=words if alone else None)
                note = {**asdict(restored.cost), "seconds": restored.seconds}
                note |= _evidence(restored, part)
                draws = restored.draws.transpose(0, 1).contiguous()
                place.write(part.start, draws, set(part) - present, note)
                bar.update(len(part))
        notes = place.notes()
        with reading(place.work, "a folder of notes and draws"):
            cost = Cost(*(notes[-1][name] for name in ("forwards", "products")))
            seconds = sum(note["seconds"] for note in notes)
            scores, picture = _scores_and_picture(place, works, [part.truth for part in sets])
        write_atomically(place.path / PICTURE, picture)
        noise = [level for work in works for level in _noise_in_words(work)]
        images = [{"name": name, **level} for name, level in zip(names, noise, strict=True)]
        for key, value in ((key, value) for note in notes for key, value in note.items()):
            number, _, name = key.partition(" ")
            if name:
                images[int(number)][name] = value
        summary = {"cost": asdict(cost), "seconds": seconds, "scores": scores, "images": images}
        here = environment(model.device, precision=settings.precision)
        place.finish(count, {"settings": record, **summary, "environment": here})
    return RestorationSummary(place.path, cost, seconds, scores, images)


def _works(
    settings: RestorationSettings, model: Model, sets: Sequence[Measurements]
) -> list[Restoration]:
    """The restoration of each set of measurements, by one estimator for all."""
    if not sets:
        raise UsageError("there are no measurements")
    works, first = [], 0
    for part in sets:
        own = settings if part.noise is None else replace(settings, noise=part.noise)
        works.append(Restoration.of(own, model, part.y, part.operator, first, part.bounds))
        settings = replace(settings, covariance=works[0].moments)
        first += len(part.y)
    return works


def _noise_in_words(work: Restoration) -> list[dict[str, float]]:
    """Of each measurement: the standard deviation of its noise, by its mean square; its sensor."""
    levels = work.deviations.square().flatten(1).mean(1).sqrt().expand(len(work.y)).tolist()
    own: list[dict[str, float]] = [{}] * len(work.y)
    if isinstance(work.noise, Sensor):
        own = [work.noise.record(i, len(work.y)) for i in range(len(work.y))]
    return [{"noise": level, **sensor} for level, sensor in zip(levels, own, strict=True)]


def _parts(work: Restoration) -> list[range]:
    """The numbers of the measurements that are restored at a time."""
    count, size = len(work.y), work.settings.draws
    group = evenly(count, max(1, chains_at_once(work.model) // size))
    group = max(1, work.settings.batch_size // size) if work.settings.batch_size else group
    stop = work.first + count
    return [range(at, min(at + group, stop)) for at in range(work.first, stop, group)]


def _evidence(restored: Restored, part: range) -> dict[str, float]:
    """Of draws by several particles, as "NUMBER name": log p(y), its standard error (of several
    draws), and the effective share of the particles at the level where it is least.
    """
    if "log_evidence" not in restored.info:
        return {}
    log, error = restored.log_evidence()
    least = restored.info["effective"].mean(0).amin(1)
    values = {"log_evidence": log, "log_evidence_error": error, "least_effective": least}
    return {
        f"{number} {name}": value
        for name, column in values.items()
        for number, value in zip(part, column.tolist(), strict=True)
        if math.isfinite(value)
    }


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _scores_and_picture(
    place: RestoredFolder, works: Sequence[Restoration], truths: Sequence[Tensor | None]
) -> tuple[dict[str, float], bytes]:
    """The scores, averaged over images where they are of several sizes, and the overview."""
    scores: list[tuple[int, dict[str, float]]] = []
    rows: list[dict[str, Tensor]] = []
    for work, truth in zip(works, truths, strict=True):
        if truth is None and len(rows) == SHOWN:
            continue
        shown = len(work.y) if truth is not None else min(SHOWN, len(work.y))
        draws = place.draws(range(work.first, work.first + shown))
        scores += [] if truth is None else [(len(truth), scores_of(draws, truth))]
        rows += overview_rows(draws, work.operator, work.y, truth)[: SHOWN - len(rows)]
    counts = [count for count, _ in scores]
    averages = {
        name: sum(count * values[name] for count, values in scores) / sum(counts)
        for name in (scores[0][1] if scores else ())
        if all(name in values for _, values in scores)
    }
    return averages, overview(rows)


def scores_of(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """PSNR in dB and SSIM of draws (draws, B, ...), and of two draws or more their calibration."""
    mean = draws.mean(0)
    scores = {"psnr_draw": psnr(draws, truth), "psnr_mean": psnr(mean, truth)}
    if min(truth.shape[-2:]) >= LEAST_SSIM:
        scores |= {"ssim_draw": ssim(draws[0], truth), "ssim_mean": ssim(mean, truth)}
    averages = {name: values.mean().item() for name, values in scores.items()}
    if len(draws) > 1:
        averages["calibration"] = calibration_ratio(draws, truth)
        averages["coverage_90"] = coverage_of(draws, truth)
        averages["crps"] = crps(draws, truth).mean().item()
    return averages


def overview_rows(
    draws: Tensor, operator: Operator, y: Tensor, truth: Tensor | None
) -> list[dict[str, Tensor]]:
    """What is shown of the first images, each (C, H, W), with a word for each column."""
    shown = min(SHOWN, draws.shape[1])
    draws, shape = draws[:, :shown], draws.shape[2:]
    measurement = as_image(operator.known(y[:shown].cpu()), shape)
    columns = {"measurement": measurement, "mean": draws.mean(0)}
    columns |= {f"draw {i + 1}": draws[i] for i in range(min(SHOWN_DRAWS, len(draws)))}
    if len(draws) > 1:
        spread = (_spread(draws) / STD_WHITE).mean(1, keepdim=True)
        columns["uncertainty"] = spread.expand(-1, *shape)
    if truth is not None:
        columns["truth"] = truth[:shown].cpu()
    return [{word: images[i] for word, images in columns.items()} for i in range(shown)]


def overview(rows: Sequence[Mapping[str, Tensor]]) -> bytes:
    """A PNG of images, a row each, with a word above each column; large ones are made smaller."""
    images = [_small(image) for row in rows for image in row.values()]
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    margins = [(0, width - image.shape[2], 0, height - image.shape[1]) for image in images]
    tiles = torch.stack(
        [functional.pad(image, margin) for image, margin in zip(images, margins, strict=True)]
    )
    scale = max(1, min(SCALE, LARGEST_TILE // max(height, width)))
    picture = image_grid(tiles, len(rows[0])).repeat(scale, 0).repeat(scale, 1)
    return png(_with_header(picture, list(rows[0]), GAP * scale, (width + GAP) * scale))


def _small(image: Tensor) -> Tensor:
    """An image (C, H, W) with sides of at most LARGEST_TILE, by means over pixels."""
    shrink = LARGEST_TILE / max(image.shape[1:])
    if shrink >= 1:
        return image
    sides = [max(1, round(shrink * side)) for side in image.shape[1:]]
    return functional.interpolate(image[None], sides, mode="area")[0]


def as_image(y: Tensor, shape: torch.Size) -> Tensor:
    """Measurements as images of a shape: enlarged, grey repeated; what is no image as black."""
    if y.ndim != 4 or y.shape[1] not in (1, shape[0]):
        return torch.zeros(len(y), *shape)
    return functional.interpolate(y, tuple(shape[1:]), mode="nearest").expand(-1, *shape)


def _with_header(picture: numpy.ndarray, words: list[str], left: int, width: int) -> numpy.ndarray:
    from PIL import Image, ImageDraw  # here: it would slow down every start

    above = numpy.full((HEADER, *picture.shape[1:]), 255, dtype=numpy.uint8)
    image = Image.fromarray(numpy.concatenate([above, picture]))
    pen = ImageDraw.Draw(image)
    for i, word in enumerate(words):
        pen.text((left + i * width, 2), word, fill=0 if image.mode == "L" else (0, 0, 0))
    return numpy.asarray(image)


def _spread(draws: Tensor) -> Tensor:
    """The standard deviation of draws, zero for a single one."""
    return draws.std(0, correction=min(1, len(draws) - 1))
