"""The contract of moment estimators, (denoiser) -> (x_t, level) -> Gaussian, and what they share.

By Tweedie's formulas the mean of p(x | x_t) is the denoiser D and its covariance the denoiser's Jacobian,

    Cov[x | x_t] = (sigma^2 / alpha) dD/dx_t        (the paper's Theorem 2, for any alpha),

so every estimator needs one forward pass, shared by the mean and all products with the Jacobian. Products
are vector-Jacobian products, batched: fused attention has no forward-mode derivative. A network's Jacobian
need not be symmetric or positive: small values are lifted to a floor (linalg/repair.py), counted in
`Gaussian.repaired`.
"""

from __future__ import annotations

import logging
import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser, subtracts_noise
from mmdgs.linalg.repair import SHARE
from mmdgs.noise import CLEAN, NoiseLevel, NoiseLevels
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator

logger = logging.getLogger("mmdgs")


FLOOR = 1e-6
"""Smallest variance allowed, relative to (sigma / alpha)^2: a thousandth of the noise's standard deviation."""


def floor_at(level: NoiseLevel, floor: float | None) -> tuple[float, float]:
    """`least` and `share` of linalg/repair.py for an estimator's `floor`: a number is relative to (sigma / alpha)^2.

    None is the rule: what the network's own negative values say of its error.
    """
    return (FLOOR * level.variance, SHARE) if floor is None else (floor * level.variance, 0.0)


STRONG_NOISE, ROUNDING = 10.0, 0.01
"""From this sigma / alpha on rounding is looked at, and the relative error of variances that is worth a warning."""
_looks = {"left": 10}
"""Posteriors of a process that are still looked at: looking makes a GPU wait."""


def watch_rounding(denoiser: Denoiser, variances: Tensor, level: NoiseLevel) -> None:
    """Warn once where variances (B, ...) are lost to rounding: differences of numbers that are nearly equal.

    Score, energy and noise networks give alpha J = 1 - (nearly 1) at strong noise, known to one rounding of 1.
    """
    if level.ratio < STRONG_NOISE or not _looks["left"] or not subtracts_noise(denoiser):
        return
    _looks["left"] -= 1
    mean = variances.mean().abs().item() / level.variance
    error = torch.finfo(variances.dtype).eps / max(mean, 1e-300)
    if error > ROUNDING:
        _looks["left"] = 0
        logger.warning(
            "at sigma / alpha %.3g rounding in %s is about %.2g of the posterior's variances: take the network and x_t "
            "in float64, or a network that predicts clean data (edm_denoiser, clean_denoiser)",
            level.ratio,
            str(variances.dtype).removeprefix("torch."),
            error,
        )


FIT_ROWS, FIT_NUMBERS = 4096, {"cpu": 1 << 18, "cuda": 1_536_000}
"""Rows per forward pass where an estimator is fitted on data, and numbers in them: on a GPU 500 images of CIFAR-10."""


@runtime_checkable
class Moments(Protocol):
    """A moments estimator: x_t (B, ...) -> Gaussian over x. The generator is used by those that draw probes.

    `denoiser` is its mean alone, without the cost of the covariance.
    """

    @property
    def denoiser(self) -> Denoiser: ...

    def __call__(self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None) -> Gaussian: ...


def require_batch(x_t: Tensor, level: NoiseLevel | NoiseLevels | None = None) -> None:
    """Refuse what is not a batch of floating-point vectors, and a level without noise."""
    if not isinstance(x_t, Tensor):
        raise ValueError(f"need a torch tensor, got {type(x_t).__name__}; use torch.as_tensor(...)")
    if level == CLEAN:
        raise ValueError("there is no denoising posterior at the clean level; give a NoiseLevel with sigma > 0")
    if x_t.ndim < 2 or 0 in x_t.shape:
        raise ValueError(f"x_t must be a batch (B, ...) with at least one number a row, got shape {tuple(x_t.shape)}")
    if not x_t.is_floating_point():
        raise ValueError(f"x_t must be a floating-point tensor, got {x_t.dtype}")


def fit_rows(x: Tensor) -> int:
    """How many rows of data x go through a network at a time, where an estimator is fitted on them."""
    return max(1, min(FIT_ROWS, FIT_NUMBERS.get(x.device.type, FIT_NUMBERS["cpu"]) // math.prod(x.shape[1:])))
