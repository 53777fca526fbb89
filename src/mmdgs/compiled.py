"""The fast path: the mean of a batch of images and products with its Jacobian, compiled for a GPU.

    trace      make_fx writes down every tensor operation, derivatives and all. Weights and noise
               levels are inputs, so one program serves every level.
    compile    torch.compile fuses the operations into kernels and replays them as a CUDA graph.

A program is compared with the plain function once, before it is used. A smaller batch is filled up
to a size that has a program, since rows do not see each other. Programs are kept with their
network. Where a network cannot be traced or compiled, the log says so in one line and the plain
path goes on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.derivatives import WrittenOutNorms, output_padding
from mmdgs.errors import UsageError, first_line

logger = logging.getLogger("mmdgs")

MODES = ("auto", "now", "never")
PATIENCE = 100
"""Calls of a kind that go the plain way first: a program takes as long as some hundred of them."""
WASTE = 2.0
"""A program is used for a smaller batch if that leaves at most this many times the work."""
CHECKED_ROWS = 4
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-2, torch.bfloat16: 1e-1}
"""How far, relatively, a program may be from the plain path: TF32 and bf16 stay well below."""
OPTIONS: dict[str, Any] = {"triton.cudagraphs": True, "force_layout_optimization": True}
"""A CUDA graph, and channels last for every convolution, also where some get wider by much."""
PROGRAMS = "_mmdgs_programs"  # in a network's __dict__: not a part of its state

_mode: ContextVar[str | None] = ContextVar("mmdgs_fast", default=None)

Number = float | Tensor
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Pure:
    """A denoiser at a level as a function of tensors alone: D(x_t) = function(x_t, *numbers).

    The level is in the numbers, one for all rows or (B, 1, ...), which the function gets as tensors
    (B, 1, ...); `alpha` is how much the data are scaled down in x_t; `key` tells functions of the
    same network apart, and is the same at every level.
    """

    function: Callable[..., Tensor]
    alpha: Number
    numbers: tuple[Number, ...]
    network: nn.Module
    key: Hashable


@contextlib.contextmanager
def fast_path(mode: str) -> Iterator[None]:
    """Programs are made "now", at the first call; "never"; or with "auto" where they will pay.

    That is for images on a GPU, after a hundred calls. Outside the block the environment variable
    MMDGS_FAST says which ("auto"). On a CPU programs are traced but not compiled, for tests.
    """
    token = _mode.set(_checked(mode))
    try:
        yield
    finally:
        _mode.reset(token)


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise UsageError(f"the fast path is one of {', '.join(MODES)}, got {mode!r}")
    return mode


def _current() -> str:
    return _mode.get() or _checked(os.environ.get("MMDGS_FAST", "auto"))


def applies(x_t: Tensor) -> bool:
    """Whether a batch is one for the fast path."""
    if x_t.ndim != 4 or x_t.requires_grad:  # first: in steps of points every microsecond counts
        return False
    mode = _current()
    return mode == "now" or (mode == "auto" and x_t.is_cuda)


def compiled_mean(pure: Pure, x_t: Tensor) -> Tensor | None:
    """D(x_t), or None where the plain path has to do."""
    results = _run("mean", pure, x_t, None)
    return None if results is None else results[0]


def compiled_products(
    pure: Pure, x_t: Tensor, v: Tensor, *, kind: str
) -> tuple[Tensor, ...] | None:
    """D(x_t) and, for v (n, B, ...), "pull" v' J, "push" J v, "symmetric" their mean; or None."""
    return _run(kind, pure, x_t, v)


def _run(kind: str, pure: Pure, x_t: Tensor, v: Tensor | None) -> tuple[Tensor, ...] | None:
    if pure.network.training:  # dropout, and weights that change
        return None
    programs = pure.network.__dict__.setdefault(PROGRAMS, _Programs())
    try:
        return programs.run(kind, pure, x_t.detach(), v)
    except torch.OutOfMemoryError:
        programs.made.clear()  # they hold memory; the plain path may do without
        raise


