"""Training losses as pure functions: (model, x, level) -> one loss per example."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise
from mmdgs.moments import Moments
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Generator


def dsm(
    denoiser: Denoiser, x: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator
) -> Float[Tensor, " batch"]:
    """Denoising score matching: 1/2 ||score(x_t) + e / sigma||^2 = alpha^2 / (2 sigma^4) ||x - D(x_t)||^2.

    Vincent (2011); the paper's eq. dsm and dsm:mean. The same for energies and scores, through their denoiser.
    """
    x_t = add_noise(x, level, generator=generator)
    error = (x - denoise(denoiser, x_t, level)).flatten(1).square().sum(1)
    return error * (0.5 * level.alpha**2 / level.sigma**4)


def kl(
    moments: Moments, x: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator
) -> Float[Tensor, " batch"]:
    """The joint KL up to a constant: -log q(x | x_t), for a posterior with learned moments.

    Bengio et al. (2013); the paper's eq. joint:kl.
    """
    x_t = add_noise(x, level, generator=generator)
    return -moments(x_t, level, generator=generator).log_prob(x)
