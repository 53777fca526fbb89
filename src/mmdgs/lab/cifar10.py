"""CIFAR-10 at one noise level: covariances by probes, Gibbs chains from noise, FID against their length, collapse.

The paper's figures on CIFAR-10 with sigma 0.3 and a score network, and the mode collapse of its appendix, in numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from matplotlib.figure import Figure as Canvas

from mmdgs.errors import UsageError
from mmdgs.lab.cifar10_collapse import collapse_grid, collapse_section, long_chain_section
from mmdgs.lab.cifar10_maps import map_section, maps
from mmdgs.lab.drawing import new_figure
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Cell, Grid, Results
from mmdgs.lab.labels import label_curves
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.sampler_cells import QUICK_NOTE, Judge, References, Sampling, SamplingSettings
from mmdgs.lab.single_level_chains import DRAWS, FROM_NORMAL, MEANS, ROWS, SPECTRAL, Chains
from mmdgs.lab.small_models import QUICK_TRAINING, check_colours, model_of
from mmdgs.lab.workspace import Part, axis
from mmdgs.models import Model, from_pretrained, load
from mmdgs.tables import Table
from mmdgs.training import Recipe

DATA, MODEL, MANY, CLASSIFIER = "cifar10", "cifar10-score", "cifar10", "cifar10-classifier"
SIGMA = 0.3
TRAIN = (
    f"mmdgs train --data cifar10 --model unet-paper --param score --sigma {SIGMA:g} --epochs 1000 --batch-size 100 "
    "--learning-rate 1e-4 --precision bf16 --out runs/cifar10-score"
)
"""How the paper trained its model."""
PAPER_STEPS = 40
"""The paper's FID increases after so many Gibbs steps."""
RISE = 0.02
"""A relative difference of FIDs that counts: those of two seeds with some thousand images differ by about a percent."""


@dataclass(frozen=True)
class Cifar10Settings(SamplingSettings):
    """Sizes; where the paper has a number, it is the default, but for the images (50,000)."""

    images: int = 10_000
    steps: tuple[int, ...] = (5, 10, 20, 40, 60, 100)
    curves: tuple[str, ...] = axis(tuple(ROWS))
    probes: int = 3  # on lattices, which come nearer than the paper's 10 with signs everywhere (docs/probes.md)
    block: int = 2_500  # chains that are run and kept as one part
    long_rows: tuple[str, ...] = axis((FROM_NORMAL, SPECTRAL))
    long_chains: int = 250
    long_steps: tuple[int, ...] = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 500, 1_000)
    shown: int = 25
    map_images: int = 8
    map_probes: tuple[int, ...] = (1, 10, 100)
    lattice_probes: tuple[int, ...] = (3, 10)
    levels: int = 232  # of the model of many levels


FULL = Cifar10Settings()
QUICK = Cifar10Settings(
    images=16, steps=(2, 4, 8), block=8, long_chains=25, long_steps=(0, 2, 4, 8, 16), map_images=3, map_probes=(1, 10),
    lattice_probes=(3,), levels=6, fit_images=16, precision="float32", metrics=("diversity",), reference_limit=500,
)  # fmt: skip
QUICK_RECIPE = Recipe(
    data=DATA, size=16, limit=2_000, model="unet-tiny", param="score", sigma=SIGMA, training=QUICK_TRAINING
)


def run(context: Context) -> Outcome:
    """Maps, chains, their FID and their collapse."""
    settings = context.sized(FULL, QUICK)
    model = single_level_model(context)
    many = many_model(context, model)
    references = References(DATA, context.data_dir, model.shape[1], settings.reference_limit)
    classifier = classifier_of(context, model.shape)
    judge = Judge.of(context, settings.metrics, references, classifier)
    of_long = Judge.of(context, ("diversity",), references, classifier)
    chains = Chains(context, model, references, settings, settings.probes, settings.block)
    as_many = replace(settings, images=settings.long_chains)
    sampling = None if many is None else Sampling(context, many, of_long, as_many)
    # The test images are its first cell: a classifier of another size is refused before the work.
    collapse = _whole(collapse_grid(chains, of_long, sampling, settings), context)
    found_maps = maps(chains, settings)
    curves = {kind: _whole(curve_grid(kind, chains, judge, settings), context) for kind in (DRAWS, MEANS)}
    named = asdict(settings) | {"model": model.source, "sigma": model.levels[0].sigma, "many": many and many.source}
    sections = [
        map_section(found_maps, context.quick),
        long_chain_section(chains, settings, context.quick),
        _section(curves, settings, f"{model.source}, sigma {model.levels[0].sigma:g}", context.quick),
        collapse_section(collapse, settings, context.quick),
    ]
    records = {"settings": named, "maps": found_maps.values, "collapse": collapse.records()}
    return Outcome({**records, **{kind: found.records() for kind, found in curves.items()}}, sections)


