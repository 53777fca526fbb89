"""Any estimator with its uncertainty fitted to data: a floor, a scale and the reach of intervals at each noise level.

    C = a max(C_0, f)        f the floor of eigenvalues or variances, in units of (sigma / alpha)^2; a the scale

A network's Jacobian does not know how wrong the network's mean is. Errors r = x - D(x_t) of clean data do, in two ways:

    Q = mean of r' C^-1 r / d      every eigenvector counts alike: what densities need
    P = mean of r' r / tr C        large eigenvalues count: what draws and intervals need

Both are 1 for a right C. Where most eigenvalues of a Jacobian are error, Q is about those, and a scale by Q alone
leaves draws too narrow. So where C has correlations the scale at a floor is sqrt(Q P), and the floor is the likeliest
of those at which Q and P agree. Of variances alone the likeliest floor and scale are taken: the scale is Q. With
r' C_0^-1 r, log det C_0 and tr C_0 written in eigenvalues, a grid of floors takes no more products with the Jacobian
than one. The reach is what is left, the shape of the errors: quantiles of |r| / std over those of a Gaussian, at some
probabilities, for intervals that hold what they say.

Beyond the levels of the fit it fades out: over a factor FADE in sigma / alpha floor, scale and reach go to what the
estimator has without a calibration, their logarithms linearly in log(sigma / alpha).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser
from mmdgs.linalg.operators import Diagonal, raise_non_finite
from mmdgs.moments.checks import check_errors, require_nearer
from mmdgs.moments.clipped import ClippedMoments
from mmdgs.moments.contract import FLOOR, Floor, Moments, least_and_share
from mmdgs.moments.diagonal import DiagonalMoments
from mmdgs.moments.full import FullMoments
from mmdgs.moments.krylov import KrylovMoments
from mmdgs.moments.ocm import OcmMoments, RatioScale, spread_places
from mmdgs.noise import SAME_LEVEL, LevelTable, NoiseLevel, add_noise
from mmdgs.posterior import PROBABILITIES, Gaussian
from mmdgs.randomness import Generator, Streams

logger = logging.getLogger("mmdgs")

FLOORED = (DiagonalMoments, FullMoments, KrylovMoments, OcmMoments)
"""Estimators whose small values are lifted to a floor; of others scale and reach are fitted."""
FLOORS, HIGHEST = 76, 30.0
"""Floors that are tried, from 1e-6 to this many (sigma / alpha)^2: each a quarter above the last."""
AGREEING = 1.1
"""Q and P agree where under the scale sqrt(Q P) neither is off by more than this factor: half the way to 1.25."""
HEAD_LEVELS = 8
"""Levels at which the floors of a head of variances are fitted."""
ALWAYS, BEYOND = 0.9, 10
"""Intervals up to this probability are always fitted, and others where so many numbers or more lie outside them."""
LEAST_REACH = 1e-6
"""Errors that are exactly zero, such as those of clipped means, have quantiles of zero."""
FADE = 2.0
FITTING, JUDGING = "fitting", "judging"
"""Purposes of the noise and probes that a calibration is fitted with and of those that it is judged by."""
WIDTHS = (2, *range(2 + PROBABILITIES.index(ALWAYS) + 1, 2 + len(PROBABILITIES) + 1))
"""How many numbers a calibration may have at a level: with two no reach was fitted."""
DIGITS = 16
_told: set[str] = set()
"""Calibrations of which the log has said that a level lies outside."""
NUMBERS_AT_ONCE = {"cuda": 1 << 20, "cpu": 1 << 15}
"""Numbers of x that go through an estimator at once."""


@dataclass(frozen=True)
class CalibratedMoments:
    """An estimator with floor, scale and reach from a table (K, 2 + n) over levels, interpolated between levels.

    The reach is that of the first n of `mmdgs.posterior.PROBABILITIES`: few data do not tell rare errors.
    `report` says how good it is on data that the fit has not seen, by sigma / alpha, where it was fitted just now
    (`mmdgs.metrics.CalibrationReport`).
    """

    moments: Moments
    table: LevelTable
    report: Mapping[float, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        values = self.table.values
        if values.ndim != 2 or values.shape[1] not in WIDTHS or not (values > 0).all():
            raise ValueError(
                f"need a positive floor and scale, and the reach of none or of {WIDTHS[1] - 2} to {WIDTHS[-1] - 2} "
                f"intervals, at each level; got {self.table}"
            )

    @property
    def denoiser(self) -> Denoiser:
        """The mean alone."""
        return self.moments.denoiser

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        share = self._share(level)
        if share == 0:
            return self.moments(x_t, level, generator=generator)
        floor, scale, *reach = (self.table[level] ** share).tolist()
        if share < 1:
            least, error_share = least_and_share(_own_floor(self.moments, level))
            floor = floor * least ** (1 - share), (1 - share) * error_share
        q = with_floor(self.moments, floor)(x_t, level, generator=generator)
        return replace(q, cov=q.cov.affine(scale, 0.0), reach=tuple(reach) or None)

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest sigma / alpha of the fit."""
        return self.table.ratios[0].item(), self.table.ratios[-1].item()

    @cached_property
    def fit_digest(self) -> str:
        """What the calibration is known by in records; the same when it was read from its file."""
        content = hashlib.sha256(self.table.ratios.numpy().tobytes())
        content.update(self.table.values.log().float().numpy().tobytes())
        return content.hexdigest()[:DIGITS]

    def _share(self, level: NoiseLevel) -> float:
        """How much of the calibration there is at a level: 1 within the levels of the fit, 0 beyond the fade."""
        beyond = _log_beyond(self.table, level)
        if beyond == 0:
            return 1.0
        if self.fit_digest not in _told:
            _told.add(self.fit_digest)
            logger.warning(
                "sigma / alpha of %.4g lies outside %.4g to %.4g, where the calibration was fitted: it fades out over "
                "a factor of %g, and beyond that there is none",
                *(level.ratio, *self.ends, FADE),
            )
        return max(0.0, 1 - beyond / math.log(FADE))


