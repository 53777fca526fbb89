"""Table 2, samplers of one network: Langevin dynamics against pseudo-Gibbs, and all others.

The paper finds multi-level Gibbs sampling (Algorithm 2: 3 sweeps, 3 probes, 232 levels) as good as
annealed Langevin dynamics (Algorithm 1: 5 steps a level). All rows have the same network, seeds and
number of images; the cheapest come first, so that a run that is stopped has the most. FIDs of more
seeds, up to the paper's 50,000 images, are made by `python -m experiments table2-seeds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments import sampler_cells
from experiments.drawing import image_rows
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results, axis
from experiments.sampler_cells import DIVERSITY, EVALUATIONS, FID, Judge, Sampling, path
from experiments.small_models import model_of
from mmdgs.cost import PRODUCT
from mmdgs.covariances import Diagonal, Krylov, RademacherDiagonal
from mmdgs.errors import UsageError
from mmdgs.models import Model, load
from mmdgs.moments import FLOOR
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.samplers.langevin import LARGEST, suggested_rate
from mmdgs.sampling import SamplerSettings
from mmdgs.sampling.named import GUIDE
from mmdgs.schedules import Levels
from mmdgs.tables import Table
from mmdgs.workspace import Part

DATA, MODEL = "cifar10", "cifar10"
LANGEVIN, GIBBS, DOWN, HEUN = "Langevin", "Gibbs (paper)", "Gibbs, down first", "Heun"
GUIDED = "Heun, guided"  # by the guide that came with the model; left out where none did
ISOTROPIC, SPECTRAL, CONSISTENT = "Gibbs, isotropic", "Gibbs, spectral", "consistent annealing"
"""In all Gibbs rows but the paper's the first sweep of a pair of levels only goes down. These have
no products: one variance a level, or one for each frequency."""
ANCESTRAL = ("small", "large", "isotropic", "spectral", "diagonal", "Krylov")
ROWS = (
    *(LANGEVIN, GIBBS, DOWN, ISOTROPIC, SPECTRAL, CONSISTENT),
    *(f"ancestral, {name}" for name in ANCESTRAL),
    *("DDIM", HEUN, GUIDED),
)
"""In the order of the table."""
SHOWN = (
    *(EVALUATIONS, FID, Measure("is", "IS", 2), Measure("precision", "precision", 3)),
    *(Measure("recall", "recall", 3), DIVERSITY, sampler_cells.MILLISECONDS),
)
PAPER = {
    LANGEVIN: {"evaluations": "1,161", "fid": "10.87", "is": "8.40 ± 0.07"},
    GIBBS: {"evaluations": "4,852", "fid": "10.75", "is": "8.28 ± 0.07"},
}
"""The paper's Table 2: NCSNv2, 50,000 images."""
FURTHER = 3
"""Rates of Langevin dynamics that are tried at most beyond those of the settings."""


@dataclass(frozen=True)
class Table2Settings(sampler_cells.SamplingSettings):
    """Numbers of images, levels and steps; those of the paper where it has one."""

    seeds: int = 5
    levels: int = 232
    langevin_steps: int = 5
    sweeps: int = 3
    probes: int = 3
    fewer_levels: tuple[int, ...] = axis((16,))  # of Gibbs without products, besides equal cost
    heun: tuple[int, ...] = axis((18,))
    guidance: float = axis(1.3)
    steps: tuple[int, ...] = axis((25, 100))  # of DDIM and ancestral sampling without products
    probed_steps: tuple[int, ...] = axis((25,))
    krylov_steps: int = 5
    krylov: tuple[int, ...] = axis((25,))
    rate_factors: tuple[float, ...] = axis((0.5, 1.0, 2.0))  # of NCSNv2's suggested rate
    tuning_images: int = 500
    most_images: int = axis(50_000)  # of table2-seeds
    metrics: tuple[str, ...] = ("fid", "is", "precision-recall", "diversity")


FULL = Table2Settings()
QUICK = Table2Settings(
    images=10, seeds=2, levels=8, heun=(4,), steps=(4, 8), probed_steps=(4,), krylov_steps=2,
    krylov=(4,), fewer_levels=(), tuning_images=4, fit_images=16, precision="float32",
    metrics=("diversity",), reference_limit=500,
)  # fmt: skip