class _Programs:
    """The programs of one network; empty in a copy of it."""

    def __init__(self) -> None:
        self.made: dict[Hashable, list[Program]] = {}
        self.calls: Counter[Hashable] = Counter()
        self.refused: set[Hashable] = set()

    def __reduce__(self) -> tuple[type[_Programs], tuple[()]]:
        return _Programs, ()

    def run(self, kind: str, pure: Pure, x: Tensor, v: Tensor | None) -> tuple[Tensor, ...] | None:
        key = (kind, pure.key, x.dtype, x.shape[1:], x.device, _arithmetic(x.device))
        if key in self.refused:
            return None
        weights = dict(pure.network.named_parameters()) | dict(pure.network.named_buffers())
        programs = self.made.setdefault(key, [])
        programs[:] = [program for program in programs if program.holds(weights)]
        rows, count = len(x), 0 if v is None else len(v)
        serving = [program for program in programs if program.serves(rows, count)]
        if serving:
            return min(serving, key=lambda program: program.size)(x, pure.numbers, v)
        self.calls[key] += 1
        if _current() == "auto" and self.calls[key] <= PATIENCE:
            return None
        try:
            program = make_program(kind, pure, x, v, weights)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a tracer or compiler may meet in anybody's network
            self.refused.add(key)
            reason = first_line(getattr(error, "inner_exception", error))
            name = type(pure.network).__name__
            logger.warning("no fast path for %s (%s); going on without", name, reason)
            return None
        programs.append(program)
        return program(x, pure.numbers, v)


