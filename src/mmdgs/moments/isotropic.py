"""One variance a noise level, fitted on data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise, require_denoiser, score
from mmdgs.linalg.operators import Diagonal
from mmdgs.moments.checks import check_errors
from mmdgs.moments.contract import FLOOR, fitted_in_parts, mean_of, require_batch, require_fitted, require_input
from mmdgs.noise import LevelTable, NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator

logger = logging.getLogger("mmdgs")

FITTED_AT = "isotropic variances were fitted at"
ROUNDING = 1e-5
"""How far from the floor, relatively, a variance counts as lifted to it: logarithms are kept in float32."""


VarianceOf = Callable[[Denoiser, Tensor, Tensor, NoiseLevel], Tensor]
"""(denoiser, x, x_t, level) -> numbers in x's shape, whose mean estimates the variance."""


def by_errors(denoiser: Denoiser, x: Tensor, x_t: Tensor, level: NoiseLevel) -> Tensor:
    """(x - D(x_t))^2: its mean is the variance that fits the mean D, exact or not."""
    return (x - denoise(denoiser, x_t, level)).double().square()


def by_score(denoiser: Denoiser, x: Tensor, x_t: Tensor, level: NoiseLevel) -> Tensor:
    """(sigma^2 / alpha^2) (1 - sigma^2 score(x_t)^2), the paper's formula.

    For an exact denoiser its mean is that of `by_errors`, but it needs far more images: at high noise it is the
    difference of two large numbers.
    """
    return level.variance * (1 - level.sigma**2 * score(denoiser, x_t, level).double().square())


@dataclass(frozen=True)
class IsotropicMoments:
    """One variance per noise level, the same at every x_t (Bao et al., 2022; the paper's eq. isotropic:score).

    Between the fitted levels the variance is interpolated. One at floor (sigma / alpha)^2 was lifted to it by the fit.
    """

    denoiser: Denoiser
    variances: LevelTable = None  # type: ignore[assignment]  # needed: the message says how to fit them
    floor: float = FLOOR

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)
        require_fitted("IsotropicMoments", "isotropic", self.variances)

    @classmethod
    def fit(
        cls,
        denoiser: Denoiser,
        x: Float[Tensor, "data ..."],
        level: NoiseLevel | Sequence[NoiseLevel],
        *,
        generator: Generator,
        floor: float = FLOOR,
        variance_of: VarianceOf = by_errors,
    ) -> IsotropicMoments:
        """Estimate the variance at each level from clean data x: the mean of `variance_of` over data and dimensions."""
        require_batch(x)
        if not torch.isfinite(x).all():
            raise ValueError("the data to fit on holds values that are not finite")
        variances = {}
        for one in [level] if isinstance(level, NoiseLevel) else level:
            x_t = add_noise(x, one, generator=generator)

            def total(clean: Tensor, noisy: Tensor, at: NoiseLevel = one) -> Tensor:
                return variance_of(denoiser, clean, noisy, at).sum()

            with torch.no_grad():
                sums = list(fitted_in_parts(total, x, x_t))
            variance = torch.stack(sums).sum().item() / x.numel()
            if not math.isfinite(variance):
                raise ValueError(f"the isotropic variance at {one} is {variance}: the denoiser gives non-finite means")
            if variance_of is by_errors:
                check_errors(denoiser, one, (variance, one.variance), x)
            if variance < floor * one.variance:
                logger.warning("the isotropic variance at %s came out as %g and was lifted to the floor", one, variance)
            variances[one] = max(variance, floor * one.variance)
        return cls(denoiser, LevelTable.of(variances, FITTED_AT), floor)

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        mean = mean_of(self.denoiser, x_t, level)
        least, variance = self.floor * level.variance, self.variances[level]
        lifted = least > 0 and abs(variance - least) <= ROUNDING * least
        repaired = mean.new_ones(len(mean)) if lifted else None
        return Gaussian(mean, self.covariance(mean, level), repaired)

    def covariance(self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel) -> Diagonal:
        """The covariance alone: no evaluation of the denoiser."""
        return Diagonal(x_t.new_full((), self.variances[level]).expand_as(x_t))
