"""Products with a denoiser's Jacobian J = dD/dx_t, all from one forward pass that also gives the mean.

    v' J       reverse mode: one backward pass, any number of v batched
    J v        u -> u' J is linear and J v is its derivative: a backward pass through that backward pass
    rows of J  v' J with basis vectors: the whole matrix, or its diagonal

Reverse mode comes first since fused attention has no forward-mode derivative. On a GPU all of it goes through the fast
path (compiled.py) where that can be: the same products, from compiled programs.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mmdgs.compiled import Pure, compiled_mean, compiled_products
from mmdgs.cost import spend
from mmdgs.denoisers import Denoiser, KnowsJacobian, checked, evaluated, has_symmetric_jacobian, pure_of
from mmdgs.derivatives import SecondOrder, load_forward_mode
from mmdgs.errors import UsageError
from mmdgs.memory import evenly
from mmdgs.noise import AnyLevel, NoiseLevel
from mmdgs.runtime import stop_if_asked

logger = logging.getLogger("mmdgs")

BYTES_A_NUMBER = 1 << 14
"""Of a GPU's memory, for each number of the cotangents that go through at once: more products go in chunks.

The paper's U-Net took 3 kB a number in all, so this keeps to a fifth of the memory."""
CPU_NUMBERS = 1 << 12
"""How many numbers the cotangents of one batched product may hold on a CPU.

There batching pays only while overhead dominates: ten products at d = 3,072 took 51 ms one by one and
80 ms at once (a small convolutional network, batch 8, two cores)."""


Pullback = Callable[[Tensor], Tensor]


@runtime_checkable
class Linearised(Protocol):
    """A denoiser at x_t to first order: D(x_t), and products of v (n, B, ...) with its Jacobian J."""

    @property
    def mean(self) -> Tensor:
        """D(x_t), detached."""

    def pull(self, v: Tensor) -> Tensor:
        """v' J; where J is symmetric, J v is the same."""

    def symmetric(self, v: Tensor) -> Tensor:
        """(J + J') v / 2."""


def linearised(denoiser: Denoiser, x_t: Tensor, level: AnyLevel, *, symmetric: bool | None = None) -> Linearised:
    """A denoiser to first order at x_t; `symmetric` says whether its Jacobian is, None asks the denoiser."""
    symmetric = has_symmetric_jacobian(denoiser) if symmetric is None else symmetric
    spend(forwards=1)
    pure = pure_of(denoiser, x_t, level)
    if pure is None:
        return _Graph(denoiser, x_t, level, symmetric)
    return _Programs(pure, denoiser, x_t, level, symmetric)


class _Graph:
    """One forward pass, whose graph serves the mean and all products.

    Where J is known to be symmetric a product with (J + J') / 2 is one backward pass; else J v is a second product.
    """

    def __init__(self, denoiser: Denoiser, x_t: Tensor, level: AnyLevel, symmetric: bool) -> None:
        done = _forward(denoiser, x_t, level, has_symmetric_jacobian(denoiser))
        self.mean = done.mean.detach()
        self._pullback = _pullback(done.mean, done.x, done.layout)
        self._pushforward = None if symmetric else _pushforward(denoiser, x_t, level, done)

    def pull(self, v: Tensor) -> Tensor:
        return self._pullback(v)

    def symmetric(self, v: Tensor) -> Tensor:
        pulled = self._pullback(v)
        return pulled if self._pushforward is None else 0.5 * (pulled + self._pushforward(v, pulled))


class _Programs:
    """The fast path: the mean comes along with the first products; what it refuses, a graph does."""

    def __init__(self, pure: Pure, denoiser: Denoiser, x_t: Tensor, level: AnyLevel, symmetric: bool) -> None:
        self._pure, self._x, self._known = pure, x_t.detach(), symmetric
        self._mean: Tensor | None = None
        self._plain = lru_cache(maxsize=1)(lambda: _Graph(denoiser, x_t, level, symmetric))

    @property
    def mean(self) -> Tensor:
        if self._mean is None:
            found = compiled_mean(self._pure, self._x)
            self._mean = self._plain().mean if found is None else checked(found, self._x)
        return self._mean

    def pull(self, v: Tensor) -> Tensor:
        # A derivative of a gradient is cheaper forwards, and of a symmetric Jacobian it is the same.
        return self._product("push" if self._known else "pull", v, products=1)

    def symmetric(self, v: Tensor) -> Tensor:
        return self.pull(v) if self._known else self._product("symmetric", v, products=2)

    def _product(self, kind: str, v: Tensor, products: int) -> Tensor:
        stop_if_asked()
        found = compiled_products(self._pure, self._x, v, kind=kind)
        if found is None:
            return self._plain().symmetric(v) if kind == "symmetric" else self._plain().pull(v)
        spend(products=products * len(v))
        self._mean = checked(found[0], self._x)
        return found[1]


