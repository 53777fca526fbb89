"""EDM-style networks (Karras et al., 2022): net(x, sigma) returns the denoised image, x = clean + sigma e.

They come as modules (their public files are pickles of code, which nothing here opens). At a level of another alpha
the same problem is rescaled: D(x_t; alpha, sigma) = net(x_t / alpha, sigma / alpha). Data lie in [-1, 1].
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.compiled import Pure
from mmdgs.denoisers import explain_mismatch
from mmdgs.errors import UsageError
from mmdgs.models.model import Model
from mmdgs.noise import AnyLevel, NoiseLevel
from mmdgs.schedules import edm

INTERVAL = (-1.0, 1.0)
STEPS, SIGMA_MIN, SIGMA_MAX = 18, 0.002, 80.0
"""The levels of EDM's own sampler (its table 1): steps, and the range where the network allows it."""


@dataclass(frozen=True)
class KarrasDenoiser:
    """D(x_t) = net(x_t / alpha, sigma / alpha), without class labels."""

    network: Callable[..., Tensor] = field(repr=False)
    labelled: bool  # whether None must be given in place of class labels

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        return self._at(x_t, level.alpha, level.sigma / level.alpha)

    def pure(self, level: AnyLevel) -> Pure | None:
        """For the fast path."""
        if not isinstance(self.network, nn.Module):
            return None
        return Pure(self._at, level.alpha, (level.alpha, level.sigma / level.alpha), self.network, self)

    def _at(self, x_t: Tensor, alpha: float | Tensor, ratio: float | Tensor) -> Tensor:
        sigma = torch.as_tensor(ratio, dtype=x_t.dtype, device=x_t.device)
        try:
            out = self.network(x_t / alpha, sigma, *[None] * self.labelled)
        except RuntimeError as error:
            explain_mismatch(self.network, x_t, error)
            raise
        if not isinstance(out, Tensor) or out.shape != x_t.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"net(x, sigma) must return the denoised image, shape {tuple(x_t.shape)}, got {got}")
        return out.to(x_t.dtype)


class _Function(nn.Module):
    """A plain function where a module is expected."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function


def from_edm(network: Callable[..., Tensor], *, size: int | None = None) -> Model:
    """The model of an EDM-style network, put into evaluation mode; its attributes say the range and the shape."""
    name = type(network).__name__ if isinstance(network, nn.Module) else getattr(network, "__name__", repr(network))
    labelled = _third_is_required(network, name)
    low, high = (float(getattr(network, key, default)) for key, default in (("sigma_min", 0), ("sigma_max", math.inf)))
    low, high = max(low, SIGMA_MIN), min(high, SIGMA_MAX)
    if not low < high:
        raise UsageError(f"{name} has sigma_min {low:g} and sigma_max {high:g}; the first must be the smaller")
    channels, side = getattr(network, "img_channels", None), size or getattr(network, "img_resolution", None)
    if channels is None or side is None:
        raise UsageError(
            f"{name} does not say the shape of its images: set its attributes img_channels and img_resolution "
            "(as EDM's networks have), or give size= for the second"
        )
    module = network.eval() if isinstance(network, nn.Module) else _Function(network)
    denoiser = KarrasDenoiser(network, labelled)
    return Model(denoiser, module, edm(STEPS, high, low), (channels, side, side), INTERVAL, name)


def _third_is_required(network: Callable[..., Any], name: str) -> bool:
    """Whether a network is called as net(x, sigma, labels) rather than net(x, sigma); one argument is refused."""
    try:
        found = inspect.signature(network.forward if isinstance(network, nn.Module) else network).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in found):
        raise UsageError(
            f"{name} is not called as net(x, sigma), so it is no EDM-style network; for others use "
            "mmdgs.score_denoiser, noise_denoiser, clean_denoiser ..."
        )
    return len(positional) > 2 and positional[2].default is inspect.Parameter.empty
