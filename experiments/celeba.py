"""Faces at 64x64: both of the paper's algorithms, as in its figure, with FID and diversity, against
CelebA or a zip of faces (--data-dir FILE.zip).

The third row is Gibbs along few levels with the spectral covariance, which needs no products.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments import sampler_cells
from experiments.drawing import colour_picture
from experiments.experiment import Context
from experiments.grid import Grid, Results
from experiments.sampler_cells import FID, Judge, References, Sampling, path
from experiments.small_models import model_of
from mmdgs.covariances import RademacherDiagonal
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.moments import FLOOR
from mmdgs.report.drawing import new_figure
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.samplers.langevin import suggested_rate
from mmdgs.sampling import SamplerSettings
from mmdgs.sampling.named import exploding_levels

DATA, MODEL = "celeba", "celeba"
LANGEVIN, GIBBS, SPECTRAL = "Langevin (Algorithm 1)", "Gibbs (Algorithm 2)", "Gibbs, spectral"
FIGURES = {SPECTRAL: "celeba_gibbs_spectral", LANGEVIN: "celeba_langevin", GIBBS: "celeba_gibbs"}


@dataclass(frozen=True)
class CelebaSettings(sampler_cells.SamplingSettings):
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
    images=9, levels=12, few_levels=6, fit_images=8, shown=9, precision="float32",
    metrics=("diversity",), reference_limit=200,
)  # fmt: skip


def run(context: Context) -> Outcome:
    """Sample faces by both algorithms, and measure."""
    settings = context.sized(FULL, QUICK)
    name, folder = faces(context)
    model = model_of(context, MODEL, data=name, data_dir=folder, limit=1_000)
    references = References(name, folder, model.shape[1], settings.reference_limit)
    references.load()  # missing data are reported before the work
    sampling = Sampling(context, model, Judge.of(context, settings.metrics, references), settings)
    cells = celeba_cells(model, settings)
    results = Grid("celeba", cells, sampling, sampling.depends, "levels").run(context)
    known = {"data": Path(name).name, "reference": len(references.load())}
    named = asdict(settings) | {"model": model.source} | known
    section = _section(results, settings, named)
    return Outcome(
        {"settings": named, "samplers": results.records()}, [section], left=results.open()
    )


def faces(context: Context) -> tuple[str, str | None]:
    """The set of faces and its folder: CelebA, or the zip of faces that --data-dir names."""
    file = None if context.data_dir is None else Path(context.data_dir).expanduser()
    if file is not None and file.suffix.lower() == ".zip":
        if not file.is_file():
            raise UsageError(f"there is no zip of faces {file}")
        return str(file), None
    return DATA, context.data_dir


def celeba_cells(model: Model, settings: CelebaSettings) -> dict[tuple[str, int], SamplerSettings]:
    """Gibbs with the spectral covariance along few levels, and both algorithms along all."""
    levels = exploding_levels(model) if settings.levels is None else path(model, settings.levels)
    few = path(model, settings.few_levels)
    rate = suggested_rate(levels, settings.langevin_steps)
    signs = RademacherDiagonal(settings.probes, floor=FLOOR)
    down = SamplerSettings("gibbs-down", few, covariance="spectral", sweeps=settings.few_sweeps)
    dynamics = SamplerSettings("langevin", levels, sweeps=settings.langevin_steps, rate=rate)
    gibbs = SamplerSettings("gibbs", levels, covariance=signs, sweeps=settings.sweeps)
    every = len(levels)
    return {(SPECTRAL, len(few)): down, (LANGEVIN, every): dynamics, (GIBBS, every): gibbs}


def _section(results: Results, settings: CelebaSettings, named: dict[str, object]) -> Section:
    text = ["The paper shows faces at 64x64 by multi-level Gibbs sampling and gives no number."]
    note = (
        f"{settings.images:,} images each of {named['model']}, {settings.precision}, against "
        f"{named['reference']:,} images of {named['data']}. Langevin's rate is what NCSNv2's "
        f"analysis suggests for these levels. The spectral row has {settings.few_sweeps} sweeps "
        f"and the spectrum of {settings.fit_images} images. {sampler_cells.COST}"
    )
    costs = (sampler_cells.EVALUATIONS, *([FID] if settings.measure is FID else []))
    looks = (sampler_cells.DIVERSITY, sampler_cells.DUPLICATES, sampler_cells.MILLISECONDS)
    title = "Faces by both algorithms"
    table = results.listing(title, [*costs, *looks], note=note, head="sampler")
    figures = []
    for (row, _), part in results.parts.items():
        canvas, axes = new_figure(1, 1, 6.0)
        images = part.tensors["shown"]
        colour_picture(axes[0][0], images, math.ceil(math.sqrt(len(images))))
        words = f"{row}: the first {len(images)} samples."
        figures.append(Figure(FIGURES[row], words, canvas))
    claims = [results.below(GIBBS, LANGEVIN, settings.measure)]
    return Section("Faces", text, [table], figures, claims)
