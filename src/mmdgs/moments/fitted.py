"""Covariances of few numbers: fitted to data once a level, and of no cost when sampling.

    isotropic    C = v I            one variance (Bao et al., 2022; the paper's eq. isotropic:score)
    spectral     C = Q diag(v) Q'   a variance for each frequency; Q the orthonormal cosines
                                    (DCT-II) along every dimension, colours included; a function of
                                    frequency, so that one fit serves images of every size

What a denoiser leaves open of natural images is smooth: the error at one pixel is like that at the
next. A covariance that is diagonal in pixels draws every pixel for itself, and the next denoising
step takes that noise away again, with the contrast it stood for. In the basis of cosines the errors
are nearly uncorrelated, since images look alike everywhere.

Variances are the same at every x_t and interpolated between the fitted levels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser, denoise, require_denoiser, score
from mmdgs.errors import require_shape
from mmdgs.linalg.operators import Diagonal
from mmdgs.linalg.spectral import Spectral, resampled, to_cosines
from mmdgs.memory import Batches
from mmdgs.moments.checks import check_errors
from mmdgs.moments.contract import FLOOR, mean_of, require_batch, require_input
from mmdgs.noise import LevelTable, NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator

logger = logging.getLogger("mmdgs")

FITTED_AT = "isotropic variances were fitted at"
TINY = 1e-12
"""Smallest variance of a spectrum, relative to (sigma / alpha)^2: it keeps logarithms finite."""
ROUNDING = 1e-5
"""How far from the floor, relatively, a variance counts as lifted: fits keep float32 logarithms."""
KEPT_NUMBERS = 1 << 25
"""Variances at levels and for sizes met before that are kept at hand: 128 MiB in float32."""
FIT_ROWS, FIT_NUMBERS = 4096, {"cpu": 1 << 18, "cuda": 1_536_000}
"""Most rows, and numbers, of a forward pass in a fit: on a GPU 500 images of CIFAR-10."""
_fitting: dict[tuple[torch.device, torch.Size], Batches] = {}  # sizes that fitted in memory

VarianceOf = Callable[[Denoiser, Tensor, Tensor, NoiseLevel], Tensor]
"""(denoiser, x, x_t, level) -> numbers in x's shape, whose mean estimates the variance."""


def by_errors(denoiser: Denoiser, x: Tensor, x_t: Tensor, level: NoiseLevel) -> Tensor:
    """(x - D(x_t))^2: its mean is the variance that fits the mean D, exact or not."""
    return (x - denoise(denoiser, x_t, level)).double().square()


def by_score(denoiser: Denoiser, x: Tensor, x_t: Tensor, level: NoiseLevel) -> Tensor:
    """(sigma^2 / alpha^2) (1 - sigma^2 score(x_t)^2), the paper's formula.

    For an exact denoiser its mean is that of `by_errors`, but it needs far more images: at high
    noise it is the difference of two large numbers.
    """
    return level.variance * (1 - level.sigma**2 * score(denoiser, x_t, level).double().square())


@dataclass(frozen=True)
class IsotropicMoments:
    """One variance a level; the fit lifts it to floor (sigma / alpha)^2."""

    denoiser: Denoiser
    variances: LevelTable = None  # type: ignore[assignment]  # the message says how to fit them
    floor: float = FLOOR

    def __post_init__(self) -> None:
        _require_fitted(self, "isotropic")

    @classmethod
    def fit(
        cls,
        denoiser: Denoiser,
        x: Tensor,
        level: NoiseLevel | Sequence[NoiseLevel],
        *,
        generator: Generator,
        floor: float = FLOOR,
        variance_of: VarianceOf = by_errors,
    ) -> IsotropicMoments:
        """The variance at each level, the mean of `variance_of` over clean data x (N, ...)."""
        variances = {}
        for at in [level] if isinstance(level, NoiseLevel) else level:

            def total(clean: Tensor, noisy: Tensor, at: NoiseLevel = at) -> Tensor:
                return variance_of(denoiser, clean, noisy, at).sum()

            totals = _over_noisy(total, x, at, generator)
            variance, least = torch.stack(totals).sum().item() / x.numel(), floor * at.variance
            if variance_of is by_errors:
                check_errors(denoiser, at, (variance, at.variance), x)
            if variance < least:
                logger.warning(
                    "the isotropic variance at %s, %g, is lifted to the floor", at, variance
                )
            variances[at] = max(variance, least)
        return cls(denoiser, LevelTable.of(variances, FITTED_AT), floor)

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        mean = mean_of(self.denoiser, x_t, level)
        least, variance = self.floor * level.variance, self.variances[level]
        lifted = least > 0 and abs(variance - least) <= ROUNDING * least
        repaired = mean.new_ones(len(mean)) if lifted else None
        return Gaussian(mean, self.covariance(mean, level), repaired)

    def covariance(self, x_t: Tensor, level: NoiseLevel) -> Diagonal:
        """The covariance alone: no evaluation of the denoiser."""
        return Diagonal(x_t.new_full((), self.variances[level]).expand_as(x_t))


