"""The report of the MNIST experiment on samples: what the figures show, as the numbers say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmdgs.lab.mnist_figures import draw_chains, draw_numbers, draw_sigmas
from mmdgs.lab.mnist_measures import METHODS, kept_steps
from mmdgs.lab.mnist_models import SIGMA
from mmdgs.lab.mnist_report import Findings
from mmdgs.lab.mnist_yardstick import BLACK_SHARE, QUANTISATION
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.metrics import interval


def _failures(scores: Mapping[Any, dict[str, Any]], name: str) -> list[str]:
    return [f"The chains of {name} {key} broke off: {s['failed']}." for key, s in scores.items() if s["failed"]]


def chain_section(found: Findings) -> Section:
    """Figure 3."""
    steps = kept_steps(found.settings)
    shown = [one for one in found.chains.values() if one.values["failed"] is None]
    repaired = ", ".join(f"{METHODS[c.method]} {100 * c.values['repaired']:.2f}%" for c in shown)
    text = [
        "The paper's Figure 3: 25 chains from uniform noise, the same start for each posterior. The diagonal posterior "
        "should give strokes on a clean black ground; the isotropic one leaves its noise on the ground, since every "
        "pixel gets the same variance. Grey fog or digits that do not form would show a mean or a variance that is "
        "wrong.",
        f"The diagonal takes {found.settings.probes} probes a step. Fraction of variances that lay below the floor "
        f"and were lifted to it: {repaired}.",
        *_failures(found.scores, "posterior"),
    ]
    caption = "25 Gibbs chains after t steps; one row for each posterior. Black is 0 and white is 1."
    return Section(
        "Figure 3: samples of three posteriors",
        text,
        (),
        [Figure("mnist_chains", caption, draw_chains(shown, steps))] if shown else [],
    )


COLUMNS = ("frechet", "class_distance", "entropy", "confidence", "background")
HEADER = ["Fréchet", "class distance", "class entropy", "confidence", "background noise"]


def _cells(one: dict[str, Any]) -> list[str]:
    if one.get("failed"):
        return ["broke off"] * len(COLUMNS)
    cells = []
    for column in COLUMNS:
        mean, half = interval(one[column])
        digits = {"background": 4, "frechet": 1 if mean >= 10 else 2}.get(column, 3)
        cells.append(f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}"))
    return cells


def _note(found: Findings) -> str:
    floor = found.yardstick.floor
    return (
        f"Mean ± 95% interval over {found.settings.groups} groups of {floor['group_size']} chains, each against "
        f"{found.yardstick.reference.count:,} test images; the row of test images is the other half of the test set, "
        "in groups of the same size, and is what perfect samples would score. Fréchet distance in the classifier's 64 "
        "features (smaller is better, biased upwards in small groups). Class distance: total variation from the test "
        "set's classes. Entropy: at most 2.303 nats. Confidence: of the classifier, mean. Background noise: standard "
        f"deviation over chains of a pixel that is black in {BLACK_SHARE:.0%} of the training images, median over "
        f"those {int(found.yardstick.background.sum())} pixels."
    )


def number_section(found: Findings) -> Section:
    """The samples in numbers."""
    good = {method: one for method, one in found.scores.items() if not one["failed"]}
    rows = [[METHODS[method], *_cells(one)] for method, one in found.scores.items()]
    rows.append(["test images", *_cells(found.yardstick.floor)])
    count = found.settings.chains
    table = Table(
        f"Last states of {count:,} chains of {found.settings.steps} steps", ["posterior", *HEADER], rows, _note(found)
    )
    accuracy = f"{100 * found.yardstick.accuracy:.2f}%"
    text = [
        f"A digit classifier that is right on {accuracy} of the 10,000 test images judges the chains. A posterior "
        "that loses modes has a large class distance, blurred digits a low confidence, noise a large Fréchet "
        "distance.",
        *([_order(good, METHODS), _noise_verdict(good)] if good else []),
    ]
    caption = "Means with 95% intervals, and the classes of all chains; dashed: test images."
    figures = [Figure("mnist_numbers", caption, draw_numbers(good, found.yardstick, QUANTISATION))]
    return Section("The samples in numbers", text, [table], figures if good else [])


def _order(scores: Mapping[Any, dict[str, Any]], names: Mapping[Any, str]) -> str:
    """Rows by their mean Fréchet distance, and whether the first two differ by more than their intervals."""
    found = {key: interval(one["frechet"]) for key, one in scores.items()}
    ranked = sorted(found, key=lambda key: found[key][0])
    said = "Fréchet distance, smallest first: " + ", ".join(f"{names[k]} ({found[k][0]:.3g})" for k in ranked) + "."
    if len(ranked) > 1:
        (first, half), (second, other) = found[ranked[0]], found[ranked[1]]
        apart = first + half < second - other
        said += f" The intervals of the first two {'do not overlap' if apart else 'overlap, or are not known'}."
    return said


def _noise_verdict(scores: Mapping[str, dict[str, Any]]) -> str:
    noise = {method: interval(one["background"])[0] for method, one in scores.items()}
    times = ", ".join(f"{METHODS[m]} {value / QUANTISATION:.1f}" for m, value in noise.items())
    return (
        f"A pixel that is always black has a standard deviation of {QUANTISATION:.5f} in the data (one grey level); "
        f"in the chains it is larger by these factors: {times}."
    )


def sigma_section(found: Findings) -> Section:
    """Appendix C.1."""
    good = {sigma: one for sigma, one in found.level_scores.items() if not one["failed"]}
    rows = [[f"{sigma:g}", *_cells(one)] for sigma, one in found.level_scores.items()]
    rows.append(["test images", *_cells(found.yardstick.floor)])
    table = Table(
        "The diagonal posterior at three noise levels", ["sigma", *HEADER], rows, "Numbers as in the table above."
    )
    text = [
        "Appendix C.1: little noise makes each posterior nearly Gaussian but chains that hardly move; much noise makes "
        "chains that mix and posteriors that no Gaussian fits. The paper finds 0.5 to look best.",
        *_failures(found.level_scores, "sigma"),
    ]
    if good:
        best = min(good, key=lambda sigma: interval(good[sigma]["frechet"])[0])
        agree = "as in the paper" if best == SIGMA else f"unlike in the paper, which prefers {SIGMA:g}"
        text.append(f"By Fréchet distance the best level here is sigma {best:g}, {agree}.")
        text.append(_order(good, {sigma: f"sigma {sigma:g}" for sigma in good}))
    shown = [found.levels[sigma] for sigma in good]
    caption = f"25 chains after {found.settings.steps} steps with the diagonal posterior, for each noise level."
    figures = [Figure("mnist_sigmas", caption, draw_sigmas(shown))] if shown else []
    return Section("Appendix C.1: the noise level", text, [table], figures)
