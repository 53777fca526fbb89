"""Levy processes: signals of independent increments, and exact draws of p(x | y) by Gibbs.

    y = A x + tau e,   x_k = x_(k-1) + u_k,   x_0 = 0,   u_k | z_k ~ N(0, z_k)

An increment is normal given its variance z_k. Draws of x | z, y, which is Gaussian, and of z | x,
place by place, in turn have the law p(x | y) (Zach, Haouchat and Unser, 2026, arXiv 2509.12821):

    Gauss(v)      z = v
    Student(n)    1 / z | u ~ Gamma((n + 1) / 2, rate (n + u^2) / 2)
    Laplace(b)    1 / z | u inverse Gaussian with mean 1 / (b |u|) and shape 1 / b^2
    share p < 1   z = 0 but for a share p of the places (Bernoulli-Laplace): place by place by the
                  evidence of y, in which x is integrated out

Where A' A is diagonal (denoising, missing values) x | z, y takes a Kalman filter, and z = 0 the
messages from both sides; else perturbed data, u + Z B' S^-1 (y - B u - tau e) with B = A D^-1 and
S = B Z B' + tau^2 I, for which z may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, randn, randn_like, seeded, uniforms

LIKE = torch.empty(0, dtype=torch.float64)
LEAST = 1e-12
"""Of |u| and of a message's precision, before they are divided by."""
COVARIANCES = 5
"""Sweeps of a denoiser whose covariance given z is averaged; that between them is of all."""


