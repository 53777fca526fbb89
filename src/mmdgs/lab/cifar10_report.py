"""The report on CIFAR-10 at one noise level: what the paper found, and whether it came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.lab import drawing
from mmdgs.lab.drawing import BLUE, ORANGE, PINK, colour_picture, image_rows, new_figure, open_axes
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.lab.single_level_chains import DIAGONAL, DRAWS, ISOTROPIC, MEANS, PAPERS, ROWS, SPECTRAL

PAPER_STEPS = 40
"""The paper's FID increases after so many Gibbs steps."""
RISE = 0.02
"""A relative difference of FIDs that counts: those of two seeds with some thousand images differ by about a percent."""
COLOURS = {PAPERS: drawing.COLOURS["diagonal"], DIAGONAL: BLUE, ISOTROPIC: ORANGE, SPECTRAL: PINK}
CHAINS_SHOWN = 3  # in the paper's figure of chains
COLUMNS = 5
PANELS_A_ROW = 7
QUICK = "This is the quick version: so few images and so small a network show that everything runs, and nothing else."


@dataclass(frozen=True, eq=False)
class Findings:
    """All that was found: numbers by row and steps (as text), and images uint8."""

    settings: Mapping[str, Any]
    quick: bool
    maps: Mapping[str, Any]
    map_images: Mapping[str, Tensor]
    long: Mapping[str, Mapping[str, Tensor]]  # by row and kind, (kept, chains, C, H, W)
    collapse: Mapping[str, Mapping[str, Mapping[str, Any]]]  # by row, of means
    beside: Mapping[str, Mapping[str, Any]]
    curves: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]  # by row and kind


