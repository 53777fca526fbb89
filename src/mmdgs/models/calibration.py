"""`mmdgs.calibrate`: an estimator's uncertainty fitted to clean data, level by level, and kept beside the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmdgs.errors import UsageError
from mmdgs.metrics.coverage import standardised
from mmdgs.metrics.reports import CalibrationReport, check_examples, check_level, report_of
from mmdgs.models.fits import CALIBRATION, FitData, FitStore, digest_of
from mmdgs.models.weights import weights_digest
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
from mmdgs.moments.probes import Lattice, Rademacher, design_for
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.runtime import progress_bar
from mmdgs.schedules import geometric

if TYPE_CHECKING:
    from mmdgs.models.model import Model

logger = logging.getLogger("mmdgs")

LEVELS, LARGEST, SMALLEST = 8, 3.0, 0.02
"""Where a model of many levels is calibrated if no levels are given: where images take shape, for values in [0, 1]."""
DIGITS = 12


def calibrate(
    moments: Moments,
    data: Tensor | FitData,
    levels: NoiseLevel | Sequence[NoiseLevel] | None = None,
    *,
    seed: int = 0,
    progress: str | None = "calibrating",
) -> CalibratedMoments:
    """Fit floor, scale and reach of an estimator's uncertainty to clean data (N, ...), at each level.

    Every second example is fitted to, and the others judge: `.report` says how well, by sigma / alpha. `levels` may be
    left out for a model's estimator: its own level, or eight over the range where images take shape. What is fitted
    for a model is kept as other fits are (beside it, or in the cache folder), and `model.posterior(...)` then uses it.
    """
    from mmdgs.models.model import Model  # which imports this module

    moments = moments.moments if isinstance(moments, CalibratedMoments) else moments
    model = moments.denoiser if isinstance(moments.denoiser, Model) else None
    if isinstance(data, FitData):
        if model is None:
            raise UsageError("data by name are for a model's estimator; give the examples as a tensor (N, ...)")
        x = data.load(model).to(model.device)
        key = {**data.key(x), "of": CALIBRATION}
    else:
        x, key = data, {"data": digest_of(data), "images": len(data), "seed": seed, "of": CALIBRATION}
    check_examples(moments, x)
    chosen = levels_of(model, levels)
    found, reports = {}, {}
    with progress_bar(len(chosen), progress, unit="level") as bar:
        for level in chosen:
            found[level] = fit_at(moments, x[::2], level, seed)
            reports[level.ratio] = judge_at(moments, found[level], x[1::2], level, seed)
            bar.update()
    table = LevelTable.of(found)
    if model is not None:
        _keep(model, moments, key, table)
    return CalibratedMoments(moments, table, reports)


def levels_of(model: Model | None, levels: NoiseLevel | Sequence[NoiseLevel] | None) -> list[NoiseLevel]:
    """The levels to fit at, the cleanest last."""
    if levels is not None:
        chosen = [levels] if isinstance(levels, NoiseLevel) else list(levels)
    elif model is None:
        raise ValueError("give the noise levels to calibrate at, such as [NoiseLevel(sigma=0.2)]")
    elif len(model.levels) == 1:
        chosen = [*model.levels]
    else:
        width = model.interval[1] - model.interval[0]
        ends = min(model.levels[0].ratio, width * LARGEST), max(model.levels[-1].ratio, width * SMALLEST)
        chosen = [*geometric(LEVELS, *ends)]
    if not chosen:
        raise ValueError("need one noise level or more, got none")
    for level in chosen:
        check_level(model, level)
    return sorted(dict.fromkeys(chosen), key=lambda level: -level.ratio)


def fit_at(moments: Moments, x: Tensor, level: NoiseLevel, seed: int) -> list[float]:
    """Floor, scale and reach at a level."""
    lift = fit_floor_and_scale(moments, x, level, seed=seed)
    lifted = CalibratedMoments(moments, LevelTable.of({level: lift}))
    pairs = posteriors(lifted, x, level, seed=seed, purpose=FITTING)
    return [*lift, *fit_reach(torch.cat([standardised(clean, q).cpu() for clean, q in pairs]))]


def judge_at(moments: Moments, fitted: Sequence[float], x: Tensor, level: NoiseLevel, seed: int) -> CalibrationReport:
    """The report of what was fitted at a level, on examples that the fit has not seen."""
    whole = CalibratedMoments(moments, LevelTable.of({level: fitted}))
    return report_of(posteriors(whole, x, level, seed=seed, purpose=JUDGING), level, seed=seed)


def kept_calibration(model: Model, moments: Moments, required: bool = False) -> Moments:
    """An estimator of a model with the calibration that is kept for it; where there is none, as it is or refused."""
    name, table = estimator_name(moments, model), None
    if name is not None:
        store = FitStore(model, f"{CALIBRATION}-{name}")
        table = store.best_of() if store.might_hold() else None
    if table is None and required:
        raise UsageError(
            f"no calibration of {name or type(moments).__name__} is kept for {model.source}: fit one with "
            "mmdgs.calibrate(model.posterior(...), data), or leave out --calibrated"
        )
    return moments if table is None else CalibratedMoments(moments, table)


def _keep(model: Model, moments: Moments, key: dict[str, Any], table: LevelTable) -> None:
    name = estimator_name(moments, model)
    if name is None:
        logger.info("the calibration is not kept: %s has no name it could be found by", moments)
        return
    FitStore(model, f"{CALIBRATION}-{name}").keep(key, table)


def estimator_name(moments: Moments, model: Model) -> str | None:
    """What an estimator of a model is called in the name of its calibration's file; None where it has no name.

    A floor is no part of it: a calibration has its own.
    """
    if next(model.network.parameters(), None) is None:  # nothing that a file could belong to
        return None
    if isinstance(moments, DiagonalMoments):
        if moments.probes is None:
            return "diagonal-exact"
        design = moments.design or design_for(torch.empty(1, *model.shape))
        known = {Lattice(): "lattice", Rademacher(): "rademacher", Rademacher(smooth=True): "signs"}
        return f"{known[design]}-{moments.probes}" if design in known else None
    if isinstance(moments, KrylovMoments):
        return f"krylov-{moments.steps}"
    if isinstance(moments, LowRankMoments) and isinstance(moments.rest, SpectralMoments):
        return f"low-rank-{moments.products}" + ("" if moments.below is None else f"-below-{moments.below:g}")
    if isinstance(moments, OcmMoments | ModulatedMoments):
        network = getattr(moments.head, "network", None)
        kind = "ocm" if isinstance(moments, OcmMoments) else "modulated"
        return (
            f"{kind}-{weights_digest(network.state_dict(), 'the head')[:DIGITS]}"
            if isinstance(network, nn.Module)
            else None
        )
    plain = {FullMoments: "full", IsotropicMoments: "isotropic", SpectralMoments: "spectral", LearnedMoments: "learned"}
    return plain.get(type(moments))
