"""Covariances by products with the denoiser's Jacobian: C = (sigma^2 / alpha) dD/dx_t.

    FullMoments        d products, or a closed form: the whole matrix
    DiagonalMoments    S products with probes (probes.py): its diagonal
    KrylovMoments      k products a draw: the whole matrix, never formed (linalg/krylov.py)
    LowRankMoments     k products: along a few directions, beside a fitted covariance
                       (linalg/lowrank.py)

A Jacobian that is no covariance is symmetrised. Eigenvalues, variances or Ritz values below floor
(sigma / alpha)^2 are lifted to it; None takes the floor from the network's own error
(linalg/repair.py). `symmetric` says whether the Jacobian is symmetric, which halves the products of
the last two; None asks the denoiser: those of energies are.

`ExactMoments` beside them has the true moments under a Gaussian mixture: the oracle row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mmdgs.denoisers import CLOSED_FORM_LIMIT, Denoiser, require_denoiser
from mmdgs.errors import UsageError
from mmdgs.jacobians import Linearised, chunked, linearised, mean_and_diagonal, mean_and_jacobian
from mmdgs.linalg.components import TOLERANCE, Components
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.lanczos import Product
from mmdgs.linalg.lowrank import LowRank, Rest
from mmdgs.linalg.operators import Dense, Diagonal, raise_non_finite, require_room_for_dense
from mmdgs.linalg.repair import FEW, error_size, lifted
from mmdgs.moments.contract import (
    FLOOR,
    Floor,
    check_mean,
    floor_at,
    mean_of,
    require_input,
    watch_rounding,
)
from mmdgs.moments.probes import ProbeDesign, design_for, probed_diagonal
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, Streams, signs, spawn_seeds
from mmdgs.targets import GaussianMixture

MOST_PRODUCTS = 10_000
"""Products with the Jacobian, over all rows, that are taken unasked: three images of CIFAR-10."""


@dataclass(frozen=True)
class FullMoments:
    """The full covariance, by d products with the Jacobian (the paper's eq. optimaldenoising).

    Above 64 dimensions a batch that takes more than `most_products`, d for each row, is refused;
    None refuses nothing.
    """

    denoiser: Denoiser
    floor: Floor = None
    most_products: int | None = field(default=MOST_PRODUCTS, compare=False)

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        require_room_for_dense(x_t)
        products, most = x_t.numel(), self.most_products
        if most is not None and x_t[0].numel() > CLOSED_FORM_LIMIT and products > most:
            raise UsageError(
                f"full covariances of {len(x_t)} x {x_t[0].numel()} numbers take {products:,} "
                f"products with the Jacobian, and the limit is {most:,}. KrylovMoments "
                "(--covariance krylov) draws from the same posterior with 20 a row. To take them "
                f"all the same: FullMoments(denoiser, most_products={products}), or "
                f"--most-products {products}"
            )
        mean, jacobian = mean_and_jacobian(self.denoiser, x_t, level)
        check_mean(self.denoiser, x_t, level, mean, jacobian.diagonal(dim1=1, dim2=2))
        covariance = (0.5 * level.tweedie) * (jacobian + jacobian.mT)
        watch_rounding(self.denoiser, covariance.diagonal(dim1=1, dim2=2), level)
        return _repaired_dense(mean, covariance, level, self.floor)


@dataclass(frozen=True)
class ExactMoments:
    """The Gaussian with the true moments of p(x | x_t) under a mixture."""

    mixture: GaussianMixture
    floor: float = FLOOR  # rounding alone can make an eigenvalue negative

    @property
    def denoiser(self) -> Denoiser:
        """The mixture's exact denoiser."""
        return self.mixture.denoiser()

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level)
        require_room_for_dense(x_t)
        posterior = self.mixture.posterior(x_t, level)
        raise_non_finite("denoising mean", posterior.mean)
        return _repaired_dense(posterior.mean, posterior.covariance, level, self.floor)


def _repaired_dense(mean: Tensor, covariance: Tensor, level: NoiseLevel, floor: Floor) -> Gaussian:
    cov = Dense.from_matrix(covariance, mean.shape[1:])
    values, repaired = lifted(cov.values, *floor_at(level, floor))
    return Gaussian(mean, replace(cov, values=values), repaired)


@dataclass(frozen=True)
class DiagonalMoments:
    """The diagonal of the covariance by S products with probes (eq. diag:approx; Bekas, 2007).

    `design` says which probes (probes.py): `Rademacher()` are the paper's. None takes `Lattice()`
    for images (B, C, H, W), where it comes nearer with fewer products, and
    `Rademacher(smooth=True)` for all else. `probes=None`, as d probes or more, takes the exact
    diagonal, by d products. A floor of None also counts the error of the probes.
    """

    denoiser: Denoiser
    probes: int | None = 10
    floor: Floor = None
    design: ProbeDesign | None = None

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)
        if self.probes is not None:
            _require_counts(self, "probes")

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        d, errors = x_t[0].numel(), None
        least, share = floor_at(level, self.floor)
        if self.probes is not None and self.probes < d:
            if generator is None:
                raise TypeError("DiagonalMoments draws probes: give generator=, or probes=None")
            at = linearised(self.denoiser, x_t, level)
            design = self.design or design_for(x_t)
            diagonal, errors = probed_diagonal(at, design, self.probes, x_t, generator)
            mean = at.mean
        elif share > 0 and d <= FEW:
            mean, jacobian = mean_and_jacobian(self.denoiser, x_t, level)
            diagonal = jacobian.diagonal(dim1=1, dim2=2).reshape(x_t.shape)
            whole = Dense.from_matrix(0.5 * (jacobian + jacobian.mT), x_t.shape[1:])
            errors = error_size(whole.values).reshape(-1, *[1] * (x_t.ndim - 1))
        else:
            mean, diagonal = mean_and_diagonal(self.denoiser, x_t, level)
        raise_non_finite("denoising covariance", diagonal)
        check_mean(self.denoiser, x_t, level, mean, diagonal)
        variances = level.tweedie * diagonal
        watch_rounding(self.denoiser, variances, level)
        errors = None if errors is None else level.tweedie * errors
        values, repaired = lifted(variances, least, share, errors)
        return Gaussian(mean, Diagonal(values, errors), repaired)