def calibration_record(moments: Moments | None, levels: Iterable[NoiseLevel]) -> dict[str, Any] | None:
    """For the record of a run: the digest of the estimator's calibration, the sigma / alpha of its fit (least, largest
    and how many), and how many of the run's levels lie outside; None without a calibration."""
    if isinstance(moments, ClippedMoments):
        return calibration_record(moments.moments, levels)
    if not isinstance(moments, CalibratedMoments):
        return None
    outside = sum(_log_beyond(moments.table, level) > 0 for level in levels)
    ends, count = list(moments.ends), len(moments.table.ratios)
    return {"digest": moments.fit_digest, "fitted_at": ends, "fitted_levels": count, "levels_outside": outside}


def _log_beyond(table: LevelTable, level: NoiseLevel) -> float:
    """How far a level lies beyond the ends of a table, in log(sigma / alpha); 0 where no farther than by rounding."""
    low, high = (math.log(table.ratios[i].item()) for i in (0, -1))
    beyond = max(low - math.log(level.ratio), math.log(level.ratio) - high)
    return beyond if beyond > SAME_LEVEL else 0.0


def _own_floor(moments: Moments, level: NoiseLevel) -> Floor:
    """The floor that an estimator has at a level by itself."""
    if isinstance(moments, ClippedMoments):
        return _own_floor(moments.moments, level)
    if isinstance(moments, OcmMoments):
        return moments.own_floor(level)
    return moments.floor if isinstance(moments, FLOORED) else None


def with_floor(moments: Moments, floor: Floor) -> Moments:
    """The same estimator with another floor; one that has none, as it is."""
    if isinstance(moments, ClippedMoments):
        return replace(moments, moments=with_floor(moments.moments, floor))
    return replace(moments, floor=floor) if isinstance(moments, FLOORED) else moments


