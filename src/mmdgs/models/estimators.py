"""A model's estimators: from a covariance (`mmdgs.covariances`) to its moments; calibrations."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmdgs import covariances
from mmdgs.covariances import Estimated
from mmdgs.errors import UsageError
from mmdgs.identity import digest_of
from mmdgs.metrics.reports import (
    CalibrationReport,
    check_examples,
    check_level,
    report_of,
    standardised,
)
from mmdgs.models.config import COVARIANCE, MEAN_STD, VARIANCE_RATIO
from mmdgs.models.fits import FitData, FitStore, isotropic_moments, spectral_moments
from mmdgs.models.weights import CALIBRATION, weights_digest
from mmdgs.moments import (
    CalibratedMoments,
    DiagonalMoments,
    FullMoments,
    IsotropicMoments,
    KrylovMoments,
    LearnedMoments,
    LowRankMoments,
    ModulatedMoments,
    Moments,
    OcmMoments,
    SpectralMoments,
)
from mmdgs.moments.calibrated import FITTING, JUDGING, fit_floor_and_scale, fit_reach, posteriors
from mmdgs.moments.probes import Lattice, ProbeDesign, Rademacher, design_for
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.runtime import progress_bar
from mmdgs.schedules import geometric

if TYPE_CHECKING:
    from mmdgs.models.model import Model

logger = logging.getLogger("mmdgs")

DESIGNS: dict[str, ProbeDesign] = {"rademacher": Rademacher(), "lattice": Lattice()}
BESIDE = {VARIANCE_RATIO: "ocm-head", COVARIANCE: "covariance-head"}
"""Folders inside a model's folder where its heads may be."""
LEVELS, LARGEST, SMALLEST = 8, 3.0, 0.02
"""Where a model of many levels is calibrated by itself: where images in [0, 1] take shape."""
DIGITS = 12
PROBED = 16
"""The side of the images by which the probes of a model of any size are named."""
PLAIN: dict[type, str] = {
    FullMoments: "full",
    IsotropicMoments: "isotropic",
    SpectralMoments: "spectral",
    LearnedMoments: "learned",
}


def own_covariance(model: Model) -> Estimated:
    """The covariance of a model where none is named."""
    return covariances.Learned() if model.param == MEAN_STD else covariances.Diagonal()


def make_moments(
    model: Model,
    covariance: Estimated,
    data: FitData | None = None,
    levels: Sequence[NoiseLevel] | None = None,
) -> Moments:
    """The estimator of a covariance, not calibrated; `data` and `levels` are those of a fit."""
    match covariance:
        case covariances.Diagonal(probes=probes, floor=floor):
            return DiagonalMoments(model, probes, floor, DESIGNS.get(covariance.name))
        case covariances.Ocm(floor=floor):
            return OcmMoments(model, _head(model, covariance, VARIANCE_RATIO), floor)
        case covariances.Modulated():
            return ModulatedMoments(model, _head(model, covariance, COVARIANCE))
        case covariances.Isotropic():
            return isotropic_moments(model, levels, data)
        case covariances.Spectral():
            return spectral_moments(model, data)
        case covariances.LowRank(products=products, floor=floor, symmetric=symmetric, below=below):
            rest = spectral_moments(model, data)
            return LowRankMoments(model, rest, products, floor, symmetric, below=below)
        case covariances.Krylov(steps=steps, floor=floor, symmetric=symmetric):
            return KrylovMoments(model, steps, floor, symmetric=symmetric)
        case covariances.Full(floor=floor, most_products=most_products):
            return FullMoments(model, floor, most_products)
    if model.param != MEAN_STD:
        raise UsageError(f"a model with parametrisation {model.param!r} has no learned posterior")
    return LearnedMoments(model.network)


def _head(model: Model, covariance: covariances.OfHead, kind: str) -> Any:
    from mmdgs.models.loading import LOSS, load_head  # heads are loaded as models are

    head = head_beside(model, kind) if covariance.head is None else covariance.head
    if head is None:
        raise UsageError(
            f"the covariance {covariance.name!r} needs its head: say --head FOLDER, which `mmdgs "
            f"train --loss {LOSS[kind]}` made for the model"
        )
    return load_head(head, model, kind=kind)


def head_beside(model: Model, kind: str) -> Path | None:
    """The head of a kind that is kept in a model's own folder."""
    return model.beside(BESIDE[kind])


# --- calibrations
HOLDS = 0.5
"""The least z variance, and one over the largest, with which a calibration holds."""


