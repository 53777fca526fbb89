"""A network for the second-order score (Meng et al., 2021): the covariance is learned, where Theorem 2 derives it.

With x_t = x + sigma z, the score s of the noised density and its Hessian H, the posterior covariance over sigma^2 is

    R = Cov[x | x_t] / sigma^2 = I + sigma^2 H = E[z z' | x_t] - u u',        u = sigma s = (D(x_t) - x_t) / sigma

so R minimises E ||R(x_t) - (z z' - u u')||^2. That is denoising second-order score matching, times sigma^4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmdgs.denoisers import Denoiser, denoise
from mmdgs.linalg.operators import Dense
from mmdgs.linalg.repair import lifted
from mmdgs.moments.contract import FLOOR, require_batch
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, randn_like


@dataclass(frozen=True)
class SecondOrderMoments:
    """The mean of a denoiser, and a covariance sigma^2 R from a network of three outputs R_11, R_12, R_22.

    For x_t (B, 2) and alpha = 1. Eigenvalues below floor sigma^2 are lifted to it, as those of `FullMoments` are.
    """

    denoiser: Denoiser
    network: nn.Module
    floor: float = FLOOR

    def ratio(self, x_t: Tensor) -> Tensor:
        """R(x_t), (B, 2, 2)."""
        return self.network(x_t)[:, [0, 1, 1, 2]].unflatten(1, (2, 2))

    def __call__(self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None) -> Gaussian:
        require_batch(x_t, level)
        cov = Dense.from_matrix(level.variance * self.ratio(x_t), x_t.shape[1:])
        values, repaired = lifted(cov.values, self.floor * level.variance)
        return Gaussian(denoise(self.denoiser, x_t, level), Dense(values, cov.vectors, cov.event_shape), repaired)


def second_order_loss(moments: SecondOrderMoments, x: Tensor, level: NoiseLevel, *, generator: Generator) -> Tensor:
    """||R(x_t) - (z z' - u u')||^2 for each row of x (B, 2); the gradient goes into the network of R alone."""
    z = randn_like(x, generator)
    x_t = x + level.sigma * z
    u = (denoise(moments.denoiser, x_t, level).detach() - x_t) / level.sigma
    target = torch.einsum("bi,bj->bij", z, z) - torch.einsum("bi,bj->bij", u, u)
    return (moments.ratio(x_t) - target).square().sum((1, 2))
