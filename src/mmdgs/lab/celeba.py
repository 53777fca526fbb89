"""Faces at 64x64 by both of the paper's algorithms, as in its figure of CelebA samples, with FID and diversity.

The third row is Gibbs along few levels with the spectral covariance, which needs no products with the Jacobian.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mmdgs.errors import UsageError
from mmdgs.generation import Method
from mmdgs.generation.methods import exploding_levels
from mmdgs.lab.drawing import colour_picture, new_figure
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Grid, Results
from mmdgs.lab.report import Figure, Section
from mmdgs.lab.sampler_cells import (
    COST,
    DIVERSITY,
    DUPLICATES,
    EVALUATIONS,
    FID,
    MILLISECONDS,
    QUICK_NOTE,
    Judge,
    References,
    Sampling,
    SamplingSettings,
    path,
)
from mmdgs.lab.small_models import QUICK_TRAINING, check_model, model_of
from mmdgs.models import Model
from mmdgs.moments import FLOOR
from mmdgs.samplers.langevin_rates import suggested_rate
from mmdgs.training import Recipe

DATA, MODEL = "celeba", "celeba"
LANGEVIN, GIBBS, SPECTRAL = "Langevin (Algorithm 1)", "Gibbs (Algorithm 2)", "Gibbs, spectral"
TRAIN = (
    "mmdgs train --data faces.zip --size 64 --model unet-small --param edm --levels geometric:500:90:0.01 "
    "--out runs/faces"
)


@dataclass(frozen=True)
class CelebaSettings(SamplingSettings):
    """Sizes; the paper has NCSNv2's 500 levels, which a model of that kind has as its own."""

    images: int = 1_000
    levels: int | None = None  # fewer than the model's own, geometric between the same ends
    langevin_steps: int = 5
    sweeps: int = 3
    probes: int = 3
    few_levels: int = 24  # of the spectral covariance, and its sweeps
    few_sweeps: int = 2
    fit_images: int = 200
    shown: int = 64


FULL = CelebaSettings()
QUICK = CelebaSettings(
    images=9, levels=12, few_levels=6, fit_images=8, shown=9, precision="float32", metrics=("diversity",),
    reference_limit=200,
)  # fmt: skip
QUICK_RECIPE = Recipe(
    size=16, limit=1_000, model="unet-tiny", param="edm", levels="geometric:40:20:0.02", training=QUICK_TRAINING
)


def run(context: Context) -> Outcome:
    """Sample faces by both algorithms, and measure."""
    settings = context.sized(FULL, QUICK)
    name, folder = faces(context)
    quick = replace(QUICK_RECIPE, data=name, data_dir=folder)
    model = check_model(model_of(context, MODEL, quick, TRAIN))
    references = References(name, folder, model.shape[1], settings.reference_limit)
    references.load()  # missing data are reported before the work
    sampling = Sampling(context, model, Judge.of(context, settings.metrics, references), settings)
    found = Grid("celeba", celeba_cells(model, settings), sampling, sampling.depends, "levels").run(context)
    named = asdict(settings) | {"model": model.source, "data": Path(name).name, "reference": len(references.load())}
    section = _section(found, settings, named, context.quick)
    return Outcome({"settings": named, "samplers": found.records()}, [section])


def faces(context: Context) -> tuple[str, str | None]:
    """The set of faces and the folder it is in: CelebA itself, or the zip of faces that --data-dir names."""
    given = None if context.data_dir is None else Path(context.data_dir).expanduser()
    if given is not None and given.suffix.lower() == ".zip":
        if not given.is_file():
            raise UsageError(f"there is no zip of faces {given}")
        return str(given), None
    return DATA, context.data_dir


def celeba_cells(model: Model, settings: CelebaSettings) -> dict[tuple[str, int], Method]:
    """Both algorithms along all levels, and Gibbs with the spectral covariance along few; the cheapest first."""
    levels = exploding_levels(model) if settings.levels is None else path(model, settings.levels)
    few = path(model, settings.few_levels)
    rate = suggested_rate(levels, settings.langevin_steps)
    return {
        (SPECTRAL, len(few)): Method("gibbs-down", few, covariance="spectral", sweeps=settings.few_sweeps),
        (LANGEVIN, len(levels)): Method("langevin", levels, sweeps=settings.langevin_steps, rate=rate),
        (GIBBS, len(levels)): Method(
            "gibbs", levels, covariance="rademacher", probes=settings.probes, floor=FLOOR, sweeps=settings.sweeps
        ),
    }


def _section(found: Results, settings: CelebaSettings, named: dict[str, object], quick: bool) -> Section:
    text = [
        "The paper shows faces at 64x64 by multi-level Gibbs sampling and gives no number.",
        *([QUICK_NOTE] if quick else []),
        *found.unfinished(),
    ]
    note = (
        f"{settings.images:,} images each of {named['model']}, {settings.precision}, against {named['reference']:,} "
        f"images of {named['data']}. Langevin's rate is what NCSNv2's analysis suggests for these levels. The spectral "
        f"row has {settings.few_sweeps} sweeps and the spectrum of {settings.fit_images} images. {COST}"
    )
    measures = [EVALUATIONS, *([FID] if settings.measure is FID else []), DIVERSITY, DUPLICATES, MILLISECONDS]
    table = found.listing("Faces by both algorithms", measures, note=note, head="sampler")
    figures = []
    for (row, _), part in found.parts.items():
        canvas, axes = new_figure(1, 1, 6.0)
        images = part.tensors["shown"]
        colour_picture(axes[0][0], images, math.ceil(math.sqrt(len(images))))
        name = {LANGEVIN: "celeba_langevin", GIBBS: "celeba_gibbs", SPECTRAL: "celeba_gibbs_spectral"}[row]
        figures.append(Figure(name, f"{row}: the first {len(images)} samples.", canvas))
    claims = [] if quick else [found.below(GIBBS, LANGEVIN, FID)]
    return Section("Faces", text, [table], figures, claims)
