"""Table 2 of the paper: Langevin dynamics against pseudo-Gibbs on one network, and the other samplers beside them.

All rows have the same network, the same seeds and the same number of images; the paper's own two have more seeds
besides, and are compared by these. The cheapest rows come first, so that a run that is stopped has the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from mmdgs.cost import PRODUCT
from mmdgs.errors import UsageError
from mmdgs.generation import Method
from mmdgs.generation.methods import exploding_levels
from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.sampler_cells import Cells, Judge, References, TimeIsUp
from mmdgs.lab.small_models import QUICK_TRAINING, check_model, model_of
from mmdgs.lab.table2_report import (
    DOWN,
    GIBBS,
    ISOTROPIC,
    LANGEVIN,
    ROWS,
    SPECTRAL,
    image_section,
    table_section,
    tuning_section,
)
from mmdgs.lab.workspace import Part
from mmdgs.models import Model
from mmdgs.samplers.langevin_rates import LARGEST, suggested_rate
from mmdgs.schedules import Levels, geometric
from mmdgs.training import Recipe

DATA, MODEL = "cifar10", "cifar10"
TRAIN = (
    "mmdgs train --data cifar10 --param edm --levels geometric:232:50:0.01 --model unet-paper --precision bf16 "
    "--out runs/many"
)
SHOWN = 10
SEED_STRIDE = 1_000
"""Between the seeds of runs: a run takes its noise from its seed and the next one."""
PAPERS = (LANGEVIN, GIBBS)
FURTHER = 3
"""Rates of Langevin dynamics that are tried at most beyond those of the settings."""


@dataclass(frozen=True)
class Table2Settings:
    """Numbers of images, levels and steps; those of the paper where it has one."""

    images: int = 5_000  # of all seeds together
    seeds: int = 5
    papers_seeds: int = 10  # of as many images each, for the paper's own rows
    levels: int = 232
    langevin_steps: int = 5
    sweeps: int = 3
    probes: int = 3
    fewer_levels: tuple[int, ...] = (16,)  # of Gibbs without products, besides those of Langevin's cost
    heun: tuple[int, ...] = (18,)
    steps: tuple[int, ...] = (25, 100)  # of DDIM and ancestral sampling without products
    probed_steps: tuple[int, ...] = (25,)
    krylov_steps: int = 5
    krylov: tuple[int, ...] = (25,)
    rate_factors: tuple[float, ...] = (0.5, 1.0, 2.0)  # of the rate that NCSNv2's analysis suggests
    tuning_images: int = 500
    fit_images: int = 2_000
    batch_size: int = 500
    precision: str = "bf16"
    metrics: tuple[str, ...] = ("fid", "is", "precision-recall", "diversity")
    reference_limit: int | None = None

    @property
    def images_a_seed(self) -> int:
        return self.images // self.seeds

    @property
    def measure(self) -> str:
        """The number that the samplers are compared by."""
        return "fid" if "fid" in self.metrics else "diversity"


FULL = Table2Settings()
QUICK = Table2Settings(
    images=10, seeds=2, papers_seeds=3, levels=8, heun=(4,), steps=(4, 8), probed_steps=(4,), krylov_steps=2,
    krylov=(4,), fewer_levels=(), rate_factors=(0.5, 1.0, 2.0), tuning_images=4, fit_images=16, precision="float32",
    metrics=("diversity",), reference_limit=500,
)  # fmt: skip
QUICK_RECIPE = Recipe(
    data=DATA, size=16, limit=2_000, model="unet-tiny", param="edm", levels="geometric:40:20:0.02",
    training=QUICK_TRAINING,
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A row of the table with its number of levels or steps."""

    row: str
    steps: int
    method: Method

    @property
    def name(self) -> str:
        return f"{self.row}, {self.steps}"


