"""The fast path: when the mean of a batch of images and its products come from programs, and where these are kept.

A smaller batch is filled up to a size there is a program for, since rows do not see each other. What has been made is
kept with the network. Where a network cannot be traced, compiled or recorded, the log says so in one line and the
plain path goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.errors import UsageError, first_line
from mmdgs.programs import Program, Pure, make_program

logger = logging.getLogger("mmdgs")

MODES = ("auto", "now", "never")
PATIENCE = 100
"""Calls of a kind that go the plain way first: to make a program takes as long as some hundred of them."""
SHELF = "_mmdgs_programs"  # where a network's programs are kept, in its __dict__: not a part of its state

_mode: ContextVar[str | None] = ContextVar("mmdgs_fast", default=None)


@contextlib.contextmanager
def fast_path(mode: str) -> Iterator[None]:
    """Inside the block programs are made "now", at the first call; "never"; or, with "auto", where they will pay: of
    images on a GPU, after a hundred calls.

    Outside, the environment variable MMDGS_FAST says which; "auto" unless it is set. What is made "now" on a CPU is
    traced but not compiled, which is for tests.
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
    if x_t.ndim != 4 or x_t.requires_grad:  # first, for short steps of points count every microsecond
        return False
    mode = _current()
    return mode == "now" or (mode == "auto" and x_t.is_cuda)


def mean(pure: Pure, x_t: Tensor) -> Tensor | None:
    """D(x_t), or None where the plain path has to do."""
    found = _run("mean", pure, x_t, None)
    return None if found is None else found[0]


def products(pure: Pure, x_t: Tensor, v: Tensor, *, kind: str) -> tuple[Tensor, Tensor] | None:
    """D(x_t) and, for v (n, B, ...), by kind "pull" v' J, "push" J v, "symmetric" their mean; or None."""
    found = _run(kind, pure, x_t, v)
    return None if found is None else (found[0], found[1])


def _run(kind: str, pure: Pure, x_t: Tensor, v: Tensor | None) -> tuple[Tensor, ...] | None:
    if pure.network.training:  # dropout, and weights that change
        return None
    shelf = pure.network.__dict__.setdefault(SHELF, _Shelf())
    try:
        return shelf.run(kind, pure, x_t.detach(), v)
    except torch.OutOfMemoryError:
        shelf.clear()  # recorded programs hold memory; the plain path, or a smaller batch, may do without
        raise


class _Shelf:
    """The programs of one network; empty in a copy of it."""

    def __init__(self) -> None:
        self.programs: dict[Hashable, list[Program]] = {}
        self.calls: Counter[Hashable] = Counter()
        self.refused: set[Hashable] = set()

    def __deepcopy__(self, memo: Any) -> _Shelf:
        return _Shelf()

    def __reduce__(self) -> tuple[type[_Shelf], tuple[()]]:
        return _Shelf, ()

    def clear(self) -> None:
        self.programs.clear()

    def run(self, kind: str, pure: Pure, x: Tensor, v: Tensor | None) -> tuple[Tensor, ...] | None:
        key = (kind, pure.key, x.dtype, x.shape[1:], x.device, _arithmetic(x.device))
        if key in self.refused:
            return None
        weights = _weights(pure.network)
        made = self.programs.setdefault(key, [])
        made[:] = [program for program in made if program.holds(weights)]
        rows, count = len(x), 0 if v is None else len(v)
        program = min((p for p in made if p.serves(rows, count)), key=lambda p: p.size, default=None)
        if program is None:
            self.calls[key] += 1
            if _current() == "auto" and self.calls[key] <= PATIENCE:
                return None
            try:
                program = make_program(kind, pure, x, v, weights)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a tracer or a compiler may meet in anybody's network
                self.refused.add(key)
                name = type(pure.network).__name__
                logger.warning("no fast path for %s (%s); going on without", name, first_line(error))
                return None
            made.append(program)
        return program(x, pure.numbers, v)


def _arithmetic(device: torch.device) -> Hashable:
    """What the numbers of a program depend on besides its inputs: autocast, and TF32."""
    low = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return low, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def _weights(network: nn.Module) -> dict[str, Tensor]:
    return dict(network.named_parameters()) | dict(network.named_buffers())
