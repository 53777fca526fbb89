"""Distributions whose scores and denoising posteriors are known in closed form: the oracles.

A mixture sum_k w_k N(m_k, S_k), noised to x_t = alpha x + sigma e, is the mixture with means alpha
m_k and covariances alpha^2 S_k + sigma^2 I, and x | x_t is a mixture again, with weights
proportional to w_k N(x_t; alpha m_k, alpha^2 S_k + sigma^2 I) and components

    cov   C_k = sigma^2 S_k (alpha^2 S_k + sigma^2 I)^-1
    mean  m_k + alpha S_k (alpha^2 S_k + sigma^2 I)^-1 (x_t - alpha m_k).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.errors import require_shape
from mmdgs.noise import NoiseLevel
from mmdgs.operators import as_operator, measured, noise_variances
from mmdgs.randomness import Generator, as_shape, randn, uniforms

WEIGHT_TOLERANCE = 1e-4
"""How far weights may be from summing to one before it is taken for a mistake."""


class GaussianMixture:
    """sum_k w_k N(m_k, S_k) in d dimensions.

    weights (K,), means (K, d), and covariances as full matrices (K, d, d), as diagonals of
    variances (K, d), or as one standard deviation per component (K,) or for all (a number). Points
    are tensors (..., d), or batches (B, ...) of any event shape with d numbers.
    """

    def __init__(
        self,
        weights: Tensor | Sequence[float],
        means: Tensor | Sequence[Sequence[float]],
        covariances: Tensor | Sequence | float,
    ) -> None:
        self.means = torch.as_tensor(means)
        if not self.means.is_floating_point():
            self.means = self.means.to(torch.get_default_dtype())
        if self.means.ndim != 2 or 0 in self.means.shape:
            got = tuple(self.means.shape)
            raise ValueError(f"means must be (components, dimensions), got shape {got}")
        weights, covariances = (
            torch.as_tensor(numbers, dtype=self.means.dtype, device=self.means.device)
            for numbers in (weights, covariances)
        )
        k, d = self.means.shape
        total = abs(weights.sum().item() - 1) <= WEIGHT_TOLERANCE
        if weights.shape != (k,) or not (weights >= 0).all() or not total:
            numbers = weights.tolist()
            raise ValueError(f"weights must be {k} numbers of sum one, none negative: {numbers}")
        self.weights = weights / weights.sum()
        self.values, self.vectors = _eigen(covariances, k, d)
        if not (torch.isfinite(self.means).all() and torch.isfinite(self.values).all()):
            raise ValueError("means and covariances must be finite")

    @classmethod
    def _from_eigen(
        cls, weights: Tensor, means: Tensor, values: Tensor, vectors: Tensor | None
    ) -> GaussianMixture:
        mixture = object.__new__(cls)
        mixture.weights, mixture.means = weights, means
        mixture.values, mixture.vectors = values, vectors
        return mixture

    @property
    def dim(self) -> int:
        return self.means.shape[1]

    @property
    def covariances(self) -> Float[Tensor, "components d d"]:
        """The components' covariance matrices."""
        return _compose(self.values, self.vectors)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> GaussianMixture:
        """The same mixture on another device or in another precision."""
        parts = (self.weights, self.means, self.values, self.vectors)
        moved = [None if part is None else part.to(device=device, dtype=dtype) for part in parts]
        return GaussianMixture._from_eigen(*moved)  # type: ignore[arg-type]

    def mean(self) -> Float[Tensor, " d"]:
        return self.weights @ self.means

    def covariance(self) -> Float[Tensor, "d d"]:
        centred = self.means - self.mean()
        within = torch.einsum("k,kij->ij", self.weights, self.covariances)
        return within + torch.einsum("k,ki,kj->ij", self.weights, centred, centred)

    def sample(
        self, shape: int | tuple[int, ...] = (), *, generator: Generator | None = None
    ) -> Float[Tensor, "..."]:
        """Independent draws, (*shape, d), or (n, d) for a number n. It needs the generator."""
        shape = as_shape(shape)
        n = math.prod(shape)
        weights, means = self.weights.expand(n, -1), self.means.expand(n, -1, -1)
        draws = _draw(weights, means, self.values, self.vectors, 1, generator)
        return draws.reshape(*shape, self.dim)

    def log_prob(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """log density at x (..., d) -> (...), or at a batch (B, ...) of d numbers a row -> (B,)."""
        rows, lead = self._rows(x)
        return torch.logsumexp(self._joint(rows), dim=-1).reshape(lead)

    def score(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """grad log density, of x's shape."""
        return self.log_prob_and_score(x)[1]

    def log_prob_and_score(
        self, x: Float[Tensor, "..."]
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
        """Both, at little more than the cost of one."""
        rows, lead = self._rows(x)
        joint = self._joint(rows)
        pulls = -self._rotate_back(self._rotate(rows) / self.values)
        score = torch.einsum("nk,nkd->nd", joint.softmax(-1), pulls).reshape(x.shape)
        return joint.logsumexp(-1).reshape(lead), score

    def noised(self, level: NoiseLevel) -> GaussianMixture:
        """The mixture of x_t = alpha x + sigma e."""
        if not isinstance(level, NoiseLevel):
            got = type(level).__name__
            raise ValueError(f"a mixture is noised to one NoiseLevel, got {got}; go row by row")
        values = level.alpha**2 * self.values + level.sigma**2
        means = level.alpha * self.means
        return GaussianMixture._from_eigen(self.weights, means, values, self.vectors)

    def posterior(self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel) -> MixturePosterior:
        """The exact p(x | x_t), a mixture for each row of x_t (B, ...)."""
        rows, _ = self._rows(x_t)
        if len(rows) != len(x_t):
            got = tuple(x_t.shape)
            raise ValueError(f"x_t must be a batch of {self.dim} numbers a row, got {got}")
        noised = self.noised(level)
        gain = level.alpha * self.values / noised.values
        means = self.means + self._rotate_back(gain * noised._rotate(rows))
        return MixturePosterior(
            weights=torch.softmax(noised._joint(rows), dim=-1),
            means=means,
            values=level.sigma**2 * self.values / noised.values,
            vectors=self.vectors,
            event_shape=x_t.shape[1:],
        )

    def given(self, y: Tensor, operator: Any, noise: float | Tensor) -> MixturePosterior:
        """The exact p(x | y), y = A x + noise e (B, *out_shape): a mixture for each row of y.

        `operator` is a matrix (m, d), or one of `mmdgs.operators`, whose shape the points then
        have. The noise is a number, or one a measurement. The weights are those of the evidence,
        w_k N(y; A m_k, A S_k A' + noise^2 I).
        """
        return self._through(y, operator, noise)[0]

    def log_evidence(
        self, y: Tensor, operator: Any, noise: float | Tensor
    ) -> Float[Tensor, " batch"]:
        """The exact log p(y), (B,), of measurements as in `given`: those that say something."""
        return self._through(y, operator, noise)[1]

    def _through(
        self, y: Tensor, operator: Any, noise: float | Tensor
    ) -> tuple[MixturePosterior, Tensor]:
        operator = operator.to(self.means) if isinstance(operator, Tensor) else operator
        operator = as_operator(operator, None, self.means)
        if math.prod(operator.shape) != self.dim:
            raise ValueError(f"{operator!r} does not fit a mixture in {self.dim} dimensions")
        y = measured(y, operator)
        variances = noise_variances(noise, operator, y)
        if len(variances) > 1:
            raise ValueError("a mixture is given measurements of one noise for all rows")
        tau_squared = variances.expand(1, *operator.out_shape).flatten().to(self.means)
        y = y.flatten(1).to(self.means)
        eye = torch.eye(self.dim).to(self.means)
        a = operator(eye.reshape(self.dim, *operator.shape)).flatten(1).mT
        measured_at = operator.known(torch.ones(1, *operator.out_shape)).flatten().bool()
        a, y = a[measured_at], y[:, measured_at]
        cov = self.covariances
        s = a @ cov @ a.mT + torch.diag(tau_squared[measured_at])
        gain = torch.linalg.solve(s, a @ cov).mT
        left = y[:, None] - self.means @ a.mT  # (B, K, m)
        inner = (left * torch.linalg.solve(s, left.movedim(0, 2)).movedim(2, 0)).sum(-1)
        after = cov - gain @ a @ cov
        values, vectors = torch.linalg.eigh(0.5 * (after + after.mT))
        evidence = self.weights.log() - 0.5 * (inner + torch.linalg.slogdet(s).logabsdet)
        posterior = MixturePosterior(
            weights=torch.softmax(evidence, dim=-1),
            means=self.means + torch.einsum("kij,nkj->nki", gain, left),
            values=values.clamp(min=torch.finfo(values.dtype).tiny),
            vectors=vectors,
            event_shape=operator.shape,
        )
        return posterior, evidence.logsumexp(-1) - 0.5 * len(a) * math.log(2 * math.pi)

    def denoiser(self) -> MixtureDenoiser:
        """The exact E[x | x_t] as a Denoiser, differentiable."""
        return MixtureDenoiser(self)

    def _rows(self, x: Tensor) -> tuple[Tensor, torch.Size]:
        """x as (n, d), and the shape of one number per point."""
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a torch tensor, got {type(x).__name__}")
        if x.dtype != self.means.dtype or x.device != self.means.device:
            raise ValueError(
                f"the mixture is {self.means.dtype} on {self.means.device} but x is {x.dtype} "
                f"on {x.device}; use mixture.to(device=..., dtype=...)"
            )
        if x.ndim > 0 and x.shape[-1] == self.dim:
            return x.reshape(-1, self.dim), x.shape[:-1]
        if x.ndim > 1 and math.prod(x.shape[1:]) == self.dim:
            return x.reshape(len(x), self.dim), x.shape[:1]
        raise ValueError(f"x must hold {self.dim} numbers a point, got shape {tuple(x.shape)}")

    def _rotate(self, rows: Tensor) -> Tensor:
        """V_k' (x - m_k), (n, K, d)."""
        return _turned(rows[:, None, :] - self.means, self.vectors)

    def _rotate_back(self, rotated: Tensor) -> Tensor:
        return _turned(rotated, None if self.vectors is None else self.vectors.mT)

    def _joint(self, rows: Tensor) -> Tensor:
        """log w_k + log N(x; m_k, S_k), (n, K)."""
        return _log_joint(self.weights, self._rotate(rows), self.values)


@dataclass(frozen=True)
class MixturePosterior:
    """The exact p(x | x_t), or p(x | y), under a Gaussian mixture: a mixture for each row.

    weights (B, K), means (B, K, d); the components' covariances do not depend on x_t or y: values
    (K, d) and vectors (K, d, d), or None for the identity.
    """

    weights: Float[Tensor, "batch components"]
    means: Float[Tensor, "batch components d"]
    values: Float[Tensor, "components d"]
    vectors: Float[Tensor, "components d d"] | None
    event_shape: torch.Size

    @property
    def mean(self) -> Float[Tensor, "batch ..."]:
        """E[x | x_t], of x_t's shape."""
        return torch.einsum("nk,nkd->nd", self.weights, self.means).reshape(-1, *self.event_shape)

    @property
    def covariance(self) -> Float[Tensor, "batch d d"]:
        """Cov[x | x_t]."""
        centred = self.means - self.mean.reshape(len(self.means), 1, -1)
        within = torch.einsum("nk,kij->nij", self.weights, _compose(self.values, self.vectors))
        return within + torch.einsum("nk,nki,nkj->nij", self.weights, centred, centred)

    def mixture(self, row: int) -> GaussianMixture:
        """One row's posterior as a mixture of its own."""
        weights, means = self.weights[row], self.means[row]
        return GaussianMixture._from_eigen(weights, means, self.values, self.vectors)

    def sample(
        self, shape: int | tuple[int, ...] = (), *, generator: Generator | None = None
    ) -> Float[Tensor, "..."]:
        """Draws of each row, (*shape, B, ...), or (n, B, ...) for a number n. It needs the
        generator."""
        shape = as_shape(shape)
        count, parts = math.prod(shape), (self.values, self.vectors)
        draws = _draw(self.weights, self.means, *parts, count, generator).transpose(0, 1)
        return draws.reshape(*shape, len(self.means), *self.event_shape)

    def log_prob(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, " batch"]:
        """log p(x | x_t) of one x (B, ...) for each row; (B,)."""
        require_shape("x", x.shape, (len(self.means), *self.event_shape))
        rotated = _turned(x.reshape(len(x), 1, -1) - self.means, self.vectors)
        return torch.logsumexp(_log_joint(self.weights, rotated, self.values), dim=-1)


@dataclass(frozen=True)
class MixtureDenoiser:
    """D(x_t, level) = E[x | x_t] under a Gaussian mixture."""

    symmetric_jacobian: ClassVar[bool] = True  # a covariance, but for a factor

    mixture: GaussianMixture

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        return self.mixture.posterior(x_t, level).mean


def _compose(values: Tensor, vectors: Tensor | None) -> Tensor:
    """V diag(values) V'."""
    if vectors is None:
        return torch.diag_embed(values)
    return (vectors * values[..., None, :]) @ vectors.mT


def _draw(
    weights: Tensor,
    means: Tensor,
    values: Tensor,
    vectors: Tensor | None,
    count: int,
    generator: Generator | None,
) -> Tensor:
    """`count` draws of the mixture in each row, (B, count, d); weights (B, K), means (B, K, d).

    The component of each is drawn by inversion.
    """
    rows, components, d = means.shape
    u = uniforms((rows, count), weights, generator)
    index = torch.searchsorted(weights.cumsum(1).contiguous(), u.contiguous(), right=True)
    index = index.clamp(max=components - 1)
    noise = values[index].sqrt() * randn((rows, count, d), means, generator)
    if vectors is not None:
        noise = (vectors[index] @ noise[..., None])[..., 0]
    return means.gather(1, index[..., None].expand(-1, -1, d)) + noise


def _turned(x: Tensor, vectors: Tensor | None) -> Tensor:
    """V_k' x, (n, K, d)."""
    return x if vectors is None else torch.einsum("kij,nki->nkj", vectors, x)


def _log_joint(weights: Tensor, rotated: Tensor, values: Tensor) -> Tensor:
    """log w_k + log N(x; m_k, S_k), (n, K), by V_k' (x - m_k)."""
    quadratic = (rotated.square() / values).sum(-1)
    constant = values.log().sum(-1) + values.shape[1] * math.log(2 * math.pi)
    return weights.log() - 0.5 * (quadratic + constant)


def _eigen(covariances: Tensor, k: int, d: int) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues (K, d) and eigenvectors (K, d, d), None for the identity, of any form."""
    vectors = None
    if covariances.shape in ((), (k,)):
        if not (covariances > 0).all():
            raise ValueError(f"standard deviations must be positive, got {covariances.tolist()}")
        values = (covariances.expand(k)[:, None] ** 2).expand(k, d)
    elif covariances.shape == (k, d):
        values = covariances
    elif covariances.shape == (k, d, d):
        if not torch.isfinite(covariances).all():
            raise ValueError("means and covariances must be finite")
        near = 1e-6 * covariances.abs().max().item()
        if not torch.allclose(covariances, covariances.mT, atol=near):
            raise ValueError("covariances (K, d, d) must be symmetric")
        values, vectors = torch.linalg.eigh(covariances)
    else:
        raise ValueError(
            f"covariances must be ({k}, {d}, {d}) matrices, ({k}, {d}) variances, or ({k},) "
            f"standard deviations or one, got shape {tuple(covariances.shape)}"
        )
    if not (values > 0).all():
        least = values.min().item()
        raise ValueError(
            f"covariances must be positive definite; the least eigenvalue is {least:g}"
        )
    return values, vectors
