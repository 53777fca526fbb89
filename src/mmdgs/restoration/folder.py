"""Restorations of many measurements, into a folder as they come: a run that was killed goes on.

draws.npz      `draws` (draws, images, C, H, W), `mean` and `std` (images, C, H, W), float32, not
               clipped
mean/, std/    the same as PNG files, named as the images were; in std/ white is STD_WHITE
restored.png   some images: measurement, mean, draws, standard deviation and, if known, the truth
restored.json  settings, cost and scores; for each image its name and the noise that was assumed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.cost import Cost
from mmdgs.data import to_uint8
from mmdgs.data.pictures import GAP, SCALE, image_grid, png
from mmdgs.data.single import file_names
from mmdgs.files import file_written_atomically, write_atomically
from mmdgs.identity import input_record
from mmdgs.memory import evenly
from mmdgs.metrics import calibration_ratio, coverage_of, crps, psnr, ssim
from mmdgs.models import Model
from mmdgs.moments.calibrated import calibration_record
from mmdgs.operators import Operator
from mmdgs.operators.measurements import unit_noise
from mmdgs.randomness import Streams, randn_like
from mmdgs.reading import reading
from mmdgs.restoration.draws import Restoration
from mmdgs.restoration.settings import RestorationSettings
from mmdgs.runtime import environment, progress_bar
from mmdgs.sampling.engine import chains_at_once
from mmdgs.sampling.writers import FolderDestination, numbered, read_part, write_picture

STD_WHITE = 0.25
SHOWN, SHOWN_DRAWS = 8, 4
"""Images and draws of each in restored.png."""
ARRAYS, RECORD, PICTURE = "draws.npz", "restored.json", "restored.png"
HEADER = 16
LEAST_SSIM = 11
"""Pixels a side that a structural similarity needs."""


class RestoredFolder(FolderDestination):
    """The folder of restorations; until all are there each image's draws are in a hidden folder.

    `names` are those of the images, `shape` that of the draws of one, (draws, C, H, W).
    """

    def __init__(self, path: Path, names: Sequence[str] = (), shape: Sequence[int] = ()) -> None:
        super().__init__(path, RECORD)
        self.names, self.shape = list(names), tuple(shape)

    def present(self, count: int) -> set[int]:
        if (self.path / ARRAYS).exists():
            return set(range(count))
        return {number for number in range(count) if self._part(number) is not None}

    def _part(self, number: int) -> numpy.ndarray | None:
        return read_part(self._file(number), self.shape, numpy.float32)

    def _file(self, number: int) -> Path:
        return self.work / f"{numbered(number)}.npy"

    def draws(self, count: int) -> Tensor:
        """The draws of all images that are there, (draws, images, ...)."""
        parts = [self._part(number) for number in range(count)]
        return torch.from_numpy(numpy.stack([part for part in parts if part is not None], 1))

    def _write(self, first: int, images: Tensor, wanted: set[int]) -> None:
        for number, draws in enumerate(images, first):
            if number in wanted:
                with file_written_atomically(self._file(number)) as stream:
                    numpy.save(stream, draws.numpy())

    def _assemble(self, count: int) -> None:
        draws = self.draws(count)
        arrays = {"draws": draws, "mean": draws.mean(0), "std": _spread(draws)}
        for kind, white in (("mean", 1.0), ("std", STD_WHITE)):
            (self.path / kind).mkdir(exist_ok=True)
            for name, image in zip(self.names, to_uint8(arrays[kind] / white), strict=True):
                write_picture(self.path / kind, name, image)
        with file_written_atomically(self.path / ARRAYS) as stream:
            numpy.savez_compressed(stream, **{name: x.numpy() for name, x in arrays.items()})  # type: ignore[arg-type]

    def _results(self) -> list[Path]:
        return [self.path / name for name in (ARRAYS, PICTURE, "mean", "std")]


@dataclass(frozen=True)
class Measurements:
    """Measurements y (B, *out_shape) in [0, 1] units by an operator; with a truth they are scored.

    Files have the `names` of the images, or numbers. `source` goes into the record: where they came
    from.
    """

    y: Tensor
    operator: Any
    truth: Tensor | None = None
    names: Sequence[str] = ()
    source: Mapping[str, Any] = field(default_factory=dict)


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


def simulated(truth: Tensor, operator: Operator, noise: float, *, seed: int) -> Tensor:
    """Measurements A x + noise e of clean images; those of image i depend on (seed, i) alone."""
    clean = operator(truth)
    unit_noise(noise, operator, clean)  # refuses what is not positive, or far too large
    return clean + noise * randn_like(clean, Streams(seed, len(truth), purpose="simulate"))


def restore_into(
    out: Path | str,
    model: Model,
    measurements: Measurements,
    settings: RestorationSettings,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> RestorationSummary:
    """`restore` for many measurements, into a folder."""
    work = Restoration.of(settings, model, measurements.y, measurements.operator)
    y, operator, truth, size = work.y, work.operator, measurements.truth, settings.draws
    count = len(y)
    names = file_names(measurements.names) if measurements.names else [*map(numbered, range(count))]
    place = RestoredFolder(Path(out), names, (size, *model.shape))
    inputs = input_record(
        model=model, estimator=work.moments, operator=operator, y=y, truth=truth, names=names
    )
    calibration = calibration_record(work.moments, work.levels)
    record = {"count": count, "model": model.digest, **settings.record(), **measurements.source}
    record |= {"inputs": inputs, "calibration": calibration}
    group = evenly(count, max(1, chains_at_once(model) // size))
    group = max(1, settings.batch_size // size) if settings.batch_size else group
    with place.held():
        place.begin(record, resume=resume, overwrite=overwrite)
        if (done := place.finished()) is not None:
            with reading(place.record, "a record of restorations"):
                kept = [done[name] for name in ("seconds", "scores", "images")]
                return RestorationSummary(place.path, Cost(**done["cost"]), *kept)
        (place.path / ARRAYS).unlink(missing_ok=True)  # of a run killed before its record
        present = place.present(count)
        parts = [range(first, min(first + group, count)) for first in range(0, count, group)]
        pending = [part for part in parts if not present.issuperset(part)]
        alone = len(pending) == 1  # then its own steps are the progress
        words = "restoring"
        with progress_bar(sum(map(len, pending)), None if alone else words, unit="image") as bar:
            for part in pending:
                restored = work.draws(part.start, part.stop, progress=words if alone else None)
                note = {**asdict(restored.cost), "seconds": restored.seconds}
                draws = restored.draws.transpose(0, 1).contiguous()
                place.write(part.start, draws, set(part) - present, note)
                bar.update(len(part))
        notes = place.notes()
        with reading(place.work, "a folder of notes and draws"):
            cost = Cost(*(notes[-1][name] for name in ("forwards", "products")))
            seconds = sum(note["seconds"] for note in notes)
            draws = place.draws(count)
        scores = {} if truth is None else scores_of(draws, truth)
        write_atomically(place.path / PICTURE, overview(draws, operator, y, truth))
        noise = work.noise.square().flatten(1).mean(1).sqrt().expand(count).tolist()
        images = [{"name": name, "noise": level} for name, level in zip(names, noise, strict=True)]
        summary = {"cost": asdict(cost), "seconds": seconds, "scores": scores, "images": images}
        here = environment(model.device, precision=settings.precision)
        place.finish(count, {"settings": record, **summary, "environment": here})
    return RestorationSummary(place.path, cost, seconds, scores, images)


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


def overview(draws: Tensor, operator: Operator, y: Tensor, truth: Tensor | None) -> bytes:
    """A PNG of the first images, a row each, with a word above each column."""
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
    tiles = torch.stack(list(columns.values()), 1).flatten(0, 1)
    picture = image_grid(tiles, len(columns)).repeat(SCALE, 0).repeat(SCALE, 1)
    return png(_with_header(picture, list(columns), (shape[-1] + GAP) * SCALE))


def as_image(y: Tensor, shape: torch.Size) -> Tensor:
    """Measurements as images of a shape: enlarged, grey repeated; what is no image as black."""
    if y.ndim != 4 or y.shape[1] not in (1, shape[0]):
        return torch.zeros(len(y), *shape)
    return functional.interpolate(y, tuple(shape[1:]), mode="nearest").expand(-1, *shape)


def _with_header(picture: numpy.ndarray, words: list[str], width: int) -> numpy.ndarray:
    from PIL import Image, ImageDraw  # here: it would slow down every start

    above = numpy.full((HEADER, *picture.shape[1:]), 255, dtype=numpy.uint8)
    image = Image.fromarray(numpy.concatenate([above, picture]))
    pen = ImageDraw.Draw(image)
    for i, word in enumerate(words):
        pen.text((GAP * SCALE + i * width, 2), word, fill=0 if image.mode == "L" else (0, 0, 0))
    return numpy.asarray(image)


def _spread(draws: Tensor) -> Tensor:
    """The standard deviation of draws, zero for a single one."""
    return draws.std(0, correction=min(1, len(draws) - 1))
