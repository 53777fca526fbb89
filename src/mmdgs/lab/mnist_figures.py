"""The pictures of the MNIST experiment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from mmdgs.lab.drawing import BLUE, GREY, PURPLE, RED, labelled, new_figure, picture, plain_logs, style
from mmdgs.lab.grid import Measure, Results
from mmdgs.lab.mnist_models import QUANTISATION, SIGMA, Training
from mmdgs.lab.mnist_posteriors import UNCERTAIN, HeldOut
from mmdgs.metrics import Instability, standardised
from mmdgs.metrics.diagnostics import running_median
from mmdgs.randomness import Streams, randn_like

SHOWN = 25
TITLES = {"energy": "DSM (energy)", "mean-std": "KL (mean and std)"}
TAIL = 5.0  # of the histograms of residuals, in standard deviations
BINS = 51


def draw_losses(curves: Mapping[str, Training], measured: Mapping[str, Instability], window: int) -> Canvas:
    """The loss of every step, its running median, and the spikes; the first steps leave the picture above."""
    canvas, axes = new_figure(1, len(curves), 4.0)
    canvas.set_size_inches(4.6 * len(curves), 3.2)
    for axis, (name, run) in zip(axes[0], curves.items(), strict=True):
        found = measured[name]
        losses = run.losses[: found.steps]
        steps = torch.arange(1, len(losses) + 1)
        axis.plot(steps, losses, color=GREY, linewidth=0.5, alpha=0.8, rasterized=True)
        if len(losses) > window:
            axis.plot(steps[window:], running_median(losses, window)[0], color=BLUE, linewidth=1.2)
            seen = losses[window // 2 :]
            room = 0.06 * (seen.max() - seen.min()).item()
            axis.set_ylim(seen.min().item() - room, seen.max().item() + room)
        spikes = list(found.spikes)
        axis.plot(steps[spikes], losses[spikes], "o", color=RED, markersize=3)
        if run.stopped_at is not None:
            axis.axvline(run.stopped_at + 1, color=RED, linewidth=1.2, linestyle="--")
        labelled(axis, TITLES[run.recipe.param], "step", "training loss" if axis is axes[0][0] else "")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return canvas


def draw_maps(found: HeldOut) -> Canvas:
    """Digits, noisy digits, and the standard deviation of each posterior in one colour scale."""
    labels = found.drawn()
    deviations = [found.posteriors[label].cov.diagonal()[:SHOWN].sqrt() for label in labels]
    high = max(torch.quantile(one, 0.999).item() for one in deviations)
    canvas, axes = new_figure(1, 2 + len(labels), 2.5)
    picture(axes[0][0], found.x[:SHOWN], "digits x")
    picture(axes[0][1], found.x_t[:SHOWN], "noisy digits $x_t$")
    for axis, label, values in zip(axes[0][2:], labels, deviations, strict=True):
        drawn = picture(axis, values, label, high=high, cmap="magma")
    bar = canvas.colorbar(drawn, ax=axes[0], shrink=0.75, pad=0.01)
    bar.set_label("standard deviation of p(x | $x_t$)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return canvas


def draw_noise(found: HeldOut, seed: int) -> tuple[Canvas, float]:
    """The paper's picture: a draw of each posterior's noise through a sigmoid; also the noise that is black and white.

    All posteriors share one draw of standard normals, so that only the standard deviations differ.
    """
    labels = found.drawn()
    z = randn_like(found.x[:SHOWN], Streams(seed, min(SHOWN, len(found.x)), purpose="drawn noise"))
    noises = [found.posteriors[label].cov.diagonal()[:SHOWN].sqrt() * z for label in labels]
    limit = max(torch.quantile(noise.abs(), 0.99).item() for noise in noises)
    low, high = (1 / (1 + math.exp(-end)) for end in (-limit, limit))
    canvas, axes = new_figure(1, len(labels), 2.5)
    for axis, label, noise in zip(axes[0], labels, noises, strict=True):
        picture(axis, noise.sigmoid(), label, low=low, high=high)
    return canvas, limit


def draw_chains(chains: Results, rows: Mapping[str, str], steps: Sequence[int]) -> Canvas:
    """The first chains at each of these steps: a row for each posterior."""
    canvas, axes = new_figure(len(rows), len(steps), 2.1)
    for line, (row, title) in zip(axes, rows.items(), strict=True):
        for axis, t, x in zip(line, steps, chains.parts[row, SIGMA].tensors["path"], strict=True):
            picture(axis, x, f"t = {t}" if line is axes[0] else "")
        line[0].set_ylabel(title, fontsize=10)
    return canvas


def draw_sigmas(chains: Results, sigmas: Sequence[float]) -> Canvas:
    """The first chains' last states, for each noise level."""
    canvas, axes = new_figure(1, len(sigmas), 2.6)
    for axis, sigma in zip(axes[0], sigmas, strict=True):
        picture(axis, chains.parts["diagonal", sigma].tensors["path"][-1], rf"$\sigma$ = {sigma:g}")
    return canvas