@dataclass(frozen=True)
class Gauss:
    """u ~ N(0, variance)."""

    variance: float
    share: ClassVar[float] = 1.0

    def prior(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        """Draws of z."""
        return LIKE.new_full(shape, self.variance)

    def given(self, u: Tensor, generator: Generator) -> Tensor:
        """Draws of z | u."""
        return torch.full_like(u, self.variance)


@dataclass(frozen=True)
class Student:
    """Student's t with so many degrees of freedom."""

    degrees: int
    share: ClassVar[float] = 1.0

    def prior(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        return self.degrees / randn((*shape, self.degrees), LIKE, generator).square().sum(-1)

    def given(self, u: Tensor, generator: Generator) -> Tensor:
        squares = randn((*u.shape, self.degrees + 1), u, generator).square().sum(-1)
        return (self.degrees + u.square()) / squares


@dataclass(frozen=True)
class Laplace:
    """Laplace's law with a scale, for a share of the places; 0 at the others."""

    scale: float
    share: float = 1.0

    def prior(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        return self.scale**2 * randn((*shape, 2), LIKE, generator).square().sum(-1)

    def given(self, u: Tensor, generator: Generator) -> Tensor:
        # Of the two roots with the same chi-square variable one by its chance (Michael et al.,
        # 1976); their product is 1 in units of b |u|.
        size = self.scale * u.abs().clamp(min=LEAST)
        a = 0.5 * self.scale**2 * randn_like(u, generator).square() / size
        root = 1 + a + (a * (a + 2)).sqrt()
        first = uniforms(u.shape, u, generator) * (1 + 1 / root) < 1
        return size * torch.where(first, root, 1 / root)


Increments = Gauss | Student | Laplace


class Sweep(NamedTuple):
    """A draw x (B, d) of Gibbs' chain, E[x | z, y], and the variances z of the increments."""

    x: Tensor
    mean: Tensor
    z: Tensor


@dataclass(frozen=True)
class LevyProcess:
    """Signals of d places whose increments have one law."""

    law: Increments
    dim: int = 64

    def sample(self, count: int, generator: Generator) -> Tensor:
        """Signals (count, d)."""
        z = self.law.prior((count, self.dim), generator)
        on = uniforms(z.shape, z, generator) < self.law.share
        return (on * z.sqrt() * randn_like(z, generator)).cumsum(1)

    def sweeps(
        self, y: Tensor, a: Tensor, noise: float, count: int, burn_in: int, generator: Generator
    ) -> Iterator[Sweep]:
        """`count` sweeps of a Gibbs chain for each row of y (B, m), after `burn_in` others."""
        law, some = self.law, self.law.share < 1
        odds = math.log(law.share / (1 - law.share)) if some else math.inf
        slab = law.prior((len(y), self.dim), generator)
        on = uniforms(slab.shape, slab, generator) < law.share
        gram = a.mT @ a
        diagonal = torch.equal(gram, torch.diag(gram.diagonal()))
        chain = (_Kalman if diagonal else _Dense)(y, a, noise)
        for number in range(burn_in + count):
            if some:
                on = chain.switched(slab, on, odds, generator)
            x, mean = chain.draw(slab * on, generator)
            if number >= burn_in:
                yield Sweep(x, mean, slab * on)
            slab = law.given(torch.diff(x, dim=1, prepend=x.new_zeros(len(x), 1)), generator)
            if some:
                slab = torch.where(on, slab, law.prior(tuple(slab.shape), generator))

    def denoiser(self, sweeps: int = 40, burn_in: int = 15, seed: int = 0) -> LevyDenoiser:
        """E[x | x_t] by Gibbs sampling, with so many sweeps; of Gaussian increments by one."""
        if isinstance(self.law, Gauss):
            sweeps, burn_in = 1, 0
        return LevyDenoiser(self, sweeps, burn_in, seeded(seed, "Gibbs denoiser"))


@dataclass(frozen=True)
class LevyDenoiser:
    """E[x | x_t] of a Levy process by sweeps anew at every call, differentiable.

    Exact for Gaussian increments; else its error is the posterior's deviation over the root of the
    effective number of sweeps. The Jacobian is the covariance of the same sweeps.
    """

    symmetric_jacobian: ClassVar[bool] = True

    process: LevyProcess
    count: int
    burn_in: int
    generator: torch.Generator

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        x, eye = x_t.detach(), torch.eye(self.process.dim).to(x_t)
        known = (x / level.alpha, eye, level.ratio, self.count, self.burn_in, self.generator)
        sweeps = list(self.process.sweeps(*known))
        means = torch.stack([sweep.mean for sweep in sweeps], 1)  # (B, S, d)
        mean = means.mean(1)
        if not (torch.is_grad_enabled() and x_t.requires_grad):
            return mean
        some = sweeps[:: max(1, self.count // COVARIANCES)]
        within = sum(_covariance(sweep.z, level.ratio) for sweep in some) / len(some)
        between = (means - mean[:, None]).mT @ (means - mean[:, None]) / self.count
        jacobian = (within + between) / level.tweedie
        return mean + torch.einsum("bij,bj->bi", jacobian, x_t - x)


def _covariance(z: Tensor, noise: float) -> Tensor:
    """Cov[x | z, x + noise e], (B, d, d): s^2 - s^4 (K + s^2)^-1 with the prior's covariance K."""
    total, s = z.cumsum(1), noise**2 * torch.eye(z.shape[1]).to(z)
    prior = torch.minimum(total[:, :, None], total[:, None])
    return s - noise**4 * torch.cholesky_inverse(torch.linalg.cholesky(prior + s))


class _Kalman:
    """x | z, y where A' A is diagonal: data (d, B) and their precisions, all rows at a time."""

    def __init__(self, y: Tensor, a: Tensor, noise: float) -> None:
        seen = a.square().sum(0)
        self.data = ((y @ a) / seen.clamp(min=LEAST)).mT.contiguous()
        self.precision = (seen / noise**2).tolist()

    def _updated(self, k: int, m: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of x_k once its own data were seen."""
        p = p / (1 + self.precision[k] * p)
        return torch.lerp(m, self.data[k], self.precision[k] * p), p

    def draw(self, z: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """A draw of x | z, y and its mean, (B, d) each: filtered, then from the last place back."""
        z = z.mT.contiguous()
        m, p, filtered = torch.zeros_like(z[0]), torch.zeros_like(z[0]), []
        for k, step in enumerate(z):
            m, p = self._updated(k, m, p + step)
            filtered.append(torch.stack([m, p]))
        means, variances = torch.stack(filtered, 1)
        ahead = torch.cat([z[1:], torch.full_like(z[:1], math.inf)])
        # x_k = m_k + gain (x_(k+1) - m_k) + noise
        gain = torch.where(ahead > 0, variances / (variances + ahead), 1.0)
        noise = ((1 - gain) * variances).sqrt() * randn(z.mT.shape, z, generator).mT
        rest = torch.stack([(1 - gain) * means, noise], 1)
        x, parts = torch.zeros_like(rest[0]), []
        for k in reversed(range(len(z))):
            x = torch.addcmul(rest[k], gain[k], x)
            parts.append(x)
        mean, deviation = torch.stack(parts[::-1], 2)
        return mean + deviation, mean

    def switched(self, slab: Tensor, on: Tensor, odds: float, generator: Generator) -> Tensor:
        """Which increments are not zero, (B, d), drawn place by place with x integrated out."""
        logits = torch.logit(uniforms(slab.shape, slab, generator)).mT
        slab, z = slab.mT.contiguous(), (slab * on).mT
        q, r, messages = torch.zeros_like(z[0]), torch.zeros_like(z[0]), []
        for k in reversed(range(len(z))):  # of the data from k on: precision q of x_k, q times mean
            q, r = q + self.precision[k], r + self.precision[k] * self.data[k]
            messages.append((q, r))
            q, r = q / (1 + q * z[k]), r / (1 + q * z[k])
        m, p, states = torch.zeros_like(q), torch.zeros_like(q), []
        for k, (q, r) in enumerate(reversed(messages)):
            zero, other = 1 + p * q, 1 + (p + slab[k]) * q
            square = (r - q * m).square() / q.clamp(min=LEAST)
            gain = 0.5 * (zero / other).log() + 0.5 * square * (1 / zero - 1 / other)
            states.append(logits[k] < odds + gain)
            m, p = self._updated(k, m, p + slab[k] * states[k])
        return torch.stack(states, 1)


class _Dense:
    """x | z, y of any matrix, by a Cholesky factor of S for each row."""

    def __init__(self, y: Tensor, a: Tensor, noise: float) -> None:
        self.y, self.noise, self.b = y, noise, a.flip(1).cumsum(1).flip(1)  # A D^-1

    def _factor(self, z: Tensor) -> Tensor:
        noise = self.noise**2 * torch.eye(len(self.b)).to(z)
        return torch.linalg.cholesky((self.b * z[:, None]) @ self.b.mT + noise)

    def draw(self, z: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """As `_Kalman.draw`."""
        u = z.sqrt() * randn_like(z, generator)
        left = self.y - u @ self.b.mT - self.noise * randn_like(self.y, generator)
        solved = torch.cholesky_solve(torch.stack([left, self.y], 2), self._factor(z))
        moved, mean = z * (solved.mT @ self.b).movedim(1, 0)
        return (u + moved).cumsum(1), mean.cumsum(1)

    def switched(self, slab: Tensor, on: Tensor, odds: float, generator: Generator) -> Tensor:
        """As `_Kalman.switched`, with S^-1 kept up to date by changes of rank one."""
        inverse = torch.cholesky_inverse(self._factor(slab * on))
        logits, on = torch.logit(uniforms(slab.shape, slab, generator)), on.clone()
        for k, column in enumerate(self.b.mT):
            v, now = inverse @ column, slab[:, k] * on[:, k]
            tau, beta = v @ column, (v * self.y).sum(1)
            tau0, beta0 = tau / (1 - now * tau), beta / (1 - now * tau)  # without this place
            other = 1 + slab[:, k] * tau0
            on[:, k] = logits[:, k] < odds + 0.5 * (
                slab[:, k] * beta0.square() / other - other.log()
            )
            change = slab[:, k] * on[:, k] - now
            scaled = v * (-change / (1 + change * tau))[:, None]
            inverse = torch.baddbmm(inverse, scaled[:, :, None], v[:, None])
        return on
