"""Any estimator with its uncertainty fitted to data: floor, scale and reach of intervals by level.

    C = a max(C_0, f)     f the floor of eigenvalues or variances, in (sigma / alpha)^2; a the scale

A network's Jacobian does not know how wrong the network's mean is. Errors r = x - D(x_t) of clean
data do, in two ways:

    Q = mean of r' C^-1 r / d      every eigenvector counts alike: what densities need
    P = mean of r' r / tr C        large eigenvalues count: what draws and intervals need

Both are 1 for a right C. Where most eigenvalues of a Jacobian are error, Q is about those, and a
scale by Q alone leaves draws too narrow. So where C has correlations the scale at a floor is
sqrt(Q P), and the floor is the likeliest of those at which Q and P agree. Of variances alone the
likeliest floor and scale are taken: the scale is Q. Written in eigenvalues, a grid of floors takes
no more products with the Jacobian than one floor. The reach is what is left, the shape of the
errors: quantiles of |r| / std over those of a Gaussian, for intervals that hold what they say.

Beyond the levels of the fit it fades out: over a factor FADE in sigma / alpha the logarithms of
floor, scale and reach go linearly to those of the estimator without a calibration.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser
from mmdgs.files import sha256_of
from mmdgs.linalg.operators import Diagonal, raise_non_finite
from mmdgs.moments.checks import check_errors, require_nearer
from mmdgs.moments.clipped import ClippedMoments
from mmdgs.moments.contract import FLOOR, Floor, Moments, least_and_share
from mmdgs.moments.ocm import OcmMoments, RatioScale, spread_places
from mmdgs.moments.products import DiagonalMoments, FullMoments, KrylovMoments
from mmdgs.noise import SAME_LEVEL, LevelTable, NoiseLevel, add_noise
from mmdgs.posterior import PROBABILITIES, Gaussian
from mmdgs.randomness import Generator, Streams

logger = logging.getLogger("mmdgs")

FLOORED = (DiagonalMoments, FullMoments, KrylovMoments, OcmMoments)
"""Estimators whose small values are lifted to a floor; of others scale and reach are fitted."""
FLOORS, HIGHEST = 76, 30.0  # floors tried, from 1e-6 to 30 (sigma / alpha)^2: steps of a quarter
AGREEING = 1.1  # Q and P agree where under the scale sqrt(Q P) neither is off by more
HEAD_LEVELS = 8  # levels at which the floors of a head of variances are fitted
ALWAYS, BEYOND = 0.9, 10
"""Intervals up to this probability are always fitted, others where so many numbers lie outside."""
LEAST_REACH = 1e-6  # errors that are exactly zero, as of clipped means, have quantiles of zero
FADE = 2.0
FITTING, JUDGING = "fitting", "judging"
"""Purposes of the noise and probes that a calibration is fitted with, and judged by."""
WIDTHS = (2, *range(2 + PROBABILITIES.index(ALWAYS) + 1, 2 + len(PROBABILITIES) + 1))
"""How many numbers a calibration may have at a level: with two no reach was fitted."""
DIGITS = 16
NUMBERS_AT_ONCE = {"cuda": 1 << 20, "cpu": 1 << 15}  # of x, that go through an estimator together
_warned: set[str] = set()  # digests of calibrations of which a level outside was logged

_Fit = tuple[Moments, float | None, tuple[float, ...] | None]
"""At a level: the estimator with its floor, the scale (None: no calibration) and the reach."""


@dataclass(frozen=True)
class CalibratedMoments:
    """An estimator with floor, scale and reach from a table (K, 2 + n), interpolated over levels.

    The reach is that of the first n of `mmdgs.posterior.PROBABILITIES`: few data do not tell rare
    errors. `report` (`mmdgs.metrics.CalibrationReport` by sigma / alpha) says how good it is on
    data that the fit has not seen, where it was fitted just now.
    """

    moments: Moments
    table: LevelTable
    report: Mapping[float, Any] = field(default_factory=dict, compare=False, repr=False)
    _at: dict[NoiseLevel, _Fit] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        values = self.table.values
        if values.ndim != 2 or values.shape[1] not in WIDTHS or not (values > 0).all():
            reach = f"none or {WIDTHS[1] - 2} to {WIDTHS[-1] - 2} intervals"
            raise ValueError(f"need floor, scale and reach of {reach} > 0, got {self.table}")

    @property
    def denoiser(self) -> Denoiser:
        """The mean alone."""
        return self.moments.denoiser

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        if level not in self._at:
            self._at[level] = self._fit_at(level)
        moments, scale, reach = self._at[level]
        q = moments(x_t, level, generator=generator)
        return q if scale is None else replace(q, cov=q.cov.affine(scale, 0.0), reach=reach)

    def _fit_at(self, level: NoiseLevel) -> _Fit:
        share = self._share(level)
        if share == 0:
            return self.moments, None, None
        floor, scale, *reach = (self.table[level] ** share).tolist()
        if share < 1 and (inner := _floored(self.moments)) is not None:
            ours = inner.own_floor(level) if isinstance(inner, OcmMoments) else inner.floor
            least, error_share = least_and_share(ours)
            floor = floor * least ** (1 - share), (1 - share) * error_share
        return with_floor(self.moments, floor), scale, tuple(reach) or None

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest sigma / alpha of the fit."""
        return self.table.ratios[0].item(), self.table.ratios[-1].item()

    @cached_property
    def fit_digest(self) -> str:
        """What the calibration is known by in records; the same when it was read from its file."""
        tensors = self.table.ratios, self.table.values.log().float()
        return sha256_of(*(tensor.numpy().tobytes() for tensor in tensors))[:DIGITS]

    def log_beyond(self, level: NoiseLevel) -> float:
        """How far log(sigma / alpha) of a level lies outside the fit, by more than rounding."""
        low, high = map(math.log, self.ends)
        beyond = max(low - math.log(level.ratio), math.log(level.ratio) - high)
        return beyond if beyond > SAME_LEVEL else 0.0

    def _share(self, level: NoiseLevel) -> float:
        """How much of the calibration there is at a level: from 1 within the fit to 0."""
        beyond = self.log_beyond(level)
        if beyond > 0 and self.fit_digest not in _warned:
            _warned.add(self.fit_digest)
            logger.warning(
                "sigma / alpha of %.4g lies outside %.4g to %.4g, where the calibration was "
                "fitted: it fades out over a factor of %g, and beyond that there is none",
                *(level.ratio, *self.ends, FADE),
            )
        return max(0.0, 1 - beyond / math.log(FADE))


