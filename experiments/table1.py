"""Table 1, MMD of Gibbs chains on 2-D data: the authors' protocol, and one that can tell
methods apart.

The paper's claim: with a full covariance from the denoiser chains are nearer to the data than with
one variance, and with that nearer than with a learned variance. One more row learns the covariance
by the second-order score (Meng et al., 2021): with x_t = x + sigma z and the score s of p~,

    R = Cov[x | x_t] / sigma^2 = I + sigma^2 hess log p~ = E[z z' | x_t] - u u',    u = sigma s

so R minimises E ||R(x_t) - (z z' - u u')||^2: denoising second-order score matching, times sigma^4.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor, nn

from experiments.drawing import plain_logs
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results
from mmdgs.data import TOYS
from mmdgs.demo import toys
from mmdgs.demo.figures import DEFICIT, MMD, draw_many
from mmdgs.demo.page import PUBLISHED, RUNS, published
from mmdgs.demo.toys import COLOURS, FLOOR, LEVEL, TRAINED, Fitted, Sets, Toys, ToySettings
from mmdgs.denoisers import Denoiser, denoise, energy_denoiser
from mmdgs.linalg.operators import Dense
from mmdgs.linalg.repair import lifted
from mmdgs.moments.contract import FLOOR as PAPER_FLOOR, require_batch
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, randn_like
from mmdgs.report.drawing import labelled, new_figure
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.tables import Table
from mmdgs.workspace import Part

METHODS = {"learned": toys.METHODS["learned"], "second": "learned second order", **toys.METHODS}
PAPERS = ("full", "isotropic", "learned")
"""The paper's rows, from its smallest MMD to its largest."""
MODES = [
    Measure(f"mode_{k}", where, 3)
    for k, where in enumerate(("(-1,-1)", "(-1,1)", "(1,1)", "(1,-1)"))
]


# --- the second-order score


@dataclass(frozen=True)
class SecondOrderMoments:
    """A denoiser's mean, and a covariance sigma^2 R of a network with outputs R_11, R_12, R_22.

    For x_t (B, 2) and alpha = 1. Eigenvalues are lifted to the floor as those of `FullMoments`.
    """

    denoiser: Denoiser
    network: nn.Module
    floor: float = PAPER_FLOOR

    def ratio(self, x_t: Tensor) -> Tensor:
        """R(x_t), (B, 2, 2)."""
        return self.network(x_t)[:, [0, 1, 1, 2]].unflatten(1, (2, 2))

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_batch(x_t, level)
        cov = Dense.from_matrix(level.variance * self.ratio(x_t), x_t.shape[1:])
        values, repaired = lifted(cov.values, self.floor * level.variance)
        mean = denoise(self.denoiser, x_t, level)
        return Gaussian(mean, Dense(values, cov.vectors, cov.event_shape), repaired)


def second_order_loss(
    moments: SecondOrderMoments, x: Tensor, level: NoiseLevel, *, generator: Generator
) -> Tensor:
    """||R(x_t) - (z z' - u u')||^2 for each row of x (B, 2); only R's network gets a gradient."""
    z = randn_like(x, generator)
    x_t = x + level.sigma * z
    u = (denoise(moments.denoiser, x_t, level).detach() - x_t) / level.sigma
    target = torch.einsum("bi,bj->bij", z, z) - torch.einsum("bi,bj->bij", u, u)
    return (moments.ratio(x_t) - target).square().sum((1, 2))


def _with_second_order(setup: Toys, context: Context, sets: Sets) -> dict[str, list[Fitted]]:
    """What was fitted, with a network of the second-order score beside."""

    def network(fitted: Fitted) -> tuple[Denoiser, MLP]:
        mean = energy_denoiser(setup.trained(fitted.toy, fitted.seed, "energy"))
        built = (3, lambda net: partial(second_order_loss, SecondOrderMoments(mean, net)))
        return mean, setup.trained(fitted.toy, fitted.seed, "second", built)

    every = [fitted for fitted_sets in sets.values() for fitted in fitted_sets]
    setup.together([partial(network, fitted) for fitted in every], "training")
    return {
        name: [
            replace(run, moments=run.moments | {"second": SecondOrderMoments(*network(run))})
            for run in fitted
        ]
        for name, fitted in sets.items()
    }


