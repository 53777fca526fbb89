"""Measurements y = A x + noise, checked; and the noise where nobody knows it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.operators.contract import Operator
from mmdgs.operators.noise_level import MEDIAN_OF_NORMAL, noise_of_patches

LEAST_BLOCKS = 32
"""Differences that an estimate of the noise needs: its relative standard error is then about 0.2."""


LARGEST_NOISE = 5.0
"""A standard deviation for values in [0, 1] from which on nothing of them is left: 5 is a common one for 0 to 255."""


def measured(y: Tensor, operator: Operator) -> Tensor:
    """Measurements (B, *out_shape), which must be finite; what says nothing, such as a masked pixel, is set to 0."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        raise UsageError(f"measurements are a floating-point tensor, got {getattr(y, 'dtype', type(y).__name__)}")
    if y.shape[1:] != operator.out_shape or len(y) == 0:
        expected = ", ".join(map(str, operator.out_shape))
        raise UsageError(f"measurements by {operator!r} have shape (B, {expected}), got {tuple(y.shape)}")
    found = operator.known(y)
    if not torch.isfinite(found).all():
        rows = (~torch.isfinite(found)).flatten(1).any(1).nonzero().flatten().tolist()
        raise UsageError(f"the measurements are not finite in row {', '.join(map(str, rows[:8]))}; check the data")
    return found


def check_unit_noise(noise: float, scale: float = 1.0) -> None:
    """Refuse a noise that is too large for values in [0, 1], as one for values from 0 to 255 is.

    `scale` is the largest that a measurement of such values can be.
    """
    if noise >= LARGEST_NOISE * scale:
        raise UsageError(
            f"the noise has a standard deviation of {noise:g}, and values are in [0, 1]; did you mean {noise:g}/255 = "
            f"{noise / 255:.2g}?"
        )


def unit_noise(noise: float | Tensor, operator: Operator, y: Tensor) -> Tensor:
    """The standard deviation of the noise in measurements y of values in [0, 1], of as many dimensions; checked."""
    tau = noise_variances(noise, operator, y).sqrt()
    check_unit_noise(tau.max().item(), max(1.0, operator(y.new_ones(1, *operator.shape)).abs().max().item()))
    return tau


def noise_variances(noise: float | Tensor, operator: Operator, like: Tensor) -> Tensor:
    """tau^2 for measurements `like` (B, *out_shape), of as many dimensions, and of size 1 where it is the same.

    `noise` is the standard deviation tau: a number, one a row (B,), one a measurement (*out_shape), or both.
    """
    tau = torch.as_tensor(noise, dtype=like.dtype, device=like.device)
    dims = len(operator.out_shape)
    if tau.numel() == 1:
        tau = tau.reshape(1, *[1] * dims)
    elif tau.shape == like.shape[:1]:
        tau = tau.reshape(-1, *[1] * dims)
    elif tau.shape == operator.out_shape:
        tau = tau[None]
    if tau.ndim != dims + 1 or any(n not in (1, whole) for n, whole in zip(tau.shape, like.shape, strict=True)):
        raise UsageError(
            f"the noise must be a number, one a row ({len(like)},) or one a measurement {tuple(operator.out_shape)}, "
            f"got shape {tuple(tau.shape)}"
        )
    if not ((tau > 0) & torch.isfinite(tau)).all():
        raise UsageError(
            f"the standard deviation of the noise must be positive and finite, got {tau.min().item():g}; for "
            "measurements without noise give a small one, such as 0.001"
        )
    return tau.square()


ESTIMATE = "estimate"
"""In the place of a noise's standard deviation: to be estimated from what was measured."""


def estimated_noise(y: Tensor, operator: Operator) -> Tensor:
    """The standard deviation of the noise in images y (B, C, H, W), one a row: (B,).

    By patches that are measured whole (noise_level.py). Where there are too few of them, the median of
    |a - b - c + d| / 2 over blocks of 2 x 2 pixels (a b; c d), divided by that of a standard normal (Donoho and
    Johnstone, 1994): smooth images cancel, noise does not. Fine detail makes that too large.
    """
    if len(operator.out_shape) != 3 or min(operator.out_shape[1:]) < 2:
        raise UsageError(
            f"the noise can be estimated from images (channels, height, width) alone, and {operator!r} measures "
            f"{tuple(operator.out_shape)}: give the noise as a number"
        )
    whole = operator.known(torch.full_like(y[:1], math.nan)).isnan()
    a, b, c, d = (whole[..., i:, j:][..., : whole.shape[-2] - 1, : whole.shape[-1] - 1] for i in (0, 1) for j in (0, 1))
    blocks = a & b & c & d
    if blocks.sum() < LEAST_BLOCKS:
        raise UsageError(
            f"only {int(blocks.sum())} blocks of 2 x 2 pixels are measured whole, and an estimate of the noise needs "
            f"{LEAST_BLOCKS}: give the noise as a number"
        )
    difference = (y[..., :-1, :-1] - y[..., :-1, 1:] - y[..., 1:, :-1] + y[..., 1:, 1:]).abs() / 2
    found = difference[blocks.expand_as(difference)].reshape(len(y), -1).double().median(1).values / MEDIAN_OF_NORMAL
    by_patches = [noise_of_patches(one, whole[0]) for one in y]
    found = found.new_tensor([own if one is None else one for one, own in zip(by_patches, found.tolist(), strict=True)])
    if not (found > torch.finfo(torch.float32).eps * y.abs().max()).all():
        raise UsageError("the measurements hold no noise that could be estimated; give a small one, such as 0.01")
    return found.to(y.dtype)
