"""The Denoiser protocol, and adapters that turn any network trained to remove noise into one.

A denoiser is a differentiable function D(x_t, level) = E[x | x_t]. With x_t = alpha x + sigma e:

    energy f     score = -grad f,  then as score
    score s      D = (x_t + sigma^2 s) / alpha                 (Tweedie; eq. mean:function)
    noise eps    D = (x_t - sigma eps) / alpha
    clean x0     D = x0
    blind x0     D = x0(x_t / alpha), whatever the level
    velocity v   D = (alpha x_t - sigma v) / (alpha^2 + sigma^2),     v = alpha e - sigma x
    edm F        D = alpha d^2 / c^2 x_t + sigma d / c F(x_t / c),    c^2 = sigma^2 + alpha^2 d^2

The last is the preconditioning of Karras et al. (2022, table 1) in x_t / alpha: with data of
standard deviation d, what the network sees and puts out has variance 1 at every level.

Networks' denoisers also take `NoiseLevels`, a level for each row, as training at many levels needs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mmdgs.compiled import Pure, applies, compiled_mean
from mmdgs.cost import spend
from mmdgs.errors import first_line, require_shape
from mmdgs.networks import NETWORKS, PerceptronHessian
from mmdgs.noise import AnyLevel, NoiseLevel, NoiseLevels

logger = logging.getLogger("mmdgs")

Network = Callable[..., Tensor]

DATA_STD = 0.5
"""The data's standard deviation that EDM's preconditioning and weighting assume (table 1)."""
CLOSED_FORM_LIMIT = 64
"""Dimensions up to which a closed-form Hessian is used: it takes d times a forward's memory."""
WRAP = (
    "Wrap a network by what it predicts: mmdgs.energy_denoiser(network), score_denoiser, "
    "noise_denoiser, clean_denoiser, velocity_denoiser or edm_denoiser"
)


@runtime_checkable
class Denoiser(Protocol):
    """E[x | x_t]: x_t (B, ...) -> (B, ...), rows independent, differentiable in x_t."""

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor: ...


@runtime_checkable
class HasPure(Protocol):
    """A denoiser that may be a function of tensors alone, for the fast path; else None."""

    def pure(self, level: AnyLevel) -> Pure | None: ...


def subtracts_noise(denoiser: Denoiser) -> bool:
    """Whether D takes the noise off x_t, so that its Jacobian is small by cancellation."""
    return bool(getattr(denoiser, "subtracts", False))


def has_symmetric_jacobian(denoiser: Denoiser) -> bool:
    """Whether a denoiser says that its Jacobian is symmetric, as that of a gradient is."""
    return bool(getattr(denoiser, "symmetric_jacobian", False))


def takes_level(network: Callable[..., Any]) -> bool:
    """Whether a network is called as net(x_t, level) rather than net(x_t).

    It is when its second positional parameter has no default or is called `level`.
    """
    try:
        parameters = _signature(network).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return False
    return positional[1].default is inspect.Parameter.empty or positional[1].name == "level"


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function.forward if isinstance(function, nn.Module) else function)


