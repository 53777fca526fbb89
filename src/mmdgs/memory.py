"""Work on many rows, as many at a time as fit in memory."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

from mmdgs.errors import UsageError

logger = logging.getLogger("mmdgs")

T = TypeVar("T")

SAID_BY_TORCH = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""In the RuntimeErrors of the CPU's allocator, cuDNN and cuBLAS where memory is short."""
KEPT = (32 << 20) - (64 << 10)  # bytes: just below the largest piece that glibc learns from


@cache
def keep_freed_memory() -> None:
    """Have the C library keep what steps free, instead of asking the system for it again.

    glibc raises the size up to which it keeps memory when a larger piece is freed. A step of 1,000
    2-D chains took a quarter longer without: 13,000 page faults.
    """
    torch.empty(KEPT, dtype=torch.uint8)


def memory_of(device: torch.device) -> int:
    """The bytes of memory of a GPU, or of the machine (16 GiB where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 16 << 30


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short."""
    if isinstance(error, UsageError):  # CovarianceTooLargeError: no smaller batch would help
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAID_BY_TORCH)


def evenly(count: int, most: int, processes: int = 1) -> int:
    """The size of batches of `count` rows, at most `most`: alike, and as many for each process."""
    return math.ceil(count / (processes * math.ceil(count / (processes * most))))


@dataclass
class Batches:
    """Rows that are worked on together: `rows`, or fewer once that many did not fit in memory.

    `unit` names them in messages, and `advice` says what to do where not even one row fits.
    """

    rows: int
    unit: str
    advice: str = "use a GPU with more memory, or the CPU (--device cpu)"

    def over(self, stop: int, work: Callable[[int, int], T], start: int = 0) -> Iterator[T]:
        """The results of work(first, last) for consecutive ranges from start to stop.

        A range that does not fit in memory is halved, and so are those after it; the log says so.
        """
        while start < stop:
            last = min(start + self.rows, stop)
            try:
                result = work(start, last)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if last - start == 1:
                    problem = f"not even one of the {self.unit} fits in memory"
                    raise UsageError(f"{problem}; {self.advice}") from error
            else:
                yield result
                start = last
                continue
            # Outside the handler: the error's frames hold the tensors that did not fit.
            self.rows = (last - start) // 2
            sizes = (last - start, self.unit, self.rows)
            logger.warning("%d %s at a time do not fit in memory; going on with %d", *sizes)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
