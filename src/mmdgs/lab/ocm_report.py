"""Tables and the figure of the experiment ocm, from its records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas

from mmdgs.cost import Cost
from mmdgs.lab.drawing import BLUE, COLOURS, GREEN, GREY, ORANGE, bars, new_figure, open_axes
from mmdgs.lab.report import Figure, Section, Table

HEAD, ISOTROPIC = "OCM head", "isotropic"
STYLES = {
    HEAD: (BLUE, "o-"),
    "1 product": (GREY, "v:"),
    "3 products": (GREY, "s--"),
    "10 products": (GREY, "o-"),
    "3 products, lattice": (COLOURS["diagonal"], "s--"),
    ISOTROPIC: (ORANGE, "o-"),
}
"""The estimators, and how each is drawn."""
MEASURES = {
    "error": "Relative error of the variances",
    "nll": "Negative log-likelihood, nats a number",
    "fitted": "Negative log-likelihood with a fitted floor, nats a number",
    "z2": "Mean of z^2 with a fitted floor (1: calibrated)",
}
DRAWN = {"error": "relative error", "fitted": "nats a number above isotropic", "z2": "mean of z^2"}
RESOLUTION = "(least that is resolved)"

Level = Mapping[str, Any]


def measured(level: Level, name: str, measure: str) -> float:
    """A number of MEASURES for an estimator at a level; one that could not be measured is NaN, in JSON null."""
    record = level["estimators"][name]
    part, key = {
        "error": (record, "error"),
        "nll": (record["calibration"], "nll"),
        "fitted": (record["fitted"], "nll"),
        "z2": (record["fitted"], "variance"),
    }[measure]
    return math.nan if part[key] is None else part[key]


def section(records: Mapping[str, Any]) -> Section:
    """All there is to show."""
    levels, settings, sizes = records["levels"], records["settings"], records["parameters"]
    text = [
        f"The denoiser is {settings['model']} ({sizes['denoiser'] / 1e6:.2f} million parameters), the head has "
        f"{sizes['head'] / 1e6:.2f} million. A head counts as one evaluation whatever its size, a product as two.",
        "The error is that of the variances against the diagonal of the network's own Jacobian, by two independent "
        f"estimates of {settings['reference_probes']} products each; what lies below the last row is as good as none.",
        "The likelihood is that of held-out images under the posterior of their noisy versions. What the mean is "
        "off by is in it, and dominates where variances are tiny: so a floor is fitted on half of the images, and the "
        "others are judged with it.",
        _verdict(levels),
    ]
    tables = [_table(levels, measure, settings["images"]) for measure in MEASURES]
    caption = "Error, likelihood and calibration at each level, the last two with a fitted floor."
    return Section(
        "A head in place of probes",
        text,
        tables,
        [Figure("ocm", caption, _draw(levels) if len(levels) > 1 else _draw_bars(levels[0]))],
    )


def _table(levels: Sequence[Level], measure: str, images: int) -> Table:
    names = list(STYLES)
    columns = [[measured(level, name, measure) for name in names] for level in levels]
    rows = [
        [name, *(f"{column[i]:.3f}" for column in columns), f"{_evaluations(levels[0], name):g}"]
        for i, name in enumerate(names)
    ]
    if measure == "error":
        found = [level["estimators"][HEAD]["resolution"] for level in levels]
        rows.append([RESOLUTION, *("" if one is None else f"{one:.3f}" for one in found), ""])
    header = ["variances", *(f"sigma / alpha {level['ratio']:.3g}" for level in levels), "evaluations"]
    best = frozenset((_best(measure, column), 1 + j) for j, column in enumerate(columns))
    return Table(
        MEASURES[measure], header, rows, f"{images} held-out images; the best of each level in bold.", best=best
    )


def _best(measure: str, values: Sequence[float]) -> int:
    """The place of the best value: the smallest, or of z^2 the one nearest to 1 by its factor."""
    return min(range(len(values)), key=lambda i: abs(math.log(values[i])) if measure == "z2" else values[i])


def _evaluations(level: Level, name: str) -> float:
    return Cost(**level["estimators"][name]["cost"]).evaluations


def _verdict(levels: Sequence[Level]) -> str:
    """At how many levels the head is nearer than what it stands in for."""
    said = []
    for other in ("1 product", "3 products", "10 products", ISOTROPIC):
        for measure, what in (("error", "nearer to the diagonal"), ("fitted", "likelier")):
            wins = sum(measured(level, HEAD, measure) < measured(level, other, measure) for level in levels)
            said.append(f"{what} than {other} at {wins} of {len(levels)} levels")
    return f"The head is {'; '.join(said)}."


def _draw(levels: Sequence[Level]) -> Canvas:
    canvas, axes = new_figure(1, len(DRAWN), 3.4)
    canvas.set_size_inches(12.0, 3.4)
    ratios = [level["ratio"] for level in levels]
    for axis, (measure, label) in zip(axes[0], DRAWN.items(), strict=True):
        for name, (colour, style) in STYLES.items():
            base = [measured(level, ISOTROPIC, measure) if measure == "fitted" else 0.0 for level in levels]
            values = [measured(level, name, measure) - one for level, one in zip(levels, base, strict=True)]
            axis.plot(ratios, values, style, color=colour, markersize=4, linewidth=1.3, label=name)
        axis.set_xscale("log")
        if measure != "fitted":
            axis.set_yscale("log")
        axis.set_xlabel("sigma / alpha", fontsize=9)
        axis.set_ylabel(label, fontsize=9)
        open_axes(axis, 8)
    axes[0][-1].axhline(1, color=GREEN, linewidth=0.8)
    axes[0][-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return canvas


def _draw_bars(level: Level) -> Canvas:
    """The same for a model of one level, where there is nothing to draw against."""
    canvas, axes = new_figure(1, len(DRAWN), 3.0)
    canvas.set_size_inches(12.0, 2.4)
    for i, (axis, (measure, label)) in enumerate(zip(axes[0], DRAWN.items(), strict=True)):
        base = measured(level, ISOTROPIC, measure) if measure == "fitted" else 0.0
        values = [measured(level, name, measure) - base for name in STYLES]
        bars(
            axis,
            list(STYLES) if i == 0 else [""] * len(STYLES),
            values,
            None,
            [colour for colour, _ in STYLES.values()],
        )
        axis.set_xlabel(label, fontsize=9)
    axes[0][-1].axvline(1, color=GREEN, linewidth=0.8)
    return canvas
