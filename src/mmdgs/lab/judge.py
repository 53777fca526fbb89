"""The page of `mmdgs judge`: calibration, coverage, CRPS and rank histograms of draws, by task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from mmdgs.lab.drawing import BLUE, GREY, labelled, new_panels
from mmdgs.lab.experiment import Outcome
from mmdgs.lab.report import Figure, Section
from mmdgs.metrics.judgement import Chance, Judgement
from mmdgs.tables import Table

HEAD = [
    "", "draws", "cases", "spread over error", "by chance", "coverage of 90% intervals", "by chance",
    "mean rank - 1/2", "by chance", "CRPS", "expected", "p of the ranks",
]  # fmt: skip


def outcome(found: Mapping[str, Judgement], exact: Mapping[str, Judgement] | None = None) -> Outcome:
    """Tables, the figure and records of judgements by task, with those of exact draws beside them where known."""
    rows = []
    for name, one in found.items():
        rows.append(_row(name, one))
        if exact is not None:
            rows.append(_row(f"{name}, exact posterior", exact[name]))
    text = [
        "If draws are right, the truth and its draws are exchangeable. By chance: the central 95% of each number where "
        "that holds, by letting a random one of them play the truth in every case. It needs independent cases, and "
        "nothing of the numbers within one.",
        "Spread over error below 1: the draws are too sure. CRPS is better where it is smaller; expected is what right "
        "draws of this spread would have.",
    ]
    section = Section("Draws against the truth", text, [Table("Judgement", HEAD, rows)], [_figure(found)])
    records = {
        "verdict": verdict(found),
        "judgements": {name: {"verdict": one.verdict, **asdict(one)} for name, one in found.items()},
        "exact": None if exact is None else {name: asdict(one) for name, one in exact.items()},
    }
    return Outcome(records, [section], verdict(found))


def verdict(found: Mapping[str, Judgement]) -> str:
    """One line for all tasks."""
    if len(found) == 1:
        return next(iter(found.values())).verdict
    wrong = {name: one for name, one in found.items() if one.problems}
    if not wrong:
        return f"no sign against the draws in any of {len(found)} tasks"
    said = "; ".join(f"{name}: {', '.join(one.problems)}" for name, one in wrong.items())
    return f"wrong in {len(wrong)} of {len(found)} tasks: {said}"


def _row(name: str, one: Judgement) -> list[str]:
    def shown(chance: Chance, scale: float = 1, digits: int = 3, unit: str = "") -> list[str]:
        low, high = (f"{scale * end:.{digits}f}" for end in (chance.low, chance.high))
        return [f"{scale * chance.value:.{digits}f}{unit}", f"{low} to {high}"]

    numbers = [*shown(one.calibration), *shown(one.coverage, 100, 1, "%"), *shown(one.bias)]
    scores = [f"{one.crps:.4g}", f"{one.crps_expected:.4g}", f"{one.ranks:.3f}"]
    return [name, str(one.draws), str(one.cases), *numbers, *scores]


def _figure(found: Mapping[str, Judgement]) -> Figure:
    canvas, axes = new_panels(len(found), 3, 3.0)
    for axis, (name, one) in zip(axes, found.items(), strict=False):
        places = [(b + 0.5) / len(one.histogram) for b in range(len(one.histogram))]
        axis.bar(places, one.histogram, width=0.9 / len(places), color=BLUE)
        axis.fill_between(places, one.low, one.high, color=GREY, alpha=0.35, step="mid", linewidth=0)
        axis.plot(places, one.expected, color=GREY, linewidth=0.8, drawstyle="steps-mid")
        labelled(axis, name, "rank of the truth among the draws", "share")
    caption = "Rank histograms; grey: where all bins lie at once with probability 95% if the draws are right."
    return Figure("ranks", caption, canvas)
