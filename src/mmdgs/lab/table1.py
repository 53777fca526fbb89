"""Table 1: MMD of Gibbs chains on three 2-D sets; the authors' protocol, and one that can tell methods apart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from mmdgs.lab.drawing import GREY, labelled, new_figure, plain_logs, style
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Measure, Number, Results
from mmdgs.lab.report import Figure, Section
from mmdgs.lab.toys import (
    FLOOR,
    LEVEL,
    TRAINED,
    ToySettings,
    fit,
    many_chains,
    single_chains,
    toy_settings,
)
from mmdgs.tables import Table

# The paper's Table 1: mean and standard deviation of five runs.
PUBLISHED = {
    "mog": {"learned": (0.929, 0.343), "isotropic": (0.724, 0.361), "full": (0.305, 0.141)},
    "rings": {"learned": (0.364, 0.044), "isotropic": (0.006, 0.002), "full": (0.005, 0.001)},
    "roll": {"learned": (0.053, 0.011), "isotropic": (0.030, 0.001), "full": (0.016, 0.002)},
}
PAPERS = ("full", "isotropic", "learned")
"""The paper's rows, from its smallest MMD to its largest."""
RUNS = Measure("mmd", "MMD", better="less", deviation=True)
MMD = Measure("mmd", "MMD", better="less")
DEFICIT = Measure("deficit", "log-density deficit (nats)", 3, "zero")
MIXING = [
    Measure("ess", "effective samples", 0),
    Measure("switches", "mode switches", 1),
    Measure("repaired", "repaired", 3, percent=True),
]
MODES = [Measure(f"mode_{k}", where, 3) for k, where in enumerate(("(-1,-1)", "(-1,1)", "(1,1)", "(1,-1)"))]


def run(context: Context) -> Outcome:
    """All rows of both protocols, for each data set asked for."""
    settings = toy_settings(context)
    sets = fit(context, settings)
    titles = {name: fitted[0].toy.title for name, fitted in sets.items()}
    single = single_chains(context, sets, settings)
    many = {start: many_chains(context, sets, settings, start) for start in ("density", "start")}
    records = {
        "settings": {
            "sigma": LEVEL.sigma,
            **asdict(settings),
            "mmd": "biased V-statistic; bandwidths: mean pairwise squared distance x {1/4, 1/2, 1, 2, 4}",
        },
        "single": single.records(),
        "many": {start: found.records() for start, found in many.items()},
    }
    sections = [_single_section(single, titles, settings), _many_section(many, titles, settings)]
    return Outcome(records, sections)


def _single_section(found: Results, titles: Mapping[str, str], settings: ToySettings) -> Section:
    table = found.table(
        f"Authors' protocol: MMD of one chain of {settings.chain_steps:,} steps (mean ± std of {settings.seeds} runs)",
        [RUNS],
        head="posterior",
        rows=settings.methods,
        columns=titles,
        compared=TRAINED,
        note="Smaller is better. Bandwidths: the mean pairwise squared distance times {1/4, 1/2, 1, 2, 4}. Bold: the "
        "best of the posteriors that come from a network, where 95% intervals tell it from all others. The last two "
        "rows know the density.",
    )
    mixing = found.listing(
        "Single chains: mixing and repairs",
        MIXING,
        head="posterior",
        note="Effective samples of one chain, worst coordinate (Geyer's estimate). Repaired: the fraction of "
        "covariance eigenvalues or variances lifted to the floor.",
    )
    text = [
        "On MoG every chain starts inside one mode, and exact Gibbs seldom leaves it. A difference between methods "
        "that is smaller than the spread between runs of exact Gibbs says nothing about the methods."
    ]
    claims = [found.below(*pair, MMD, [name]) for name in titles for pair in pairwise(PAPERS)]
    caption = "Every run of the authors' protocol (dots), their mean (bar) and the paper's mean (open circle)."
    figure = Figure("table1_single", caption, _draw_single(found, titles, settings.methods))
    return Section(
        "Table 1, the authors' protocol", text, [with_papers(table, titles, settings), mixing], [figure], claims
    )


def with_papers(table: Table, titles: Mapping[str, str], settings: ToySettings) -> Table:
    """A table with a column for each data set, and the paper's value beside each."""
    header, rows = list(table.header[:1]), [list(row[:1]) for row in table.rows]
    for j, (name, title) in enumerate(titles.items(), 1):
        header += [table.header[j], f"{title}, paper"]
        for own, row, method in zip(rows, table.rows, settings.methods, strict=True):
            own += [row[j], published(name, method)]
    return replace(table, header=header, rows=rows, best=frozenset((i, 2 * j - 1) for i, j in table.best))


def published(name: str, method: str) -> str:
    """The paper's MMD of a posterior, with its standard deviation; empty where it has none."""
    return Number(*PUBLISHED[name][method]).text(3) if method in PUBLISHED[name] else ""


