"""Few-step sampling of a pretrained diffusion model: what the covariance is worth, in FID (Bao et al., 2022, table 1).

One network, one number of images, the same noise for every sampler; only the sampler differs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from matplotlib.figure import Figure as Canvas

from mmdgs.generation import Method
from mmdgs.generation.methods import edm_levels, is_exploding
from mmdgs.lab.drawing import image_rows
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Grid, Results
from mmdgs.lab.report import Figure, Section
from mmdgs.lab.sampler_cells import COST, EVALUATIONS, QUICK_NOTE, Judge, References, Sampling, SamplingSettings
from mmdgs.lab.workspace import axis
from mmdgs.models import COVARIANCE, Model, from_pretrained, load_head
from mmdgs.models.covariances import head_beside

MODEL = "google/ddpm-cifar10-32"
DATA = "cifar10"

LEARNED = "diagonal, learned"
"""The row that needs a head, and is left out where none is given."""
MODULATED = "modulated"
"""That of a head which is kept in the model's folder."""
ROWS = {
    "small variance": Method("ancestral", covariance="small"),
    "large variance": Method("ancestral", covariance="large"),
    "isotropic": Method("ancestral", covariance="isotropic"),
    "spectral": Method("ancestral", covariance="spectral"),
    "diagonal, Rademacher": Method("ancestral", covariance="rademacher", probes=3),
    "diagonal, lattice": Method("ancestral", covariance="lattice", probes=3),
    LEARNED: Method("ancestral", covariance="ocm"),
    MODULATED: Method("ancestral", covariance="modulated"),
    "low rank": Method("ancestral", covariance="low-rank", products=1),
    "low rank, one-sided": Method("ancestral", covariance="low-rank", products=1, symmetric=True),
    "low rank, one-sided, below 2": Method(
        "ancestral", covariance="low-rank", products=1, products_below=2.0, symmetric=True
    ),
    "Krylov, one-sided": Method("ancestral", covariance="krylov", krylov_steps=2, symmetric=True),
    "Krylov": Method("ancestral", covariance="krylov", krylov_steps=5),
    "DDIM": Method("ddim"),
    "Heun": Method("heun"),
    "multistep": Method("multistep"),
    "multistep, third order": Method("multistep", order=3),
    "multistep, eta 1": Method("multistep", eta=1.0),
    "multistep, third order, eta 1": Method("multistep", order=3, eta=1.0),
}
AT_EDM = (
    "spectral", MODULATED, "low rank", "low rank, one-sided", "low rank, one-sided, below 2", "Krylov, one-sided",
    "DDIM",
)  # fmt: skip
"""Rows that models with noise that is only added (alpha = 1) have twice: along their own levels, and along EDM's, which
Heun's method goes down in any case."""
EDM = ", EDM levels"
EXPECTED = (
    ("isotropic", "small variance"), ("isotropic", "large variance"), ("spectral", "isotropic"),
    ("spectral", "diagonal, lattice"), ("diagonal, Rademacher", "isotropic"), ("diagonal, lattice", "isotropic"),
    ("diagonal, lattice", "diagonal, Rademacher"), (MODULATED, "spectral"),
    (LEARNED, "isotropic"), (LEARNED, "diagonal, lattice"),
)  # fmt: skip
"""The first of each pair is expected to have the lower FID."""


@dataclass(frozen=True)
class FewStepSettings(SamplingSettings):
    """How many steps; costly rows are run at the fewest only."""

    steps: tuple[int, ...] = axis((10, 18, 25, 36, 50))
    costly: tuple[str, ...] = axis(("Krylov",))
    metrics: tuple[str, ...] = ("fid",)
    shown: int = 5


FULL = FewStepSettings()
QUICK = FewStepSettings(steps=(4, 8), images=6, fit_images=8, precision="float32", metrics=("diversity",))


def run(context: Context) -> Outcome:
    """Sample by every row and number of steps, and measure."""
    settings = context.sized(FULL, QUICK)
    chosen = [int(name) for name in context.columns(map(str, settings.steps))]
    model = from_pretrained(context.model or MODEL, device=context.device)
    rows = dict(ROWS)
    if head_beside(model, COVARIANCE) is None:
        del rows[MODULATED]
    if context.head is None:
        del rows[LEARNED]
    else:
        load_head(context.head, model)  # refused before the work
        rows[LEARNED] = replace(ROWS[LEARNED], head=from_pretrained(context.head).digest)
    if is_exploding(model):
        rows |= {row + EDM: rows[row] for row in AT_EDM if row in rows}
    cells = {
        (row, steps): at(row, method, steps, model)
        for row, method in rows.items()
        for steps in (settings.steps[:1] if row in settings.costly else settings.steps)
        if steps in chosen
    }
    sampling = Sampling(
        context, model, Judge.of(context, settings.metrics, References(DATA, context.data_dir)), settings
    )
    found = Grid("few-steps", cells, sampling, sampling.depends, "steps").run(context)
    records = {"settings": asdict(settings) | {"model": model.source}, "samplers": found.records()}
    return Outcome(records, [_section(found, settings, model.source, context.quick)], left=found.open())


def at(row: str, method: Method, steps: int, model: Model) -> Method:
    """A row's sampler with so many evaluations of the mean: Heun has two a step, and one in the last."""
    if row.endswith(EDM):
        return replace(method, levels=edm_levels(model, steps))
    return replace(method, steps=(steps + 1) // 2 if row == "Heun" else steps)


def _section(found: Results, settings: FewStepSettings, source: str, quick: bool) -> Section:
    measure = settings.measure
    text = [
        "Ancestral sampling in few steps with DDPM's two fixed variances, with fitted ones (isotropic, or one for each "
        "frequency), and with the covariance of the network's own Jacobian: its diagonal by 3 probes or by a head, or "
        "whole by Krylov products.",
        *([QUICK_NOTE] if quick else []),
        *found.unfinished(),
    ]
    note = (
        f"{settings.images:,} images each of {source}, {settings.precision}, the same noise for every row. {COST} Heun "
        "has half the steps, so as many evaluations."
    )
    table = found.table("Few-step sampling", [measure, EVALUATIONS], head="sampler", note=note)
    caption = f"{measure.title} against steps, and against evaluations of the network."
    short = {row: row.removesuffix(EDM) for row in found.rows if row.removesuffix(EDM) not in found.rows}
    if short:  # these rows are there along EDM's levels alone
        caption += f" Along EDM's levels: {', '.join(short.values())}."
    names = {row: short.get(row, row) for row in found.rows}
    figures = [
        found.curves("few_steps", caption, measure, x=(None, EVALUATIONS), rows=names),
        Figure("few_steps_images", "The first images of each, from the same noise.", _draw_images(found)),
    ]
    pairs = [pair for pair in EXPECTED if set(pair) <= set(found.rows)]
    claims = [] if quick else [found.below(better, worse, measure) for better, worse in pairs]
    return Section("What the covariance is worth", text, [table], figures, claims)


def _draw_images(found: Results) -> Canvas:
    """A strip for each row: the first images at each number of steps, white where there are none."""
    shown = {key: part.tensors["shown"] for key, part in found.parts.items()}
    blank = torch.full_like(next(iter(shown.values())), 255)
    rows = {row: torch.cat([shown.get((row, n), blank) for n in found.columns]) for row in found.rows}
    titles = [f"{n} steps" if i == len(blank) // 2 else "" for n in found.columns for i in range(len(blank))]
    return image_rows(rows, titles=titles)
