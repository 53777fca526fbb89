"""Measurements y = A x + noise, checked; and the noise of an image, from its patches.

An estimate must not count detail as noise:

colour  The eigenvalues of the covariance of 3 x 3 patches, all channels together (Chen, Zhu and
        Heng, 2015): images lie near few dimensions and noise lies in all, so the largest
        eigenvalues are left out one by one until the mean of the rest is not above their median.
grey    The median of the fine coefficients (DCT) of the smoothest 4 x 4 patches, by their coarse
        coefficients: grey patches have few dimensions and are all image, and the first estimator
        is too high there. `docs/results/image.md` has the errors of both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.errors import UsageError
from mmdgs.operators.contract import Operator

ESTIMATE = "estimate"
"""In the place of a noise's standard deviation: to be estimated from what was measured."""
LARGEST_NOISE = 5.0
"""A noise for values in [0, 1] that leaves nothing of them: 5 is a common one for 0 to 255."""
LEAST_BLOCKS = 32
"""Differences that an estimate of the noise needs: its relative standard error is then 0.2."""
MEDIAN_OF_NORMAL = 0.6744897501960817
"""The median of |z| for a standard normal z."""
COLOUR_SIDE, GREY_SIDE = 3, 4
SMOOTHEST = 0.3
"""The share of grey patches that counts."""
PATCHES_A_DIMENSION, LEAST_PATCHES = 10, 64
MOST_PATCHES = 1 << 19
"""Above which only some are taken, evenly: those of 16 million pixels would take 10 GB."""