def run(context: Context) -> Outcome:
    """Tune Langevin's step, sample by every row and seed, and measure."""
    context.check_only(list(ROWS))
    settings, sampling = prepared(context)
    tuning = tuned(sampling, settings) if LANGEVIN in (context.only or ROWS) else None
    cells = table2_cells(sampling.model, 1.0 if tuning is None else best_rate(tuning)[0], settings)
    grid = Grid("table2", cells, sampling, sampling.depends, "levels or steps", settings.seeds)
    results, model = grid.run(context), sampling.model
    sections = [_section(results, settings, model.source)]
    if tuning is not None:
        sections.append(_tuning_section(tuning, model, settings))
    equal = {"model": model.source, "equal_cost_levels": equal_cost_levels(settings)}
    tried = tuning and tuning.records()
    own = asdict(settings) | equal
    records = {"settings": own, "tuning": tried, "samplers": results.records()}
    return Outcome(records, sections, left=results.open())


def prepared(context: Context) -> tuple[Table2Settings, Sampling]:
    """The settings, and what samples of the model that --model names, ships, or is trained here."""
    settings = context.sized(FULL, QUICK)
    seeds = context.seeds or settings.seeds
    if settings.images < 2 * seeds or settings.images % seeds:
        raise UsageError(
            "images must be a multiple of the number of seeds, and at least 2 for each; got "
            f"{settings.images:,} images of {seeds} seeds"
        )
    settings = replace(settings, seeds=seeds)
    model = model_of(context, MODEL, data=DATA, data_dir=context.data_dir)
    size, limit = model.shape[1], settings.reference_limit
    references = sampler_cells.References(DATA, context.data_dir, size, limit)
    judge = Judge.of(context, settings.metrics, references)
    return settings, Sampling(context, model, judge, settings)


# --- the rows


def gibbs_evaluations(levels: int, settings: Table2Settings) -> float:
    """What Algorithm 2 costs: a mean and its products a sweep at each pair, and the last mean."""
    return settings.sweeps * (levels - 1) * (1 + PRODUCT * settings.probes) + 1


def langevin_evaluations(levels: int, settings: Table2Settings) -> float:
    """What Algorithm 1 costs: every step at every level, and the last mean."""
    return settings.langevin_steps * levels + 1


def equal_cost_levels(settings: Table2Settings) -> int:
    """The number of levels at which Gibbs costs about what Langevin costs with all of them."""
    budget, counts = langevin_evaluations(settings.levels, settings), range(2, settings.levels + 2)
    return min(counts, key=lambda n: abs(gibbs_evaluations(n, settings) - budget))


def langevin(levels: Levels, factor: float, settings: Table2Settings) -> SamplerSettings:
    """Langevin dynamics along levels, at a multiple of the rate suggested for them."""
    rate = min(LARGEST, factor * suggested_rate(levels, settings.langevin_steps))
    return SamplerSettings("langevin", levels, sweeps=settings.langevin_steps, rate=rate)


