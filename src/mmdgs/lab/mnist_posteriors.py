"""Figure 4: the covariances of noisy digits as pictures; and their calibration in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.lab.drawing import colour_bar, labelled, new_figure, picture, pictures, style
from mmdgs.lab.experiment import Context
from mmdgs.lab.grid import Cell, Grid
from mmdgs.lab.mnist_models import (
    METHODS,
    QUANTISATION,
    SIGMA,
    MnistSettings,
    Training,
    moments_of,
    noisy_digits,
    source,
)
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.workspace import Part
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics import calibration, reliability, standardised
from mmdgs.metrics.coverage import EXPECTED_COVERAGE
from mmdgs.moments.calibrated import likeliest_lift
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams, randn_like
from mmdgs.tables import Table

UNCERTAIN = 0.05
"""A posterior is uncertain of a pixel where its own standard deviation is above this."""
PLACES = {"all": "all", "uncertain": f"uncertain (std > {UNCERTAIN:g})", "background": "background"}
FITTED = ", calibrated"
"""Ends the label of a posterior whose floor and scale were fitted."""
ROWS = {"cuda": 256, "cpu": 32}
"""Images that go through a network at a time."""
SHOWN = 25
TAIL, BINS = 5.0, 51  # of the histograms of residuals, in standard deviations


@dataclass(frozen=True)
class HeldOut:
    """Test digits x, their noisy versions x_t, and the posterior of each; by label, such as "diagonal, 10 probes"."""

    x: Tensor
    x_t: Tensor
    posteriors: dict[str, Gaussian]
    methods: dict[str, str]  # label -> one of METHODS

    def drawn(self) -> list[str]:
        """The posteriors to draw: of those of one method the last, which has the most probes."""
        return list({method: label for label, method in self.methods.items()}.values())

    def deviations(self) -> dict[str, Tensor]:
        """The standard deviations of those at the first digits."""
        return {label: self.posteriors[label].cov.diagonal()[:SHOWN].sqrt() for label in self.drawn()}


def posteriors_of(context: Context, runs: Mapping[str, Training], settings: MnistSettings) -> HeldOut:
    """Each posterior at the same noisy digits; the diagonal with as many probes as chains use, and with many."""
    x, x_t = noisy_digits(context, NoiseLevel(sigma=SIGMA), settings.held_out)
    diagonals = {f"diagonal, {n} probes": ("diagonal", n) for n in (settings.probes, settings.map_probes)}
    labels = diagonals | {METHODS[method]: (method, 0) for method in ("isotropic", "learned")}
    cells = {(label, SIGMA): one for label, one in labels.items() if source(runs, one[0]).model is not None}
    found = Grid("posterior", cells, partial(_posterior, context, runs, x_t), settings, beside=True).run(context)
    posteriors = {}
    for (label, _), part in found.parts.items():
        repaired = torch.full((len(x),), part.values["repaired"])
        posteriors[label] = Gaussian(part.tensors["mean"], Diagonal(part.tensors["variance"]), repaired)
    return HeldOut(x, x_t, posteriors, {label: labels[label][0] for label in posteriors})


def _posterior(context: Context, runs: Mapping[str, Training], x_t: Tensor, cell: Cell) -> Part:
    method, probes = cell.what
    model = source(runs, method).left
    moments = moments_of(model, method, probes)
    found = []
    for first in range(0, len(x_t), rows := ROWS.get(context.device.type, ROWS["cpu"])):
        batch = x_t[first : first + rows].to(context.device)
        streams = Streams(context.seed, len(batch), first_row=first, purpose="probes")
        found.append(moments(batch, model.level, generator=streams))
    repaired = sum(q.repaired.sum().item() for q in found if q.repaired is not None) / len(x_t)
    variances = torch.cat([q.cov.diagonal().cpu() for q in found])
    return Part({"repaired": repaired}, {"mean": torch.cat([q.mean.cpu() for q in found]), "variance": variances})


# --- Figure 4 -------------------------------------------------------------------------------------------------------


def covariance_section(
    found: HeldOut, calibrated: Mapping[str, dict[str, Any]], settings: MnistSettings, seed: int
) -> Section:
    """The standard deviation of every pixel, and a draw of the posterior's noise."""
    text = [
        "The posterior of a noisy digit is sure of the background and unsure along the strokes. A diagonal covariance, "
        f"from the energy's Jacobian by {settings.map_probes} probes or learned by KL, should show the digit's "
        "outline; an isotropic one is the same everywhere.",
    ]
    rows = [[label, f"{one['median_std']:.4f}"] for label, one in calibrated.items()]
    note = f"The standard deviation within one grey level is {QUANTISATION:.4f}."
    table = Table("Standard deviations of the posteriors", ["posterior", "median over all pixels"], rows, note)
    noise, limit = _draw_noise(found, seed)
    captions = {
        "mnist_std": f"25 test digits, the same with noise of sigma {SIGMA:g}, and the standard deviation of each "
        "posterior.",
        "mnist_noise": "As the paper draws it: a draw of each posterior's noise, through a sigmoid. All three share "
        f"one draw of standard normals; a noise of {limit:.2f} is white.",
    }
    canvases = (_draw_deviations(found), noise)
    drawn = [Figure(name, caption, canvas) for (name, caption), canvas in zip(captions.items(), canvases, strict=True)]
    return Section("Figure 4: covariances of noisy digits", text, [table], drawn)


