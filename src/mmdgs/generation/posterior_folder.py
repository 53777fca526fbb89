"""Posteriors of many images, a folder each, written as they come, so that a run that was killed goes on.

NAME/mean.png, std.png     the mean; standard deviations in colour, with a scale
NAME/draws/0.png ...       draws
NAME/components/1.png ...  a strip for each component, from -2 to +2 standard deviations
NAME/arrays.npz            all arrays (`ImagePosterior.arrays`), float32 in [0, 1] units, not clipped
NAME/page.html             everything in one self-contained page
NAME/overview.png          everything in one picture
index.html                 links to the pages, where there are several
posterior.json             settings, and for each image its noise, scores and cost
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data.pictures import png
from mmdgs.data.single import NamedImage, is_folder_name
from mmdgs.errors import UsageError, shown
from mmdgs.files import folder_written_atomically, read_json, refuse_file, remove, to_json, write_atomically
from mmdgs.generation.conformal import Conformal, calibrated_factors
from mmdgs.generation.identity import digest_of, input_record
from mmdgs.generation.posterior_page import index_page
from mmdgs.generation.posterior_pictures import overview, pixels, std_picture, strip, walk_pictures
from mmdgs.generation.posteriors import (
    Estimators,
    ImagePosterior,
    PosteriorSettings,
    image_posterior,
    level_of,
    parts_of,
)
from mmdgs.generation.tiles import fitted_denoiser
from mmdgs.generation.writers import PARTS, Destination
from mmdgs.linalg.components import checked_region
from mmdgs.models import Model
from mmdgs.operators import ESTIMATE, Mask, estimated_noise
from mmdgs.randomness import Streams, child_seed, randn_like
from mmdgs.runtime import environment, progress_bar

RECORD, INDEX = "posterior.json", "index.html"


class PosteriorFolder(Destination):
    """A folder with a folder for each image."""

    def __init__(self, path: Path, names: Sequence[str] = (), model: str = "") -> None:
        refuse_file(path)
        super().__init__(path, path / RECORD, path / f".{PARTS}")
        self.names, self.model = _folder_names(names, path), model

    def present(self, count: int) -> set[int]:
        return {i for i, name in enumerate(self.names[:count]) if (self.path / name / "page.html").exists()}

    def notes(self) -> list[dict[str, Any]]:
        """What was noted of each image."""
        found = [read_json(file) for file in sorted(self.work.glob("[0-9]*.json"))]
        if any(not {"name", "scores", "cost", "remarks"} <= note.keys() for note in found):
            raise UsageError(f"a note of the run in {self.work} is damaged; start anew with --overwrite")
        return found

    def _write(self, first: int, images: Sequence[ImagePosterior], wanted: set[int]) -> None:
        for number, seen in enumerate(images, first):
            if number in wanted:
                with folder_written_atomically(self.path / seen.name) as folder:
                    write_seen(folder, seen)

    def _assemble(self, count: int) -> None:
        if count > 1:
            write_atomically(self.path / INDEX, index_page(self.names, self.model).encode())

    def _clear(self) -> None:
        for name in {*self._begun_names(), *self.names}:
            if (self.path / name / "page.html").exists():
                remove(self.path / name)
        for name in (RECORD, INDEX):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)

    def _begun_names(self) -> list[str]:
        """The images' names in the record that is there; refused where they are not such as are written."""
        if not self.record.exists():
            return []
        settings = read_json(self.record).get("settings")
        names = settings.get("names", []) if isinstance(settings, dict) else None
        return _folder_names(names if isinstance(names, list) else [[names]], self.record)

    def _in_use(self) -> bool:
        return self._holds_other()


def _folder_names(names: Sequence[Any], where: Path) -> list[str]:
    """Names of images, each that of one folder inside the output folder."""
    wrong = [name for name in names if not is_folder_name(name)]
    if wrong:
        raise UsageError(
            f"{where}: {shown(wrong[0])} is no name for the folder of an image; expected letters, digits, '-', '_', "
            "'.' and spaces"
        )
    return list(names)


