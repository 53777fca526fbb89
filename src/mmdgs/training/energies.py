"""An energy's denoiser for training through torch.compile: its value by a gradient, its gradients by a slope.

D = (x_t - sigma^2 grad f) / alpha has a gradient inside, and torch.compile differentiates a function once only. So

    forward     grad f(x_t), compiled, nothing kept for later
    backward    for a cotangent u of grad f: the gradient in the weights of the slope u' grad f(x_t), which is the
                forward-mode derivative of f along u; its reverse pass, compiled too, is of the usual kernels.

That is eight forward passes' work in place of six, but torch's second derivative of a convolution takes the
gradient of the weights by a convolution with kernels as large as the image, and memory holds one pass at a time.

A small network's thousand short kernels take longer to launch than to run: there, on a GPU, both functions are
recorded as CUDA graphs, whose memory the next step overwrites, so results are copied out. Large ones gain nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.denoisers import EnergyDenoiser, raise_unless_compiler
from mmdgs.networks.dropout import current_keys, dropout_keys, uses_dropout
from mmdgs.noise import NoiseLevel, NoiseLevels

SMALL = 8_000_000
"""Networks of fewer parameters are bound by launches: the MNIST preset (1.3 million) by a factor of 2.4 on an H200."""


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_t: Tensor, owner: CompiledEnergy, level: NoiseLevel | NoiseLevels, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_t)
        ctx.owner, ctx.level, ctx.parameters = owner, level, parameters
        ctx.keys = current_keys(owner.network) if owner.drops else None
        kind = x_t.device.type
        ctx.low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return owner.value(x_t, level)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Any, ...]:
        (x_t,) = ctx.saved_tensors
        low = contextlib.nullcontext() if ctx.low is None else torch.autocast(x_t.device.type, ctx.low)
        wanted = [p for p in ctx.parameters if p.requires_grad]
        with torch.enable_grad(), dropout_keys(ctx.owner.network, ctx.keys), low:
            found = iter(ctx.owner.weight_gradients(x_t, u, ctx.level, wanted))
        return None, None, None, *[next(found) if p.requires_grad else None for p in ctx.parameters]


class CompiledEnergy:
    """The denoiser of an energy network through torch.compile, trainable: the same function as `denoiser`."""

    def __init__(self, denoiser: EnergyDenoiser, network: nn.Module, *, backend: str = "inductor") -> None:
        self.network = network
        self.drops = uses_dropout(network)
        weights = list(network.parameters())
        small = sum(weight.numel() for weight in weights) < SMALL
        self.graphs = backend == "inductor" and small and all(weight.is_cuda for weight in weights)

        def gradient(x_t: Tensor, level: NoiseLevel | NoiseLevels) -> Tensor:
            return torch.func.grad(lambda x: denoiser.call(x, level).sum())(x_t)

        def slope(x_t: Tensor, u: Tensor, level: NoiseLevel | NoiseLevels) -> Tensor:
            return torch.func.jvp(lambda x: denoiser.call(x, level).sum(), (x_t,), (u,))[1]

        self.denoiser = denoiser
        # Shapes as they are: dynamic ones fail inside these transforms.
        options: dict[str, Any] | None = {"triton.cudagraphs": True} if self.graphs else None
        self.gradient = torch.compile(gradient, backend=backend, dynamic=False, options=options)
        self.slope = torch.compile(slope, backend=backend, dynamic=False, options=options)

    def value(self, x_t: Tensor, level: NoiseLevel | NoiseLevels) -> Tensor:
        """grad f(x_t)."""
        with torch.no_grad():
            try:
                return self._kept(self.gradient(x_t, level))
            except Exception as error:
                raise_unless_compiler(error)
                self.gradient = self._plain_gradient
                return self.gradient(x_t, level)

    def weight_gradients(
        self, x_t: Tensor, u: Tensor, level: NoiseLevel | NoiseLevels, weights: list[Tensor]
    ) -> tuple[Any, ...]:
        """The gradients of u' grad f(x_t) in the weights."""
        try:
            found = torch.autograd.grad(self.slope(x_t, u, level), weights, allow_unused=True)
            return tuple(None if g is None else self._kept(g) for g in found)
        except Exception as error:
            raise_unless_compiler(error)
            self.slope = lambda x_t, u, level: (u * self._plain_gradient(x_t, level)).sum()
            return torch.autograd.grad(self.slope(x_t, u, level), weights, allow_unused=True)

    def _kept(self, result: Tensor) -> Tensor:
        return result.clone() if self.graphs else result

    def _plain_gradient(self, x_t: Tensor, level: NoiseLevel | NoiseLevels) -> Tensor:
        return (x_t - level.alpha * self.denoiser(x_t, level)) / level.sigma**2

    def __call__(self, x_t: Tensor, level: NoiseLevel | NoiseLevels, /) -> Tensor:
        gradient = _Gradient.apply(x_t, self, level, *self.network.parameters())
        return (x_t - level.sigma**2 * gradient) / level.alpha
