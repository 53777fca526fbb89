"""Models of other shapes made of a model of images: grey and complex images, and volumes.

    grey     D(z) = the mean of the colours of D'((z, z, z), sqrt(3) sigma)
    complex  D(x) = D' of the real and of the imaginary part, each by itself
    volume   D(x) = the mean of D' over the slices along each of the three sides

The mean of three noisy colours knows as much of a grey image as one measurement with a third of the
variance. A grey image with its noise that is repeated in three colours, with noise taken for
independent, would count thrice: on photographs the error of the mean was 2 to 7 dB larger.

The spectrum of errors of grey and complex images is that of the model's own images: of the colours'
sum over three, and of parts. One of volumes is fitted on volumes,
`SpectralMoments.fit(model, x, levels)`: by it errors at one slice go with those of the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.denoisers import Denoiser, Derived, fast_mean
from mmdgs.errors import UsageError
from mmdgs.models.fits import FitStore
from mmdgs.models.model import Model
from mmdgs.models.weights import ISOTROPIC, SPECTRAL
from mmdgs.noise import LevelTable

AT_ONCE = 1 << 21
"""Pixels of slices that go through a network together: about 4 GB for `photo`."""


@dataclass(frozen=True)
class Grey(Derived):
    """(B, 1, H, W), by a denoiser of so many channels."""

    channels: int

    def __call__(self, x_t: Tensor, level: Any, /) -> Tensor:
        wider = replace(level, sigma=math.sqrt(self.channels) * level.sigma)
        coloured = x_t.expand(-1, self.channels, -1, -1)
        return fast_mean(self.denoiser, coloured, wider).mean(1, keepdim=True)


@dataclass(frozen=True)
class Parts(Derived):
    """(B, 2, H, W), by a grey denoiser of values in [low, high]; these parts lie in [-1, 1]."""

    low: float
    high: float

    def __call__(self, x_t: Tensor, level: Any, /) -> Tensor:
        scale, shift = (self.high - self.low) / 2, (self.high + self.low) / 2
        parts = (scale * x_t + shift * level.alpha).flatten(0, 1)[:, None]
        narrower = replace(level, sigma=scale * level.sigma)
        return (fast_mean(self.denoiser, parts, narrower).reshape_as(x_t) - shift) / scale


@dataclass(frozen=True)
class Slices(Derived):
    """(B, C, D, H, W), by a denoiser of images (C, height, width): the mean over three ways."""

    def __call__(self, x_t: Tensor, level: Any, /) -> Tensor:
        means = []
        for side in (2, 3, 4):
            slices = x_t.movedim(side, 1)
            images = slices.flatten(0, 1)
            rows = max(1, AT_ONCE // images[0, 0].numel())
            mean = torch.cat([fast_mean(self.denoiser, part, level) for part in images.split(rows)])
            means.append(mean.reshape(slices.shape).movedim(1, side))
        return torch.stack(means).mean(0)


def grey_model(model: Model) -> Model:
    """A model of grey images (1, H, W) made of one of colour images."""
    channels = model.shape[0]
    return _made(
        model, "grey", lambda denoiser: Grey(denoiser, channels), (1, *model.shape[1:]),
        1 / math.sqrt(channels), model.interval, lambda v: v[:, :1] / channels,
    )  # fmt: skip


def complex_model(model: Model) -> Model:
    """A model of complex images (2, H, W), real and imaginary part in [-1, 1], of one of images.

    The parts are taken for independent, which a global phase of the image changes. The model's
    values are its own: `restore` then takes measurements of x as it is.
    """
    grey = model if model.shape[0] == 1 else grey_model(model)
    low, high = grey.interval
    scale = 2 / (high - low)
    return _made(
        grey, "complex", lambda denoiser: Parts(denoiser, low, high), (2, *grey.shape[1:]),
        scale, (0.0, 1.0), lambda v: scale**2 * v.expand(-1, 2, -1, -1),
    )  # fmt: skip


def volume_model(model: Model) -> Model:
    """A model of volumes (C, D, H, W) made of one of images, which sees the slices each way."""
    channels, height, width = model.shape
    if height != width:
        raise UsageError(f"{model.source} takes images of {width} x {height}, and slices differ")
    return _made(model, "volume", Slices, (channels, height, height, height), 1.0, model.interval)


def _made(
    model: Model,
    kind: str,
    denoiser: Callable[[Denoiser], Denoiser],
    shape: tuple[int | None, ...],
    scale: float,
    interval: tuple[float, float],
    spectrum: Callable[[Tensor], Tensor] | None = None,
) -> Model:
    """A model with levels of `scale` times the sigma; its digest, and so its fits, are its own.

    Without any it inherits what is fitted for the model, where `spectrum` says how variances carry
    over; calibrations have no units.
    """
    network = nn.ModuleDict({kind: model.network})
    network.__dict__["smallest"] = getattr(model.network, "smallest", 1)
    levels = [replace(level, sigma=scale * level.sigma) for level in model.levels]
    source = f"{kind} of {model.source}"
    made = Model(denoiser(model), network, levels, shape, interval, source)

    def inherited(fit: str) -> LevelTable | None:
        variances = fit in (SPECTRAL, ISOTROPIC)
        table = spectrum and FitStore(model, SPECTRAL if variances else fit).best_of()
        if spectrum is None or table is None:
            return None
        values = spectrum(table.values) if variances else table.values
        return LevelTable(
            scale * table.ratios, values.flatten(1).mean(1) if fit == ISOTROPIC else values
        )

    made.inherited_fit = inherited
    return made