def calibration_record(
    moments: Moments | None, levels: Iterable[NoiseLevel]
) -> dict[str, Any] | None:
    """The calibration's digest, the levels of its fit and how many of a run's lie outside."""
    if isinstance(moments, ClippedMoments):
        moments = moments.moments
    if not isinstance(moments, CalibratedMoments):
        return None
    return {
        "digest": moments.fit_digest,
        "fitted_at": list(moments.ends),
        "fitted_levels": len(moments.table.ratios),
        "levels_outside": sum(moments.log_beyond(level) > 0 for level in levels),
    }


def _floored(moments: Moments) -> Any:
    """The estimator that has a floor, or None."""
    inner = moments.moments if isinstance(moments, ClippedMoments) else moments
    return inner if isinstance(inner, FLOORED) else None


def with_floor(moments: Moments, floor: Floor) -> Moments:
    """The same estimator with another floor; one that has none, as it is."""
    if isinstance(moments, ClippedMoments):
        return replace(moments, moments=with_floor(moments.moments, floor))
    return replace(moments, floor=floor) if isinstance(moments, FLOORED) else moments


def posteriors(
    moments: Moments,
    x: Tensor,
    level: NoiseLevel,
    *,
    seed: int,
    purpose: str,
    rows: int | None = None,
) -> Iterator[tuple[Tensor, Gaussian]]:
    """Some rows of clean x (N, ...) at a time, and the posteriors of noisy versions of them.

    Each row has random streams of this purpose: one for its noise, one for what an estimator draws.
    At the end means that are no denoiser's are warned of, and refused where a calibration is fitted
    or judged (checks.py).
    """
    rows, squares = rows or _rows_at_once(moments, x), torch.zeros(2, dtype=torch.float64)
    for first in range(0, len(x), rows):
        clean = x[first : first + rows]
        noise, probes = (
            Streams(seed, len(clean), first, purpose=f"{purpose} {kind}")
            for kind in ("noise", "probes")
        )
        x_t = add_noise(clean, level, generator=noise)
        q = moments(x_t, level, generator=probes)
        errors = [clean - estimate for estimate in (q.mean.detach(), x_t / level.alpha)]
        squares += torch.stack([error.double().square().sum() for error in errors]).cpu()
        yield clean, q
    error, noisy = (squares / x.numel()).tolist()
    if purpose in (FITTING, JUDGING):
        require_nearer(level, (error, noisy))
    check_errors(moments.denoiser, level, (error, noisy), x)


