"""Moment estimators: (denoiser) -> (x_t, level) -> Gaussian, the library's heart.

By Tweedie's formulas the mean of p(x | x_t) is the denoiser D and its covariance the denoiser's Jacobian,

    Cov[x | x_t] = (sigma^2 / alpha) dD/dx_t        (the paper's Theorem 2, for any alpha),

so every estimator needs one forward pass, shared by the mean and all products with the Jacobian. Products
are vector-Jacobian products, batched: fused attention has no forward-mode derivative. A network's Jacobian
need not be symmetric or positive, so what is repaired is counted in `Gaussian.repaired`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import spend
from mmdgs.denoisers import Denoiser, Network, denoise, score, takes_level
from mmdgs.jacobians import (
    chunked,
    chunks,
    linearised,
    mean_and_diagonal,
    mean_and_jacobian,
)
from mmdgs.krylov import Krylov
from mmdgs.linalg import Dense, Diagonal, floored, raise_non_finite, require_room_for_dense
from mmdgs.noise import CLEAN, NoiseLevel, NoiseLevels, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.probes import ProbeDesign, design_for
from mmdgs.randomness import Generator, Streams, signs, spawn_seeds
from mmdgs.targets import GaussianMixture

logger = logging.getLogger("mmdgs")

FLOOR = 1e-6
"""Smallest variance allowed, relative to (sigma / alpha)^2: a thousandth of the noise's standard deviation."""

FIT_ROWS, FIT_NUMBERS = 4096, {"cpu": 1 << 18, "cuda": 1_536_000}
"""Rows per forward pass where an estimator is fitted on data, and numbers in them: on a GPU 500 images of CIFAR-10."""


@runtime_checkable
class Moments(Protocol):
    """A moments estimator: x_t (B, ...) -> Gaussian over x. The generator is used by those that draw probes."""

    def __call__(self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None) -> Gaussian: ...


def mean_of(moments: Moments, x_t: Tensor, level: NoiseLevel, *, generator: Generator) -> Tensor:
    """The posterior's mean alone: by the estimator's denoiser where it has one, which spares the covariance."""
    denoiser: Denoiser | None = getattr(moments, "denoiser", None)
    return moments(x_t, level, generator=generator).mean if denoiser is None else denoise(denoiser, x_t, level)


def require_batch(x_t: Tensor, level: NoiseLevel | NoiseLevels | None = None) -> None:
    """Refuse what is not a batch of floating-point vectors, and a level without noise."""
    if not isinstance(x_t, Tensor):
        raise ValueError(f"need a torch tensor, got {type(x_t).__name__}; use torch.as_tensor(...)")
    if level == CLEAN:
        raise ValueError("there is no denoising posterior at the clean level; give a NoiseLevel with sigma > 0")
    if x_t.ndim < 2 or 0 in x_t.shape:
        raise ValueError(f"x_t must be a batch (B, ...) with at least one number a row, got shape {tuple(x_t.shape)}")
    if not x_t.is_floating_point():
        raise ValueError(f"x_t must be a floating-point tensor, got {x_t.dtype}")


