"""Long chains at one noise level: pictures of them, and their mode collapse in numbers.

The numbers are the distance of chains to each other and their classes, beside those of data and of a model of many
levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.data import spread
from mmdgs.generation import Method
from mmdgs.lab.drawing import class_bars, colour_picture, image_rows, new_figure, new_panels, style
from mmdgs.lab.grid import Cell, Grid, Measure, Results
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.sampler_cells import DIVERSITY, DUPLICATES, QUICK_NOTE, Judge, Sampling, path
from mmdgs.lab.single_level_chains import DRAWS, FROM_NORMAL, MEANS, ROWS, Chains
from mmdgs.lab.workspace import Part
from mmdgs.moments import FLOOR

if TYPE_CHECKING:
    from mmdgs.lab.cifar10 import Cifar10Settings

TEST, MANY = "data (test images)", "many levels, Gibbs"
CLASSES = (Measure("class_distance", "class distance", 3), Measure("class_entropy", "class entropy", 3))
COLLAPSED = 0.9
"""A diversity below this much of the data's own is called a collapse."""
CHAINS_SHOWN, COLUMNS, PANELS_A_ROW = 3, 5, 7  # in the paper's figures of chains


def collapse_grid(chains: Chains, judge: Judge, sampling: Sampling | None, settings: Cifar10Settings) -> Grid:
    """The means of long chains after each number of steps; test images and those of many levels as steps 0."""
    count, steps = settings.long_chains, settings.long_steps
    cells: dict[tuple[str, int], Any] = {(TEST, 0): "data"}
    if sampling is not None:
        levels = path(sampling.model, settings.levels)
        cells[MANY, 0] = Method("gibbs", levels, covariance="rademacher", probes=3, floor=FLOOR, sweeps=3)
    cells |= {(row, t): MEANS for row in settings.long_rows for t in steps if t > 0}

    def measure(cell: Cell) -> Part:
        if cell.row == MANY and sampling is not None:
            return sampling(cell)
        if cell.row == TEST:
            images = chains.references.load("test").images
            return Part(judge(images[spread(len(images), count)], cell.row))
        x = chains.states(cell.row, count, steps)[MEANS]
        return Part(judge(x[steps.index(cell.column)], f"{cell.name} steps"))

    depends = (judge, chains.depends, count, sampling and sampling.depends)
    return Grid("collapse", cells, measure, depends, "steps")


def long_chain_section(chains: Chains, settings: Cifar10Settings, quick: bool) -> Section:
    """The paper's figures of chains: three of them along their steps, and 25 as they go on."""
    steps = settings.long_steps
    regular = [i for i, t in enumerate(steps) if t <= 100]
    text = [
        "Gibbs sweeps at one noise level. The paper's chains start from standard normal noise (its section 2.1) and "
        f"draw with the diagonal covariance, here of {settings.probes} probes; other rows start from uniform noise. A "
        "draw is a mean plus the noise of its covariance, so the means stand beside the draws.",
        *([QUICK_NOTE] if quick else []),
    ]
    figures = []
    for row in settings.long_rows:
        states = chains.states(row, settings.long_chains, steps)
        own = {kind: x[:, : settings.shown] for kind, x in states.items()}
        means, count = own[MEANS], min(CHAINS_SHOWN, own[DRAWS].shape[1])
        strips = {f"chain {c + 1}, {kind}": own[kind][regular, c] for c in range(count) for kind in (DRAWS, MEANS)}
        strip = image_rows(strips, titles=[f"{steps[i]:,}" for i in regular])
        ending = "" if row == FROM_NORMAL else f"_{row}"
        start = "standard normal" if ROWS[row].start == "normal" else "uniform"
        what = f"{ROWS[row].covariance.capitalize()} covariance, from {start} noise"
        figures += [
            Figure(f"cifar10_chains{ending}", f"{what}: {count} chains; the number of Gibbs steps above.", strip),
            Figure(
                f"cifar10_25_chains{ending}", f"{what}: the means of {means.shape[1]} chains.", _draw_many(steps, means)
            ),
        ]
    return Section("Chains from noise", text, (), figures)


