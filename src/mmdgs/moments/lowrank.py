"""The covariance along a few directions of an image by products with the Jacobian, and a fitted one for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise, require_denoiser
from mmdgs.jacobians import linearised
from mmdgs.linalg.lowrank import LowRank, Rest
from mmdgs.moments.contract import check_mean, covariance_product, floor_at, require_input
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator


@runtime_checkable
class FittedCovariance(Protocol):
    """A covariance that was fitted to data and needs no evaluation: SpectralMoments, IsotropicMoments."""

    def covariance(self, x_t: Tensor, level: NoiseLevel) -> Rest:
        """The covariance of p(x | x_t), diagonal in pixels or in cosines."""


@dataclass(frozen=True)
class LowRankMoments:
    """A few products with the symmetrised Jacobian, and the covariance of `rest` wherever they say nothing.

    They are made when they are needed, along the directions that matter then (linalg/lowrank.py):

        given measurements y     those in which y moves the mean: all that is asked given y is of one covariance
        a draw without y         that of the draw itself
        densities, variances     the Krylov space of the mean, which nears the directions of the largest variances

    With along_draws=False draws are of the last kind too, so that they follow the density exactly; with as many
    products as dimensions it is FullMoments'. On mixtures one product is enough for draws, and two given measurements
    (docs/covariances.md). A direction along which the variance is below floor (sigma / alpha)^2 is dropped, and left to
    the rest; None takes the floor from the network's own error (linalg/repair.py). A run's info says how many
    ("dropped"). `symmetric` says whether the Jacobian is symmetric, which halves the work; None asks the denoiser:
    energies' are. At levels whose sigma / alpha is `below` or more no products are made, and the rest is all: under
    much noise images differ little in what is left uncertain.
    """

    denoiser: Denoiser
    rest: FittedCovariance
    products: int = 2
    floor: float | None = None
    symmetric: bool | None = None
    along_draws: bool = True
    below: float | None = None

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)
        if not isinstance(self.rest, FittedCovariance):
            raise TypeError(
                "LowRankMoments needs the covariance of what its products leave open, SpectralMoments or "
                f"IsotropicMoments that were fitted for the denoiser; got {type(self.rest).__name__}. "
                'Those of a model: model.posterior("spectral", calibrated=False)'
            )
        if not isinstance(self.products, int) or isinstance(self.products, bool) or self.products < 1:
            raise ValueError(f"products must be a positive whole number, got {self.products!r}")
        if self.below is not None and not self.below > 0:
            raise ValueError(f"below must be a positive sigma / alpha, or None for all levels, got {self.below}")

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        rest = self.rest.covariance(x_t, level)
        if self.below is not None and level.ratio >= self.below:
            mean = denoise(self.denoiser, x_t, level)
            check_mean(self.denoiser, x_t, level, mean)
            return Gaussian(mean, rest)
        at = linearised(self.denoiser, x_t, level, symmetric=self.symmetric)
        mean = at.mean
        check_mean(self.denoiser, x_t, level, mean)

        product = covariance_product(at, x_t, level)

        floor = floor_at(level, self.floor)
        cov = LowRank.along(rest, mean, product, mean, self.products, *floor, fixed=not self.along_draws)
        return Gaussian(mean, cov)