@dataclass(frozen=True)
class _Pass:
    """One forward pass with its graph: D(x), x itself, and the memory layout products are fastest in."""

    mean: Tensor
    x: Tensor
    layout: torch.memory_format


def _forward(denoiser: Denoiser, x_t: Tensor, level: AnyLevel, gradient: bool) -> _Pass:
    """`gradient` says that the denoiser is one, so that products are derivatives of the second order."""
    # Convolutions' backward passes took 0.65 of the time in this layout on a CPU; the numbers are the same.
    image = x_t.ndim == 4 and x_t.device.type == "cpu" and chunk_size(x_t) == 1
    layout = torch.channels_last if image else torch.preserve_format
    x = x_t.detach().clone(memory_format=layout).requires_grad_(True)
    # By hand they take 0.6 of the time of autograd's on a CPU, but go one by one.
    layers = SecondOrder() if gradient and image else contextlib.nullcontext()
    with torch.enable_grad(), layers:
        mean = checked(evaluated(denoiser, x, level), x_t)
    if not mean.requires_grad:
        raise ValueError("the denoiser is not differentiable in x_t: does its network run under torch.no_grad()?")
    return _Pass(mean, x, layout)


def _pullback(output: Tensor, x: Tensor, layout: torch.memory_format) -> Pullback:
    """v (n, B, ...) -> v' d output/dx, through one graph: batched where its operations can be, else one by one."""

    def product(v: Tensor, batched: bool) -> Tensor:
        return torch.autograd.grad(
            output, x, v, retain_graph=True, is_grads_batched=batched, allow_unused=True, materialize_grads=True
        )[0]

    batchable = True

    def pullback(v: Tensor) -> Tensor:
        nonlocal batchable
        stop_if_asked()  # a draw takes dozens of products
        spend(products=len(v))
        if len(v) > 1 and batchable:
            try:
                return product(v, batched=True)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # an operation without a batching rule
                batchable = False
                logger.info("batched products are not available here (%s); taking them one by one", error)
        return torch.stack([product(row.clone(memory_format=layout), batched=False) for row in v])

    return pullback


def _pushforward(denoiser: Denoiser, x_t: Tensor, level: AnyLevel, done: _Pass) -> Callable[[Tensor, Tensor], Tensor]:
    """v and v' J (n, B, ...) -> J v: the derivative of u -> u' J, which is linear, along v; else in forward mode."""
    reverse: Pullback | None = None
    failure: RuntimeError | None = None

    def build() -> Pullback:
        u = torch.zeros_like(done.mean, requires_grad=True)
        with torch.enable_grad():
            (image,) = torch.autograd.grad(
                done.mean, done.x, u, create_graph=True, allow_unused=True, materialize_grads=True
            )
        return _pullback(image, u, done.layout)

    def pushforward(v: Tensor, pulled: Tensor) -> Tensor:
        nonlocal reverse, failure
        if failure is None:
            try:
                reverse = reverse or build()
                pushed = reverse(v)
                # Autograd passes by what has no second derivative wherever another path leads to u.
                if _adjoint(v, pulled, pushed):
                    return pushed
                raise RuntimeError("a part of its backward pass has no derivative")
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reverse, failure = None, error.with_traceback(None)  # whose frames would keep the graph alive
                logger.info("the network cannot be differentiated twice (%s); trying forward mode", failure)
        return _forward_mode(denoiser, x_t, level, v, failure)

    return pushforward


