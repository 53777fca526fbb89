"""The report on Table 2: one table, FID against evaluations, images of every row, and what is to be said of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.lab.drawing import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    image_rows,
    new_figure,
    open_axes,
    plain_logs,
)
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.metrics import jackknife_interval

LANGEVIN, GIBBS, DOWN = "Langevin", "Gibbs (paper)", "Gibbs, down first"
ISOTROPIC, SPECTRAL = "Gibbs, isotropic", "Gibbs, spectral"
"""All but the paper's only go down in the first sweep of a pair of levels. The last two have no products: one variance
a level, or one for each frequency."""
ROWS: dict[str, tuple[str, str]] = {
    LANGEVIN: (RED, "o-"),
    GIBBS: (BLUE, "o-"),
    DOWN: (BLUE, "s--"),
    ISOTROPIC: (ORANGE, "s--"),
    SPECTRAL: (PINK, "s--"),
    "consistent annealing": (RED, "s--"),
    "ancestral, small": (GREY, "o-"),
    "ancestral, large": (GREY, "s--"),
    "ancestral, isotropic": (ORANGE, "o-"),
    "ancestral, spectral": (PINK, "o-"),
    "ancestral, diagonal": (COLOURS["diagonal"], "o-"),
    "ancestral, Krylov": (COLOURS["diagonal"], "s--"),
    "DDIM": (GREEN, "o-"),
    "Heun": (GREEN, "s--"),
}
"""Rows in the order of the table, and how each is drawn."""

PAPER = {"Langevin": ("8.40 ± 0.07", 10.87), "Gibbs": ("8.28 ± 0.07", 10.75)}
"""Inception score and FID of the paper's Table 2: NCSNv2, 50,000 images."""
COLUMNS = {
    "fid": ("FID", 2),
    "is": ("IS", 2),
    "precision": ("precision", 3),
    "recall": ("recall", 3),
    "diversity": ("diversity", 3),
}
PLURAL = "evaluations of the network an image"

Records = Sequence[dict[str, Any]]
Cells = Mapping[tuple[str, int], Mapping[str, Any]]


def table_section(records: Records, settings: Mapping[str, Any], *, quick: bool) -> Section:
    """The table, the curve, and the verdicts."""
    by = {(r["row"], r["steps"]): r for r in records}
    text = [
        "The paper's Table 2 finds multi-level Gibbs (Algorithm 2: 3 sweeps, 3 probes, 232 levels) as good as annealed "
        "Langevin dynamics (Algorithm 1: 5 steps a level) on the same network, 10.75 against 10.87 at 50,000 images. "
        "Here both run on one network with the same noise, and beside them what else samples it; Gibbs also with so "
        "few levels that it costs what Langevin costs.",
        *(quick_note() if quick else verdicts(by, settings)),
        *([f"Not finished yet, which --resume does: {'; '.join(settings['left'])}."] if settings["left"] else []),
    ]
    note = (
        f"{settings['images']:,} images{_seeds(settings['seeds'])}, of "
        f"{settings['model']}, {settings['precision']}. A product with the Jacobian counts as two evaluations. "
        "Diversity: the distance of an image to its nearest other, over that of data. The paper's FIDs are of 50,000 "
        "images and do not compare with those of fewer. " + _open(by)
    )
    what = COLUMNS[settings["measure"]][0]
    figure = Figure("table2", f"{what} against {PLURAL}.", draw_cost(records, settings["measure"], what))
    header, rows, best = _cells(by, settings, quick)
    return Section("The table", text, [Table("Samplers of one network", header, rows, note, 1, best)], [figure])


def quick_note() -> list[str]:
    return ["This is the quick version: so few images show that everything runs, and nothing about the samplers."]


def _seeds(count: int) -> str:
    return "" if count == 1 else f" of {count} seeds together (± 95% interval, from leaving out each seed)"