def _many_section(many: Mapping[str, Results], titles: Mapping[str, str], settings: ToySettings) -> Section:
    density, start = many["density"], many["start"]
    all_rows = settings.methods | {FLOOR: "data floor"}
    shown: dict[str, Any] = {"head": "posterior", "columns": titles, "compared": TRAINED}
    steps = f"after {settings.many_steps} steps (mean ± 95% interval)"
    note = (
        f"The last states of {settings.seeds} groups of {settings.many_chains:,} chains, each against fresh data. "
        "Data floor: as many independent draws from the true density in place of the chains. Bold: the best of the "
        "posteriors that come from a network, where intervals tell it from all others."
    )
    tables = [
        density.table(f"Many chains from the true density: MMD {steps}", [MMD], rows=all_rows, note=note, **shown),
        density.table(
            "Many chains from the true density: MMD above that of analytic full (mean ± 95% interval)",
            [MMD],
            rows=settings.methods,
            columns=titles,
            head="posterior",
            against="full",
            note="Differences within groups, which share their starts and their noise.",
        ),
        density.table(
            f"Many chains from the true density: log-density deficit in nats {steps}",
            [DEFICIT],
            rows=all_rows,
            note="How much less likely the samples are under the true density than data are. Zero is right; positive: "
            "samples lie where data are rare; negative: they are too concentrated.",
            **shown,
        ),
        start.table(
            f"Many chains from the authors' starting point: MMD {steps}", [MMD], rows=all_rows, note=note, **shown
        ),
    ]
    if "mog" in titles:
        for found, where in ((density, "the true density"), (start, "one mode")):
            title = f"MoG: share of the many chains from {where} in each mode at the end (true: 0.25 each)"
            tables.append(found.table(title, MODES, head="posterior", rows=settings.methods, columns={"mog": ""}))
    text = [
        "Started from the true density, how far the MMD rises above the data floor is the kernel's own error, free of "
        "mixing luck; the log-density deficit also sees how sharp a curve is drawn. From one starting point the MMD "
        "also measures mixing, and exact Gibbs is the row to compare with.",
    ]
    pairs = (("full", "isotropic"), ("full", "diagonal"), ("isotropic", "learned"))
    claims = [density.below(*pair, measure) for measure in (MMD, DEFICIT) for pair in pairs]
    caption = "Many chains from the true density, with 95% intervals. Dashed: the data floor."
    figure = Figure("table1_many", caption, draw_many(density, titles, settings.methods))
    return Section("A protocol that can tell methods apart", text, tables, [figure], claims)


def _draw_single(found: Results, titles: Mapping[str, str], methods: Mapping[str, str]) -> Canvas:
    canvas, axes = new_figure(1, len(titles), inches=(3.6 * len(titles) + 1.2, 2.9))
    for axis, (name, title) in zip(axes[0], titles.items(), strict=True):
        published = {method: mean for method, (mean, _) in PUBLISHED[name].items()}
        shown = list(published.values())
        for y, method in enumerate(methods):
            values, colour = found.values(method, name)["mmd"], style(method).colour
            shown += values
            axis.plot(values, [y] * len(values), "o", color=colour, alpha=0.6, markersize=4)
            axis.plot([statistics.mean(values)] * 2, [y - 0.3, y + 0.3], color=colour, linewidth=2)
            if method in published:
                axis.plot(published[method], y, "o", mfc="none", mec="black", markersize=8)
        axis.set_xscale("log")
        axis.set_xlim(min(shown) / 1.3, 1.3 * max(shown))
        plain_logs(axis, (1.0, 3.0))
        labelled(axis, title, "MMD, single chain", "")
        named = list(methods.values()) if axis is axes[0][0] else [""] * len(methods)
        axis.set_yticks(range(len(methods)), named, fontsize=8)
        axis.invert_yaxis()
    return canvas


def draw_many(found: Results, titles: Mapping[str, str], methods: Mapping[str, str]) -> Canvas:
    """Bars of both measures: a row of panels for each, or one row where there is one data set."""
    panels = [(name, measure) for measure in (MMD, DEFICIT) for name in titles]
    rows = 1 if len(titles) == 1 else 2
    columns = len(panels) // rows
    canvas, axes = new_figure(rows, columns, inches=(3.6 * columns + 1.2, 2.6 * rows))
    for i, (name, measure) in enumerate(panels):
        axis = axes[i // columns][i % columns]
        found.draw_bars(axis, name, measure, methods, named=i % columns == 0)
        axis.axvline(found.number(FLOOR, name, measure).value, color=GREY, linestyle="--", linewidth=1.2)
        axis.set_title(titles[name] if measure is MMD and rows > 1 else "", fontsize=10)
        axis.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    return canvas
