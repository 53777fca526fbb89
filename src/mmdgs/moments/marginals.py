"""A density from four moments: that of maximum entropy.

Among all densities on an interval with given mean, variance, skewness and excess kurtosis the one of maximum entropy is
exp(polynomial of degree four): positive, with just these moments, the Gaussian where the last two are 0, and with two
modes where they ask for them. A Gram-Charlier series has negative values there, and cut off at 0 it has other moments.
With h_i the Hermite polynomials that are orthonormal under the standard normal n(z), it is

    p(z) = n(z) exp(sum_i t_i h_i(z)) / Z(t),     t = argmin log Z(t) - sum_i t_i E[h_i]         convex: Newton

On the whole line there is none with heavy tails (positive excess kurtosis, Junk 1998). On the interval there is one for
all moments that a law on it can have, and it puts what the tails ask for near the ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

REACH, POINTS = 5.0, 401
"""Standard deviations on either side, and points in all."""
STEPS, HALVINGS, PRECISION = 60, 20, 1e-9
SHRINK, SHRINKS = 0.85, 24
"""What is asked for is multiplied by this, so often at the most, where no law on the interval has such moments."""
MARGIN = 0.05
"""How far kurtosis must be above its least, 1 + skewness^2, that of two points."""


@dataclass(frozen=True)
class Marginal:
    """A density on a grid of standard deviations from the mean: grid (n,), density (..., n).

    `skewness` and `excess_kurtosis` are the density's: smaller in size than what was asked for where no law has that.
    """

    grid: Float[Tensor, " n"]
    density: Float[Tensor, "... n"]
    skewness: Float[Tensor, "..."]
    excess_kurtosis: Float[Tensor, "..."]

    @property
    def modes(self) -> Tensor:
        """How many peaks each density has within 3.5 standard deviations, (...)."""
        inner = self.density[..., self.grid.abs() <= 3.5]
        peak = (inner[..., 1:-1] > inner[..., :-2]) & (inner[..., 1:-1] >= inner[..., 2:])
        tall = inner[..., 1:-1] > 0.01 * inner.amax(-1, keepdim=True)
        return (peak & tall).sum(-1)


def maximum_entropy(skewness: Float[Tensor, "..."], excess_kurtosis: Float[Tensor, "..."]) -> Marginal:
    """The densities of mean 0, variance 1 and these; NaN gives NaN."""
    shape = skewness.shape
    wanted = torch.stack([skewness.flatten(), excess_kurtosis.flatten()], 1).double().cpu()
    known = torch.isfinite(wanted).all(1)
    grid = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    density = torch.full((len(wanted), POINTS), math.nan, dtype=torch.float64)
    matched = torch.full_like(wanted, math.nan)
    asked = torch.where(known[:, None], wanted, 0.0)
    for _ in range(SHRINKS):
        possible = asked[:, 1] + 2 - asked[:, 0] ** 2 > MARGIN
        tried = (known & possible & matched[:, 0].isnan()).nonzero().flatten()
        if len(tried):
            found, done = _fitted(asked[tried], grid)
            density[tried[done]], matched[tried[done]] = found[done], asked[tried[done]]
        if not bool((known & matched[:, 0].isnan()).any()):
            break
        asked = SHRINK * asked
    return Marginal(grid, density.reshape(*shape, POINTS), matched[:, 0].reshape(shape), matched[:, 1].reshape(shape))


def _fitted(wanted: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Densities (N, n) with skewness and excess kurtosis (N, 2), and for which of them they were found."""
    z, weights = grid, torch.full_like(grid, (grid[1] - grid[0]).item())
    weights[0] = weights[-1] = weights[0] / 2
    h = torch.stack([z, (z**2 - 1) / 2**0.5, (z**3 - 3 * z) / 6**0.5, (z**4 - 6 * z**2 + 3) / 24**0.5])
    base = weights.log() - z**2 / 2
    target = torch.cat([torch.zeros_like(wanted), wanted / torch.tensor([6.0, 24.0], dtype=z.dtype).sqrt()], 1)
    t = torch.zeros_like(target)

    def dual(t: Tensor) -> tuple[Tensor, Tensor]:
        logs = base + t @ h
        return torch.logsumexp(logs, 1) - (t * target).sum(1), logs.softmax(1)

    value, p = dual(t)
    for _ in range(STEPS):
        off = p @ h.T - target
        if bool((off.abs().amax(1) < PRECISION).all()):
            break
        centred = h - (p @ h.T)[:, :, None]
        hessian = torch.einsum("nip,np,njp->nij", centred, p, centred) + 1e-12 * torch.eye(4, dtype=z.dtype)
        step = -torch.linalg.solve(hessian, off)
        size = torch.ones(len(t), 1, dtype=z.dtype)
        slope = (step * off).sum(1)
        for _ in range(HALVINGS):
            tried, _ = dual(t + size * step)
            worse = tried > value + 1e-4 * size[:, 0] * slope + 1e-13
            if not bool(worse.any()):
                break
            size = torch.where(worse[:, None], size / 2, size)
        t = t + size * step
        value, p = dual(t)
    done = (p @ h.T - target).abs().amax(1) < 1e-6
    return p / weights, done
