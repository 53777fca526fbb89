"""CIFAR-10 at one noise level: Gibbs chains from noise, FID against their length, mode collapse.

The paper's figures on CIFAR-10 with sigma 0.3 and a score network, and the mode collapse of its
appendix in numbers: the distance of chains to each other and their classes, beside those of data
and of a model of many levels. Its figure of variances by probes is made by `probes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from experiments import sampler_cells
from experiments.drawing import class_bars, colour_picture, image_rows, legend, style
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results, axis
from experiments.sampler_cells import DIVERSITY, Judge, References, Sampling, path
from experiments.single_level_chains import DRAWS, FROM_NORMAL, MEANS, ROWS, SPECTRAL, Chains
from experiments.small_models import model_of
from mmdgs.covariances import RademacherDiagonal
from mmdgs.data import spread
from mmdgs.models import Model, load
from mmdgs.moments import FLOOR
from mmdgs.report.drawing import new_figure, new_panels
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.sampling import SamplerSettings
from mmdgs.tables import Table
from mmdgs.workspace import Part

DATA, MODEL, MANY, CLASSIFIER = "cifar10", "cifar10-score", "cifar10", "cifar10-classifier"
SIGMA = 0.3
PAPER_STEPS = 40
"""The paper's FID increases after so many Gibbs steps."""
RISE = 0.02
"""A relative difference of FIDs that counts: those of two seeds differ by about a percent."""
TEST, MANY_LEVELS = "data (test images)", "many levels, Gibbs"
CLASSES = (
    Measure("class_distance", "class distance", 3),
    Measure("class_entropy", "class entropy", 3),
)
COLLAPSED = 0.9
"""A diversity below this much of the data's own is called a collapse."""
CHAINS_SHOWN, COLUMNS, PANELS_A_ROW = 3, 5, 7  # in the paper's figures of chains


@dataclass(frozen=True)
class Cifar10Settings(sampler_cells.SamplingSettings):
    """Sizes; where the paper has a number, it is the default, but for the images (50,000)."""

    images: int = 10_000
    steps: tuple[int, ...] = (5, 10, 20, 40, 60, 100)
    curves: tuple[str, ...] = axis(tuple(ROWS))
    probes: int = 3  # on lattices, nearer than the paper's 10 with signs everywhere
    block: int = 2_500  # chains that are run and kept as one part
    long_rows: tuple[str, ...] = axis((FROM_NORMAL, SPECTRAL))
    long_chains: int = 250
    long_steps: tuple[int, ...] = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 500, 1_000)
    shown: int = 25
    levels: int = 232  # of the model of many levels


FULL = Cifar10Settings()
QUICK = Cifar10Settings(
    images=16, steps=(2, 4, 8), block=8, long_chains=25, long_steps=(0, 2, 4, 8, 16), levels=6,
    fit_images=16, precision="float32", metrics=("diversity",), reference_limit=500,
)  # fmt: skip


def run(context: Context) -> Outcome:
    """Chains, their FID and their collapse."""
    settings = context.sized(FULL, QUICK)
    model = model_of(context, MODEL, sigma=SIGMA, data=DATA, data_dir=context.data_dir)
    many = many_model(context, model)
    references = References(DATA, context.data_dir, model.shape[1], settings.reference_limit)
    name = context.classifier or (CLASSIFIER if model.shape == (3, 32, 32) else None)
    classifier = None if name is None else load(name, device=context.device)
    judge = Judge.of(context, settings.metrics, references, classifier)
    of_long = Judge.of(context, ("diversity",), references, classifier)
    chains = Chains(context, model, references, settings, settings.probes, settings.block)
    as_many = replace(settings, images=settings.long_chains)
    sampling = None if many is None else Sampling(context, many, of_long, as_many)
    # The test images are its first cell: a classifier of another size is refused before the work.
    collapse = _whole(collapse_grid(chains, of_long, sampling, settings), context)
    curves = {
        kind: _whole(curve_grid(kind, chains, judge, settings), context) for kind in (DRAWS, MEANS)
    }
    sigma = model.levels[0].sigma
    named = {"model": model.source, "sigma": sigma, "many": many and many.source}
    sections = [
        _chain_section(chains, settings),
        _section(curves, settings, f"{model.source}, sigma {sigma:g}"),
        _collapse_section(collapse, settings),
    ]
    records = {"settings": asdict(settings) | named, "collapse": collapse.records()}
    records |= {kind: results.records() for kind, results in curves.items()}
    return Outcome(records, sections)


def _whole(grid: Grid, context: Context) -> Results:
    """All cells: the figures need every one, so a run whose time is up before shows none."""
    return grid.run(context, least=len(grid.cells))


def many_model(context: Context, beside: Model) -> Model | None:
    """The model of many levels that --many names; else the one that ships, where it fits, in full
    runs.
    """
    if context.many is None and (context.quick or beside.shape != (3, 32, 32)):
        return None
    return load(context.many or MANY, device=context.device)


# --- FID against Gibbs steps