# --- the table


def toys_of(context: Context) -> Toys:
    """The 2-D experiments at the size of a run."""
    settings = toys.QUICK if context.quick else ToySettings()
    training = toys.QUICK.training if context.short_training else settings.training
    settings = replace(settings, training=training, seeds=context.seeds or settings.seeds)
    return Toys(context.workspace, context.device, settings)


def single_grid(
    context: Context, sets: Sets, settings: ToySettings, methods: Sequence[str]
) -> Results:
    """The authors' protocol: single chains, each against its training data."""

    def measure(cell: Cell) -> Part:
        return toys.single_chains(sets[cell.column], settings, cell.row)

    cells = {(method, name): method for name in sets for method in methods}
    return Grid("single", cells, measure, settings, across="data", beside=True).run(context)


def many_grid(
    context: Context, sets: Sets, settings: ToySettings, methods: Sequence[str], start: str
) -> Results:
    """The sound protocol: many chains from the density or the authors' start, to fresh data."""

    def measure(cell: Cell) -> Part:
        return toys.many_chains(sets[cell.column], settings, cell.row, start, cell.seed)

    cells = {(method, name): start for name in sets for method in (*methods, FLOOR)}
    name = f"many-{start}"
    return Grid(name, cells, measure, settings, across="data", beside=True).run(context)


def run(context: Context) -> Outcome:
    """All rows of both protocols, for each data set asked for."""
    setup = toys_of(context)
    settings, methods = setup.settings, toys.METHODS if context.quick else METHODS
    sets: Sets = setup.fit(context.data or TOYS, context.seed)
    if not context.quick:
        sets = _with_second_order(setup, context, sets)
    titles = {name: fitted[0].toy.title for name, fitted in sets.items()}
    single = single_grid(context, sets, settings, list(methods))
    density, start = (
        many_grid(context, sets, settings, list(methods), where) for where in ("density", "start")
    )
    mmds = "biased V-statistic; bandwidths: mean pairwise squared distance x {1/4, 1/2, 1, 2, 4}"
    records = {
        "settings": {"sigma": LEVEL.sigma, **asdict(settings), "mmd": mmds},
        "single": single.records(),
        "many": {"density": density.records(), "start": start.records()},
    }
    sections = [
        _single_section(single, titles, settings, methods),
        _many_section(density, start, titles, settings, methods),
    ]
    return Outcome(records, sections)


def _single_section(
    results: Results, titles: Mapping[str, str], settings: ToySettings, methods: Mapping[str, str]
) -> Section:
    title = (
        f"Authors' protocol: MMD of one chain of {settings.chain_steps:,} steps (mean ± std of "
        f"{settings.seeds} runs)"
    )
    note = (
        "Smaller is better. Bandwidths: the mean pairwise squared distance times "
        "{1/4, 1/2, 1, 2, 4}. Bold: the best of the posteriors that come from a network, where 95% "
        "intervals tell it from all others. The last two rows know the density."
    )
    shown: Any = {"head": "posterior", "rows": methods, "columns": titles, "note": note}
    table = results.table(title, [RUNS], compared=TRAINED, **shown)
    text = (
        "On MoG every chain starts inside one mode, and exact Gibbs seldom leaves it. A difference "
        "between methods that is smaller than the spread between runs of exact Gibbs says nothing "
        "about them."
    )
    claims = [results.below(*pair, MMD, [name]) for name in titles for pair in pairwise(PAPERS)]
    caption = (
        "Every run of the authors' protocol (dots), their mean (bar) and the paper's (circle)."
    )
    figure = Figure("table1_single", caption, _draw_single(results, titles, methods))
    table = _with_papers(table, titles, methods)
    return Section("Table 1, the authors' protocol", [text], [table], [figure], claims)


