"""The full covariance: by d products with the Jacobian, or exact where the target is a mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import CLOSED_FORM_LIMIT, Denoiser, require_denoiser
from mmdgs.errors import UsageError
from mmdgs.jacobians import mean_and_jacobian
from mmdgs.linalg.operators import Dense, raise_non_finite, require_room_for_dense
from mmdgs.linalg.repair import lifted
from mmdgs.moments.contract import FLOOR, Floor, check_mean, floor_at, require_input, watch_rounding
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator
from mmdgs.targets import GaussianMixture

MOST_PRODUCTS = 10_000
"""Products with the Jacobian, over all rows, that FullMoments takes unasked: three images of CIFAR-10."""


def _repaired_dense(mean: Tensor, covariance: Tensor, level: NoiseLevel, floor: Floor) -> Gaussian:
    """A Gaussian with a dense covariance (B, d, d), its eigenvalues lifted to a floor."""
    raise_non_finite("denoising mean", mean)
    cov = Dense.from_matrix(covariance, mean.shape[1:])
    values, repaired = lifted(cov.values, *floor_at(level, floor))
    return Gaussian(mean, Dense(values, cov.vectors, cov.event_shape), repaired)


@dataclass(frozen=True)
class FullMoments:
    """The full covariance, by d products with the Jacobian (the paper's eq. optimaldenoising).

    The Jacobian is symmetrised, and eigenvalues below floor (sigma / alpha)^2 are lifted to it; None takes the floor
    from the network's own error (linalg/repair.py). Above 64 dimensions a batch that takes more than `most_products`
    products, d for each row, is refused; None refuses nothing.
    """

    denoiser: Denoiser
    floor: Floor = None
    most_products: int | None = field(default=MOST_PRODUCTS, compare=False)

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        rows, d = len(x_t), math.prod(x_t.shape[1:])
        require_room_for_dense(rows, d, x_t.dtype, x_t.device)
        self._require_affordable(rows, d)
        mean, jacobian = mean_and_jacobian(self.denoiser, x_t, level)
        check_mean(self.denoiser, x_t, level, mean, jacobian.diagonal(dim1=1, dim2=2))
        covariance = (0.5 * level.tweedie) * (jacobian + jacobian.mT)
        watch_rounding(self.denoiser, covariance.diagonal(dim1=1, dim2=2), level)
        return _repaired_dense(mean, covariance, level, self.floor)

    def _require_affordable(self, rows: int, d: int) -> None:
        products = rows * d
        if self.most_products is None or d <= CLOSED_FORM_LIMIT or products <= self.most_products:
            return
        raise UsageError(
            f"full covariances of {rows} x {d} numbers take {products:,} products with the Jacobian, a backward pass "
            f"each, and the limit is {self.most_products:,}. KrylovMoments(denoiser), or --covariance krylov, draws "
            "from the same posterior with 20 a row. To take them all the same: "
            f"FullMoments(denoiser, most_products={products}), or --most-products {products}"
        )


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
        require_input(x_t, level)
        require_room_for_dense(len(x_t), self.mixture.dim, x_t.dtype, x_t.device)
        posterior = self.mixture.posterior(x_t, level)
        return _repaired_dense(posterior.mean, posterior.covariance, level, self.floor)
