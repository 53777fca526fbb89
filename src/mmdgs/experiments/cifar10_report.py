"""The report on CIFAR-10 at one noise level: what the paper found, and whether it came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.experiments.drawing import (
    BLUE,
    COLOURS,
    GREY,
    ORANGE,
    RED,
    colour_picture,
    image_rows,
    new_figure,
    open_axes,
)
from mmdgs.experiments.drawing import picture as grey_picture
from mmdgs.experiments.report import Figure, Section, Table

PAPER_STEPS = 40
"""The paper's FID increases after so many Gibbs steps."""
RISE = 0.02
"""A relative difference of FIDs that counts: those of two seeds with some thousand images differ by about a percent."""
COLLAPSED = 0.9
"""A diversity below this much of the data's own is called a collapse."""
STYLES = {"diagonal": (BLUE, "o-"), "isotropic": (ORANGE, "o-"), "diagonal, uniform start": (BLUE, "s--")}
CHAINS_SHOWN = 3  # in the paper's figure of chains
COLUMNS = 5
PANELS_A_ROW = 6
QUICK = "This is the quick version: so few images and so small a network show that everything runs, and nothing else."


@dataclass(frozen=True, eq=False)
class Findings:
    """All that was found: numbers by row and steps (as text), and images uint8."""

    settings: Mapping[str, Any]
    quick: bool
    maps: Mapping[str, Any]
    map_images: Mapping[str, Tensor]
    long: Tensor  # (kept, chains, C, H, W)
    collapse: Mapping[str, Mapping[str, Any]]
    beside: Mapping[str, Mapping[str, Any]]
    curves: Mapping[str, Mapping[str, Mapping[str, Any]]]


def map_section(found: Findings) -> Section:
    """The paper's figure of covariances with 1, 10 and 100 Rademacher probes."""
    errors = found.maps["errors"]
    rademacher = [name for name in errors if name.startswith("Rademacher")]
    falls = all(errors[a] > errors[b] for a, b in pairwise(rademacher))
    text = [
        "The paper's figure of posterior variances with 1, 10 and 100 Rademacher probes: the estimate should get "
        f"better with their number. {'It does' if falls else 'It does not'}: the relative error against the exact diagonal is "
        + ", ".join(f"{errors[name]:.2f} ({name.split(', ')[1]})" for name in rademacher)
        + ". Probes on a lattice, which are the default for images, have "
        + ", ".join(
            f"{value:.2f} ({name.split(', ')[1]})" for name, value in errors.items() if name.startswith("lattice")
        )
        + f"; one variance for all pixels, the best one, {errors['one variance for all']:.2f}.",
        f"{100 * found.maps['negative']:.1f}% of the exact variances are negative, which no covariance has: that is "
        "the network's error. In chains they are lifted to a floor.",
        *([QUICK] if found.quick else []),
    ]
    rows = [[name, f"{value:.3f}"] for name, value in errors.items()]
    table = Table("Error of the diagonal", ["probes", "relative error"], rows, f"{len(found.map_images['x'])} images.")
    caption = "Test images, noisy, and standard deviations of p(x | noisy x), mean over the colours, in one scale."
    return Section(
        "Covariances by probes", text, [table], [Figure("cifar10_maps", caption, draw_maps(found.map_images))]
    )