def curve_grid(kind: str, chains: Chains, judge: Judge, settings: Cifar10Settings) -> Grid:
    """The draws or the means of each row, judged after each number of steps."""
    states = lru_cache(maxsize=1)(chains.states)  # all cells of a row read the same

    def measure(cell: Cell) -> Part:
        x = states(cell.row, settings.images, settings.steps)[kind]
        return Part(judge(x[settings.steps.index(cell.column)], f"{cell.name} steps, {kind}"))

    cells = {(row, t): kind for row in settings.curves for t in settings.steps}
    depends = (judge, chains.depends, settings.images)
    return Grid(f"score-{kind}", cells, measure, depends, "Gibbs steps")


def _section(curves: dict[str, Results], settings: Cifar10Settings, source: str) -> Section:
    measure = settings.measure
    text = [
        f"The paper's FID of 50,000 images falls, and increases after {PAPER_STEPS} Gibbs steps. "
        f"Here it is of {settings.images:,} images; FIDs of other numbers do not compare."
    ]
    note, steps = f"{source}, {settings.precision}.", settings.steps
    tables: list[Table] = []
    for kind, results in curves.items():
        title, columns = f"{measure.title} of {kind} by Gibbs steps", {t: f"{t}" for t in steps}
        tables.append(results.table(title, [measure], head="chains", note=note, columns=columns))
    figure = Figure("cifar10_fid", f"{measure.title} against Gibbs steps.", _draw(curves, settings))
    claims = []
    for row in settings.curves:
        values = [curves[DRAWS].number(row, t, measure).value for t in steps]
        claims.append(falls_and_rises(row, steps, values))
    return Section("FID against Gibbs steps", text, tables, [figure], claims)


def falls_and_rises(row: str, steps: Sequence[int], values: Sequence[float]) -> Claim:
    """The claim that a curve has a minimum inside: it begins and ends higher by more than RISE."""
    at = min(range(len(values)), key=values.__getitem__)
    holds = all(end > (1 + RISE) * values[at] for end in (values[0], values[-1]))
    numbers = f"lowest after {steps[at]}: {values[at]:.2f}; after {steps[-1]}: {values[-1]:.2f}"
    text = f"{row}: the FID of draws falls, then rises (paper: after {PAPER_STEPS} steps)"
    return Claim(text, holds, numbers)


def _draw(curves: dict[str, Results], settings: Cifar10Settings) -> Canvas:
    """A panel for draws and one for means, in one scale."""
    canvas, axes = new_figure(1, len(curves), inches=(9.6, 3.4))
    for panel, (kind, results) in zip(axes[0], curves.items(), strict=True):
        results.draw(panel, settings.measure, log="")
        panel.set_xticks(settings.steps)
        panel.set_title(kind, fontsize=9)
    highest = max(panel.get_ylim()[1] for panel in axes[0])
    for panel in axes[0]:
        panel.set_ylim(0, highest)
    legend(canvas)
    return canvas


# --- long chains and their collapse


def collapse_grid(
    chains: Chains, judge: Judge, sampling: Sampling | None, settings: Cifar10Settings
) -> Grid:
    """The means of long chains by steps; test images and those of many levels as steps 0."""
    count, steps = settings.long_chains, settings.long_steps
    cells: dict[tuple[str, int], Any] = {(TEST, 0): "data"}
    if sampling is not None:
        levels = path(sampling.model, settings.levels)
        cells[MANY_LEVELS, 0] = SamplerSettings(
            "gibbs", levels, covariance=RademacherDiagonal(3, floor=FLOOR), sweeps=3
        )
    cells |= {(row, t): MEANS for row in settings.long_rows for t in steps if t > 0}

    def measure(cell: Cell) -> Part:
        if cell.row == MANY_LEVELS and sampling is not None:
            return sampling(cell)
        if cell.row == TEST:
            images = chains.references.load("test").images
            return Part(judge(images[spread(len(images), count)], cell.row))
        x = chains.states(cell.row, count, steps)[MEANS]
        return Part(judge(x[steps.index(cell.column)], f"{cell.name} steps"))

    depends = (judge, chains.depends, count, sampling and sampling.depends)
    return Grid("collapse", cells, measure, depends, "steps")


def _chain_section(chains: Chains, settings: Cifar10Settings) -> Section:
    """The paper's figures of chains: three of them along their steps, and 25 as they go on."""
    steps = settings.long_steps
    regular = [i for i, t in enumerate(steps) if t <= 100]
    text = [
        "The paper's chains start from standard normal noise (its section 2.1) and draw with the "
        f"diagonal covariance, here of {settings.probes} probes; other rows start from uniform "
        "noise. A draw is a mean plus the noise of its covariance, so the means stand beside."
    ]
    figures = []
    for row in settings.long_rows:
        states = chains.states(row, settings.long_chains, steps)
        own = {kind: x[:, : settings.shown] for kind, x in states.items()}
        means, count = own[MEANS], min(CHAINS_SHOWN, own[DRAWS].shape[1])
        strips = {
            f"chain {c + 1}, {kind}": own[kind][regular, c]
            for c in range(count)
            for kind in (DRAWS, MEANS)
        }
        strip = image_rows(strips, titles=[f"{steps[i]:,}" for i in regular])
        ending = "" if row == FROM_NORMAL else f"_{row}"
        start = "standard normal" if ROWS[row].start == "normal" else "uniform"
        what = f"{ROWS[row].covariance.capitalize()} covariance, from {start} noise"
        words = f"{what}: {count} chains; the number of Gibbs steps above."
        figures.append(Figure(f"cifar10_chains{ending}", words, strip))
        words = f"{what}: the means of {means.shape[1]} chains."
        figures.append(Figure(f"cifar10_25_chains{ending}", words, _draw_many(steps, means)))
    return Section("Chains from noise", text, (), figures)


