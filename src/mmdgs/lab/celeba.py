"""Faces at 64x64 by both of the paper's algorithms: its figure of CelebA samples, with numbers beside the pictures.

And by Gibbs along few levels, with the covariance of frequencies: what it comes to where products are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.generation import Method
from mmdgs.generation.methods import exploding_levels
from mmdgs.lab.drawing import colour_picture, new_figure
from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.lab.sampler_cells import Cells, Judge, References
from mmdgs.lab.small_models import QUICK_TRAINING, check_model, model_of
from mmdgs.lab.table2 import path
from mmdgs.models import Model
from mmdgs.samplers.langevin_rates import suggested_rate
from mmdgs.schedules import Levels
from mmdgs.training import Recipe

DATA, MODEL = "celeba", "celeba"
LANGEVIN, GIBBS, SPECTRAL = "Langevin (Algorithm 1)", "Gibbs (Algorithm 2)", "Gibbs, spectral, few levels"
TRAIN = (
    "mmdgs train --data faces.zip --size 64 --model unet-small --param edm --levels geometric:500:90:0.01 "
    "--out runs/faces"
)


@dataclass(frozen=True)
class CelebaSettings:
    """Sizes; the paper has NCSNv2's 500 levels, which a model of that kind has as its own."""

    images: int = 1_000
    levels: int | None = None  # fewer than the model's own, geometric between the same ends
    langevin_steps: int = 5
    sweeps: int = 3
    probes: int = 3
    few_levels: int = 24  # of the spectral covariance, and its sweeps
    few_sweeps: int = 2
    fit_images: int = 200  # which it is estimated from
    shown: int = 64
    batch_size: int = 250
    precision: str = "bf16"
    metrics: tuple[str, ...] = ("fid", "diversity")
    reference_limit: int | None = None


FULL = CelebaSettings()
QUICK = CelebaSettings(
    images=9,
    levels=12,
    few_levels=6,
    fit_images=8,
    shown=9,
    batch_size=16,
    precision="float32",
    metrics=("diversity",),
    reference_limit=200,
)
QUICK_RECIPE = Recipe(
    size=16, limit=1_000, model="unet-tiny", param="edm", levels="geometric:40:20:0.02",
    training=QUICK_TRAINING,
)  # fmt: skip


def run(context: Context) -> Outcome:
    """Sample faces by both algorithms, and measure."""
    settings = context.sized(FULL, QUICK)
    model = face_model(context)
    name, folder = faces(context)
    references = References(name, folder, model.shape[1], settings.reference_limit)
    references.load()  # absent data are told of before the work
    judge = Judge.of(context, settings.metrics, references)
    cells = Cells(context, model, name, settings.fit_images, settings.batch_size, settings.precision, settings.shown)
    levels = exploding_levels(model) if settings.levels is None else path(model, settings.levels)
    wanted = methods(levels, path(model, settings.few_levels), settings)
    found = {
        row: cells.sampled(row, method, settings.images, [context.seed], judge, {"judge": judge.key()})
        for row, method in wanted.items()
    }
    records = {row: part.values for row, part in found.items()}
    pictures = {row: part.tensors["shown"] for row, part in found.items()}
    named = asdict(settings) | {
        "model": model.source, "data": Path(name).name, "count": len(levels), "reference": len(references.load()),
        "first": levels[0].sigma, "last": levels[-1].sigma, "rate": wanted[LANGEVIN].rate,
    }  # fmt: skip
    return Outcome({"settings": named, "samplers": records}, [_section(records, pictures, named, context.quick)])


def faces(context: Context) -> tuple[str, str | None]:
    """The set of faces and the folder it is in: CelebA itself, or the zip of faces that --data-dir names."""
    given = None if context.data_dir is None else Path(context.data_dir).expanduser()
    if given is not None and given.suffix.lower() == ".zip":
        if not given.is_file():
            raise UsageError(f"there is no zip of faces {given}")
        return str(given), None
    return DATA, context.data_dir


def face_model(context: Context) -> Model:
    """The model that --model names, or the one that ships; quick runs train a tiny one where none is named."""
    name, folder = faces(context)
    model = model_of(context, MODEL, replace(QUICK_RECIPE, data=name, data_dir=folder), TRAIN)
    return check_model(model)


