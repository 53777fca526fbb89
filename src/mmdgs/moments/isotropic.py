"""One variance a noise level, fitted on data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise, score
from mmdgs.linalg.operators import Diagonal, raise_non_finite
from mmdgs.moments.contract import FLOOR, fitted_in_parts, require_batch
from mmdgs.noise import LevelTable, NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator

logger = logging.getLogger("mmdgs")

FITTED_AT = "isotropic variances were fitted at"
ROUNDING = 1e-5
"""How far from the floor, relatively, a variance counts as lifted to it: logarithms are kept in float32."""


@dataclass(frozen=True)
class IsotropicMoments:
    """One variance per noise level, the same at every x_t (Bao et al., 2022; the paper's eq. isotropic:score).

    Between the fitted levels the variance is interpolated. One at floor (sigma / alpha)^2 was lifted to it by the fit.
    """

    denoiser: Denoiser
    variances: LevelTable
    floor: float = FLOOR

    @classmethod
    def fit(
        cls,
        denoiser: Denoiser,
        x: Float[Tensor, "data ..."],
        level: NoiseLevel | Sequence[NoiseLevel],
        *,
        generator: Generator,
        floor: float = FLOOR,
    ) -> IsotropicMoments:
        """Estimate E ||x - D(x_t)||^2 / d from clean data x, at each level: the variance that fits the mean D."""

        def variance(clean: Tensor, x_t: Tensor, one: NoiseLevel) -> Tensor:
            return (clean - denoise(denoiser, x_t, one)).double().square()

        return cls._fitted(denoiser, x, level, variance, generator, floor)

    @classmethod
    def fit_by_score(
        cls,
        denoiser: Denoiser,
        x: Float[Tensor, "data ..."],
        level: NoiseLevel | Sequence[NoiseLevel],
        *,
        generator: Generator,
        floor: float = FLOOR,
    ) -> IsotropicMoments:
        """Estimate (sigma^2 / alpha^2) (1 - (sigma^2 / d) E ||score(x_t)||^2), the paper's formula, at each level.

        For an exact denoiser this is the same as `fit`, but needs far more images: at high noise it is the difference
        of two large numbers.
        """

        def variance(clean: Tensor, x_t: Tensor, one: NoiseLevel) -> Tensor:
            return one.variance * (1 - one.sigma**2 * score(denoiser, x_t, one).double().square())

        return cls._fitted(denoiser, x, level, variance, generator, floor)

    @classmethod
    def _fitted(
        cls,
        denoiser: Denoiser,
        x: Tensor,
        level: NoiseLevel | Sequence[NoiseLevel],
        variance_of: Callable[[Tensor, Tensor, NoiseLevel], Tensor],
        generator: Generator,
        floor: float,
    ) -> IsotropicMoments:
        """The mean of `variance_of(x, x_t, level)` over data and dimensions, at each level."""
        require_batch(x)
        if not torch.isfinite(x).all():
            raise ValueError("the data to fit on holds values that are not finite")
        variances = {}
        for one in [level] if isinstance(level, NoiseLevel) else level:
            x_t = add_noise(x, one, generator=generator)

            def total(clean: Tensor, noisy: Tensor, at: NoiseLevel = one) -> Tensor:
                return variance_of(clean, noisy, at).sum()

            with torch.no_grad():
                sums = list(fitted_in_parts(total, x, x_t))
            variance = torch.stack(sums).sum().item() / x.numel()
            if not math.isfinite(variance):
                raise ValueError(f"the isotropic variance at {one} is {variance}: the denoiser gives non-finite means")
            if variance < floor * one.variance:
                logger.warning("the isotropic variance at %s came out as %g and was lifted to the floor", one, variance)
            variances[one] = max(variance, floor * one.variance)
        return cls(denoiser, LevelTable.of(variances, FITTED_AT), floor)

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_batch(x_t, level)
        with torch.no_grad():
            mean = denoise(self.denoiser, x_t, level)
        raise_non_finite("denoising mean", mean)
        least, variance = self.floor * level.variance, self.variances[level]
        lifted = least > 0 and abs(variance - least) <= ROUNDING * least
        repaired = mean.new_ones(len(mean)) if lifted else None
        return Gaussian(mean, Diagonal(mean.new_full((), variance).expand_as(mean)), repaired)
