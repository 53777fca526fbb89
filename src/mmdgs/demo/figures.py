"""Figures 1 and 2 of the paper, and the bars of its Table 1; the experiments draw them too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.distributions import MultivariateNormal

from mmdgs.demo.toys import COLOURS, FLOOR, LEVEL, METHODS, Fitted, four_gaussians
from mmdgs.metrics import kl_divergence
from mmdgs.report.drawing import (
    GREEN,
    GREY,
    ORANGE,
    UNIT_TICKS,
    density,
    grid,
    labelled,
    new_figure,
    scatter,
    square,
)  # fmt: skip
from mmdgs.report.numbers import Measure, Number

POINTS = {f"({x:g}, {y:g})": (x, y) for x, y in ((0.0, 0.0), (0.2, 0.2), (1.0, 0.0), (1.0, 1.0))}
APPROXIMATIONS = ("full", "diagonal", "isotropic", "learned", "moments")
LIMIT, GRID = 2.0, 241  # cells of 0.017, an eighth of the narrowest standard deviation, 0.14
CHAINS = ("learned", "isotropic", "diagonal", "full", "exact")
LIMITS = {"mog": 2.0, "rings": 1.9, "roll": 1.9}
DRAWN = 5_000  # points a panel: enough to show the shape without a solid block
MMD = Measure("mmd", "MMD", better="less")
DEFICIT = Measure("deficit", "log-density deficit (nats)", 3, "zero")

Cells = Mapping[tuple[str, str], Mapping[str, Any]]
"""The numbers of cells by (row, column)."""


def approximation(fitted: Fitted, method: str, point: tuple[float, float]) -> dict[str, Any]:
    """A Gaussian approximation of p(x | x_t = point), and the KL divergence to it."""
    q = fitted.moments[method](torch.tensor([point]).to(fitted.data), LEVEL)
    mean, covariance = (part[0].detach().double().cpu() for part in (q.mean, q.cov.dense()))
    where, area = grid(LIMIT, GRID)
    log_q = MultivariateNormal(mean, covariance).log_prob(where)
    return {
        "kl": kl_divergence(true_log_density(point), log_q, area),
        "repaired": 0.0 if q.repaired is None else q.repaired.item(),
        "mean": mean.tolist(),
        "covariance": covariance.tolist(),
    }


@cache
def true_log_density(point: tuple[float, float]) -> Tensor:
    """log p(x | x_t) on the grid, (GRID^2,)."""
    where, _ = grid(LIMIT, GRID)
    x_t = where.new_tensor([point]).expand(len(where), -1)
    return four_gaussians().posterior(x_t, LEVEL).log_prob(where)


def draw_posteriors(cells: Cells) -> Figure:
    """Figure 1: the true posterior at POINTS, and the contours of each approximation over it."""
    canvas, axes = new_figure(1 + len(APPROXIMATIONS), len(POINTS), 1.9)
    for column, (name, point) in enumerate(POINTS.items()):
        for row, method in enumerate(("", *APPROXIMATIONS)):
            axis = axes[row][column]
            density(axis, true_log_density(point).exp(), LIMIT)
            axis.plot(*point, "x", color=GREEN, markersize=6, markeredgewidth=1.6)
            square(axis, 1.6, f"$x_t$ = {name}", UNIT_TICKS)
            axis.label_outer()
            if method:
                _contours(axis, cells[method, name])
                axis.set_title(f"KL {cells[method, name]['kl']:.2f}", fontsize=9)
            if column == 0:
                axis.set_ylabel(METHODS.get(method, "true posterior"), fontsize=9)
    return canvas


def _contours(axis: Axes, values: Mapping[str, Any]) -> None:
    where, _ = grid(LIMIT, GRID)
    mean, covariance = (where.new_tensor(values[key]) for key in ("mean", "covariance"))
    law = MultivariateNormal(mean, covariance)
    # A 2-D Gaussian has a share p of its mass where log q is above log q(mean) + log(1 - p).
    levels = [law.log_prob(mean).item() + math.log(1 - p) for p in (0.95, 0.5)]
    line, height = torch.linspace(-LIMIT, LIMIT, GRID).numpy(), law.log_prob(where)
    look: dict[str, Any] = {"colors": ORANGE, "linewidths": 1.3, "linestyles": ["--", "-"]}
    axis.contour(line, line, height.reshape(GRID, GRID).numpy(), levels=levels, **look)


def draw_chains(data: Mapping[str, Fitted], samples: Mapping[tuple[str, str], Tensor]) -> Figure:
    """Figure 2: data, and the states of one chain with each posterior; a row for each data set."""
    columns = ("data", *CHAINS)
    canvas, axes = new_figure(len(data), len(columns), 2.1)
    for row, (name, fitted) in zip(axes, data.items(), strict=True):
        for axis, method in zip(row, columns, strict=True):
            x = fitted.data.cpu() if method == "data" else samples[method, name]
            scatter(axis, x[:: max(1, len(x) // DRAWN)], COLOURS[method], size=2.0)
            title = METHODS.get(method, method) if row is axes[0] else ""
            square(axis, LIMITS[name], title, UNIT_TICKS)
            axis.label_outer()
        row[0].set_ylabel(fitted.toy.title, fontsize=10)
    return canvas


def draw_many(cells: Cells, titles: Mapping[str, str], methods: Mapping[str, str]) -> Figure:
    """Bars of both measures: a row of panels for each, or one row where there is one data set."""
    panels = [(name, measure) for measure in (MMD, DEFICIT) for name in titles]
    rows = 1 if len(titles) == 1 else 2
    columns = len(panels) // rows
    canvas, axes = new_figure(rows, columns, inches=(3.6 * columns + 1.2, 2.6 * rows))
    for i, (name, measure) in enumerate(panels):
        axis = axes[i // columns][i % columns]
        numbers = [measure.of(cells[method, name]) for method in methods]
        labels = list(methods.values()) if i % columns == 0 else None
        draw_bars(axis, numbers, [COLOURS[method] for method in methods], measure.title, labels)
        floor = measure.of(cells[FLOOR, name]).value
        axis.axvline(floor, color=GREY, linestyle="--", linewidth=1.2)
        axis.set_title(titles[name] if measure is MMD and rows > 1 else "", fontsize=10)
        axis.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    return canvas


def draw_bars(
    axis: Axes,
    numbers: Sequence[Number],
    colours: Sequence[str],
    title: str,
    labels: Sequence[str] | None,
) -> None:
    """A horizontal bar for each number, with its interval; the first on top."""
    values, halves = zip(*numbers, strict=True)
    errors = [0.0 if math.isnan(half) else half for half in halves]
    thin = {"elinewidth": 1, "ecolor": "#1c2330"}
    axis.barh(range(len(values)), values, xerr=errors, color=colours, height=0.65, error_kw=thin)
    labelled(axis, "", title, "")
    axis.set_yticks(range(len(values)), labels or [""] * len(values), fontsize=8)
    axis.invert_yaxis()
