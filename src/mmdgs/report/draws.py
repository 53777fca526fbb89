"""The page of `mmdgs judge`: calibration, coverage, CRPS and rank histograms of draws, by task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean

from mmdgs.metrics.judgement import FALSE_ALARM, Chance, Judgement
from mmdgs.metrics.suite import Judged
from mmdgs.report.drawing import BLUE, GREY, labelled, new_panels
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.tables import Table

HEAD = ["", "these draws", "right draws", "p"]
TITLES = {
    "rmse": "RMSE to x", "ksd": "score-KSD", "ksd_ratio": "score-KSD over that of exact draws",
    "mode": "weight of the far mode", "coverage": "coverage of 90% intervals",
    "gap": "gap of the mean, dB",
}  # fmt: skip
RATE = f"right draws are called wrong with a probability of at most {FALSE_ALARM:.0%}"


def outcome(
    judgements: Mapping[str, Judgement], problems: Mapping[str, Judged] | None = None
) -> Outcome:
    """Tables, the figure and records of judgements by task; of problems also their numbers."""
    tests = next(iter(judgements.values())).tests
    text = [
        "If draws are right, the truth and its draws are exchangeable. Right draws: the central "
        "95% of each number where that holds, by letting a random one of them play the truth in "
        "every case. It needs independent cases, and nothing of the numbers within one.",
        "Spread over error below 1: the draws are too sure. CRPS is better where it is smaller; "
        "beside it stands that of exact draws of the same posteriors where they are known, or else "
        "what right draws of this spread would have. The squared distance between the means of the "
        "draws and of exact draws is over what it is for right draws; draws that ignore the "
        "measurements are far off.",
        f"A test has found something where its p is below {FALSE_ALARM / tests:.2g}: over the "
        f"{tests} tests of this page {RATE} ({FALSE_ALARM:g} / {tests}, Bonferroni).",
    ]
    problems = problems or {}
    tables = [_table(name, judgement) for name, judgement in judgements.items()]
    tables = _numbers(problems) + tables
    section = Section("Draws against the truth", text, tables, [_figure(judgements)])
    records = {
        "verdict": verdict(judgements),
        "false_alarm": FALSE_ALARM,
        "judgements": {
            name: {"verdict": judged.verdict, **asdict(judged)}
            for name, judged in judgements.items()
        },
        "numbers": {name: [each.numbers, each.exact] for name, each in problems.items()},
    }
    return Outcome(records, [section], verdict(judgements))


def _numbers(problems: Mapping[str, Judged]) -> list[Table]:
    """A line for every number of a problem, beside that of exact draws."""
    rows = [
        [name, TITLES[key], *(f"{fmean(values[key]):.3f}" for values in each[1:])]
        for name, each in problems.items()
        for key in each.numbers
    ]
    header = ["problem", "number", "these draws", "exact draws"]
    return [Table("Benchmarks", header, rows, left=2)] if rows else []


def verdict(judgements: Mapping[str, Judgement]) -> str:
    """One line for all tasks, with the chance of a false alarm in any of them."""
    wrong = {name: judgement for name, judgement in judgements.items() if judgement.problems}
    if len(judgements) == 1:
        said = next(iter(judgements.values())).verdict
    elif not wrong:
        said = f"no sign against the draws in any of {len(judgements)} tasks"
    else:
        each = "; ".join(f"{name}: {', '.join(wrong[name].problems)}" for name in wrong)
        said = f"wrong in {len(wrong)} of {len(judgements)} tasks: {each}"
    return f"{said}. ({RATE[0].upper()}{RATE[1:]}.)"


def _table(name: str, judgement: Judgement) -> Table:
    def shown(title: str, chance: Chance, form: str = ".3f") -> list[str]:
        value, low, high = (f"{x:{form}}" for x in (chance.value, chance.low, chance.high))
        return [title, value, f"{low} to {high}", f"{chance.p:.2g}"]

    beside, crps = judgement.beside, f"{judgement.crps:.4g}"
    rows = [
        shown("spread over error", judgement.calibration),
        shown("coverage of 90% intervals", judgement.coverage, form=".1%"),
        shown("mean rank of the truth, less 1/2", judgement.bias),
        ["rank histogram", "in the figure", "", f"{judgement.ranks:.2g}"],
    ]
    if beside is None:
        rows.append(["CRPS", crps, f"{judgement.crps_expected:.4g}", ""])
    else:
        distance = [f"{beside.distance:.3g}", "1", f"{beside.distance_p:.2g}"]
        rows += [
            ["CRPS", crps, f"{beside.crps:.4g}", f"{beside.crps_p:.2g}"],
            ["squared distance of the means", *distance],
            ["correlation of the means with exact ones", f"{beside.correlation:.3f}", "", ""],
        ]
    return Table(f"{name}: {judgement.draws} draws of {judgement.cases} cases", HEAD, rows)


def _figure(judgements: Mapping[str, Judgement]) -> Figure:
    canvas, axes = new_panels(len(judgements), 3, 3.0)
    for axis, (name, judgement) in zip(axes, judgements.items(), strict=False):
        bins = len(judgement.histogram)
        places = [(b + 0.5) / bins for b in range(bins)]
        axis.bar(places, judgement.histogram, width=0.9 / bins, color=BLUE)
        axis.fill_between(
            places, judgement.low, judgement.high, color=GREY, alpha=0.35, step="mid", linewidth=0
        )
        axis.plot(places, judgement.expected, color=GREY, linewidth=0.8, drawstyle="steps-mid")
        labelled(axis, name, "rank of the truth among the draws", "share")
    caption = "Rank histograms; grey: all bins of right draws lie there with probability 95%."
    return Figure("ranks", caption, canvas)
