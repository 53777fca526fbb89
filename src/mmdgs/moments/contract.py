"""The contract of moment estimators, (denoiser) -> (x_t, level) -> Gaussian, and what they share.

By Tweedie's formulas the mean of p(x | x_t) is the denoiser D, and

    Cov[x | x_t] = (sigma^2 / alpha) dD/dx_t        (the paper's Theorem 2, for any alpha),

so an estimator needs one forward pass, shared by the mean and all products with the Jacobian. A
network's Jacobian need not be symmetric or positive: small values are lifted to a floor
(linalg/repair.py), counted in `Gaussian.repaired`.
"""

from __future__ import annotations

import inspect
import logging
import math
from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise, subtracts_noise
from mmdgs.errors import UsageError
from mmdgs.linalg.operators import raise_non_finite
from mmdgs.linalg.repair import SHARE
from mmdgs.moments.checks import check_denoiser
from mmdgs.noise import CLEAN, AnyLevel, NoiseLevel, NoiseLevels
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator

logger = logging.getLogger("mmdgs")

FLOOR = 1e-6
"""Smallest variance, in units of (sigma / alpha)^2: a thousandth of the noise's deviation."""
FAR = 10.0
"""Refuse inputs whose root mean square exceeds this many times the possible maximum."""
Floor = float | tuple[float, float] | None
"""An estimator's floor: a number in units of (sigma / alpha)^2, or None for the rule of
linalg/repair.py, or a pair between the two: a number, and the share of the network's own error."""
STRONG_NOISE, ROUNDING = 10.0, 0.01
"""The sigma / alpha from which rounding is watched, and the relative error that is warned of."""
_looks = {"left": 10}  # posteriors of a process that are still watched: it makes a GPU wait


@runtime_checkable
class Moments(Protocol):
    """A moments estimator: x_t (B, ...) -> Gaussian over x; some draw probes by the generator.

    `denoiser` is its mean alone, without the cost of the covariance.
    """

    @property
    def denoiser(self) -> Denoiser: ...

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian: ...


def estimator_and_denoiser(source: Moments | Denoiser) -> tuple[Moments | None, Denoiser]:
    """An estimator and its denoiser; of a denoiser, None and itself."""
    # Denoisers may hold a `denoiser`, too; only estimators are called with generator=.
    if isinstance(source, Moments) and "generator" in inspect.signature(source).parameters:
        return source, source.denoiser
    return None, cast(Denoiser, source)


def with_denoiser(moments: Moments, denoiser: Denoiser) -> Moments:
    """The same estimator, with the same fits, of another denoiser."""
    if moments.denoiser is denoiser:
        return moments
    inner = getattr(moments, "moments", None)
    try:
        if inner is not None:
            inner = with_denoiser(inner, denoiser)
            return replace(moments, moments=inner)  # type: ignore[type-var]
        return replace(moments, denoiser=denoiser)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        name = type(moments).__name__
        raise UsageError(f"{name} has a denoiser of its own, and cannot take another") from error


def least_and_share(floor: Floor) -> tuple[float, float]:
    """A floor as the pair that it stands for."""
    if isinstance(floor, tuple):
        return floor
    return (FLOOR, SHARE) if floor is None else (floor, 0.0)


def floor_at(level: NoiseLevel, floor: Floor) -> tuple[float, float]:
    """`least` and `share` of linalg/repair.py for an estimator's `floor` at a level."""
    least, share = least_and_share(floor)
    return least * level.variance, share


def watch_rounding(denoiser: Denoiser, variances: Tensor, level: NoiseLevel) -> None:
    """Warn once where variances (B, ...) are lost to rounding: alpha J = 1 - (nearly 1)."""
    if level.ratio < STRONG_NOISE or not _looks["left"] or not subtracts_noise(denoiser):
        return
    _looks["left"] -= 1
    mean = variances.mean().abs().item() / level.variance
    error = torch.finfo(variances.dtype).eps / max(mean, 1e-300)
    if error > ROUNDING:
        _looks["left"] = 0
        logger.warning(
            "at sigma / alpha %.3g rounding in %s is about %.2g of the posterior's variances: take "
            "the network and x_t in float64, or a network that predicts clean data (edm_denoiser, "
            "clean_denoiser)",
            *(level.ratio, str(variances.dtype).removeprefix("torch."), error),
        )


def require_batch(x_t: Tensor, level: AnyLevel | None = None) -> None:
    """Refuse what is not a batch of floating-point vectors, and a level without noise."""
    if not isinstance(x_t, Tensor):
        raise ValueError(f"need a torch tensor, got {type(x_t).__name__}; use torch.as_tensor(...)")
    if level is not None and not isinstance(level, NoiseLevel | NoiseLevels):
        raise ValueError(f"the level must be a mmdgs.NoiseLevel, as NoiseLevel(0.2), got {level!r}")
    if level == CLEAN:
        raise ValueError("the clean level has no denoising posterior; give a level with sigma > 0")
    if x_t.ndim < 2 or 0 in x_t.shape:
        raise ValueError(f"x_t must be a batch (B, ...), not empty, got shape {tuple(x_t.shape)}")
    if not x_t.is_floating_point():
        raise ValueError(f"x_t must be a floating-point tensor, got {x_t.dtype}")


def require_input(x_t: Tensor, level: AnyLevel, denoiser: object = None) -> None:
    """`require_batch`, and refuse non-finite numbers, and pixels from 0 to 255 for other models.

    With x in an interval the root mean square of x_t is at most alpha max|x| + sigma, nearly. A
    chain that diverged lies far outside too, but on both sides of 0.
    """
    require_batch(x_t, level)
    half = x_t.dtype in (torch.float16, torch.bfloat16)  # whose range a sum of squares leaves
    norm = torch.linalg.vector_norm(x_t.detach(), dtype=torch.float32 if half else None)
    try:
        size = norm.item()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # inside torch.func.vmap no number can be looked at
        return
    if not math.isfinite(size):
        raise_non_finite("input x_t", x_t, advice="check the data that it was made from")
    interval = getattr(denoiser, "interval", None)
    if interval is None or x_t.ndim < 4 or not isinstance(level, NoiseLevel):
        return
    size, (low, high) = size / math.sqrt(x_t.numel()), interval
    largest = level.alpha * max(abs(low), abs(high)) + level.sigma
    if size > FAR * largest and x_t.amin() > -FAR * level.sigma:
        raise ValueError(
            f"x_t lies far outside the model's data: its root mean square is {size:.3g}, and at "
            f"{level} images in [{low:g}, {high:g}] give at most {largest:.3g}. Scale pixels from "
            "0 to 255 before noise is added: x = model.scaled(pixels / 255)"
        )


def mean_of(denoiser: Denoiser, x_t: Tensor, level: NoiseLevel) -> Tensor:
    """D(x_t) alone, without a graph; refused where it is not finite."""
    with torch.no_grad():
        mean = denoise(denoiser, x_t, level)
    check_mean(denoiser, x_t, level, mean)
    return mean


def check_mean(
    denoiser: Denoiser, x_t: Tensor, level: NoiseLevel, mean: Tensor, slopes: Tensor | None = None
) -> None:
    """Refuse a mean that is not finite, and warn of one that is no denoiser's (checks.py)."""
    raise_non_finite("denoising mean", mean)
    check_denoiser(denoiser, x_t, level, mean, slopes)
