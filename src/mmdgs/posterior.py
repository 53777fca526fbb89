"""Gaussian(mean, cov): the denoising posterior q(x | x_t) as a distribution, and its bridge to other levels.

Bridge: if x | x_t is Gaussian with moments (m, C), then at a cleaner level s, with (a, b) the forward
kernel from s to t (noise.py), x_s | x_t is Gaussian with

    mean  g m + (a sigma_s^2 / sigma_t^2) x_t,      g = alpha_s b^2 / sigma_t^2
    cov   (sigma_s^2 b^2 / sigma_t^2) I + g^2 C.

At s = clean it is the posterior itself (single-level Gibbs); with alpha = 1 it is the paper's
q(x_t | x_{t+1}) of Algorithm 2; with variance-preserving levels it is ancestral sampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.linalg.operators import Covariance
from mmdgs.noise import CLEAN, NoiseLevel, transition
from mmdgs.randomness import Generator, as_shape, randn, randn_like


@dataclass(frozen=True)
class Gaussian:
    """A batch of Gaussians over x: mean (B, ...), a covariance operator, and what had to be repaired.

    `repaired` (B,) is the fraction of each covariance's eigenvalues (or variances) that lay below the
    floor and were lifted to it; None where the covariance cannot need repair, or where that is only known of
    a draw (KrylovMoments): `sample_with_info` says. `reach` widens `interval` where errors have heavier (or lighter)
    tails than a Gaussian's; `mmdgs.calibrate` measures it.
    """

    mean: Float[Tensor, "batch ..."]
    cov: Covariance
    repaired: Float[Tensor, " batch"] | None = None
    reach: float = 1.0

    def sample(self, shape: int | tuple[int, ...] = (), *, generator: Generator | None = None) -> Float[Tensor, "..."]:
        """Draw mean + C^(1/2) z; (*shape, B, ...), or (n, B, ...) for a number n. It needs the generator."""
        shape = as_shape(shape)
        if shape == ():
            return self.mean + self.cov.root(randn_like(self.mean, generator))
        rows, count = len(self.mean), math.prod(shape)
        # Rows come first in every draw, so that each row can have a random stream of its own.
        z = randn((rows, count, *self.mean.shape[1:]), self.mean, generator)
        draws = torch.stack([self.mean + self.cov.root(z[:, i]) for i in range(count)])
        return draws.reshape(*shape, *self.mean.shape)

    def sample_with_info(
        self, *, generator: Generator | None = None
    ) -> tuple[Float[Tensor, "batch ..."], Mapping[str, Float[Tensor, " batch"]]]:
        """One draw (B, ...), the same as `sample`'s, and what is known of it: numbers (B,) by name."""
        root, info = self.cov.root_with_info(randn_like(self.mean, generator))
        return self.mean + root, info if self.repaired is None else {"repaired": self.repaired, **info}

    def variance_along(self, directions: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The variance of u' x, u' C u, for directions u (*shape, B, ...) of any length; (*shape, B)."""
        lead = directions.shape[: directions.ndim - self.mean.ndim]
        if directions.shape != (*lead, *self.mean.shape):
            raise ValueError(
                f"directions must end in the posterior's shape {tuple(self.mean.shape)}, got {tuple(directions.shape)}"
            )
        return self.cov.variance_along(directions.reshape(-1, *self.mean.shape)).reshape(*lead, len(self.mean))

    def log_prob(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, " batch"]:
        """log N(x; mean, C), summed over the event; (B,)."""
        if x.shape != self.mean.shape:
            raise ValueError(f"x must have the posterior's shape {tuple(self.mean.shape)}, got {tuple(x.shape)}")
        d = math.prod(self.mean.shape[1:])
        return -0.5 * (self.cov.mahalanobis(x - self.mean) + self.cov.logdet() + d * math.log(2 * math.pi))

    def interval(self, probability: float = 0.9) -> tuple[Float[Tensor, "batch ..."], Float[Tensor, "batch ..."]]:
        """The ends (low, high) of the interval that holds each number with this probability, (B, ...) each."""
        if not 0 < probability < 1:
            raise ValueError(f"probability must lie between 0 and 1, got {probability}")
        half = self.reach * NormalDist().inv_cdf(0.5 + probability / 2) * self.cov.diagonal().sqrt()
        return self.mean - half, self.mean + half

    def bridge(self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, cleaner: NoiseLevel) -> Gaussian:
        """The law of x_s | x_t at the cleaner level s, given that this is the law of x | x_t at `level`."""
        if x_t.shape != self.mean.shape:
            raise ValueError(f"x_t must have the posterior's shape {tuple(self.mean.shape)}, got {tuple(x_t.shape)}")
        if cleaner == CLEAN:
            return self
        a, b = transition(cleaner, level)
        gain = cleaner.alpha * b**2 / level.sigma**2
        mean = gain * self.mean + (a * cleaner.sigma**2 / level.sigma**2) * x_t
        cov = self.cov.affine(gain**2, (cleaner.sigma * b / level.sigma) ** 2)
        return Gaussian(mean, cov, self.repaired)