def _draw_many(steps: tuple[int, ...], x: Tensor) -> Canvas:
    """All chains as a mosaic for each number of steps, without the start."""
    shown = [(t, own) for t, own in zip(steps, x, strict=True) if t > 0]
    canvas, places = new_panels(len(shown), PANELS_A_ROW, 1.9)
    for axis, (t, own) in zip(places, shown, strict=False):
        colour_picture(axis, own, COLUMNS, f"{t:,} steps")
    return canvas


def collapse_section(found: Results, settings: Cifar10Settings, quick: bool) -> Section:
    """Mode collapse of long chains, measured."""
    counted = "class_entropy" in found.values(TEST, 0)
    text = [
        "The paper sees fewer and fewer modes as 25 chains go on at this one small noise level. Diversity is the mean "
        "distance of an image to its nearest other, over that of as many training images.",
        *([QUICK_NOTE] if quick else []),
        *([] if found.has(MANY, 0) else ["No model of many levels was named (--many), so that row is left out."]),
        *([] if counted else ["No classifier was named (--classifier), so classes are not counted."]),
    ]
    note = f"{settings.long_chains} chains of each row; means of their posteriors."
    measures = [DIVERSITY, DUPLICATES, *(CLASSES if counted else ())]
    table = found.listing("Long chains", measures, note=note, head="samples", rows=[*settings.long_rows, TEST, MANY])
    figure = Figure("cifar10_collapse", "Diversity of the chains as they go on.", _draw(found, counted))
    claims = [] if quick else [collapses(row, found) for row in settings.long_rows]
    if found.has(MANY, 0) and not quick:
        share = found.values(MANY, 0)["diversity"] / found.values(TEST, 0)["diversity"]
        claim = f"images of many levels have at least {COLLAPSED:g} of the data's diversity"
        claims.append(Claim(claim, share >= COLLAPSED, f"{share:.2f}{_classes(found.values(MANY, 0))}"))
    return Section("Mode collapse", text, [table], [figure], claims)


def collapses(row: str, found: Results) -> Claim:
    """The claim that chains end nearer to each other than data are, and than they were before."""
    data = found.values(TEST, 0)["diversity"]
    shares = {t: found.values(row, t)["diversity"] / data for t in found.columns if t and found.has(row, t)}
    last, most = max(shares), max(shares, key=lambda t: shares[t])
    holds = shares[last] < COLLAPSED and shares[last] < COLLAPSED * shares[most]
    numbers = f"{shares[last]:.2f} after {last:,} steps, at most {shares[most]:.2f} (after {most:,})"
    text = f"{row}: chains collapse to less than {COLLAPSED:g} of the data's diversity"
    return Claim(text, holds, numbers + _classes(found.values(row, last)))


def _classes(values: Mapping[str, Any]) -> str:
    """The entropy of the classes and the commonest one, in words; nothing where they were not counted."""
    if "class_shares" not in values:
        return ""
    share, name = max(zip(values["class_shares"], values["class_names"], strict=True))
    return f"; entropy of classes {values['class_entropy']:.2f}, the commonest {name} with {100 * share:.0f}%"


def _draw(found: Results, counted: bool) -> Canvas:
    """Diversity against steps, those of data and of many levels as lines; shares of the classes beside it."""
    canvas, axes = new_figure(1, 2 if counted else 1, inches=(11.0 if counted else 6.0, 3.4))
    axis = axes[0][0]
    moving = {key: part for key, part in found.parts.items() if key[1] > 0}
    replace(found, parts=moving).draw(axis, DIVERSITY, log="x")
    still = [row for row, steps in found.parts if steps == 0]
    for row in still:
        value = found.values(row, 0)["diversity"]
        axis.axhline(value, color=style(row).colour, linestyle="--", linewidth=1.2, label=row)
    axis.set_ylim(bottom=0)
    if counted:
        last = max(steps for _, steps in moving)
        shown = {row: found.values(row, 0 if row in still else last)["class_shares"] for row in found.rows}
        class_bars(axes[0][1], shown, found.values(TEST, 0)["class_names"])
        axes[0][1].tick_params("x", rotation=40)
    for panel in axes[0]:
        panel.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return canvas