@dataclass(frozen=True)
class KrylovMoments:
    """The full covariance: `steps` products with the symmetrised Jacobian for each draw.

    Draws, densities and variances along directions converge to FullMoments' as steps grow, and are
    theirs where d <= steps. How many Ritz values were lifted, and the estimated relative error of a
    draw, are in a run's info ("repaired", "krylov_error"). Densities draw `probes` signs, and the
    diagonal is that of DiagonalMoments with as many probes, raised by what was lifted. The
    posterior holds the graph of its forward pass.
    """

    denoiser: Denoiser
    steps: int = 20
    floor: Floor = None
    symmetric: bool | None = None
    probes: int = 10

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)
        _require_counts(self, "steps", "probes")

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        at, product = _linearised(self, x_t, level)
        mean, rows, d = at.mean, len(x_t), x_t[0].numel()
        least, share = floor_at(level, self.floor)
        cov = Krylov(product, mean, self.steps, least, share=share)
        if generator is None or d <= self.steps:
            return Gaussian(mean, cov)
        # Seeds alone until probes are needed, which in a chain they never are.
        seeds = spawn_seeds(rows, x_t.device, generator)

        def probes() -> Tensor:
            drawn = signs((rows, self.probes, d), mean, Streams(seeds.tolist(), rows))
            return drawn.transpose(0, 1)

        def estimate() -> Tensor:
            streams = Streams(seeds.tolist(), rows, purpose="diagonal")
            diagonal, _ = probed_diagonal(at, design_for(mean), self.probes, mean, streams)
            return level.tweedie * diagonal

        return Gaussian(mean, replace(cov, probes=probes, estimate=estimate))


def components(
    denoiser: Denoiser,
    x_t: Tensor,
    level: NoiseLevel,
    k: int,
    region: tuple[int, int, int, int] | None = None,
    *,
    tolerance: float = TOLERANCE,
    most: int | None = None,
    symmetric: bool | None = None,
) -> Components:
    """The k principal components of p(x | x_t) (`Gaussian.components`), x_t (B, ...)."""
    q = KrylovMoments(denoiser, steps=1, symmetric=symmetric)(x_t, level)
    return q.components(k, region, tolerance=tolerance, most=most)


@runtime_checkable
class FittedCovariance(Protocol):
    """A covariance that was fitted and needs no evaluation: SpectralMoments, IsotropicMoments."""

    def covariance(self, x_t: Tensor, level: NoiseLevel) -> Rest:
        """The covariance of p(x | x_t), diagonal in pixels or in cosines."""


@dataclass(frozen=True)
class LowRankMoments:
    """A few products with the symmetrised Jacobian, and the covariance of `rest` elsewhere.

    They are made when they are needed, along the directions that matter then (linalg/lowrank.py):

        given measurements y     those in which y moves the mean: one covariance for all given y
        a draw without y         that of the draw itself
        densities, variances     the Krylov space of the mean, near the largest variances

    With along_draws=False draws are of the last kind too, so that they follow the density exactly;
    with as many products as dimensions it is FullMoments'. One product is enough for draws, two
    given measurements. A direction whose variance is below the floor is dropped, and left to the
    rest; a run's info says how many ("dropped"). At levels whose sigma / alpha is `below` or more
    no products are made: under much noise images differ little in what is left uncertain.
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
                "LowRankMoments needs SpectralMoments or IsotropicMoments as its rest, got "
                f"{type(self.rest).__name__}; or model.posterior(Spectral(calibrated=False))"
            )
        _require_counts(self, "products")
        if self.below is not None and not self.below > 0:
            raise ValueError(f"below must be a positive sigma / alpha, or None, got {self.below}")

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        rest = self.rest.covariance(x_t, level)
        if self.below is not None and level.ratio >= self.below:
            return Gaussian(mean_of(self.denoiser, x_t, level), rest)
        at, product = _linearised(self, x_t, level)
        least, share = floor_at(level, self.floor)
        fixed = not self.along_draws
        cov = LowRank.along(rest, at.mean, product, self.products, least, share, fixed)
        return Gaussian(at.mean, cov)


def _linearised(
    moments: KrylovMoments | LowRankMoments, x_t: Tensor, level: NoiseLevel
) -> tuple[Linearised, Product]:
    """The denoiser to first order, its mean checked, and products v (n, B, d) -> C v."""
    at = linearised(moments.denoiser, x_t, level, symmetric=moments.symmetric)
    check_mean(moments.denoiser, x_t, level, at.mean)

    def product(v: Tensor) -> Tensor:
        # In x_t's precision, whatever that of the vectors is.
        image = chunked(at.symmetric, v.to(x_t.dtype).reshape(-1, *x_t.shape))
        return level.tweedie * image.reshape(v.shape).to(v.dtype)

    return at, product


def _require_counts(moments: Any, *names: str) -> None:
    for name in names:
        count = getattr(moments, name)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} must be a positive whole number, got {count!r}")
