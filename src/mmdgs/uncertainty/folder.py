"""Posteriors of many images, a folder each, written as they come: a run that was killed goes on.

NAME/mean.png, std.png     the mean; standard deviations in colour, with a scale
NAME/draws/0.png ...       draws
NAME/components/1.png ...  a strip for each component, from -2 to +2 standard deviations
NAME/NAME-mean.tif ...     of the file of an instrument: mean, std and draws as such files
NAME/arrays.npz            all arrays (`ImagePosterior.arrays`), float32 in [0, 1] units, not
                           clipped
NAME/page.html             everything in one self-contained page
NAME/overview.png          everything in one picture
index.html                 links to the pages, where there are several
posterior.json             settings, and for each image its noise, scores and cost
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data.pictures import png
from mmdgs.data.single import NamedImage, is_folder_name, write_results
from mmdgs.errors import UsageError, shown
from mmdgs.files import folder_written_atomically, read_json, to_json, write_atomically
from mmdgs.identity import digest_of, input_record
from mmdgs.reading import reading
from mmdgs.runtime import environment, progress_bar
from mmdgs.sampling.writers import FolderDestination
from mmdgs.uncertainty.conformal import Conformal, calibrated_factors
from mmdgs.uncertainty.estimators import Estimators
from mmdgs.uncertainty.image import ImagePosterior, PosteriorWork
from mmdgs.uncertainty.page import index_page
from mmdgs.uncertainty.pictures import overview, pixels, std_picture, strip, walk_pictures
from mmdgs.uncertainty.regions import SIDE

RECORD, INDEX, PAGE = "posterior.json", "index.html", "page.html"


class PosteriorFolder(FolderDestination):
    """A folder with a folder for each image."""

    def __init__(self, path: Path, images: Sequence[NamedImage] = (), model: str = "") -> None:
        super().__init__(path, RECORD)
        self.images, self.model = images, model
        self.names = _folder_names([image.name for image in images], path)

    def present(self, count: int) -> set[int]:
        names = enumerate(self.names[:count])
        return {i for i, name in names if (self.path / name / PAGE).exists()}

    def notes(self) -> list[dict[str, Any]]:
        """What was noted of each image."""
        notes = [read_json(file) for file in sorted(self.work.glob("[0-9]*.json"))]
        if any(not {"name", "scores", "cost", "remarks"} <= note.keys() for note in notes):
            raise UsageError(f"a note in {self.work} is damaged; start anew with --overwrite")
        return notes

    def _write(self, first: int, images: Sequence[ImagePosterior], wanted: set[int]) -> None:
        for number, posterior in enumerate(images, first):
            if number in wanted:
                with folder_written_atomically(self.path / posterior.name) as folder:
                    write_files(folder, posterior)
                    means = posterior.mean[None], posterior.std[None], posterior.draws
                    write_results(folder, [self.images[number]], {0: torch.cat(means)}.__getitem__)

    def _assemble(self, count: int) -> None:
        if count > 1:
            write_atomically(self.path / INDEX, index_page(self.names, self.model).encode())

    def _results(self) -> list[Path]:
        folders = [self.path / name for name in {*self._begun_names(), *self.names}]
        return [self.path / INDEX, *(folder for folder in folders if (folder / PAGE).exists())]

    def _begun_names(self) -> list[str]:
        """The images' names in the record that is there; refused where none would be written so."""
        if not self.record.exists():
            return []
        with reading(self.record, "a record of posteriors"):
            return _folder_names(read_json(self.record)["settings"]["names"], self.record)


def _folder_names(names: Sequence[Any], where: Path) -> list[str]:
    """Names of images, each that of one folder inside the output folder."""
    for name in names:
        if not is_folder_name(name):
            raise UsageError(
                f"{where}: {shown(name)} is no name for the folder of an image; expected letters, "
                "digits, '-', '_', '.' and spaces"
            )
    return list(names)