def _open(by: Cells) -> str:
    reasons = {f"{name} left open: {why}" for one in by.values() for name, why in one["open"].items()}
    return "; ".join(sorted(reasons))


def _cells(
    by: Cells, settings: Mapping[str, Any], quick: bool
) -> tuple[list[str], list[list[str]], frozenset[tuple[int, int]]]:
    shown = [key for key in COLUMNS if any(key in one for one in by.values())]
    header = ["sampler", "levels or steps", "evaluations", *(COLUMNS[key][0] for key in shown), "ms an image"]
    rows = []
    ordered = [(row, steps) for name in ROWS for row, steps in sorted(by) if row == name]
    for row, steps in ordered:
        one = by[row, steps]
        measured = [number(one, key, COLUMNS[key][1]) for key in shown]
        cost = f"{1_000 * one['seconds'] / one['images']:,.1f}"
        rows.append([row, str(steps), f"{one['evaluations']:,.0f}", *measured, cost])
    best: frozenset[tuple[int, int]] = frozenset()
    if settings["measure"] == "fid" and not quick:
        lowest = min(range(len(ordered)), key=lambda i: by[ordered[i]]["fid"])
        best = frozenset({(lowest, 3 + shown.index("fid"))})
        for name, (score, fid) in PAPER.items():
            known = {"fid": f"{fid:.2f}", "is": score}
            cells = [known.get(key, "") for key in shown]
            evaluations = f"{settings['paper_evaluations'][name]:,.0f}"
            rows.append([f"paper: NCSNv2, {name}, 50,000 images", "232", evaluations, *cells, ""])
    return header, rows, best


