"""EDM-style networks (Karras et al., 2022): net(x, sigma) returns the denoised x = clean + sigma e.

They come as modules (their public files are pickles of code, which nothing here opens). At a level
of another alpha the same problem is rescaled: D(x_t; alpha, sigma) = net(x_t / alpha, sigma /
alpha). Data lie in [-1, 1].
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.denoisers import clean_denoiser
from mmdgs.errors import UsageError
from mmdgs.models.model import Model
from mmdgs.noise import AnyLevel
from mmdgs.schedules import edm

INTERVAL = (-1.0, 1.0)
STEPS, SIGMA_MIN, SIGMA_MAX = 18, 0.002, 80.0
"""The levels of EDM's own sampler (its table 1): steps, and the range if the network has it."""


class _AtLevels(nn.Module):
    """net(x_t / alpha, sigma / alpha), without class labels."""

    def __init__(self, network: Callable[..., Tensor], labelled: bool) -> None:
        super().__init__()
        self.network = network
        self.labelled = labelled  # whether None must be given in place of class labels

    def forward(self, x_t: Tensor, level: AnyLevel) -> Tensor:
        ratio = level.sigma / level.alpha
        sigma = torch.as_tensor(ratio, dtype=x_t.dtype, device=x_t.device)
        return self.network(x_t / level.alpha, sigma, *[None] * self.labelled)


def from_edm(network: Callable[..., Tensor], *, size: int | None = None) -> Model:
    """The model of an EDM-style network, put into evaluation mode; it says its range and shape."""
    name = getattr(network, "__name__", type(network).__name__)
    at_levels = _AtLevels(network, _third_is_required(network, name)).eval()
    low = max(float(getattr(network, "sigma_min", 0)), SIGMA_MIN)
    high = min(float(getattr(network, "sigma_max", math.inf)), SIGMA_MAX)
    if not low < high:
        raise UsageError(f"{name} must have sigma_min < sigma_max, got {low:g} and {high:g}")
    channels = getattr(network, "img_channels", None)
    side = size or getattr(network, "img_resolution", None)
    if channels is None or side is None:
        raise UsageError(
            f"{name} does not say the shape of its images: set its attributes img_channels and "
            "img_resolution (as EDM's networks have), or give size= for the second"
        )
    shape, levels = (channels, side, side), edm(STEPS, high, low)
    if isinstance(network, nn.Module):
        return Model(clean_denoiser(at_levels), network, levels, shape, INTERVAL, name)
    # Not as a module: the weights of a function are where the fast path cannot see them change.
    return Model(clean_denoiser(at_levels.forward), None, levels, shape, INTERVAL, name)


def _third_is_required(network: Callable[..., Any], name: str) -> bool:
    """Whether it is called as net(x, sigma, labels), not net(x, sigma); one argument is refused."""
    function = network.forward if isinstance(network, nn.Module) else network
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    positional = [p for p in arguments if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in arguments):
        raise UsageError(
            f"{name} is not called as net(x, sigma), so it is no EDM-style network; for others use "
            "mmdgs.score_denoiser, noise_denoiser, clean_denoiser ..."
        )
    return len(positional) > 2 and positional[2].default is inspect.Parameter.empty
