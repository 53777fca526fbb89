"""Restorations of many measurements, written into a folder as they come, so that a run that was killed goes on.

draws.npz        `draws` (draws, images, C, H, W), `mean` and `std` (images, C, H, W), float32, not clipped
mean/, std/      the same as PNG files, named as the images were; in std/ white is a standard deviation of STD_WHITE
restored.png     some images: measurement, mean, draws, standard deviation and, where it is known, the truth
restored.json    settings, cost and scores; for each image its name and the noise that was assumed
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
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
from mmdgs.errors import UsageError
from mmdgs.files import file_written_atomically, npz_opened, refuse_file, write_atomically
from mmdgs.generation.engine import chains_at_once
from mmdgs.generation.identity import input_record
from mmdgs.generation.restoration import RestorationSettings, check_restoration, noise_of, restore_by
from mmdgs.generation.writers import PARTS, Destination, numbered, read_part, write_picture
from mmdgs.memory import evenly
from mmdgs.metrics import calibration_ratio, coverage_of, crps, psnr, ssim
from mmdgs.models import Model
from mmdgs.moments.calibrated import calibration_record
from mmdgs.operators import Operator, as_operator, measured
from mmdgs.operators.measurements import unit_noise
from mmdgs.reading import reading
from mmdgs.runtime import environment, progress_bar

STD_WHITE = 0.25
SHOWN, SHOWN_DRAWS = 8, 4
"""Images and draws of each in restored.png."""
ARRAYS, RECORD, PICTURE = "draws.npz", "restored.json", "restored.png"
HEADER = 16
LEAST_SSIM = 11
"""Pixels a side that a structural similarity needs."""


class RestoredFolder(Destination):
    """The folder of restorations; until all are there the draws of each image are in a hidden folder.

    `names` are those of the images, `shape` that of the draws of one, (draws, C, H, W).
    """

    def __init__(self, path: Path, names: Sequence[str] = (), shape: Sequence[int] = ()) -> None:
        refuse_file(path)
        super().__init__(path, path / RECORD, path / f".{PARTS}")
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
        """The draws of all images, (draws, images, ...)."""
        if (file := self.path / ARRAYS).exists():
            with reading(file, "an .npz of draws"), npz_opened(file) as arrays:
                found = arrays["draws"]
                if found.shape != (self.shape[0], count, *self.shape[1:]) or not numpy.isfinite(found).all():
                    raise UsageError(f"it holds other draws than this run makes; remove {file} and use --resume")
            return torch.from_numpy(found)
        parts = [self._part(number) for number in range(count)]
        return torch.from_numpy(numpy.stack([part for part in parts if part is not None], 1))

    def _write(self, first: int, images: Tensor, wanted: set[int]) -> None:
        for number, draws in enumerate(images, first):
            if number in wanted:
                with file_written_atomically(self._file(number)) as stream:
                    numpy.save(stream, draws.numpy())

    def _assemble(self, count: int) -> None:
        draws = self.draws(count)
        found = {"mean": draws.mean(0), "std": _spread(draws)}
        for kind, values in found.items():
            (self.path / kind).mkdir(exist_ok=True)
            for name, image in zip(self.names, to_uint8(values if kind == "mean" else values / STD_WHITE), strict=True):
                write_picture(self.path / kind, name, image)
        with file_written_atomically(self.path / ARRAYS) as stream:
            arrays = {name: values.numpy() for name, values in {"draws": draws, **found}.items()}
            numpy.savez_compressed(stream, **arrays)  # type: ignore[arg-type]  # numpy takes the names for its options

    def _clear(self) -> None:
        for name in (ARRAYS, RECORD, PICTURE):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.path / "mean", self.path / "std", self.work):
            shutil.rmtree(folder, ignore_errors=True)

    def _in_use(self) -> bool:
        return self._holds_other()


@dataclass(frozen=True)
class Restoration:
    """What a run leaves: how many images, the cost of a draw, and scores by name where the truth is known.

    `images` has for each its name and its noise, the standard deviation that was given or estimated.
    """

    path: Path
    count: int
    cost: Cost
    seconds: float
    scores: dict[str, float]
    images: list[dict[str, Any]]


def simulated(truth: Tensor, operator: Operator, noise: float, *, seed: int) -> Tensor:
    """Measurements A x + noise e of clean images, (B, *out_shape); those of image i depend on (seed, i) alone."""
    from mmdgs.randomness import Streams, randn_like

    clean = operator(truth)
    unit_noise(noise, operator, clean)  # refuses what is not positive, or far too large
    return clean + noise * randn_like(clean, Streams(seed, len(truth), purpose="simulate"))


def restore_into(
    out: Path | str,
    model: Model,
    y: Tensor,
    operator: Any,
    settings: RestorationSettings,
    *,
    truth: Tensor | None = None,
    names: Sequence[str] = (),
    source: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: str | None = "restoring",
) -> Restoration:
    """`restore` for many measurements y (B, *out_shape) in [0, 1] units, into a folder; with a truth, scored.

    Files have the `names` of the images, or numbers. `source` goes into the record: where measurements came from.
    """
    count = len(y)
    check_restoration(model, batch_size)
    operator = as_operator(operator, model.shape)
    y = measured(y.detach(), operator).to(torch.float32)
    noise = noise_of(settings.noise, y, operator)
    names = file_names(names) if names else [numbered(number) for number in range(count)]
    place = RestoredFolder(Path(out), names, (settings.draws, *model.shape))
    place.check(resume=resume, overwrite=overwrite)
    moments = settings.estimator(model)  # refused before anything is written
    inputs = input_record(model=model, estimator=moments, operator=operator, y=y, truth=truth, names=names)
    record = {"count": count, "model": model.digest, **settings_record(settings), **(source or {}), "inputs": inputs}
    record["calibration"] = calibration_record(moments, settings.path(model))
    size = settings.draws
    group = max(1, batch_size // size) if batch_size else evenly(count, max(1, chains_at_once(model) // size))
    with place.held():
        place.begin(record, resume=resume, overwrite=overwrite)
        if (done := place.finished()) is not None:
            with reading(place.record, "a record of restorations"):
                cost = Cost(**done["cost"])
                return Restoration(place.path, count, cost, done["seconds"], done["scores"], done["images"])
        present = place.present(count)
        parts = [range(first, min(first + group, count)) for first in range(0, count, group)]
        pending = [part for part in parts if not present.issuperset(part)]
        alone = len(pending) == 1  # then its own steps are the progress
        with progress_bar(sum(map(len, pending)), None if alone else progress, unit="image") as bar:
            for part in pending:
                rows = slice(part.start, part.stop)
                drawn = restore_by(
                    replace(settings, covariance=moments, noise=noise if len(noise) == 1 else noise[rows]),
                    model,
                    y[rows],
                    operator,
                    first=part.start,
                    batch_size=batch_size,
                    progress=progress if alone else None,
                )
                spent = {"forwards": drawn.cost.forwards, "products": drawn.cost.products, "seconds": drawn.seconds}
                place.write(part.start, drawn.draws.transpose(0, 1).contiguous(), set(part) - present, spent)
                bar.update(len(part))
        notes = place.notes()
        with reading(place.work, "a folder of notes and draws"):
            cost = Cost(*(notes[-1][name] for name in ("forwards", "products")))
            seconds = sum(note["seconds"] for note in notes)
            draws = place.draws(count)
        scores = {} if truth is None else scores_of(draws, truth)
        write_atomically(place.path / PICTURE, overview(draws, operator, y, truth))
        each = noise.square().flatten(1).mean(1).sqrt().expand(count).tolist()
        images = [{"name": name, "noise": level} for name, level in zip(names, each, strict=True)]
        found = {"settings": record, "cost": asdict(cost), "seconds": seconds, "scores": scores, "images": images}
        place.finish(count, {**found, "environment": environment(model.device, precision=settings.precision)})
    return Restoration(place.path, count, cost, seconds, scores, images)


def settings_record(settings: RestorationSettings) -> dict[str, Any]:
    """Every setting of a run by name, for its record."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return input_record(**values, **values.pop("posterior"))


