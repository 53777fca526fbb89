"""CPU thread counts, for the time of a block: small matrices are faster on one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run a block on `count` CPU threads, then go back to as many as before; None changes nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
