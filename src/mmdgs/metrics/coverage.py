"""Calibration: are a posterior's standard deviations those of its errors?

With z = (x - mean) / std, every pixel by itself: if x comes from the posterior then E z^2 = 1, |z| < 1 for
68.3% and |z| < 2 for 95.4% of the pixels where it is Gaussian. E z^2 above 1: the posterior is too sure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmdgs.posterior import Gaussian

EXPECTED_COVERAGE = (math.erf(math.sqrt(0.5)), math.erf(math.sqrt(2.0)))
"""The chance that a Gaussian lies within one and within two standard deviations."""


@dataclass(frozen=True)
class Calibration:
    """Over `count` pixels: the mean of z^2 (1: calibrated), coverages, and the mean negative log-likelihood (nats)."""

    count: int
    variance: float
    within_one: float
    within_two: float
    nll: float


def standardised(x: Float[Tensor, "batch ..."], posterior: Gaussian) -> Float[Tensor, "batch ..."]:
    """z = (x - mean) / std, in float64."""
    if x.shape != posterior.mean.shape:
        raise ValueError(f"x must have the posterior's shape {tuple(posterior.mean.shape)}, got {tuple(x.shape)}")
    return (x.double() - posterior.mean.double()) / posterior.cov.diagonal().double().sqrt()


def calibration(
    x: Float[Tensor, "batch ..."], posterior: Gaussian, where: Bool[Tensor, "batch ..."] | None = None
) -> Calibration:
    """How well the posterior's variances fit x, each pixel by itself, over all pixels or those of a mask."""
    z = standardised(x, posterior)
    log_variance = posterior.cov.diagonal().double().log().expand_as(z)
    if where is not None:
        z, log_variance = z[where], log_variance[where]
    if z.numel() == 0:
        return Calibration(0, math.nan, math.nan, math.nan, math.nan)
    squares = z.square()
    return Calibration(
        z.numel(),
        squares.mean().item(),
        (squares < 1).double().mean().item(),
        (squares < 4).double().mean().item(),
        0.5 * (squares + log_variance + math.log(2 * math.pi)).mean().item(),
    )


@dataclass(frozen=True)
class Reliability:
    """Pixels in bins of predicted standard deviation: root mean squares of prediction and of error, and counts."""

    predicted: list[float]
    observed: list[float]
    counts: list[int]


def reliability(x: Float[Tensor, "batch ..."], posterior: Gaussian, *, bins: int = 20, least: int = 100) -> Reliability:
    """Predicted against observed error, in bins of equal width in log std; bins of fewer than `least` pixels left out.

    A calibrated posterior has predicted = observed in every bin.
    """
    errors = (x.double() - posterior.mean.double()).square().flatten()
    return reliability_of(errors, posterior.cov.diagonal().double().expand_as(x).flatten(), bins=bins, least=least)


def reliability_of(
    errors: Float[Tensor, " n"], variances: Float[Tensor, " n"], *, bins: int = 20, least: int = 100
) -> Reliability:
    """The same from squared errors and variances."""
    logs = variances.log()
    low, high = logs.min(), logs.max()
    place = ((logs - low) / (high - low).clamp(min=1e-12) * bins).long().clamp(max=bins - 1)
    counts = torch.bincount(place, minlength=bins)
    kept = counts >= least
    mean = [
        (torch.bincount(place, weights=values, minlength=bins)[kept] / counts[kept]).sqrt().tolist()
        for values in (variances, errors)
    ]
    return Reliability(mean[0], mean[1], counts[kept].tolist())
