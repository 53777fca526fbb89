"""Rows of a batch at different noise levels, for denoisers that take one level at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.noise import NoiseLevel


def by_level(
    function: Callable[[Tensor, NoiseLevel], Tensor],
    x: Tensor,
    alpha: Tensor | float,
    sigma: Tensor | float,
) -> Tensor:
    """function(rows, level) for x (B, ...), where alpha and sigma are one number, or one a row."""
    levels = torch.stack([_numbers("alpha", alpha, x), _numbers("sigma", sigma, x)], 1)
    distinct, of_row = levels.unique(dim=0, return_inverse=True)
    pairs = [NoiseLevel(alpha=a, sigma=s) for a, s in distinct.tolist()]
    if len(pairs) == 1:
        return function(x, pairs[0])
    places = [(of_row == i).nonzero().flatten() for i in range(len(pairs))]
    parts = zip(places, pairs, strict=True)
    values = torch.cat([function(x[rows.to(x.device)], level) for rows, level in parts])
    return values[torch.cat(places).argsort().to(x.device)]


def _numbers(name: str, values: Tensor | float, x: Tensor) -> Tensor:
    """One number a row, on the CPU, in float64."""
    numbers = torch.as_tensor(values).detach().double().cpu().flatten()
    if len(numbers) not in (1, len(x)):
        got = f"one for each of {len(x)} rows, got {len(numbers)} of them"
        raise UsageError(f"{name} must be one number, or {got}")
    return numbers.expand(len(x))
