"""Third and fourth moments of p(x | x_t) along directions, by derivatives of the denoiser (Manor and Michaeli, 2024).

p(x | x_t) is an exponential family with statistic x and parameter alpha x_t / sigma^2, and its log-partition function
has the posterior's cumulants as derivatives. So with D the mean, T = sigma^2 / alpha and g(s) = u' D(x_t + s u), the
cumulants of u' x are

    k1 = g,   k2 = T g',   k3 = T^2 g'',   k4 = T^3 g'''       skewness k3 / k2^1.5, excess kurtosis k4 / k2^2

for directions u of any length, and the central moments k3 and k4 + 3 k2^2. The derivatives are nested in forward mode,
which takes about as long as eight forward passes a direction; networks that have no forward mode (an energy's gradient
inside, fused kernels) are differentiated backwards three times.

The third derivative needs a smooth network (SiLU, softplus, tanh): kinks, as ELU has in its second derivative, are left
out of it.
"""

from __future__ import annotations

import logging
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
from mmdgs.moments.marginals import Marginal, maximum_entropy
from mmdgs.noise import NoiseLevel

logger = logging.getLogger("mmdgs")

PASSES = 8
"""Forward passes that three nested derivatives in forward mode take."""


@dataclass(frozen=True)
class HigherMoments:
    """Central moments of u' x along directions, (B, k) each; where a variance is not positive the ratios are NaN."""

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
        """0 for a Gaussian; negative for two modes of like weight, positive for heavy tails or a rare mode."""
        return self.fourth / self._variance**2 - 3

    @property
    def _variance(self) -> Tensor:
        return torch.where(self.variance > 0, self.variance, torch.nan)

    def marginal(self) -> Marginal:
        """The density of maximum entropy with these four moments, in standard deviations from the mean."""
        return maximum_entropy(self.skewness, self.excess_kurtosis)


def higher_moments(
    denoiser: Denoiser,
    x_t: Float[Tensor, "batch ..."],
    level: NoiseLevel,
    directions: Float[Tensor, "batch k ..."],
) -> HigherMoments:
    """Mean, variance, third and fourth central moments of u' x for directions u (B, k, ...), of any length."""
    require_denoiser(denoiser)
    require_input(x_t, level, denoiser)
    if directions.ndim != x_t.ndim + 1 or (len(directions), *directions.shape[2:]) != tuple(x_t.shape):
        raise ValueError(
            f"directions must be (B, k, ...) for x_t {tuple(x_t.shape)}, as those of components are; "
            f"got {tuple(directions.shape)}"
        )
    x, unit = x_t.detach(), level.tweedie
    # Numbers of size 1 in place of a direction's own length, which the powers below would lose to rounding.
    lengths = directions.flatten(2).norm(dim=2)
    known = lengths.clamp(min=torch.finfo(x.dtype).tiny).reshape(*lengths.shape, *[1] * (x.ndim - 1))
    found = [_cumulants(denoiser, x, level, u.to(x)) for u in (directions / known).detach().unbind(1)]
    k1, k2, k3, k4 = (torch.stack([one[i] for one in found], 1) for i in range(4))
    k1, k2, k3, k4 = lengths * k1, lengths**2 * unit * k2, lengths**3 * unit**2 * k3, lengths**4 * unit**3 * k4
    for name, values in (("variance", k2), ("third moment", k3), ("fourth moment", k4)):
        raise_non_finite(f"posterior's {name}", values)
    return HigherMoments(k1, k2, k3, k4 + 3 * k2**2)


def _cumulants(denoiser: Denoiser, x: Tensor, level: NoiseLevel, u: Tensor) -> list[Tensor]:
    """g and its first three derivatives at 0, (B,) each."""

    def along(s: Tensor) -> Tensor:
        mean = evaluated(denoiser, x + s.reshape(-1, *[1] * (x.ndim - 1)) * u, level)
        return (mean * u).flatten(1).sum(1)

    start = x.new_zeros(len(x))
    if not has_symmetric_jacobian(denoiser):  # an energy's gradient inside would leave forward mode unseen
        try:
            found = _forwards(along, start)
            first = _backwards(along, start, 1)[1]
            scale = found[1].abs() + first.abs()
            if not ((found[1] - first).abs() > torch.finfo(x.dtype).eps ** (1 / 3) * scale).any():
                spend(forwards=PASSES)
                return found
            logger.info("the network's forward-mode derivative differs from its gradient; differentiating backwards")
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            logger.info("no forward-mode derivatives (%s); differentiating backwards", error)
    try:
        found = _backwards(along, start, 3)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UsageError(f"this network cannot be differentiated three times: {error}") from error
    spend(forwards=PASSES)
    return found


def _forwards(along: Callable[[Tensor], Tensor], start: Tensor) -> list[Tensor]:
    """Derivatives of every order up to three, nested in forward mode."""
    load_forward_mode()
    ones = torch.ones_like(start)

    def with_derivative(f: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor], tuple[Tensor, ...]]:
        def wider(s: Tensor) -> tuple[Tensor, ...]:
            values, slopes = torch.func.jvp(f, (s,), (ones,))  # type: ignore[misc]  # three only with has_aux
            return (*values, slopes[-1])

        return wider

    f: Callable[[Tensor], tuple[Tensor, ...]] = lambda s: (along(s),)  # noqa: E731
    for _ in range(3):
        f = with_derivative(f)
    with torch.no_grad(), WrittenOutNorms(), sdpa_kernel(SDPBackend.MATH):
        return list(f(start))


def _backwards(along: Callable[[Tensor], Tensor], start: Tensor, order: int) -> list[Tensor]:
    """Derivatives of every order up to `order`, each a gradient of the one before."""
    s = start.clone().requires_grad_(True)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        found = [along(s)]
        for i in range(order):
            if not found[-1].requires_grad:  # a polynomial of lower order
                found.append(torch.zeros_like(start))
                continue
            slope = torch.autograd.grad(found[-1].sum(), s, create_graph=i + 1 < order, allow_unused=True)[0]
            found.append(torch.zeros_like(start) if slope is None else slope)
    return [one.detach() for one in found]
