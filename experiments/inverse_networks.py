"""Real images restored with a network: are draws near the truth, and is their spread their error?

Held-out images of a pretrained model are measured with noise (`TASKS`), and every row draws from
p(x | y) for each. The rivals are the code of their own library where it is installed (rivals.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from torch import Tensor

from experiments import rivals
from experiments.drawing import image_rows, line_style, plain_logs
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results, axis
from experiments.held_out import stored_images
from experiments.sampler_cells import COST
from mmdgs.covariances import named
from mmdgs.data import ImageSet, image_set, spread, to_uint8
from mmdgs.errors import UsageError
from mmdgs.metrics import frechet_distance, load_inception
from mmdgs.metrics.features import image_features
from mmdgs.metrics.inception_file import Inception
from mmdgs.models import COVARIANCE, Model, load
from mmdgs.models.estimators import head_beside
from mmdgs.operators import Operator
from mmdgs.operators.named import parse_operator
from mmdgs.report.drawing import GREY, labelled, new_figure
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.restoration.draws import restore
from mmdgs.restoration.folder import as_image, scores_of, simulated
from mmdgs.restoration.settings import BRIDGE, MIRRORED, MULTISTEP
from mmdgs.workspace import Part

NOISE = 0.02
"""Of values in [0, 1]."""
TASKS = {
    "super-resolution x4": ("sr:4", NOISE),
    "box": ("box:{half}", NOISE),
    "80% missing": ("random:0.8", NOISE),
    "blur": ("blur:1.5", NOISE),
}
"""Operators and the noise of measurements; the box is half as wide as the images."""
PSNR = Measure("psnr_draw", "PSNR of draws, dB", 2, "more")
CRPS = Measure("crps", "CRPS", 4, "less")
MANY = Measure("psnr_many", "PSNR of the mean of many draws, dB", 2, "more")
PSNR_MEAN = Measure("psnr_mean", "PSNR of the draws' mean, dB", 2, "more")
SSIM = Measure("ssim_draw", "SSIM of draws", 3, "more")
CALIBRATION = Measure("calibration", "spread over error", 3)
COVERAGE = Measure("coverage_90", "coverage of 90% intervals", 1, percent=True)
FID = Measure("fid", "FID of draws", 1, "less")
EFFECTIVE = Measure("effective", "effective share of the particles", 2)
EVALUATIONS = Measure("evaluations", "evaluations a draw", 0)
MILLISECONDS = Measure("milliseconds", "ms a draw", 1)
MEASURES = (
    *(PSNR, CRPS, MANY, PSNR_MEAN, SSIM, CALIBRATION, COVERAGE, FID, EFFECTIVE, EVALUATIONS),
    MILLISECONDS,
)
WITHIN = 2.0  # decibels below the nearest mean that the figure of costs shows
GOAL_CALIBRATION = 0.9, 1.1


@dataclass(frozen=True)
class Ours:
    """`mmdgs.restore`, by the name of the covariance and what is set of it, and the chains."""

    name: str
    steps: int
    given: Mapping[str, Any] = field(default_factory=dict)
    chains: str = BRIDGE
    particles: int = 1
    inflation: float | None = None  # the model's


@dataclass(frozen=True)
class Rival:
    """A method of another library, by its name in rivals.py."""

    name: str
    steps: int


LOW_RANK = {"products": 1, "symmetric": True}
ROWS: dict[str, Ours | Rival] = {
    "spectral, 25 steps": Ours("spectral", 25),
    "spectral, mirrored, 25 steps": Ours("spectral", 25, chains=MIRRORED),
    "spectral, multistep, 12 steps": Ours("spectral", 12, chains=MULTISTEP),
    "spectral, multistep, 25 steps": Ours("spectral", 25, chains=MULTISTEP),
    "spectral, multistep, 50 steps": Ours("spectral", 50, chains=MULTISTEP),
    "modulated, multistep, 25 steps": Ours("modulated", 25, chains=MULTISTEP),
    "low rank, 1 one-sided product, 16 steps": Ours("low-rank", 16, LOW_RANK),
    "low rank, 1 one-sided product, multistep, 16 steps": Ours("low-rank", 16, LOW_RANK, MULTISTEP),
    "isotropic, 50 steps": Ours("isotropic", 50),
    "MMPS (azula), 25 steps": Rival("MMPS", 25),
    "PiGDM (azula), 50 steps": Rival("PiGDM", 50),
    "DPS (azula), 100 steps": Rival("DPS", 100),
}


TRIED = rivals.TRIED | {"MMPS": (1, 3, 5, 10, 20), "DPS": (0.3, 1.0, 3.0, 10.0, 30.0)}
"""Five values of the one setting of every rival."""


@dataclass(frozen=True)
class NetworkSettings:
    """Images in all and draws of each; intervals are over `seeds` parts of the images.

    Rivals have the same images, draws and precision, and the setting of the least CRPS on other
    images (`rivals.tuned`); their passes have graphs, so fewer go at a time. Scores are of `scored`
    images each, or of a part.
    """

    images: int = 192
    draws: int = 4
    rival_batch: int | None = 192
    batch_size: int | None = 800
    tuned_on: int = 12
    tuned_draws: int = 4
    seeds: int = 3
    scored: int | None = None
    precision: str = "bf16"
    rows: tuple[str, ...] = axis(tuple(ROWS))
    tasks: tuple[str, ...] = axis(tuple(TASKS))
    shown: int = 4


FULL = NetworkSettings()
QUICK = NetworkSettings(
    images=4, draws=3, seeds=2, precision="float32", tasks=("box",),
    rows=("spectral, 25 steps", "isotropic, 50 steps"),
)  # fmt: skip


def run(
    context: Context, every: Mapping[str, Ours | Rival] = ROWS, images: int | None = None
) -> Outcome:
    """Restore held-out images of the context's model by every row on every task."""
    settings = context.sized(FULL, QUICK)
    if every is not ROWS:
        settings = replace(settings, rows=tuple(every))
        if images is not None and context.images is None and not context.quick:
            settings = replace(settings, images=images)
    model = load(context.model or "cifar10", device=context.device)
    rows = {row: every[row] for row in settings.rows if rivals.installed(every[row].name)}
    if head_beside(model, COVARIANCE) is None:
        rows = {row: what for row, what in rows.items() if what.name != "modulated"}
    held_out = stored_images(context, model, "test")
    inception = None if context.quick else _inception()
    fid = None if inception is None else _fid(held_out, inception, context)
    scored = spread(len(held_out), settings.images)
    others = scored[:: max(1, settings.images // settings.tuned_on)] + 1
    sets = (held_out.images[places % len(held_out)].float() / 255 for places in (scored, others))
    tasks = {task: TASKS[task] for task in settings.tasks}
    work = Restorations(context, model, settings, tasks, *sets, fid=fid)
    cells = {(row, task): what for row, what in rows.items() for task in tasks}
    known = inception and inception.sha256
    depends = {"model": model, "settings": settings, "inception": known, "tried": TRIED}
    results = Grid("restore", cells, work, depends, "task", seeds=settings.seeds).run(context)
    named = asdict(settings) | {"model": model.source, "noise": NOISE}
    text = [
        f"{settings.images} held-out images of {model.source}, measured with noise {NOISE:g} (of "
        "values in [0, 1]): averages of 4 x 4 pixels, a missing box half as wide as the image, 80% "
        "of the pixels missing, a Gaussian blur of 1.5 pixels.",
        "A correct draw is as far from the optimal mean as the truth is, so its PSNR lies 3 dB "
        "below that of the mean: draws that spread too little have a higher one.",
    ]
    page = section(work, results, f"Restoration with {model.source}", text)
    records = {"settings": named, "networks": results.records()}
    return Outcome(records, [page], left=results.open())


def _inception() -> Inception | None:
    try:
        return load_inception(download=False)
    except UsageError:
        return None


def _fid(held_out: ImageSet, inception: Inception, context: Context) -> Callable[[Tensor], float]:
    """The FID of images in [0, 1] against all held-out ones."""

    def moments(images: ImageSet) -> Any:
        return image_features(images, inception, device=context.device, progress=None).moments

    reference = cache(lambda: moments(held_out))
    return lambda draws: frechet_distance(moments(image_set(to_uint8(draws), "draws")), reference())


def of_many(draw: float, mean: float, draws: int) -> float:
    """The PSNR of the mean of endlessly many draws, from that of one and that of the mean of some.

    The mean of n has the squared error m + v / n, with the spread v: of one draw it is m + v.
    """
    share = (1 - 10 ** ((draw - mean) / 10)) / (1 - 1 / draws)  # v / (m + v)
    return draw - 10 * math.log10(1 - share)


@dataclass(frozen=True, eq=False)
class Restorations:
    """Measures cells: the truths, part by part, measured by each task, restored and scored.

    `tasks` are an operator as text and the noise, by name; rivals are tuned on `others`.
    """

    context: Context
    model: Model
    settings: NetworkSettings
    tasks: Mapping[str, tuple[str, float]]
    truths: Tensor
    others: Tensor
    tried: Mapping[str, Sequence[float]] = field(default_factory=lambda: TRIED)
    fid: Callable[[Tensor], float] | None = None

    def measured(self, task: str, part: int) -> tuple[Operator, Tensor, Tensor]:
        """A task's operator, the images of a part, and their measurements; parts share no image."""
        return self._measured(task, self.truths[part :: self.settings.seeds], part)

    def _measured(self, task: str, truth: Tensor, seed: int) -> tuple[Operator, Tensor, Tensor]:
        text, noise = self.tasks[task]
        operator = parse_operator(text.format(half=self.model.shape[-1] // 2), self.model.shape)
        truth = truth.to(self.context.device)
        return operator, truth, simulated(truth, operator, noise, seed=seed)

    def __call__(self, cell: Cell) -> Part:
        scores: dict[str, list[float]] = {}
        every, evaluations, seconds = [], 0.0, 0.0
        search = self._tuned(cell) if isinstance(cell.what, Rival) else {"setting": None}
        for part in range(self.settings.seeds):
            operator, truth, y = self.measured(cell.column, part)
            own = (cell, y, operator, cell.seed + part, search["setting"])
            draws, evaluations, taken, info = self._restored(*own)
            seconds += taken
            every.append(draws)
            size = self.settings.scored or len(truth)
            for some, known in zip(draws.split(size, 1), truth.split(size), strict=True):
                for name, value in _scores(some.to(known.device), known).items():
                    scores.setdefault(name, []).append(value)
            if "effective" in info:
                scores.setdefault("effective", []).append(info["effective"].mean().item())
        whole = torch.cat(every, 1)
        numbers: dict[str, Any] = {**scores, "evaluations": evaluations}
        numbers |= {"finite": bool(whole.isfinite().all()), **search}
        numbers["milliseconds"] = 1_000 * seconds / (whole.shape[0] * whole.shape[1])
        if self.fid is not None and numbers["finite"]:
            numbers["fid"] = self.fid(whole.flatten(0, 1))
        first = every[0][:, : self.settings.shown].nan_to_num(0.5)
        return Part(numbers, {"draw": to_uint8(first[0])})

    def _tuned(self, cell: Cell) -> dict[str, Any]:
        """The setting of a rival with the least CRPS on images that no row is scored on."""
        _, noise = self.tasks[cell.column]
        operator, truth, y = self._measured(cell.column, self.others, self.settings.seeds)
        problem = (cell.what.name, self.model, y, operator, noise, cell.what.steps)

        def score(setting: float) -> tuple[Tensor, Tensor]:
            draws, _ = rivals.restore(*problem, self.settings.tuned_draws, **self._how(setting))
            return draws.cpu(), truth.cpu()

        return rivals.tuned(cell.what.name, score, self.tried[cell.what.name])

    def _how(self, setting: float | None) -> dict[str, Any]:
        known = self.settings
        run = {"batch_size": known.rival_batch, "precision": known.precision}
        return {"setting": setting, **run}

    def _restored(
        self, cell: Cell, y: Tensor, operator: Operator, seed: int, setting: float | None
    ) -> tuple[Tensor, float, float, Mapping[str, Tensor]]:
        """Draws (draws, B, ...) on the CPU, the evaluations of each, seconds, and what restore
        tells.
        """
        known, started, what = self.settings, time.perf_counter(), cell.what
        _, noise = self.tasks[cell.column]
        if isinstance(what, Rival):
            problem = (what.name, self.model, y, operator, noise, what.steps)
            draws, cost = rivals.restore(*problem, known.draws, seed, **self._how(setting))
            return draws.cpu(), cost, time.perf_counter() - started, {}
        moments = self.model.posterior(named(what.name, what.given))
        restored = restore(
            self.model, y, operator, noise=noise, covariance=moments, chains=what.chains,
            steps=what.steps, draws=known.draws, seed=seed, precision=known.precision,
            batch_size=known.batch_size, particles=what.particles, inflation=what.inflation,
            progress=None,
        )  # fmt: skip
        return restored.draws, restored.cost.evaluations, restored.seconds, restored.info


def _scores(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """Those of all draws (draws, B, ...)."""
    scores = scores_of(draws, truth)
    many = of_many(scores["psnr_draw"], scores["psnr_mean"], len(draws))
    return scores | {"psnr_many": many}


def section(work: Restorations, results: Results, title: str, text: Sequence[str]) -> Section:
    """A table and a figure for each task, the costs, and what rows of ours must reach."""
    known = work.settings
    note = f"All in {known.precision}, {known.draws} draws of each image. {COST}"
    text = [*text, *rivals.left_out(), *rivals.settings_said(results.records())]
    tables, figures = [], []
    for task in results.columns:
        name = f"restored_{task.replace('%', '').replace(' ', '_')}"
        caption = task[0].upper() + task[1:]
        shown = {"head": "method", "columns": {task: ""}, "note": note}
        tables.append(results.table(caption, MEASURES, **shown))
        figures.append(Figure(name, f"{caption}: one draw.", _draw(results, work, task)))
    words = (
        "The mean of the draws, and their spread, against evaluations: a curve for each covariance "
        f"and its chains, dark for methods of others. Means {WITHIN:g} dB below the best are left "
        "out; the band is the aim of the spread."
    )
    figures.append(Figure("restored_costs", words, _draw_costs(results)))
    return Section(title, text, tables, figures, _claims(results))


def _draw(results: Results, work: Restorations, task: str) -> Canvas:
    """A strip for the measurements, the truth, and one draw of each row."""
    operator, truth, y = work.measured(task, 0)
    truth, y = (x[: work.settings.shown].cpu() for x in (truth, y))
    strips = {
        "measurement": to_uint8(as_image(operator.known(y), truth.shape[1:])),
        "truth": to_uint8(truth),
    }
    strips |= {
        row: results.parts[row, task].tensors["draw"]
        for row in results.rows
        if results.has(row, task)
    }
    return image_rows(strips, tile=0.9)


def _draw_costs(results: Results) -> Canvas:
    """A column for each task, a curve for each covariance and its chains, and for each rival."""
    families: dict[str, list[str]] = {}
    for row, what in _kinds(results).items():
        name = what.name if isinstance(what, Rival) else f"{what.name}, {what.chains}"
        families.setdefault(name, []).append(row)
    tasks = results.columns
    canvas, axes = new_figure(2, len(tasks), inches=(1.0 + 2.2 * len(tasks), 4.8))
    for place, task in enumerate(tasks):
        for measure, panels in zip((MANY, CALIBRATION), axes, strict=True):
            panel = panels[place]
            for family, rows in families.items():
                both = ([results.number(r, task, m).value for m in (EVALUATIONS, measure)]
                        for r in rows if results.has(r, task))  # fmt: skip
                if points := sorted(both):
                    panel.plot(*zip(*points, strict=True), **line_style(family))
            panel.set_xscale("log")
            plain_logs(panel)
            upper = measure is MANY
            words = "PSNR of the mean, dB" if upper else measure.title
            title, across = (task, "") if upper else ("", EVALUATIONS.title)
            labelled(panel, title, across, words if place == 0 else "")
        low, high = axes[0][place].get_ylim()
        axes[0][place].set_ylim(max(low, high - WITHIN), high)
        axes[1][place].axhspan(*GOAL_CALIBRATION, color=GREY, alpha=0.15, linewidth=0)
    handles = [Line2D([], [], label=family, **line_style(family)) for family in families]
    canvas.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return canvas


def _claims(results: Results) -> list[Claim]:
    """Of each row of ours: a CRPS below that of every other method, and a spread like the error."""
    kinds, (low, high) = _kinds(results), GOAL_CALIBRATION
    claims = []
    for row in (row for row, what in kinds.items() if isinstance(what, Ours)):
        others = [other for other, what in kinds.items() if isinstance(what, Rival)]
        claims += [results.below(row, other, CRPS) for other in others]
        tasks = [task for task in results.columns if results.has(row, task)]
        ratios = [results.number(row, task, CALIBRATION).value for task in tasks]
        said = [f"{ratio:.3f} at {task}" for ratio, task in zip(ratios, tasks, strict=True)]
        verdicts = [low <= ratio <= high for ratio in ratios]
        text = f"{row}: spread over error is {low:g} to {high:g}"
        claims.append(Claim.of_all(text, verdicts, said))
    return claims


def _kinds(results: Results) -> dict[str, Ours | Rival]:
    """What each row is."""
    return {row: results.grid.cells[row, task] for row, task in results.parts}
