"""The arithmetic of networks by name: float32, float32 with TF32 products, or bf16 where autocast allows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mmdgs.errors import UsageError

PRECISIONS = ("float32", "tf32", "bf16")


def check_precision(precision: str) -> None:
    """Refuse a precision there is not."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """TF32 in matrix products, where it was asked for (torch's convolutions use it by themselves)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """bf16 inside networks, where it was asked for."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
