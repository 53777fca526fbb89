"""The full covariance: by d products with the Jacobian, or exact where the target is a mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser
from mmdgs.jacobians import mean_and_jacobian
from mmdgs.linalg.operators import Dense, raise_non_finite, require_room_for_dense
from mmdgs.linalg.repair import lifted
from mmdgs.moments.contract import FLOOR, floor_at, require_batch, watch_rounding
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator
from mmdgs.targets import GaussianMixture


def _repaired_dense(mean: Tensor, covariance: Tensor, level: NoiseLevel, floor: float | None) -> Gaussian:
    """A Gaussian with a dense covariance (B, d, d), its eigenvalues lifted to a floor."""
    raise_non_finite("denoising mean", mean)
    cov = Dense.from_matrix(covariance, mean.shape[1:])
    values, repaired = lifted(cov.values, *floor_at(level, floor))
    return Gaussian(mean, Dense(values, cov.vectors, cov.event_shape), repaired)


@dataclass(frozen=True)
class FullMoments:
    """The full covariance, by d products with the Jacobian (the paper's eq. optimaldenoising).

    The Jacobian is symmetrised, and eigenvalues below floor (sigma / alpha)^2 are lifted to it; None takes the floor
    from the network's own error (linalg/repair.py).
    """

    denoiser: Denoiser
    floor: float | None = None

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_batch(x_t, level)
        rows, d = len(x_t), math.prod(x_t.shape[1:])
        require_room_for_dense(rows, d, x_t.dtype, x_t.device)
        mean, jacobian = mean_and_jacobian(self.denoiser, x_t, level)
        covariance = (0.5 * level.tweedie) * (jacobian + jacobian.mT)
        watch_rounding(self.denoiser, covariance.diagonal(dim1=1, dim2=2), level)
        return _repaired_dense(mean, covariance, level, self.floor)


@dataclass(frozen=True)
class ExactMoments:
    """The Gaussian with the true moments of p(x | x_t) under a mixture: the oracle row."""

    mixture: GaussianMixture
    floor: float = FLOOR  # rounding alone can make an eigenvalue negative

    @property
    def denoiser(self) -> Denoiser:
        """The mixture's exact denoiser."""
        return self.mixture.denoiser()

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_batch(x_t, level)
        require_room_for_dense(len(x_t), self.mixture.dim, x_t.dtype, x_t.device)
        posterior = self.mixture.posterior(x_t, level)
        return _repaired_dense(posterior.mean, posterior.covariance, level, self.floor)