def _whole(grid: Grid, context: Context) -> Results:
    """All cells: the figures need every one, so a run whose time is up before shows none."""
    return grid.run(context, least=len(grid.cells))


def single_level_model(context: Context) -> Model:
    """The model that --model names, or the one that ships; quick runs train a tiny one."""
    model = model_of(context, MODEL, replace(QUICK_RECIPE, data=DATA, data_dir=context.data_dir), TRAIN)
    if len(model.levels) != 1:
        raise UsageError(
            f"--model must be a model of one noise level, and {model.source} has {len(model.levels)}: train one with "
            f"`{TRAIN}`; models of many levels are for `mmdgs reproduce table2`, or go to --many"
        )
    check_colours(model)
    return model


def many_model(context: Context, beside: Model) -> Model | None:
    """The model of many levels that --many names, or the one that ships; quick runs have none by themselves."""
    if context.many is None:
        try:
            found = None if context.quick else from_pretrained(MANY, device=context.device)
        except UsageError:  # it did not come along
            return None
        return found if found is not None and found.shape == beside.shape else None
    model = from_pretrained(context.many, device=context.device)
    if len(model.levels) == 1:
        raise UsageError(f"--many must be a model of many noise levels, and {context.many} was trained at one")
    if model.shape != beside.shape:
        raise UsageError(f"--many must be a model of images {beside.shape}, got one of {model.shape}")
    return model


def classifier_of(context: Context, shape: tuple[int, ...]) -> Model | None:
    """The classifier that --classifier names, or the one that ships, for images of its size."""
    name = context.classifier or (CLASSIFIER if shape == (3, 32, 32) else None)
    return None if name is None else load(name, device=context.device)


# --- FID against Gibbs steps ----------------------------------------------------------------------------------------


def curve_grid(kind: str, chains: Chains, judge: Judge, settings: Cifar10Settings) -> Grid:
    """The draws or the means of each row, judged after each number of steps."""
    states = lru_cache(maxsize=1)(chains.states)  # all cells of a row read the same

    def measure(cell: Cell) -> Part:
        x = states(cell.row, settings.images, settings.steps)[kind]
        return Part(judge(x[settings.steps.index(cell.column)], f"{cell.name} steps, {kind}"))

    cells = {(row, t): kind for row in settings.curves for t in settings.steps}
    return Grid(f"score-{kind}", cells, measure, (judge, chains.depends, settings.images), "Gibbs steps")


def _section(curves: dict[str, Results], settings: Cifar10Settings, source: str, quick: bool) -> Section:
    measure = settings.measure
    text = [
        "The paper's FID of 50,000 images falls at first and increases after 40 Gibbs steps. "
        f"Here it is of {settings.images:,} images; FIDs of other numbers do not compare.",
        *([QUICK_NOTE] if quick else []),
    ]
    note = f"{source}, {settings.precision}."
    places = {t: f"{t}" for t in settings.steps}
    tables: list[Table] = [
        found.table(f"{measure.title} of {kind} by Gibbs steps", [measure], head="chains", note=note, columns=places)
        for kind, found in curves.items()
    ]
    figure = Figure("cifar10_fid", f"{measure.title} against Gibbs steps.", _draw(curves, settings))
    claims = []
    for row in () if quick else settings.curves:
        values = [curves[DRAWS].values(row, t)["fid"] for t in settings.steps]
        claims.append(falls_and_rises(row, settings.steps, values))
    return Section("FID against Gibbs steps", text, tables, [figure], claims)


def falls_and_rises(row: str, steps: Sequence[int], values: Sequence[float]) -> Claim:
    """The claim that a curve has a minimum inside: it begins and ends higher by more than RISE."""
    at = min(range(len(values)), key=values.__getitem__)
    holds = all(end > (1 + RISE) * values[at] for end in (values[0], values[-1]))
    numbers = f"lowest after {steps[at]}: {values[at]:.2f}; after {steps[-1]}: {values[-1]:.2f}"
    return Claim(f"{row}: the FID of draws falls, then rises (paper: after {PAPER_STEPS} steps)", holds, numbers)


def _draw(curves: dict[str, Results], settings: Cifar10Settings) -> Canvas:
    """A panel for draws and one for means, in one scale."""
    canvas, axes = new_figure(1, len(curves), inches=(9.6, 3.4))
    for panel, (kind, found) in zip(axes[0], curves.items(), strict=True):
        found.draw(panel, settings.measure, log="")
        panel.set_xticks(settings.steps)
        panel.set_title(kind, fontsize=9)
    highest = max(panel.get_ylim()[1] for panel in axes[0])
    for panel in axes[0]:
        panel.set_ylim(0, highest)
    label_curves(canvas)
    return canvas