def table2_cells(
    model: Model, factor: float, settings: Table2Settings
) -> dict[tuple[str, int], SamplerSettings]:
    """All cells, the cheapest first; what goes beyond the paper at its cost comes after it."""
    equal, every, sweeps = equal_cost_levels(settings), settings.levels, settings.sweeps
    signs = RademacherDiagonal(settings.probes, floor=FLOOR)
    probed = SamplerSettings("gibbs", covariance=signs, sweeps=sweeps)
    down = SamplerSettings("gibbs-down", covariance="isotropic", sweeps=sweeps)
    swept = {
        GIBBS: probed,
        DOWN: replace(probed, sampler="gibbs-down"),
        ISOTROPIC: down,
        SPECTRAL: replace(down, covariance="spectral"),
        CONSISTENT: SamplerSettings("consistent"),
    }
    small = SamplerSettings("ancestral", covariance="small")
    diagonal = replace(small, covariance=Diagonal(settings.probes, floor=FLOOR))
    krylov = replace(small, covariance=Krylov(settings.krylov_steps, floor=FLOOR))
    stepped = [
        ("DDIM", SamplerSettings("ddim"), settings.steps),
        *((f"ancestral, {c}", replace(small, covariance=c), settings.steps) for c in ANCESTRAL[:4]),
        ("ancestral, diagonal", diagonal, settings.probed_steps),
        ("ancestral, Krylov", krylov, settings.krylov),
    ]
    cells = {(HEUN, n): SamplerSettings("heun", steps=n) for n in settings.heun}
    if (guide := model.beside(GUIDE)) is not None:
        guided = SamplerSettings("heun", guide=load(guide).digest, guidance=settings.guidance)
        cells |= {(GUIDED, n): replace(guided, steps=n) for n in settings.heun}
    for row, method, counts in stepped:  # no more steps than the model has levels
        for n in (min(n, len(model.levels)) for n in counts):
            cells[row, n] = replace(method, steps=n)
    few = [(row, n) for n in (*settings.fewer_levels, equal) for row in (ISOTROPIC, SPECTRAL)]
    last = [(LANGEVIN, equal), (GIBBS, equal), (LANGEVIN, every), (GIBBS, every)]
    for row, n in (*few, (CONSISTENT, every), *last, (SPECTRAL, every), (DOWN, equal)):
        levels = path(model, n)
        walk = replace(swept[row], levels=levels) if row in swept else None
        cells[row, n] = walk or langevin(levels, factor, settings)
    return cells


# --- Langevin's step size


def tuned(sampling: Sampling, settings: Table2Settings) -> Results:
    """Few images at multiples of the suggested rate: a column a factor, with rate and badness."""
    measure = settings.measure
    few = replace(settings, images=settings.tuning_images, seeds=1, metrics=(measure.key,))
    context = replace(sampling.context, only=None)
    judge = replace(sampling.judge, metrics=few.metrics)
    tuning = Sampling(context, sampling.model, judge, few)
    levels = path(sampling.model, settings.levels)

    def measured(cell: Cell) -> Part:
        values = tuning(cell).values
        value = values[measure.key]
        badness = value if measure is FID else abs(value - 1)  # diversity: that of data is 1
        return Part({**values, "rate": cell.what.rate, "badness": badness})

    def tried(factors: Sequence[float]) -> Results:
        every = {(LANGEVIN, f): langevin(levels, f, settings) for f in sorted(factors)}
        grid = Grid("tuning", every, measured, tuning.depends, "times the suggested rate")
        return grid.run(context, len(every))

    largest = LARGEST / suggested_rate(levels, settings.langevin_steps)
    return searched(tried, settings.rate_factors, largest)


def searched(
    tried: Callable[[Sequence[float]], Results], factors: Sequence[float], largest: float
) -> Results:
    """Results at all factors, and further out by halves or doubles while the last is best."""
    factors = list(factors)
    results = tried(factors)
    for _ in range(FURTHER):
        best, inside = best_rate(results)
        following = best / 2 if best == min(factors) else 2 * best
        if inside or (following > best >= largest):
            break
        factors.append(following)
        results = tried(factors)
    return results


def best_rate(results: Results) -> tuple[float, bool]:
    """The factor of the smallest badness, and whether it lies inside those that were tried."""
    factors = sorted(results.columns)
    best = min(factors, key=lambda factor: results.values(LANGEVIN, factor)["badness"])
    return best, factors[0] < best < factors[-1]


def _tuning_section(results: Results, model: Model, settings: Table2Settings) -> Section:
    best, inside = best_rate(results)
    suggested = suggested_rate(path(model, settings.levels), settings.langevin_steps)
    text = (
        f"NCSNv2's analysis suggests a rate of {suggested:.4f} for these levels. Multiples of it "
        f"were tried with {settings.tuning_images:,} images, and {best:g} times it was taken, for "
        "other numbers of levels too."
    )
    table = results.listing("Langevin's step size", [Measure("rate", "rate", 4), settings.measure])
    tried = f"{best:g} of {results.columns}"
    claim = Claim("the best rate lies inside those that were tried", inside, tried)
    title = "The step size of Langevin dynamics"
    return Section(title, [text], [table], claims=[claim])