def number(values: Mapping[str, Any], key: str, digits: int) -> str:
    """A number with its interval, where there are several seeds."""
    half = jackknife_interval(values.get(f"{key}_left_out", ()))
    return f"{values[key]:.{digits}f}" if math.isnan(half) else f"{values[key]:.{digits}f} ± {half:.{digits}f}"


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Which of two FIDs is lower, the same seed left out of both: runs of one seed begin from the same noise."""
    off = first["fid"] - second["fid"]
    pairs = zip(first.get("fid_left_out", ()), second.get("fid_left_out", ()), strict=False)
    half = jackknife_interval([a - b for a, b in pairs])
    if math.isnan(half):
        return f"{'lower' if off < 0 else 'higher'} by {abs(off):.2f}, from one seed, which has no interval"
    if abs(off) <= half:
        return f"not to be told apart: the difference is {off:+.2f} ± {half:.2f}"
    return f"{'lower' if off < 0 else 'higher'} by {abs(off):.2f} ± {half:.2f}"


def verdicts(by: Cells, settings: Mapping[str, Any]) -> list[str]:
    """What the paper says, and whether it came out."""
    levels, equal = settings["levels"], settings["equal_cost_levels"]
    langevin = by.get((LANGEVIN, levels))
    said = []
    for title, row, count in (
        ("At the paper's settings", GIBBS, levels),
        ("At equal cost", GIBBS, equal),
        ("At equal cost, where the first sweep of a pair only goes down", DOWN, equal),
    ):
        ours = by.get((row, count))
        if ours is None or langevin is None:
            continue
        both = [ours, langevin]
        if all("all" in one for one in both):  # more images than the other rows
            both = [{**one, **one["all"]} for one in both]
            title += f", {both[0]['images']:,} images each"
        fids = [number(one, "fid", 2) for one in both]
        said.append(
            f"{title}: Gibbs with {count} levels has FID {fids[0]} at {ours['evaluations']:,.0f} evaluations, "
            f"Langevin {fids[1]} at {langevin['evaluations']:,.0f}; Gibbs is {compared(*both)}."
        )
    return [*said, _best_gibbs(by, settings), *_covariances(by)]


def _best_gibbs(by: Cells, settings: Mapping[str, Any]) -> str:
    own = {key: one["fid"] for key, one in by.items() if key[0] in (GIBBS, DOWN, ISOTROPIC, SPECTRAL)}
    if not own:
        return "No row of Gibbs has run yet."
    row, levels = min(own, key=own.__getitem__)
    fid, theirs = own[row, levels], PAPER["Gibbs"][1]
    overall = min(by, key=lambda key: by[key]["fid"])
    said = (
        f"The best Gibbs variant is {row!r} with {levels} levels, {fid:.2f}, "
        f"{'below' if fid < theirs else 'not below'} the paper's {theirs:.2f}"
    )
    if settings["images"] != 50_000:
        said += f" (which is of 50,000 images: FIDs of {settings['images']:,} are higher by their bias)"
    return f"{said}. The lowest of all is {overall[0]!r} with {overall[1]} levels, {by[overall]['fid']:.2f}."


def _covariances(by: Cells) -> list[str]:
    """Which covariance wins at each number of steps where several were run."""
    names = {row.removeprefix("ancestral, "): row for row in ROWS if row.startswith("ancestral")}
    said = []
    for steps in sorted({count for row, count in by if row in names.values()}):
        found = {name: by[row, steps]["fid"] for name, row in names.items() if (row, steps) in by}
        if len(found) > 1:
            first, *rest = sorted(found, key=found.__getitem__)
            others = ", ".join(f"{name} {found[name]:.2f}" for name in rest)
            said.append(f"Ancestral sampling in {steps} steps: {first} is lowest, {found[first]:.2f}; {others}.")
    return said


def draw_cost(records: Records, measure: str, what: str) -> Canvas:
    """The measure against evaluations, both logarithmic."""
    canvas, axes = new_figure(1, 1, 4.4)
    canvas.set_size_inches(8.6, 4.4)
    axis = axes[0][0]
    for row, (colour, style) in ROWS.items():
        own = sorted((one["evaluations"], one[measure]) for one in records if one["row"] == row)
        if own:
            axis.loglog(*zip(*own, strict=True), style, color=colour, markersize=5, linewidth=1.3, label=row)
    axis.set_xlabel(PLURAL, fontsize=9)
    axis.set_ylabel(what, fontsize=9)
    plain_logs(axis)
    open_axes(axis, 8)
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return canvas


def tuning_section(tuning: Mapping[str, Any], settings: Mapping[str, Any]) -> Section:
    """How Langevin's step size was chosen."""
    what, digits = COLUMNS[settings["measure"]]
    rows = [
        [f"{one['factor']:g}", f"{one['rate']:.4f}", f"{one[settings['measure']]:.{digits}f}"]
        for one in tuning["tried"]
    ]
    chosen = f"{tuning['factor']:g}"
    best = frozenset((i, 2) for i, row in enumerate(rows) if row[0] == chosen)
    text = [
        f"NCSNv2's analysis suggests a rate of {tuning['suggested']:.4f} for these levels (its own 0.062 for 50 to "
        f"0.01). Multiples of it were tried with {settings['tuning_images']:,} images, and {chosen} times it taken. "
        + (
            "The minimum lies inside what was tried."
            if tuning["inside"]
            else "It is the last that was tried: the minimum may lie beyond."
        )
        + " With other numbers of levels Langevin has the same multiple of the rate suggested there."
    ]
    table = Table("Langevin's step size", ["times the suggested", "rate", what], rows, best=best)
    return Section("The step size of Langevin dynamics", text, [table])


def image_section(pictures: Mapping[tuple[str, int], Tensor], *, quick: bool) -> Section:
    """The first images of every row, with the most levels that it has."""
    most = {
        row: max(steps for name, steps in pictures if name == row) for row in ROWS if any(row == n for n, _ in pictures)
    }
    canvas = image_rows({f"{row}, {steps}": pictures[row, steps] for row, steps in most.items()})
    caption = "The first images of each row, from the same seed; the number is that of its levels or steps."
    return Section("Images", quick_note() if quick else (), (), [Figure("table2_images", caption, canvas)])
