"""MNIST with one noise level: the paper's Figures 3, 4 and 5 and its Appendix C.1, with numbers
beside the pictures.

The paper's claims: training by denoising score matching (DSM) falls smoothly where training by KL
jumps; a diagonal covariance from the energy's Jacobian follows the strokes, and its chains leave a
cleaner background than one variance; sigma 0.5 looks best. Whether the uncertainty is calibrated is
a column of `calibration`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from experiments.drawing import class_bars, colour_bar, style
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results
from experiments.mnist_networks import (
    BLACK_SHARE,
    CURVES,
    ENERGY,
    LEARNED,
    METHODS,
    QUANTISATION,
    SIGMA,
    SIGMAS,
    MnistSettings,
    Training,
    Yardstick,
    mnist_settings,
    moments_of,
    noisy_digits,
    scored_test_images,
    source,
    train_all,
    yardstick,
)  # fmt: skip
from mmdgs.demo.figures import draw_bars
from mmdgs.errors import NonFiniteError
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.report.drawing import BLUE, GREY, RED, labelled, new_figure, picture, pictures
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.samplers import single_level_plan
from mmdgs.sampling import generate
from mmdgs.tables import Table
from mmdgs.workspace import Part

SHOWN = 25  # digits a picture


def run(context: Context) -> Outcome:
    """Train (or take from the folder) the models, run their chains, measure, and draw."""
    settings = mnist_settings(context)
    runs = train_all(context, settings)
    by = yardstick(context)
    chains = chains_of(context, runs, by, settings)
    maps = deviation_maps(context, runs, settings)
    names = (*CURVES, ENERGY, LEARNED)
    curves = {name: instability(runs[name].losses, settings.spike_window) for name in names}
    records = {
        "settings": {"sigma": SIGMA, "sigmas": SIGMAS, **asdict(settings)},
        "training": {name: training.record() for name, training in runs.items()},
        "instability": {name: asdict(curve) for name, curve in curves.items()},
        "yardstick": by.record(),
        "chains": chains.records(),
    }
    sections = [
        loss_section(runs, curves, settings),
        covariance_section(*maps, settings),
        chain_section(chains, by, settings),
        sigma_section(chains, settings),
    ]
    return Outcome(records, sections)


# --- Figure 5: training losses

THRESHOLD = 10.0
MAD_TO_STD = 1.4826
"""A Gaussian's standard deviation is this many median absolute deviations."""


@dataclass(frozen=True)
class Instability:
    """The steps whose loss lies more than 10 robust standard deviations above the median of the
    window before, their share, the largest rise above that median relative to the improvement
    (first loss less lowest median), and the first step with a loss that is not finite.
    """

    steps: int
    spikes: tuple[int, ...]
    spike_fraction: float
    largest_jump: float
    failed_at: int | None


