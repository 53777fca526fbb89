"""The contract of moment estimators, (denoiser) -> (x_t, level) -> Gaussian, and what they share.

By Tweedie's formulas the mean of p(x | x_t) is the denoiser D and its covariance the denoiser's Jacobian,

    Cov[x | x_t] = (sigma^2 / alpha) dD/dx_t        (the paper's Theorem 2, for any alpha),

so every estimator needs one forward pass, shared by the mean and all products with the Jacobian. Products
are vector-Jacobian products, batched: fused attention has no forward-mode derivative. A network's Jacobian
need not be symmetric or positive: small values are lifted to a floor (linalg/repair.py), counted in
`Gaussian.repaired`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise, subtracts_noise
from mmdgs.errors import UsageError
from mmdgs.jacobians import Linearised, chunked
from mmdgs.linalg.lanczos import Product
from mmdgs.linalg.operators import raise_non_finite
from mmdgs.linalg.repair import SHARE
from mmdgs.memory import Batches
from mmdgs.moments.checks import check_denoiser
from mmdgs.noise import CLEAN, NoiseLevel, NoiseLevels
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator

logger = logging.getLogger("mmdgs")

T = TypeVar("T")


FLOOR = 1e-6
"""Smallest variance allowed, relative to (sigma / alpha)^2: a thousandth of the noise's standard deviation."""

FAR = 10.0
"""How many times as large as it can be the root mean square of an input is before it is refused."""


Floor = float | tuple[float, float] | None
"""An estimator's floor: a number is relative to (sigma / alpha)^2, and None is the rule of linalg/repair.py, by what
the network's own negative values say of its error. A pair is between the two: a number, and the share of that error."""


def least_and_share(floor: Floor) -> tuple[float, float]:
    """A floor as the pair that it stands for."""
    if isinstance(floor, tuple):
        return floor
    return (FLOOR, SHARE) if floor is None else (floor, 0.0)


def floor_at(level: NoiseLevel, floor: Floor) -> tuple[float, float]:
    """`least` and `share` of linalg/repair.py for an estimator's `floor` at a level."""
    least, share = least_and_share(floor)
    return least * level.variance, share


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


def estimator_and_denoiser(source: Moments | Denoiser) -> tuple[Moments | None, Denoiser]:
    """An estimator and its denoiser; of a denoiser, None and itself.

    Estimators are called with generator=. Denoisers may have a `denoiser` inside, too.
    """
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
            return replace(moments, moments=with_denoiser(inner, denoiser))  # type: ignore[type-var]
        return replace(moments, denoiser=denoiser)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise UsageError(f"{type(moments).__name__} has a denoiser of its own, and cannot take another") from error


def require_batch(x_t: Tensor, level: NoiseLevel | NoiseLevels | None = None) -> None:
    """Refuse what is not a batch of floating-point vectors, and a level without noise."""
    if not isinstance(x_t, Tensor):
        raise ValueError(f"need a torch tensor, got {type(x_t).__name__}; use torch.as_tensor(...)")
    if level is not None and not isinstance(level, NoiseLevel | NoiseLevels):
        raise ValueError(f"the level must be a mmdgs.NoiseLevel, such as mmdgs.NoiseLevel(sigma=0.25), got {level!r}")
    if level == CLEAN:
        raise ValueError("there is no denoising posterior at the clean level; give a NoiseLevel with sigma > 0")
    if x_t.ndim < 2 or 0 in x_t.shape:
        raise ValueError(f"x_t must be a batch (B, ...) with at least one number a row, got shape {tuple(x_t.shape)}")
    if not x_t.is_floating_point():
        raise ValueError(f"x_t must be a floating-point tensor, got {x_t.dtype}")


