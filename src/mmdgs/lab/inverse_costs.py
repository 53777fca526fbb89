"""A picture of restorations: how near the mean of the draws is, and how right their spread, against evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from mmdgs.lab.drawing import GREY, labelled, line_style, new_figure, plain_logs
from mmdgs.lab.grid import Measure, Results

WITHIN = 2.0
"""Decibels below the nearest mean that are shown."""


def cost_figure(
    found: Results,
    families: Mapping[str, Sequence[str]],
    near: Measure,
    spread: Measure,
    cost: Measure,
    band: tuple[float, float],
) -> Canvas:
    """A column for each task: `near`, in dB, above, `spread` and its aim below, against `cost`.

    The rows of a family are one curve.
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
                    axis.plot(*zip(*points, strict=True), **line_style(family))
            axis.set_xscale("log")
            plain_logs(axis)
            words = "PSNR of the mean, dB" if measure is near else measure.title
            title, across = (task, "") if measure is near else ("", cost.title)
            labelled(axis, title, across, words if place == 0 else "")
        low, high = axes[0][place].get_ylim()
        axes[0][place].set_ylim(max(low, high - WITHIN), high)
        axes[1][place].axhspan(*band, color=GREY, alpha=0.15, linewidth=0)
    handles = [Line2D([], [], label=family, **line_style(family)) for family in families]
    canvas.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return canvas