def running_median(losses: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """For each step from `window` on, the median and a robust deviation of the losses before it.

    The deviation is that of the differences between successive losses, over root two: a falling
    curve counts as quiet.
    """
    before = losses.double().unfold(0, window, 1)[:-1]
    changes = before.diff(dim=1)
    centred = changes - changes.median(dim=1, keepdim=True).values
    spread = centred.abs().median(dim=1).values
    return before.median(dim=1).values, MAD_TO_STD / math.sqrt(2) * spread


def instability(losses: Tensor, window: int) -> Instability:
    """How unstable a run was, from the loss (steps,) of every step."""
    bad = (~torch.isfinite(losses)).nonzero().flatten()
    failed_at = int(bad[0]) if len(bad) else None
    finite = losses[:failed_at].double()
    if len(finite) <= window:
        return Instability(len(finite), (), 0.0, math.nan, failed_at)
    median, deviation = running_median(finite, window)
    rise = finite[window:] - median
    spikes = (rise > THRESHOLD * deviation).nonzero().flatten() + window
    improvement = (finite[0] - median.min()).item()
    jump = max(rise.max().item(), 0.0) / improvement if improvement > 0 else math.inf
    share = len(spikes) / len(rise)
    return Instability(len(finite), tuple(spikes.tolist()), share, jump, failed_at)


def loss_section(
    runs: Mapping[str, Training], curves: Mapping[str, Instability], settings: MnistSettings
) -> Section:
    """The table of spikes, the curves, and the paper's finding."""
    text = [
        "The KL loss of a learned posterior has no lower bound where pixels are always black, and "
        "its training should jump; denoising score matching (DSM) should fall smoothly."
    ]
    for run in runs.values():
        if run.stopped_at is not None:
            kept = "its best weights before that are used" if run.model else "it left no weights"
            ended = f"ended in a loss that is not finite, at step {run.stopped_at:,}"
            text.append(f"The run {run.name} {ended}; {kept}.")
    note = (
        "A spike: a loss more than 10 robust standard deviations (of the changes from step to "
        f"step) above the median of the {settings.spike_window} losses before it. Largest jump: "
        f"the largest rise above that median, relative to the first loss less the lowest median."
    )
    rows = []
    for name, curve in curves.items():
        training, kl = runs[name].recipe.training, runs[name].recipe.param == "mean-std"
        rate = f"{training.learning_rate:g}" + (", decaying" if training.decay else "")
        shares = f"{100 * curve.spike_fraction:.2f}%", f"{100 * curve.largest_jump:.1f}%"
        loss = f"{'KL' if kl else 'DSM'}, {name}"
        rows.append([loss, f"{curve.steps:,}", rate, f"{len(curve.spikes)}", *shares])
    header = ["run", "steps", "learning rate", "spikes", "share of steps", "largest jump"]
    table = Table("Instability of the losses", header, rows, note)
    caption = "Training loss of every step (grey), its running median (blue), spikes (red)."
    figure = Figure("mnist_losses", caption, _draw_losses(runs, curves, settings.spike_window))
    claims = stability_claims(*(curves[name] for name in CURVES))
    return Section("Figure 5: training losses", text, [table], [figure], claims)


def stability_claims(dsm: Instability, kl: Instability) -> list[Claim]:
    """The paper's finding; a KL run alone that ended in a loss that is not finite bears it out."""
    failed = kl.failed_at is not None and dsm.failed_at is None
    jumps = f"{100 * kl.largest_jump:.1f}% against {100 * dsm.largest_jump:.1f}% of the improvement"
    spikes = len(kl.spikes), len(dsm.spikes)
    return [
        Claim("KL has more spikes", failed or spikes[0] > spikes[1], f"{spikes[0]}, {spikes[1]}"),
        Claim("KL has the larger jump", failed or kl.largest_jump > dsm.largest_jump, jumps),
    ]


def _draw_losses(
    runs: Mapping[str, Training], curves: Mapping[str, Instability], window: int
) -> Canvas:
    canvas, axes = new_figure(1, len(CURVES), inches=(9.2, 3.2))
    for axis, name in zip(axes[0], CURVES, strict=True):
        losses = runs[name].losses[: curves[name].steps]
        steps = torch.arange(1, len(losses) + 1)
        axis.plot(steps, losses, color=GREY, linewidth=0.5, alpha=0.8, rasterized=True)
        if len(losses) > window:
            axis.plot(steps[window:], running_median(losses, window)[0], color=BLUE, linewidth=1.2)
            seen = losses[window // 2 :]  # the first steps leave the picture above
            room = 0.06 * (seen.max() - seen.min()).item()
            axis.set_ylim(seen.min().item() - room, seen.max().item() + room)
        spikes = list(curves[name].spikes)
        axis.plot(steps[spikes], losses[spikes], "o", color=RED, markersize=3)
        title = "DSM (energy)" if name == "loss-dsm" else "KL (mean and std)"
        labelled(axis, title, "step", "training loss")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return canvas


# --- Figure 3 and Appendix C.1: Gibbs chains from noise

KEPT = (0, 1, 5, 10, 20)
TEST = "test images"
"""The row of images of the test set, scored like samples: what perfect samples would score."""
FRECHET = Measure("frechet", "Fréchet distance", 2, "less")
BACKGROUND = Measure("background", "background noise", 4, "less")
SCORES = [
    FRECHET,
    Measure("class_distance", "class distance", 3, "less"),
    Measure("entropy", "class entropy", 3, "more"),
    Measure("confidence", "confidence", 3, "more"),
    BACKGROUND,
    Measure("repaired", "repaired", 2, percent=True),
]


def chains_of(
    context: Context, runs: Mapping[str, Training], by: Yardstick, settings: MnistSettings
) -> Results:
    """Every posterior at the paper's noise level, the diagonal one at the others too, and test
    images.
    """

    def measure(cell: Cell) -> Part:
        """The scores of chains; `failed` says why, where they broke off."""
        if cell.row == TEST:
            images = scored_test_images(context, settings.chains)
            return Part({"failed": None, **by.score(images, settings.groups)})
        at_paper = cell.column == SIGMA
        model = (source(runs, cell.row) if at_paper else runs[f"energy-{cell.column:g}"]).left
        moments = moments_of(model, cell.row, settings.probes)
        plan = single_level_plan(moments, model.level, steps=settings.steps)
        options = {"keep": _kept(settings), "seed": cell.seed, "progress": cell.name}
        try:
            samples = generate(model, plan, settings.chains, **options)
        except NonFiniteError as error:
            return Part({"failed": str(error)})
        x = samples.states
        assert x is not None, "states were asked for"
        if not torch.isfinite(x).all():
            return Part({"failed": "states that are not finite"})
        scores = by.score(x[-1], settings.groups)
        values = {"failed": None, "repaired": samples.repaired, **scores}
        return Part(values, {"path": x[:, :SHOWN].clone()})

    left = [method for method in METHODS if source(runs, method).model is not None]
    cells = {(method, SIGMA): method for method in (*left, TEST)}
    cells |= {("diagonal", sigma): "diagonal" for sigma in SIGMAS}
    depends = settings, by.classifier
    return Grid("chains", cells, measure, depends, across="sigma", beside=True).run(context)


def _kept(settings: MnistSettings) -> tuple[int, ...]:
    """The steps whose states are drawn."""
    return (*(t for t in KEPT if t < settings.steps), settings.steps)


def chain_section(chains: Results, by: Yardstick, settings: MnistSettings) -> Section:
    """Figure 3, and the samples in numbers."""
    good = {row: METHODS[row] for row in METHODS if chains.values(row, SIGMA).get("frechet")}
    text = [
        "25 chains from uniform noise, the same start for each posterior. The diagonal posterior "
        "should give strokes on a clean black ground; the isotropic one leaves its noise on the "
        f"ground. A digit classifier that is right on {100 * by.accuracy:.2f}% of the test images "
        f"judges the chains."
    ]
    for (row, sigma), values in chains.cells.items():
        if values["failed"]:
            text.append(f"The chains of {row} at sigma {sigma:g} broke off: {values['failed']}.")
    note = (
        f"Mean ± 95% interval over {settings.groups} groups of "
        f"{chains.values(TEST, SIGMA)['group_size']} chains, each against {by.reference.count:,} "
        f"test images; the row of test images is the other half of the test set. Fréchet distance "
        "in the classifier's 64 features (biased upwards in small groups). Class distance: total "
        "variation from the test set's classes. Entropy: at most 2.303 nats. Background noise: "
        f"standard deviation over chains of a pixel that is black in {BLACK_SHARE:.0%} of the "
        f"training images, median over those {int(by.background.sum())} pixels; within one grey "
        f"level it is {QUANTISATION:.5f}. Repaired: variances lifted to the floor."
    )
    title = f"Last states of {settings.chains:,} chains of {settings.steps} steps"
    rows = {row: METHODS.get(row, row) for row in (*METHODS, TEST) if chains.has(row, SIGMA)}
    shown: Any = {"head": "posterior", "rows": rows, "columns": {SIGMA: ""}, "note": note}
    table = chains.table(title, SCORES, compared=list(METHODS), **shown)
    drawn, claims = [], list[Claim]()
    if good:
        caption = "25 Gibbs chains after t steps; one row for each posterior."
        drawn.append(Figure("mnist_chains", caption, _draw_chains(chains, good, settings)))
        caption = "Means with 95% intervals, and the classes of all chains; dashed: test images."
        drawn.append(Figure("mnist_numbers", caption, _draw_numbers(chains, good, by.shares)))
    if {"diagonal", "isotropic"} <= good.keys():
        for row in (row for row in good if row != "diagonal"):
            for measure in (FRECHET, BACKGROUND):
                claims.append(chains.below("diagonal", row, measure, [SIGMA]))
    return Section("Figure 3: samples of three posteriors", text, [table], drawn, claims)


def sigma_section(chains: Results, settings: MnistSettings) -> Section:
    """Appendix C.1: the diagonal posterior at three noise levels."""
    text = (
        "Little noise makes each posterior nearly Gaussian but chains that hardly move; much noise "
        "makes chains that mix and posteriors that no Gaussian fits. The paper finds 0.5 to look "
        "best."
    )
    title = "The diagonal posterior at three noise levels; numbers as in the table above"
    table = chains.listing(title, SCORES, head="posterior", rows=["diagonal", TEST])
    good = [sigma for sigma in SIGMAS if chains.values("diagonal", sigma).get("frechet")]
    distances = {sigma: chains.number("diagonal", sigma, FRECHET) for sigma in good}
    numbers = "; ".join(f"{number.text(2)} at {sigma:g}" for sigma, number in distances.items())
    holds = FRECHET.best(distances) == {SIGMA} if good else None
    claim = Claim(f"sigma {SIGMA:g} has the smallest Fréchet distance", holds, numbers)
    caption = f"25 chains after {settings.steps} steps with the diagonal posterior, by noise level."
    paths = {sigma: chains.parts["diagonal", sigma].tensors["path"][-1] for sigma in good}
    shown = {rf"$\sigma$ = {sigma:g}": path for sigma, path in paths.items()}
    drawn = [Figure("mnist_sigmas", caption, pictures(shown))] if good else []
    return Section("Appendix C.1: the noise level", [text], [table], drawn, [claim])


def _draw_chains(chains: Results, rows: Mapping[str, str], settings: MnistSettings) -> Canvas:
    """The first chains at some steps: a row for each posterior."""
    steps = _kept(settings)
    canvas, axes = new_figure(len(rows), len(steps), 2.1)
    for line, (row, title) in zip(axes, rows.items(), strict=True):
        for axis, t, x in zip(line, steps, chains.parts[row, SIGMA].tensors["path"], strict=True):
            picture(axis, x, f"t = {t}" if line is axes[0] else "")
        line[0].set_ylabel(title, fontsize=10)
    return canvas


def _draw_numbers(chains: Results, rows: Mapping[str, str], shares: Tensor) -> Canvas:
    """Two measures (the second logarithmic), and the shares of classes, beside test images."""
    canvas, axes = new_figure(1, 3, inches=(11.0, 2.8))
    for axis, measure in zip(axes[0], (FRECHET, BACKGROUND), strict=False):
        numbers = [chains.number(row, SIGMA, measure) for row in rows]
        labels = list(rows.values()) if axis is axes[0][0] else None
        draw_bars(axis, numbers, [style(row).colour for row in rows], measure.title, labels)
        perfect = chains.number(TEST, SIGMA, measure).value
        axis.axvline(perfect, color=GREY, linestyle="--", linewidth=1.2)
    axes[0][1].set(xscale="log", xlim=(QUANTISATION / 2, None))
    classes = {row: chains.values(row, SIGMA)["class_shares"] for row in rows}
    class_bars(axes[0][2], classes, [*"0123456789"])
    axes[0][2].set_xlabel("digit, by the classifier", fontsize=8)
    places = torch.arange(len(shares))
    axes[0][2].hlines(shares, places - 0.45, places + 0.45, GREY, "--", linewidth=1.2)
    return canvas


# --- Figure 4: covariances of noisy digits


def deviation_maps(
    context: Context, runs: Mapping[str, Training], settings: MnistSettings
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Test digits x, noisy versions x_t, and the standard deviations of each posterior by label."""
    x, x_t = noisy_digits(context, NoiseLevel(sigma=SIGMA), SHOWN)

    def measure(cell: Cell) -> Part:
        model, noisy = source(runs, cell.what).left, x_t.to(context.device)
        streams = Streams(context.seed, len(noisy), purpose="probes")
        moments = moments_of(model, cell.what, settings.map_probes)
        q = moments(noisy, model.level, generator=streams)
        return Part({}, {"deviation": q.cov.diagonal().sqrt().cpu()})

    labels = METHODS | {"diagonal": f"diagonal, {settings.map_probes} probes"}
    cells = {(label, SIGMA): m for m, label in labels.items() if source(runs, m).model}
    results = Grid("posterior", cells, measure, settings, beside=True).run(context)
    return x, x_t, {label: part.tensors["deviation"] for (label, _), part in results.parts.items()}


def covariance_section(
    x: Tensor, x_t: Tensor, deviations: Mapping[str, Tensor], settings: MnistSettings
) -> Section:
    """The standard deviation of every pixel, in one colour scale."""
    text = (
        "The posterior of a noisy digit is sure of the background and unsure along the strokes. A "
        f"diagonal covariance, from the energy's Jacobian by {settings.map_probes} probes or "
        "learned by KL, should show the digit's outline; an isotropic one is the same everywhere."
    )
    high = max(torch.quantile(std, 0.999).item() for std in deviations.values())
    canvas, axes = new_figure(1, 2 + len(deviations), 2.5)
    picture(axes[0][0], x, "digits x")
    picture(axes[0][1], x_t, "noisy digits $x_t$")
    for axis, (label, std) in zip(axes[0][2:], deviations.items(), strict=True):
        drawn = picture(axis, std, label, ends=(0, high), cmap="magma")
    colour_bar(canvas, drawn, axes[0], "standard deviation of p(x | $x_t$)")
    caption = (
        f"{len(x)} test digits, with noise of sigma {SIGMA:g}, and each posterior's standard "
        "deviation."
    )
    figure = Figure("mnist_std", caption, canvas)
    return Section("Figure 4: covariances of noisy digits", [text], [], [figure])
