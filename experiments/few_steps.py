"""Few-step sampling of a pretrained diffusion model: what the covariance is worth, in FID.

As in table 1 of Bao et al. (2022). One network, one number of images, the same noise for every
sampler; only the sampler differs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from matplotlib.figure import Figure as Canvas

from experiments import sampler_cells
from experiments.drawing import image_rows
from experiments.experiment import Context
from experiments.grid import Grid, Results, axis
from experiments.sampler_cells import COST, EVALUATIONS, Judge, References, Sampling
from mmdgs.covariances import Krylov, LatticeDiagonal, LowRank, Ocm, RademacherDiagonal
from mmdgs.models import COVARIANCE, Model, load, load_head
from mmdgs.models.estimators import head_beside
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.sampling import SamplerSettings
from mmdgs.sampling.named import edm_levels, is_exploding

MODEL = "google/ddpm-cifar10-32"
DATA = "cifar10"

LEARNED, MODULATED = "diagonal, learned", "modulated"
"""Rows that need a head: that of --head, and one that is kept in the model's folder."""
ROWS = {
    "small variance": SamplerSettings("ancestral", covariance="small"),
    "large variance": SamplerSettings("ancestral", covariance="large"),
    "isotropic": SamplerSettings("ancestral", covariance="isotropic"),
    "spectral": SamplerSettings("ancestral", covariance="spectral"),
    "diagonal, Rademacher": SamplerSettings("ancestral", covariance=RademacherDiagonal(3)),
    "diagonal, lattice": SamplerSettings("ancestral", covariance=LatticeDiagonal(3)),
    LEARNED: SamplerSettings("ancestral", covariance="ocm"),
    MODULATED: SamplerSettings("ancestral", covariance="modulated"),
    "low rank": SamplerSettings("ancestral", covariance=LowRank(1)),
    "low rank, one-sided": SamplerSettings("ancestral", covariance=LowRank(1, symmetric=True)),
    "low rank, one-sided, below 2": SamplerSettings(
        "ancestral", covariance=LowRank(1, 2.0, symmetric=True)
    ),
    "Krylov, one-sided": SamplerSettings("ancestral", covariance=Krylov(2, symmetric=True)),
    "Krylov": SamplerSettings("ancestral", covariance=Krylov(5)),
    "DDIM": SamplerSettings("ddim"),
    "Heun": SamplerSettings("heun"),
    "multistep": SamplerSettings("multistep"),
    "multistep, third order": SamplerSettings("multistep", order=3),
    "multistep, eta 1": SamplerSettings("multistep", eta=1.0),
    "multistep, third order, eta 1": SamplerSettings("multistep", order=3, eta=1.0),
}
AT_EDM = (
    *("spectral", MODULATED, "low rank", "low rank, one-sided", "low rank, one-sided, below 2"),
    *("Krylov, one-sided", "DDIM"),
)
"""Rows that models with noise that is only added (alpha = 1) have twice: along their own levels,
and along EDM's, which Heun's method goes down in any case."""
EDM = ", EDM levels"
EXPECTED = (
    *(("isotropic", "small variance"), ("isotropic", "large variance"), ("spectral", "isotropic")),
    *(("spectral", "diagonal, lattice"), ("diagonal, Rademacher", "isotropic")),
    *(("diagonal, lattice", "isotropic"), ("diagonal, lattice", "diagonal, Rademacher")),
    *((MODULATED, "spectral"), (LEARNED, "isotropic"), (LEARNED, "diagonal, lattice")),
)
"""The first of each pair is expected to have the lower FID."""


@dataclass(frozen=True)
class FewStepSettings(sampler_cells.SamplingSettings):
    """How many steps; costly rows are run at the fewest only."""

    steps: tuple[int, ...] = axis((10, 18, 25, 36, 50))
    costly: tuple[str, ...] = axis(("Krylov",))
    metrics: tuple[str, ...] = ("fid",)
    shown: int = 5


FULL = FewStepSettings()
QUICK = FewStepSettings(
    steps=(4, 8), images=6, fit_images=8, precision="float32", metrics=("diversity",)
)


def run(context: Context) -> Outcome:
    """Sample by every row and number of steps, and measure."""
    settings = context.sized(FULL, QUICK)
    counts = [int(name) for name in context.columns(map(str, settings.steps))]
    model = load(context.model or MODEL, device=context.device)
    rows = dict(ROWS)
    if head_beside(model, COVARIANCE) is None:
        del rows[MODULATED]
    if context.head is None:
        del rows[LEARNED]
    else:
        load_head(context.head, model)  # refused before the work
        rows[LEARNED] = replace(ROWS[LEARNED], covariance=Ocm(load(context.head).digest))
    if is_exploding(model):
        rows |= {row + EDM: rows[row] for row in AT_EDM if row in rows}
    cells = {
        (row, steps): at(row, method, steps, model)
        for row, method in rows.items()
        for steps in (settings.steps[:1] if row in settings.costly else settings.steps)
        if steps in counts
    }
    judge = Judge.of(context, settings.metrics, References(DATA, context.data_dir))
    sampling = Sampling(context, model, judge, settings)
    results = Grid("few-steps", cells, sampling, sampling.depends, "steps").run(context)
    records = {
        "settings": asdict(settings) | {"model": model.source},
        "samplers": results.records(),
    }
    section = _section(results, settings, model.source)
    return Outcome(records, [section], left=results.open())


def at(row: str, method: SamplerSettings, steps: int, model: Model) -> SamplerSettings:
    """A row's sampler with so many evaluations: Heun has two a step, and one in the last."""
    if row.endswith(EDM):
        return replace(method, levels=edm_levels(model, steps))
    return replace(method, steps=(steps + 1) // 2 if row == "Heun" else steps)


def _section(results: Results, settings: FewStepSettings, source: str) -> Section:
    measure = settings.measure
    text = [
        "Ancestral sampling in few steps with DDPM's two fixed variances, with fitted ones "
        "(isotropic, or one for each frequency), and with the covariance of the network's own "
        "Jacobian: its diagonal by 3 probes or by a head, or whole by Krylov products."
    ]
    note = (
        f"{settings.images:,} images each of {source}, {settings.precision}, the same noise for "
        f"every row. {COST} Heun has half the steps, so as many evaluations."
    )
    table = results.table("Few-step sampling", [measure, EVALUATIONS], head="sampler", note=note)
    caption = f"{measure.title} against steps, and against evaluations of the network."
    strips, words = _draw_images(results), "The first images of each, from the same noise."
    figures = [
        results.curves("few_steps", caption, measure, x=(None, EVALUATIONS)),
        Figure("few_steps_images", words, strips),
    ]
    pairs = [pair for pair in EXPECTED if set(pair) <= set(results.rows)]
    claims = [results.below(better, worse, measure) for better, worse in pairs]
    return Section("What the covariance is worth", text, [table], figures, claims)


def _draw_images(results: Results) -> Canvas:
    """A strip for each row: the first images at each number of steps, white where none are."""
    shown = {key: part.tensors["shown"] for key, part in results.parts.items()}
    blank = torch.full_like(next(iter(shown.values())), 255)
    every, middle = results.columns, len(blank) // 2
    rows = {row: torch.cat([shown.get((row, n), blank) for n in every]) for row in results.rows}
    titles = [f"{n} steps" if i == middle else "" for n in every for i in range(len(blank))]
    return image_rows(rows, titles=titles)
