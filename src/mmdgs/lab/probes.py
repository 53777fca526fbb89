"""Probes compared: the error of a Jacobian's diagonal against the number of products, design by design.

On the MNIST energy that ships, at its noise level, and on a diffusion model at several. Images are the models' own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from mmdgs.errors import UsageError
from mmdgs.lab.drawing import ORANGE, new_figure, open_axes
from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.few_steps import MODEL
from mmdgs.lab.probe_errors import DESIGNS, YARDSTICK, ProbeSettings, averaged, measured, needed
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.models import Model, from_pretrained

DIGITS = "mnist"
COMPARED = 10
"""The yardstick's number of probes, as in the paper's MNIST chains."""
PANELS_A_ROW = 3

FULL = ProbeSettings()
QUICK = ProbeSettings(counts=(1, 2, 5, 10, 20), draws=10, digits=1, ratios=(0.7,), sampling_steps=5, window=8)

Errors = Mapping[tuple[str, float], Mapping[str, Sequence[float]]]


def run(context: Context) -> Outcome:
    """Measure every design on MNIST, and on a diffusion model where there is one."""
    settings = QUICK if context.quick else FULL
    model, note = _diffusion_model(context)
    records = measured(context, from_pretrained(DIGITS, device=context.device), "mnist", settings)
    if model is not None:
        records += measured(context, model, "diffusion", settings)
    found = averaged(records)
    flat = {key: _mean(r["flat_error"] for r in records if (r["model"], r["ratio"]) == key) for key in found}
    named = {"settings": asdict(settings) | {"model": None if model is None else model.source}, "probes": records}
    return Outcome(named, [_section(found, flat, settings, note)])


def _diffusion_model(context: Context) -> tuple[Model | None, str]:
    """The model, and what is to be said of it: a run without one is half a run, not a failure."""
    if context.model is not None:
        model = from_pretrained(context.model, device=context.device)
        if len(model.levels) == 1:
            raise UsageError(f"--model must be a model of many noise levels, and {context.model} was trained at one")
        return model, f"The diffusion model is {model.source}."
    if context.quick:
        return None, "MNIST only: the quick version takes a diffusion model where --model names one."
    try:
        model = from_pretrained(MODEL, device=context.device)
    except UsageError as error:
        return None, f"MNIST only: the diffusion model {MODEL} could not be had ({error}). Name another with --model."
    return model, f"The diffusion model is {model.source}."


def _mean(values: Any) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def title_of(key: tuple[str, float]) -> str:
    """A panel's title."""
    name, ratio = key
    return f"{'MNIST energy' if name == 'mnist' else 'diffusion model'}, sigma/alpha {ratio:g}"


def _section(found: Errors, flat: Mapping[tuple[str, float], float], settings: ProbeSettings, note: str) -> Section:
    text = [
        "Relative error of the diagonal of a denoiser's Jacobian, |estimate - exact| / |exact|, by the number of "
        "products with the Jacobian. Rademacher probes are the paper's. Hadamard probes and those on a lattice keep "
        "near pixels apart, and the filter takes the lattice's own noise out of its estimate.",
        note,
    ]
    if settings.window is not None:
        text.append(
            f"This is the quick version: only the {settings.window} x {settings.window} pixels in the middle are "
            "looked at, which couple to fewer others than a whole image's do."
        )
    draws = f"{settings.draws} draws of the signs for each of {settings.digits} digits"
    caption = (
        f"Error against products ({draws}, and {settings.images} image a level of the diffusion model). Dotted: the "
        "exact mean of the diagonal in place of every entry, which no estimate of one variance for all pixels can beat."
    )
    figure = Figure("probes", caption, _draw(found, flat, settings.counts))
    return Section(
        "How near so many products come",
        text,
        [_needed_table(found, settings), _error_table(found, settings)],
        [figure],
    )


def _needed_table(found: Errors, settings: ProbeSettings) -> Table:
    rows = []
    at = settings.counts.index(COMPARED)
    for name in DESIGNS:
        cells = []
        for one in found.values():
            value = needed(settings.counts, one[name], one[YARDSTICK][at])
            # A product is taken whole or not at all; the yardstick's own number may come out as 10.0000001.
            cells.append(f"> {settings.counts[-1]}" if math.isinf(value) else f"{math.ceil(round(value, 6))}")
        rows.append([name, *cells])
    return Table(
        f"Products needed for the error of {COMPARED} Rademacher probes",
        ["design", *(title_of(key) for key in found)],
        rows,
        "Between the counts that were measured errors are taken to follow a power law.",
    )


def _error_table(found: Errors, settings: ProbeSettings) -> Table:
    rows: list[list[str]] = []
    best: set[tuple[int, int]] = set()
    for one in found.values():
        least = [min(one[name][j] for name in DESIGNS) for j in range(len(settings.counts))]
        for name in DESIGNS:
            # Every design is the same with one product.
            best |= {(len(rows), 2 + j) for j, value in enumerate(one[name]) if j and value <= least[j]}
            rows.append([name, *(f"{value:.3f}" for value in one[name])])
    wheres = [title_of(key) for key in found for _ in DESIGNS]
    rows = [[where, *row] for where, row in zip(wheres, rows, strict=True)]
    header = ["where", "design", *(f"{count}" for count in settings.counts)]
    return Table("Relative error by number of products", header, rows, left=2, best=frozenset(best))


def _draw(found: Errors, flat: Mapping[tuple[str, float], float], counts: Sequence[int]) -> Canvas:
    columns = min(len(found) + 1, PANELS_A_ROW)
    rows = -(-(len(found) + 1) // columns)  # a place for the legend
    canvas, axes = new_figure(rows, columns, 3.2)
    places = [axis for row in axes for axis in row]
    for axis, (key, one) in zip(places, found.items(), strict=False):
        for name, (colour, style, _) in DESIGNS.items():
            axis.loglog(counts, one[name], style, color=colour, markersize=3.5, linewidth=1.3, label=name)
        axis.axhline(flat[key], color=ORANGE, linestyle=":", linewidth=1.2, label="one variance, the right one")
        axis.set_title(title_of(key), fontsize=9)
        axis.set_xlabel("products with the Jacobian", fontsize=8)
        axis.set_ylabel("relative error", fontsize=8)
        axis.xaxis.set_major_locator(FixedLocator(counts))
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        for line in (axis.xaxis, axis.yaxis):
            line.set_major_formatter(lambda value, _: f"{value:g}")
            line.set_minor_locator(NullLocator())
        open_axes(axis, 7)
    for axis in places[len(found) :]:
        axis.set_axis_off()
    places[len(found)].legend(*places[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="center left")
    return canvas


EXPERIMENT = Experiment(
    "probes",
    "Probes of a Jacobian's diagonal, compared",
    "Rademacher, Hadamard and lattice probes: the error of the diagonal against products, on MNIST and CIFAR-10.",
    run,
)
