"""The page of `mmdgs diagnose`: traces, autocorrelations, sample sizes and R-hat of chains."""

from __future__ import annotations

from statistics import mean

from torch import Tensor

from mmdgs.diagnostics import LEAST_SIZE, MOST_RHAT, Diagnosis
from mmdgs.metrics.chains import autocorrelations
from mmdgs.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    SLATE,
    labelled,
    new_figure,
)
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.tables import Table

SHOWN, LISTED, LAGS, POINTS = 4, 20, 100, 2_000
"""Numbers drawn and listed, lags of autocorrelation, points of a trace."""
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, PINK, SLATE, GREY)
"""Of the chains that are drawn."""


def outcome(chain: Tensor, diagnosis: Diagnosis) -> Outcome:
    """Figures, tables and records of chains (steps, chains, ...)."""
    x = chain.double().reshape(*chain.shape[:2], -1)
    steps, chains, d = x.shape
    worst = diagnosis.worst(min(LISTED, d))
    text = [
        f"{chains} chains of {steps:,} steps, {d} numbers a state. Shown are those with the "
        f"largest R-hat.",
        f"R-hat is rank normalised, of split chains (Vehtari et al., 2021): at most {MOST_RHAT} is "
        f"good. The effective sample size is that of ranks: at least {LEAST_SIZE} a chain is good.",
    ]
    rows = []
    for k in worst:
        values = [f"{x[..., k].mean():.4g}", f"{x[..., k].std():.4g}"]
        rows.append([str(k), *values, f"{diagnosis.rhat[k]:.4f}", f"{diagnosis.sizes[k]:,.0f}"])
    head = ["number", "mean", "deviation", "R-hat", "effective sample size"]
    tables = [Table("Numbers of a state", head, rows)]
    modes = None
    if diagnosis.coverage is not None:
        coverage = diagnosis.coverage
        modes = vars(coverage) | {"switches": mean(coverage.switches)}  # a chain
        text.append(
            f"A chain changes its mode {modes['switches']:.1f} times; the total variation between "
            f"the modes' weights and the expected ones is {coverage.distance:.3f}."
        )
        shares = zip(coverage.weights, coverage.expected, strict=True)
        lines = [[str(k), *(f"{100 * p:.2f}%" for p in pair)] for k, pair in enumerate(shares)]
        tables.append(Table("Modes", ["mode", "share of the states", "expected"], lines))
    records = {
        "verdict": diagnosis.verdict,
        "steps": steps,
        "chains": chains,
        "rhat": diagnosis.rhat.tolist(),
        "effective_sample_size": diagnosis.sizes.tolist(),
        "modes": modes,
    }
    figure = _figure(x, worst[: min(SHOWN, d)])
    return Outcome(records, [Section("Chains", text, tables, [figure])], diagnosis.verdict)


def _figure(x: Tensor, worst: list[int]) -> Figure:
    """A trace and the autocorrelations of each of some numbers."""
    canvas, axes = new_figure(len(worst), 2, inches=(9.0, 1.9 * len(worst)))
    stride = max(1, len(x) // POINTS)
    lags = min(LAGS, len(x))
    correlations = autocorrelations(x[..., worst], lags)
    for place, ((trace, fall), k) in enumerate(zip(axes, worst, strict=True)):
        for c, colour in zip(range(x.shape[1]), COLOURS, strict=False):
            line = x[::stride, c, k].tolist()
            trace.plot(range(0, stride * len(line), stride), line, color=colour, linewidth=0.6)
        labelled(trace, f"number {k}", "step", "value")
        fall.axhline(0, color=GREY, linewidth=0.6)
        fall.plot(range(lags), correlations[:, place].tolist(), color=BLUE, linewidth=1.2)
        labelled(fall, "", "lag", "autocorrelation")
    caption = f"Traces of up to {len(COLOURS)} chains, and autocorrelations averaged over all."
    return Figure("chains", caption, canvas)
