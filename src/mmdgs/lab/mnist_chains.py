"""Figure 3 and Appendix C.1: digits by Gibbs chains from noise, with three posteriors and at three noise levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure as Canvas

from mmdgs.errors import NonFiniteError
from mmdgs.generation import generate
from mmdgs.lab.drawing import GREY, class_bars, new_figure, picture, pictures
from mmdgs.lab.experiment import Context
from mmdgs.lab.grid import Cell, Grid, Measure, Results
from mmdgs.lab.mnist_models import METHODS, QUANTISATION, SIGMA, SIGMAS, MnistSettings, Training, moments_of, source
from mmdgs.lab.mnist_yardstick import BLACK_SHARE, Yardstick, scored_test_images
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.workspace import Part
from mmdgs.samplers import single_level_plan

KEPT = (0, 1, 5, 10, 20)
SHOWN = 25
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


def chains_of(context: Context, runs: Mapping[str, Training], by: Yardstick, settings: MnistSettings) -> Results:
    """Every posterior at the paper's noise level, the diagonal one at the others too, and test images."""
    left = [method for method in METHODS if source(runs, method).model is not None]
    cells = {(method, SIGMA): method for method in (*left, TEST)}
    cells |= {("diagonal", sigma): "diagonal" for sigma in SIGMAS}
    measure = partial(_measured, context, runs, by, settings)
    return Grid("chains", cells, measure, (settings, by.classifier), across="sigma", beside=True).run(context)


def _measured(
    context: Context, runs: Mapping[str, Training], by: Yardstick, settings: MnistSettings, cell: Cell
) -> Part:
    """Gibbs chains from noise with a posterior at a noise level, and their scores; `failed` where they broke off."""
    if cell.row == TEST:
        return Part({"failed": None, **by.score(scored_test_images(context, settings.chains), settings.groups)})
    training = source(runs, cell.row) if cell.column == SIGMA else runs[f"energy-{cell.column:g}"]
    model = training.left
    plan = single_level_plan(moments_of(model, cell.row, settings.probes), model.level, steps=settings.steps)
    keep = _kept(settings)
    try:
        found = generate(model, plan, settings.chains, keep=keep, seed=cell.seed, progress=cell.name)
    except NonFiniteError as error:
        return Part({"failed": str(error)})
    x = found.states
    assert x is not None, "states were asked for"
    if not torch.isfinite(x).all():
        return Part({"failed": "states that are not finite"})
    scores = by.score(x[-1], settings.groups)
    return Part({"failed": None, "repaired": found.repaired, **scores}, {"path": x[:, :SHOWN].clone()})


def _kept(settings: MnistSettings) -> tuple[int, ...]:
    """The steps whose states are drawn."""
    return (*(t for t in KEPT if t < settings.steps), settings.steps)


def chain_section(chains: Results, by: Yardstick, settings: MnistSettings) -> Section:
    """Figure 3, and the samples in numbers."""
    good = {row: METHODS[row] for row in METHODS if chains.values(row, SIGMA).get("frechet")}
    failed = {key: part.values["failed"] for key, part in chains.parts.items() if part.values["failed"]}
    text = [
        "25 chains from uniform noise, the same start for each posterior. The diagonal posterior should give strokes "
        "on a clean black ground; the isotropic one leaves its noise on the ground. "
        f"A digit classifier that is right on {100 * by.accuracy:.2f}% of the test images judges the chains.",
        *(f"The chains of {row} at sigma {sigma:g} broke off: {why}." for (row, sigma), why in failed.items()),
    ]
    note = (
        f"Mean ± 95% interval over {settings.groups} groups of {chains.values(TEST, SIGMA)['group_size']} chains, each "
        f"against {by.reference.count:,} test images; the row of test images is the other half of the test set. "
        "Fréchet distance in the classifier's 64 features (biased upwards in small groups). Class distance: total "
        "variation from the test set's classes. Entropy: at most 2.303 nats. Background noise: standard deviation over "
        f"chains of a pixel that is black in {BLACK_SHARE:.0%} of the training images, median over those "
        f"{int(by.background.sum())} pixels; within one grey level it is {QUANTISATION:.5f}. Repaired: variances "
        "below the floor, which were lifted to it."
    )
    table = chains.table(
        f"Last states of {settings.chains:,} chains of {settings.steps} steps",
        SCORES,
        head="posterior",
        rows={row: METHODS.get(row, row) for row in (*METHODS, TEST) if chains.has(row, SIGMA)},
        columns={SIGMA: ""},
        compared=list(METHODS),
        note=note,
    )
    drawn, claims = [], []
    if good:
        caption = "25 Gibbs chains after t steps; one row for each posterior. Black is 0 and white is 1."
        drawn.append(Figure("mnist_chains", caption, _draw_chains(chains, good, _kept(settings))))
        caption = "Means with 95% intervals, and the classes of all chains; dashed: test images."
        drawn.append(Figure("mnist_numbers", caption, _draw_numbers(chains, good, by.shares.tolist())))
    if {"diagonal", "isotropic"} <= good.keys():
        others = [row for row in good if row != "diagonal"]
        claims = [chains.below("diagonal", row, one, [SIGMA]) for row in others for one in (FRECHET, BACKGROUND)]
    return Section("Figure 3: samples of three posteriors", text, [table], drawn, claims)


