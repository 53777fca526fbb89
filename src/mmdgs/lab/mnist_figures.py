"""The pictures of the MNIST experiment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator
from torch import Tensor

from mmdgs.lab.drawing import BLUE, COLOURS, GREY, RED, bars, new_figure, open_axes, picture
from mmdgs.lab.mnist_measures import METHODS, SHOWN, UNCERTAIN, Chains, HeldOut
from mmdgs.lab.mnist_models import Training
from mmdgs.lab.mnist_yardstick import Yardstick
from mmdgs.metrics import Instability, interval, standardised
from mmdgs.metrics.diagnostics import running_median
from mmdgs.randomness import Streams, randn_like

TAIL = 5.0  # of the histograms of residuals, in standard deviations
BINS = 51


def draw_losses(
    curves: Mapping[str, Training], measured: Mapping[str, Instability], titles: Mapping[str, str], window: int
) -> Canvas:
    """The loss of every step, its running median, and the spikes; the first steps leave the picture above."""
    canvas, axes = new_figure(1, len(curves), 4.0)
    canvas.set_size_inches(4.6 * len(curves), 3.2)
    for axis, (name, run) in zip(axes[0], curves.items(), strict=True):
        found = measured[name]
        losses = run.losses[: found.steps]
        steps = torch.arange(1, len(losses) + 1)
        axis.plot(steps, losses, color=COLOURS["data"], linewidth=0.5, alpha=0.8, rasterized=True)
        if len(losses) > window:
            axis.plot(steps[window:], running_median(losses, window)[0], color=BLUE, linewidth=1.2)
            seen = losses[window // 2 :]
            room = 0.06 * (seen.max() - seen.min()).item()
            axis.set_ylim(seen.min().item() - room, seen.max().item() + room)
        spikes = list(found.spikes)
        axis.plot(steps[spikes], losses[spikes], "o", color=RED, markersize=3)
        if run.stopped_at is not None:
            axis.axvline(run.stopped_at + 1, color=RED, linewidth=1.2, linestyle="--")
        axis.set_title(titles[name], fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        open_axes(axis, 8)
    axes[0][0].set_ylabel("training loss", fontsize=8)
    return canvas


def _drawn(found: HeldOut) -> list[str]:
    """The posteriors to draw: of those of one method the last, which has the most probes."""
    return list({method: label for label, method in found.methods.items()}.values())


def draw_maps(found: HeldOut) -> Canvas:
    """Digits, noisy digits, and the standard deviation of each posterior in one colour scale."""
    labels = _drawn(found)
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
    labels = _drawn(found)
    z = randn_like(found.x[:SHOWN], Streams(seed, min(SHOWN, len(found.x))))
    noises = [found.posteriors[label].cov.diagonal()[:SHOWN].sqrt() * z for label in labels]
    limit = max(torch.quantile(noise.abs(), 0.99).item() for noise in noises)
    low, high = (1 / (1 + math.exp(-end)) for end in (-limit, limit))
    canvas, axes = new_figure(1, len(labels), 2.5)
    for axis, label, noise in zip(axes[0], labels, noises, strict=True):
        picture(axis, noise.sigmoid(), label, low=low, high=high)
    return canvas, limit


def draw_chains(chains: Sequence[Chains], steps: Sequence[int]) -> Canvas:
    """The first chains at each of these steps: a row for each posterior."""
    canvas, axes = new_figure(len(chains), len(steps), 2.1)
    for row, one in zip(axes, chains, strict=True):
        for axis, t, x in zip(row, steps, one.path, strict=True):
            picture(axis, x, f"t = {t}" if row is axes[0] else "")
        row[0].set_ylabel(METHODS[one.method], fontsize=10)
    return canvas


def draw_sigmas(chains: Sequence[Chains]) -> Canvas:
    """The first chains' last states, for each noise level."""
    canvas, axes = new_figure(1, len(chains), 2.6)
    for axis, one in zip(axes[0], chains, strict=True):
        picture(axis, one.last[:SHOWN], rf"$\sigma$ = {one.sigma:g}")
    return canvas