@dataclass(frozen=True)
class NetworkDenoiser:
    """A network and the formula of its mean; `subtracts`: it takes the noise off x_t; `blind`: it
    is the same at every level.
    """

    network: Network
    with_level: bool
    formula: Callable[[Any, Tensor, AnyLevel], Tensor] | None = None  # None: it predicts clean x
    data_std: float = DATA_STD
    subtracts: bool = False
    blind: bool = False

    def __call__(self, x_t: Tensor, level: AnyLevel, /) -> Tensor:
        if self.formula is None:
            return self.predict(x_t, level)
        return self.formula(self, x_t, level)

    def call(self, x_t: Tensor, level: AnyLevel) -> Tensor:
        """The network's output, in x_t's dtype (mixed precision may give another)."""
        try:
            out = self.network(x_t, level) if self.with_level else self.network(x_t)
        except RuntimeError as error:
            explain_mismatch(self.network, x_t, error)
            raise
        if not isinstance(out, Tensor):
            raise ValueError(f"the network must return a torch tensor, got {type(out).__name__}")
        if x_t.requires_grad and torch.is_grad_enabled() and not out.requires_grad:
            raise ValueError(
                "the network is not differentiable in x_t: its output does not depend on x_t "
                "through autograd. Does it run under torch.no_grad()?"
            )
        return out.to(x_t.dtype)

    def pure(self, level: AnyLevel) -> Pure | None:
        """For the fast path; a plain function holds weights where nobody can see them."""
        if not isinstance(self.network, nn.Module):
            return None
        return Pure(self._pure, level.alpha, (level.alpha, level.sigma), self.network, self)

    def _pure(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        return self(x_t, NoiseLevels(alpha=alpha, sigma=sigma))

    def predict(self, x_t: Tensor, level: AnyLevel) -> Tensor:
        """The network's output, which must have its input's shape."""
        out = self.call(x_t, level)
        require_shape("the network's output", out.shape, x_t.shape)
        return out


def explain_mismatch(network: object, x_t: Tensor, error: RuntimeError) -> None:
    """Raise ValueError where a network failed since its dtype, device or width is not x_t's."""
    weights = next(network.parameters(), x_t) if isinstance(network, nn.Module) else x_t
    if weights.dtype != x_t.dtype or weights.device != x_t.device:
        raise ValueError(
            f"the network is {weights.dtype} on {weights.device} but x_t is {x_t.dtype} on "
            f"{x_t.device}; convert one with .to(...)"
        ) from error
    if "shapes cannot be multiplied" in str(error):
        raise ValueError(
            f"the network does not take x_t of shape {tuple(x_t.shape)} ({first_line(error)}); "
            "give rows of as many numbers as its first layer has inputs"
        ) from error


def require_denoiser(denoiser: object) -> None:
    """Refuse what is no denoiser D(x_t, level), as a network: nothing says what it predicts."""
    problem = None
    if not callable(denoiser):
        problem = "it cannot be called"
    elif isinstance(denoiser, tuple(NETWORKS.values())):
        problem = "it is a network"
    else:
        try:
            _signature(denoiser).bind(None, None)
        except ValueError:  # some builtins have no signature
            return
        except TypeError as error:
            problem = f"it cannot be called with x_t and a level ({error})"
    if problem is not None:
        name = type(denoiser).__name__
        raise TypeError(f"{name} is no denoiser D(x_t, level): {problem}. {WRAP}")


@dataclass(frozen=True)
class EnergyDenoiser(NetworkDenoiser):
    """D = (x_t - sigma^2 grad f) / alpha for an energy f: x_t -> (B,) or (B, ...), summed."""

    symmetric_jacobian: ClassVar[bool] = True  # a Hessian

    def __call__(self, x_t: Tensor, level: AnyLevel, /) -> Tensor:
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x_t if x_t.requires_grad else x_t.detach().requires_grad_(True)
            energy = self.call(x, level)
            if energy.ndim == 0 or energy.shape[0] != len(x):
                shapes = f"({len(x)}, ...), got shape {tuple(energy.shape)}"
                raise ValueError(f"an energy must return one value or several per row: {shapes}")
            (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=differentiable)
        return (x_t - level.sigma**2 * gradient) / level.alpha

    def _pure(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        level = NoiseLevels(alpha=alpha, sigma=sigma)
        return (x_t - sigma**2 * torch.func.grad(lambda x: self.call(x, level).sum())(x_t)) / alpha

    def mean_and_jacobian(self, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor] | None:
        """D and dD/dx_t (B, d, d) of a perceptron of few inputs, in closed form; else None."""
        closed_form = PerceptronHessian.of(self.network)  # each time: layers may have changed
        if closed_form is None or x_t.ndim != 2 or x_t.shape[1] > CLOSED_FORM_LIMIT:
            return None
        try:
            with torch.no_grad():
                gradient, hessian = closed_form(x_t)
        except RuntimeError as error:
            explain_mismatch(self.network, x_t, error)
            raise
        jacobian = hessian.mul_(-(level.sigma**2) / level.alpha)
        jacobian.diagonal(dim1=1, dim2=2).add_(1 / level.alpha)
        return torch.add(x_t, gradient, alpha=-(level.sigma**2)) / level.alpha, jacobian


def _by_score(denoiser: NetworkDenoiser, x_t: Tensor, level: AnyLevel) -> Tensor:
    return (x_t + level.sigma**2 * denoiser.predict(x_t, level)) / level.alpha


def _by_noise(denoiser: NetworkDenoiser, x_t: Tensor, level: AnyLevel) -> Tensor:
    return (x_t - level.sigma * denoiser.predict(x_t, level)) / level.alpha


def _by_velocity(denoiser: NetworkDenoiser, x_t: Tensor, level: AnyLevel) -> Tensor:
    v = denoiser.predict(x_t, level)
    return (level.alpha * x_t - level.sigma * v) / (level.alpha**2 + level.sigma**2)


def _by_blind(denoiser: NetworkDenoiser, x_t: Tensor, level: AnyLevel) -> Tensor:
    return denoiser.predict(x_t / level.alpha, level)


def _by_edm(denoiser: NetworkDenoiser, x_t: Tensor, level: AnyLevel) -> Tensor:
    d, alpha, sigma = denoiser.data_std, level.alpha, level.sigma
    variance = sigma**2 + (alpha * d) ** 2
    c = variance**0.5
    out = denoiser.predict(x_t / c, level)
    return (alpha * d**2 / variance) * x_t + (sigma * d / c) * out


def energy_denoiser(f: Network) -> EnergyDenoiser:
    """The denoiser of an energy f(x_t) -> (B,), or (B, ...) that is summed; p = exp(-f)."""
    return EnergyDenoiser(f, takes_level(f), subtracts=True)


def score_denoiser(s: Network) -> NetworkDenoiser:
    """The denoiser of a score network s(x_t) = grad log p(x_t)."""
    return NetworkDenoiser(s, takes_level(s), _by_score, subtracts=True)


def noise_denoiser(eps: Network) -> NetworkDenoiser:
    """The denoiser of a network that predicts the noise e."""
    return NetworkDenoiser(eps, takes_level(eps), _by_noise, subtracts=True)


def clean_denoiser(x0: Network) -> NetworkDenoiser:
    """The denoiser of a network that predicts the clean x."""
    return NetworkDenoiser(x0, takes_level(x0))


def blind_denoiser(x0: Network) -> NetworkDenoiser:
    """The denoiser of a blind network x0(x_t / alpha), which predicts the clean x at any level.

    Only the covariance is told the level; `mmdgs.jacobians.blind_sigma` estimates it.
    """
    return NetworkDenoiser(x0, False, _by_blind, blind=True)


def velocity_denoiser(v: Network) -> NetworkDenoiser:
    """The denoiser of a network that predicts the velocity v = alpha e - sigma x."""
    return NetworkDenoiser(v, takes_level(v), _by_velocity)


def edm_denoiser(network: Network, *, data_std: float = DATA_STD) -> NetworkDenoiser:
    """The denoiser of a network that is preconditioned as in EDM: the one for many levels."""
    return NetworkDenoiser(network, takes_level(network), _by_edm, data_std)


def pure_of(denoiser: Denoiser, x_t: Tensor, level: AnyLevel) -> Pure | None:
    """A denoiser for the fast path, where a batch is one for it."""
    return denoiser.pure(level) if applies(x_t) and isinstance(denoiser, HasPure) else None


def fast_mean(denoiser: Denoiser, x_t: Tensor, level: AnyLevel) -> Tensor:
    """D(x_t), by the fast path where there is one and nothing is to be differentiated."""
    pure = None if torch.is_grad_enabled() else pure_of(denoiser, x_t, level)
    mean = None if pure is None else compiled_mean(pure, x_t)
    return evaluated(denoiser, x_t, level) if mean is None else mean


def evaluated(denoiser: Denoiser, x_t: Tensor, level: AnyLevel) -> Tensor:
    """D(x_t); one that takes the level for a number fails with an explanation."""
    try:
        return denoiser(x_t, level)  # type: ignore[arg-type]  # networks' take rows' levels
    except (AttributeError, TypeError) as error:
        if "NoiseLevel" not in str(error):
            raise
        raise TypeError(
            f"the network failed on its second argument ({first_line(error)}): networks and "
            "denoisers are called with (x_t, level), level a NoiseLevel with .sigma and .alpha. "
            "Wrap one that takes a number or a time: "
            "mmdgs.noise_denoiser(lambda x_t, level: network(x_t, level.sigma))"
        ) from error


def denoise(denoiser: Denoiser, x_t: Tensor, level: AnyLevel) -> Tensor:
    """D(x_t), checked: another shape would broadcast unseen."""
    spend(forwards=1)
    return checked(fast_mean(denoiser, x_t, level), x_t)


def checked(mean: Tensor, x_t: Tensor) -> Tensor:
    """A denoiser's output, which must have its input's shape."""
    if not isinstance(mean, Tensor):
        raise ValueError(f"the denoiser must return a torch tensor, got {type(mean).__name__}")
    require_shape("the denoiser's output", mean.shape, x_t.shape)
    return mean


def score(denoiser: Denoiser, x_t: Tensor, level: AnyLevel) -> Tensor:
    """The score of the noised density that a denoiser implies: (alpha D - x_t) / sigma^2."""
    return (level.alpha * denoise(denoiser, x_t, level) - x_t) / level.sigma**2


@dataclass(frozen=True)
class Derived:
    """A denoiser made of one that subtracts, or is symmetric, as that does."""

    denoiser: Denoiser

    @property
    def symmetric_jacobian(self) -> bool:
        return has_symmetric_jacobian(self.denoiser)

    @property
    def subtracts(self) -> bool:
        return subtracts_noise(self.denoiser)


class Compiled:
    """A denoiser or network through torch.compile: the same function of (x_t, level), trainable.

    Where it cannot be compiled it runs as it is, and the log says why. Not for energies, whose
    denoiser has a gradient inside: `training.objective.CompiledEnergy` is.
    """

    def __init__(self, function: Callable[..., Any], *, backend: str = "inductor") -> None:
        with_level = takes_level(function)

        def call(x_t: Tensor, level: AnyLevel) -> Any:
            return function(x_t, level) if with_level else function(x_t)

        self.plain = call
        self.function = torch.compile(call, backend=backend, dynamic=False)

    def __call__(self, x_t: Tensor, level: AnyLevel) -> Any:
        try:
            return self.function(x_t, level)
        except Exception as error:
            raise_unless_compiler(error)
            self.function = self.plain
            return self.plain(x_t, level)


def raise_unless_compiler(error: Exception) -> None:
    """Raise an error again, unless it is torch.compile's: then log why something runs without."""
    from torch._dynamo.exc import TorchDynamoException  # slow to import

    if not isinstance(error, TorchDynamoException):
        raise error
    logger.warning("torch.compile failed (%s); going on without it", first_line(error))