def sigma_section(chains: Results, settings: MnistSettings) -> Section:
    """Appendix C.1: the diagonal posterior at three noise levels."""
    text = [
        "Little noise makes each posterior nearly Gaussian but chains that hardly move; much noise makes chains that "
        "mix and posteriors that no Gaussian fits. The paper finds 0.5 to look best.",
    ]
    title = "The diagonal posterior at three noise levels; numbers as in the table above"
    table = chains.listing(title, SCORES, head="posterior", rows=["diagonal", TEST])
    good = [sigma for sigma in SIGMAS if chains.values("diagonal", sigma).get("frechet")]
    distances = {sigma: chains.number("diagonal", sigma, FRECHET) for sigma in good}
    numbers = "; ".join(f"{one.text(2)} at {sigma:g}" for sigma, one in distances.items())
    best = FRECHET.best(distances)
    claims = [Claim(f"sigma {SIGMA:g} has the smallest Fréchet distance", best == {SIGMA} if good else None, numbers)]
    caption = f"25 chains after {settings.steps} steps with the diagonal posterior, for each noise level."
    shown = {rf"$\sigma$ = {sigma:g}": chains.parts["diagonal", sigma].tensors["path"][-1] for sigma in good}
    drawn = [Figure("mnist_sigmas", caption, pictures(shown))] if good else []
    return Section("Appendix C.1: the noise level", text, [table], drawn, claims)


def _draw_chains(chains: Results, rows: Mapping[str, str], steps: Sequence[int]) -> Canvas:
    """The first chains at each of these steps: a row for each posterior."""
    canvas, axes = new_figure(len(rows), len(steps), 2.1)
    for line, (row, title) in zip(axes, rows.items(), strict=True):
        for axis, t, x in zip(line, steps, chains.parts[row, SIGMA].tensors["path"], strict=True):
            picture(axis, x, f"t = {t}" if line is axes[0] else "")
        line[0].set_ylabel(title, fontsize=10)
    return canvas


def _draw_numbers(chains: Results, rows: Mapping[str, str], shares: Sequence[float]) -> Canvas:
    """Two measures (the second logarithmic), and the shares of classes, beside those of test images."""
    canvas, axes = new_figure(1, 3, inches=(11.0, 2.8))
    for axis, measure in zip(axes[0], (FRECHET, BACKGROUND), strict=False):
        chains.draw_bars(axis, SIGMA, measure, rows, named=axis is axes[0][0])
        axis.axvline(chains.number(TEST, SIGMA, measure).value, color=GREY, linestyle="--", linewidth=1.2)
    axes[0][1].set(xscale="log", xlim=(QUANTISATION / 2, None))
    class_bars(axes[0][2], {row: chains.values(row, SIGMA)["class_shares"] for row in rows}, [*"0123456789"])
    axes[0][2].set_xlabel("digit, by the classifier", fontsize=8)
    for c, share in enumerate(shares):
        axes[0][2].plot([c - 0.45, c + 0.45], [share, share], color=GREY, linewidth=1.2, linestyle="--")
    return canvas
