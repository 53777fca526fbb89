"""Table 2 of the paper: Langevin dynamics against pseudo-Gibbs on one network, and the other samplers beside them.

All rows have the same network, the same seeds and the same number of images. The paper's own two, and Heun's method,
have more seeds besides (table2_papers.py). The cheapest rows come first, so that a run that is stopped has the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mmdgs.errors import UsageError
from mmdgs.lab.drawing import image_rows
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Cell, Grid, Measure, Results
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.sampler_cells import (
    COST,
    DIVERSITY,
    EVALUATIONS,
    FID,
    MILLISECONDS,
    QUICK_NOTE,
    Judge,
    References,
    Sampling,
    path,
)
from mmdgs.lab.small_models import QUICK_TRAINING, check_model, model_of
from mmdgs.lab.table2_papers import ManySeeds
from mmdgs.lab.table2_rows import (
    DOWN,
    GIBBS,
    GUIDED,
    HEUN,
    LANGEVIN,
    ROWS,
    Table2Settings,
    equal_cost_levels,
    evaluations,
    langevin,
    table2_cells,
)
from mmdgs.lab.workspace import Part
from mmdgs.models import Model
from mmdgs.samplers.langevin_rates import LARGEST, suggested_rate
from mmdgs.tables import Table
from mmdgs.training import Recipe

DATA, MODEL = "cifar10", "cifar10"
TRAIN = (
    "mmdgs train --data cifar10 --param edm --levels geometric:232:50:0.01 --model unet-paper --precision bf16 "
    "--out runs/many"
)
SHOWN = (
    EVALUATIONS, FID, Measure("is", "IS", 2), Measure("precision", "precision", 3), Measure("recall", "recall", 3),
    DIVERSITY, MILLISECONDS,
)  # fmt: skip
PAPER = {
    LANGEVIN: {"evaluations": "1,161", "fid": "10.87", "is": "8.40 ± 0.07"},
    GIBBS: {"evaluations": "4,852", "fid": "10.75", "is": "8.28 ± 0.07"},
}
"""The paper's Table 2: NCSNv2, 50,000 images."""
FURTHER = 3
"""Rates of Langevin dynamics that are tried at most beyond those of the settings."""


FULL = Table2Settings()
QUICK = Table2Settings(
    images=10, seeds=2, levels=8, heun=(4,), steps=(4, 8), probed_steps=(4,), krylov_steps=2,
    krylov=(4,), fewer_levels=(), tuning_images=4, fit_images=16, precision="float32", metrics=("diversity",),
    reference_limit=500,
)  # fmt: skip
QUICK_RECIPE = Recipe(
    data=DATA, size=16, limit=2_000, model="unet-tiny", param="edm", levels="geometric:40:20:0.02",
    training=QUICK_TRAINING,
)  # fmt: skip


def run(context: Context) -> Outcome:
    """Tune Langevin's step, sample by every row and seed, and measure."""
    context.check_only(list(ROWS))
    settings = context.sized(FULL, QUICK)
    settings = of_seeds(settings, context.seeds or settings.seeds)
    model = many_level_model(context)
    references = References(DATA, context.data_dir, model.shape[1], settings.reference_limit)
    sampling = Sampling(context, model, Judge.of(context, settings.metrics, references), settings)
    many = ManySeeds.of(sampling)
    most = context.most_images or settings.papers * settings.images
    many.stops(most)  # refused before the work
    tuning = tuned(sampling, settings) if LANGEVIN in (context.only or ROWS) else None
    cells = table2_cells(model, 1.0 if tuning is None else best_rate(tuning)[0], settings)
    with_more = [one for one in more_seeds(settings, context.only) if one in cells]
    found = Grid(
        "table2", cells, lambda cell: measured(sampling, many if (cell.row, cell.column) in with_more else None, cell),
        sampling.depends, "levels or steps", settings.seeds,
    ).run(context)  # fmt: skip
    methods = {row: cells[row, n] for row, n in with_more}
    papers = many.run(methods, evaluations(settings), most) if methods else None
    sections = [_section(found, papers, settings, model.source, context.quick)]
    if papers is not None:
        sections.append(many.section(papers))
    if tuning is not None:
        sections.append(_tuning_section(tuning, model, settings, context.quick))
    named = asdict(settings) | {"model": model.source, "equal_cost_levels": equal_cost_levels(settings)}
    records = {"settings": named, "tuning": tuning and tuning.records(), "samplers": found.records()}
    if papers is not None:
        records["papers"] = papers.records()
    return Outcome(records, sections, left=[*found.open(), *(papers.open() if papers else ())])


