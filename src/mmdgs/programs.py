"""Programs: D(x_t) and products with its Jacobian, traced, compiled and recorded for one size of batch.

    trace      make_fx writes down every tensor operation, derivatives and all; weights and levels are inputs of it,
               so that one program serves every noise level
    compile    torch's inductor fuses them into kernels, and keeps these on disk: the next process starts warm
    replay     a CUDA graph launches all kernels at once

A program is held against the plain function once, before it is used.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.normalisation import WrittenOut, plain_norms
from mmdgs.recording import Recorded
from mmdgs.second_order import output_padding

logger = logging.getLogger("mmdgs")

WASTE = 2.0
"""A program is used for a smaller batch if that leaves at most this many times the work."""
CHECKED_ROWS = 4
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-2, torch.bfloat16: 1e-1}
"""How far, relatively, a program may be from the plain path on its first batch: TF32 and bf16 stay well below."""

Number = float | Tensor


@dataclass(frozen=True)
class Pure:
    """A denoiser at a level as a function of tensors alone: D(x_t) = function(x_t, *numbers).

    The level is in the numbers, one for all rows or (B, 1, ...), which the function gets as tensors (B, 1, ...);
    `alpha` is how much the data are scaled down in x_t; `key` tells functions of the same network apart, and is the
    same at every level.
    """

    function: Callable[..., Tensor]
    alpha: Number
    numbers: tuple[Number, ...]
    network: nn.Module
    key: Hashable


class _Call(nn.Module):
    """A pure function with its network inside, so that torch.func.functional_call can set the weights."""

    def __init__(self, pure: Pure) -> None:
        super().__init__()
        self.network = pure.network
        self.function = pure.function

    def forward(self, x: Tensor, *numbers: Tensor) -> Tensor:
        return self.function(x, *numbers)


Function = Callable[[Tensor], Tensor]


def _vjp(d: Function, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    mean, pullback = torch.func.vjp(d, x)[:2]
    return mean, lambda v: pullback(v)[0]


def _pull(d: Function, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    mean, pullback = _vjp(d, x)
    return mean, torch.vmap(pullback)(v)


def _push(d: Function, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    def one(row: Tensor) -> Any:
        return torch.func.jvp(d, (x,), (row,))

    return torch.vmap(one, out_dims=(None, 0))(v)  # type: ignore[arg-type]


def _symmetric(d: Function, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    mean, pullback = _vjp(d, x)
    _, pushforward = _vjp(pullback, torch.zeros_like(mean))  # u -> u' J is linear, and J v its derivative
    return mean, torch.vmap(lambda row: 0.5 * (pullback(row) + pushforward(row)))(v)


DERIVATIVES = {"pull": _pull, "push": _push, "symmetric": _symmetric}
FORWARDS = ("push",)
"""Where torch's own group norm would be differentiated forwards, which cannot be traced."""


def make_program(kind: str, pure: Pure, x: Tensor, v: Tensor | None, weights: dict[str, Tensor]) -> Program:
    """A program for batches like x (and products with v), checked against the plain path."""
    started = time.perf_counter()
    logger.info(
        "compiling %s of %s for batches of %d%s", "the mean" if v is None else "products",
        type(pure.network).__name__, len(x), "" if v is None else f", {len(v)} at once",
    )  # fmt: skip
    program = Program(_traced(kind, pure, x, v, weights), x, pure.numbers, v, weights)
    _check(pure, x, v, program(x, pure.numbers, v))
    logger.info("compiled in %.0f s", time.perf_counter() - started)
    return program


def _traced(kind: str, pure: Pure, x: Tensor, v: Tensor | None, weights: dict[str, Tensor]) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    call, names = _Call(pure), [f"network.{name}" for name in weights]

    def function(x: Tensor, numbers: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, rest, strict=False))

        def denoiser(x: Tensor) -> Tensor:
            return torch.func.functional_call(call, given, (x, *numbers.unbind()))

        return (denoiser(x),) if v is None else DERIVATIVES[kind](denoiser, x, rest[-1])

    table = {torch.ops.aten.convolution_backward.default: _convolution_backward}
    values = [weight.detach() for weight in weights.values()]
    differentiated = v is not None
    norms = WrittenOut() if kind in FORWARDS else contextlib.nullcontext()
    # Networks may ask whether they will be differentiated; torch's forward mode scripts functions, and warns of it.
    with torch.set_grad_enabled(differentiated), plain_norms(), norms, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make_fx(function, table, tracing_mode="fake", _allow_non_fake_inputs=True)(
            x, _numbers(pure.numbers, x), *values, *([] if v is None else [v])
        )


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, extra: list[int], groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    """The gradient in a convolution's input as a transposed convolution, whose memory layout inductor may choose.

    It leaves a convolution's backward pass in the layout it was traced in, and a seventh of the time went into copies.
    """
    if transposed or list(mask) != [True, False, False]:
        return NotImplemented
    rest = output_padding(x, grad, weight, stride, padding, dilation)
    found = torch.ops.aten.convolution(grad, weight, None, stride, padding, dilation, True, rest, groups)
    return found, None, None


