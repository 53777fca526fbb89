"""Gaussian(mean, cov): the denoising posterior q(x | x_t), and its bridge to other levels.

Bridge: if x | x_t is Gaussian with moments (m, C), then at a cleaner level s, with (a, b) the
forward kernel from s to t (noise.py), x_s | x_t is Gaussian with

    mean  g m + (a sigma_s^2 / sigma_t^2) x_t,      g = alpha_s b^2 / sigma_t^2
    cov   (sigma_s^2 b^2 / sigma_t^2) I + g^2 C.

Measurements y = A x + tau e of the same x leave it Gaussian (`given`, linalg/given.py), and the
bridge goes on from there: a chain of such steps draws from p(x | y).

At s = clean it is the posterior itself (single-level Gibbs); with alpha = 1 it is the paper's
q(x_t | x_{t+1}) of Algorithm 2; with variance-preserving levels it is ancestral sampling.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.errors import UsageError, require_shape
from mmdgs.linalg.components import TOLERANCE, Components, principal_components
from mmdgs.linalg.given import conditioned
from mmdgs.linalg.operators import Covariance
from mmdgs.noise import CLEAN, NoiseLevel, transition
from mmdgs.operators import Operator, as_operator, measured, noise_variances
from mmdgs.randomness import Generator, as_shape, randn

PROBABILITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
"""Those of the intervals whose lengths are fitted; between them lengths are interpolated."""


@dataclass(frozen=True)
class Gaussian:
    """A batch of Gaussians over x: mean (B, ...), a covariance operator, and what was repaired.

    `repaired` (B,) is the fraction of each covariance's eigenvalues (or variances) that lay below
    the floor and were lifted to it; None where the covariance cannot need repair, or where that is
    only known of a draw (KrylovMoments): `sample_with_info` says. `reach` is the shape of the
    errors where it was fitted (`mmdgs.calibrate`): the quantiles of |x - mean| / std at the first
    of PROBABILITIES, each over a Gaussian's. None is a Gaussian's shape.
    """

    mean: Float[Tensor, "batch ..."]
    cov: Covariance
    repaired: Float[Tensor, " batch"] | None = None
    reach: tuple[float, ...] | None = None

    def sample(
        self, shape: int | tuple[int, ...] = (), *, generator: Generator | None = None
    ) -> Float[Tensor, "..."]:
        """Draws mean + C^(1/2) z, (*shape, B, ...), or (n, B, ...) for a number n."""
        shape = as_shape(shape)
        if shape == ():
            return self.mean + self.cov.root(self._normals(generator))
        rows, count = len(self.mean), math.prod(shape)
        # Rows come first in every draw, so that each row can have a random stream of its own.
        z = randn((rows, count, *self.cov.normals(self.mean.shape[1:])), self.mean, generator)
        draws = torch.stack([self.mean + self.cov.root(z[:, i]) for i in range(count)])
        return draws.reshape(*shape, *self.mean.shape)

    def sample_with_info(
        self, *, generator: Generator | None = None
    ) -> tuple[Float[Tensor, "batch ..."], Mapping[str, Float[Tensor, " batch"]]]:
        """One draw (B, ...), the same as `sample`'s, and numbers (B,) known of it, by name."""
        root, info = self.cov.root_with_info(self._normals(generator))
        repaired = {} if self.repaired is None else {"repaired": self.repaired}
        return self.mean + root, {**repaired, **info}

    def _normals(self, generator: Generator | None) -> Tensor:
        return randn((len(self.mean), *self.cov.normals(self.mean.shape[1:])), self.mean, generator)

    def given(
        self, y: Float[Tensor, "batch ..."], operator: Any, noise: float | Tensor
    ) -> Gaussian:
        """The law of x given measurements y = A x + noise e, (B, *out_shape) or one for all rows.

        mean + C A' S^-1 (y - A mean) and C - C A' S^-1 A C, with S = A C A' + noise^2. The operator
        is one of `mmdgs.operators` or anything that `as_operator` takes; the noise is a standard
        deviation: a number, one a row (B,), or one a measurement. Where S is solved by conjugate
        gradients, `sample_with_info` tells "cg_iterations" and "cg_residual".
        """
        operator = as_operator(operator, self.mean.shape[1:], self.mean)
        y = measured(y, operator).to(self.mean)
        return self.given_checked(y, operator, noise_variances(noise, operator, y))

    def given_checked(self, y: Tensor, operator: Operator, variances: Tensor) -> Gaussian:
        """`given` for measurements, operator and noise variances that were checked before."""
        if len(y) not in (1, len(self.mean)):
            rows = f"{len(y)} rows, and the posterior has {len(self.mean)}"
            raise UsageError(f"there are measurements for {rows}")
        mean, cov = conditioned(self.mean, self.cov, y, operator, variances)
        return replace(self, mean=mean, cov=cov)

    def variance_along(self, directions: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The variance u' C u of u' x, (*shape, B), for directions u (*shape, B, ...)."""
        lead = directions.shape[: directions.ndim - self.mean.ndim]
        require_shape("directions", directions.shape[len(lead) :], self.mean.shape)
        variances = self.cov.variance_along(directions.reshape(-1, *self.mean.shape))
        return variances.reshape(*lead, len(self.mean))

    def components(
        self,
        k: int,
        region: tuple[int, int, int, int] | None = None,
        *,
        tolerance: float = TOLERANCE,
        most: int | None = None,
    ) -> Components:
        """The k principal components: the largest variances and their directions.

        A region (x, y, width, height) of images gives those of a part. Exact where the covariance
        is a matrix or diagonal; else by products with it until every residual is below the
        tolerance, or `most` products were made.
        """
        return principal_components(self.cov, self.mean, k, region, tolerance=tolerance, most=most)

    def log_prob(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, " batch"]:
        """log N(x; mean, C), summed over the event; (B,)."""
        require_shape("x", x.shape, self.mean.shape)
        constant = math.prod(self.mean.shape[1:]) * math.log(2 * math.pi)
        return -0.5 * (self.cov.mahalanobis(x - self.mean) + self.cov.logdet() + constant)

    def interval(
        self, probability: float = 0.9
    ) -> tuple[Float[Tensor, "batch ..."], Float[Tensor, "batch ..."]]:
        """The ends, (B, ...) each, of the interval of each number with this probability."""
        half = self.deviations(probability) * self.cov.diagonal().sqrt()
        return self.mean - half, self.mean + half

    @property
    def highest(self) -> float:
        """The largest probability whose interval was fitted; 1 where nothing was."""
        return 1.0 if self.reach is None else PROBABILITIES[len(self.reach) - 1]

    def deviations(self, probability: float) -> float:
        """How many standard deviations the interval of a probability reaches on either side.

        A fitted reach is interpolated: its logarithm, linearly in that of the Gaussian's quantile,
        so that more probable intervals are never shorter. What was not fitted is refused.
        """
        if not 0 < probability < 1:
            raise ValueError(f"probability must lie between 0 and 1, got {probability}")
        normal = _normal_quantile(probability)
        if self.reach is None:
            return normal
        known = PROBABILITIES[: len(self.reach)]
        if not known[0] <= probability <= self.highest:
            raise ValueError(
                f"the calibration was fitted for probabilities {known[0]:g} to {self.highest:g}, "
                f"got {probability:g}; more examples tell more, calibrated=False takes a Gaussian's"
            )
        above = max(1, bisect.bisect_left(known, probability))
        low, high = (math.log(_normal_quantile(known[i])) for i in (above - 1, above))
        share = (math.log(normal) - low) / (high - low)
        return normal * self.reach[above - 1] ** (1 - share) * self.reach[above] ** share

    def bridge(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, cleaner: NoiseLevel
    ) -> Gaussian:
        """The law of x_s | x_t at the cleaner level s, where this is that of x | x_t at `level`."""
        require_shape("x_t", x_t.shape, self.mean.shape)
        if cleaner == CLEAN:
            return self
        a, b = transition(cleaner, level)
        gain = cleaner.alpha * b**2 / level.sigma**2
        mean = gain * self.mean + (a * cleaner.sigma**2 / level.sigma**2) * x_t
        cov = self.cov.affine(gain**2, (cleaner.sigma * b / level.sigma) ** 2)
        return Gaussian(mean, cov, self.repaired)


def _normal_quantile(probability: float) -> float:
    """How many standard deviations of a Gaussian hold it with this probability."""
    return NormalDist().inv_cdf(0.5 + probability / 2)