def of_seeds(settings: Table2Settings, seeds: int) -> Table2Settings:
    """With another number of seeds."""
    if settings.images < 2 * seeds or settings.images % seeds:
        raise UsageError(
            f"images must be a multiple of the number of seeds, and at least 2 for each; got {settings.images:,} "
            f"images of {seeds} seeds"
        )
    return replace(settings, seeds=seeds)


def more_seeds(settings: Table2Settings, only: Sequence[str] | None) -> list[tuple[str, int]]:
    """The rows that have more seeds, with their levels or steps; none without FIDs."""
    rows = [*((row, settings.heun[-1]) for row in (HEUN, GUIDED)), *((row, settings.levels) for row in PAPER)]
    return [one for one in rows if settings.measure is FID and (only is None or one[0] in only)]


def many_level_model(context: Context) -> Model:
    """The model that --model names, or the one that ships; quick runs train a tiny one where none is named."""
    model = model_of(context, MODEL, replace(QUICK_RECIPE, data=DATA, data_dir=context.data_dir), TRAIN)
    return check_model(model, "; single-level models are for `mmdgs reproduce cifar10`")


def measured(sampling: Sampling, many: ManySeeds | None, cell: Cell) -> Part:
    """A cell by the seeds that all rows have; `many` keeps the features of one that has more."""
    x, cost = sampling.images(cell)
    if many is not None:
        many.keep(cell, x, cost)
    return sampling.judged(cell, x, cost)


# --- Langevin's step size -------------------------------------------------------------------------------------------


def tuned(sampling: Sampling, settings: Table2Settings) -> Results:
    """Few images at multiples of the suggested rate: a column for each factor, with its `rate` and its `badness`."""
    few = replace(settings, images=settings.tuning_images, seeds=1, metrics=(settings.measure.key,))
    context = replace(sampling.context, only=None)
    judge = replace(sampling.judge, metrics=few.metrics)
    tuning = Sampling(context, sampling.model, judge, few)

    def measure(cell: Cell) -> Part:
        part = tuning(cell)
        value = part.values[settings.measure.key]
        badness = value if settings.measure is FID else abs(value - 1)  # quick runs: as diverse as data
        return Part({**part.values, "rate": cell.what.rate, "badness": badness})

    levels = path(sampling.model, settings.levels)

    def tried(factors: Sequence[float]) -> Results:
        every = {(LANGEVIN, f): langevin(levels, f, settings) for f in sorted(factors)}
        return Grid("tuning", every, measure, tuning.depends, "times the suggested rate").run(context, len(every))

    largest = LARGEST / suggested_rate(levels, settings.langevin_steps)
    return searched(tried, settings.rate_factors, largest)


def searched(tried: Callable[[Sequence[float]], Results], factors: Sequence[float], largest: float) -> Results:
    """Results at all factors, and further out by halves or doubles while the last is best, FURTHER times at most."""
    factors = list(factors)
    found = tried(factors)
    for _ in range(FURTHER):
        best, inside = best_rate(found)
        following = best / 2 if best == min(factors) else 2 * best
        if inside or (following > best >= largest):
            break
        factors.append(following)
        found = tried(factors)
    return found


def best_rate(found: Results) -> tuple[float, bool]:
    """The factor of the smallest badness, and whether it lies inside the factors that were tried."""
    factors = sorted(found.columns)
    best = min(factors, key=lambda factor: found.values(LANGEVIN, factor)["badness"])
    return best, factors[0] < best < factors[-1]


def _tuning_section(found: Results, model: Model, settings: Table2Settings, quick: bool) -> Section:
    best, inside = best_rate(found)
    suggested = suggested_rate(path(model, settings.levels), settings.langevin_steps)
    text = (
        f"NCSNv2's analysis suggests a rate of {suggested:.4f} for these levels. Multiples of it were tried with "
        f"{settings.tuning_images:,} images, and {best:g} times it was taken, for other numbers of levels too."
    )
    table = found.listing("Langevin's step size", [Measure("rate", "rate", 4), settings.measure])
    claim = Claim("the best rate lies inside those that were tried", inside, f"{best:g} of {found.columns}")
    return Section("The step size of Langevin dynamics", [text], [table], claims=[] if quick else [claim])


# --- the report -----------------------------------------------------------------------------------------------------


