"""Principal components of the posterior: what they cost, and how much of the error of held-out images they explain.

Products with the symmetrised Jacobian until every residual is below a tolerance, by block Lanczos and by subspace
iteration with its usual 50 steps; and the share of |x - mean|^2 that lies along the components, along as many random
directions, and along as many of the coarsest cosines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.jacobians import chunked, linearised
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Cell, Grid, Measure, Results
from mmdgs.lab.held_out import ACROSS, data_of, held_out_images, titles
from mmdgs.lab.report import Section
from mmdgs.lab.workspace import Part, axis
from mmdgs.linalg.spectral import from_cosines
from mmdgs.models import Model, from_pretrained
from mmdgs.moments import components
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Streams, randn

MODEL = "cifar10"
LANCZOS, SUBSPACE, COSINES, RANDOM = ROWS = "block Lanczos", "subspace iteration", "coarsest cosines", "random"
PRODUCTS = Measure("products", "products", 1, "less")
RESIDUAL = Measure("residual", "largest residual", 4, "less")
EXPLAINED = Measure("explained", "share of the error", 4, "more")


@dataclass(frozen=True)
class ComponentSettings:
    """How many images, components and steps of subspace iteration (on so many images), and at which sigma / alpha."""

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
    if settings.images < 2:
        raise UsageError(f"--images must be at least 2, for an interval; got {settings.images}")
    model = from_pretrained(context.model or MODEL, device=context.device)
    images = cache(lambda: held_out_images(context, model, "test", settings.images))
    cells = {(row, ratio): NoiseLevel(sigma=ratio) for ratio in settings.ratios for row in ROWS}

    def measure(cell: Cell) -> Part:
        count = min(settings.subspace_images, settings.images) if cell.row == SUBSPACE else settings.images
        found = [_measured(model, cell, settings, x[None], i) for i, x in enumerate(images()[:count])]
        return Part({key: [one[key] for one in found] for key in found[0]})

    found = Grid("components", cells, measure, (settings, model), ACROSS).run(context)
    named = asdict(settings) | {"model": model.source, "data": data_of(model)}
    return Outcome({"settings": named, "levels": found.records()}, [_section(found, settings, named)])


def _measured(model: Model, cell: Cell, settings: ComponentSettings, x: Tensor, number: int) -> dict[str, float]:
    """What one row is on one image."""
    level, k = cell.what, settings.components
    # The same noise in every row, so that they explain the same error.
    x_t = add_noise(x, level, generator=Streams(0, 1, number, purpose="components noise"))
    found: dict[str, float] = {}
    if cell.row == LANCZOS:
        made = components(model, x_t, level, k, tolerance=settings.tolerance)
        directions = made.directions[0]
        found = {"products": made.products, "residual": made.residuals.max().item()}
    elif cell.row == SUBSPACE:
        directions, residual = subspace_iteration(model, x_t, level, k, settings.subspace_steps)
        found = {"products": k * settings.subspace_steps, "residual": residual}
    elif cell.row == COSINES:
        directions = coarsest_cosines(x, k)
    else:
        drawn = randn((1, k, x.numel()), x, Streams(cell.seed, 1, number, purpose="directions"))[0]
        directions = torch.linalg.qr(drawn.T)[0].T
    with torch.no_grad():
        error = (x - model(x_t, level)).flatten()
    along = directions.reshape(k, -1) @ error
    return {**found, "explained": (along.square().sum() / error.square().sum()).item()}


def subspace_iteration(model: Model, x_t: Tensor, level: NoiseLevel, k: int, steps: int) -> tuple[Tensor, float]:
    """k directions (k, d) after so many products with all of them, and their largest residual before the last."""
    at = linearised(model, x_t, level)
    product: Callable[[Tensor], Tensor] = lambda v: chunked(at.symmetric, v.reshape(-1, *x_t.shape)).reshape(v.shape)  # noqa: E731
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
    places = sorted(((i, j) for i in range(height) for j in range(width)), key=lambda at: (at[0] ** 2 + at[1] ** 2, at))
    coefficients = x.new_zeros(k, *x.shape[1:])
    for number, (i, j) in enumerate(places[:k]):
        coefficients[number, 0, i, j] = 1
    return from_cosines(coefficients)


def _section(found: Results, settings: ComponentSettings, named: dict[str, object]) -> Section:
    k, tolerance = settings.components, settings.tolerance
    text = [
        f"{k} principal components of the posterior of noisy images. Block Lanczos ends when all residuals "
        f"|C v - variance v| / variance are below {tolerance:g}; subspace iteration takes {settings.subspace_steps} "
        f"steps of {k} products. A product is one with the symmetrised Jacobian.",
    ]
    note = (
        f"{settings.images} held-out images of {named['data']} (subspace iteration: "
        f"{min(settings.subspace_images, settings.images)}), {named['model']}; ± 95% over images."
    )
    measures = [PRODUCTS, RESIDUAL, EXPLAINED]
    table = found.table(f"{k} components", measures, head="directions", note=note, columns=titles(found))
    return Section("Principal components", text, [table], [])
