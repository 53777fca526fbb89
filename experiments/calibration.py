"""Which covariance, and which uncertainty to trust: posteriors judged by held-out clean data.

Clean data get noise, every estimator gives p(x | noisy x), and the clean data judge it:

    nats         log N(x; mean, C) a number, above that of one variance for all (isotropic)
    z variance   of C^(-1/2) (x - mean), and of single numbers (x_i - mean_i) / std_i: 1 is right
    coverage     of central 90% intervals of single numbers

Cases are networks at one level, with the paper's floor, by default, and after `mmdgs.calibrate` on
other data. One pass serves all three: what an estimator finds before any floor is kept, and lifted
three times.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results, axis
from experiments.held_out import held_out_images
from mmdgs import covariances, losses
from mmdgs.data import toy
from mmdgs.denoisers import Denoiser, energy_denoiser, noise_denoiser
from mmdgs.errors import UsageError
from mmdgs.linalg import Dense, Diagonal, Krylov
from mmdgs.linalg.operators import Covariance
from mmdgs.linalg.repair import FEW, SHARE, error_size, lifted
from mmdgs.metrics.reports import CalibrationReport, report_of, standardised
from mmdgs.models import Model, load, load_head
from mmdgs.moments import (
    FLOOR,
    DiagonalMoments,
    FullMoments,
    IsotropicMoments,
    KrylovMoments,
    Moments,
    OcmMoments,
    SpectralMoments,
    calibrated,
)
from mmdgs.moments.contract import least_and_share
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams, seeded
from mmdgs.report.drawing import new_figure
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings, train
from mmdgs.workspace import Part

ISOTROPIC, SPECTRAL, KRYLOV = "isotropic", "spectral", "Krylov"
PROBED, EXACT, FULL_ROW, HEAD = "diagonal, 3 probes", "diagonal, exact", "full", "OCM head"
ROWS = (ISOTROPIC, SPECTRAL, PROBED, EXACT, FULL_ROW, KRYLOV, HEAD)
BEFORE, DEFAULT, AFTER = STAGES = "floor 1e-6", "default", "calibrated"
KEYS = ("above_isotropic", "z_variance", "mahalanobis", "coverage", "interval_coverage", "repaired")
SHOWN = {
    "above_isotropic": "nats a number above isotropic",
    "mahalanobis": "z variance",
    "z_variance": "z variance of single numbers",
    "interval_coverage": "coverage of 90% intervals",
}
Z_GOOD, COVERAGE_GOOD = (0.8, 1.25), (0.85, 0.94)  # what calibrated uncertainty must reach
Z_SANE, NATS_SANE = 3.0, -0.1  # what uncertainty must reach without data
COLOURS = {"good": "#9fd3a9", "sane": "#f4e2a1", "bad": "#e9a6a0", None: "#f2f3f5"}

SIGMAS = (0.1, 0.3, 1.0)
MIXTURE, DIMENSIONS = "exact mixture", 16
DIGITS_SIGMA, DIGITS_TRAINING = 0.4, 1_500
BESIDE, BESIDE_SIGMA = "diffusers", 0.3  # the column of --many, which is large: at one level
PROBES, DENSE_POINTS, SMALL = 3, 100, 1_000
"""Probes; numbers of an example up to which nothing is expensive, and probes are cheap."""
MORE = 3
"""Times as many images where no products are needed: fitted variances vary from image to image."""
Pairs = list[tuple[Tensor, Gaussian]]
TRAINING = TrainingSettings(steps=3_000, learning_rate=1e-3, batch_size=128)


@dataclass(frozen=True)
class CalibrationSettings:
    """How many examples to fit on and to judge by, and up to which size expensive estimators go."""

    images: int = 16
    points: int = 256
    expensive: int = 6  # images for exact diagonals, Krylov and full covariances of images
    exact_up_to: int = axis(800)  # numbers, for exact diagonals and full covariances
    krylov_up_to: int = axis(800)
    krylov_steps: int = 20
    krylov_probes: int = 2
    training: TrainingSettings = field(default_factory=lambda: TRAINING)


FULL = {
    "cuda": CalibrationSettings(
        images=128, expensive=32, exact_up_to=3_072, krylov_up_to=12_288, krylov_probes=4
    ),
    "cpu": CalibrationSettings(),
}
QUICK = CalibrationSettings(points=64, training=replace(TRAINING, steps=300))


def run(context: Context) -> Outcome:
    """Every estimator on every case."""
    settings = context.sized(FULL.get(context.device.type, FULL["cpu"]), QUICK)
    every = cases(context, settings)
    case_of = lru_cache(maxsize=3)(lambda name: every[name]())
    cells, absent = {}, {}
    for name in context.columns(every):
        try:
            case = case_of(name)
        except UsageError as error:
            absent[name] = str(error)
            continue
        for row in ROWS:
            if _fits(row, case.dim, name, settings, context):
                cells[row, name] = getattr(case.denoiser, "digest", "")

    def measure(cell: Cell) -> Part:
        return measured(cell, case_of(cell.column), settings, context)

    results = Grid("calibration", cells, measure, settings, across="case").run(context)
    records = {"settings": asdict(settings), "cells": results.records(), "absent": absent}
    return Outcome(records, [_section(results, settings, absent)], left=results.open())


def _fits(row: str, dim: int, case: str, settings: CalibrationSettings, context: Context) -> bool:
    if row == HEAD:
        named = context.head is not None and context.model is not None
        return named and case.startswith(str(context.model))
    if row in (EXACT, FULL_ROW):  # thousands of products with a large network
        return dim <= settings.exact_up_to and not case.startswith(BESIDE)
    return row != KRYLOV or settings.krylov_steps < dim <= settings.krylov_up_to


# --- the cases


@dataclass(frozen=True, eq=False)
class Case:
    """A denoiser at a level, data to fit on (of its training) and data it has not seen."""

    denoiser: Denoiser
    level: NoiseLevel
    fit: Tensor
    judge: Tensor

    @property
    def dim(self) -> int:
        return self.fit[0].numel()

    @cached_property
    def remembered(self) -> Denoiser:
        """The denoiser for estimators that need means alone: a noisy batch is denoised once."""
        kept: dict[bytes, Tensor] = {}

        def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
            key = hashlib.sha256(x_t.cpu().contiguous().numpy().tobytes()).digest()
            if key not in kept:
                kept[key] = self.denoiser(x_t, level)
            return kept[key]

        return denoiser


def cases(context: Context, settings: CalibrationSettings) -> dict[str, Callable[[], Case]]:
    """Cases by name, each made when it is asked for; quick runs leave out large models."""
    by_name: dict[str, Callable[[], Case]] = {
        MIXTURE: partial(_mixture, context, settings),
        "2-D energy": partial(_rings, context, settings),
        "digits MLP": partial(_digits, context, settings),
    }
    if context.quick and context.model is None:
        return by_name
    for name in ("mnist", "cifar10", "celeba") if context.model is None else (context.model,):
        model = cache(partial(load, name, device=context.device))
        loaded = cache(partial(_loaded, context, model, MORE * settings.images))
        if name == "mnist" or (context.model is not None and len(model().levels) == 1):
            by_name[name] = partial(_of_model, loaded, None)
        else:
            by_name |= {f"{name} {sigma:g}": partial(_of_model, loaded, sigma) for sigma in SIGMAS}
    if context.model is None:
        loaded = cache(partial(_loaded, context, partial(_beside, context), MORE * settings.images))
        by_name[f"{BESIDE} {BESIDE_SIGMA:g}"] = partial(_of_model, loaded, BESIDE_SIGMA)
    return by_name


def _mixture(context: Context, settings: CalibrationSettings) -> Case:
    """The control: an exact denoiser, whose covariance needs no repair."""
    generator, d = seeded(context.seed), DIMENSIONS
    means = torch.randn(3, d, generator=generator, dtype=torch.float64)
    factors = torch.randn(3, d, d, generator=generator, dtype=torch.float64) / d**0.5
    target = GaussianMixture(torch.ones(3, dtype=torch.float64) / 3, means, factors @ factors.mT)
    x = [target.sample((settings.points,), generator=generator) for _ in ("fit", "judge")]
    fit, judge = (data.to(context.device) for data in x)
    return Case(target.to(device=context.device).denoiser(), NoiseLevel(sigma=0.5), fit, judge)


def _rings(context: Context, settings: CalibrationSettings) -> Case:
    """The paper's 2-D energy on rings."""
    rings, level = toy("rings"), NoiseLevel(sigma=0.2)
    x = rings.sample(10_000, context.seed).to(context.device)
    network = MLP(2, 2, seed=context.seed)
    denoiser = _trained(context, "2-D energy", network, energy_denoiser, x, level, settings)
    judge = rings.sample(settings.points, context.seed + 1).to(context.device)
    return Case(denoiser, level, x[: settings.points], judge)