def run(context: Context) -> Outcome:
    """Tune Langevin's step, sample by every row and seed, and measure."""
    settings = context.sized(FULL, QUICK)
    settings = _of_seeds(settings, context.seeds or settings.seeds)
    chosen = chosen_rows(context.only)
    model = many_level_model(context)
    references = References(DATA, context.data_dir, model.shape[1], settings.reference_limit)
    judge = Judge.of(context, settings.metrics, references)
    cells = Cells(context, model, DATA, settings.fit_images, settings.batch_size, settings.precision, SHOWN)
    tuning = tuned(cells, judge, settings) if LANGEVIN in chosen else None
    found: dict[tuple[str, int], Part] = {}
    left: list[str] = []
    every = wanted(model, 1.0 if tuning is None else tuning["factor"], settings)
    for cell in (one for one in every if one.row in chosen):
        papers = cell.row in PAPERS and cell.steps == settings.levels
        seeds = [context.seed + SEED_STRIDE * i for i in range(settings.papers_seeds if papers else settings.seeds)]
        key = {"judge": judge.key(), "seeds_of_the_table": settings.seeds}
        if context.time_is_up and not cells.has(cell.name, cell.method, settings.images_a_seed, seeds, key):
            left.append(cell.name)
            continue
        judged = partial(_judged, judge, settings)
        try:
            part = cells.sampled(cell.name, cell.method, settings.images_a_seed, seeds, judged, key)
        except TimeIsUp:
            left.append(cell.name)
        else:
            found[cell.row, cell.steps] = part
    if not found:
        raise UsageError(
            f"the {context.minutes:g} minutes were over before the first row"
            + (": " if tuning is None else ": Langevin's step size is tuned, and ")
            + "--resume goes on from there"
        )
    records = [{"row": row, "steps": steps, **part.values} for (row, steps), part in found.items()]
    pictures = {key: part.tensors["shown"] for key, part in found.items()}
    equal = equal_cost_levels(settings)
    paper = Table2Settings()
    named = asdict(settings) | {
        "model": model.source,
        "equal_cost_levels": equal,
        "measure": settings.measure,
        "left": left,
        "paper_evaluations": {
            "Langevin": langevin_evaluations(paper.levels, paper),
            "Gibbs": gibbs_evaluations(paper.levels, paper),
        },
    }
    sections = [
        table_section(records, named, quick=context.quick),
        *([] if tuning is None else [tuning_section(tuning, named)]),
        image_section(pictures, quick=context.quick),
    ]
    return Outcome({"settings": named, "tuning": tuning, "samplers": records}, sections)


def _of_seeds(settings: Table2Settings, seeds: int) -> Table2Settings:
    """With another number of seeds, and as many more of the paper's rows as before."""
    if settings.images < 2 * seeds or settings.images % seeds:
        raise UsageError(
            f"images must be a multiple of the number of seeds, and at least 2 for each; got {settings.images:,} "
            f"images of {seeds} seeds"
        )
    papers = max(seeds, round(settings.papers_seeds * seeds / settings.seeds))
    return replace(settings, seeds=seeds, papers_seeds=papers)


def chosen_rows(names: Sequence[str] | None) -> tuple[str, ...]:
    """The rows that are asked for, else all."""
    for name in names or ():
        if name not in ROWS:
            raise UsageError(f"--only must be a row of the table ({'; '.join(ROWS)}), got {name!r}")
    return tuple(names or ROWS)