def _numbers(values: Sequence[Number], x: Tensor) -> Tensor:
    """Numbers for every row, (numbers, B, 1, ...), in the dtype of x."""
    shape = (len(x), *[1] * (x.ndim - 1))
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([torch.as_tensor(value, dtype=x.dtype, device=x.device).expand(shape) for value in values])
    given = torch.tensor(values, dtype=x.dtype).to(x.device)
    return given.reshape(-1, *[1] * x.ndim).expand(-1, *shape)


class Program:
    """A traced function of fixed shapes, compiled, and recorded where there is a GPU; inputs are copied into it."""

    def __init__(
        self, graph: torch.fx.GraphModule, x: Tensor, numbers: Sequence[Number], v: Tensor | None,
        weights: dict[str, Tensor],
    ) -> None:  # fmt: skip
        self.x, self.v = x.clone(), None if v is None else v.clone()
        self.numbers = _numbers(numbers, x).clone()
        self.weights = [weight.detach() for weight in weights.values()]
        self.size = len(x) * (1 if v is None else 1 + len(v))
        self.recording: Recorded[tuple[Tensor, ...]] | None = None
        self.function: Callable[..., Any] = graph
        if x.is_cuda:
            with torch.no_grad():
                self.function = _compiled(graph, self._inputs())
                self._record()

    def _inputs(self) -> list[Tensor]:
        return [self.x, self.numbers, *self.weights, *([] if self.v is None else [self.v])]

    def _call(self) -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):  # it has been traced
            return tuple(self.function(*self._inputs()))

    def _record(self) -> None:
        try:
            self.recording = Recorded(self._call, self.x.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.warning("no CUDA graph for it (%s); its kernels are launched one by one", error)

    def holds(self, weights: dict[str, Tensor]) -> bool:
        """Whether the network's weights still are where they were (their values may have changed)."""
        return len(weights) == len(self.weights) and all(
            ours.data_ptr() == theirs.data_ptr() for ours, theirs in zip(self.weights, weights.values(), strict=True)
        )

    def serves(self, rows: int, count: int) -> bool:
        """Whether a batch of `rows` with `count` products fits, without too much work in vain."""
        most = 0 if self.v is None else len(self.v)
        return rows <= len(self.x) and count <= most and self.size <= WASTE * rows * (1 + count)

    def __call__(self, x: Tensor, numbers: Sequence[Number], v: Tensor | None) -> tuple[Tensor, ...]:
        rows = len(x)
        self.x[:rows].copy_(x)
        self.numbers[:, :rows].copy_(_numbers(numbers, x))
        if self.v is not None and v is not None:
            self.v[: len(v), :rows].copy_(v)
        results = self._call() if self.recording is None else self.recording.replay()
        mean = results[0][:rows].clone()
        return (mean,) if v is None else (mean, results[1][: len(v), :rows].clone())


def _compiled(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    from torch.utils._triton import has_triton

    if not has_triton():
        logger.info("Triton is not there to compile with; the traced operations run as they are")
        return graph
    import torch._inductor

    # Channels last for every convolution: inductor would leave them where some get wider by much, as a U-Net's do.
    return torch._inductor.compile(graph, inputs, options={"force_layout_optimization": True})


def _check(pure: Pure, x: Tensor, v: Tensor | None, found: tuple[Tensor, ...]) -> None:
    """Hold a program's first results against the plain function: D(x) of some rows, and v' J v of the first v."""
    some = x[:CHECKED_ROWS]
    numbers = _numbers(pure.numbers, x)[:, :CHECKED_ROWS].unbind()

    def denoiser(x: Tensor) -> Tensor:
        return pure.function(x, *numbers)

    alpha = torch.as_tensor(pure.alpha, dtype=x.dtype, device=x.device).expand(len(x), *[1] * (x.ndim - 1))
    alpha = alpha[:CHECKED_ROWS]
    scale = (some / alpha).norm()
    if v is None:
        with torch.no_grad():
            _compare(found[0][:CHECKED_ROWS], denoiser(some), scale)
        return
    probe = v[0, :CHECKED_ROWS]
    plain, pullback = _vjp(denoiser, some)
    _compare(found[0][:CHECKED_ROWS], plain, scale)
    ours, theirs = ((probe * row).flatten(1).sum(1) for row in (found[1][0, :CHECKED_ROWS], pullback(probe)))
    _compare(ours, theirs, (probe.square() / alpha).flatten(1).sum(1).norm())


def _compare(ours: Tensor, theirs: Tensor, scale: Tensor) -> None:
    """Refuse what is further off than rounding: of the data scaled back up, from which a denoiser takes the noise."""
    kind = torch.bfloat16 if torch.is_autocast_enabled(ours.device.type) else ours.dtype
    off = ((ours - theirs).norm() / (theirs.norm() + scale)).item()
    # What is not finite is not the program's fault, and is found by those who asked for it.
    if off > TOLERANCE.get(kind, TOLERANCE[torch.bfloat16]):
        raise RuntimeError(f"its results differ from the plain path's by {off:.2g}")
