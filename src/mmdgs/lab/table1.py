"""Table 1: MMD of Gibbs chains on three 2-D sets; the authors' protocol, and one that can tell methods apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator, NullFormatter

from mmdgs.lab.drawing import COLOURS, GREY, bars, new_figure, open_axes
from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.lab.toys import (
    LEVEL,
    METHODS,
    ORACLES,
    ToySettings,
    data_floor,
    fit,
    many_chains,
    settings_for,
    single_chains,
    together,
    toys_for,
)
from mmdgs.metrics import interval

# The paper's Table 1: mean and standard deviation of five runs.
PUBLISHED = {
    "mog": {"learned": (0.929, 0.343), "isotropic": (0.724, 0.361), "full": (0.305, 0.141)},
    "rings": {"learned": (0.364, 0.044), "isotropic": (0.006, 0.002), "full": (0.005, 0.001)},
    "roll": {"learned": (0.053, 0.011), "isotropic": (0.030, 0.001), "full": (0.016, 0.002)},
}
STARTS = ("data", "start")


def run(context: Context) -> Outcome:
    """All rows of both protocols, for each data set asked for."""
    settings = settings_for(context)
    sets: dict[str, Any] = {}
    everything = fit(context, toys_for(context), settings)
    jobs = [partial(many_chains, context, f, m, s, settings) for f in everything for m in METHODS for s in STARTS]
    jobs += [partial(single_chains, context, fitted, m, settings) for fitted in everything for m in METHODS]
    together(context, jobs, "chains")
    for fitted in everything:
        one = fitted.toy
        sets[one.name] = {
            "title": one.title,
            "isotropic_variance": fitted.isotropic_variance,
            "single": {m: single_chains(context, fitted, m, settings).values for m in METHODS},
            "many": {
                start: {m: many_chains(context, fitted, m, start, settings).values for m in METHODS} for start in STARTS
            },
            "floor": data_floor(context, one, settings),
        }
    records = {
        "settings": {
            "sigma": LEVEL.sigma,
            **asdict(settings),
            "mmd": "biased V-statistic; bandwidths: mean pairwise squared distance x {1/4, 1/2, 1, 2, 4}",
        },
        "sets": sets,
    }
    return Outcome(records, [_single_section(sets, settings), _many_section(sets, settings), _chain_section(sets)])


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def _number(value: float, around: float) -> str:
    digits = 4 if abs(value) < 0.1 else 3
    return f"{value:.{digits}f}" if math.isnan(around) else f"{value:.{digits}f} ± {around:.{digits}f}"


Reader = Callable[[dict[str, Any], str], Sequence[float]]
"""(data set's record, method) -> the values of its runs."""


def _table(sets: dict[str, Any], read: Reader, summary: Any, title: str, note: str, floor: str = "") -> Table:
    """Methods down, data sets across; the smallest mean among the posteriors that come from a network in bold."""
    rows = [[name, *(_number(*summary(read(one, m))) for one in sets.values())] for m, name in METHODS.items()]
    if floor:
        rows.append(["data floor", *(_number(*summary(one["floor"][floor])) for one in sets.values())])
    trained = [m for m in METHODS if m not in ORACLES]
    best = {
        (list(METHODS).index(min(trained, key=lambda m: abs(statistics.mean(read(one, m))))), j)
        for j, one in enumerate(sets.values(), start=1)
    }
    return Table(title, ["posterior", *(one["title"] for one in sets.values())], rows, note, best=frozenset(best))


def _order(sets: dict[str, Any], read: Reader) -> str:
    """For each data set, the methods from the mean nearest to zero to the farthest."""
    sentences = []
    for one in sets.values():
        means = {m: abs(statistics.mean(read(one, m))) for m in METHODS}
        sentences.append(
            f"{one['title']}: " + " < ".join(METHODS[m] for m in sorted(means, key=means.__getitem__)) + "."
        )
    return " ".join(sentences)


def _single(one: dict[str, Any], method: str) -> Sequence[float]:
    return one["single"][method]["mmd"]


def _many(start: str, number: str = "mmd") -> Reader:
    return lambda one, method: one["many"][start][method][number]


def _single_section(sets: dict[str, Any], settings: ToySettings) -> Section:
    table = _table(
        sets,
        _single,
        _spread,
        f"Authors' protocol: MMD of one chain of {settings.chain_steps:,} steps (mean ± std of {settings.seeds} runs)",
        "Bandwidths: the mean pairwise squared distance times {1/4, 1/2, 1, 2, 4}. Bold: the smallest mean among the "
        "posteriors that come from a network. The runs share one trained network. The last two rows know the density.",
    )
    published = Table(
        "The paper's Table 1",
        ["posterior", *(one["title"] for one in sets.values())],
        [[METHODS[m], *(_number(*PUBLISHED[n][m]) for n in sets)] for m in ("learned", "isotropic", "full")],
    )
    text = [f"Order of the means, smallest first. {_order(sets, _single)}"]
    if "mog" in sets:
        switches = sets["mog"]["single"]["exact"]["mode_switches"]
        score = statistics.mean(_single(sets["mog"], "exact"))
        text.append(
            "The MoG row measures luck more than method: every chain starts inside one mode, and even exact Gibbs, "
            f"which samples the true posterior, changes mode only {statistics.mean(switches):.1f} times a chain "
            f"({min(switches)} to {max(switches)}) and so scores {score:.3f} here. A difference between methods "
            "that is smaller than the spread between runs of exact Gibbs says nothing about the methods."
        )
        hops = {m: statistics.mean(sets["mog"]["single"][m]["mode_switches"]) for m in METHODS}
        often = [m for m in METHODS if m not in ORACLES and hops[m] > max(switches)]
        if often:
            text.append(
                "More switches than exact Gibbs are no merit: "
                + ", ".join(f"{METHODS[m]} makes {hops[m]:.1f}" for m in often)
                + ", because an error between the modes, of the network or of the Gaussian, helps the chain "
                "across. It lowers this MMD all the same."
            )
    caption = "Every run of the authors' protocol (dots), their mean (bar) and the paper's mean (open circle)."
    return Section(
        "Table 1, the authors' protocol",
        text,
        [table, published],
        [Figure("table1_single", caption, _draw_single(sets))],
    )


def _many_section(sets: dict[str, Any], settings: ToySettings) -> Section:
    note = (
        f"The last states of {settings.seeds} groups of {settings.many_chains:,} chains, each against fresh data. "
        "Data floor: as many independent draws from the true density in place of the chains."
    )
    tables = [
        _table(
            sets,
            _many(start),
            interval,
            f"Many chains from {where}: MMD after {settings.many_steps} steps (mean ± 95% interval)",
            note,
            floor="mmd",
        )
        for start, where in (("data", "the true density"), ("start", "the authors' starting point"))
    ]
    deficit = _table(
        sets,
        _many("data", "deficit"),
        interval,
        f"Many chains from the true density: log-density deficit after {settings.many_steps} steps (nats)",
        "How much less likely the samples are under the true density than data are (mean ± 95% interval). Zero is "
        "right; positive: samples lie where data are rare; negative: they are too concentrated.",
        floor="deficit",
    )
    tables[1:1] = [_paired_table(sets), deficit]
    if "mog" in sets:
        tables.append(_mode_table(sets["mog"]))
    text = [
        "Started from the true density, a kernel that leaves it alone stays at the data floor, and how far it rises is "
        f"the kernel's own error, free of mixing luck. Order, smallest first. {_order(sets, _many('data'))}",
        "MMD at these bandwidths hardly sees how sharp a curve is drawn; the log-density deficit does. Order, nearest "
        f"to zero first. {_order(sets, _many('data', 'deficit'))}",
        "From one starting point the MMD also holds how far a chain gets in this many steps: it measures "
        "mixing, and exact Gibbs is the row to compare with.",
        "What this does not show: how the methods rank on other noise levels, larger networks or images; and a "
        "difference inside the intervals is no difference.",
    ]
    caption = (
        "Many chains from the true density, with 95% intervals: MMD, and how much less likely the samples are under "
        "the true density than data are. Dashed: the data floor, what independent draws from the true density score."
    )
    return Section(
        "A protocol that can tell methods apart", text, tables, [Figure("table1_many", caption, _draw_many(sets))]
    )


def _paired_table(sets: dict[str, Any]) -> Table:
    """How far each method lies above the full covariance, group by group: the groups share starts and noise."""
    rows = []
    for method, name in METHODS.items():
        if method == "full":
            continue
        cells = []
        for one in sets.values():
            pairs = zip(_many("data")(one, method), _many("data")(one, "full"), strict=True)
            mean, half = interval([a - b for a, b in pairs])
            cells.append(_number(mean, half) + (" *" if abs(mean) > half else ""))
        rows.append([name, *cells])
    return Table(
        "Many chains from the true density: MMD above that of analytic full (mean ± 95% interval)",
        ["posterior", *(one["title"] for one in sets.values())],
        rows,
        "Differences within groups, which share their starts and their noise, so the intervals are narrower than those "
        "of the values. *: the interval leaves out zero.",
    )


def _mode_table(one: dict[str, Any]) -> Table:
    rows = []
    for method, name in METHODS.items():
        for start, where in (("data", "density"), ("start", "one mode")):
            groups = one["many"][start][method]["mode_weights"]
            weights = [statistics.mean(group[k] for group in groups) for k in range(4)]
            rows.append([name, where, *(f"{w:.3f}" for w in weights)])
    return Table(
        "MoG: share of the many chains in each mode at the end (true: 0.25 each)",
        ["posterior", "chains from", "(-1,-1)", "(-1,1)", "(1,1)", "(1,-1)"],
        rows,
        left=2,
    )


def _chain_section(sets: dict[str, Any]) -> Section:
    rows = []
    for one in sets.values():
        for method, name in METHODS.items():
            values = one["single"][method]
            switches = values.get("mode_switches")
            rows.append(
                [
                    one["title"],
                    name,
                    f"{statistics.mean(values['ess']):.0f}",
                    "" if switches is None else f"{statistics.mean(switches):.1f}",
                    f"{100 * values['repaired']:.3f}%",
                    f"{100 * one['many']['data'][method]['repaired']:.3f}%",
                ]
            )
    header = ["data", "posterior", "effective samples", "mode switches", "repaired", "repaired, many"]
    note = (
        "Effective samples of one chain, worst coordinate (Geyer's estimate; where a chain rarely changes mode it is "
        "itself uncertain). Repaired: the fraction of covariance eigenvalues or variances lifted to the floor, "
        "over the single chains and over "
        "the many chains from the true density."
    )
    return Section("Chains in numbers", (), [Table("Single chains: mixing and repairs", header, rows, note, left=2)])


def _draw_single(sets: dict[str, Any]) -> Canvas:
    canvas, axes = new_figure(1, len(sets), 3.0)
    canvas.set_size_inches(3.6 * len(sets) + 1.2, 2.9)
    for axis, (name, one) in zip(axes[0], sets.items(), strict=True):
        for y, method in enumerate(METHODS):
            values = one["single"][method]["mmd"]
            axis.plot(values, [y] * len(values), "o", color=COLOURS[method], alpha=0.6, markersize=4)
            axis.plot([statistics.mean(values)] * 2, [y - 0.3, y + 0.3], color=COLOURS[method], linewidth=2)
            if method in PUBLISHED[name]:
                axis.plot(PUBLISHED[name][method][0], y, "o", mfc="none", mec="black", markersize=8)
        axis.set_yticks(
            range(len(METHODS)), METHODS.values() if axis is axes[0][0] else [""] * len(METHODS), fontsize=8
        )
        axis.invert_yaxis()
        shown = [v for m in METHODS for v in one["single"][m]["mmd"]] + [v for v, _ in PUBLISHED[name].values()]
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlim(10 ** math.floor(math.log10(min(shown))), 10 ** math.ceil(math.log10(max(shown))))
        axis.set_title(one["title"], fontsize=10)
        axis.set_xlabel("MMD, single chain", fontsize=8)
        open_axes(axis, 8)
    return canvas


def _draw_many(sets: dict[str, Any]) -> Canvas:
    canvas, axes = new_figure(2, len(sets), 3.0)
    canvas.set_size_inches(3.6 * len(sets) + 1.2, 5.2)
    for row, (number, label) in zip(axes, (("mmd", "MMD"), ("deficit", "log-density deficit (nats)")), strict=True):
        for axis, one in zip(row, sets.values(), strict=True):
            found = [interval(one["many"]["data"][m][number]) for m in METHODS]
            names = list(METHODS.values()) if axis is row[0] else [""] * len(METHODS)
            errors = [0.0 if math.isnan(half) else half for _, half in found]
            bars(axis, names, [mean for mean, _ in found], errors, [COLOURS[m] for m in METHODS])
            axis.axvline(statistics.mean(one["floor"][number]), color=GREY, linestyle="--", linewidth=1.2)
            axis.set_title(one["title"] if number == "mmd" else "", fontsize=10)
            axis.set_xlabel(label, fontsize=8)
            axis.xaxis.set_major_locator(MaxNLocator(5))
    return canvas


EXPERIMENT = Experiment(
    "table1",
    "Table 1: MMD of Gibbs chains on 2-D data",
    "Learned, isotropic, diagonal and full posteriors, and exact Gibbs, on three 2-D data sets.",
    run,
)
