"""The page of `mmdgs diagnose`: traces, autocorrelations, effective sample sizes and R-hat of chains."""

from __future__ import annotations

from torch import Tensor

from mmdgs.diagnostics import LEAST_SIZE, MOST_RHAT, Diagnosis
from mmdgs.lab.drawing import BLUE, GREEN, GREY, ORANGE, PINK, PURPLE, RED, SLATE, labelled, new_figure
from mmdgs.lab.experiment import Outcome
from mmdgs.lab.report import Figure, Section
from mmdgs.metrics.chains import autocorrelations
from mmdgs.tables import Table

SHOWN, LISTED, CHAINS, LAGS, POINTS = 4, 20, 8, 100, 2_000
"""Numbers drawn and listed, chains drawn, lags of autocorrelation, points of a trace."""
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, PINK, SLATE, GREY)


def outcome(chain: Tensor, found: Diagnosis) -> Outcome:
    """Figures, tables and records of chains (steps, chains, ...)."""
    x = chain.double().reshape(*chain.shape[:2], -1)
    steps, chains, d = x.shape
    worst = found.worst(min(LISTED, d))
    text = [
        f"{chains} chains of {steps:,} steps, {d} numbers a state. Shown are those with the largest R-hat.",
        f"R-hat is rank normalised, of split chains (Vehtari et al., 2021): at most {MOST_RHAT} is good. The effective "
        f"sample size is that of ranks: at least {LEAST_SIZE} a chain is good.",
    ]
    rows = [
        [str(k), *(f"{v:.4g}" for v in (x[..., k].mean().item(), x[..., k].std().item())),
         f"{found.rhat[k]:.4f}", f"{found.sizes[k]:,.0f}"]
        for k in worst
    ]  # fmt: skip
    tables = [Table("Numbers of a state", ["number", "mean", "deviation", "R-hat", "effective sample size"], rows)]
    if found.coverage is not None:
        text.append(
            f"A chain changes its mode {found.coverage.switches:.1f} times; the total variation between the modes' "
            f"weights and the expected ones is {found.coverage.distance:.3f}."
        )
        pairs = enumerate(zip(found.coverage.weights, found.coverage.expected, strict=True))
        lines = [[str(k), f"{100 * share:.2f}%", f"{100 * expected:.2f}%"] for k, (share, expected) in pairs]
        tables.append(Table("Modes", ["mode", "share of the states", "expected"], lines))
    records = {
        "verdict": found.verdict,
        "steps": steps,
        "chains": chains,
        "rhat": found.rhat.tolist(),
        "effective_sample_size": found.sizes.tolist(),
        "modes": None if found.coverage is None else vars(found.coverage),
    }
    figure = _figure(x, worst[: min(SHOWN, d)])
    return Outcome(records, [Section("Chains", text, tables, [figure])], found.verdict)


def _figure(x: Tensor, worst: list[int]) -> Figure:
    """A trace and the autocorrelations of each of some numbers."""
    canvas, axes = new_figure(len(worst), 2, inches=(9.0, 1.9 * len(worst)))
    stride = max(1, len(x) // POINTS)
    lags = min(LAGS, len(x))
    correlations = autocorrelations(x[..., worst], lags)
    for place, ((trace, fall), k) in enumerate(zip(axes, worst, strict=True)):
        for c, colour in zip(range(min(CHAINS, x.shape[1])), COLOURS, strict=False):
            line = x[::stride, c, k].tolist()
            trace.plot(range(0, stride * len(line), stride), line, color=colour, linewidth=0.6)
        labelled(trace, f"number {k}", "step", "value")
        fall.axhline(0, color=GREY, linewidth=0.6)
        fall.plot(range(lags), correlations[:, place].tolist(), color=BLUE, linewidth=1.2)
        labelled(fall, "", "lag", "autocorrelation")
    caption = f"Traces of up to {CHAINS} chains, and autocorrelations averaged over all."
    return Figure("chains", caption, canvas)