def _draw_many(steps: tuple[int, ...], x: Tensor) -> Canvas:
    """All chains as a mosaic for each number of steps, without the start."""
    shown = [(t, own) for t, own in zip(steps, x, strict=True) if t > 0]
    canvas, places = new_panels(len(shown), PANELS_A_ROW, 1.9)
    for panel, (t, own) in zip(places, shown, strict=False):
        colour_picture(panel, own, COLUMNS, f"{t:,} steps")
    return canvas


def _collapse_section(results: Results, settings: Cifar10Settings) -> Section:
    """Mode collapse of long chains, measured."""
    counted = "class_entropy" in results.values(TEST, 0)
    text = [
        "The paper sees fewer and fewer modes as 25 chains go on at this one small noise level. "
        "Diversity is the mean distance of an image to its nearest other, over that of as many "
        "training images.",
        *([] if results.has(MANY_LEVELS, 0) else ["No model of many levels was named (--many)."]),
        *([] if counted else ["No classifier was named, so classes are not counted."]),
    ]
    note = f"{settings.long_chains} chains of each row; means of their posteriors."
    measures = [DIVERSITY, sampler_cells.DUPLICATES, *(CLASSES if counted else ())]
    rows = [*settings.long_rows, TEST, MANY_LEVELS]
    table = results.listing("Long chains", measures, note=note, head="samples", rows=rows)
    caption = "Diversity of the chains as they go on."
    figure = Figure("cifar10_collapse", caption, _draw_collapse(results, counted))
    claims = [collapses(row, results) for row in settings.long_rows]
    if results.has(MANY_LEVELS, 0):
        share = results.values(MANY_LEVELS, 0)["diversity"] / results.values(TEST, 0)["diversity"]
        claim = f"images of many levels have at least {COLLAPSED:g} of the data's diversity"
        numbers = f"{share:.2f}{_classes(results.values(MANY_LEVELS, 0))}"
        claims.append(Claim(claim, share >= COLLAPSED, numbers))
    return Section("Mode collapse", text, [table], [figure], claims)


def collapses(row: str, results: Results) -> Claim:
    """The claim that chains end nearer to each other than data are, and than they were before."""
    data = results.values(TEST, 0)["diversity"]
    steps = [t for t in results.columns if t and results.has(row, t)]
    shares = {t: results.values(row, t)["diversity"] / data for t in steps}
    last, most = max(shares), max(shares, key=lambda t: shares[t])
    holds = shares[last] < COLLAPSED and shares[last] < COLLAPSED * shares[most]
    numbers = f"{shares[last]:.2f} after {last:,} steps, most after {most:,}: {shares[most]:.2f}"
    text = f"{row}: chains collapse to less than {COLLAPSED:g} of the data's diversity"
    return Claim(text, holds, numbers + _classes(results.values(row, last)))


def _classes(values: Mapping[str, Any]) -> str:
    """The entropy of the classes and the commonest one; nothing where they were not counted."""
    if "class_shares" not in values:
        return ""
    share, name = max(zip(values["class_shares"], values["class_names"], strict=True))
    entropy = f"entropy of classes {values['class_entropy']:.2f}"
    return f"; {entropy}, the commonest {name} with {100 * share:.0f}%"


def _draw_collapse(results: Results, counted: bool) -> Canvas:
    """Diversity against steps, that of data and many levels as lines; shares of the classes."""
    canvas, axes = new_figure(1, 2 if counted else 1, inches=(11.0 if counted else 6.0, 3.4))
    first = axes[0][0]
    moving = {key: part for key, part in results.parts.items() if key[1] > 0}
    replace(results, parts=moving).draw(first, DIVERSITY, log="x")
    still = [row for row, steps in results.parts if steps == 0]
    for row in still:
        value = results.values(row, 0)["diversity"]
        first.axhline(value, color=style(row).colour, linestyle="--", linewidth=1.2, label=row)
    first.set_ylim(bottom=0)
    if counted:
        last = max(steps for _, steps in moving)
        shown = {
            row: results.values(row, 0 if row in still else last)["class_shares"]
            for row in results.rows
        }
        class_bars(axes[0][1], shown, results.values(TEST, 0)["class_names"])
        axes[0][1].tick_params("x", rotation=40)
    for panel in axes[0]:
        place: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
        panel.legend(fontsize=7, frameon=False, ncols=2, **place)
    return canvas