def calibrate(
    moments: Moments,
    data: Tensor | FitData,
    levels: NoiseLevel | Sequence[NoiseLevel] | None = None,
    *,
    seed: int = 0,
    progress: str | None = "calibrating",
) -> CalibratedMoments:
    """Fit floor, scale and reach of an estimator's uncertainty to clean data (N, ...) by level.

    Every second example is fitted to, and the others judge: `.report` says how well, by sigma /
    alpha. `levels` may be left out for a model's estimator: its own level, or eight over the range
    where images take shape. What is fitted for a model is kept as other fits are (beside it, or in
    the cache folder), and `model.posterior(...)` then uses it.
    """
    from mmdgs.models.model import Model  # which imports this module

    moments = moments.moments if isinstance(moments, CalibratedMoments) else moments
    model = moments.denoiser if isinstance(moments.denoiser, Model) else None
    if not isinstance(data, FitData):
        x, key = data, {"data": digest_of(data), "images": len(data), "seed": seed}
    elif model is not None:
        x = data.load(model).to(model.device)
        key = data.key(x)
    else:
        raise UsageError("data by name are for a model's estimator; give a tensor (N, ...)")
    check_examples(moments, x)
    fits, reports = {}, {}
    levels = levels_of(model, levels)
    with progress_bar(len(levels), progress, unit="level") as bar:
        for level in levels:
            fits[level] = fit_at(moments, x[::2], level, seed)
            reports[level.ratio] = judge_at(moments, fits[level], x[1::2], level, seed)
            bar.update()
    held = {ratio: report.z_variance for ratio, report in reports.items()}
    off = {ratio: z for ratio, z in held.items() if not HOLDS < z < 1 / HOLDS}
    if off:
        worst = max(off, key=lambda ratio: abs(math.log(max(off[ratio], 1e-9))))
        logger.warning(
            "the calibration does not hold on the examples it was not fitted to: at sigma / alpha "
            "%.3g their z variance is %.3g (1); %d examples are too few, or unlike each other",
            worst, off[worst], len(x),
        )  # fmt: skip
    table = LevelTable.of(fits)
    if model is not None:
        name = estimator_name(moments, model)
        if name is None:
            logger.info("the calibration is not kept: %s has no name it could be found by", moments)
        else:
            FitStore(model, f"{CALIBRATION}-{name}").keep({**key, "of": CALIBRATION}, table)
    return CalibratedMoments(moments, table, reports)


def levels_of(
    model: Model | None, levels: NoiseLevel | Sequence[NoiseLevel] | None
) -> list[NoiseLevel]:
    """The levels to fit at, the cleanest last."""
    if isinstance(levels, NoiseLevel):
        levels = [levels]
    elif levels is None:
        if model is None:
            raise ValueError("give noise levels to calibrate at, such as [NoiseLevel(sigma=0.2)]")
        levels = model.levels
        if len(levels) > 1:
            width = model.interval[1] - model.interval[0]
            largest = min(levels[0].ratio, width * LARGEST)
            levels = geometric(LEVELS, largest, max(levels[-1].ratio, width * SMALLEST))
    for level in levels:
        check_level(model, level)
    return sorted(dict.fromkeys(levels), key=lambda level: -level.ratio)


def fit_at(moments: Moments, x: Tensor, level: NoiseLevel, seed: int) -> list[float]:
    """Floor, scale and reach at a level."""
    lift = fit_floor_and_scale(moments, x, level, seed=seed)
    lifted = CalibratedMoments(moments, LevelTable.of({level: lift}))
    pairs = posteriors(lifted, x, level, seed=seed, purpose=FITTING)
    return [*lift, *fit_reach(torch.cat([standardised(clean, q).cpu() for clean, q in pairs]))]


def judge_at(
    moments: Moments, fitted: Sequence[float], x: Tensor, level: NoiseLevel, seed: int
) -> CalibrationReport:
    """The report of what was fitted at a level, on examples that the fit has not seen."""
    whole = CalibratedMoments(moments, LevelTable.of({level: fitted}))
    return report_of(posteriors(whole, x, level, seed=seed, purpose=JUDGING), level, seed=seed)


def kept_calibration(model: Model, moments: Moments, required: bool = False) -> Moments:
    """A model's estimator with the calibration kept for it; as it is where none is, or refused."""
    name = estimator_name(moments, model)
    table = None if name is None else FitStore(model, f"{CALIBRATION}-{name}").best_of()
    if table is not None:
        return CalibratedMoments(moments, table)
    if required:
        raise UsageError(
            f"no calibration of {name or type(moments).__name__} is kept for {model.source}: fit "
            "one with mmdgs.calibrate(model.posterior(...), data), or leave out --calibrated"
        )
    return moments


def estimator_name(moments: Moments, model: Model) -> str | None:
    """The estimator in the name of its calibration's file (a floor is no part of it), or None."""
    moments = moments.moments if isinstance(moments, CalibratedMoments) else moments
    if next(model.network.parameters(), None) is None:  # nothing that a file could belong to
        return None
    if isinstance(moments, DiagonalMoments):
        if moments.probes is None:
            return "diagonal-exact"
        like = torch.empty(1, *(side or PROBED for side in model.shape))
        design = moments.design or design_for(like)
        known = {Lattice(): "lattice", Rademacher(): "rademacher", Rademacher(smooth=True): "signs"}
        return f"{known[design]}-{moments.probes}" if design in known else None
    if isinstance(moments, KrylovMoments):
        return f"krylov-{moments.steps}"
    if isinstance(moments, LowRankMoments) and isinstance(moments.rest, SpectralMoments):
        below = "" if moments.below is None else f"-below-{moments.below:g}"
        return f"low-rank-{moments.products}{below}"
    if isinstance(moments, OcmMoments | ModulatedMoments):
        network = getattr(moments.head, "network", None)
        if not isinstance(network, nn.Module):
            return None
        kind = "ocm" if isinstance(moments, OcmMoments) else "modulated"
        return f"{kind}-{weights_digest(network.state_dict(), 'the head')[:DIGITS]}"
    return PLAIN.get(type(moments))