def draw_numbers(
    chains: Results, rows: Mapping[str, str], measures: Sequence[Measure], test: str, shares: Sequence[float]
) -> Canvas:
    """Two measures (the second logarithmic), and the shares of classes, beside those of test images."""
    canvas, axes = new_figure(1, 3, 3.0)
    canvas.set_size_inches(11.0, 2.8)
    for axis, measure in zip(axes[0], measures, strict=False):
        chains.draw_bars(axis, SIGMA, measure, rows, named=axis is axes[0][0])
        axis.axvline(chains.number(test, SIGMA, measure).value, color=GREY, linestyle="--", linewidth=1.2)
    axes[0][1].set(xscale="log", xlim=(QUANTISATION / 2, None))
    axis, width = axes[0][2], 0.8 / len(rows)
    for i, row in enumerate(rows):
        places = [c + (i - (len(rows) - 1) / 2) * width for c in range(10)]
        axis.bar(places, chains.values(row, SIGMA)["class_shares"], width=width, color=style(row).colour)
    for c, share in enumerate(shares):
        axis.plot([c - 0.45, c + 0.45], [share, share], color=GREY, linewidth=1.2, linestyle="--")
    axis.set_xticks(range(10))
    labelled(axis, "", "digit, by the classifier", "share of the chains")
    return canvas


def draw_probes(errors: Mapping[str, Any]) -> Canvas:
    """The error of the probed diagonal by number of probes."""
    canvas, axes = new_figure(1, 1, 3.6)
    canvas.set_size_inches(4.6, 3.2)
    axis = axes[0][0]
    axis.loglog(errors["probes"], errors["expected"], color=GREY, linestyle="--", linewidth=1.2, label="expected")
    axis.loglog(errors["probes"], errors["error"], "o-", color=PURPLE, markersize=4, label="averages")
    label = f"one estimator, {errors['checked_probes']} probes"
    point = [errors["checked_probes"]], [errors["checked_error"]]
    axis.loglog(*point, "o", mfc="none", mec="black", markersize=9, label=label)
    plain_logs(axis)
    axis.set_xticks(errors["probes"], [str(n) for n in errors["probes"]])
    axis.minorticks_off()
    axis.legend(fontsize=8, frameon=False)
    labelled(axis, "", "probes", "relative error of the diagonal")
    return canvas


def draw_calibration(found: HeldOut, records: Mapping[str, dict[str, Any]], background: Tensor) -> Canvas:
    """Residuals over the pixels a posterior is uncertain of and over the background; reliability."""
    canvas, axes = new_figure(1, 3, 3.2)
    canvas.set_size_inches(11.5, 3.4)
    black = background.expand_as(found.x)
    for label, q in found.posteriors.items():
        method = found.methods[label]
        colour, line_kind = style(method).colour, "-" if label in found.drawn() else ":"
        z = standardised(found.x, q)
        _histogram(axes[0][0], z[q.cov.diagonal().sqrt() > UNCERTAIN], colour, line_kind)
        _histogram(axes[0][1], z[black], colour, line_kind)
        curve = records[label]["reliability"]
        marker = "o" if len(curve["counts"]) == 1 else "."
        axes[0][2].loglog(curve["predicted"], curve["observed"], marker + line_kind, color=colour, label=label)
    line = torch.linspace(-TAIL, TAIL, 201)
    for axis, title in zip(axes[0], (f"uncertain pixels (std > {UNCERTAIN:g})", "background pixels"), strict=False):
        axis.plot(line, (-0.5 * line.square()).exp() / math.sqrt(2 * math.pi), color="black", linewidth=1, alpha=0.7)
        axis.set(yscale="log", ylim=(1e-4, 20), xlim=(-TAIL, TAIL))
        labelled(axis, title, "(x - mean) / std", "density")
    axis = axes[0][2]
    ends = [*axis.get_xlim(), *axis.get_ylim()]
    axis.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=1, alpha=0.7, zorder=0)
    labelled(axis, "reliability", "predicted standard deviation", "root mean square error")
    axis.legend(fontsize=7, frameon=False)
    return canvas


def _histogram(axis: Axes, z: Tensor, colour: str, line_kind: str) -> None:
    """The density of z as a line; what lies beyond the tails is counted but not drawn."""
    if len(z) == 0:
        return
    edges = torch.linspace(-TAIL, TAIL, BINS + 1, dtype=z.dtype)
    counts = torch.histogram(z, edges).hist
    width = (2 * TAIL) / BINS
    density = torch.where(counts > 0, counts / (len(z) * width), torch.nan)
    axis.plot((edges[1:] + edges[:-1]) / 2, density, color=colour, linestyle=line_kind, linewidth=1.4)
