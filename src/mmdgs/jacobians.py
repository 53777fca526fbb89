"""Products with a denoiser's Jacobian J = dD/dx_t, all from one forward pass that gives the mean.

    v' J       reverse mode: one backward pass, any number of v batched
    J v        u -> u' J is linear and J v is its derivative: a backward pass through that one
    rows of J  v' J with basis vectors: the whole matrix, or its diagonal

Reverse mode comes first since fused attention has no forward-mode derivative. On a GPU the same
products come from compiled programs where that can be (compiled.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mmdgs import denoisers
from mmdgs.compiled import Pure, compiled_mean, compiled_products
from mmdgs.cost import spend
from mmdgs.denoisers import Denoiser, checked, has_symmetric_jacobian
from mmdgs.derivatives import SecondOrder, load_forward_mode
from mmdgs.errors import UsageError
from mmdgs.memory import evenly
from mmdgs.noise import AnyLevel, NoiseLevel
from mmdgs.randomness import Generator, signs
from mmdgs.runtime import stop_if_asked

logger = logging.getLogger("mmdgs")

BYTES_A_NUMBER = 1 << 14
"""Of a GPU's memory, for each number of the cotangents that go through at once. The paper's U-Net
took 3 kB a number in all, so this keeps to a fifth of the memory."""
CPU_NUMBERS = 1 << 12
"""Numbers that the cotangents of one batched product may hold on a CPU, where batching pays only
while overhead dominates: ten products at d = 3,072 took 51 ms one by one and 80 ms at once."""

Pullback = Callable[[Tensor], Tensor]


@runtime_checkable
class Linearised(Protocol):
    """A denoiser at x_t to first order: D(x_t), and products of v (n, B, ...) with J."""

    @property
    def mean(self) -> Tensor:
        """D(x_t), detached."""

    def pull(self, v: Tensor) -> Tensor:
        """v' J; where J is symmetric, J v is the same."""

    def symmetric(self, v: Tensor) -> Tensor:
        """(J + J') v / 2."""


def linearised(
    denoiser: Denoiser, x_t: Tensor, level: AnyLevel, *, symmetric: bool | None = None
) -> Linearised:
    """A denoiser to first order at x_t; `symmetric`: whether J is, None asks the denoiser."""
    symmetric = has_symmetric_jacobian(denoiser) if symmetric is None else symmetric
    spend(forwards=1)
    pure = denoisers.pure_of(denoiser, x_t, level)
    if pure is None:
        return _Graph(denoiser, x_t, level, symmetric)
    return _Programs(pure, denoiser, x_t, level, symmetric)


class _Graph:
    """One forward pass, whose graph serves the mean and all products."""

    def __init__(self, denoiser: Denoiser, x_t: Tensor, level: AnyLevel, known: bool) -> None:
        # Convolutions' backward passes took 0.65 of the time in this layout on a CPU.
        image = x_t.ndim == 4 and x_t.device.type == "cpu" and chunk_size(x_t) == 1
        layout = torch.channels_last if image else torch.preserve_format
        x = x_t.detach().clone(memory_format=layout).requires_grad_(True)
        # Second derivatives by hand take 0.6 of autograd's time on a CPU, but go one by one.
        by_hand = has_symmetric_jacobian(denoiser) and image
        with torch.enable_grad(), SecondOrder() if by_hand else contextlib.nullcontext():
            mean = checked(denoisers.evaluated(denoiser, x, level), x_t)
        if not mean.requires_grad:
            raise ValueError("the denoiser is not differentiable in x_t: torch.no_grad() inside?")
        self.mean = mean.detach()
        self.pull = _pullback(mean, x, layout)
        self._pushforward = None
        if not known:
            at: Pullback = lambda x: denoiser(x, level)  # type: ignore[arg-type]  # noqa: E731
            self._pushforward = _Pushforward(at, x_t.detach(), mean, x, layout)

    def symmetric(self, v: Tensor) -> Tensor:
        pulled = self.pull(v)
        if self._pushforward is None:
            return pulled
        return 0.5 * (pulled + self._pushforward(v, pulled))


