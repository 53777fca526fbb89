"""Third and fourth moments of p(x | x_t) along directions (Manor and Michaeli, 2024).

p(x | x_t) is an exponential family with statistic x and parameter alpha x_t / sigma^2, whose
log-partition function has the posterior's cumulants as derivatives. So with D the mean, T = sigma^2
/ alpha and g(s) = u' D(x_t + s u), the cumulants of u' x are

    k1 = g,   k2 = T g',   k3 = T^2 g'',   k4 = T^3 g'''       for directions u of any length

and the central moments k3 and k4 + 3 k2^2. The derivatives are nested in forward mode, about eight
forward passes a direction; networks without forward mode (an energy's gradient inside, fused
kernels) are differentiated backwards three times. The third derivative needs a smooth network
(SiLU, softplus, tanh): kinks are left out of it.

The density that these moments ask for is that of maximum entropy on an interval: positive, with
just these moments, the Gaussian where k3 = k4 = 0. (A Gram-Charlier series has negative values, and
on the whole line none has heavy tails: Junk, 1998.) With h_i the Hermite polynomials that are
orthonormal under the standard normal n(z), it is

    p(z) = n(z) exp(sum_i t_i h_i(z)) / Z(t),     t = argmin log Z(t) - sum_i t_i E[h_i]   (Newton)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmdgs.cost import spend
from mmdgs.denoisers import Denoiser, evaluated, has_symmetric_jacobian, require_denoiser
from mmdgs.derivatives import WrittenOutNorms, load_forward_mode
from mmdgs.errors import UsageError
from mmdgs.linalg.operators import raise_non_finite
from mmdgs.moments.contract import require_input
from mmdgs.noise import NoiseLevel

logger = logging.getLogger("mmdgs")

PASSES = 8  # forward passes that three nested derivatives in forward mode take
REACH, POINTS = 5.0, 401  # of the grid: standard deviations on either side, and points in all
STEPS, HALVINGS, PRECISION = 60, 20, 1e-9  # of Newton's method
SHRINK, SHRINKS = 0.85, 24
"""Skewness and kurtosis are multiplied by this, so often, where no law on the interval has them."""
MARGIN = 0.05  # how far kurtosis must be above its least, 1 + skewness^2, that of two points


@dataclass(frozen=True)
class Marginal:
    """A density on a grid of standard deviations from the mean: grid (n,), density (..., n).

    `skewness` and `excess_kurtosis` are the density's: smaller than asked for where no law has it.
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


@dataclass(frozen=True)
class HigherMoments:
    """Central moments of u' x along directions, (B, k) each; ratios are NaN without variance."""

    mean: Float[Tensor, "batch k"]
    variance: Float[Tensor, "batch k"]
    third: Float[Tensor, "batch k"]
    fourth: Float[Tensor, "batch k"]

    @property
    def skewness(self) -> Float[Tensor, "batch k"]:
        """0 for a Gaussian; positive where the longer tail is along u."""
        return self.third / self._variance**1.5

    @property
    def excess_kurtosis(self) -> Float[Tensor, "batch k"]:
        """0 for a Gaussian; negative for two like modes, positive for heavy tails."""
        return self.fourth / self._variance**2 - 3

    @property
    def _variance(self) -> Tensor:
        return torch.where(self.variance > 0, self.variance, torch.nan)

    def marginal(self) -> Marginal:
        """The density of maximum entropy with these moments, in standard deviations."""
        return maximum_entropy(self.skewness, self.excess_kurtosis)


def higher_moments(
    denoiser: Denoiser, x_t: Tensor, level: NoiseLevel, directions: Float[Tensor, "batch k ..."]
) -> HigherMoments:
    """Mean, variance, third and fourth central moments of u' x for directions u (B, k, ...)."""
    require_denoiser(denoiser)
    require_input(x_t, level, denoiser)
    x, unit, shape = x_t.detach(), level.tweedie, tuple(directions.shape)
    if directions.ndim != x.ndim + 1 or (shape[0], *shape[2:]) != tuple(x.shape):
        raise ValueError(f"directions must be (B, k, ...) for x_t {tuple(x.shape)}, got {shape}")
    # Numbers of size 1 in place of a direction's own length, whose powers rounding would lose.
    lengths = directions.flatten(2).norm(dim=2)
    known = lengths.clamp(min=torch.finfo(x.dtype).tiny)
    units = directions / known.reshape(*lengths.shape, *[1] * (x.ndim - 1))
    each = [_cumulants(denoiser, x, level, u.to(x)) for u in units.detach().unbind(1)]
    k1, k2, k3, k4 = (torch.stack(parts, 1) for parts in zip(*each, strict=True))
    k1, k2 = lengths * k1, lengths**2 * unit * k2
    k3, k4 = lengths**3 * unit**2 * k3, lengths**4 * unit**3 * k4
    for name, values in (("variance", k2), ("third moment", k3), ("fourth moment", k4)):
        raise_non_finite(f"posterior's {name}", values)
    return HigherMoments(k1, k2, k3, k4 + 3 * k2**2)


