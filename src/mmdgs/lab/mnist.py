"""MNIST with one noise level: the paper's Figures 3, 4 and 5 and its Appendix C.1, with numbers beside the pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from mmdgs.errors import NonFiniteError
from mmdgs.lab import mnist_figures as figures
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Cell, Grid, Measure, Results, together
from mmdgs.lab.mnist_models import (
    BLACK_SHARE,
    CURVES,
    ENERGY,
    LEARNED,
    QUANTISATION,
    SIGMA,
    SIGMAS,
    MnistSettings,
    Training,
    Yardstick,
    scored_test_images,
    settings_for,
    train_all,
    yardstick,
)
from mmdgs.lab.mnist_posteriors import (
    FITTED,
    METHODS,
    UNCERTAIN,
    HeldOut,
    calibrations,
    held_out,
    methods,
    probe_errors,
    source,
)
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.running import model_chains, posterior_of
from mmdgs.lab.workspace import Part
from mmdgs.metrics import Instability, instability
from mmdgs.metrics.coverage import EXPECTED_COVERAGE
from mmdgs.tables import Table

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
PLACES = {"all": "all", "uncertain": f"uncertain (std > {UNCERTAIN:g})", "background": "background"}
SLOPE, NEAR = -0.5, 0.15
"""A slope this near to the expected one counts as it: a fit over few powers of two has an error of some hundredths."""
QUICK = (
    "This is the quick version: networks this small and trained this briefly show how everything is measured, not how "
    "good the posteriors can be."
)


def run(context: Context) -> Outcome:
    """Train (or take from the folder) the models, run their chains, measure, and draw."""
    settings = settings_for(context)
    runs = train_all(context, settings)
    jobs: list[Callable[[], object]] = [
        partial(yardstick, context),
        partial(probe_errors, context, runs[ENERGY].left, settings),
    ]
    together(context, jobs, "yardstick and probes")
    by, probes = yardstick(context), probe_errors(context, runs[ENERGY].left, settings)
    cells = {(method, SIGMA): method for method in (*methods(runs), TEST)}
    cells |= {("diagonal", sigma): "diagonal" for sigma in SIGMAS}
    measure = partial(_chains, context, runs, by, settings)
    chains = Grid("chains", cells, measure, depends=(settings, by), across="sigma", beside=True).run(context)
    posteriors = held_out(context, runs, settings)
    calibrated = calibrations(posteriors, by.background)
    curves = {name: instability(runs[name].losses, window=settings.spike_window) for name in (*CURVES, ENERGY, LEARNED)}
    records = {
        "settings": {"sigma": SIGMA, "sigmas": SIGMAS, **asdict(settings)},
        "training": {name: one.record() for name, one in runs.items()},
        "instability": {name: asdict(one) for name, one in curves.items()},
        "yardstick": by.record(),
        "chains": chains.records(),
        "probe_errors": probes,
        "calibration": calibrated,
    }
    sections = [
        _loss_section(runs, curves, settings, context.quick),
        _map_section(posteriors, calibrated, settings, context.seed),
        _chain_section(chains, by, settings),
        _sigma_section(chains, settings),
        _probe_section(probes),
        _calibration_section(posteriors, calibrated, by),
    ]
    return Outcome(records, sections)


def kept_steps(settings: MnistSettings) -> tuple[int, ...]:
    """The steps whose states are drawn."""
    return (*(t for t in KEPT if t < settings.steps), settings.steps)


def _chains(context: Context, runs: Mapping[str, Training], by: Yardstick, settings: MnistSettings, cell: Cell) -> Part:
    """Gibbs chains from noise with a posterior at a noise level, and their scores; `failed` where they broke off."""
    if cell.row == TEST:
        return Part({"failed": None, **by.score(scored_test_images(context, settings), settings.groups)})
    training = source(runs, cell.row) if cell.column == SIGMA else runs[f"energy-{cell.column:g}"]
    moments = posterior_of(training.left, cell.row, settings.probes)
    try:
        x, repaired = model_chains(
            training.left, moments, settings.chains, settings.steps, keep=kept_steps(settings), seed=cell.seed,
            label=cell.name,
        )  # fmt: skip
    except NonFiniteError as error:
        return Part({"failed": str(error)})
    if not torch.isfinite(x).all():
        return Part({"failed": "states that are not finite"})
    scores = by.score(x[-1], settings.groups)
    return Part({"failed": None, "repaired": repaired, **scores}, {"path": x[:, : figures.SHOWN].clone()})


def _loss_section(
    runs: Mapping[str, Training], curves: Mapping[str, Instability], settings: MnistSettings, quick: bool
) -> Section:
    """Figure 5."""
    rows = []
    for name, one in curves.items():
        run, training = runs[name], runs[name].recipe.training
        rows.append(
            [
                f"{'KL' if run.recipe.param == 'mean-std' else 'DSM'}, {name}",
                f"{one.steps:,}",
                f"{training.learning_rate:g}" + (", decaying" if training.decay else ""),
                str(len(one.spikes)),
                f"{100 * one.spike_fraction:.2f}%",
                f"{100 * one.largest_jump:.1f}%",
                "" if run.stopped_at is None else f"step {run.stopped_at:,}",
            ]
        )
    note = (
        "A spike: a loss more than 10 robust standard deviations (of the changes from step to step) above the median "
        f"of the {settings.spike_window} losses before it. "
        "Largest jump: the largest rise above that median, relative to the first loss less the lowest median."
    )
    header = ["run", "steps", "learning rate", "spikes", "share of steps", "largest jump", "not finite at"]
    text = [
        "The paper's Figure 5: the KL loss of a learned posterior has no lower bound where pixels are always black, "
        "and its training should jump; denoising score matching (DSM) should fall smoothly. The images are "
        "dequantised, so no pixel is exactly constant and the KL loss is bounded below: its variances can fall to "
        "those of a grey level, and no further.",
        *([QUICK] if quick else []),
    ]
    text += [
        f"The run {run.name} ended in a loss that is not finite, at step {run.stopped_at:,}; "
        + ("its best weights before that are used below." if run.model else "it left no weights to use below.")
        for run in runs.values()
        if run.stopped_at is not None
    ]
    claims = stability_claims(*(curves[name] for name in CURVES))
    caption = (
        "Training loss of every step (grey), its running median (blue), spikes (red). The first steps are above the "
        "picture."
    )
    canvas = figures.draw_losses({name: runs[name] for name in CURVES}, curves, settings.spike_window)
    table = Table("Instability of the losses", header, rows, note)
    return Section("Figure 5: training losses", text, [table], [Figure("mnist_losses", caption, canvas)], claims)


def stability_claims(dsm: Instability, kl: Instability) -> list[Claim]:
    """The paper's finding on the losses; a KL run alone that ended in a loss that is not finite bears it out."""
    failed = kl.failed_at is not None and dsm.failed_at is None
    jumps = f"{100 * kl.largest_jump:.1f}% against {100 * dsm.largest_jump:.1f}% of the improvement"
    return [
        Claim("KL has more spikes", failed or len(kl.spikes) > len(dsm.spikes), f"{len(kl.spikes)}, {len(dsm.spikes)}"),
        Claim("KL has the larger jump", failed or kl.largest_jump > dsm.largest_jump, jumps),
    ]