def measured(y: Tensor, operator: Operator) -> Tensor:
    """Finite measurements (B, *out_shape), with what says nothing (a masked pixel) set to 0."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        kind = getattr(y, "dtype", type(y).__name__)
        raise UsageError(f"measurements are a floating-point tensor, got {kind}")
    if y.shape[1:] != operator.out_shape or len(y) == 0:
        raise UsageError(f"measurements by {operator!r} cannot have shape {tuple(y.shape)}")
    known = operator.known(y)
    if not torch.isfinite(known).all():
        rows = (~torch.isfinite(known)).flatten(1).any(1).nonzero().flatten().tolist()[:8]
        where = ", ".join(map(str, rows))
        raise UsageError(f"the measurements are not finite in row {where}; check the data")
    return known


def check_unit_noise(noise: float, scale: float = 1.0) -> None:
    """Refuse a noise that is too large for values in [0, 1], as one for values from 0 to 255 is.

    `scale` is the largest that a measurement of such values can be.
    """
    if noise >= LARGEST_NOISE * scale:
        raise UsageError(
            f"the noise has a standard deviation of {noise:g}, and values are in [0, 1]; "
            f"did you mean {noise:g}/255 = {noise / 255:.2g}?"
        )


def unit_noise(noise: float | Tensor, operator: Operator, y: Tensor) -> Tensor:
    """The standard deviation of the noise in measurements y of values in [0, 1], checked."""
    tau = noise_variances(noise, operator, y).sqrt()
    largest = operator(y.new_ones(1, *operator.shape)).abs().max().item()
    check_unit_noise(tau.max().item(), max(1.0, largest))
    return tau


def noise_variances(noise: float | Tensor, operator: Operator, like: Tensor) -> Tensor:
    """tau^2 for measurements `like` (B, *out_shape), of as many dimensions, 1 where it is the same.

    `noise` is the standard deviation tau: a number, one a row (B,), one a measurement (*out_shape),
    or both.
    """
    tau = torch.as_tensor(noise, dtype=like.dtype, device=like.device)
    dims = len(operator.out_shape)
    if tau.numel() == 1 or tau.shape == like.shape[:1]:
        tau = tau.reshape(-1, *[1] * dims)
    elif tau.shape == operator.out_shape:
        tau = tau[None]
    if tau.ndim != like.ndim or any(
        n not in (1, whole) for n, whole in zip(tau.shape, like.shape, strict=True)
    ):
        raise UsageError(
            f"the noise must be a number, one a row ({len(like)},) or one a measurement "
            f"{tuple(operator.out_shape)}, got shape {tuple(tau.shape)}"
        )
    if not ((tau > 0) & torch.isfinite(tau)).all():
        raise UsageError(
            f"the standard deviation of the noise must be positive and finite, got {tau.min():g}; "
            "for measurements without noise give a small one, such as 0.001"
        )
    return tau.square()


def estimated_noise(y: Tensor, operator: Operator) -> Tensor:
    """The standard deviation of the noise in images y (B, C, H, W), one a row: (B,).

    By patches that are measured whole. Where there are too few of them, the median of |a - b - c +
    d| / 2 over blocks of 2 x 2 pixels (a b; c d), divided by that of a standard normal (Donoho and
    Johnstone, 1994): smooth images cancel, noise does not. Fine detail makes that too large.
    """
    if len(operator.out_shape) != 3 or min(operator.out_shape[1:]) < 2:
        raise UsageError(
            f"the noise can be estimated from images (channels, height, width) alone, and "
            f"{operator!r} measures others: give the noise as a number"
        )
    whole = operator.known(torch.full_like(y[:1], math.nan)).isnan()
    blocks = whole[..., :-1, :-1] & whole[..., :-1, 1:] & whole[..., 1:, :-1] & whole[..., 1:, 1:]
    if blocks.sum() < LEAST_BLOCKS:
        raise UsageError(
            f"only {int(blocks.sum())} blocks of 2 x 2 pixels are measured whole, and an estimate "
            f"of the noise needs {LEAST_BLOCKS}: give the noise as a number"
        )
    difference = (y[..., :-1, :-1] - y[..., :-1, 1:] - y[..., 1:, :-1] + y[..., 1:, 1:]).abs() / 2
    medians = difference[blocks.expand_as(difference)].reshape(len(y), -1).double().median(1).values
    by_blocks = (medians / MEDIAN_OF_NORMAL).tolist()
    by_patches = [_of_patches(image, whole[0]) for image in y]
    noise = medians.new_tensor(
        [b if p is None else p for b, p in zip(by_blocks, by_patches, strict=True)]
    )
    if not (noise > torch.finfo(torch.float32).eps * y.abs().max()).all():
        raise UsageError("no noise can be estimated from the measurements; give one, such as 0.01")
    return noise.to(y.dtype)


def _of_patches(y: Tensor, whole: Tensor) -> float | None:
    """The noise of an image (C, H, W), where `whole` says which pixels count; None: too few."""
    if len(y) > 1 and bool((y == y[:1]).all()):  # a grey image in colour
        y, whole = y[:1], whole[:1]
    if len(y) > 1:
        patches = patches_of(y, whole, COLOUR_SIDE)
        if patches is not None and len(patches) >= PATCHES_A_DIMENSION * patches[0].numel():
            return _smallest_directions(patches.flatten(1))
    patches = patches_of(y, whole, GREY_SIDE)
    return None if patches is None or len(patches) < LEAST_PATCHES else _smoothest(patches)


def patches_of(y: Tensor, whole: Tensor, side: int) -> Tensor | None:
    """Patches (n, C, side, side) all of whose pixels count, in float64."""
    if min(y.shape[1:]) < side:
        return None
    stride = math.ceil(math.sqrt(whole[0].numel() / MOST_PATCHES))
    cut = functional.unfold(y[None].double(), side, stride=stride)[0].T
    kept = functional.unfold(whole[None].double(), side, stride=stride)[0].T.min(1).values > 0
    return cut[kept].reshape(-1, len(y), side, side)


def _smallest_directions(patches: Tensor) -> float:
    centred = patches - patches.mean(0)
    values = torch.linalg.eigvalsh(centred.T @ centred / len(centred)).flip(0)
    for first in range(len(values)):
        rest = values[first:]
        if rest.mean() <= rest.median():
            break
    return rest.mean().clamp(min=0).sqrt().item()


def _smoothest(patches: Tensor) -> float:
    _, coarse, fine = by_frequency(patches, GREY_SIDE)
    count = max(LEAST_PATCHES // 4, int(SMOOTHEST * len(patches)))
    return fine[coarse.argsort()[:count]].abs().median().item() / MEDIAN_OF_NORMAL


def by_frequency(patches: Tensor, finest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of grey patches (n, 1, side, side): means (n,), the power (n,) of their coarse waves, and the
    coefficients (n, k) of those that have a frequency of `finest` or more.
    """
    side = patches.shape[-1]
    places = torch.arange(side, dtype=torch.float64, device=patches.device)
    basis = (torch.pi / side * (places + 0.5) * places[:, None]).cos() * (2 / side) ** 0.5
    basis[0] *= 0.5**0.5
    coefficients = (basis @ patches @ basis.T)[:, 0]
    frequency = places[:, None] + places
    coarse = coefficients[:, (frequency > 0) & (frequency < side - 1)].square().sum(1)
    return coefficients[:, 0, 0] / side, coarse, coefficients[:, frequency >= finest]