def fit_rows(x: Tensor) -> int:
    """How many rows of data x go through a network at a time, where an estimator is fitted on them."""
    return max(1, min(FIT_ROWS, FIT_NUMBERS.get(x.device.type, FIT_NUMBERS["cpu"]) // math.prod(x.shape[1:])))


def _repaired_dense(mean: Tensor, covariance: Tensor, level: NoiseLevel, floor: float) -> Gaussian:
    """A Gaussian with a dense covariance (B, d, d), its eigenvalues lifted to floor (sigma / alpha)^2."""
    raise_non_finite("denoising mean", mean)
    cov = Dense.from_matrix(covariance, mean.shape[1:])
    values, repaired = floored(cov.values, floor * level.variance)
    return Gaussian(mean, Dense(values, cov.vectors, cov.event_shape), repaired)


@dataclass(frozen=True)
class FullMoments:
    """The full covariance, by d products with the Jacobian (the paper's eq. optimaldenoising).

    The Jacobian is symmetrised, and eigenvalues below floor (sigma / alpha)^2 are lifted to it.
    """

    denoiser: Denoiser
    floor: float = FLOOR

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_batch(x_t, level)
        rows, d = len(x_t), math.prod(x_t.shape[1:])
        require_room_for_dense(rows, d, x_t.dtype, x_t.device)
        mean, jacobian = mean_and_jacobian(self.denoiser, x_t, level)
        return _repaired_dense(mean, (0.5 * level.tweedie) * (jacobian + jacobian.mT), level, self.floor)


@dataclass(frozen=True)
class KrylovMoments:
    """The full covariance without forming it: `steps` products with the symmetrised Jacobian for each draw (krylov.py).

    Draws, densities and variances along directions converge to FullMoments' as steps grow, and are theirs where
    d <= steps. Ritz values below floor (sigma / alpha)^2 are lifted to it; how many, and the estimated relative
    error of a draw, are in a run's info ("repaired", "krylov_error") and in `Gaussian.sample_with_info`. The
    densities draw `probes` signs. `symmetric` says whether the Jacobian is symmetric, which halves the work; None
    asks the denoiser: energies' are. The posterior holds the graph of its forward pass until it is dropped.
    """

    denoiser: Denoiser
    steps: int = 20
    floor: float = FLOOR
    symmetric: bool | None = None
    probes: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "probes"):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise ValueError(f"{name} must be a positive whole number, got {given!r}")

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_batch(x_t, level)
        at = linearised(self.denoiser, x_t, level, symmetric=self.symmetric)
        mean = at.mean
        raise_non_finite("denoising mean", mean)

        def product(v: Tensor) -> Tensor:
            # In the network's precision, whatever that of the Krylov space is.
            image = chunked(at.symmetric, v.to(x_t.dtype).reshape(-1, *x_t.shape))
            return level.tweedie * image.reshape(v.shape).to(v.dtype)

        # Probes are few numbers' worth of randomness until they are needed, which in a chain they never are.
        d = math.prod(x_t.shape[1:])
        seeds = None if generator is None or d <= self.steps else spawn_seeds(len(x_t), x_t.device, generator)

        def probes() -> Tensor:
            assert seeds is not None
            drawn = signs((len(x_t), self.probes, d), mean, Streams(seeds.tolist(), len(x_t)))
            return drawn.transpose(0, 1)

        cov = Krylov(product, mean, self.steps, self.floor * level.variance, None if seeds is None else probes)
        return Gaussian(mean, cov)


@dataclass(frozen=True)
class DiagonalMoments:
    """The diagonal of the covariance by S products with probes v (eq. diag:approx; Bekas et al., 2007).

    `design` says which probes (probes.py): `Rademacher()` are the paper's, the mean of v * (v' J). None takes
    `Lattice()` for images (B, C, H, W), where it comes nearer with fewer products, and the paper's for all else.
    `probes=None` takes the exact diagonal, by d products. Variances below floor (sigma / alpha)^2 are lifted to it.
    """

    denoiser: Denoiser
    probes: int | None = 10
    floor: float = FLOOR
    design: ProbeDesign | None = None

    def __post_init__(self) -> None:
        if self.probes is not None and (not isinstance(self.probes, int) or self.probes < 1):
            raise ValueError(f"probes must be a positive number, or None for the exact diagonal, got {self.probes}")

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_batch(x_t, level)
        if self.probes is None:
            mean, diagonal = mean_and_diagonal(self.denoiser, x_t, level)
        elif generator is None:
            raise TypeError("DiagonalMoments draws probes and needs generator=; or use probes=None")
        else:
            at = linearised(self.denoiser, x_t, level)
            design = self.design or design_for(x_t)
            v = design.draw(self.probes, x_t, generator)
            sums = design.diagonal(self.probes, x_t)
            for start, stop in chunks(self.probes, x_t):
                sums.add(v[start:stop], at.pull(v[start:stop]))
            mean, diagonal = at.mean, sums.estimate()
        raise_non_finite("denoising mean", mean)
        raise_non_finite("denoising covariance", diagonal)
        values, repaired = floored(level.tweedie * diagonal, self.floor * level.variance)
        return Gaussian(mean, Diagonal(values), repaired)


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


@dataclass(frozen=True)
class LearnedMoments:
    """A network that predicts the mean and the log standard deviation (Bengio et al., 2013; losses.kl).

    The network returns the pair (mean, log_std), or one tensor with both along dimension 1.
    """

    network: Network
    with_level: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "with_level", takes_level(self.network))

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel | NoiseLevels, *, generator: Generator | None = None
    ) -> Gaussian:
        require_batch(x_t, level)
        spend(forwards=1)
        out = self.network(x_t, level) if self.with_level else self.network(x_t)
        pair = out.chunk(2, dim=1) if isinstance(out, Tensor) and out.ndim > 1 else tuple(out)
        if len(pair) != 2 or any(part.shape != x_t.shape for part in pair):
            got = tuple(out.shape) if isinstance(out, Tensor) else [tuple(part.shape) for part in pair]
            raise ValueError(
                f"the network must return (mean, log_std), each of shape {tuple(x_t.shape)}, "
                f"or both along dimension 1; got {got}"
            )
        mean, log_std = pair
        return Gaussian(mean, Diagonal((2 * log_std).exp()))


@dataclass(frozen=True)
class ExactMoments:
    """The Gaussian with the true moments of p(x | x_t) under a mixture: the oracle row."""

    mixture: GaussianMixture
    floor: float = FLOOR  # rounding alone can make an eigenvalue negative

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_batch(x_t, level)
        require_room_for_dense(len(x_t), self.mixture.dim, x_t.dtype, x_t.device)
        posterior = self.mixture.posterior(x_t, level)
        return _repaired_dense(posterior.mean, posterior.covariance, level, self.floor)