@dataclass(frozen=True)
class SpectralMoments:
    """One variance for each frequency: `variances` (...) at each level, of the coefficients.

    For images (B, C, H, W) or volumes of other sides than those of the fit they are interpolated
    over frequencies (`linalg.spectral.resampled`). They are fitted and need no floor; with one,
    `Gaussian.repaired` is the fraction of frequencies at floor (sigma / alpha)^2.
    """

    denoiser: Denoiser
    variances: LevelTable = None  # type: ignore[assignment]  # the message says how to fit them
    floor: float = TINY
    _at: dict[tuple[Any, ...], tuple[Tensor, float]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        _require_fitted(self, "spectral")
        if not (self.variances.values > 0).all():
            raise ValueError("the variances of the frequencies must be positive and finite")

    @classmethod
    def fit(
        cls,
        denoiser: Denoiser,
        x: Tensor,
        levels: Sequence[NoiseLevel],
        *,
        generator: Generator,
        floor: float = TINY,
    ) -> SpectralMoments:
        """E[(Q' (x - D(x_t)))^2] at each level from clean data x: what fits the denoiser's mean."""
        variances = {
            level: fitted_spectrum(denoiser, x, level, generator=generator, floor=floor)
            for level in sorted(levels, key=lambda level: level.ratio)
        }
        return cls(denoiser, LevelTable.of(variances), floor)

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        variances, at_floor = self._variances(x_t, level)
        mean = mean_of(self.denoiser, x_t, level)
        repaired = mean.new_full((len(mean),), at_floor) if at_floor else None
        return Gaussian(mean, Spectral(variances.expand_as(x_t)), repaired)

    def covariance(self, x_t: Tensor, level: NoiseLevel) -> Spectral:
        """The covariance alone: no evaluation of the denoiser."""
        return Spectral(self._variances(x_t, level)[0].expand_as(x_t))

    def _variances(self, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, float]:
        """Variances (...), and the fraction of frequencies at the floor."""
        key = (level, x_t.dtype, x_t.device, x_t.shape[1:])
        if key not in self._at:
            variances, least = self.variances[level], self.floor * level.variance
            if variances.shape != x_t.shape[1:]:
                images = variances.ndim == x_t.ndim - 1 > 2
                fitted = len(variances), *(x_t if images else variances[None]).shape[2:]
                require_shape("x_t, for a spectrum,", x_t.shape, (len(x_t), *fitted))
                variances = resampled(variances, x_t.shape[2:])
            if sum(kept.numel() for kept, _ in self._at.values()) > KEPT_NUMBERS:
                self._at.clear()
            at_floor = (variances <= least * (1 + ROUNDING)).double().mean().item()
            self._at[key] = variances.clamp(min=least).to(x_t), at_floor
        return self._at[key]


def fitted_spectrum(
    denoiser: Denoiser, x: Tensor, level: NoiseLevel, *, generator: Generator, floor: float = TINY
) -> Tensor:
    """The mean square (...) of the coefficients of x - D(x_t) over clean data x (N, ...)."""

    def squares(clean: Tensor, noisy: Tensor) -> Tensor:
        return to_cosines(clean - denoise(denoiser, noisy, level)).double().square().sum(0).cpu()

    if len(x) < 2:
        raise ValueError(f"a spectrum is fitted on two images or more, got {len(x)}")
    sums = _over_noisy(squares, x, level, generator)
    total = sum(sums, torch.zeros(x.shape[1:], dtype=torch.float64))
    check_errors(denoiser, level, (total.sum().item() / x.numel(), level.variance), x)
    return (total / len(x)).clamp(min=floor * level.variance)


def _over_noisy(
    terms: Callable[[Tensor, Tensor], Tensor], x: Tensor, level: NoiseLevel, generator: Generator
) -> list[Tensor]:
    """terms(x, x_t) of the rows of clean data x (N, ...), as many at a time as fit in memory."""
    require_batch(x)
    if not torch.isfinite(x).all():
        raise ValueError("the data to fit on holds values that are not finite")
    x_t = add_noise(x, level, generator=generator)
    numbers = FIT_NUMBERS.get(x.device.type, FIT_NUMBERS["cpu"])
    rows = max(1, min(FIT_ROWS, numbers // x[0].numel()))
    batches = _fitting.setdefault((x.device, x.shape[1:]), Batches(rows, "examples to fit on"))
    with torch.no_grad():
        sums = list(batches.over(len(x), lambda a, b: terms(x[a:b], x_t[a:b])))
    if not all(part.isfinite().all() for part in sums):
        raise ValueError(f"the denoiser gives non-finite means at {level}")
    return sums


def _require_fitted(moments: IsotropicMoments | SpectralMoments, covariance: str) -> None:
    """Refuse an estimator without the variances that are fitted for it, and say how to fit them."""
    require_denoiser(moments.denoiser)
    if not hasattr(moments.variances, "__getitem__"):
        name, got = type(moments).__name__, type(moments.variances).__name__
        raise TypeError(
            f"{name} needs its variances, a LevelTable, and got {got}. Fit them on clean data x "
            f"(N, ...): {name}.fit(denoiser, x, levels, generator=torch.Generator()). Those that "
            f"are kept with a model are in model.posterior({covariance!r})"
        )