def _map_section(
    found: HeldOut, calibrated: Mapping[str, dict[str, Any]], settings: MnistSettings, seed: int
) -> Section:
    """Figure 4."""
    noise, limit = figures.draw_noise(found, seed)
    text = [
        "The paper's Figure 4: the posterior of a noisy digit is sure of the background and unsure along the strokes. "
        f"A diagonal covariance, from the energy's Jacobian by {settings.map_probes} probes or learned by KL, "
        "should show the digit's outline; an isotropic one is the same everywhere. A diagonal without outlines would "
        "mean that the Jacobian carries no information.",
    ]
    rows = [[label, f"{one['median_std']:.4f}"] for label, one in calibrated.items()]
    note = f"The standard deviation within one grey level is {QUANTISATION:.4f}."
    table = Table("Standard deviations of the posteriors", ["posterior", "median over all pixels"], rows, note)
    drawn = [
        Figure(
            "mnist_std",
            f"25 test digits, the same with noise of sigma {SIGMA:g}, and the standard deviation of each posterior.",
            figures.draw_maps(found),
        ),
        Figure(
            "mnist_noise",
            "As the paper draws it: a draw of each posterior's noise, through a sigmoid. All three share one draw of "
            f"standard normals; a noise of {limit:.2f} is white.",
            noise,
        ),
    ]
    return Section("Figure 4: covariances of noisy digits", text, [table], drawn)


def _broke_off(chains: Results) -> list[str]:
    """A sentence for each cell whose chains broke off."""
    failed = {key: part.values["failed"] for key, part in chains.parts.items() if part.values["failed"]}
    return [f"The chains of {row} at sigma {sigma:g} broke off: {why}." for (row, sigma), why in failed.items()]


