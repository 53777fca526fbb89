"""Covariances that a network predicts, in one pass beside the denoiser's or the same.

    learned      a network of mean and log std, trained by KL (Bengio et al., 2013; losses.kl)
    modulated    C = M R M, a spectrum whose strength changes with the place (linalg/spectral.py)

                     log s, log v = head((x_t - alpha D) / sigma, D / d; level)

d is the data's standard deviation. The head of the second is trained by likelihood, -log N(x;
D(x_t), C), beside a denoiser that stays as it is (`mmdgs train --loss covariance`). Heads of a
diagonal are in ocm.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmdgs.cost import spend
from mmdgs.denoisers import Denoiser, Network, require_denoiser, takes_level
from mmdgs.errors import require_shape
from mmdgs.linalg.operators import Diagonal, raise_non_finite
from mmdgs.linalg.spectral import Modulated, Spectral
from mmdgs.moments.checks import check_denoiser
from mmdgs.moments.contract import mean_of, require_input
from mmdgs.noise import AnyLevel, NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator


@dataclass(frozen=True)
class LearnedMean:
    """The mean of a network that predicts (mean, log_std): a denoiser."""

    network: Network = field(repr=False)
    with_level: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "with_level", takes_level(self.network))

    def __call__(self, x_t: Tensor, level: AnyLevel, /) -> Tensor:
        return self.both(x_t, level)[0]

    def both(self, x_t: Tensor, level: AnyLevel) -> tuple[Tensor, Tensor]:
        """The network's mean and log standard deviation."""
        out = self.network(x_t, level) if self.with_level else self.network(x_t)
        pair = out.chunk(2, dim=1) if isinstance(out, Tensor) and out.ndim > 1 else tuple(out)
        if [part.shape for part in pair] != [x_t.shape] * 2:
            got = tuple(out.shape) if isinstance(out, Tensor) else [tuple(p.shape) for p in pair]
            raise ValueError(
                f"the network must return (mean, log_std), each of shape {tuple(x_t.shape)}, or "
                f"both along dimension 1; got {got}"
            )
        return pair[0], pair[1]


@dataclass(frozen=True)
class LearnedMoments:
    """Mean and log standard deviation by a network.

    The network returns the pair (mean, log_std), or one tensor with both along dimension 1.
    """

    network: Network = field(repr=False)
    denoiser: LearnedMean = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "denoiser", LearnedMean(self.network))

    def __call__(
        self, x_t: Tensor, level: AnyLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level)
        spend(forwards=1)
        mean, log_std = self.denoiser.both(x_t, level)
        check_denoiser(self.denoiser, x_t, level, mean)
        return Gaussian(mean, Diagonal((2 * log_std).exp()))


def head_inputs(x_t: Tensor, mean: Tensor, level: AnyLevel, data_std: float) -> Tensor:
    """((x_t - alpha D) / sigma, D / d) along the channels: of size 1 at every level."""
    noise = (x_t - level.alpha * mean) / level.sigma
    return torch.cat([noise, mean / data_std], dim=1)


@dataclass(frozen=True)
class SpectralHead:
    """(x_t, D(x_t), level) -> C, by a network with twice the data's channels in and out."""

    network: Network
    data_std: float = 1.0

    def __call__(self, x_t: Tensor, mean: Tensor, level: AnyLevel, /) -> Modulated:
        inputs = head_inputs(x_t, mean, level, self.data_std)
        out = self.network(inputs, level).to(x_t.dtype)
        require_shape("the output of the head's network", out.shape, inputs.shape)
        scales, variances = out.chunk(2, dim=1)
        return Modulated(scales, Spectral(variances.exp()))


@dataclass(frozen=True)
class ModulatedMoments:
    """The covariance by a head: a pass of the denoiser and one of the head."""

    denoiser: Denoiser
    head: SpectralHead

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        mean = mean_of(self.denoiser, x_t, level)
        spend(forwards=1)
        with torch.no_grad():
            cov = self.head(x_t, mean, level)
        raise_non_finite("denoising covariance", cov.log_scales)
        return Gaussian(mean, cov)