def _draw_deviations(found: HeldOut) -> Canvas:
    """Digits, noisy digits, and the standard deviation of each posterior in one colour scale."""
    deviations = found.deviations()
    high = max(torch.quantile(one, 0.999).item() for one in deviations.values())
    canvas, axes = new_figure(1, 2 + len(deviations), 2.5)
    picture(axes[0][0], found.x[:SHOWN], "digits x")
    picture(axes[0][1], found.x_t[:SHOWN], "noisy digits $x_t$")
    for axis, (label, values) in zip(axes[0][2:], deviations.items(), strict=True):
        drawn = picture(axis, values, label, high=high, cmap="magma")
    colour_bar(canvas, drawn, axes[0], "standard deviation of p(x | $x_t$)")
    return canvas


def _draw_noise(found: HeldOut, seed: int) -> tuple[Canvas, float]:
    """A draw of each posterior's noise through a sigmoid; also the noise that is white.

    All posteriors share one draw of standard normals, so that only the standard deviations differ.
    """
    x = found.x[:SHOWN]
    z = randn_like(x, Streams(seed, len(x), purpose="drawn noise"))
    noises = {label: deviation * z for label, deviation in found.deviations().items()}
    limit = max(torch.quantile(noise.abs(), 0.99).item() for noise in noises.values())
    low, high = (1 / (1 + math.exp(-end)) for end in (-limit, limit))
    return pictures({label: noise.sigmoid() for label, noise in noises.items()}, low=low, high=high), limit


# --- calibration ----------------------------------------------------------------------------------------------------


def calibrations(found: HeldOut, background: Tensor) -> dict[str, dict[str, Any]]:
    """For each posterior its calibration over all pixels, those it is uncertain of, and the background; reliability.

    The diagonal of many probes also with the floor and scale that fit every second digit, judged on the others.
    """
    records = {label: _calibration(found.x, q, background) for label, q in found.posteriors.items()}
    for label in (label for label in found.drawn() if found.methods[label] == "diagonal"):
        q = found.posteriors[label]
        fitted, judged = (Gaussian(q.mean[i::2], Diagonal(q.cov.diagonal()[i::2])) for i in (0, 1))
        floor, scale = likeliest_lift([(found.x[::2], fitted)], SIGMA**2)
        variances, limit = judged.cov.diagonal(), floor * SIGMA**2
        lifted = (variances < limit).float().flatten(1).mean(1)
        judged = Gaussian(judged.mean, Diagonal(scale * variances.clamp(min=limit)), lifted)
        records[label + FITTED] = _calibration(found.x[1::2], judged, background) | {"floor": floor, "scale": scale}
    return records


def _calibration(x: Tensor, q: Gaussian, background: Tensor) -> dict[str, Any]:
    std = q.cov.diagonal().sqrt()
    places = {"all": None, "uncertain": std > UNCERTAIN, "background": background.expand_as(x)}
    return {
        **{where: asdict(calibration(x, q, mask)) for where, mask in places.items()},
        "reliability": asdict(reliability(x, q)),
        "repaired": 0.0 if q.repaired is None else q.repaired.mean().item(),
        "median_std": std.median().item(),
    }