def _chain_section(chains: Results, by: Yardstick, settings: MnistSettings) -> Section:
    """Figure 3, and the samples in numbers."""
    good = {row: METHODS[row] for row in METHODS if chains.values(row, SIGMA).get("frechet")}
    test = chains.values(TEST, SIGMA)
    text = [
        "The paper's Figure 3: 25 chains from uniform noise, the same start for each posterior. The diagonal posterior "
        f"({settings.probes} probes a step) should give strokes on a clean black ground; the isotropic one leaves its "
        "noise on the ground, since every pixel gets the same variance. Grey fog or digits that do not form would show "
        "a mean or a variance that is wrong.",
        f"A digit classifier that is right on {100 * by.accuracy:.2f}% of the test images judges the chains. A "
        "posterior that loses modes has a large class distance, blurred digits a low confidence, noise a large Fréchet "
        "distance.",
        *_broke_off(chains),
    ]
    note = (
        f"Mean ± 95% interval over {settings.groups} groups of {test['group_size']} chains, each against "
        f"{by.reference.count:,} test images; the row of test images is the other half of the test set, in groups of "
        "the same size, and is what perfect samples would score. Fréchet distance in the classifier's 64 features "
        "(smaller is better, biased upwards in small groups). Class distance: total variation from the test set's "
        "classes. Entropy: at most 2.303 nats. Confidence: of the classifier, mean. Background noise: standard "
        f"deviation over chains of a pixel that is black in {BLACK_SHARE:.0%} of the training images, median over "
        f"those {int(by.background.sum())} pixels; within one grey level it is {QUANTISATION:.5f}. Repaired: variances "
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
        drawn.append(Figure("mnist_chains", caption, figures.draw_chains(chains, good, kept_steps(settings))))
        caption = "Means with 95% intervals, and the classes of all chains; dashed: test images."
        numbers = figures.draw_numbers(chains, good, (FRECHET, BACKGROUND), TEST, by.shares.tolist())
        drawn.append(Figure("mnist_numbers", caption, numbers))
    if {"diagonal", "isotropic"} <= good.keys():
        others = [row for row in good if row != "diagonal"]
        claims = [chains.below("diagonal", row, one, [SIGMA]) for row in others for one in (FRECHET, BACKGROUND)]
    return Section("Figure 3: samples of three posteriors", text, [table], drawn, claims)


def _sigma_section(chains: Results, settings: MnistSettings) -> Section:
    """Appendix C.1."""
    text = [
        "Appendix C.1: little noise makes each posterior nearly Gaussian but chains that hardly move; much noise makes "
        "chains that mix and posteriors that no Gaussian fits. The paper finds 0.5 to look best.",
    ]
    title = "The diagonal posterior at three noise levels; numbers as in the table above"
    table = chains.listing(title, SCORES, head="posterior", rows=["diagonal", TEST])
    good = [sigma for sigma in SIGMAS if chains.values("diagonal", sigma).get("frechet")]
    distances = {sigma: chains.number("diagonal", sigma, FRECHET) for sigma in good}
    numbers = "; ".join(f"{one.text(2)} at {sigma:g}" for sigma, one in distances.items())
    best = FRECHET.best(distances)
    claims = [Claim(f"sigma {SIGMA:g} has the smallest Fréchet distance", best == {SIGMA} if good else None, numbers)]
    caption = f"25 chains after {settings.steps} steps with the diagonal posterior, for each noise level."
    drawn = [Figure("mnist_sigmas", caption, figures.draw_sigmas(chains, good))] if good else []
    return Section("Appendix C.1: the noise level", text, [table], drawn, claims)


def _probe_section(found: dict[str, Any]) -> Section:
    """The error of the probes."""
    text = [
        "Rademacher probes give the diagonal of the Jacobian with an error that falls as one over the root of their "
        "number. The dashed line is that error computed from the exact Jacobian "
        f"({found['images']} noisy digits, one product for each pixel); a biased estimator would level off above it. "
        f"{100 * found['negative']:.1f}% of the exact diagonal is negative: the network's own error.",
    ]
    lines = zip(found["probes"], found["error"], found["expected"], strict=True)
    rows = [[f"{count}", f"{error:.3f}", f"{expected:.3f}"] for count, error, expected in lines]
    table = Table("Relative error of the diagonal", ["probes", "measured", "expected"], rows)
    slope = found["slope"]
    claim = Claim(f"the error falls as the probes to the power {SLOPE}", abs(slope - SLOPE) < NEAR, f"{slope:.3f}")
    caption = (
        "Relative error (Euclidean norm) of the probed diagonal against the exact one, mean over digits and draws."
    )
    figure = Figure("mnist_probes", caption, figures.draw_probes(found))
    return Section("How many probes", text, [table], [figure], [claim])


def _calibration_section(found: HeldOut, calibrated: Mapping[str, dict[str, Any]], by: Yardstick) -> Section:
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
        "If a posterior's variances are right, its standardised residuals have variance 1. Above 1 it is too sure, "
        "below 1 not sure enough. A single number over all pixels can hide both: the isotropic variance is fitted to "
        "be right on average, whatever it is on the background and along strokes. A variance below the floor was "
        "lifted to it, and there a residual can be thousands of standard deviations, which then fills the variance "
        "over all pixels.",
        "Below some size a variance says less than the error of the network itself. A fitted floor is the one that "
        "makes every second digit likeliest, judged on the others. `metrics.fitted_floor` finds it, and the estimators "
        "take it as `floor`.",
    ]
    claims = []
    for label, one in calibrated.items():
        if "floor" in one:
            plain, floored = calibrated[label.removesuffix(FITTED)]["all"]["nll"], one["all"]["nll"]
            gained = f"{_plain(floored)} against {_plain(plain)}, floor {one['floor'] / SIGMA**2:.2g} sigma^2"
            claims.append(Claim("a fitted floor makes held-out digits likelier", floored < plain, gained))
    caption = (
        "Left and middle: residuals against the standard normal (black), on a logarithmic scale. Right: error against "
        "predicted standard deviation, in bins; on the line the prediction is right, above it too sure."
    )
    canvas = figures.draw_calibration(found, calibrated, by.background)
    table = Table("Calibration of the posteriors", header, rows, note, left=2)
    return Section("Calibration", text, [table], [Figure("mnist_calibration", caption, canvas)], claims)


def _plain(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"
