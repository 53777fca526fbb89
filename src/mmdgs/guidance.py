"""Autoguidance (Karras et al., 2024): a denoiser that is led away from a worse one.

    D_w = G + w (D - G),      w > 1

The worse model G, less trained or smaller, errs as D does, and more: on from G past D a part of D's
error is taken off. D_w is the mean of no posterior, so covariances are those of D.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise, fast_mean
from mmdgs.noise import NoiseLevel


@dataclass(frozen=True)
class GuidedDenoiser:
    """guide + weight (denoiser - guide): the denoiser itself with weight 1."""

    denoiser: Denoiser
    guide: Denoiser
    weight: float

    def __post_init__(self) -> None:
        if not 1 <= self.weight < float("inf"):
            raise ValueError(f"weight must be at least 1 and finite, got {self.weight}")

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        mean = denoise(self.guide, x_t, level)
        return mean.lerp(fast_mean(self.denoiser, x_t, level), self.weight)