def _rows_at_once(moments: Moments, x: Tensor) -> int:
    numbers = NUMBERS_AT_ONCE.get(x.device.type, NUMBERS_AT_ONCE["cpu"])
    inner = moments.moments if isinstance(moments, CalibratedMoments) else moments
    if isinstance(inner, FullMoments) and inner.most_products is not None:  # d products a row
        numbers = min(numbers, inner.most_products)
    return max(1, numbers // x[0].numel())


def fit_floor_and_scale(
    moments: Moments, x: Tensor, level: NoiseLevel, *, seed: int
) -> tuple[float, float]:
    """Floor (in (sigma / alpha)^2) and scale under which clean x (N, ...) are likeliest."""
    pairs = posteriors(with_floor(moments, FLOOR), x, level, seed=seed, purpose=FITTING)
    return likeliest_lift(pairs, level.variance, floors=FLOORS if _floored(moments) else 1)


def likeliest_lift(
    pairs: Iterable[tuple[Tensor, Gaussian]],
    unit: float,
    *,
    floors: int = FLOORS,
    scaled: bool = True,
) -> tuple[float, float]:
    """The floor, in units of `unit`, and the scale, from batches of x and posteriors.

    Minus twice the log-likelihood of N rows is  sum log det max(C_0, f) + N d log a + sum r'
    max(C_0, f)^-1 r / a. With one floor only the scale is fitted; if not `scaled`, only the floor.
    """
    grid = FLOOR * (HIGHEST / FLOOR) ** torch.linspace(0, 1, floors, dtype=torch.float64)
    logdets, distances, spreads = (torch.zeros_like(grid) for _ in range(3))
    numbers = 0
    for clean, q in pairs:
        r = clean - q.mean
        raise_non_finite("error of the mean", r)
        numbers += r.numel()
        if floors == 1:
            distances += q.cov.mahalanobis(r).double().sum().cpu()
            continue
        values, counts = (part.double() for part in q.cov.spectrum())
        own, squares = (part.double() for part in q.cov.coordinates(r))
        alone = isinstance(q.cov, Diagonal)
        energy = r[0].numel() * r.double().flatten(1).square().sum(1)
        for i, floor in enumerate((grid * unit).tolist()):
            above, distance = values.clamp(min=floor), (squares / own.clamp(min=floor)).sum().cpu()
            logdets[i] += (counts * above.log()).sum().cpu()
            distances[i] += distance
            spreads[i] += distance if alone else (energy / (counts * above).sum(1)).sum().cpu()
    by_direction = distances / numbers
    by_spread = by_direction if floors == 1 else spreads / numbers
    scales = (by_direction * by_spread).sqrt() if scaled else torch.ones_like(grid)
    apart = (by_direction / by_spread).log().abs()
    nats = logdets / numbers + scales.log() + by_direction / scales
    agree = apart <= max(2 * math.log(AGREEING), apart.min().item())
    best = torch.where(agree, nats, math.inf).argmin()
    return grid[best].item(), scales[best].item()


def fitted_floors(moments: OcmMoments, x: Tensor, scale: RatioScale, *, seed: int) -> RatioScale:
    """A finished head's scale with the likeliest floors for clean x, at most 1."""
    floors = {}
    for place in spread_places(len(scale.ratios), HEAD_LEVELS):
        level = NoiseLevel(sigma=scale.ratios[place])
        pairs = posteriors(with_floor(moments, FLOOR), x, level, seed=seed, purpose="floors")
        floors[level] = min(1.0, likeliest_lift(pairs, level.variance, scaled=False)[0])
    table = LevelTable.of(floors)
    return replace(scale, floors=tuple(table[NoiseLevel(sigma=ratio)] for ratio in scale.ratios))


def fit_reach(standardised: Tensor) -> list[float]:
    """Quantiles of |z| over those of a standard normal, at the PROBABILITIES that z can tell."""
    z = standardised.abs().flatten().sort().values
    known = [p for p in PROBABILITIES if p <= ALWAYS or (1 - p) * len(z) >= BEYOND]
    quantiles = [z[max(1, math.ceil(p * len(z) - 1e-9)) - 1].item() for p in known]
    normal = [NormalDist().inv_cdf(0.5 + p / 2) for p in known]
    return [max(q / n, LEAST_REACH) for q, n in zip(quantiles, normal, strict=True)]