def write_files(folder: Path, posterior: ImagePosterior) -> None:
    """The files of one image."""
    pictures = {"mean": pixels(posterior.mean), "std": std_picture(posterior.std)}
    pictures |= {f"draws/{i}": pixels(draw) for i, draw in enumerate(posterior.draws)}
    if len(posterior.directions):
        rows = enumerate(walk_pictures(posterior), 1)
        pictures |= {f"components/{i}": strip(row) for i, row in rows}
    for name, picture in pictures.items():
        file = folder / f"{name}.png"
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, png(picture))
    numpy.savez_compressed(folder / "arrays.npz", **posterior.arrays())
    write_atomically(folder / "overview.png", overview(posterior))
    posterior.save_page(folder / PAGE)


@dataclass(frozen=True)
class PosteriorsSummary:
    """What a run leaves: each image's name, sigma, scores, cost, seconds; the calibration."""

    path: Path
    images: list[dict[str, Any]]
    calibration: dict[str, Any] | None

    @property
    def scores(self) -> dict[str, float]:
        """Means over the images."""
        each = [image["scores"] for image in self.images]
        return {name: sum(scores[name] for scores in each) / len(each) for name in each[0]}


def posteriors_into(
    out: Path | str, work: PosteriorWork, *, resume: bool = False, overwrite: bool = False
) -> PosteriorsSummary:
    """`image_posterior` for many images, into a folder; simulated ones are scored."""
    model, images, settings, held_out = work.model, work.images, work.settings, work.held_out
    place = PosteriorFolder(Path(out), images, model.source)
    estimators = Estimators.of(model, model.sized(SIDE, SIDE).shape, settings)
    record = {
        "count": len(images),
        "model": model.digest,
        "names": place.names,
        "images": digest_of(*(image.image for image in images)),
        **settings.to_json(),
        "calibration": estimators.calibrations(work.levels),
        "calibrate": None if held_out is None else digest_of(held_out),
        "inputs": input_record(model=model, estimators=estimators, noises=work.noises),
        "bounds": work.bounds,
    }
    with place.held():
        place.begin(record, resume=resume, overwrite=overwrite)
        if (done := place.finished()) is not None:
            return PosteriorsSummary(place.path, done["images"], done["calibration"])
        conformal = None if held_out is None else _conformal(place, work, held_out)
        pending = sorted(set(range(len(images))) - place.present(len(images)))
        with progress_bar(len(pending) * settings.parts, "posteriors", "part", delay=0) as bar:
            for i in pending:

                def doing(words: str, name: str = place.names[i]) -> None:
                    bar.set_postfix({name: words})

                posterior = work.posterior(i, conformal, bar.update, doing)
                place.write(i, [posterior], {i}, _note(posterior))
        summary: dict[str, Any] = {
            "images": place.notes(),
            "calibration": conformal and asdict(conformal),
        }
        here = environment(model.device)
        place.finish(len(images), {"settings": record, **summary, "environment": here})
    return PosteriorsSummary(place.path, **summary)


def _note(posterior: ImagePosterior) -> dict[str, Any]:
    return {
        "name": posterior.name,
        "sigma": posterior.sigma,
        "region": posterior.region and list(posterior.region),
        "tiles": posterior.tiles,
        "scores": posterior.scores,
        "variances": posterior.variances.tolist(),
        "residuals": posterior.residuals.tolist(),
        "cost": asdict(posterior.cost),
        "seconds": posterior.seconds,
        "remarks": list(posterior.remarks),
    }


def _conformal(place: PosteriorFolder, work: PosteriorWork, images: Tensor) -> Conformal:
    """The calibration of this run, fitted once and kept in the hidden folder until all is done."""
    file = place.work / "conformal.json"
    if file.exists():
        try:
            return Conformal(**read_json(file))
        except TypeError as error:
            raise UsageError(f"{file} is damaged; start anew with --overwrite") from error
    conformal = calibrated_factors(work.model, images, work.settings)
    write_atomically(file, to_json(asdict(conformal)))
    return conformal