def _with_papers(table: Table, titles: Mapping[str, str], methods: Mapping[str, str]) -> Table:
    """A table with a column for each data set, and the paper's value beside each."""
    header, rows = list(table.header[:1]), [list(row[:1]) for row in table.rows]
    for j, (name, title) in enumerate(titles.items(), 1):
        header += [table.header[j], f"{title}, paper"]
        for own, row, method in zip(rows, table.rows, methods, strict=True):
            own += [row[j], published(name, method)]
    best = frozenset((i, 2 * j - 1) for i, j in table.best)
    return replace(table, header=header, rows=rows, best=best)


def _many_section(
    density: Results,
    start: Results,
    titles: Mapping[str, str],
    settings: ToySettings,
    methods: Mapping[str, str],
) -> Section:
    rows = methods | {FLOOR: "data floor"}
    shown: Any = {"head": "posterior", "columns": titles}
    compared: Any = {**shown, "rows": rows, "compared": TRAINED}
    steps = f"after {settings.many_steps} steps (mean ± 95% interval)"
    note = (
        f"The last states of {settings.seeds} groups of {settings.many_chains:,} chains, each "
        f"against fresh data. Data floor: as many independent draws from the true density in place "
        "of the chains. Bold: the best of the posteriors that come from a network, where intervals "
        "tell it from all others."
    )
    deficit = (
        "How much less likely the samples are under the true density than data are. Zero is right; "
        "positive: samples lie where data are rare; negative: they are too concentrated."
    )
    title = "Many chains from the true density"
    above = f"{title}: MMD above that of analytic full (mean ± 95% interval)"
    paired = "Differences within groups, which share their starts and their noise."
    nats = f"{title}: log-density deficit in nats {steps}"
    authors = f"Many chains from the authors' starting point: MMD {steps}"
    tables = [
        density.table(f"{title}: MMD {steps}", [MMD], note=note, **compared),
        density.table(above, [MMD], rows=methods, against="full", note=paired, **shown),
        density.table(nats, [DEFICIT], note=deficit, **compared),
        start.table(authors, [MMD], note=note, **compared),
    ]
    if "mog" in titles:
        for results, where in ((density, "the true density"), (start, "one mode")):
            title = f"MoG: share of many chains from {where} in each mode at the end (true: 0.25)"
            modes = results.table(title, MODES, head="posterior", rows=methods, columns={"mog": ""})
            tables.append(modes)
    text = (
        "Started from the true density, how far the MMD rises above the data floor is the kernel's "
        "own error, free of mixing luck; the log-density deficit also sees how sharp a curve is "
        "drawn. From one starting point the MMD also measures mixing, and exact Gibbs is the row "
        "to compare with."
    )
    pairs = (("full", "isotropic"), ("full", "diagonal"), ("isotropic", "learned"))
    claims = [density.below(*pair, measure) for measure in (MMD, DEFICIT) for pair in pairs]
    caption = "Many chains from the true density, with 95% intervals. Dashed: the data floor."
    figure = Figure("table1_many", caption, draw_many(density.cells, titles, methods))
    return Section("A protocol that can tell methods apart", [text], tables, [figure], claims)


def _draw_single(results: Results, titles: Mapping[str, str], methods: Mapping[str, str]) -> Canvas:
    canvas, axes = new_figure(1, len(titles), inches=(3.6 * len(titles) + 1.2, 2.9))
    for axis, (name, title) in zip(axes[0], titles.items(), strict=True):
        papers = {method: mean for method, (mean, _) in PUBLISHED[name].items()}
        shown = list(papers.values())
        for y, method in enumerate(methods):
            values, colour = results.values(method, name)["mmd"], COLOURS[method]
            shown += values
            axis.plot(values, [y] * len(values), "o", color=colour, alpha=0.6, markersize=4)
            axis.plot([statistics.mean(values)] * 2, [y - 0.3, y + 0.3], color=colour, linewidth=2)
            if method in papers:
                axis.plot(papers[method], y, "o", mfc="none", mec="black", markersize=8)
        axis.set(xscale="log", xlim=(min(shown) / 1.3, 1.3 * max(shown)))
        plain_logs(axis, (1.0, 3.0))
        labelled(axis, title, "MMD, single chain", "")
        labels = list(methods.values()) if axis is axes[0][0] else [""] * len(methods)
        axis.set_yticks(range(len(methods)), labels, fontsize=8)
        axis.invert_yaxis()
    return canvas