def require_input(x_t: Tensor, level: NoiseLevel | NoiseLevels, denoiser: object = None) -> None:
    """`require_batch`, and refuse numbers that are not finite, and pixels from 0 to 255 where a model has others.

    With x in an interval the root mean square of x_t = alpha x + sigma e is at most alpha max|x| + sigma, nearly. A
    chain that diverged lies far outside too, but on both sides of 0.
    """
    require_batch(x_t, level)
    norm = _norm(x_t)
    if not math.isfinite(norm):
        raise_non_finite("input x_t", x_t, advice="check the data that it was made from")
    interval = getattr(denoiser, "interval", None)
    if interval is None or x_t.ndim != 4 or not isinstance(level, NoiseLevel):
        return
    size, largest = norm / math.sqrt(x_t.numel()), level.alpha * max(map(abs, interval)) + level.sigma
    if size > FAR * largest and x_t.amin() > -FAR * level.sigma:
        low, high = interval
        raise ValueError(
            f"x_t lies far outside the model's data: its root mean square is {size:.3g}, and at {level} images in "
            f"[{low:g}, {high:g}] give at most {largest:.3g}. Scale pixels from 0 to 255 before noise is added: "
            "x = model.scaled(pixels / 255)"
        )


def _norm(x_t: Tensor) -> float:
    """The Euclidean norm of a batch; 0 inside torch.func.vmap, where no number can be looked at."""
    half = x_t.dtype in (torch.float16, torch.bfloat16)  # whose range a sum of squares leaves
    norm = torch.linalg.vector_norm(x_t.detach(), dtype=torch.float32 if half else None)
    try:
        return norm.item()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return 0.0


def mean_of(denoiser: Denoiser, x_t: Tensor, level: NoiseLevel) -> Tensor:
    """D(x_t) alone, without a graph; refused where it is not finite."""
    with torch.no_grad():
        mean = denoise(denoiser, x_t, level)
    check_mean(denoiser, x_t, level, mean)
    return mean


def check_mean(denoiser: Denoiser, x_t: Tensor, level: NoiseLevel, mean: Tensor, slopes: Tensor | None = None) -> None:
    """Refuse a mean that is not finite, and warn of one that is no denoiser's (checks.py).

    `slopes` is the diagonal of the denoiser's Jacobian, where it is known.
    """
    raise_non_finite("denoising mean", mean)
    check_denoiser(denoiser, x_t, level, mean, slopes)


def covariance_product(at: Linearised, x_t: Tensor, level: NoiseLevel) -> Product:
    """Products with the covariance at x_t, the symmetrised Jacobian's, in the network's precision: (n, B, d) each."""

    def product(v: Tensor) -> Tensor:
        image = chunked(at.symmetric, v.to(x_t.dtype).reshape(-1, *x_t.shape))
        return level.tweedie * image.reshape(v.shape).to(v.dtype)

    return product


def require_fitted(name: str, covariance: str, variances: object) -> None:
    """Refuse an estimator without the variances that are fitted for it, and say how to fit them."""
    if not hasattr(variances, "__getitem__"):
        got = "none" if variances is None else type(variances).__name__
        raise TypeError(
            f"{name} needs its variances, a LevelTable, and got {got}. Fit them on clean data x (N, ...): "
            f"{name}.fit(denoiser, x, levels, generator=torch.Generator().manual_seed(0)). "
            f"Those that are kept with a model are in model.posterior({covariance!r})"
        )


_fitting: dict[tuple[torch.device, torch.Size], Batches] = {}
"""How many rows of a shape are fitted on at a time: what did not fit in memory once is not tried at every level."""


def fitted_in_parts(work: Callable[[Tensor, Tensor], T], x: Tensor, x_t: Tensor) -> Iterator[T]:
    """work(x, x_t) for parts of the rows of data x and noisy data x_t, as many at a time as fit in memory."""
    rows = max(1, min(FIT_ROWS, FIT_NUMBERS.get(x.device.type, FIT_NUMBERS["cpu"]) // math.prod(x.shape[1:])))
    batches = _fitting.setdefault((x.device, x.shape[1:]), Batches(rows, "examples to fit on"))
    return batches.over(len(x), lambda first, last: work(x[first:last], x_t[first:last]))
