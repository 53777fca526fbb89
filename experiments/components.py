"""Principal components of posteriors: their cost, and the share of held-out errors they explain.

Products with the symmetrised Jacobian until every residual is below a tolerance, by block Lanczos
and by subspace iteration with its usual 50 steps; and the share of |x - mean|^2 that lies along the
components, along as many random directions, and along as many of the coarsest cosines.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results, axis
from experiments.held_out import data_of, held_out_images
from mmdgs.jacobians import chunked, linearised
from mmdgs.linalg.spectral import from_cosines
from mmdgs.models import Model, load
from mmdgs.moments import components
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Streams, randn
from mmdgs.report.page import Outcome, Section
from mmdgs.workspace import Part

MODEL, ACROSS = "cifar10", "sigma / alpha"
LANCZOS, SUBSPACE, COSINES = "block Lanczos", "subspace iteration", "coarsest cosines"
ROWS = (LANCZOS, SUBSPACE, COSINES, "random")
MEASURES = (
    Measure("products", "products", 1, "less"),
    Measure("residual", "largest residual", 4, "less"),
    Measure("explained", "share of the error", 4, "more"),
)


@dataclass(frozen=True)
class ComponentSettings:
    """How many images, components and steps of subspace iteration, and at which sigma / alpha."""

    images: int = 8
    components: int = 5
    tolerance: float = 0.01
    subspace_steps: int = 50
    subspace_images: int = 2
    ratios: tuple[float, ...] = axis((0.3,))


FULL = ComponentSettings()
QUICK = ComponentSettings(images=2, components=2, subspace_steps=3, subspace_images=2)


def run(context: Context) -> Outcome:
    """Cost and explained error at every level."""
    settings = context.sized(FULL, QUICK)
    model = load(context.model or MODEL, device=context.device)
    images = cache(lambda: held_out_images(context, model, "test", settings.images))
    cells = {(row, ratio): NoiseLevel(sigma=ratio) for ratio in settings.ratios for row in ROWS}

    def measure(cell: Cell) -> Part:
        own = images()[: settings.subspace_images if cell.row == SUBSPACE else None]
        values = [_measured(model, cell, settings, x[None], i) for i, x in enumerate(own)]
        return Part({key: [image[key] for image in values] for key in values[0]})

    results = Grid("components", cells, measure, (settings, model), ACROSS).run(context)
    named = asdict(settings) | {"model": model.source, "data": data_of(model)}
    section = _section(results, settings, f"{named['data']}, {model.source}")
    records = {"settings": named, "levels": results.records()}
    return Outcome(records, [section], left=results.open())


def _measured(
    model: Model, cell: Cell, settings: ComponentSettings, x: Tensor, number: int
) -> dict[str, float]:
    level, k = cell.what, settings.components
    # The same noise in every row, so that they explain the same error.
    x_t = add_noise(x, level, generator=Streams(0, 1, number, purpose="components noise"))
    values: dict[str, float] = {}
    if cell.row == LANCZOS:
        largest = components(model, x_t, level, k, tolerance=settings.tolerance)
        directions = largest.directions[0]
        values = {"products": largest.products, "residual": largest.residuals.max().item()}
    elif cell.row == SUBSPACE:
        directions, residual = subspace_iteration(model, x_t, level, k, settings.subspace_steps)
        values = {"products": k * settings.subspace_steps, "residual": residual}
    elif cell.row == COSINES:
        directions = coarsest_cosines(x, k)
    else:
        drawn = randn((1, k, x.numel()), x, Streams(cell.seed, 1, number, purpose="directions"))[0]
        directions = torch.linalg.qr(drawn.T)[0].T
    with torch.no_grad():
        error = (x - model(x_t, level)).flatten()
    along = directions.reshape(k, -1) @ error
    return {**values, "explained": (along.square().sum() / error.square().sum()).item()}


def subspace_iteration(
    model: Model, x_t: Tensor, level: NoiseLevel, k: int, steps: int
) -> tuple[Tensor, float]:
    """k directions (k, d) after so many steps, and their largest residual before the last."""
    at = linearised(model, x_t, level)

    def product(v: Tensor) -> Tensor:
        return chunked(at.symmetric, v.reshape(-1, *x_t.shape)).reshape(v.shape)

    start = randn((1, k, x_t.numel()), x_t, Streams(0, 1, purpose="subspace"))[0]
    basis = torch.linalg.qr(start.T)[0].T
    for _ in range(steps):
        image = product(basis)
        inner = basis @ image.T
        values, vectors = torch.linalg.eigh(0.5 * (inner + inner.T))
        left = vectors.T @ image - values[:, None] * (vectors.T @ basis)
        residual = (left.norm(dim=1) / values.abs()).max().item()
        basis = torch.linalg.qr(image.T)[0].T
    return basis, residual


def coarsest_cosines(x: Tensor, k: int) -> Tensor:
    """The k cosines of the lowest frequencies that are the same in all channels, (k, ...)."""
    height, width = x.shape[-2:]
    every = ((i**2 + j**2, i, j) for i in range(height) for j in range(width))
    coefficients = x.new_zeros(k, *x.shape[1:])
    for number, (_, i, j) in enumerate(sorted(every)[:k]):
        coefficients[number, 0, i, j] = 1
    return from_cosines(coefficients)


def _section(results: Results, settings: ComponentSettings, source: str) -> Section:
    k, few = settings.components, min(settings.subspace_images, settings.images)
    text = [
        f"{k} principal components of the posterior of noisy images. Block Lanczos ends when all "
        f"residuals |C v - variance v| / variance are below {settings.tolerance:g}; subspace "
        f"iteration takes {settings.subspace_steps} steps of {k} products. A product is one with "
        "the symmetrised Jacobian."
    ]
    note = (
        f"{settings.images} held-out images of {source} (subspace iteration: {few}); ± 95% over "
        "images."
    )
    columns = {ratio: f"{ACROSS} {ratio:.3g}" for ratio in results.columns}
    table = results.table(
        f"{k} components", MEASURES, head="directions", note=note, columns=columns
    )
    return Section("Principal components", text, [table], [])