def draw_numbers(scored: Mapping[str, dict[str, Any]], by: Yardstick, ideal_noise: float) -> Canvas:
    """Fréchet distance, background noise, and shares of classes, beside those of test images."""
    canvas, axes = new_figure(1, 3, 3.0)
    canvas.set_size_inches(11.0, 2.8)
    names, colours = [METHODS[m] for m in scored], [COLOURS[m] for m in scored]
    for axis, number, label in (
        (axes[0][0], "frechet", "Fréchet distance"),
        (axes[0][1], "background", "background noise"),
    ):
        found = [interval(one[number]) for one in scored.values()]
        errors = [0.0 if math.isnan(half) else half for _, half in found]
        bars(axis, names if number == "frechet" else [""] * len(names), [mean for mean, _ in found], errors, colours)
        axis.axvline(statistics.mean(by.floor[number]), color=GREY, linestyle="--", linewidth=1.2)
        axis.set_xlabel(label, fontsize=8)
    axes[0][1].set_xscale("log")
    axes[0][1].set_xlim(left=ideal_noise / 2)
    axis = axes[0][2]
    width = 0.8 / len(scored)
    for i, (method, one) in enumerate(scored.items()):
        places = [c + (i - (len(scored) - 1) / 2) * width for c in range(10)]
        axis.bar(places, one["class_shares"], width=width, color=COLOURS[method])
    for c, share in enumerate(by.shares.tolist()):
        axis.plot([c - 0.45, c + 0.45], [share, share], color=GREY, linewidth=1.2, linestyle="--")
    axis.set_xticks(range(10))
    axis.set_xlabel("digit, by the classifier", fontsize=8)
    axis.set_ylabel("share of the chains", fontsize=8)
    open_axes(axis, 8)
    return canvas


def draw_probes(errors: Mapping[str, Any]) -> Canvas:
    """The error of the probed diagonal by number of probes."""
    canvas, axes = new_figure(1, 1, 3.6)
    canvas.set_size_inches(4.6, 3.2)
    axis = axes[0][0]
    axis.loglog(errors["probes"], errors["expected"], color=GREY, linestyle="--", linewidth=1.2, label="expected")
    axis.loglog(errors["probes"], errors["error"], "o-", color=COLOURS["diagonal"], markersize=4, label="averages")
    count = errors["checked_probes"]
    label = f"one estimator, {count} probes"
    axis.loglog([count], [errors["checked_error"]], "o", mfc="none", mec="black", markersize=9, label=label)
    axis.set_xticks(errors["probes"], [str(n) for n in errors["probes"]])
    axis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_xlabel("probes", fontsize=8)
    axis.set_ylabel("relative error of the diagonal", fontsize=8)
    axis.legend(fontsize=8, frameon=False)
    open_axes(axis, 8)
    return canvas


def draw_calibration(found: HeldOut, records: Mapping[str, dict[str, Any]], background: Tensor) -> Canvas:
    """Residuals over the pixels a posterior is uncertain of and over the background; reliability."""
    canvas, axes = new_figure(1, 3, 3.2)
    canvas.set_size_inches(11.5, 3.4)
    black = background.expand_as(found.x)
    for label, q in found.posteriors.items():
        method = found.methods[label]
        colour, style = COLOURS[method], "-" if label in _drawn(found) else ":"
        z = standardised(found.x, q)
        _histogram(axes[0][0], z[q.cov.diagonal().sqrt() > UNCERTAIN], colour, style)
        _histogram(axes[0][1], z[black], colour, style)
        curve = records[label]["reliability"]
        marker = "o" if len(curve["counts"]) == 1 else "."
        axes[0][2].loglog(curve["predicted"], curve["observed"], marker + style, color=colour, label=label)
    line = torch.linspace(-TAIL, TAIL, 201)
    for axis, title in zip(axes[0], (f"uncertain pixels (std > {UNCERTAIN:g})", "background pixels"), strict=False):
        axis.plot(line, (-0.5 * line.square()).exp() / math.sqrt(2 * math.pi), color="black", linewidth=1, alpha=0.7)
        axis.set(yscale="log", ylim=(1e-4, 20), xlim=(-TAIL, TAIL))
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("(x - mean) / std", fontsize=8)
        axis.set_ylabel("density", fontsize=8)
        open_axes(axis, 8)
    axis = axes[0][2]
    ends = [*axis.get_xlim(), *axis.get_ylim()]
    axis.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=1, alpha=0.7, zorder=0)
    axis.set_title("reliability", fontsize=10)
    axis.set_xlabel("predicted standard deviation", fontsize=8)
    axis.set_ylabel("root mean square error", fontsize=8)
    axis.legend(fontsize=7, frameon=False)
    open_axes(axis, 8)
    return canvas


def _histogram(axis: Axes, z: Tensor, colour: str, style: str) -> None:
    """The density of z as a line; what lies beyond the tails is counted but not drawn."""
    if len(z) == 0:
        return
    edges = torch.linspace(-TAIL, TAIL, BINS + 1, dtype=z.dtype)
    counts = torch.histogram(z, edges).hist
    width = (2 * TAIL) / BINS
    density = torch.where(counts > 0, counts / (len(z) * width), torch.nan)
    axis.plot((edges[1:] + edges[:-1]) / 2, density, color=colour, linestyle=style, linewidth=1.4)
