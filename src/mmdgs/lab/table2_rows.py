"""The rows of Table 2 (table2.py): which sampler, along how many levels or steps, and what an image of each costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmdgs.cost import PRODUCT
from mmdgs.generation import Method
from mmdgs.generation.methods import GUIDE
from mmdgs.lab.sampler_cells import SamplingSettings, path
from mmdgs.lab.workspace import axis
from mmdgs.models import Model, load
from mmdgs.moments import FLOOR
from mmdgs.samplers.langevin_rates import LARGEST, suggested_rate
from mmdgs.schedules import Levels

LANGEVIN, GIBBS, DOWN, HEUN = "Langevin", "Gibbs (paper)", "Gibbs, down first", "Heun"
GUIDED = "Heun, guided"
"""By the guide that came with the model; left out where none did."""
ISOTROPIC, SPECTRAL, CONSISTENT = "Gibbs, isotropic", "Gibbs, spectral", "consistent annealing"
"""In all Gibbs rows but the paper's the first sweep of a pair of levels only goes down. The isotropic and spectral ones
have no products: one variance a level, or one for each frequency."""
ROWS = (
    LANGEVIN, GIBBS, DOWN, ISOTROPIC, SPECTRAL, CONSISTENT, "ancestral, small", "ancestral, large",
    "ancestral, isotropic", "ancestral, spectral", "ancestral, diagonal", "ancestral, Krylov", "DDIM", HEUN, GUIDED,
)  # fmt: skip
"""In the order of the table."""


@dataclass(frozen=True)
class Table2Settings(SamplingSettings):
    """Numbers of images, levels and steps; those of the paper where it has one."""

    seeds: int = 5
    papers: int = axis(2)  # times as many images of rows with more seeds, where --most-images does not say how many
    levels: int = 232
    langevin_steps: int = 5
    sweeps: int = 3
    probes: int = 3
    fewer_levels: tuple[int, ...] = axis((16,))  # of Gibbs without products, besides those of Langevin's cost
    heun: tuple[int, ...] = axis((18,))
    guidance: float = axis(1.3)
    steps: tuple[int, ...] = axis((25, 100))  # of DDIM and ancestral sampling without products
    probed_steps: tuple[int, ...] = axis((25,))
    krylov_steps: int = 5
    krylov: tuple[int, ...] = axis((25,))
    rate_factors: tuple[float, ...] = axis((0.5, 1.0, 2.0))  # of the rate that NCSNv2's analysis suggests
    tuning_images: int = 500
    metrics: tuple[str, ...] = ("fid", "is", "precision-recall", "diversity")


def gibbs_evaluations(levels: int, settings: Table2Settings) -> float:
    """What Algorithm 2 costs: a mean and its products for each sweep at each pair of levels, and the last mean."""
    return settings.sweeps * (levels - 1) * (1 + PRODUCT * settings.probes) + 1


def langevin_evaluations(levels: int, settings: Table2Settings) -> float:
    """What Algorithm 1 costs: every step at every level, and the last mean."""
    return settings.langevin_steps * levels + 1


def evaluations(settings: Table2Settings) -> dict[str, float]:
    """What an image of the rows that have more seeds costs."""
    both = {LANGEVIN: langevin_evaluations, GIBBS: gibbs_evaluations}
    steps = 2 * settings.heun[-1] - 1
    return {HEUN: steps, GUIDED: 2 * steps} | {row: of(settings.levels, settings) for row, of in both.items()}


def equal_cost_levels(settings: Table2Settings) -> int:
    """The number of levels at which the cost of Gibbs is nearest to that of Langevin with all of them."""
    budget = langevin_evaluations(settings.levels, settings)
    return min(range(2, settings.levels + 2), key=lambda n: abs(gibbs_evaluations(n, settings) - budget))


def langevin(levels: Levels, factor: float, settings: Table2Settings) -> Method:
    """Langevin dynamics along levels, at a multiple of the rate suggested for them."""
    rate = min(LARGEST, factor * suggested_rate(levels, settings.langevin_steps))
    return Method("langevin", levels, sweeps=settings.langevin_steps, rate=rate)


def table2_cells(model: Model, factor: float, settings: Table2Settings) -> dict[tuple[str, int], Method]:
    """All cells, the cheapest first; but those beyond the paper that cost as much as its own come after them."""
    equal, every = equal_cost_levels(settings), settings.levels
    probed = Method("gibbs", covariance="rademacher", probes=settings.probes, floor=FLOOR, sweeps=settings.sweeps)
    diagonal = Method("ancestral", covariance="diagonal", probes=settings.probes, floor=FLOOR)
    krylov = Method("ancestral", covariance="krylov", krylov_steps=settings.krylov_steps, floor=FLOOR)
    swept = {
        GIBBS: probed,
        DOWN: replace(probed, sampler="gibbs-down"),
        ISOTROPIC: Method("gibbs-down", covariance="isotropic", sweeps=settings.sweeps),
        SPECTRAL: Method("gibbs-down", covariance="spectral", sweeps=settings.sweeps),
        CONSISTENT: Method("consistent"),
    }
    stepped = [
        ("DDIM", Method("ddim"), settings.steps),
        *(
            (f"ancestral, {name}", Method("ancestral", covariance=name), settings.steps)
            for name in ("small", "large", "isotropic", "spectral")
        ),
        ("ancestral, diagonal", diagonal, settings.probed_steps),
        ("ancestral, Krylov", krylov, settings.krylov),
    ]
    own = len(model.levels)  # no more steps than the model has levels
    few = [(row, n) for n in (*settings.fewer_levels, equal) for row in (ISOTROPIC, SPECTRAL)]
    last = [(LANGEVIN, equal), (GIBBS, equal), (LANGEVIN, every), (GIBBS, every), (SPECTRAL, every), (DOWN, equal)]
    found = {(HEUN, n): Method("heun", steps=n) for n in settings.heun}
    if (guide := model.beside(GUIDE)) is not None:
        guided = Method("heun", guide=load(guide).digest, guidance=settings.guidance)
        found |= {(GUIDED, n): replace(guided, steps=n) for n in settings.heun}
    found |= {(row, min(n, own)): replace(method, steps=min(n, own)) for row, method, counts in stepped for n in counts}
    for row, n in (*few, (CONSISTENT, every), *last):
        levels = path(model, n)
        found[row, n] = langevin(levels, factor, settings) if row == LANGEVIN else replace(swept[row], levels=levels)
    return found
