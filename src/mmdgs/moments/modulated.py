"""A covariance that knows the image, from a head: a spectrum whose strength changes from place to place.

    C = M R M        (linalg/modulated.py)        log s and log v = head((x_t - alpha D) / sigma, D / d; level)

d is the data's standard deviation. The head is trained by likelihood, -log N(x; D(x_t), C), beside a denoiser that
stays as it is (`mmdgs train --loss covariance`). A posterior then takes one pass of each, and no products with a
Jacobian.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import spend
from mmdgs.denoisers import Denoiser, Network, require_denoiser
from mmdgs.linalg.modulated import Modulated
from mmdgs.linalg.operators import raise_non_finite
from mmdgs.linalg.spectral import Spectral
from mmdgs.moments.contract import mean_of, require_input
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator


@dataclass(frozen=True)
class SpectralHead:
    """A network with twice the data's channels in and out (networks/spectrum_head.py): (x_t, D(x_t), level) -> C."""

    network: Network
    data_std: float = 1.0

    def __call__(self, x_t: Tensor, mean: Tensor, level: NoiseLevel | NoiseLevels, /) -> Modulated:
        noise = (x_t - level.alpha * mean) / level.sigma
        out = self.network(torch.cat([noise, mean / self.data_std], dim=1), level).to(x_t.dtype)
        if out.shape[1] != 2 * x_t.shape[1] or out.shape[2:] != x_t.shape[2:]:
            raise ValueError(
                f"the head's network must return twice the channels of {tuple(x_t.shape)}, got {tuple(out.shape)}"
            )
        scales, variances = out.chunk(2, dim=1)
        return Modulated(scales, Spectral(variances.exp()))


@dataclass(frozen=True)
class ModulatedMoments:
    """The covariance by a head: one pass of the denoiser and one of the head, which counts as much."""

    denoiser: Denoiser
    head: SpectralHead

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        mean = mean_of(self.denoiser, x_t, level)
        spend(forwards=1)
        with torch.no_grad():
            cov = self.head(x_t, mean, level)
        raise_non_finite("denoising covariance", cov.log_scales)
        return Gaussian(mean, cov)
