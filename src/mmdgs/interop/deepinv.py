"""Guests of deepinv: our model as its Denoiser, our restoration as its Reconstructor, our
covariance in its diffusions.

    to_deepinv(model)(x, sigma)                          E[x | x + sigma e]
    Restorer(model)(y, physics)                          the mean of draws of p(x | y)
    PosteriorDiffusion(CovarianceFidelity(model), ...)   its samplers with our covariance
    to_physics(operator, noise)                          an operator of ours as its LinearPhysics

Images are in [0, 1] and sigma is in the same units, as deepinv has them. A LinearPhysics goes into
`mmdgs.restore` and all else here as it is (operators.as_operator).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmdgs.covariances import Covariance
from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError
from mmdgs.interop.rows import by_level
from mmdgs.lazy import optional
from mmdgs.models import Model
from mmdgs.moments import Moments
from mmdgs.noise import NoiseLevel
from mmdgs.operators import Operator, as_operator, measured, noise_variances
from mmdgs.restoration.draws import Restored, restore

optional("deepinv")

from deepinv.models import Denoiser as DeepinvDenoiser, Reconstructor  # noqa: E402
from deepinv.physics import GaussianNoise, LinearPhysics  # noqa: E402
from deepinv.sampling import MomentMatchingDataFidelity  # noqa: E402


class GuestDenoiser(DeepinvDenoiser):  # type: ignore[misc]
    """A denoiser of ours as deepinv's, for x in [0, 1]; made by `to_deepinv`."""

    def __init__(self, denoiser: Denoiser, interval: tuple[float, float]) -> None:
        super().__init__()
        object.__setattr__(self, "denoiser", denoiser)  # a model is no module
        self.interval = interval

    def forward(self, x: Tensor, sigma: float | Tensor, **unused: Any) -> Tensor:
        """E[x | x + sigma e] for x (B, ...), sigma a number or one a row; x where sigma is 0."""
        sigmas = torch.as_tensor(sigma, device=x.device).detach().flatten()
        noisy = sigmas > 0
        if not noisy.any():
            return x.clone()
        low, high = self.interval
        scale = high - low

        def mean(rows: Tensor, level: NoiseLevel) -> Tensor:
            return (self.denoiser(low + scale * rows, level) - low) / scale

        means = by_level(mean, x, 1.0, scale * torch.where(noisy, sigmas, sigmas.max()))
        every = noisy.reshape(-1, *[1] * (x.ndim - 1))
        return means if noisy.all() else torch.where(every, means, x)


def to_deepinv(model: Model) -> GuestDenoiser:
    """A model of ours as deepinv's Denoiser."""
    model.require_denoiser()
    return GuestDenoiser(model, model.interval)


class Restorer(Reconstructor):  # type: ignore[misc]
    """`mmdgs.restore` as a Reconstructor: (y, physics) -> the mean of `draws` draws of p(x | y).

    The noise is that of the physics, a GaussianNoise, unless `noise` is given; other settings are
    those of `restore`. `restored` has the draws themselves.
    """

    def __init__(
        self, model: Model, *, noise: float | Tensor | str | None = None, **settings: Any
    ) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)
        self.noise, self.settings = noise, {"progress": None, **settings}

    def forward(self, y: Tensor, physics: LinearPhysics, **unused: Any) -> Tensor:
        """The mean of the draws, (B, ...) in [0, 1] units."""
        return self.restored(y, physics).mean.to(y)

    def restored(self, y: Tensor, physics: LinearPhysics) -> Restored:
        """All draws, their cost and information."""
        noise = noise_of(physics) if self.noise is None else self.noise
        return restore(self.model, y, physics, noise=noise, **self.settings)


class CovarianceFidelity(MomentMatchingDataFidelity):  # type: ignore[misc]
    """-grad log p(y | x_t) with our covariance C of x | x_t: -(E[x | x_t, y] - E[x | x_t]) /
    sigma^2.

    With D = E[x | x_t] it is C A' (A C A' + tau^2)^-1 (A D - y) / sigma^2, what deepinv's moment
    matching has with C = sigma^2 J. It needs no product with the Jacobian unless C does.
    `covariance` is a name of `Model.posterior`, or an estimator in the units of the model. (A
    subclass of moment matching, since `PosteriorDiffusion` takes the mean from its fidelity for
    known classes alone, and else evaluates the network again.)
    """

    def __init__(
        self, model: Model, covariance: str | Moments = "spectral", *, weight: float = 1.0
    ) -> None:
        super().__init__(denoiser=None, weight=weight)
        object.__setattr__(self, "model", model)
        self.moments = (
            model.posterior(covariance) if isinstance(covariance, str | Covariance) else covariance
        )
        self._known: tuple[Any, torch.Size, Operator] | None = None

    @torch.no_grad()
    def grad(
        self,
        x: Tensor,
        y: Tensor,
        physics: LinearPhysics,
        sigma: float | Tensor,
        *unused: Any,
        get_model_outputs: bool = False,
        **ignored: Any,
    ) -> Any:
        """The gradient at x = x_0 + sigma e (B, ...) in [0, 1] units, and with `get_model_outputs`
        E[x_0 | x] too.
        """
        sigmas = torch.as_tensor(sigma).unique()
        if len(sigmas) != 1:
            raise UsageError(
                f"all rows must be at one noise level, got {len(sigmas)} different sigmas"
            )
        low, high = self.model.interval
        scale, operator = high - low, self._operator(physics, x)
        own = x.detach().to(self.model.device, torch.float32)
        q = self.moments(
            low + scale * own, NoiseLevel(scale * sigmas.item()), generator=torch.default_generator
        )
        offset = operator(q.mean.new_full((1, *operator.shape), low))
        seen = measured(y.detach(), operator).to(q.mean)
        variances = noise_variances(noise_of(physics), operator, seen)
        change = (
            q.given_checked(scale * seen + offset, operator, scale**2 * variances).mean - q.mean
        )
        gradient = (-self.weight / scale / sigmas.item() ** 2 * change).to(x)
        return (gradient, (q.mean - low) / scale) if get_model_outputs else gradient

    def _operator(self, physics: LinearPhysics, x: Tensor) -> Operator:
        """The physics as an operator, checked once."""
        if self._known is None or self._known[0] is not physics or self._known[1] != x.shape[1:]:
            like = torch.empty(0, device=self.model.device)
            shape = self.model.sized(*x.shape[2:]).shape
            self._known = (physics, x.shape[1:], as_operator(physics, shape, like))
        return self._known[2]


def noise_of(physics: Any) -> float | Tensor:
    """The standard deviation of a physics' Gaussian noise."""
    model = getattr(physics, "noise_model", None)
    if not isinstance(model, GaussianNoise):
        raise UsageError(
            f"the noise of {type(physics).__name__} must be Gaussian, got {type(model).__name__}: "
            "give it noise_model=deepinv.physics.GaussianNoise(sigma), or the restorer noise=..."
        )
    sigma = model.sigma
    return sigma.item() if isinstance(sigma, Tensor) and sigma.numel() == 1 else sigma


def to_physics(operator: Operator, noise: float) -> LinearPhysics:
    """An operator of ours as a LinearPhysics with Gaussian noise."""
    return LinearPhysics(
        A=lambda x, **unused: operator(x),
        A_adjoint=lambda y, **unused: operator.adjoint(y),
        img_size=tuple(operator.shape),
        noise_model=GaussianNoise(noise),
    )