def _judged(judge: Judge, settings: Table2Settings, x: Tensor, label: str) -> dict[str, Any]:
    """The numbers of the seeds that all rows have, and the FID of all images where a row has more (`all`)."""
    values = judge(x[: settings.images], label, settings.seeds)
    if len(x) > settings.images and settings.measure == "fid":
        values["all"] = replace(judge, metrics=("fid",))(x, label, len(x) // settings.images_a_seed)
    return values


def many_level_model(context: Context) -> Model:
    """The model that --model names, or the one that ships; quick runs train a tiny one where none is named."""
    model = model_of(context, MODEL, replace(QUICK_RECIPE, data=DATA, data_dir=context.data_dir), TRAIN)
    return check_model(model, "; single-level models are for `mmdgs reproduce cifar10`")


def gibbs_evaluations(levels: int, settings: Table2Settings) -> float:
    """What Algorithm 2 costs: a mean and its products for each sweep at each pair of levels, and the last mean."""
    return settings.sweeps * (levels - 1) * (1 + PRODUCT * settings.probes) + 1


def langevin_evaluations(levels: int, settings: Table2Settings) -> float:
    """What Algorithm 1 costs: every step at every level, and the last mean."""
    return settings.langevin_steps * levels + 1


def equal_cost_levels(settings: Table2Settings) -> int:
    """Levels at which Gibbs costs as much as Langevin with all of them, or as little more or less as can be."""
    budget = langevin_evaluations(settings.levels, settings)
    about = 1 + (budget - 1) / (settings.sweeps * (1 + PRODUCT * settings.probes))
    return max(
        2, min((math.floor(about), math.ceil(about)), key=lambda n: abs(gibbs_evaluations(n, settings) - budget))
    )


def path(model: Model, count: int) -> Levels:
    """Geometric levels between the ends of the model's variance-exploding ones."""
    ends = exploding_levels(model)
    return geometric(count, ends[0].sigma, ends[-1].sigma)


def wanted(model: Model, factor: float, settings: Table2Settings) -> list[Cell]:
    """All cells, the cheapest first; but those beyond the paper that cost as much as its own come after them."""
    equal = equal_cost_levels(settings)
    own = len(model.levels)

    def along(row: str, method: Method, counts: tuple[int, ...]) -> list[Cell]:
        counts = tuple(dict.fromkeys(min(n, own) for n in counts))
        return [Cell(row, n, replace(method, steps=n)) for n in counts]

    def langevin(count: int) -> Cell:
        levels = path(model, count)
        rate = min(LARGEST, factor * suggested_rate(levels, settings.langevin_steps))
        return Cell(LANGEVIN, count, Method("langevin", levels, sweeps=settings.langevin_steps, rate=rate))

    probed = Method("gibbs", covariance="rademacher", probes=settings.probes, sweeps=settings.sweeps)
    kinds = {
        GIBBS: probed,
        DOWN: replace(probed, sampler="gibbs-down"),
        ISOTROPIC: Method("gibbs-down", covariance="isotropic", sweeps=settings.sweeps),
        SPECTRAL: Method("gibbs-down", covariance="spectral", sweeps=settings.sweeps),
    }

    def gibbs(row: str, count: int) -> Cell:
        return Cell(row, count, replace(kinds[row], levels=path(model, count)))

    few = tuple(dict.fromkeys((*settings.fewer_levels, equal)))
    return [
        *(Cell("Heun", n, Method("heun", steps=n)) for n in settings.heun),
        *along("DDIM", Method("ddim"), settings.steps),
        *along("ancestral, small", Method("ancestral", covariance="small"), settings.steps),
        *along("ancestral, large", Method("ancestral", covariance="large"), settings.steps),
        *along("ancestral, isotropic", Method("ancestral", covariance="isotropic"), settings.steps),
        *along("ancestral, spectral", Method("ancestral", covariance="spectral"), settings.steps),
        *along(
            "ancestral, diagonal",
            Method("ancestral", covariance="diagonal", probes=settings.probes),
            settings.probed_steps,
        ),
        *(gibbs(row, n) for n in few for row in (ISOTROPIC, SPECTRAL)),
        Cell("consistent annealing", settings.levels, Method("consistent", path(model, settings.levels))),
        *along(
            "ancestral, Krylov",
            Method("ancestral", covariance="krylov", krylov_steps=settings.krylov_steps),
            settings.krylov,
        ),
        langevin(equal),
        gibbs(GIBBS, equal),
        langevin(settings.levels),
        gibbs(GIBBS, settings.levels),
        gibbs(SPECTRAL, settings.levels),
        gibbs(DOWN, equal),
    ]


def tuned(cells: Cells, judge: Judge, settings: Table2Settings) -> dict[str, Any]:
    """The FID of few images at multiples of the suggested rate; the best factor, and whether it lies inside."""
    levels = path(cells.model, settings.levels)
    suggested = suggested_rate(levels, settings.langevin_steps)
    judge = replace(judge, metrics=(settings.measure,))
    tried: dict[float, dict[str, float]] = {}

    def value(factor: float) -> float:
        rate = min(LARGEST, factor * suggested)
        method = Method("langevin", levels, sweeps=settings.langevin_steps, rate=rate)
        seed = cells.context.seed + SEED_STRIDE // 2
        name = f"tuning, {factor:g}"
        part = cells.sampled(name, method, settings.tuning_images, [seed], judge, {"judge": judge.key()})
        found: float = part.values[settings.measure]
        tried[factor] = {"factor": factor, "rate": rate, settings.measure: found}
        return found if settings.measure == "fid" else abs(found - 1)  # quick runs have no FID: as diverse as data

    factor, inside = best_rate(searched(value, settings.rate_factors, LARGEST / suggested))
    return {
        "suggested": suggested, "factor": factor, "rate": tried[factor]["rate"], "inside": inside,
        "tried": [tried[f] for f in sorted(tried)],
    }  # fmt: skip


def searched(value: Callable[[float], float], factors: Sequence[float], largest: float) -> dict[float, float]:
    """Values at all factors, and further out by halves or doubles while the last is best, FURTHER times at most."""
    values = {factor: value(factor) for factor in factors}
    for _ in range(FURTHER):
        best, inside = best_rate(values)
        following = best / 2 if best == min(values) else 2 * best
        if inside or (following > best >= largest):
            break
        values[following] = value(following)
    return values


def best_rate(values: Mapping[float, float]) -> tuple[float, bool]:
    """The rate of the smallest value, and whether it lies inside the rates that were tried."""
    rates = sorted(values)
    best = min(rates, key=lambda rate: values[rate])
    return best, rates[0] < best < rates[-1]


EXPERIMENT = Experiment(
    "table2",
    "Langevin against Gibbs on one network, and all other samplers",
    f"The paper's Table 2: FID, precision, recall and diversity of {len(ROWS)} samplers of one network (--model, else "
    "the one that ships) with intervals over seeds, at the paper's settings and at equal cost; FID against network "
    "evaluations.",
    run,
)
