"""One variance a noise level, fitted on data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise, score
from mmdgs.linalg.operators import Diagonal, raise_non_finite
from mmdgs.moments.contract import FLOOR, fit_rows, require_batch
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator

logger = logging.getLogger("mmdgs")


@dataclass(frozen=True)
class IsotropicMoments:
    """One variance per noise level, the same at every x_t (Bao et al., 2022; the paper's eq. isotropic:score)."""

    denoiser: Denoiser
    variances: Mapping[NoiseLevel, float]
    lifted: frozenset[NoiseLevel] = frozenset()  # levels whose estimate lay below the floor

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
        """Estimate (sigma^2 / alpha^2) (1 - (sigma^2 / d) E ||score(x_t)||^2) from clean data x, at each level."""

        def variance(clean: Tensor, x_t: Tensor, one: NoiseLevel) -> Tensor:
            return one.variance * (1 - one.sigma**2 * score(denoiser, x_t, one).double().square())

        return cls._fitted(denoiser, x, level, variance, generator, floor)

    @classmethod
    def fit_errors(
        cls,
        denoiser: Denoiser,
        x: Float[Tensor, "data ..."],
        level: NoiseLevel | Sequence[NoiseLevel],
        *,
        generator: Generator,
        floor: float = FLOOR,
    ) -> IsotropicMoments:
        """Estimate E ||x - D(x_t)||^2 / d from clean data x, at each level.

        Of an exact denoiser the same as `fit`, from far fewer images: at high noise `fit` takes the difference of two
        large numbers. Of another it is the variance that fits its own mean.
        """

        def variance(clean: Tensor, x_t: Tensor, one: NoiseLevel) -> Tensor:
            return (clean - denoise(denoiser, x_t, one)).double().square()

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
        levels = [level] if isinstance(level, NoiseLevel) else list(level)
        rows = fit_rows(x)
        variances, lifted = {}, []
        for one in levels:
            x_t = add_noise(x, one, generator=generator)
            with torch.no_grad():
                parts = zip(x.split(rows), x_t.split(rows), strict=True)
                sums = [variance_of(clean, noisy, one).sum() for clean, noisy in parts]
            variance = torch.stack(sums).sum().item() / x.numel()
            if not math.isfinite(variance):
                raise ValueError(f"the isotropic variance at {one} is {variance}: the denoiser gives non-finite means")
            if variance < floor * one.variance:
                logger.warning("the isotropic variance at %s came out as %g and was lifted to the floor", one, variance)
                lifted.append(one)
            variances[one] = max(variance, floor * one.variance)
        return cls(denoiser, variances, frozenset(lifted))

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_batch(x_t, level)
        if level not in self.variances:
            raise ValueError(f"no isotropic variance was fitted at {level}; fitted: {list(self.variances)}")
        with torch.no_grad():
            mean = denoise(self.denoiser, x_t, level)
        raise_non_finite("denoising mean", mean)
        repaired = mean.new_ones(len(mean)) if level in self.lifted else None
        return Gaussian(mean, Diagonal(mean.new_full((), self.variances[level]).expand_as(mean)), repaired)
