"""Any estimator with its uncertainty fitted to data: a floor, a scale and a reach at each noise level.

    C = a max(C_0, f)        f the floor of eigenvalues or variances, in units of (sigma / alpha)^2; a the scale

A network's Jacobian does not know how wrong the network's mean is. Errors r = x - D(x_t) of clean data do, in two ways:

    Q = mean of r' C^-1 r / d      every eigenvector counts alike: what densities need
    P = mean of r' r / tr C        large eigenvalues count: what draws and intervals need

Both are 1 for a right C. Where most eigenvalues of a Jacobian are error, Q is about those, and a scale by Q alone
leaves draws too narrow. So where C has correlations the scale at a floor is sqrt(Q P), and the floor is the likeliest
of those at which Q and P agree. Of variances alone the likeliest floor and scale are taken: the scale is Q. With
r' C_0^-1 r, log det C_0 and tr C_0 written in eigenvalues, a grid of floors takes no more products with the Jacobian
than one. The reach is what is left: the 0.9 quantile of |r| / std over that of a Gaussian, for intervals that hold what
they say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser
from mmdgs.linalg.operators import Diagonal, raise_non_finite
from mmdgs.moments.clipped import ClippedMoments
from mmdgs.moments.contract import FLOOR, Moments
from mmdgs.moments.diagonal import DiagonalMoments
from mmdgs.moments.full import FullMoments
from mmdgs.moments.krylov import KrylovMoments
from mmdgs.moments.ocm import OcmMoments, RatioScale, spread_places
from mmdgs.noise import LevelTable, NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, Streams

FLOORED = (DiagonalMoments, FullMoments, KrylovMoments, OcmMoments)
"""Estimators whose small values are lifted to a floor; of others scale and reach are fitted."""
FLOORS, HIGHEST = 76, 30.0
"""Floors that are tried, from 1e-6 to this many (sigma / alpha)^2: each a quarter above the last."""
AGREEING = 1.1
"""Q and P agree where under the scale sqrt(Q P) neither is off by more than this factor: half the way to 1.25."""
HEAD_LEVELS = 8
"""Levels at which the floors of a head of variances are fitted."""
COVERED = 0.9
"""The probability whose interval the reach makes right."""
FITTING, JUDGING = "fitting", "judging"
"""Purposes of the noise and probes that a calibration is fitted with and of those that it is judged by."""
NUMBERS_AT_ONCE = {"cuda": 1 << 20, "cpu": 1 << 15}
"""Numbers of x that go through an estimator at once."""


@dataclass(frozen=True)
class CalibratedMoments:
    """An estimator with floor, scale and reach from a table (K, 3) over levels; between levels they are interpolated.

    `report` says how good it is on data that the fit has not seen, by sigma / alpha, where it was fitted just now
    (`mmdgs.metrics.CalibrationReport`).
    """

    moments: Moments
    table: LevelTable
    report: Mapping[float, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.table.values.shape[1:] != (3,) or not (self.table.values > 0).all():
            raise ValueError(f"need a positive floor, scale and reach at each level, got {self.table}")

    @property
    def denoiser(self) -> Denoiser:
        """The mean alone."""
        return self.moments.denoiser

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        floor, scale, reach = self.table[level].tolist()
        q = with_floor(self.moments, floor)(x_t, level, generator=generator)
        return replace(q, cov=q.cov.affine(scale, 0.0), reach=reach)


def with_floor(moments: Moments, floor: float | None) -> Moments:
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

    Each row has random streams of its own, of this purpose: one for its noise, one for what an estimator draws.
    """
    rows = rows or _rows_at_once(moments, x)
    for first in range(0, len(x), rows):
        clean = x[first : first + rows]
        noise, own = (Streams(seed, len(clean), first, purpose=f"{purpose} {what}") for what in ("noise", "probes"))
        yield clean, moments(add_noise(clean, level, generator=noise), level, generator=own)


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


def fit_reach(standardised: Float[Tensor, "..."]) -> float:
    """The 0.9 quantile of |z| over that of a standard normal."""
    z = standardised.abs().flatten()
    quantile = z.kthvalue(max(1, round(COVERED * len(z)))).values.item()
    return quantile / NormalDist().inv_cdf(0.5 + COVERED / 2)


def _has_floor(moments: Moments) -> bool:
    return _has_floor(moments.moments) if isinstance(moments, ClippedMoments) else isinstance(moments, FLOORED)
