"""Models for tests: exact mixtures and functions as denoisers, a tiny network of many levels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from nets import lively
from torch import Tensor, nn

from mmdgs import schedules
from mmdgs.denoisers import Denoiser
from mmdgs.models import Model, ModelConfig, load
from mmdgs.models.fits import FitStore
from mmdgs.networks import preset
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.targets import GaussianMixture

SHAPE = (3, 2, 2)
LEVELS = schedules.geometric(6, 4.0, 0.1)


class Weights(nn.Module):
    """Something to have a digest and a device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def of_levels(
    levels: schedules.Levels,
    denoiser: Denoiser | None = None,
    interval: tuple[float, float] = (-1.0, 1.0),
    shape: tuple[int, ...] = SHAPE,
) -> Model:
    """A model with these levels; by default that of standard normal data."""
    return Model(denoiser or _normal, Weights(), levels, shape, interval, "a test")


def _normal(x_t: Tensor, level: NoiseLevel) -> Tensor:
    return level.alpha / (level.alpha**2 + level.sigma**2) * x_t


class InDouble:
    """A denoiser in double precision; `before` is called with each x_t, and is no part of what it
    computes.
    """

    def __init__(
        self, denoiser: Denoiser, before: Callable[[Tensor], object] = lambda x_t: None
    ) -> None:
        self.denoiser, self._before = denoiser, before

    def __call__(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        self._before(x_t)
        return self.denoiser(x_t.double(), level).to(x_t.dtype)


def exact(
    levels: schedules.Levels = LEVELS, before: Callable[[Tensor], object] = lambda x_t: None
) -> Model:
    """The exact denoiser of a mixture of two images, in float32."""
    means = torch.stack([torch.linspace(-0.9, 0.9, 12), torch.linspace(0.7, -0.4, 12)])
    return of_levels(
        levels, InDouble(GaussianMixture([0.6, 0.4], means.double(), 0.3).denoiser(), before)
    )


def many_level_model(shape: tuple[int, ...] = (1, 8, 8)) -> Model:
    """A tiny U-Net of five levels that answers in a millisecond, every weight drawn."""
    _, options = preset("unet-tiny")
    sigmas = tuple(level.sigma for level in schedules.geometric(5, 4.0, 0.1))
    config = ModelConfig(
        "unet", "clean", shape, {**options, "multipliers": [1], "conditional": True}, sigmas=sigmas
    )
    model = Model.build(config)
    lively(model.network)
    model.network.eval()
    return model


def any_size_model(interval: tuple[float, float] = (0.0, 1.0)) -> Model:
    """A tiny network of photographs of any size, every weight drawn."""
    sigmas = tuple(level.sigma for level in schedules.geometric(5, 4.0, 0.1))
    options = {"widths": [8, 8], "blocks": [1, 1], "conditional": True}
    shape = (3, None, None)
    config = ModelConfig("residual-unet", "edm", shape, options, sigmas=sigmas, interval=interval)
    model = Model.build(config)
    lively(model.network)
    model.network.eval()
    return model


def stand_in_model(folder: Path, shape: tuple[int, ...] = (3, 16, 16)) -> Model:
    """A tiny model in a folder with a flat spectrum: in examples it stands in for one that takes a
    minute.
    """
    many_level_model(shape).save_pretrained(folder)
    model = load(folder)
    spectrum = LevelTable.of({level: torch.ones(model.shape) for level in model.levels})
    FitStore(model, "spectral").write(folder / "spectral.safetensors", {"images": 2}, spectrum)
    return model
