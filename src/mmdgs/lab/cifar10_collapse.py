"""Mode collapse of long chains at one noise level, in numbers: how near they come to each other, and their classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from mmdgs.lab.cifar10_report import COLOURS, QUICK, RISE, Findings, in_words
from mmdgs.lab.drawing import GREY, RED, new_figure, open_axes
from mmdgs.lab.report import Figure, Section, Table

COLLAPSED = 0.9
"""A diversity below this much of the data's own is called a collapse."""
LOG_TICKS, MANY_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000), 8


def collapse_verdict(steps: Sequence[int], ratios: Sequence[float], data: float) -> str:
    """Whether long chains come nearer to each other than data are, and go on doing so."""
    last, best = ratios[-1] / data, max(range(len(ratios)), key=lambda i: ratios[i])
    falls = ratios[-1] < (1 - RISE) * ratios[best]
    said = (
        f"After {steps[-1]:,} steps a chain is {last:.2f} times as far from its nearest other as data are; it was at "
    )
    said += f"most {ratios[best] / data:.2f} times, after {steps[best]:,}. "
    if last < COLLAPSED:
        return (
            said
            + ("The chains collapse, as the paper shows" if falls else "They are too near, but do not come nearer")
            + "."
        )
    return (
        said
        + ("They come nearer, but are no nearer than data" if falls else "No collapse is seen in this number")
        + "."
    )


def collapse_section(found: Findings) -> Section:
    """Mode collapse of long chains, measured."""
    steps = [t for t in found.settings["long_steps"] if t > 0]
    data = found.beside["data (test images)"]["diversity"]
    rows = [[row, f"{t:,}", *_numbers(own[str(t)])] for row, own in found.collapse.items() for t in steps]
    rows += [[name, "", *_numbers(one)] for name, one in found.beside.items()]
    with_classes = "class_entropy" in next(iter(found.beside.values()))
    header = ["samples", "steps", "diversity", "duplicates"]
    header += ["class distance", "class entropy"] if with_classes else []
    text = [
        "The paper sees fewer and fewer modes as 25 chains go on at this one small noise level, and many levels as the "
        "cure. Diversity is the mean distance of an image to its nearest other, over that of as many training "
        "images. It is that of the means: noise in the pixels would add to it.",
        *([QUICK] if found.quick else _verdicts(steps, found, data)),
    ]
    if "many levels, Gibbs" in found.beside:
        if not found.quick:
            many = found.beside["many levels, Gibbs"]["diversity"] / data
            text.append(f"As many images of the model of many levels have {many:.2f} of the data's diversity.")
    else:
        text.append("No model of many levels was named (--many), so that row is left out.")
    if not with_classes:
        text.append("No classifier was named (--classifier), so classes are not counted.")
    note = f"{found.settings['long_chains']} chains of each row; means of their posteriors."
    figures = [Figure("cifar10_collapse", "Diversity of the chains as they go on.", draw_collapse(steps, found))]
    return Section("Mode collapse", text, [Table("Long chains", header, rows, note, 2)], figures)


def _verdicts(steps: Sequence[int], found: Findings, data: float) -> list[str]:
    """What is to be said of each row of chains: how near they come, and their classes."""
    told = []
    for row, own in found.collapse.items():
        last = own[str(steps[-1])]
        words = [collapse_verdict(steps, [own[str(t)]["diversity"] for t in steps], data)]
        if "class_entropy" in last:
            words.append(class_verdict(steps[-1], last, found.beside))
        told.append(f"{in_words(row)}. {' '.join(words)}")
    return told


def class_verdict(steps: int, last: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]]) -> str:
    """The classes of the last states beside those of others, in words."""
    common = max(range(len(last["class_shares"])), key=lambda c: last["class_shares"][c])
    others = ", ".join(f"{name} {one['class_entropy']:.2f}" for name, one in beside.items())
    return (
        f"The entropy of the classes after {steps:,} steps is {last['class_entropy']:.2f} ({others}); the commonest, "
        f"{last['class_names'][common]}, has {100 * last['class_shares'][common]:.0f}% of the chains."
    )


def _numbers(one: Mapping[str, Any]) -> list[str]:
    cells = [f"{one['diversity']:.3f}", f"{100 * one['duplicates']:.1f}%"]
    if "class_entropy" in one:
        cells += [f"{one['class_distance']:.3f}", f"{one['class_entropy']:.3f}"]
    return cells


def draw_collapse(steps: Sequence[int], found: Findings) -> Canvas:
    """Diversity against steps, those of data and of many levels as lines; class shares beside it."""
    shares = {name: one["class_shares"] for name, one in found.beside.items() if "class_shares" in one}
    canvas, axes = new_figure(1, 2 if shares else 1, 3.4)
    canvas.set_size_inches(11.0 if shares else 6.0, 3.4)
    axis = axes[0][0]
    colours = {row: COLOURS[row] for row in found.collapse}
    for row, own in found.collapse.items():
        ratios = [own[str(t)]["diversity"] for t in steps]
        axis.plot(steps, ratios, "o-", color=colours[row], markersize=4, linewidth=1.3, label=row)
    colours |= dict(zip(found.beside, (GREY, RED), strict=False))
    for name, one in found.beside.items():
        axis.axhline(one["diversity"], color=colours[name], linestyle="--", linewidth=1.2, label=name)
    axis.set_xscale("log")
    axis.set_xticks([t for t in steps if len(steps) < MANY_TICKS or t in LOG_TICKS])
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.minorticks_off()
    axis.set_xlabel("Gibbs steps", fontsize=9)
    axis.set_ylabel("diversity (1: as data)", fontsize=9)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    open_axes(axis, 8)
    if shares:
        lasts = {row: own[str(steps[-1])] for row, own in found.collapse.items()}
        names = next(iter(lasts.values()))["class_names"]
        every = {row: one["class_shares"] for row, one in lasts.items()} | shares
        _draw_shares(axes[0][1], {name: (own, colours[name]) for name, own in every.items()}, names)
    return canvas


def _draw_shares(axis: Axes, shares: Mapping[str, tuple[Sequence[float], str]], names: Sequence[str]) -> None:
    """Bars of the shares of each class, in the colours of the lines beside them."""
    width = 0.8 / len(shares)
    for i, (name, (own, colour)) in enumerate(shares.items()):
        places = [c + (i - (len(shares) - 1) / 2) * width for c in range(len(names))]
        axis.bar(places, own, width=width, color=colour, label=name)
    axis.set_xticks(range(len(names)), names, rotation=40, ha="right")
    axis.set_ylabel("share of the images", fontsize=9)
    axis.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    open_axes(axis, 7)