def _digits(context: Context, settings: CalibrationSettings) -> Case:
    """A small noise-predicting network on few data, as a newcomer has it."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    x = torch.from_numpy(load_digits().data / 16).float()
    x = x[torch.randperm(len(x), generator=seeded(context.seed))].to(context.device)
    level = NoiseLevel(sigma=DIGITS_SIGMA)
    network = MLP(64, 64, width=256, depth=3, seed=context.seed)
    seen, unseen = x[:DIGITS_TRAINING], x[DIGITS_TRAINING:]
    denoiser = _trained(context, "digits MLP", network, noise_denoiser, seen, level, settings)
    return Case(denoiser, level, seen[: settings.points], unseen[: settings.points])


def _trained(
    context: Context, name: str, network: nn.Module, adapter: Callable[[nn.Module], Denoiser],
    x: Tensor, level: NoiseLevel, settings: CalibrationSettings,
) -> Denoiser:  # fmt: skip
    network, training = network.to(context.device), settings.training

    def loss(x: Tensor, generator: Any) -> Tensor:
        return losses.dsm(adapter(network), x, level, generator=generator)

    def compute() -> Part:
        curve = train(network, loss, x, training, progress=f"training {name}")
        return Part({"final_loss": curve[-100:].mean().item()}, dict(network.state_dict()))

    part = context.workspace.part(f"network of {name}", (training, level.sigma), compute)
    network.load_state_dict(part.tensors)
    return adapter(network.requires_grad_(False).eval())


def _beside(context: Context) -> Model:
    if context.many is None:
        raise UsageError("name a folder of a diffusers model of images with --many")
    return load(context.many, device=context.device)


def _loaded(
    context: Context, load: Callable[[], Model], images: int
) -> tuple[Model, Tensor, Tensor]:
    """A model, training images and held-out ones."""
    model = load()
    fit, judge = (held_out_images(context, model, split, images) for split in ("train", "test"))
    # Some sets are sorted by class: the first few must be of all classes.
    order = torch.randperm(images, generator=seeded(context.seed)).to(context.device)
    return model, fit[order[order < len(fit)]], judge[order[order < len(judge)]]


def _of_model(loaded: Callable[[], tuple[Model, Tensor, Tensor]], sigma: float | None) -> Case:
    model, fit, judge = loaded()
    width = model.interval[1] - model.interval[0]
    level = model.level if sigma is None else NoiseLevel(sigma=sigma * width)
    return Case(model, level, fit, judge)


# --- a cell of a case


def measured(cell: Cell, case: Case, settings: CalibrationSettings, context: Context) -> Part:
    """The reports of an estimator at all stages, and what was fitted."""
    few = None
    if case.dim > DENSE_POINTS and cell.row not in (ISOTROPIC, SPECTRAL):
        few = settings.expensive if cell.row in (EXACT, FULL_ROW, KRYLOV) else settings.images
        few = MORE * few if cell.row in (PROBED, HEAD) and case.dim < SMALL else few
    moments = estimator(cell.row, case, settings, context)
    exact = cell.row == EXACT or (cell.row == PROBED and case.dim <= PROBES)
    if exact or cell.row == FULL_ROW:
        both = _dense_pairs(case, few, cell.seed)
    else:
        both = pairs_of(moments, case, few, cell.seed)
    if exact:
        both = [[(x, replace(q, cov=_variances(q.cov))) for x, q in pairs] for pairs in both]
    fit, judge = both
    floored, level = isinstance(moments, calibrated.FLOORED), case.level
    stages = {BEFORE: (FLOOR, 0.0), DEFAULT: (FLOOR, SHARE)} if floored else {DEFAULT: (0.0, 0.0)}
    if isinstance(moments, OcmMoments) and (own := moments.own_floor(level)) is not None:
        stages[DEFAULT] = least_and_share(own)
    reports = {
        stage: report_of(_lifted(judge, least * level.variance, share), level, seed=cell.seed)
        for stage, (least, share) in stages.items()
    }
    fitted, reports[AFTER] = _calibrated(fit, judge, level, floored, cell.seed)
    values = {f"{key}, {stage}": getattr(reports[stage], key) for stage in reports for key in KEYS}
    return Part(values | fitted | {"examples": len(case.judge[:few])})


def pairs_of(moments: Moments, case: Case, few: int | None, seed: int) -> list[Pairs]:
    """Posteriors before any floor, of what is fitted to and of what judges."""
    raw = calibrated.with_floor(moments, -math.inf)
    parts = ((case.fit, calibrated.FITTING), (case.judge, calibrated.JUDGING))
    return [
        list(calibrated.posteriors(raw, x[:few], case.level, seed=seed, purpose=purpose))
        for x, purpose in parts
    ]


@lru_cache(maxsize=1)
def _dense_pairs(case: Case, few: int | None, seed: int) -> list[Pairs]:
    """The same of full covariances, which have exact diagonals too: d products are taken once."""
    return pairs_of(FullMoments(case.denoiser), case, few, seed)


def _variances(cov: Covariance) -> Diagonal:
    """The exact diagonal of a covariance before any floor, as DiagonalMoments has it."""
    assert isinstance(cov, Dense)
    few = cov.values.shape[1] <= FEW
    errors = error_size(cov.values).reshape(-1, *[1] * len(cov.event_shape)) if few else None
    return Diagonal(cov.diagonal(), errors)


def estimator(row: str, case: Case, settings: CalibrationSettings, context: Context) -> Moments:
    """The estimator of a row."""
    streams, denoiser = Streams(context.seed, len(case.fit), purpose="fit"), case.denoiser
    if row == ISOTROPIC:
        return IsotropicMoments.fit(case.remembered, case.fit, case.level, generator=streams)
    if row == SPECTRAL:
        if isinstance(denoiser, Model):
            with contextlib.suppress(UsageError):  # none is kept
                kept = denoiser.posterior(covariances.Spectral(calibrated=False))
                return replace(kept, denoiser=case.remembered)  # type: ignore[type-var]
        return SpectralMoments.fit(case.remembered, case.fit, [case.level], generator=streams)
    if row == HEAD:
        return OcmMoments(denoiser, load_head(context.head, denoiser))  # type: ignore[arg-type]
    if row == KRYLOV:
        return KrylovMoments(denoiser, settings.krylov_steps, probes=settings.krylov_probes)
    if row == FULL_ROW:
        return FullMoments(denoiser)
    return DiagonalMoments(denoiser, probes=PROBES if row == PROBED else None)


def _calibrated(
    fit: Pairs, judge: Pairs, level: NoiseLevel, floored: bool, seed: int
) -> tuple[dict[str, Any], CalibrationReport]:
    """What `mmdgs.calibrate` fits, and the report on the data it has not seen."""
    unit = level.variance
    base = _lifted(fit, FLOOR * unit, 0.0) if floored else fit
    lift = calibrated.likeliest_lift
    floor, scale = lift(base, unit) if floored else lift(base, unit, floors=1)
    least = floor * unit if floored else 0.0

    def scaled(pairs: Pairs, reach: tuple[float, ...] | None) -> Pairs:
        lifted_pairs = _lifted(pairs, least, 0.0)
        return [(x, replace(q, cov=q.cov.affine(scale, 0.0), reach=reach)) for x, q in lifted_pairs]

    errors = torch.cat([standardised(x, q).cpu() for x, q in scaled(fit, None)])
    reach = calibrated.fit_reach(errors)
    report = report_of(scaled(judge, tuple(reach)), level, seed=seed)
    return {"floor": floor, "scale": scale, "reach": reach}, report


def _lifted(pairs: Pairs, least: float, share: float) -> Pairs:
    """Posteriors whose values were left as they are, lifted now; those that need none: floor 0."""
    return [(x, _relifted(q, least, share)) for x, q in pairs] if least else pairs


def _relifted(q: Gaussian, least: float, share: float) -> Gaussian:
    if isinstance(q.cov, Krylov):
        return replace(q, cov=q.cov.relifted(least, share), repaired=None)
    if isinstance(q.cov, Dense):
        values, repaired = lifted(q.cov.values, least, share)
        return replace(q, cov=replace(q.cov, values=values), repaired=repaired)
    assert isinstance(q.cov, Diagonal)
    values, repaired = lifted(q.cov.variances, least, share, q.cov.errors)
    return replace(q, cov=Diagonal(values), repaired=repaired)


# --- what is shown of the cases


def _section(results: Results, settings: CalibrationSettings, absent: Mapping[str, str]) -> Section:
    text = [
        "Clean examples get noise, each estimator gives the posterior of the clean one, and the "
        "clean one judges it. A trustworthy posterior has standardised errors of variance 1, 90% "
        "intervals that hold 90% of the numbers, and a likelihood above that of one variance for "
        "all numbers (isotropic, fitted on the judged examples themselves).",
        f"“{BEFORE}” is the paper's floor, “{DEFAULT}” what an estimator does without "
        f"data, “{AFTER}” what `mmdgs.calibrate` makes of it with other examples.",
        *(f"Left out: {name} ({reason})." for name, reason in absent.items()),
    ]
    note = (
        f"{settings.images} images or {settings.points} points to fit on, and as many to judge by "
        f"({MORE * settings.images} images for isotropic, spectral and MNIST, "
        f"{settings.expensive} for exact diagonals, Krylov and full)."
    )
    both = ((f"{key}, {stage}", f"{SHOWN[key]}: {stage}") for key in SHOWN for stage in STAGES)
    measures = [Measure(key, title, 2) for key, title in both]
    tables = results.tables(measures, head="estimator", note=note)
    caption = (
        "Green: z variance, also that of single numbers, between 0.8 and 1.25 and coverage of 90% "
        "intervals between 0.85 and 0.94. Yellow: usable, z variance below 3 and at most 0.1 nats "
        "a number worse than isotropic. Red: not to be trusted. Numbers: nats a number above "
        "isotropic, and z variance."
    )
    figures = [Figure("calibration", caption, _draw(results))]
    return Section("Which uncertainty to trust", text, tables, figures, _claims(results))


def _verdict(values: Mapping[str, Any], stage: str) -> str | None:
    """ "good", "sane" or "bad"; None where the stage was not measured."""
    if f"mahalanobis, {stage}" not in values:
        return None
    nats, z, single, held = (values[f"{key}, {stage}"] for key in SHOWN)
    right = all(Z_GOOD[0] <= variance <= Z_GOOD[1] for variance in (z, single))
    if right and COVERAGE_GOOD[0] <= held <= COVERAGE_GOOD[1]:
        return "good"
    return "sane" if z < Z_SANE and nats > NATS_SANE else "bad"


def _draw(results: Results) -> Canvas:
    """A panel for each stage: the verdict, nats and z variance of every cell."""
    rows, columns = results.rows, results.columns
    inches = (1.6 + 0.95 * len(columns), 0.9 + 1.26 * len(rows))
    canvas, axes = new_figure(len(STAGES), 1, inches=inches)
    for (panel,), stage in zip(axes, STAGES, strict=True):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                values = results.values(row, column)
                colour = COLOURS[_verdict(values, stage)]
                panel.add_patch(Rectangle((j + 0.02, i + 0.03), 0.96, 0.94, color=colour, lw=0))
                if f"mahalanobis, {stage}" in values:
                    nats, z = (values[f"{key}, {stage}"] for key in tuple(SHOWN)[:2])
                    words = f"{_short(nats, '+')}\nz² {_short(z)}"
                    panel.text(j + 0.5, i + 0.5, words, ha="center", va="center", fontsize=6)
        panel.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
        names = columns if stage == STAGES[-1] else []
        panel.set_xticks([j + 0.5 for j in range(len(names))], names, fontsize=7)
        panel.set_yticks([i + 0.5 for i in range(len(rows))], rows, fontsize=7)
        panel.tick_params(length=0)
        panel.set_title(stage, fontsize=9, loc="left")
        panel.spines[:].set_visible(False)
    return canvas


def _short(value: float, sign: str = "") -> str:
    return f"{value:{sign}.2f}" if abs(value) < 10 else f"{value:{sign},.0f}"


def _claims(results: Results) -> list[Claim]:
    """What the default and what calibration must reach; and that exact denoisers are left alone."""
    cells = {f"{row}, {case}": part.values for (row, case), part in results.parts.items()}
    bad = [name for name, values in cells.items() if _verdict(values, DEFAULT) == "bad"]
    off = [name for name, values in cells.items() if _verdict(values, AFTER) != "good"]
    control = [results.values(row, MIXTURE) for row in (EXACT, KRYLOV, FULL_ROW)]
    key = "above_isotropic"
    changes = [abs(v[f"{key}, {DEFAULT}"] - v[f"{key}, {BEFORE}"]) for v in control if v]
    least, good = "z variance below 3 and likelihood above isotropic's minus 0.1", "0.8 to 1.25"
    return [
        Claim(f"by default {least}", not bad, "; ".join(bad)),
        Claim(
            f"calibrated, z variance (also of single numbers) is {good} and coverage 0.85 to 0.94",
            *(not off, "; ".join(off)),
        ),
        Claim(
            "the default leaves exact denoisers as they are",
            max(changes) < 1e-6 if changes else None,
            f"largest change {max(changes):.1g} nats a number" if changes else "",
        ),
    ]
