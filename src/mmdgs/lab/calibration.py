"""Which uncertainty to trust: every estimator on every kind of network, with the paper's floor, by default, calibrated.

One pass over the data serves all three: what an estimator finds before any floor is kept, and lifted three times.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.lab.calibration_cases import BESIDE, MIXTURE, MORE, Case, cases
from mmdgs.lab.drawing import new_figure
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Cell, Grid, Measure, Results
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.workspace import Part, axis
from mmdgs.linalg import Dense, Diagonal, Krylov
from mmdgs.linalg.operators import Covariance
from mmdgs.linalg.repair import FEW, SHARE, error_size, lifted
from mmdgs.metrics.coverage import standardised
from mmdgs.metrics.reports import LISTED, CalibrationReport, report_of
from mmdgs.models import Model, load_head
from mmdgs.moments import (
    FLOOR,
    DiagonalMoments,
    FullMoments,
    IsotropicMoments,
    KrylovMoments,
    Moments,
    OcmMoments,
    SpectralMoments,
)
from mmdgs.moments.calibrated import FITTING, FLOORED, JUDGING, fit_reach, likeliest_lift, posteriors, with_floor
from mmdgs.moments.contract import least_and_share
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams
from mmdgs.training import TrainingSettings

ISOTROPIC, SPECTRAL, PROBED, EXACT, FULL_ROW, KRYLOV, HEAD = ROWS = (
    "isotropic", "spectral", "diagonal, 3 probes", "diagonal, exact", "full", "Krylov", "OCM head",
)  # fmt: skip
BEFORE, DEFAULT, AFTER = STAGES = "floor 1e-6", "default", "calibrated"
SHOWN = ("above_isotropic", "z_variance", "mahalanobis", "coverage", "interval_coverage", "repaired")
Z_GOOD, COVERAGE_GOOD = (0.8, 1.25), (0.85, 0.94)
Z_SANE, NATS_SANE = 3.0, -0.1
"""What calibrated uncertainty must reach on held-out data, and what uncertainty must reach without data."""
Pairs = list[tuple[Tensor, Gaussian]]

TRAINING: dict[str, Any] = {"steps": 3_000, "learning_rate": 1e-3, "batch_size": 128}


@dataclass(frozen=True)
class CalibrationSettings:
    """How many examples to fit on and to judge by, and up to which size the expensive estimators go."""

    images: int = 16
    points: int = 256
    expensive: int = 6  # images for exact diagonals, Krylov and full covariances of images
    exact_up_to: int = axis(800)  # numbers, for exact diagonals and full covariances
    krylov_up_to: int = axis(800)
    krylov_steps: int = 20
    krylov_probes: int = 2
    training: TrainingSettings = field(default_factory=partial(TrainingSettings, **TRAINING))


FULL = {
    "cuda": CalibrationSettings(images=128, expensive=32, exact_up_to=3_072, krylov_up_to=12_288, krylov_probes=4),
    "cpu": CalibrationSettings(),
}
QUICK = CalibrationSettings(points=64, training=TrainingSettings(**TRAINING | {"steps": 300}))


def run(context: Context) -> Outcome:
    """Every estimator on every case."""
    settings = context.sized(FULL.get(context.device.type, FULL["cpu"]), QUICK)
    every = cases(context, settings.images, settings.points, settings.training)
    made = lru_cache(maxsize=3)(lambda name: every[name]())
    sizes, networks, absent = _sizes(made, every)
    rows = [row for row in ROWS if row != HEAD or context.head is not None]
    cells = {
        (row, name): networks[name]
        for name in sizes
        for row in rows
        if _fits(row, sizes[name], name, settings, context)
    }
    found = Grid(
        "calibration",
        cells,
        lambda cell: _measured(cell, made(cell.column), settings, context),
        settings,
        across="case",
    ).run(context)
    records = {"settings": asdict(settings), "cells": found.records(), "absent": absent}
    return Outcome(records, [_section(found, settings, absent, context.quick)], left=found.open())


def _sizes(
    made: Callable[[str], Case], every: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, str], dict[str, str]]:
    """The numbers of an example of each case, digests of pretrained networks, and why some cases are not there."""
    sizes, networks, absent = {}, {}, {}
    for name in every:
        try:
            case = made(name)
        except UsageError as error:
            absent[name] = str(error)
        else:
            sizes[name], networks[name] = case.dim, getattr(case.denoiser, "digest", "")
    return sizes, networks, absent


def _fits(row: str, dim: int, case: str, settings: CalibrationSettings, context: Context) -> bool:
    if row == HEAD:
        return context.model is not None and case.startswith(context.model)
    if case.startswith(BESIDE) and row in (EXACT, FULL_ROW):  # thousands of products with a large network
        return False
    limits = {EXACT: settings.exact_up_to, FULL_ROW: settings.exact_up_to, KRYLOV: settings.krylov_up_to}
    return dim <= limits.get(row, dim) and not (row == KRYLOV and dim <= settings.krylov_steps)


# --- one cell -------------------------------------------------------------------------------------------------------


def _measured(cell: Cell, case: Case, settings: CalibrationSettings, context: Context) -> Part:
    few = None
    if case.dim > DENSE_POINTS and cell.row not in (ISOTROPIC, SPECTRAL):
        few = settings.expensive if cell.row in (EXACT, FULL_ROW, KRYLOV) else settings.images
        few = MORE * few if cell.row in (PROBED, HEAD) and case.dim < SMALL else few
    moments = _estimator(cell.row, case, settings, context)
    exact = cell.row == EXACT or (cell.row == PROBED and case.dim <= PROBES)
    if exact or cell.row == FULL_ROW:
        fit, judge = _dense_pairs(case, few, cell.seed)
        if exact:
            fit, judge = ([(x, replace(q, cov=_variances(q.cov))) for x, q in one] for one in (fit, judge))
    else:
        fit, judge = _pairs(moments, case, few, cell.seed)
    floored = isinstance(moments, FLOORED)
    stages = {BEFORE: (FLOOR, 0.0), DEFAULT: (FLOOR, SHARE)} if floored else {DEFAULT: (0.0, 0.0)}
    if isinstance(moments, OcmMoments) and (own := moments.own_floor(case.level)) is not None:
        stages[DEFAULT] = least_and_share(own)
    reports = {
        stage: report_of(_lifted(judge, least * case.level.variance, share), case.level, seed=cell.seed)
        for stage, (least, share) in stages.items()
    }
    fitted, reports[AFTER] = _calibrated(fit, judge, case, floored, cell.seed)
    values = {f"{key}, {stage}": getattr(one, key) for stage, one in reports.items() for key in SHOWN}
    return Part(values | fitted | {"examples": len(case.judge[:few])})


def _pairs(moments: Moments, case: Case, few: int | None, seed: int) -> tuple[Pairs, Pairs]:
    """Posteriors before any floor, of what is fitted to and of what judges."""
    raw = with_floor(moments, -math.inf)
    fit, judge = (
        list(posteriors(raw, x[:few], case.level, seed=seed, purpose=purpose))
        for x, purpose in ((case.fit, FITTING), (case.judge, JUDGING))
    )
    return fit, judge


@lru_cache(maxsize=1)
def _dense_pairs(case: Case, few: int | None, seed: int) -> tuple[Pairs, Pairs]:
    """The same of full covariances, which have exact diagonals too: their d products are taken once."""
    return _pairs(FullMoments(case.denoiser), case, few, seed)


def _variances(cov: Covariance) -> Diagonal:
    """The exact diagonal of a covariance before any floor, as DiagonalMoments has it."""
    assert isinstance(cov, Dense)
    few = cov.values.shape[1] <= FEW
    errors = error_size(cov.values).reshape(-1, *[1] * len(cov.event_shape)) if few else None
    return Diagonal(cov.diagonal(), errors)


PROBES, DENSE_POINTS, SMALL = 3, 100, 1_000
"""Probes; numbers of an example up to which nothing is expensive, and up to which probes and heads are cheap."""


def _estimator(row: str, case: Case, settings: CalibrationSettings, context: Context) -> Moments:
    streams = Streams(context.seed, len(case.fit), purpose="fit")
    if row == ISOTROPIC:
        return IsotropicMoments.fit(case.remembered, case.fit, case.level, generator=streams)
    if row == SPECTRAL:
        if isinstance(case.denoiser, Model):
            with contextlib.suppress(UsageError):  # none is kept
                kept = case.denoiser.posterior("spectral", calibrated=False)
                assert isinstance(kept, SpectralMoments)
                return replace(kept, denoiser=case.remembered)
        return SpectralMoments.fit(case.remembered, case.fit, [case.level], generator=streams)
    if row == HEAD:
        return OcmMoments(case.denoiser, load_head(context.head, case.denoiser))  # type: ignore[arg-type]
    found: dict[str, Moments] = {
        PROBED: DiagonalMoments(case.denoiser, probes=PROBES),
        EXACT: DiagonalMoments(case.denoiser, probes=None),
        KRYLOV: KrylovMoments(case.denoiser, settings.krylov_steps, probes=settings.krylov_probes),
        FULL_ROW: FullMoments(case.denoiser),
    }
    return found[row]


def _calibrated(
    fit: Pairs, judge: Pairs, case: Case, floored: bool, seed: int
) -> tuple[dict[str, Any], CalibrationReport]:
    """What `mmdgs.calibrate` fits, and the report on the data it has not seen."""
    unit = case.level.variance
    base = _lifted(fit, FLOOR * unit, 0.0) if floored else fit
    floor, scale = likeliest_lift(base, unit) if floored else likeliest_lift(base, unit, floors=1)
    least = floor * unit if floored else 0.0

    def scaled(pairs: Pairs, reach: tuple[float, ...] | None) -> Pairs:
        return [(x, replace(q, cov=q.cov.affine(scale, 0.0), reach=reach)) for x, q in _lifted(pairs, least, 0.0)]

    reach = fit_reach(torch.cat([standardised(x, q).cpu() for x, q in scaled(fit, None)]))
    report = report_of(scaled(judge, tuple(reach)), case.level, seed=seed)
    held = {held_by(p): report.covered[p] for p in LISTED if p in report.covered}
    return {"floor": floor, "scale": scale, "reach": reach, **held}, report


def held_by(probability: float) -> str:
    """The name of what calibrated intervals hold."""
    return f"{100 * probability:g}% intervals hold, {AFTER}"


def _lifted(pairs: Pairs, least: float, share: float) -> Pairs:
    """Posteriors whose values were left as they are, lifted now; with a floor of zero those that need none."""
    if least == 0:
        return pairs
    return [(x, replace(q, **_relifted(q.cov, least, share))) for x, q in pairs]


def _relifted(cov: Covariance, least: float, share: float) -> dict[str, Any]:
    if isinstance(cov, Krylov):
        return {"cov": cov.relifted(least, share), "repaired": None}
    if isinstance(cov, Dense):
        values, repaired = lifted(cov.values, least, share)
        return {"cov": replace(cov, values=values), "repaired": repaired}
    assert isinstance(cov, Diagonal)
    values, repaired = lifted(cov.variances, least, share, cov.errors)
    return {"cov": Diagonal(values), "repaired": repaired}


# --- what is shown --------------------------------------------------------------------------------------------------


def _section(found: Results, settings: CalibrationSettings, absent: Mapping[str, str], quick: bool) -> Section:
    text = [
        "Clean examples get noise, each estimator gives the posterior of the clean one, and the clean one judges it. "
        "A trustworthy posterior has standardised errors z = C^(-1/2) (x - mean) of variance 1, single numbers "
        "(x_i - mean_i) / std_i of variance 1, 90% intervals that hold 90% of the numbers, and a likelihood above that "
        "of one variance for all numbers (isotropic, fitted on the judged examples themselves).",
        f"“{BEFORE}” is the paper's floor, “{DEFAULT}” what an estimator does without data, “{AFTER}” what "
        "`mmdgs.calibrate` makes of it with other examples.",
        *(f"Left out: {name} ({reason})." for name, reason in absent.items()),
        *found.unfinished(),
        *(["This is the quick version: small networks, trained for seconds."] if quick else []),
    ]
    tables = [
        found.table(
            f"{title}: {stage}",
            [Measure(f"{key}, {stage}", title, 2, percent=key == "repaired")],
            head="estimator",
            columns={name: f"{name}" for name in found.columns},
            note=f"{settings.images} images or {settings.points} points to fit on, and as many to judge by "
            f"({MORE * settings.images} images for isotropic, spectral and MNIST, {settings.expensive} for exact "
            "diagonals, Krylov and full).",
        )
        for key, title in (
            ("above_isotropic", "nats a number above isotropic"),
            ("mahalanobis", "z variance"),
            ("z_variance", "z variance of single numbers"),
            ("interval_coverage", "coverage of 90% intervals"),
            ("repaired", "share repaired"),
        )
        for stage in (STAGES if key != "repaired" else STAGES[:2])
    ]
    tables += [
        found.table(
            f"coverage of {100 * p:g}% intervals: {AFTER}",
            [Measure(held_by(p), "coverage", 3)],
            head="estimator",
            columns={name: f"{name}" for name in found.columns},
        )
        for p in LISTED
    ]
    caption = (
        "Green: z variance, also that of single numbers, between 0.8 and 1.25 and coverage of 90% intervals between "
        "0.85 and 0.94. Yellow: usable, z variance below 3 and at most 0.1 nats a number worse than isotropic. Red: "
        "not to be trusted. Numbers: nats a number above isotropic, and z variance."
    )
    return Section(
        "Which uncertainty to trust", text, tables, [Figure("calibration", caption, _draw(found))], _claims(found)
    )


def _verdict(values: Mapping[str, Any], stage: str) -> str | None:
    """ "good", "sane" or "bad"; None where the stage was not measured."""
    if f"mahalanobis, {stage}" not in values:
        return None
    z, single, nats, held = (
        values[f"{key}, {stage}"] for key in ("mahalanobis", "z_variance", "above_isotropic", "interval_coverage")
    )
    right = all(Z_GOOD[0] <= one <= Z_GOOD[1] for one in (z, single))
    if right and COVERAGE_GOOD[0] <= held <= COVERAGE_GOOD[1]:
        return "good"
    return "sane" if z < Z_SANE and nats > NATS_SANE else "bad"


COLOURS = {"good": "#9fd3a9", "sane": "#f4e2a1", "bad": "#e9a6a0", None: "#f2f3f5"}


def _draw(found: Results) -> Any:
    rows, columns = found.rows, found.columns
    canvas, axes = new_figure(len(STAGES), 1, inches=(1.6 + 0.95 * len(columns), 0.9 + 1.0 * len(rows) * 0.42 * 3))
    for (panel,), stage in zip(axes, STAGES, strict=True):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                values = found.values(row, column)
                panel.add_patch(_patch(j, i, COLOURS[_verdict(values, stage)]))
                if f"z_variance, {stage}" in values:
                    nats, z = (values[f"{key}, {stage}"] for key in ("above_isotropic", "mahalanobis"))
                    panel.text(
                        j + 0.5, i + 0.5, f"{_short(nats, '+')}\nz² {_short(z)}", ha="center", va="center", fontsize=6
                    )
        panel.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
        panel.set_xticks([j + 0.5 for j in range(len(columns))], columns if stage == STAGES[-1] else [], fontsize=7)
        panel.set_yticks([i + 0.5 for i in range(len(rows))], rows, fontsize=7)
        panel.tick_params(length=0)
        panel.set_title(stage, fontsize=9, loc="left")
        panel.spines[:].set_visible(False)
    return canvas


def _patch(left: int, top: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left + 0.02, top + 0.03), 0.96, 0.94, color=colour, linewidth=0)


def _short(value: float, sign: str = "") -> str:
    return f"{value:{sign}.2f}" if abs(value) < 10 else f"{value:{sign},.0f}"


def _claims(found: Results) -> list[Claim]:
    """What the default and what calibration must reach, for every cell; and that exact denoisers are left alone."""
    rows = {key: part.values for key, part in found.parts.items()}
    bad = [f"{row}, {case}" for (row, case), values in rows.items() if _verdict(values, DEFAULT) == "bad"]
    off = [f"{row}, {case}" for (row, case), values in rows.items() if _verdict(values, AFTER) != "good"]
    control = [
        abs(values[f"above_isotropic, {DEFAULT}"] - values[f"above_isotropic, {BEFORE}"])
        for (row, case), values in rows.items()
        if case == MIXTURE and f"z_variance, {BEFORE}" in values and row in (EXACT, KRYLOV, FULL_ROW)
    ]
    return [
        Claim("by default z variance is below 3 and likelihood above isotropic's minus 0.1", not bad, "; ".join(bad)),
        Claim(
            "calibrated, z variance (also of single numbers) is 0.8 to 1.25 and coverage of 90% is 0.85 to 0.94",
            not off, "; ".join(off),
        ),
        Claim(
            "the default leaves exact denoisers as they are", max(control) < 1e-6 if control else None,
            f"largest change {max(control):.1g} nats a number" if control else "",
        ),
    ]  # fmt: skip
