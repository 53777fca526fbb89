"""The page of `mmdgs judge`: calibration, coverage, CRPS and rank histograms of draws, by task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from mmdgs.lab.drawing import BLUE, GREY, labelled, new_panels
from mmdgs.lab.experiment import Outcome
from mmdgs.lab.report import Figure, Section
from mmdgs.metrics.judgement import FALSE_ALARM, Chance, Judgement
from mmdgs.tables import Table

HEAD = ["", "these draws", "right draws", "p"]
RATE = f"right draws are called wrong with a probability of at most {FALSE_ALARM:.0%}"


def outcome(judgements: Mapping[str, Judgement]) -> Outcome:
    """Tables, the figure and records of judgements by task."""
    tests = next(iter(judgements.values())).tests
    text = [
        "If draws are right, the truth and its draws are exchangeable. Right draws: the central 95% of each number "
        "where that holds, by letting a random one of them play the truth in every case. It needs independent cases, "
        "and nothing of the numbers within one.",
        "Spread over error below 1: the draws are too sure. CRPS is better where it is smaller; beside it stands that "
        "of exact draws of the same posteriors where they are known, or else what right draws of this spread would "
        "have. The squared distance between the means of the draws and of exact draws is over what it is for right "
        "draws; draws that ignore the measurements are far off.",
        f"A test has found something where its p is below {FALSE_ALARM / tests:.2g}: over the {tests} tests of this "
        f"page {RATE} ({FALSE_ALARM:g} / {tests}, Bonferroni).",
    ]
    tables = [_table(name, judgement) for name, judgement in judgements.items()]
    section = Section("Draws against the truth", text, tables, [_figure(judgements)])
    records = {
        "verdict": verdict(judgements),
        "false_alarm": FALSE_ALARM,
        "judgements": {
            name: {"verdict": judgement.verdict, **asdict(judgement)} for name, judgement in judgements.items()
        },
    }
    return Outcome(records, [section], verdict(judgements))


def verdict(judgements: Mapping[str, Judgement]) -> str:
    """One line for all tasks, with the chance of a false alarm in any of them."""
    wrong = {name: judgement for name, judgement in judgements.items() if judgement.problems}
    if len(judgements) == 1:
        said = next(iter(judgements.values())).verdict
    elif not wrong:
        said = f"no sign against the draws in any of {len(judgements)} tasks"
    else:
        each = "; ".join(f"{name}: {', '.join(judgement.problems)}" for name, judgement in wrong.items())
        said = f"wrong in {len(wrong)} of {len(judgements)} tasks: {each}"
    return f"{said}. ({RATE[0].upper()}{RATE[1:]}.)"


def _table(name: str, judgement: Judgement) -> Table:
    def shown(title: str, chance: Chance, scale: float = 1, digits: int = 3, unit: str = "") -> list[str]:
        low, high = (f"{scale * end:.{digits}f}{unit}" for end in (chance.low, chance.high))
        return [title, f"{scale * chance.value:.{digits}f}{unit}", f"{low} to {high}", f"{chance.p:.2g}"]

    beside = judgement.beside
    rows = [
        shown("spread over error", judgement.calibration),
        shown("coverage of 90% intervals", judgement.coverage, 100, 1, "%"),
        shown("mean rank of the truth, less 1/2", judgement.bias),
        ["rank histogram", "in the figure", "", f"{judgement.ranks:.2g}"],
    ]
    if beside is None:
        rows.append(["CRPS", f"{judgement.crps:.4g}", f"{judgement.crps_expected:.4g}", ""])
    else:
        means = ["squared distance of the means", f"{beside.distance:.3g}", "1", f"{beside.distance_p:.2g}"]
        rows += [
            ["CRPS", f"{judgement.crps:.4g}", f"{beside.crps:.4g}", f"{beside.crps_p:.2g}"], means,
            ["correlation of the means with exact ones", f"{beside.correlation:.3f}", "", ""],
        ]  # fmt: skip
    return Table(f"{name}: {judgement.draws} draws of {judgement.cases} cases", HEAD, rows)


def _figure(judgements: Mapping[str, Judgement]) -> Figure:
    canvas, axes = new_panels(len(judgements), 3, 3.0)
    for axis, (name, judgement) in zip(axes, judgements.items(), strict=False):
        places = [(b + 0.5) / len(judgement.histogram) for b in range(len(judgement.histogram))]
        axis.bar(places, judgement.histogram, width=0.9 / len(places), color=BLUE)
        axis.fill_between(places, judgement.low, judgement.high, color=GREY, alpha=0.35, step="mid", linewidth=0)
        axis.plot(places, judgement.expected, color=GREY, linewidth=0.8, drawstyle="steps-mid")
        labelled(axis, name, "rank of the truth among the draws", "share")
    caption = "Rank histograms; grey: where all bins lie at once with probability 95% if the draws are right."
    return Figure("ranks", caption, canvas)