def draw_maps(images: Mapping[str, Tensor]) -> Canvas:
    """A row for each image, a column for each estimate, the exact one last."""
    labels = [*(name for name in images if name not in ("x", "x_t", "exact")), "exact"]
    deviations = {name: images[name].mean(1, keepdim=True).clamp(min=0).sqrt() for name in labels}
    high = torch.quantile(deviations["exact"], 0.999).item()
    # One column of images a panel, and as many panels as there are estimates.
    count = len(images["x"])
    height, width = images["x"].shape[2:]
    canvas, axes = new_figure(1, 2 + len(labels), 1.0)
    canvas.set_size_inches(1.15 * (2 + len(labels)) + 0.8, 1.05 * count * height / width + 0.3)
    for axis, name, title in zip(axes[0], ("x", "x_t"), ("data x", "noisy $x_t$"), strict=False):
        colour_picture(axis, images[name], 1, title)
    for axis, name in zip(axes[0][2:], labels, strict=True):
        drawn = grey_picture(axis, deviations[name], name, high=high, cmap="magma", columns=1)
        axis.set_title(name, fontsize=8)
    bar = canvas.colorbar(drawn, ax=axes[0], shrink=0.75, pad=0.01)
    bar.set_label("standard deviation", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    return canvas


def chain_section(found: Findings) -> Section:
    """The paper's figures of chains: three of them along their steps, and 25 as they go on."""
    steps = found.settings["long_steps"]
    regular = [i for i, t in enumerate(steps) if t <= 100]
    strips = {f"chain {c + 1}": found.long[regular, c] for c in range(min(CHAINS_SHOWN, found.long.shape[1]))}
    strip = image_rows(strips)
    labels = ", ".join(str(steps[i]) for i in regular)
    text = [
        "Chains start from standard normal noise, as in the paper's section 2.1, and go on by Gibbs sweeps at one "
        f"noise level with the diagonal covariance of {found.settings['probes']} probes. The paper's figure of three chains "
        "every 10 steps shows sharp images; whether these are, is for the eye.",
        *([QUICK] if found.quick else []),
    ]
    shown = found.long.shape[1]
    figures = [
        Figure("cifar10_chains", f"Three chains after {labels} Gibbs steps.", strip),
        Figure(
            "cifar10_25_chains", f"{shown} chains as they go on; the number of Gibbs steps above.", draw_many(found)
        ),
    ]
    return Section("Chains from noise", text, (), figures)


def draw_many(found: Findings) -> Canvas:
    """All chains as a mosaic for each number of steps."""
    steps = found.settings["long_steps"]
    columns = min(PANELS_A_ROW, len(steps))
    rows = -(-len(steps) // columns)
    canvas, axes = new_figure(rows, columns, 1.9)
    places = [axis for row in axes for axis in row]
    for axis, t, x in zip(places, steps, found.long, strict=False):
        colour_picture(axis, x, COLUMNS, f"{t:,}")
    for axis in places[len(steps) :]:
        axis.set_axis_off()
    return canvas


@dataclass(frozen=True)
class Minimum:
    """Where a curve is lowest, how much higher it ends, relatively, and whether it fell and rose again."""

    steps: int
    value: float
    rise: float
    fell: bool

    @property
    def rose(self) -> bool:
        return self.rise > RISE


def minimum(steps: Sequence[int], values: Sequence[float]) -> Minimum:
    """The minimum of a curve; it fell where it began higher by more than counts."""
    at = min(range(len(values)), key=lambda i: values[i])
    lowest = values[at]
    return Minimum(steps[at], lowest, values[-1] / lowest - 1, values[0] / lowest - 1 > RISE)


def fid_verdict(row: str, steps: Sequence[int], values: Sequence[float]) -> str:
    """What the paper found of the FID against steps, and whether it came out."""
    found = minimum(steps, values)
    lowest = f"{row[0].upper()}{row[1:]}: the FID is lowest after {found.steps} Gibbs steps, {found.value:.2f}"
    end = f"after {steps[-1]} it is {values[-1]:.2f}"
    if not found.rose:
        said = f"{end}: the later rise that the paper shows did not come out within {steps[-1]} steps"
    elif not found.fell:
        said = f"{end}, {100 * found.rise:.0f}% higher: it only rises, from the first number of steps on"
    else:
        near = "as in the paper" if 0.5 <= found.steps / PAPER_STEPS <= 1.5 else "at another place than in the paper"
        said = f"{end}, {100 * found.rise:.0f}% higher: a minimum and a later rise, {near}"
    return f"{lowest} (paper: near {PAPER_STEPS}); {said}."


def fid_section(found: Findings) -> Section:
    """FID against Gibbs steps."""
    steps = list(found.settings["steps"])
    measure = "fid" if "fid" in found.settings["metrics"] else "diversity"
    what = "FID" if measure == "fid" else "diversity"
    values = {row: [cells[str(t)][measure] for t in steps] for row, cells in found.curves.items()}
    text = [
        "The paper's FID of 50,000 images falls at first and increases after 40 Gibbs steps. "
        f"Here it is of {found.settings['images']:,} images, and FIDs of other numbers do not compare.",
        *(
            [QUICK]
            if found.quick
            else [*(fid_verdict(row, steps, own) for row, own in values.items()), *_covariance_verdict(values)]
        ),
    ]
    rows = [[row, *(f"{value:.2f}" for value in own)] for row, own in values.items()]
    best = frozenset((i, 1 + min(range(len(own)), key=own.__getitem__)) for i, own in enumerate(values.values()))
    note = f"{found.settings['model']}, sigma {found.settings['sigma']:g}, {found.settings['precision']}."
    table = Table(
        f"{what} by Gibbs steps", ["chains", *map(str, steps)], rows, note, 1, best if measure == "fid" else frozenset()
    )
    return Section(
        "FID against Gibbs steps",
        text,
        [table],
        [Figure("cifar10_fid", f"{what} against Gibbs steps.", draw_curves(steps, values, what))],
    )


def _covariance_verdict(values: Mapping[str, Sequence[float]]) -> list[str]:
    if not {"diagonal", "isotropic"} <= values.keys():
        return []
    ours, theirs = min(values["diagonal"]), min(values["isotropic"])
    return [
        f"At their best numbers of steps the diagonal covariance has {ours:.2f} and the isotropic one {theirs:.2f}: "
        f"{'the diagonal is better' if ours < theirs else 'the isotropic one is better'} by {abs(ours - theirs):.2f}."
    ]


def draw_curves(steps: Sequence[int], values: Mapping[str, Sequence[float]], what: str) -> Canvas:
    canvas, axes = new_figure(1, 1, 3.4)
    canvas.set_size_inches(6.4, 3.4)
    axis = axes[0][0]
    for row, own in values.items():
        colour, style = STYLES[row]
        axis.plot(steps, own, style, color=colour, markersize=4, linewidth=1.3, label=row)
    axis.set_xlabel("Gibbs steps", fontsize=9)
    axis.set_ylabel(what, fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    open_axes(axis, 8)
    return canvas


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
    ratios = [found.collapse[str(t)]["diversity"] for t in steps]
    data = found.beside["data (test images)"]["diversity"]
    rows = [[f"{t:,} steps", *_numbers(found.collapse[str(t)])] for t in steps]
    rows += [[name, *_numbers(one)] for name, one in found.beside.items()]
    with_classes = "class_entropy" in next(iter(found.beside.values()))
    header = ["samples", "diversity", "duplicates", *(["class distance", "class entropy"] if with_classes else [])]
    text = [
        "The paper sees fewer and fewer modes as 25 chains go on at this one small noise level, and many levels as the "
        "cure. Diversity is the mean distance of an image to its nearest other, over that of as many training images.",
        *([QUICK] if found.quick else [collapse_verdict(steps, ratios, data)]),
    ]
    if "many levels, Gibbs" in found.beside:
        if not found.quick:
            many = found.beside["many levels, Gibbs"]["diversity"] / data
            text.append(f"As many images of the model of many levels have {many:.2f} of the data's diversity.")
    else:
        text.append("No model of many levels was named (--many), so that row is left out.")
    if not with_classes:
        text.append("No classifier was named (--classifier), so classes are not counted.")
    note = f"{found.settings['long_chains']} chains, diagonal covariance, from standard normal noise."
    figures = [
        Figure("cifar10_collapse", "Diversity of the chains as they go on.", draw_collapse(steps, ratios, found))
    ]
    return Section("Mode collapse", text, [Table("Long chains", header, rows, note)], figures)


def _numbers(one: Mapping[str, Any]) -> list[str]:
    cells = [f"{one['diversity']:.3f}", f"{100 * one['duplicates']:.1f}%"]
    if "class_entropy" in one:
        cells += [f"{one['class_distance']:.3f}", f"{one['class_entropy']:.3f}"]
    return cells


def draw_collapse(steps: Sequence[int], ratios: Sequence[float], found: Findings) -> Canvas:
    """Diversity against steps, those of data and of many levels as lines; class shares beside it."""
    shares = {name: one["class_shares"] for name, one in found.beside.items() if "class_shares" in one}
    canvas, axes = new_figure(1, 2 if shares else 1, 3.4)
    canvas.set_size_inches(11.0 if shares else 6.0, 3.4)
    axis = axes[0][0]
    axis.plot(steps, ratios, "o-", color=BLUE, markersize=4, linewidth=1.3, label="chains at one level")
    for (name, one), colour in zip(found.beside.items(), (GREY, RED), strict=False):
        axis.axhline(one["diversity"], color=colour, linestyle="--", linewidth=1.2, label=name)
    axis.set_xscale("log")
    axis.set_xticks([steps[0], *(t for t in steps[1:] if t >= 2 * steps[0] and t in (20, 50, 100, 200, 500, 1_000))])
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.minorticks_off()
    axis.set_xlabel("Gibbs steps", fontsize=9)
    axis.set_ylabel("diversity (1: as data)", fontsize=9)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False)
    open_axes(axis, 8)
    if shares:
        last = found.collapse[str(steps[-1])]
        _draw_shares(axes[0][1], {f"{steps[-1]:,} steps": last["class_shares"], **shares}, last["class_names"])
    return canvas


def _draw_shares(axis: Any, shares: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    width = 0.8 / len(shares)
    for i, ((name, own), colour) in enumerate(zip(shares.items(), (BLUE, GREY, COLOURS["learned"]), strict=False)):
        places = [c + (i - (len(shares) - 1) / 2) * width for c in range(len(names))]
        axis.bar(places, own, width=width, color=colour, label=name)
    axis.set_xticks(range(len(names)), names, rotation=40, ha="right")
    axis.set_ylabel("share", fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    open_axes(axis, 7)