def calibration_section(found: HeldOut, calibrated: Mapping[str, dict[str, Any]], background: Tensor) -> Section:
    """Are the variances right?"""
    rows = []
    for label, one in calibrated.items():
        for place, name in PLACES.items():
            values, share = one[place], one[place]["count"] / one["all"]["count"]
            numbers = [_plain(values[key]) for key in ("variance", "within_one", "within_two", "nll")]
            lifted = f"{100 * one['repaired']:.1f}%" if place == "all" else ""
            rows.append([label, name, f"{100 * share:.0f}%", *(numbers if values["count"] else [""] * 4), lifted])
    header = ["posterior", "pixels", "share", "variance", "within 1 std", "within 2 std", "NLL a pixel", "lifted"]
    note = (
        f"Residuals (x - mean) / std of {len(found.x):,} held-out test digits. Expected: variance 1, "
        f"{EXPECTED_COVERAGE[0]:.3f} within one and {EXPECTED_COVERAGE[1]:.3f} within two standard deviations for a "
        "Gaussian. NLL: mean negative log-likelihood in nats, smaller is better. Uncertain: by each posterior's own "
        "standard deviation. Lifted: variances below the floor."
    )
    text = [
        "If a posterior's variances are right, its standardised residuals have variance 1: above 1 it is too sure, "
        "below 1 not sure enough. The calibrated posterior has the floor and the scale that make every second digit "
        "likeliest, judged on the others (`mmdgs.calibrate`).",
    ]
    claims = []
    for label, one in calibrated.items():
        if "floor" in one:
            plain, floored = calibrated[label.removesuffix(FITTED)]["all"]["nll"], one["all"]["nll"]
            gained = f"{_plain(floored)} against {_plain(plain)}, floor {one['floor']:.2g} sigma^2"
            claims.append(Claim("a fitted floor and scale make held-out digits likelier", floored < plain, gained))
    caption = (
        "Left and middle: residuals against the standard normal (black), on a logarithmic scale. Right: error against "
        "predicted standard deviation, in bins; on the line the prediction is right, above it too sure."
    )
    figure = Figure("mnist_calibration", caption, _draw_calibration(found, calibrated, background))
    table = Table("Calibration of the posteriors", header, rows, note, left=2)
    return Section("Calibration", text, [table], [figure], claims)


def _plain(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _draw_calibration(found: HeldOut, records: Mapping[str, dict[str, Any]], background: Tensor) -> Canvas:
    """Residuals over the pixels a posterior is uncertain of and over the background; reliability."""
    canvas, axes = new_figure(1, 3, inches=(11.5, 3.4))
    uncertain, black, right = axes[0]
    for label, q in found.posteriors.items():
        look = {"color": style(found.methods[label]).colour, "linestyle": "-" if label in found.drawn() else ":"}
        z = standardised(found.x, q)
        _histogram(uncertain, z[q.cov.diagonal().sqrt() > UNCERTAIN], look)
        _histogram(black, z[background.expand_as(found.x)], look)
        curve = records[label]["reliability"]
        marker = "o" if len(curve["counts"]) == 1 else "."
        right.loglog(curve["predicted"], curve["observed"], marker=marker, label=label, **look)
    line = torch.linspace(-TAIL, TAIL, 201)
    for axis, title in ((uncertain, f"uncertain pixels (std > {UNCERTAIN:g})"), (black, "background pixels")):
        axis.plot(line, (-0.5 * line.square()).exp() / math.sqrt(2 * math.pi), color="black", linewidth=1, alpha=0.7)
        axis.set(yscale="log", ylim=(1e-4, 20), xlim=(-TAIL, TAIL))
        labelled(axis, title, "(x - mean) / std", "density")
    ends = [*right.get_xlim(), *right.get_ylim()]
    right.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=1, alpha=0.7, zorder=0)
    labelled(right, "reliability", "predicted standard deviation", "root mean square error")
    right.legend(fontsize=7, frameon=False)
    return canvas


def _histogram(axis: Axes, z: Tensor, look: Mapping[str, Any]) -> None:
    """The density of z as a line; what lies beyond the tails is counted but not drawn."""
    if len(z) == 0:
        return
    edges = torch.linspace(-TAIL, TAIL, BINS + 1, dtype=z.dtype)
    counts = torch.histogram(z, edges).hist
    density = torch.where(counts > 0, counts / (len(z) * 2 * TAIL / BINS), torch.nan)
    axis.plot((edges[1:] + edges[:-1]) / 2, density, linewidth=1.4, **look)