def _adjoint(v: Tensor, pulled: Tensor, pushed: Tensor) -> bool:
    """Whether v' (J' v) = v' (J v) for v (n, B, ...), within the cube root of the precision."""
    v, pulled, pushed = v.flatten(2), pulled.flatten(2), pushed.flatten(2)
    scale = v.norm(dim=2) * (pulled.norm(dim=2) + pushed.norm(dim=2))
    return not ((v * (pulled - pushed)).sum(2).abs() > torch.finfo(v.dtype).eps ** (1 / 3) * scale).any()


def _forward_mode(denoiser: Denoiser, x_t: Tensor, level: AnyLevel, v: Tensor, failure: RuntimeError) -> Tensor:
    """J v for v (n, B, ...), by one forward pass each; the last resort after `failure`."""
    try:
        at: Pullback = lambda x: denoiser(x, level)  # type: ignore[arg-type]  # noqa: E731
        load_forward_mode()
        products = [torch.func.jvp(at, (x_t.detach(),), (row,))[1] for row in v]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UsageError(
            "symmetrising the Jacobian takes products J v as well as v' J, and this network can neither be "
            f"differentiated twice ({failure}) nor in forward mode ({error}). Fused attention is a common cause: "
            "run it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH). Else say symmetric=True if the Jacobian "
            "is nearly symmetric, or use DiagonalMoments(denoiser, probes=10)"
        ) from error
    return torch.stack(products)


def chunk_size(x_t: Tensor) -> int:
    """How many products go through at once: as many as keep their cotangents within the budget."""
    if x_t.is_cuda:
        total = torch.cuda.get_device_properties(x_t.device).total_memory
        return max(1, total // BYTES_A_NUMBER // x_t.numel())
    return max(1, CPU_NUMBERS // x_t.numel())


def chunks(total: int, x_t: Tensor) -> Iterator[tuple[int, int]]:
    """Cut `total` products into ranges of at most the chunk size, as equal as may be."""
    size = evenly(total, chunk_size(x_t))
    return ((start, min(start + size, total)) for start in range(0, total, size))


def chunked(product: Pullback, v: Tensor) -> Tensor:
    """Products with v (n, B, ...), in chunks."""
    return torch.cat([product(v[start:stop]) for start, stop in chunks(len(v), v[0])])


def basis_products(at: Linearised, x_t: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Rows start..stop of the Jacobian, (stop - start, B, d), chunk by chunk."""
    rows, d = len(x_t), math.prod(x_t.shape[1:])
    for start, stop in chunks(d, x_t):
        basis = x_t.new_zeros(stop - start, d)
        basis[:, start:stop].fill_diagonal_(1)
        cotangents = basis[:, None, :].expand(-1, rows, -1).reshape(stop - start, *x_t.shape)
        yield start, stop, at.pull(cotangents).flatten(2)


def _known_jacobian(denoiser: Denoiser, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor] | None:
    # Not isinstance(denoiser, KnowsJacobian): checking a protocol takes a tenth of a 2-D step.
    known: KnowsJacobian | None = denoiser if hasattr(denoiser, "mean_and_jacobian") else None  # type: ignore[assignment]
    found = None if known is None else known.mean_and_jacobian(x_t, level)
    if found is not None:
        spend(forwards=1, products=math.prod(x_t.shape[1:]))
    return found


def mean_and_jacobian(denoiser: Denoiser, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
    """D(x_t) (B, ...) and its whole Jacobian (B, d, d): the denoiser's own, or by d products."""
    known = _known_jacobian(denoiser, x_t, level)
    if known is not None:
        return known
    at = linearised(denoiser, x_t, level)
    jacobian = torch.cat([products for _, _, products in basis_products(at, x_t)]).transpose(0, 1)
    return at.mean, jacobian


def mean_and_diagonal(denoiser: Denoiser, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
    """D(x_t) and the exact diagonal of its Jacobian, both (B, ...): the denoiser's own, or by d products."""
    known = _known_jacobian(denoiser, x_t, level)
    if known is not None:
        return known[0], known[1].diagonal(dim1=1, dim2=2).reshape(x_t.shape)
    at = linearised(denoiser, x_t, level)
    parts = [p[:, :, a:b].diagonal(dim1=0, dim2=2) for a, b, p in basis_products(at, x_t)]
    return at.mean, torch.cat(parts, dim=1).reshape(x_t.shape)