# --- the report


def _section(results: Results, settings: Table2Settings, source: str) -> Section:
    """The table, FID against evaluations, the first images of every row, and the claims."""
    text = ["Gibbs also runs with so few levels that it costs what Langevin costs."]
    measure, rows = settings.measure, [row for row in ROWS if row in results.rows]
    most = {row: max(n for name, n in results.parts if name == row) for row in rows}
    strips = {f"{row}, {n}": results.parts[row, n].tensors["shown"] for row, n in most.items()}
    caption = f"{measure.title} against evaluations of the network an image."
    images = "The first images of each row, from the same seed; behind it its levels or steps."
    figures = [
        results.curves("table2", caption, measure, x=(EVALUATIONS,)),
        Figure("table2_images", images, image_rows(strips)),
    ]
    claims = _claims(results, settings) if measure is FID else []
    return Section("The table", text, [_table(results, settings, source)], figures, claims)


def _table(results: Results, settings: Table2Settings, source: str) -> Table:
    every = [part.values for part in results.parts.values()]
    open_metrics = {f" {name}: {why}." for values in every for name, why in values["open"].items()}
    note = (
        f"{settings.images:,} images of {settings.seeds} seeds together (± 95% interval, from "
        f"leaving out each seed), of {source}, {settings.precision}. {sampler_cells.COST} "
        "Diversity: the distance of an image to its nearest other, over that of data. FIDs of "
        f"fewer than 50,000 images do not compare with the paper's.{''.join(sorted(open_metrics))}"
    )
    shown = [measure for measure in SHOWN if any(measure.key in values for values in every)]
    table = results.listing("Samplers of one network", shown, note=note, head="sampler", rows=ROWS)
    rows = [
        [
            f"paper: {row}, NCSNv2, 50,000 images",
            "232",
            *(known.get(measure.key, "") for measure in shown),
        ]
        for row, known in PAPER.items()
    ]
    return replace(table, rows=[*table.rows, *rows])


def _claims(results: Results, settings: Table2Settings) -> list[Claim]:
    """Gibbs is no worse than Langevin, also at equal cost; and what the covariances are worth."""
    levels, equal, claims = settings.levels, equal_cost_levels(settings), []
    for row, count, where in (
        (GIBBS, levels, "at the paper's settings"),
        (GIBBS, equal, "at equal cost"),
        (DOWN, equal, "at equal cost"),
    ):
        if results.has(row, count) and results.has(LANGEVIN, levels):
            both = [results.values(row, count), results.values(LANGEVIN, levels)]
            claims.append(no_worse(f"{row} is no worse than Langevin {where}", *both))
    every = results.parts.items()
    own = {key: part.values["fid"] for key, part in every if key[0].startswith("Gibbs")}
    if own:
        (row, count), theirs = min(own, key=own.__getitem__), float(PAPER[GIBBS]["fid"])
        numbers = f"{own[row, count]:.2f} of {settings.images:,} images: {row}, {count} levels"
        text = f"the best Gibbs row has a FID below the paper's {theirs} (of 50,000 images)"
        claims.append(Claim(text, own[row, count] < theirs, numbers))
    first, rows = "ancestral, isotropic", [f"ancestral, {name}" for name in ANCESTRAL[3:]]
    compared = [row for row in rows if row in results.rows and first in results.rows]
    return claims + [results.below(row, first, FID) for row in compared]


def no_worse(text: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Claim:
    """The claim that a FID is not higher by more than the interval of the difference.

    The same seed is left out of both, since runs of one seed begin from the same noise.
    """
    gap = FID.of(first, second)
    numbers = (
        f"{FID.text(FID.of(first))} at {first['evaluations']:,.0f} evaluations against "
        f"{FID.text(FID.of(second))} at {second['evaluations']:,.0f}; difference "
        f"{FID.text(gap, '+')}; {first['images']:,} images"
    )
    return Claim(text, None if math.isnan(gap.half) else gap.value <= gap.half, numbers)
