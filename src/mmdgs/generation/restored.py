"""Restorations of many measurements, written into a folder as they come, so that a run that was killed goes on.

draws.npz        `draws` (draws, images, C, H, W), `mean` and `std` (images, C, H, W), float32, not clipped
mean/, std/      the same as PNG files; in std/ white is a standard deviation of STD_WHITE
restored.png     some images: measurement, mean, draws, standard deviation and, where it is known, the truth
restored.json    settings, cost and scores
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.cost import Cost
from mmdgs.data import to_uint8
from mmdgs.data.pictures import GAP, SCALE, image_grid, png
from mmdgs.files import file_written_atomically, refuse_file, write_atomically
from mmdgs.generation.engine import chains_at_once
from mmdgs.generation.methods import edm_levels
from mmdgs.generation.restoration import BRIDGE, MULTISTEP, check_restoration, restore
from mmdgs.generation.writers import PARTS, Destination, numbered, write_picture
from mmdgs.memory import evenly
from mmdgs.metrics import calibration_ratio, coverage_of, crps, psnr, ssim
from mmdgs.models import Model
from mmdgs.moments.calibrated import calibration_record
from mmdgs.operators import ESTIMATE, Operator, measured, noise_variances
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
    """The folder of restorations; until all are there the draws of each image are in a hidden folder."""

    def __init__(self, path: Path) -> None:
        refuse_file(path)
        super().__init__(path, path / RECORD, path / f".{PARTS}")

    def present(self, count: int) -> set[int]:
        if (self.path / ARRAYS).exists():
            return set(range(count))
        return {int(file.stem) for file in self.work.glob("[0-9]*.npy")}

    def draws(self, count: int) -> Tensor:
        """The draws of all images, (draws, images, ...)."""
        if (self.path / ARRAYS).exists():
            with numpy.load(self.path / ARRAYS) as found:
                return torch.from_numpy(found["draws"])
        files = [self.work / f"{numbered(number)}.npy" for number in range(count)]
        return torch.from_numpy(numpy.stack([numpy.load(file) for file in files], 1))

    def _write(self, first: int, images: Tensor, wanted: set[int]) -> None:
        for number, draws in enumerate(images, first):
            if number in wanted:
                with file_written_atomically(self.work / f"{numbered(number)}.npy") as stream:
                    numpy.save(stream, draws.numpy())

    def _assemble(self, count: int) -> None:
        draws = self.draws(count)
        found = {"mean": draws.mean(0), "std": _spread(draws)}
        for name, values in found.items():
            (self.path / name).mkdir(exist_ok=True)
            for number, image in enumerate(to_uint8(values if name == "mean" else values / STD_WHITE)):
                write_picture(self.path / name, number, image)
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
    """What a run leaves: how many images, the cost of a draw, and scores by name where the truth is known."""

    path: Path
    count: int
    cost: Cost
    seconds: float
    scores: dict[str, float]


def simulated(truth: Tensor, operator: Operator, noise: float, *, seed: int) -> Tensor:
    """Measurements A x + noise e of clean images, (B, *out_shape); those of image i depend on (seed, i) alone."""
    from mmdgs.randomness import Streams, randn_like

    clean = operator(truth)
    noise_variances(noise, operator, clean)  # refuses what is not positive
    return clean + noise * randn_like(clean, Streams(seed, len(truth), purpose="simulate"))


def restore_into(
    out: Path | str,
    model: Model,
    y: Tensor,
    operator: Operator,
    *,
    noise: float | str,
    truth: Tensor | None = None,
    covariance: str = "spectral",
    posterior: Mapping[str, Any] | None = None,
    chains: str = MULTISTEP,
    steps: int = 25,
    draws: int = 16,
    seed: int = 0,
    batch_size: int | None = None,
    precision: str = "float32",
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: str | None = "restoring",
) -> Restoration:
    """`restore` for many measurements y (B, *out_shape) in [0, 1] units, into a folder; with a truth, scored.

    `posterior` is what is set of the covariance, as `Model.posterior` takes it.
    """
    check_restoration(model, steps, draws, batch_size, chains)
    place, count = RestoredFolder(Path(out)), len(y)
    measured(y, operator)
    if noise != ESTIMATE:
        noise_variances(noise, operator, y)  # type: ignore[arg-type]
    options = {"noise": noise, "covariance": covariance, "steps": steps, "draws": draws, "seed": seed}
    options |= {} if chains == BRIDGE else {"chains": chains}  # version 0.2 had no others, and no word of them
    chosen = posterior or {}
    moments = model.posterior(covariance, **chosen)  # refused before anything is written
    wanted = {"count": count, "model": model.digest, **options, **chosen, "precision": precision, **(settings or {})}
    wanted["calibration"] = calibration_record(moments, edm_levels(model, steps))
    group = max(1, batch_size // draws) if batch_size else evenly(count, max(1, chains_at_once(model) // draws))
    place.check(resume=resume, overwrite=overwrite)
    with place.held():
        place.begin(wanted, resume=resume, overwrite=overwrite)
        if (done := place.finished()) is not None:
            with reading(place.record, "a record of restorations"):
                return Restoration(place.path, count, Cost(**done["cost"]), done["seconds"], done["scores"])
        present = place.present(count)
        parts = [range(first, min(first + group, count)) for first in range(0, count, group)]
        pending = [part for part in parts if not present.issuperset(part)]
        one = len(pending) == 1  # then its own steps are the progress
        with progress_bar(sum(map(len, pending)), None if one else progress, unit="image") as bar:
            for part in pending:
                found = restore(
                    model,
                    y[part.start : part.stop],
                    operator,
                    **{**options, "covariance": moments},  # type: ignore[arg-type]
                    first=part.start,
                    batch_size=batch_size,
                    precision=precision,
                    progress=progress if one else None,
                )
                spent = {"forwards": found.cost.forwards, "products": found.cost.products, "seconds": found.seconds}
                place.write(part.start, found.draws.transpose(0, 1).contiguous(), set(part) - present, spent)
                bar.update(len(part))
        notes = place.notes()
        with reading(place.work, "a folder of notes and draws"):
            cost = {name: notes[-1][name] for name in ("forwards", "products")}
            seconds = sum(note["seconds"] for note in notes)
            made = place.draws(count)
        scores = {} if truth is None else scores_of(made, truth)
        write_atomically(place.path / PICTURE, overview(made, operator, y, truth))
        found_in = environment(model.device, precision=precision)
        record = {"settings": wanted, "cost": cost, "seconds": seconds, "scores": scores, "environment": found_in}
        place.finish(count, record)
    return Restoration(place.path, count, Cost(**cost), seconds, scores)


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
