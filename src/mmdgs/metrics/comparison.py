"""Estimators of a diagonal covariance side by side: how far their variances are off, how well they fit, what they cost.

The exact diagonal v* takes d products with the Jacobian; its distance to an estimate v does not. With two estimates
y, y' of it that are unbiased and independent of each other and of v,

    E (v - y)(v - y') = (v - v*)^2,        E y y' = v*^2,

and over the numbers of some images both are known well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import Cost, counting
from mmdgs.denoisers import Denoiser
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics.coverage import Calibration, calibration
from mmdgs.moments import Moments
from mmdgs.moments.calibrated import likeliest_lift
from mmdgs.moments.ocm import ratio_target
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams

ROWS = {"cuda": 64, "cpu": 16}
REFERENCE_PROBES = 16


@dataclass(frozen=True)
class Compared:
    """An estimator at some points: the relative error of its variances, |v - v*| / |v*|, and their fit to x.

    `fitted` is the fit with the floor and the scale of the variances that make every second x likeliest, on the
    others: what a network's mean is off by is not in its Jacobian, and without a floor it is most of the likelihood.
    """

    error: float
    resolution: float  # errors below it cannot be told from none: the root of the standard error of a squared error
    calibration: Calibration
    fitted: Calibration
    repaired: float  # the fraction of variances that were lifted to the floor
    cost: Cost  # of one posterior


def relative_error(v: Tensor, first: Tensor, second: Tensor) -> tuple[float, float]:
    """|v - v*| / |v*| from two independent unbiased estimates of v*, all (B, ...); and the least that is resolved."""
    v, first, second = v.double(), first.double(), second.double()
    size = (first * second).mean().item()
    if size <= 0:
        return math.nan, math.nan  # two estimates that say nothing about v*
    squares = ((v - first) * (v - second)).flatten(1).mean(1) / size
    resolution = math.sqrt(squares.std().item() / math.sqrt(len(squares))) if len(squares) > 1 else math.nan
    return math.sqrt(max(0.0, squares.mean().item())), resolution


def compare_diagonals(
    estimators: Mapping[str, Moments],
    denoiser: Denoiser,
    x: Float[Tensor, "batch ..."],
    level: NoiseLevel,
    *,
    seed: int,
    reference_probes: int = REFERENCE_PROBES,
) -> dict[str, Compared]:
    """Estimators of one denoiser's diagonal at the same noisy versions of held-out x.

    x holds two rows at the least. Each row has random streams of its own: one for the noise, one for each reference,
    one for the estimators' probes.
    """
    rows = ROWS.get(x.device.type, ROWS["cpu"])
    parts: dict[str, list[Gaussian]] = {name: [] for name in estimators}
    references: tuple[list[Tensor], list[Tensor]] = ([], [])
    costs: dict[str, Cost] = {}
    for first in range(0, len(x), rows):
        clean = x[first : first + rows]
        x_t = add_noise(clean, level, generator=Streams(seed, len(clean), first, purpose="noise"))
        for i, found in enumerate(references):
            streams = Streams(seed, len(clean), first, purpose=f"reference {i}")
            y = ratio_target(denoiser, x_t, level, generator=streams, probes=reference_probes)[1]
            found.append(level.variance * y.cpu())
        for name, moments in estimators.items():
            own = Streams(seed, len(clean), first, purpose="probes")  # the same for each
            with counting() as costs[name]:
                q = moments(x_t, level, generator=own)
            repaired = None if q.repaired is None else q.repaired.cpu()
            parts[name].append(Gaussian(q.mean.cpu(), Diagonal(q.cov.diagonal().cpu()), repaired))
    y, y_other = (torch.cat(found) for found in references)
    unit = level.variance
    return {name: _compared(x.cpu(), _joined(qs), unit, y, y_other, costs[name]) for name, qs in parts.items()}


def _joined(parts: list[Gaussian]) -> Gaussian:
    repaired = [torch.zeros(len(q.mean)) if q.repaired is None else q.repaired for q in parts]
    mean, variance = torch.cat([q.mean for q in parts]), torch.cat([q.cov.diagonal() for q in parts])
    return Gaussian(mean, Diagonal(variance), torch.cat(repaired))


def _compared(x: Tensor, q: Gaussian, unit: float, y: Tensor, y_other: Tensor, cost: Cost) -> Compared:
    assert q.repaired is not None
    variances = q.cov.diagonal()
    error, resolution = relative_error(variances, y, y_other)
    # One floor and one scale for all of them, from one half and for the other.
    floor, scale = likeliest_lift([(x[::2], Gaussian(q.mean[::2], Diagonal(variances[::2])))], unit)
    lifted = Gaussian(q.mean[1::2], Diagonal(scale * variances[1::2].clamp(min=floor * unit)))
    fitted = calibration(x[1::2], lifted)
    return Compared(error, resolution, calibration(x, q), fitted, q.repaired.mean().item(), cost)
