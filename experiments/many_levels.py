"""Samplers over many levels on exact mixtures: how their laws approach the target, and what that
costs.

No network is in it: the denoiser is the mixture's own, so what is missed is the sampler's doing
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from experiments.drawing import legend
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results, axis
from mmdgs import samplers
from mmdgs.demo.toys import against_truth, four_gaussians
from mmdgs.moments import FLOOR, DiagonalMoments, FullMoments, IsotropicMoments
from mmdgs.moments.fitted import by_score
from mmdgs.moments.probes import Rademacher
from mmdgs.noise import NoiseLevel, transition
from mmdgs.randomness import seeded
from mmdgs.report.drawing import new_figure
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.samplers import (
    DDIM,
    ConsistentAnnealed,
    FixedVariance,
    Heun,
    Multistep,
    Plan,
    ancestral_plan,
    gibbs_plan,
    langevin_plan,
)
from mmdgs.schedules import Levels, geometric
from mmdgs.targets import GaussianMixture
from mmdgs.workspace import Part

FIRST, LAST = 8.0, 0.02
SWEEPS, PROBES = 3, 3
RATE = 0.1
FIT_POINTS = 4_000
LIKELY_DRAWS = 20_000
PAPERS = {"1 sweep": 1, "3 sweeps": 3, "10 sweeps": 10}
ORDERS = {row: (sweeps, True) for row, sweeps in PAPERS.items()}
ORDERS |= {f"{row}, down first": (sweeps, False) for row, sweeps in PAPERS.items()}
"""Sweeps, and whether the first one adds noise."""
EXCESS = Measure("excess", "excess of the variance", 1, "zero", percent=True)
MMD = Measure("mmd", "MMD", 4, "less")
DEFICIT = Measure("deficit", "deficit", 2)
EVALUATIONS = Measure("evaluations", "evaluations of the denoiser", 0)


@dataclass(frozen=True)
class ManyLevelSettings:
    """How many levels are tried, and how many chains judge them."""

    counts: tuple[int, ...] = axis((4, 8, 16, 32, 64, 128, 256))
    chains: int = 1_000
    groups: int = 4


FULL = ManyLevelSettings()
QUICK = ManyLevelSettings(counts=(4, 16, 64), chains=400, groups=2)


def two_modes() -> GaussianMixture:
    """Two modes of unequal weight in 64 dimensions, with correlations of their own."""
    factors = torch.randn(2, 64, 64, generator=seeded(2), dtype=torch.float64)
    covariances = 0.3 * (factors @ factors.mT / 64 + 0.1 * torch.eye(64, dtype=torch.float64))
    means = torch.zeros(2, 64, dtype=torch.float64)
    means[0, :8], means[1, :8] = 1.0, -1.0
    return GaussianMixture([0.7, 0.3], means, covariances)


TARGETS: dict[str, Callable[[], GaussianMixture]] = {
    "four modes in 2-D": four_gaussians,
    "two modes in 64-D": two_modes,
}


def _diagonal(target: GaussianMixture) -> DiagonalMoments:
    return DiagonalMoments(target.denoiser(), probes=PROBES, floor=FLOOR, design=Rademacher())


def _isotropic(target: GaussianMixture, levels: Levels) -> IsotropicMoments:
    x = target.sample((FIT_POINTS,), generator=seeded(0, "isotropic data"))
    return IsotropicMoments.fit(
        target.denoiser(), x, levels, generator=seeded(0, "isotropic"), variance_of=by_score
    )


FULL_ROW = "ancestral, full"
SAMPLERS: dict[str, Callable[[GaussianMixture, Levels], Plan]] = {
    "Langevin": lambda t, levels: langevin_plan(t.denoiser(), levels, rate=RATE),
    "Gibbs (paper)": lambda t, levels: gibbs_plan(_diagonal(t), levels, sweeps=SWEEPS),
    "Gibbs, down first": lambda t, levels: gibbs_plan(
        _diagonal(t), levels, sweeps=SWEEPS, noise_first=False
    ),
    "consistent annealing": lambda t, levels: Plan.down(ConsistentAnnealed(t.denoiser()), levels),
    "ancestral, small": lambda t, levels: Plan.down(FixedVariance(t.denoiser()), levels),
    "ancestral, large": lambda t, levels: Plan.down(
        FixedVariance(t.denoiser(), large=True), levels
    ),
    "ancestral, isotropic": lambda t, levels: ancestral_plan(_isotropic(t, levels), levels),
    "ancestral, diagonal": lambda t, levels: ancestral_plan(_diagonal(t), levels),
    FULL_ROW: lambda t, levels: ancestral_plan(FullMoments(t.denoiser()), levels),
    "DDIM": lambda t, levels: Plan.down(DDIM(t.denoiser()), levels),
    "Heun": lambda t, levels: Plan.down(Heun(t.denoiser()), levels),
    "multistep": lambda t, levels: Plan.down(Multistep(t.denoiser()), levels),
    "multistep, eta 1": lambda t, levels: Plan.down(Multistep(t.denoiser(), eta=1.0), levels),
}


def run(context: Context) -> Outcome:
    """Run every sampler with every number of levels on every target, and judge the last states."""
    settings = context.sized(FULL, QUICK)
    results, floors = {}, {}
    for title, make in TARGETS.items():
        # A dense eigendecomposition in 64 dimensions for each chain and step takes too long.
        rows = [row for row in SAMPLERS if row != FULL_ROW or make is four_gaussians]
        cells = {(row, count): count for row in rows for count in settings.counts}
        measure = partial(_measured, title, settings)
        grid = Grid(title, cells, measure, settings, "levels", beside=True)
        results[title] = grid.run(context)
        count, generator = settings.chains * settings.groups, seeded(context.seed, "floor")
        draws = make().sample((count,), generator=generator)
        floors[title] = MMD.of(_judged(title, draws, settings, context.seed)).value
    orders = {(row, count): order for row, order in ORDERS.items() for count in settings.counts}
    bias = Grid("order", orders, _excess, across="levels").run(context)
    records = {
        "settings": asdict(settings),
        "samplers": {title: own.records() for title, own in results.items()},
        "floors": floors,
        "bias": bias.records(),
    }
    sections = [_convergence(results, floors, settings), _bias_section(bias, settings.counts[-1])]
    return Outcome(records, sections)


def _measured(title: str, settings: ManyLevelSettings, cell: Cell) -> Part:
    mixture = TARGETS[title]()
    plan = SAMPLERS[cell.row](mixture, geometric(cell.column, FIRST, LAST))
    chains = settings.chains * settings.groups
    x0 = mixture.noised(plan.start).sample((chains,), generator=seeded(cell.seed, "start"))
    chains_run = samplers.run(plan, x0, seed=cell.seed, progress=None)
    values, cost = _judged(title, chains_run.x, settings, cell.seed), chains_run.cost
    counted = {"forwards": cost.forwards, "products": cost.products}
    return Part({**values, "evaluations": cost.evaluations, **counted})


@cache
def _mean_log_density(title: str, seed: int) -> float:
    """E[log p(x)] of a target, from draws."""
    mixture = TARGETS[title]()
    draws = mixture.sample((LIKELY_DRAWS,), generator=seeded(seed, "likely"))
    return mixture.log_prob(draws).mean().item()


def _judged(title: str, x: Tensor, settings: ManyLevelSettings, seed: int) -> dict[str, Any]:
    """Of each group of samples: MMD from fresh draws, and how much less likely than draws they are,
    in nats.
    """
    mixture, groups = TARGETS[title](), x.split(settings.chains)
    fresh = seeded(seed, "fresh draws")
    references = [mixture.sample((len(group),), generator=fresh) for group in groups]
    return against_truth(mixture, groups, references, _mean_log_density(title, seed))


def _convergence(
    results: Mapping[str, Results], floors: Mapping[str, float], settings: ManyLevelSettings
) -> Section:
    text = [
        "Every sampler walks down geometric noise levels with the exact denoiser of a Gaussian "
        "mixture. A curve that levels off above the dashed line is a sampler with a bias that "
        f"levels do not mend. Gibbs has {SWEEPS} sweeps a level, Langevin 5 steps at rate "
        f"{RATE:g}, diagonals {PROBES} probes; a product with the Jacobian counts as two "
        "evaluations."
    ]
    some = (settings.counts[0], 16, settings.counts[-1])
    shown = {n: f"{n} levels" for n in settings.counts if n in some}
    tables = []
    canvas, axes = new_figure(1, len(results), inches=(13.5, 4.6))
    for panel, (title, own) in zip(axes[0], results.items(), strict=True):
        note = (
            f"MMD from fresh draws, of {settings.groups} groups of {settings.chains:,} chains; "
            f"draws from draws {floors[title]:.4f}. Deficit: how much less likely than draws, in "
            f"nats; negative where too narrow."
        )
        name = f"{title[0].upper()}{title[1:]}"
        tables.append(own.table(name, [MMD, DEFICIT], head="sampler", columns=shown, note=note))
        panel.margins(x=0.15)  # room for labels
        own.draw(panel, MMD, EVALUATIONS, intervals=False)
        panel.axhline(floors[title], color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        panel.set_title(title, fontsize=10)
    legend(canvas)
    caption = "MMD from the target against evaluations a sample; dashed: draws from draws."
    return Section("Laws of the samplers", text, tables, [Figure("many_levels", caption, canvas)])


def _gibbs_variance(
    levels: Sequence[NoiseLevel], sweeps: int, noise_first: bool, start: float = 1.0
) -> float:
    """Noise up adds b^2; down is x_s = c x_t + noise with c and the noise's variance from the
    bridge (posterior.py).

    Chains start with the variance start + sigma_1^2: that of noised data, or with start = 0 that of
    noise alone.
    """
    variance = start + levels[0].sigma ** 2
    for noisier, cleaner in pairwise(levels):
        _, b = transition(cleaner, noisier)
        shrink = 1 / (1 + noisier.sigma**2)  # D = x_t shrink, C = sigma^2 shrink
        gain = b**2 / noisier.sigma**2
        slope = gain * shrink + 1 - gain
        fresh = gain**2 * noisier.sigma**2 * shrink + gain * cleaner.sigma**2
        for sweep in range(sweeps):
            up = 0.0 if sweep == 0 and not noise_first else b**2
            variance = slope**2 * (variance + up) + fresh
    return variance / (1 + levels[-1].sigma ** 2) ** 2  # the last step takes the mean


def _excess(cell: Cell) -> Part:
    """How much too large the variance of Algorithm 2 is on a Gaussian of variance 1."""
    return Part({"excess": _gibbs_variance(geometric(cell.column, FIRST, LAST), *cell.what) - 1})


def _bias_section(bias: Results, most: int) -> Section:
    text = [
        "In the paper's Algorithm 2 every sweep begins with noise, the first at a pair of levels "
        "too. So the chain lags behind the falling levels: for a Gaussian, where the law is exact, "
        "by one part in 2 K - 1 of its variance with K sweeps, in the limit of many levels and of "
        "starting noise much larger than the data."
    ]
    caption = (
        "Excess of the variance for a standard Gaussian: the paper's order (solid), down first."
    )
    figure = bias.curves("many_levels_order", caption, EXCESS, log="x")
    table = bias.table("Excess of the variance of a standard Gaussian", [EXCESS], head="order")
    claims = [bias.below(f"{row}, down first", row, EXCESS, [most]) for row in PAPERS]
    return Section("The order of Gibbs sweeps", text, [table], [figure], claims)