def write_seen(folder: Path, seen: ImagePosterior) -> None:
    """The files of one image."""
    write_atomically(folder / "mean.png", png(pixels(seen.mean)))
    write_atomically(folder / "std.png", png(std_picture(seen.std)))
    if len(seen.draws):
        (folder / "draws").mkdir()
        for i, draw in enumerate(seen.draws):
            write_atomically(folder / "draws" / f"{i}.png", png(pixels(draw)))
    if len(seen.directions):
        (folder / "components").mkdir()
        for i, row in enumerate(walk_pictures(seen), 1):
            write_atomically(folder / "components" / f"{i}.png", png(strip(row)))
    numpy.savez_compressed(folder / "arrays.npz", **seen.arrays())
    write_atomically(folder / "overview.png", overview(seen))
    seen.save_page(folder / "page.html")


@dataclass(frozen=True)
class Posteriors:
    """What a run leaves: for each image its name, sigma, scores, cost and seconds; and the calibration, if any."""

    path: Path
    images: list[dict[str, Any]]
    calibration: dict[str, Any] | None

    @property
    def scores(self) -> dict[str, float]:
        """Means over the images."""
        names = self.images[0]["scores"] if self.images else {}
        return {name: sum(one["scores"][name] for one in self.images) / len(self.images) for name in names}


def posteriors_into(
    out: Path | str,
    model: Model,
    images: Sequence[NamedImage],
    *,
    sigma: float | str,
    asked: PosteriorSettings | None = None,
    simulate: bool = False,
    calibrate: Tensor | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: str | None = "posteriors",
) -> Posteriors:
    """`image_posterior` for many images, into a folder. `sigma` is a number, or "estimate": one for each image.

    With `simulate` the images are clean, get their noise here, and the results are scored. `calibrate` are clean images
    (n, C, H, W) of the model's size for conformal intervals (conformal.py), which need one sigma for all.
    """
    asked = asked or PosteriorSettings()
    work = PosteriorWork(model, images, asked, sigma, simulate)
    work.check(calibrate is not None)
    place = PosteriorFolder(Path(out), [one.name for one in images], model.source)
    wanted = {"count": len(images), "model": model.digest, "names": place.names, "images": work.digest, "sigma": sigma}
    wanted |= {"simulate": simulate, **asdict(asked), "region": asked.region and list(asked.region)}
    wanted["calibration"] = work.calibrations
    wanted |= {"calibrate": None if calibrate is None else digest_of(calibrate), **(settings or {})}
    place.check(resume=resume, overwrite=overwrite)
    wanted["inputs"] = input_record(model=model, estimators=work.estimators)
    with place.held():
        place.begin(wanted, resume=resume, overwrite=overwrite)
        if (done := place.finished()) is not None:
            return Posteriors(place.path, done["images"], done["calibration"])
        conformal = None if calibrate is None else _conformal(place, work, calibrate)
        pending = sorted(set(range(len(images))) - place.present(len(images)))
        with progress_bar(len(pending) * parts_of(asked), progress, unit="part") as bar:
            for i in pending:
                seen = work.seen(i, conformal, bar.update)
                place.write(i, [seen], {i}, _note(seen))
        notes = place.notes()
        record = {"settings": wanted, "images": notes, "environment": environment(model.device)}
        calibration = None if conformal is None else conformal.record()
        place.finish(len(images), {**record, "calibration": calibration})
    return Posteriors(place.path, notes, calibration)


def _note(seen: ImagePosterior) -> dict[str, Any]:
    cost = {"forwards": seen.cost.forwards, "products": seen.cost.products}
    return {
        "name": seen.name,
        "sigma": seen.sigma,
        "scores": seen.scores,
        "variances": seen.variances.tolist(),
        "residuals": seen.residuals.tolist(),
        "cost": cost,
        "seconds": seen.seconds,
        "remarks": list(seen.remarks),
    }