def _arithmetic(device: torch.device) -> Hashable:
    """What the numbers of a program depend on besides its inputs: autocast, and TF32."""
    low = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return low, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def _vjp(d: Function, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    mean, pullback = torch.func.vjp(d, x)[:2]
    return mean, lambda v: pullback(v)[0]


def _pull(d: Function, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    mean, pullback = _vjp(d, x)
    return mean, torch.vmap(pullback)(v)


def _push(d: Function, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    along: Callable[[Tensor], Any] = lambda row: torch.func.jvp(d, (x,), (row,))  # noqa: E731
    return torch.vmap(along, out_dims=(None, 0))(v)  # type: ignore[arg-type]


def _symmetric(d: Function, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    mean, pullback = _vjp(d, x)
    pushforward = _vjp(pullback, torch.zeros_like(mean))[1]  # u -> u' J is linear, J v its slope
    return mean, torch.vmap(lambda row: 0.5 * (pullback(row) + pushforward(row)))(v)


DERIVATIVES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "mean": lambda d, x: (d(x),), "pull": _pull, "push": _push, "symmetric": _symmetric
}  # fmt: skip


def make_program(
    kind: str, pure: Pure, x: Tensor, v: Tensor | None, weights: dict[str, Tensor]
) -> Program:
    """A program for batches like x (and products with v), compared with the plain path."""
    started, name = time.perf_counter(), type(pure.network).__name__
    logger.info("compiling %r of %s for batches of %d", kind, name, len(x))
    program = Program(traced(kind, pure, x, v, weights), x, pure.numbers, v, weights)
    _check(pure, x, v, program(x, pure.numbers, v))
    logger.info("compiled in %.0f s", time.perf_counter() - started)
    return program


def traced(
    kind: str, pure: Pure, x: Tensor, v: Tensor | None, weights: dict[str, Tensor]
) -> torch.fx.GraphModule:
    """The function (x, numbers, *weights, v) -> results of a kind, as a graph of operations."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    call = _Call(pure)
    names = [f"network.{name}" for name in weights]

    def function(x: Tensor, numbers: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(names, rest, strict=False))

        def denoiser(x: Tensor) -> Tensor:
            return torch.func.functional_call(call, values, (x, *numbers.unbind()))

        return DERIVATIVES[kind](denoiser, x, *rest[len(names) :])

    table = {torch.ops.aten.convolution_backward.default: _convolution_backward}
    frozen = [w.detach() for w in weights.values()]
    inputs = [x, _numbers(pure.numbers, x), *frozen, *([] if v is None else [v])]
    # Networks may ask whether they will be differentiated; torch's forward mode scripts functions,
    # and warns of it.
    with torch.set_grad_enabled(v is not None), WrittenOutNorms(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make_fx(function, table, tracing_mode="fake")(*inputs)


class _Call(nn.Module):
    """A pure function with its network inside: torch.func.functional_call can set the weights."""

    def __init__(self, pure: Pure) -> None:
        super().__init__()
        self.network, self.function = pure.network, pure.function

    def forward(self, x: Tensor, *numbers: Tensor) -> Tensor:
        return self.function(x, *numbers)


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, extra: Any, groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    """The gradient in a convolution's input as a transposed convolution.

    The compiler leaves a convolution's backward pass in the memory layout it was traced in, and a
    seventh of the time went into copies; of this one it may choose the layout.
    """
    if transposed or list(mask) != [True, False, False]:
        return NotImplemented
    rest = output_padding(x, grad, weight, stride, padding, dilation)
    options = (stride, padding, dilation, True, rest, groups)
    return torch.ops.aten.convolution(grad, weight, None, *options), None, None


def _numbers(values: Sequence[Number], x: Tensor) -> Tensor:
    """Numbers for every row, (numbers, B, 1, ...), in the dtype of x."""
    shape = (len(x), *[1] * (x.ndim - 1))
    # new_full is no copy, for which the host would wait until the device is idle.
    rows = [
        v.to(x).expand(shape) if isinstance(v, Tensor) else x.new_full(shape, v) for v in values
    ]
    return torch.stack(rows)


class Program:
    """A traced function of fixed shapes, compiled on a GPU, with buffers for its inputs."""

    def __init__(
        self, graph: torch.fx.GraphModule, x: Tensor, numbers: Sequence[Number], v: Tensor | None,
        weights: dict[str, Tensor],
    ) -> None:  # fmt: skip
        self.x, self.v = x.clone(), None if v is None else v.clone()
        self.numbers = _numbers(numbers, x)
        self.weights = list(weights.values())
        self.size = len(x) * (1 if v is None else 1 + len(v))
        self.function: Callable[..., Any] = graph
        if x.is_cuda and importlib.util.find_spec("triton") is None:
            logger.info("there is no Triton to compile with; the traced operations run as they are")
        elif x.is_cuda:
            self.function = torch.compile(graph, fullgraph=True, dynamic=False, options=OPTIONS)

    def holds(self, weights: dict[str, Tensor]) -> bool:
        """Whether the network's weights still are where they were (values may have changed)."""
        places = [weight.data_ptr() for weight in weights.values()]
        return places == [weight.data_ptr() for weight in self.weights]

    def serves(self, rows: int, count: int) -> bool:
        """Whether a batch of `rows` with `count` products fits, without too much work in vain."""
        most = 0 if self.v is None else len(self.v)
        return rows <= len(self.x) and count <= most and self.size <= WASTE * rows * (1 + count)

    def __call__(
        self, x: Tensor, numbers: Sequence[Number], v: Tensor | None
    ) -> tuple[Tensor, ...]:
        rows, count = len(x), 0 if v is None else len(v)
        self.x[:rows].copy_(x)
        self.numbers[:, :rows].copy_(_numbers(numbers, x))
        inputs = [self.x, self.numbers, *self.weights]
        if self.v is not None and v is not None:
            self.v[:count, :rows].copy_(v)
            inputs.append(self.v)
        # Without autocast: the casts are in the graph.
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            mean, *products = self.function(*inputs)
        # Copies: the next call writes over a CUDA graph's results.
        return mean[:rows].clone(), *(part[:count, :rows].clone() for part in products)


def _check(pure: Pure, x: Tensor, v: Tensor | None, results: tuple[Tensor, ...]) -> None:
    """Compare first results with the plain function's: D(x) of some rows, v' J v of the first v.

    What is further off than rounding, at the scale of x_t / alpha, is refused. What is not finite
    is not the program's fault, and is found by those who asked for it.
    """
    some = x[:CHECKED_ROWS]
    numbers = _numbers(pure.numbers, x)[:, :CHECKED_ROWS].unbind()
    alpha = _numbers([pure.alpha], x)[0, :CHECKED_ROWS]
    plain, pullback = _vjp(lambda x: pure.function(x, *numbers), some)
    compared = [(results[0][:CHECKED_ROWS], plain, some / alpha)]
    if v is not None:
        probe = v[0, :CHECKED_ROWS]
        products = results[1][0, :CHECKED_ROWS], pullback(probe), probe / alpha
        ours, theirs, scale = ((probe * row).flatten(1).sum(1) for row in products)
        compared.append((ours, theirs, scale))
    kind = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else plain.dtype
    for ours, theirs, scale in compared:
        off = ((ours - theirs).norm() / (theirs.norm() + scale.norm())).item()
        if off > TOLERANCE.get(kind, TOLERANCE[torch.bfloat16]):
            raise RuntimeError(f"its results differ from the plain path's by {off:.2g}")