def _cumulants(denoiser: Denoiser, x: Tensor, level: NoiseLevel, u: Tensor) -> list[Tensor]:
    """g and its first three derivatives at 0, (B,) each."""

    def along(s: Tensor) -> Tensor:
        mean = evaluated(denoiser, x + s.reshape(-1, *[1] * (x.ndim - 1)) * u, level)
        return (mean * u).flatten(1).sum(1)

    start = x.new_zeros(len(x))
    spend(forwards=PASSES)
    if not has_symmetric_jacobian(denoiser):  # forward mode would not see a gradient inside
        try:
            values, first = _forwards(along, start), _backwards(along, start, 1)[1]
            apart, scale = (values[1] - first).abs(), values[1].abs() + first.abs()
            if not (apart > torch.finfo(x.dtype).eps ** (1 / 3) * scale).any():
                return values
            logger.info("forward mode differs from the gradient; differentiating backwards")
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            logger.info("no forward-mode derivatives (%s); differentiating backwards", error)
    try:
        return _backwards(along, start, 3)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UsageError(f"this network cannot be differentiated three times: {error}") from error


def _forwards(along: Callable[[Tensor], Tensor], start: Tensor) -> list[Tensor]:
    """Derivatives of every order up to three, nested in forward mode."""
    load_forward_mode()
    ones = torch.ones_like(start)

    def nested(s: Tensor, order: int) -> tuple[Tensor, ...]:
        if order == 0:
            return (along(s),)
        values, slopes, *_ = torch.func.jvp(lambda s: nested(s, order - 1), (s,), (ones,))
        return (*values, slopes[-1])

    with torch.no_grad(), WrittenOutNorms(), sdpa_kernel(SDPBackend.MATH):
        return list(nested(start, 3))


def _backwards(along: Callable[[Tensor], Tensor], start: Tensor, order: int) -> list[Tensor]:
    """Derivatives of every order up to `order`, each a gradient of the one before."""
    s = start.clone().requires_grad_(True)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        values = [along(s)]
        for i in range(order):
            slope = None
            if values[-1].requires_grad:  # else it is a polynomial of lower order
                (slope,) = torch.autograd.grad(
                    values[-1].sum(), s, create_graph=i + 1 < order, allow_unused=True
                )
            values.append(torch.zeros_like(start) if slope is None else slope)
    return [value.detach() for value in values]


def maximum_entropy(skewness: Tensor, excess_kurtosis: Tensor) -> Marginal:
    """The densities of mean 0, variance 1 and these, (...) each; NaN gives NaN."""
    shape = skewness.shape
    asked = torch.stack([skewness.flatten(), excess_kurtosis.flatten()], 1).double().cpu()
    known = torch.isfinite(asked).all(1)
    grid = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    density = torch.full((len(asked), POINTS), math.nan, dtype=torch.float64)
    matched = torch.full_like(asked, math.nan)
    asked = torch.where(known[:, None], asked, 0.0)
    for _ in range(SHRINKS):
        possible = asked[:, 1] + 2 - asked[:, 0] ** 2 > MARGIN
        tried = (known & possible & matched[:, 0].isnan()).nonzero().flatten()
        if len(tried):
            fitted, done = _fitted(asked[tried], grid)
            density[tried[done]], matched[tried[done]] = fitted[done], asked[tried[done]]
        if not bool((known & matched[:, 0].isnan()).any()):
            break
        asked = SHRINK * asked
    ratios = [column.reshape(shape) for column in matched.unbind(1)]
    return Marginal(grid, density.reshape(*shape, POINTS), *ratios)


def _fitted(ratios: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Densities (N, n) with skewness and excess kurtosis (N, 2), and which of them were found."""
    weights = torch.full_like(z, (z[1] - z[0]).item())
    weights[0] = weights[-1] = weights[0] / 2
    h = torch.stack(
        [z, (z**2 - 1) / 2**0.5, (z**3 - 3 * z) / 6**0.5, (z**4 - 6 * z**2 + 3) / 24**0.5]
    )
    base = weights.log() - z**2 / 2
    scales = torch.tensor([6.0, 24.0], dtype=z.dtype).sqrt()
    target = torch.cat([torch.zeros_like(ratios), ratios / scales], 1)
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
        hessian = torch.einsum("nip,np,njp->nij", centred, p, centred)
        step = -torch.linalg.solve(hessian + 1e-12 * torch.eye(4, dtype=z.dtype), off)
        size, slope = torch.ones(len(t), 1, dtype=z.dtype), (step * off).sum(1)
        for _ in range(HALVINGS):
            worse = dual(t + size * step)[0] > value + 1e-4 * size[:, 0] * slope + 1e-13
            if not bool(worse.any()):
                break
            size = torch.where(worse[:, None], size / 2, size)
        t = t + size * step
        value, p = dual(t)
    return p / weights, (p @ h.T - target).abs().amax(1) < 1e-6
