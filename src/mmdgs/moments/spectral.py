"""A covariance of few numbers with the correlations of images: one variance for each frequency, at each noise level.

    C = Q diag(v) Q'        Q the orthonormal basis of cosines (DCT-II) along every dimension, colours included

What a denoiser leaves open of natural images is smooth: the error at one pixel is like that at the next. A covariance
that is diagonal in pixels, however exact, draws every pixel for itself, and the next denoising step takes that noise
away again, with the contrast it stood for. In the basis of cosines the errors are nearly uncorrelated, since images
look alike wherever one looks. Their variances are estimated from data, once, and cost nothing when sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise, require_denoiser
from mmdgs.linalg.spectral import Spectral, to_cosines
from mmdgs.moments.checks import check_errors
from mmdgs.moments.contract import fitted_in_parts, mean_of, require_batch, require_fitted, require_input
from mmdgs.noise import LevelTable, NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator

TINY = 1e-12
"""Smallest variance of a fit, relative to (sigma / alpha)^2: what keeps logarithms finite."""
ROUNDING = 1e-5
"""How far above the floor, relatively, a variance counts as lifted to it: logarithms are kept in float32."""


@dataclass(frozen=True)
class SpectralMoments:
    """One variance for each frequency, the same at every x_t; between the fitted levels it is interpolated.

    `variances` are those of the coefficients, (...) at each level. They are fitted, so they need no floor relative to
    the noise; where one is given, `Gaussian.repaired` is the fraction of frequencies at floor (sigma / alpha)^2.
    """

    denoiser: Denoiser
    variances: LevelTable = None  # type: ignore[assignment]  # needed: the message says how to fit them
    floor: float = TINY
    _made: dict[tuple[NoiseLevel, torch.dtype, torch.device], tuple[Tensor, float]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)
        require_fitted("SpectralMoments", "spectral", self.variances)
        if not (self.variances.values > 0).all():
            raise ValueError("the variances of the frequencies must be positive and finite")

    @classmethod
    def fit(
        cls,
        denoiser: Denoiser,
        x: Float[Tensor, "data ..."],
        levels: Sequence[NoiseLevel],
        *,
        generator: Generator,
        floor: float = TINY,
    ) -> SpectralMoments:
        """Estimate E[(Q' (x - D(x_t)))^2] from clean data x, at each level: what fits the denoiser's own mean."""
        ordered = sorted(levels, key=lambda level: level.ratio)
        found = {level: fitted_spectrum(denoiser, x, level, generator=generator, floor=floor) for level in ordered}
        return cls(denoiser, LevelTable.of(found), floor)

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        cov, at_floor = self._at(x_t, level)
        mean = mean_of(self.denoiser, x_t, level)
        return Gaussian(mean, cov, mean.new_full((len(mean),), at_floor) if at_floor else None)

    def covariance(self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel) -> Spectral:
        """The covariance alone: no evaluation of the denoiser."""
        return self._at(x_t, level)[0]

    def _at(self, x_t: Tensor, level: NoiseLevel) -> tuple[Spectral, float]:
        """The covariance, and the fraction of frequencies at the floor."""
        fitted = self.variances.values.shape[1:]
        if x_t.shape[1:] != fitted:
            raise ValueError(f"the spectrum was fitted for {tuple(fitted)}, got x_t of shape {tuple(x_t.shape)}")
        key = (level, x_t.dtype, x_t.device)
        if key not in self._made:
            variances, least = self.variances[level], self.floor * level.variance
            at_floor = (variances <= least * (1 + ROUNDING)).double().mean().item()
            self._made[key] = variances.clamp(min=least).to(x_t), at_floor
        made, at_floor = self._made[key]
        return Spectral(made.expand_as(x_t)), at_floor


def fitted_spectrum(
    denoiser: Denoiser,
    x: Float[Tensor, "data ..."],
    level: NoiseLevel,
    *,
    generator: Generator,
    floor: float = TINY,
) -> Float[Tensor, "..."]:
    """The mean square of the coefficients of x - D(x_t) over clean data x, (...), in float64 on the CPU."""
    require_batch(x)
    if len(x) < 2 or not torch.isfinite(x).all():
        raise ValueError(f"a spectrum is fitted on two images or more, all finite; got {len(x)}")
    x_t = add_noise(x, level, generator=generator)

    def squares(clean: Tensor, noisy: Tensor) -> Tensor:
        return to_cosines(clean - denoise(denoiser, noisy, level)).double().square().sum(0).cpu()

    with torch.no_grad():
        total = sum(fitted_in_parts(squares, x, x_t), torch.zeros(x.shape[1:], dtype=torch.float64))
    if not torch.isfinite(total).all():
        raise ValueError(f"the spectrum at {level} is not finite: the denoiser gives non-finite means")
    check_errors(denoiser, level, (total.sum().item() / x.numel(), level.variance), x)
    return (total / len(x)).clamp(min=floor * level.variance)