def map_section(found: Findings) -> Section:
    """The paper's figure of covariances with 1, 10 and 100 Rademacher probes."""
    errors = found.maps["errors"]
    rademacher = [name for name in errors if name.startswith("Rademacher")]
    falls = all(errors[a] > errors[b] for a, b in pairwise(rademacher))
    text = [
        "The paper's figure of posterior variances with 1, 10 and 100 Rademacher probes: the estimate should get "
        f"better with their number. {'It does' if falls else 'It does not'}: the relative error against the exact "
        "diagonal is "
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
    names = [name for name in errors if name in found.map_images]
    caption = "Test images, noisy, and standard deviations of p(x | noisy x), mean over the colours, in one scale."
    return Section(
        "Covariances by probes", text, [table], [Figure("cifar10_maps", caption, draw_maps(found.map_images, names))]
    )


def draw_maps(images: Mapping[str, Tensor], names: Sequence[str]) -> Canvas:
    """A row for each image, a column for each of the named estimates, the exact one last."""
    labels = [*names, "exact"]
    deviations = {name: images[name].mean(1, keepdim=True).clamp(min=0).sqrt() for name in labels}
    scale = ScalarMappable(Normalize(0.0, torch.quantile(deviations["exact"], 0.999).item()), "magma")
    count = len(images["x"])
    height, width = images["x"].shape[2:]
    canvas, axes = new_figure(1, 2 + len(labels), 1.0)
    canvas.set_size_inches(1.15 * (2 + len(labels)) + 0.8, 1.05 * count * height / width + 0.3)
    for axis, name, title in zip(axes[0], ("x", "x_t"), ("data x", "noisy $x_t$"), strict=False):
        colour_picture(axis, images[name], 1, title)
    for axis, name in zip(axes[0][2:], labels, strict=True):
        coloured = torch.from_numpy(scale.cmap(scale.norm(deviations[name][:, 0].numpy()), bytes=True))[..., :3]
        colour_picture(axis, coloured.movedim(-1, 1), 1, name)
    bar = canvas.colorbar(scale, ax=axes[0], shrink=0.75, pad=0.01)
    bar.set_label("standard deviation", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    return canvas


def chain_section(found: Findings) -> Section:
    """The paper's figures of chains: three of them along their steps, and 25 as they go on."""
    steps = found.settings["long_steps"]
    regular = [i for i, t in enumerate(steps) if t <= 100]
    labels = ", ".join(str(steps[i]) for i in regular)
    text = [
        "Gibbs sweeps at one noise level. The paper's figure of three chains every 10 steps shows sharp images; "
        "whether these are, is for the eye. Its chains start from standard normal noise (its section 2.1) and draw "
        f"with the diagonal covariance, here of {found.settings['probes']} probes. For images in [0, 1] such a start "
        "is darker than any of them; other rows start from uniform noise in the interval. A draw is a mean with the "
        "noise of its covariance, so the means stand beside the draws.",
        *([QUICK] if found.quick else []),
    ]
    figures = []
    for row, own in found.long.items():
        ending = "" if row == PAPERS else f"_{row}"
        count = min(CHAINS_SHOWN, own[DRAWS].shape[1])
        strips = {f"chain {c + 1}, {kind}": own[kind][regular, c] for c in range(count) for kind in (DRAWS, MEANS)}
        strip = image_rows(strips, titles=[f"{steps[i]:,}" for i in regular])
        shown = own[DRAWS].shape[1]
        figures += [
            Figure(f"cifar10_chains{ending}", f"{in_words(row)}: {count} chains after {labels} Gibbs steps.", strip),
            Figure(
                f"cifar10_25_chains{ending}",
                f"{in_words(row)}: the means of {shown} chains as they go on; the number of Gibbs steps above.",
                draw_many(steps, own[MEANS]),
            ),
        ]
    return Section("Chains from noise", text, (), figures)


def in_words(row: str) -> str:
    """A row in words, at the beginning of a sentence."""
    covariance, start = ROWS[row]
    return f"{covariance.capitalize()} covariance, from {'standard normal' if start == 'normal' else 'uniform'} noise"


def draw_many(steps: Sequence[int], x: Tensor) -> Canvas:
    """All chains as a mosaic for each number of steps, but for the start."""
    shown = [(t, own) for t, own in zip(steps, x, strict=True) if t > 0]
    columns = min(PANELS_A_ROW, len(shown))
    canvas, axes = new_figure(-(-len(shown) // columns), columns, 1.9)
    places = [axis for row in axes for axis in row]
    for axis, (t, own) in zip(places, shown, strict=False):
        colour_picture(axis, own, COLUMNS, f"{t:,} steps")
    for axis in places[len(shown) :]:
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
    if found.steps == steps[-1]:
        said = "the last that was tried, so no later rise came out"
    elif not found.rose:
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
    values = {
        kind: {row: [own[kind][str(t)][measure] for t in steps] for row, own in found.curves.items()}
        for kind in (DRAWS, MEANS)
    }
    text = [
        "The paper's FID of 50,000 images falls at first and increases after 40 Gibbs steps. "
        f"Here it is of {found.settings['images']:,} images, and FIDs of other numbers do not compare.",
        *([QUICK] if found.quick else fid_verdicts(steps, values)),
    ]
    rows: list[list[str]] = []
    best: set[tuple[int, int]] = set()
    for kind, curves in values.items():
        for row, own in curves.items():
            best.add((len(rows), 2 + min(range(len(own)), key=own.__getitem__)))
            rows.append([row, kind, *(f"{value:.2f}" for value in own)])
    note = f"{found.settings['model']}, sigma {found.settings['sigma']:g}, {found.settings['precision']}."
    table = Table(
        f"{what} by Gibbs steps", ["chains", "of", *map(str, steps)], rows, note, 2,
        frozenset(best) if measure == "fid" else frozenset(),
    )  # fmt: skip
    figure = Figure("cifar10_fid", f"{what} against Gibbs steps.", draw_curves(steps, values, what))
    return Section("FID against Gibbs steps", text, [table], [figure])


def fid_verdicts(steps: Sequence[int], values: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Whether the paper's curve came out for each row of draws, and which covariance is best by draws and by means."""
    verdicts = [fid_verdict(row, steps, own) for row, own in values[DRAWS].items()]
    for kind, curves in values.items():
        lowest = {row: minimum(steps, own) for row, own in curves.items()}
        first, *rest = sorted(lowest, key=lambda row: lowest[row].value)
        others = ", ".join(f"{row} {lowest[row].value:.2f} ({lowest[row].steps})" for row in rest)
        verdicts.append(
            f"Of {kind}, at their best numbers of steps: {first} is lowest, {lowest[first].value:.2f} "
            f"({lowest[first].steps} steps)" + (f"; {others}." if others else ".")
        )
    return verdicts


def draw_curves(steps: Sequence[int], values: Mapping[str, Mapping[str, Sequence[float]]], what: str) -> Canvas:
    """A panel for draws and one for means, in one scale."""
    canvas, axes = new_figure(1, len(values), 3.4)
    canvas.set_size_inches(9.6, 3.4)
    highest = max(max(own) for curves in values.values() for own in curves.values())
    for axis, (kind, curves) in zip(axes[0], values.items(), strict=True):
        for row, own in curves.items():
            axis.plot(steps, own, "o-", color=COLOURS[row], markersize=4, linewidth=1.3, label=row)
        axis.set_xticks(steps)
        axis.set_xlabel("Gibbs steps", fontsize=9)
        axis.set_ylabel(what, fontsize=9)
        axis.set_title(kind, fontsize=9)
        axis.set_ylim(0, 1.05 * highest)
        open_axes(axis, 8)
    axes[0][-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return canvas