class _Programs:
    """The fast path: the mean comes with the first products; what it refuses, a graph does."""

    def __init__(
        self, pure: Pure, denoiser: Denoiser, x_t: Tensor, level: AnyLevel, symmetric: bool
    ) -> None:
        self._pure, self._x, self._known = pure, x_t.detach(), symmetric
        self._mean: Tensor | None = None
        self._plain = lru_cache(maxsize=1)(lambda: _Graph(denoiser, x_t, level, symmetric))

    @property
    def mean(self) -> Tensor:
        if self._mean is None:
            mean = compiled_mean(self._pure, self._x)
            self._mean = self._plain().mean if mean is None else checked(mean, self._x)
        return self._mean

    def pull(self, v: Tensor) -> Tensor:
        # A derivative of a gradient is cheaper forwards, and of a symmetric Jacobian the same.
        return self._product("push" if self._known else "pull", v, products=1)

    def symmetric(self, v: Tensor) -> Tensor:
        return self.pull(v) if self._known else self._product("symmetric", v, products=2)

    def _product(self, kind: str, v: Tensor, products: int) -> Tensor:
        stop_if_asked()
        results = compiled_products(self._pure, self._x, v, kind=kind)
        if results is None:
            return self._plain().symmetric(v) if kind == "symmetric" else self._plain().pull(v)
        spend(products=products * len(v))
        self._mean = checked(results[0], self._x)
        return results[1]


def _pullback(output: Tensor, x: Tensor, layout: torch.memory_format) -> Pullback:
    """v (n, B, ...) -> v' d output/dx through one graph, batched where its operations can be."""

    def product(v: Tensor, batched: bool) -> Tensor:
        (gradient,) = torch.autograd.grad(
            output, x, v, retain_graph=True, is_grads_batched=batched, materialize_grads=True
        )
        return gradient

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
                logger.info("no batched products here (%s); taking them one by one", error)
        return torch.stack([product(row.clone(memory_format=layout), batched=False) for row in v])

    return pullback


class _Pushforward:
    """v and v' J (n, B, ...) -> J v: the derivative of u -> u' J along v, else in forward mode."""

    def __init__(
        self, at: Pullback, x_t: Tensor, mean: Tensor, x: Tensor, layout: torch.memory_format
    ) -> None:
        self.at, self.x_t, self.mean, self.x, self.layout = at, x_t, mean, x, layout
        self.reverse: Pullback | None = None
        self.failure: RuntimeError | None = None

    def __call__(self, v: Tensor, pulled: Tensor) -> Tensor:
        if self.failure is None:
            try:
                self.reverse = self.reverse or self._build()
                pushed = self.reverse(v)
                # Autograd passes by what has no second derivative if another path leads to u.
                if _adjoint(v, pulled, pushed):
                    return pushed
                raise RuntimeError("a part of its backward pass has no derivative")
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.reverse = None
                self.failure = error.with_traceback(None)  # whose frames would keep the graph
                logger.info("the network cannot be differentiated twice (%s)", error)
        try:
            load_forward_mode()
            return torch.stack([torch.func.jvp(self.at, (self.x_t,), (row,))[1] for row in v])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UsageError(
                "symmetrising the Jacobian takes J v, and this network can neither be "
                f"differentiated twice ({self.failure}) nor in forward mode ({error}). Run fused "
                "attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH); else take "
                "symmetric=True, or DiagonalMoments(denoiser, probes=10)"
            ) from error

    def _build(self) -> Pullback:
        u = torch.zeros_like(self.mean, requires_grad=True)
        with torch.enable_grad():
            (image,) = torch.autograd.grad(
                self.mean, self.x, u, create_graph=True, materialize_grads=True
            )
        return _pullback(image, u, self.layout)


