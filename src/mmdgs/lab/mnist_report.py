"""The report of the MNIST experiment on losses and posteriors: what the figures show, as the numbers say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmdgs.lab.mnist_figures import (
    draw_calibration,
    draw_losses,
    draw_maps,
    draw_noise,
    draw_probes,
)
from mmdgs.lab.mnist_measures import FITTED, PROBE_SEED, UNCERTAIN, Chains, HeldOut
from mmdgs.lab.mnist_models import SIGMA, MnistSettings, Training
from mmdgs.lab.mnist_yardstick import QUANTISATION, Yardstick
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.metrics import Instability
from mmdgs.metrics.coverage import EXPECTED_COVERAGE

PLACES = {"all": "all", "uncertain": f"uncertain (std > {UNCERTAIN:g})", "background": "background"}
SAME = 0.15
"""A slope this near to -1/2 counts as it: a fit over a few powers of two has an error of some hundredths."""


@dataclass(frozen=True)
class Findings:
    """All that was found."""

    settings: MnistSettings
    quick: bool
    seed: int
    runs: Mapping[str, Training]
    curves: Sequence[str]
    instability: Mapping[str, Instability]
    yardstick: Yardstick
    chains: Mapping[str, Chains]
    scores: Mapping[str, dict[str, Any]]
    levels: Mapping[float, Chains]
    level_scores: Mapping[float, dict[str, Any]]
    held_out: HeldOut
    calibration: Mapping[str, dict[str, Any]]
    probes: dict[str, Any]


def loss_section(found: Findings) -> Section:
    """Figure 5."""
    dsm, kl = (found.instability[name] for name in found.curves)
    window = found.settings.spike_window
    names = {name: f"{'KL' if run.asked['loss'] == 'kl' else 'DSM'}, {name}" for name, run in found.runs.items()}
    rows = [
        [
            names[name],
            f"{one.steps:,}",
            f"{found.runs[name].asked['learning_rate']:g}" + (", decaying" if found.runs[name].asked["decay"] else ""),
            str(len(one.spikes)),
            f"{100 * one.spike_fraction:.2f}%",
            f"{100 * one.largest_jump:.1f}%",
            "" if one.failed_at is None else f"step {found.runs[name].stopped_at:,}",
        ]
        for name, one in found.instability.items()
    ]
    note = (
        f"A spike: a loss more than 10 robust standard deviations (of the changes from step to step) above the median "
        f"of the {window} losses before it. "
        "Largest jump: the largest rise above that median, relative to the first loss less the lowest median."
    )
    header = ["run", "steps", "learning rate", "spikes", "share of steps", "largest jump", "not finite at"]
    text = [
        "The paper's Figure 5: the KL loss of a learned posterior has no lower bound where pixels are always black, "
        "and its training should jump; denoising score matching (DSM) should fall smoothly. If both curves were "
        "smooth, or both full of spikes, the figure would not support that.",
        f"Here {_instability_verdict(dsm, kl)} The images are dequantised, so no pixel is exactly constant and "
        "the KL loss is bounded below: its variances can fall to those of a grey level, and no further.",
    ]
    if found.quick:
        text.append(
            "This is the quick version: networks this small and trained this briefly show how everything is measured, "
            "not how good the posteriors can be."
        )
    stopped = [run for run in found.runs.values() if run.stopped_at is not None]
    text += [
        f"The run {run.name} ended in a loss that is not finite, at step {run.stopped_at:,}; "
        + ("its best weights before that are used below." if run.model else "it left no weights to use below.")
        for run in stopped
    ]
    caption = (
        "Training loss of every step (grey), its running median (blue), spikes (red). The first steps are above the "
        "picture."
    )
    canvas = draw_losses(
        {name: found.runs[name] for name in found.curves},
        found.instability,
        dict(zip(found.curves, ("DSM (energy)", "KL (mean and std)"), strict=True)),
        window,
    )
    table = Table("Instability of the losses", header, rows, note)
    return Section("Figure 5: training losses", text, [table], [Figure("mnist_losses", caption, canvas)])


def _instability_verdict(dsm: Instability, kl: Instability) -> str:
    said = (
        f"the KL loss has {len(kl.spikes)} spikes in {kl.steps:,} steps and a largest jump of "
        f"{100 * kl.largest_jump:.1f}% of its improvement, the DSM loss {len(dsm.spikes)} and "
        f"{100 * dsm.largest_jump:.1f}%"
    )
    if kl.failed_at is not None and dsm.failed_at is None:
        return f"{said}; the KL run ended in a loss that is not finite: it is the less stable one."
    if len(kl.spikes) > len(dsm.spikes) and kl.largest_jump > dsm.largest_jump:
        return f"{said}: by both numbers KL is the less stable one."
    if len(kl.spikes) < len(dsm.spikes) and kl.largest_jump < dsm.largest_jump:
        return f"{said}: by both numbers DSM is the less stable one, against the paper's finding."
    return f"{said}: the two numbers do not agree on which is less stable."


def map_section(found: Findings) -> Section:
    """Figure 4."""
    noise, limit = draw_noise(found.held_out, found.seed + PROBE_SEED + 3)
    text = [
        "The paper's Figure 4: the posterior of a noisy digit is sure of the background and unsure along the strokes. "
        f"A diagonal covariance, from the energy's Jacobian by {found.settings.map_probes} probes or learned by KL, "
        "should show the digit's outline; an isotropic one is the same everywhere. A diagonal without outlines would "
        "mean that the Jacobian carries no information.",
        "Median over all pixels of the standard deviation: "
        + ", ".join(f"{label} {one['median_std']:.4f}" for label, one in found.calibration.items())
        + f" (within one grey level it is {QUANTISATION:.4f}).",
    ]
    figures = [
        Figure(
            "mnist_std",
            f"25 test digits, the same with noise of sigma {SIGMA:g}, and the standard deviation of each posterior.",
            draw_maps(found.held_out),
        ),
        Figure(
            "mnist_noise",
            "As the paper draws it: a draw of each posterior's noise, through a sigmoid. All three share one draw of "
            f"standard normals; a noise of {limit:.2f} is white.",
            noise,
        ),
    ]
    return Section("Figure 4: covariances of noisy digits", text, (), figures)


def probe_section(found: Findings) -> Section:
    """The error of the probes."""
    p = found.probes
    near = abs(p["slope"] + 0.5) < SAME
    ratio = p["error"][-1] / p["expected"][-1]
    text = [
        "Rademacher probes give the diagonal of the Jacobian with an error that falls as one over the root of their "
        "number. The dashed line is that error computed from the exact Jacobian "
        f"({p['images']} noisy digits, one product for each pixel); a biased estimator would level off above it.",
        f"Fitted slope {p['slope']:.3f}, {'as expected (-0.5)' if near else 'not the expected -0.5'}; at "
        f"{p['probes'][-1]} probes the error is {ratio:.2f} times the expected one. With {found.settings.probes} "
        f"probes, as in the chains, about {p['expected'][0] / math.sqrt(found.settings.probes):.2f} of the diagonal's "
        f"norm is error. {100 * p['negative']:.1f}% of the exact diagonal is negative: the network's own error.",
    ]
    caption = (
        "Relative error (Euclidean norm) of the probed diagonal against the exact one, mean over digits and draws."
    )
    return Section("How many probes", text, (), [Figure("mnist_probes", caption, draw_probes(p))])


def calibration_section(found: Findings) -> Section:
    """Are the variances right?"""
    rows = []
    for label, one in found.calibration.items():
        for place, name in PLACES.items():
            c = one[place]
            share = c["count"] / one["all"]["count"]
            numbers = [_plain(c[key]) for key in ("variance", "within_one", "within_two", "nll")]
            rows.append([label, name, f"{100 * share:.0f}%", *(numbers if c["count"] else [""] * 4)])
    header = ["posterior", "pixels", "share", "variance", "within 1 std", "within 2 std", "NLL a pixel"]
    note = (
        f"Residuals (x - mean) / std of {len(found.held_out.x):,} held-out test digits. Expected: variance 1, "
        f"{EXPECTED_COVERAGE[0]:.3f} within one and {EXPECTED_COVERAGE[1]:.3f} within two standard deviations for a "
        "Gaussian. NLL: mean negative log-likelihood in nats, smaller is better. Uncertain: by each posterior's own "
        "standard deviation."
    )
    judged = {label: one["uncertain"]["variance"] for label, one in found.calibration.items()}
    judged = {label: value for label, value in judged.items() if not math.isnan(value)}
    best = min(found.calibration, key=lambda label: found.calibration[label]["all"]["nll"])
    text = [
        "If a posterior's variances are right, its standardised residuals have variance 1. Above 1 it is too sure, "
        "below 1 not sure enough. A single number over all pixels can hide both: the isotropic variance is fitted to "
        "be right on average, whatever it is on the background and along strokes.",
        "Where each posterior is uncertain: "
        + ", ".join(f"{label} {_sureness(value)} ({value:.2f})" for label, value in judged.items())
        + f". The best likelihood over all pixels has {best}.",
        "A variance below the floor was lifted to it, and there a residual can be thousands of standard deviations, "
        "which then fills the variance over all pixels. Lifted: "
        + ", ".join(f"{label} {100 * one['repaired']:.1f}%" for label, one in found.calibration.items())
        + " of the pixels.",
        *_floor_said(found.calibration),
    ]
    caption = (
        "Left and middle: residuals against the standard normal (black), on a logarithmic scale. Right: error against "
        "predicted standard deviation, in bins; on the line the prediction is right, above it too sure."
    )
    canvas = draw_calibration(found.held_out, found.calibration, found.yardstick.background)
    table = Table("Calibration of the posteriors", header, rows, note, left=2)
    return Section("Calibration", text, [table], [Figure("mnist_calibration", caption, canvas)])


def _floor_said(records: Mapping[str, dict[str, Any]]) -> list[str]:
    """What a floor fitted to the network's own errors does, if there is one."""
    label, one = next(((label, one) for label, one in records.items() if "floor" in one), (None, {}))
    if label is None:
        return []
    plain = records[label.removesuffix(FITTED)]["all"]
    return [
        "Below some size a variance says less than the error of the network itself. A fitted floor is the one "
        f"that makes every second digit likeliest, {one['floor'] / SIGMA**2:.2g} sigma^2; judged on the others it "
        f"takes the residuals' variance from {_plain(plain['variance'])} to {_plain(one['all']['variance'])} and the "
        f"negative log-likelihood from {_plain(plain['nll'])} to {_plain(one['all']['nll'])}. "
        "`metrics.fitted_floor` finds it, and the estimators take it as `floor`."
    ]


def _plain(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _sureness(variance: float) -> str:
    if variance > 1.25:
        return "is too sure"
    return "is not sure enough" if variance < 0.8 else "is about right"
