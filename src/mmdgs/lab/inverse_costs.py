"""A picture of restorations: how near the mean of the draws is, and how right their spread, against evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from mmdgs.lab.drawing import BLUE, GREY, ORANGE, PINK, PURPLE, SLATE, labelled, new_figure, plain_logs
from mmdgs.lab.grid import Measure, Results

COLOURS = {"spectral": PINK, "modulated": PURPLE, "low-rank": BLUE, "isotropic": ORANGE, "lattice": GREY}
"""By covariance; methods of others are dark, and told apart by their markers."""
MARKERS = {"multistep": "o-", "bridge": "s--", "mirrored": "^:"}
OTHERS = ("D:", "v:", "P:", "X:")
BAND = (0.9, 1.1)
"""The spread over error that restorations aim at."""
WITHIN = 2.0
"""Decibels below the nearest mean that are shown."""


def cost_figure(
    found: Results, families: Mapping[str, Sequence[str]], near: Measure, spread: Measure, cost: Measure
) -> Canvas:
    """A column for each task: `near`, in dB, above, `spread` below, against `cost`; rows of a family are one curve.

    A family is named "covariance, chains", or by a method's name.
    """
    tasks = found.columns
    canvas, axes = new_figure(2, len(tasks), inches=(1.0 + 2.2 * len(tasks), 4.8))
    for place, task in enumerate(tasks):
        for measure, axis in zip((near, spread), (axes[0][place], axes[1][place]), strict=True):
            for family, rows in families.items():
                points = sorted(
                    (found.number(row, task, cost).value, found.number(row, task, measure).value)
                    for row in rows
                    if found.has(row, task)
                )
                if points:
                    axis.plot(*zip(*points, strict=True), **_look(family, families))
            axis.set_xscale("log")
            plain_logs(axis)
            words = "PSNR of the mean, dB" if measure is near else measure.title
            title, across = (task, "") if measure is near else ("", cost.title)
            labelled(axis, title, across, words if place == 0 else "")
        low, high = axes[0][place].get_ylim()
        axes[0][place].set_ylim(max(low, high - WITHIN), high)
        axes[1][place].axhspan(*BAND, color=GREY, alpha=0.15, linewidth=0)
    handles = [Line2D([], [], label=family, **_look(family, families)) for family in families]
    canvas.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return canvas


def _look(family: str, families: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """How the curve of a family is drawn: filled by chains of means, else open; methods of others are dark."""
    covariance, _, chains = family.partition(", ")
    ours = covariance in COLOURS
    others = [one for one in families if one.partition(", ")[0] not in COLOURS]
    line = MARKERS[chains] if ours else OTHERS[others.index(family) % len(OTHERS)]
    colour = COLOURS[covariance] if ours else SLATE
    face = colour if not ours or chains == "multistep" else "white"
    return {"color": colour, "marker": line[0], "linestyle": line[1:], "markerfacecolor": face, "markersize": 5,
            "linewidth": 1.1}  # fmt: skip