def _section(found: Results, papers: Results | None, settings: Table2Settings, source: str, quick: bool) -> Section:
    """The table, FID against evaluations, the first images of every row, and the paper's claims."""
    text = [
        "The paper's Table 2 finds multi-level Gibbs sampling (Algorithm 2: 3 sweeps, 3 probes, 232 levels) as good as "
        "annealed Langevin dynamics (Algorithm 1: 5 steps a level) on the same network. Gibbs also runs with so few "
        "levels that it costs what Langevin costs.",
        *([QUICK_NOTE] if quick else []),
        *found.unfinished(),
    ]
    measure = settings.measure
    caption = f"{measure.title} against evaluations of the network an image."
    most = {row: max(n for name, n in found.parts if name == row) for row in ROWS if row in found.rows}
    strips = image_rows({f"{row}, {n}": found.parts[row, n].tensors["shown"] for row, n in most.items()})
    images = "The first images of each row, from the same seed; the number is that of its levels or steps."
    figures = [
        found.curves("table2", caption, measure, x=(EVALUATIONS,)),
        Figure("table2_images", images, strips),
    ]
    claims = [] if quick else _claims(found, papers, settings)
    return Section("The table", text, [_table(found, settings, source, quick)], figures, claims)


def _table(found: Results, settings: Table2Settings, source: str, quick: bool) -> Table:
    every = [part.values for part in found.parts.values()]
    reasons = {f" The metric {name!r} is left open: {why}." for values in every for name, why in values["open"].items()}
    note = (
        f"{settings.images:,} images of {settings.seeds} seeds together (± 95% interval, from leaving out each seed), "
        f"of {source}, {settings.precision}. {COST} Diversity: the distance of an image to its nearest other, over "
        f"that of data. FIDs of fewer than 50,000 images do not compare with the paper's.{''.join(sorted(reasons))}"
    )
    shown = [one for one in SHOWN if any(one.key in values for values in every)]
    table = found.listing("Samplers of one network", shown, note=note, head="sampler", rows=ROWS)
    if quick:
        return table
    rows = [
        [f"paper: {row}, NCSNv2, 50,000 images", "232", *(known.get(one.key, "") for one in shown)]
        for row, known in PAPER.items()
    ]
    return replace(table, rows=[*table.rows, *rows])


def _claims(found: Results, papers: Results | None, settings: Table2Settings) -> list[Claim]:
    """What the paper says: Gibbs is no worse than Langevin. Then the same at equal cost, and the covariances."""
    levels, equal = settings.levels, equal_cost_levels(settings)
    claims = []
    shared = [n for n in papers.columns if all(papers.has(row, n) for row in PAPER)] if papers else []
    if papers and shared:
        most = max(shared)
        both = [papers.values(row, most) for row in (GIBBS, LANGEVIN)]
        claims.append(no_worse(f"{GIBBS} is no worse than Langevin with {most:,} images", *both))
    for row, count, where in (
        (GIBBS, levels, "at the paper's settings"),
        (GIBBS, equal, "at equal cost"),
        (DOWN, equal, "at equal cost"),
    ):
        if found.has(row, count) and found.has(LANGEVIN, levels):
            both = [found.values(row, count), found.values(LANGEVIN, levels)]
            claims.append(no_worse(f"{row} is no worse than Langevin {where}", *both))
    own = {key: part.values["fid"] for key, part in found.parts.items() if key[0].startswith("Gibbs")}
    if own:
        (row, count), theirs = min(own, key=own.__getitem__), float(PAPER[GIBBS]["fid"])
        numbers = f"{own[row, count]:.2f} of {settings.images:,} images: {row}, {count} levels"
        text = f"the best Gibbs row has a FID below the paper's {theirs} (of 50,000 images)"
        claims.append(Claim(text, own[row, count] < theirs, numbers))
    ancestral = ("ancestral, diagonal", "ancestral, spectral", "ancestral, Krylov")
    compared = [row for row in ancestral if row in found.rows and "ancestral, isotropic" in found.rows]
    return claims + [found.below(row, "ancestral, isotropic", FID) for row in compared]


def no_worse(text: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Claim:
    """The claim that a FID is not higher than another by more than the interval of their difference.

    The same seed is left out of both, since runs of one seed begin from the same noise.
    """
    gap = FID.of(first, second)
    numbers = (
        f"{FID.text(FID.of(first))} at {first['evaluations']:,.0f} evaluations against {FID.text(FID.of(second))} at "
        f"{second['evaluations']:,.0f}; difference {FID.text(gap, '+')}; {first['images']:,} images"
    )
    return Claim(text, None if math.isnan(gap.half) else gap.value <= gap.half, numbers)
