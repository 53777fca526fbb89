"""Rows of a batch that are at different noise levels, for denoisers that take one level at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.noise import NoiseLevel


def by_level(
    function: Callable[[Tensor, NoiseLevel], Tensor], x: Tensor, alpha: Tensor | float, sigma: Tensor | float
) -> Tensor:
    """function(rows, level) for a batch x (B, ...), where alpha and sigma are one number, or one a row (B, ...)."""
    levels = torch.stack([_numbers("alpha", alpha, x), _numbers("sigma", sigma, x)], 1)
    found, of_row = levels.unique(dim=0, return_inverse=True)
    if len(found) == 1:
        return function(x, _level(found[0]))
    places = [(of_row == i).nonzero().flatten() for i in range(len(found))]
    made = torch.cat([function(x[rows.to(x.device)], _level(one)) for one, rows in zip(found, places, strict=True)])
    return made[torch.cat(places).argsort().to(x.device)]


def _level(numbers: Tensor) -> NoiseLevel:
    alpha, sigma = numbers.tolist()
    return NoiseLevel(alpha=alpha, sigma=sigma)


def _numbers(name: str, values: Tensor | float, x: Tensor) -> Tensor:
    """One number a row, or one for all where both are one; on the CPU, in float64."""
    found = torch.as_tensor(values).detach().double().cpu().flatten()
    if len(found) not in (1, len(x)):
        raise UsageError(f"{name} must be one number, or one for each of {len(x)} rows, got {len(found)} of them")
    return found.expand(len(x)) if len(found) == 1 else found