def methods(levels: Levels, few: Levels, settings: CelebaSettings) -> dict[str, Method]:
    """Both algorithms along all levels, and Gibbs with the spectral covariance along few; the cheapest first."""
    rate = suggested_rate(levels, settings.langevin_steps)
    return {
        SPECTRAL: Method("gibbs-down", few, covariance="spectral", sweeps=settings.few_sweeps),
        LANGEVIN: Method("langevin", levels, sweeps=settings.langevin_steps, rate=rate),
        GIBBS: Method("gibbs", levels, covariance="rademacher", probes=settings.probes, sweeps=settings.sweeps),
    }


def _section(
    records: Mapping[str, dict[str, Any]], pictures: Mapping[str, Tensor], settings: Mapping[str, Any], quick: bool
) -> Section:
    measure = "fid" if "fid" in settings["metrics"] else "diversity"
    header = ["sampler", "evaluations", *(["FID"] if measure == "fid" else []), "diversity", "duplicates", "seconds"]
    rows = []
    for row, one in records.items():
        fid = [f"{one['fid']:.2f}"] if measure == "fid" else []
        spread = [f"{one['diversity']:.3f}", f"{100 * one['duplicates']:.1f}%"]
        rows.append([row, f"{one['evaluations']:,.0f}", *fid, *spread, f"{one['seconds']:,.0f}"])
    note = (
        f"{settings['images']:,} images each of {settings['model']} along {settings['count']} levels from "
        f"{settings['first']:g} to {settings['last']:g} ({settings['few_levels']} of the spectral row, with "
        f"{settings['few_sweeps']} sweeps and the spectrum of {settings['fit_images']} images), "
        f"{settings['precision']}, against {settings['reference']:,} "
        f"images of {settings['data']}. Langevin's rate is the one that NCSNv2's analysis suggests for these levels, "
        f"{settings['rate']:.4f}. FIDs of so many images and of these faces compare with each other only."
    )
    quick_text = "This is the quick version: so few images and so small a network show that everything runs."
    text = [
        "The paper shows faces at 64x64 by multi-level Gibbs, and no number. Expected: images that one takes for faces "
        "at a glance, by Gibbs as by Langevin dynamics. That is for the eye; the numbers say how near they come to "
        "the data.",
        quick_text if quick else verdict(records),
    ]
    figures = [
        Figure(f"celeba_{name}", f"{row}: the first {len(pictures[row])} samples.", _grid(pictures[row]))
        for row, name in ((LANGEVIN, "langevin"), (GIBBS, "gibbs"), (SPECTRAL, "gibbs_spectral"))
    ]
    return Section("Faces", text, [Table("Faces by both algorithms", header, rows, note)], figures)


def verdict(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The two algorithms side by side, in words."""
    fids = {row: one["fid"] for row, one in records.items()}
    best = min(fids, key=fids.__getitem__)
    cost = records[GIBBS]["evaluations"] / records[LANGEVIN]["evaluations"]
    than = "below" if fids[GIBBS] < fids[LANGEVIN] else "not below"
    return (
        f"Gibbs has FID {fids[GIBBS]:.2f}, {than} Langevin's {fids[LANGEVIN]:.2f}, at {cost:.1f} times its cost; "
        f"along few levels, with the spectral covariance, it has {fids[SPECTRAL]:.2f} in "
        f"{records[SPECTRAL]['evaluations']:,.0f} evaluations. The lowest is {best}. One seed, so differences of "
        "some percent say nothing."
    )


def _grid(images: Tensor) -> Canvas:
    side = math.ceil(math.sqrt(len(images)))
    canvas, axes = new_figure(1, 1, 6.0)
    colour_picture(axes[0][0], images, side)
    return canvas


EXPERIMENT = Experiment(
    "celeba",
    "Faces at 64x64 by Langevin dynamics and by Gibbs sampling",
    "Samples of a model of faces (--model) by both of the paper's algorithms, with FID and diversity against CelebA or "
    "a zip of faces (--data-dir FILE.zip).",
    run,
)