def posteriors(
    moments: Moments,
    x: Float[Tensor, "data ..."],
    level: NoiseLevel,
    *,
    seed: int,
    purpose: str,
    rows: int | None = None,
) -> Iterator[tuple[Tensor, Gaussian]]:
    """Some rows of clean x at a time (None: by the device), and the posteriors of noisy versions of them.

    Each row has random streams of its own, of this purpose: one for its noise, one for what an estimator draws. At the
    end means that are no denoiser's are warned of, and refused where a calibration is fitted or judged (checks.py).
    """
    rows, squares = rows or _rows_at_once(moments, x), torch.zeros(2, dtype=torch.float64)
    for first in range(0, len(x), rows):
        clean = x[first : first + rows]
        noise, own = (Streams(seed, len(clean), first, purpose=f"{purpose} {what}") for what in ("noise", "probes"))
        x_t = add_noise(clean, level, generator=noise)
        q = moments(x_t, level, generator=own)
        squares += torch.stack(
            [(clean - y).double().square().sum() for y in (q.mean.detach(), x_t / level.alpha)]
        ).cpu()
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
    moments: Moments, x: Float[Tensor, "data ..."], level: NoiseLevel, *, seed: int
) -> tuple[float, float]:
    """The floor, in units of (sigma / alpha)^2, and the scale under which clean x are likeliest."""
    pairs = posteriors(with_floor(moments, FLOOR), x, level, seed=seed, purpose=FITTING)
    return likeliest_lift(pairs, level.variance, floors=FLOORS if _has_floor(moments) else 1)


def likeliest_lift(
    pairs: Iterable[tuple[Tensor, Gaussian]], unit: float, *, floors: int = FLOORS, scaled: bool = True
) -> tuple[float, float]:
    """The floor, in units of `unit`, and the scale, from batches of x and posteriors.

    Minus twice the log-likelihood of N rows is  sum log det max(C_0, f) + N d log a + sum r' max(C_0, f)^-1 r / a.
    With one floor only the scale is fitted; where not `scaled`, only the floor, under a scale of 1.
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
        values, counts = (one.double() for one in q.cov.spectrum())
        own, squares = (one.double() for one in q.cov.coordinates(r))
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
    best = torch.where(apart <= max(2 * math.log(AGREEING), apart.min().item()), nats, math.inf).argmin()
    return grid[best].item(), scales[best].item()


def fitted_floors(moments: OcmMoments, x: Float[Tensor, "data ..."], scale: RatioScale, *, seed: int) -> RatioScale:
    """A finished head's scale with the floors under which clean x are likeliest, at most 1, fitted at some levels."""
    found = {}
    for place in spread_places(len(scale.ratios), HEAD_LEVELS):
        level = NoiseLevel(sigma=scale.ratios[place])
        pairs = posteriors(with_floor(moments, FLOOR), x, level, seed=seed, purpose="floors")
        found[level] = min(1.0, likeliest_lift(pairs, level.variance, scaled=False)[0])
    table = LevelTable.of(found)
    return replace(scale, floors=tuple(table[NoiseLevel(sigma=ratio)] for ratio in scale.ratios))


def fit_reach(standardised: Float[Tensor, "..."]) -> list[float]:
    """Quantiles of |z| over those of a standard normal, at as many of PROBABILITIES as the numbers tell."""
    z = standardised.abs().flatten().sort().values
    told = [p for p in PROBABILITIES if p <= ALWAYS or (1 - p) * len(z) >= BEYOND]
    quantiles = [z[max(1, math.ceil(p * len(z) - 1e-9)) - 1].item() for p in told]
    return [max(q / NormalDist().inv_cdf(0.5 + p / 2), LEAST_REACH) for p, q in zip(told, quantiles, strict=True)]


def _has_floor(moments: Moments) -> bool:
    return _has_floor(moments.moments) if isinstance(moments, ClippedMoments) else isinstance(moments, FLOORED)