def scores_of(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """How good draws (draws, B, ...) of images are: PSNR in dB, SSIM, and with two draws or more their calibration."""
    mean = draws.mean(0)
    found = {"psnr_draw": psnr(draws, truth).mean().item(), "psnr_mean": psnr(mean, truth).mean().item()}
    if min(truth.shape[-2:]) >= LEAST_SSIM:
        found |= {"ssim_draw": ssim(draws[0], truth).mean().item(), "ssim_mean": ssim(mean, truth).mean().item()}
    if len(draws) > 1:
        found |= {"calibration": calibration_ratio(draws, truth), "coverage_90": coverage_of(draws, truth)}
        found["crps"] = crps(draws, truth).mean().item()
    return found


def overview(draws: Tensor, operator: Operator, y: Tensor, truth: Tensor | None) -> bytes:
    """A PNG of the first images, a row each, with a word above each column."""
    shown = min(SHOWN, draws.shape[1])
    draws, shape = draws[:, :shown], draws.shape[2:]
    columns = {"measurement": as_image(operator.known(y[:shown].cpu()), shape), "mean": draws.mean(0)}
    columns |= {f"draw {i + 1}": draws[i] for i in range(min(SHOWN_DRAWS, len(draws)))}
    if len(draws) > 1:
        columns["uncertainty"] = (_spread(draws) / STD_WHITE).mean(1, keepdim=True).expand(-1, *shape)
    if truth is not None:
        columns["truth"] = truth[:shown].cpu()
    tiles = torch.stack(list(columns.values()), 1).flatten(0, 1)
    picture = image_grid(tiles, len(columns))
    return png(_with_header(picture.repeat(SCALE, 0).repeat(SCALE, 1), list(columns), (shape[-1] + GAP) * SCALE))


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
    return draws.std(0) if len(draws) > 1 else torch.zeros_like(draws[0])