def _adjoint(v: Tensor, pulled: Tensor, pushed: Tensor) -> bool:
    """Whether v' (J' v) = v' (J v) for v (n, B, ...), within the cube root of the precision."""
    v, pulled, pushed = v.flatten(2), pulled.flatten(2), pushed.flatten(2)
    scale = v.norm(dim=2) * (pulled.norm(dim=2) + pushed.norm(dim=2))
    apart = (v * (pulled - pushed)).sum(2).abs()
    return not (apart > torch.finfo(v.dtype).eps ** (1 / 3) * scale).any()


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


def _basis_products(at: Linearised, x_t: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Rows start..stop of the Jacobian, (stop - start, B, d), chunk by chunk."""
    rows, d = len(x_t), math.prod(x_t.shape[1:])
    for start, stop in chunks(d, x_t):
        basis = x_t.new_zeros(stop - start, d)
        basis[:, start:stop].fill_diagonal_(1)
        cotangents = basis[:, None, :].expand(-1, rows, -1).reshape(stop - start, *x_t.shape)
        yield start, stop, at.pull(cotangents).flatten(2)


def _known_jacobian(
    denoiser: Denoiser, x_t: Tensor, level: NoiseLevel
) -> tuple[Tensor, Tensor] | None:
    """Both, of a denoiser that may know them without being differentiated (EnergyDenoiser)."""
    if not hasattr(denoiser, "mean_and_jacobian"):
        return None
    known: tuple[Tensor, Tensor] | None = denoiser.mean_and_jacobian(x_t, level)
    if known is not None:
        spend(forwards=1, products=math.prod(x_t.shape[1:]))
    return known


def mean_and_jacobian(denoiser: Denoiser, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
    """D(x_t) (B, ...) and its whole Jacobian (B, d, d): the denoiser's own, or by d products."""
    known = _known_jacobian(denoiser, x_t, level)
    if known is not None:
        return known
    at = linearised(denoiser, x_t, level)
    jacobian = torch.cat([products for _, _, products in _basis_products(at, x_t)]).transpose(0, 1)
    return at.mean, jacobian


def mean_and_diagonal(denoiser: Denoiser, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
    """D(x_t) and the exact diagonal of its Jacobian, (B, ...) each, as `mean_and_jacobian`."""
    known = _known_jacobian(denoiser, x_t, level)
    if known is not None:
        return known[0], known[1].diagonal(dim1=1, dim2=2).reshape(x_t.shape)
    at = linearised(denoiser, x_t, level)
    parts = [p[:, :, a:b].diagonal(dim1=0, dim2=2) for a, b, p in _basis_products(at, x_t)]
    return at.mean, torch.cat(parts, dim=1).reshape(x_t.shape)


def blind_sigma(
    denoiser: Denoiser, x_t: Tensor, *, generator: Generator, probes: int = 2
) -> Tensor:
    """The standard deviation of the noise in x_t (B, ...), one a row, as a blind denoiser sees it.

    sigma^2 = |x_t - D|^2 / (d - tr J) with alpha = 1, the trace by probes. Both sides agree in
    expectation where D = E[x | x_t]: E |x_t - D|^2 = sigma^2 E (d - tr J), as in Stein's formula.
    """
    at, d = linearised(denoiser, x_t, NoiseLevel(sigma=1.0)), x_t[0].numel()
    v = signs((len(x_t), probes, d), x_t, generator).transpose(0, 1).reshape(-1, *x_t.shape)
    trace = (v * chunked(at.pull, v)).flatten(2).sum(2).mean(0)
    if not (trace < d).all():
        raise UsageError(
            f"the trace of the denoiser's Jacobian is {trace.max():.4g} in {d} dimensions, so "
            "the noise cannot be estimated from it; give sigma as a number"
        )
    return ((x_t - at.mean).square().flatten(1).sum(1) / (d - trace)).sqrt()