@dataclass(frozen=True)
class PosteriorWork:
    """The images of a run, and what is done with each."""

    model: Model
    images: Sequence[NamedImage]
    asked: PosteriorSettings
    sigma: float | str
    simulate: bool

    @property
    def digest(self) -> str:
        return digest_of(*(one.image for one in self.images))

    def check(self, calibrated: bool) -> None:
        """Refuse what cannot be done with some image, before anything is written."""
        if len(self.model.shape) != 3:
            raise UsageError(f"posteriors are shown of images, and this model's data have shape {self.model.shape}")
        self.model.require_denoiser()
        if not self.images:
            raise UsageError("there are no images")
        if self.sigma == ESTIMATE:
            if self.simulate or calibrated:
                what = "simulated noise" if self.simulate else "a calibration"
                raise UsageError(f"{what} needs sigma as a number, not {ESTIMATE}")
        elif isinstance(self.sigma, str):
            raise UsageError(f"sigma must be a number, or {ESTIMATE}, got {self.sigma!r}")
        for one in self.images:
            image, _ = one.in_channels(self.model.shape[0], clean=self.simulate)
            checked_region(self.asked.region, image.shape)
            fitted_denoiser(self.model, *image.shape[1:])
        _ = self.levels  # estimated, and each one checked

    @cached_property
    def levels(self) -> list[float]:
        """The noise of each image, within what the model knows."""
        return [self._level(one) for one in self.images]

    @cached_property
    def estimators(self) -> Estimators:
        """Those for images of the model's own size."""
        return Estimators.of(self.model, self.model.shape, self.asked.krylov_steps, self.asked.calibrated)

    @property
    def calibrations(self) -> dict[str, Any]:
        """What is recorded of the calibrations that are kept with the model."""
        return self.estimators.calibrations([level_of(self.model, sigma) for sigma in self.levels])

    def _level(self, one: NamedImage) -> float:
        sigma = self.sigma
        if isinstance(sigma, str):
            sigma = estimated_noise(one.image[None], Mask(torch.ones_like(one.image)))[0].item()
            try:
                level_of(self.model, sigma)
            except UsageError as error:
                raise UsageError(f"the noise of {one.name} was estimated: {error}; give --sigma as a number") from error
        level_of(self.model, sigma)
        return sigma

    def seen(self, i: int, conformal: Conformal | None, tick: Any) -> ImagePosterior:
        one = self.images[i]
        image, remarks = one.in_channels(self.model.shape[0], clean=self.simulate)
        sigma = self.levels[i]
        truth = image if self.simulate else None
        if self.simulate:
            noise = randn_like(image[None], Streams([child_seed(self.asked.seed, f"simulate {i}")], 1))[0]
            image = image + sigma * noise
        if self.sigma == ESTIMATE:
            remarks = (*remarks, f"The noise was estimated from the image: {sigma:.3g}.")
        if conformal is not None:
            remarks = (*remarks, _coverage(conformal))
        return image_posterior(
            self.model,
            image,
            sigma,
            self.asked,
            truth=truth,
            factors=None if conformal is None else conformal.factors,
            number=i,
            name=one.name,
            remarks=remarks,
            tick=tick,
        )


def _coverage(found: Conformal) -> str:
    return (
        f"90% intervals are calibrated on {found.images} held-out images: {found.pixel:.3g} standard deviations for "
        f"pixels, {found.component:.3g} for components. On the half that was not fitted to they cover "
        f"{100 * found.coverage_pixel:.1f}% of the pixels and {100 * found.coverage_component:.1f}% of the components."
    )


def _conformal(place: PosteriorFolder, work: PosteriorWork, images: Tensor) -> Conformal:
    """The calibration of this run, fitted once and kept in the hidden folder until all is done."""
    file = place.work / "conformal.json"
    if file.exists():
        try:
            return Conformal(**read_json(file))
        except TypeError as error:
            raise UsageError(f"{file} is damaged; start anew with --overwrite") from error
    asked = work.asked
    assert not isinstance(work.sigma, str)
    found = calibrated_factors(
        work.model,
        images,
        work.sigma,
        components=asked.components,
        tolerance=asked.tolerance,
        seed=child_seed(asked.seed, "conformal"),
        calibrated=asked.calibrated,
    )
    write_atomically(file, to_json(found.record()))
    return found
