"""How benchmarks measure and report: calls in turns, rates, ratios, memory, and the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from mmdgs.compiled import fast_path
from mmdgs.runtime import autocast, environment, matmul_precision, progress_bar

REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One line of a benchmark: the same work done the plain way and ours.

    Both are numbers in `unit`: a rate ("images/s") or a time ("s/image-step"). `first_call` is how long our first call
    took, which may compile; memory is the peak in bytes, where the device counts it; `error` is the relative difference
    of our result from the plain one in float32. Restorations have the PSNR of draws of both, in dB.
    """

    name: str
    unit: str
    plain: float
    ours: float
    precision: str = "float32"
    first_call: float | None = None
    plain_memory: int | None = None
    memory: int | None = None
    error: float | None = None
    plain_psnr: float | None = None
    psnr: float | None = None

    @classmethod
    def of(cls, name: str, unit: str, plain: Timing, ours: Timing, **more: Any) -> Row:
        """A row of two timings, as rates or as times by its unit."""
        base, found = (one.seconds if unit.startswith("s/") else 1 / one.seconds for one in (plain, ours))
        more |= {"first_call": ours.first_call, "plain_memory": plain.memory, "memory": ours.memory}
        return cls(name, unit, base, found, **more)

    @property
    def ratio(self) -> float:
        """How many times as fast as the plain way."""
        return self.plain / self.ours if self.unit.startswith("s/") else self.ours / self.plain


class Timing(NamedTuple):
    """Seconds per unit of the best call, those of the whole first call, and the peak of allocated bytes on a GPU."""

    seconds: float
    first_call: float
    memory: int | None


Work = tuple[Callable[[], object], int]
"""A call to be timed, and how many units of work it does."""


def measure(works: Sequence[Work], device: torch.device, repeats: int = REPEATS) -> list[Timing]:
    """Time each piece of work: the best of some repeats, after a first call that is timed apart and a warm-up.

    The pieces take turns, so that a change in the machine's speed meets all of them. The best counts, because other
    work on the machine can only slow a call down. The warm-up is there for what compiles at the second call.
    """
    turns: list[list[tuple[float, int | None]]] = []
    with progress_bar((2 + repeats) * len(works), "measuring", unit="call") as bar:
        for _ in range(2 + repeats):
            turns.append([])
            for call, _ in works:
                turns[-1].append(timed(call, device))
                bar.update()
    best = [min(turn[i][0] for turn in turns[2:]) / units for i, (_, units) in enumerate(works)]
    return [Timing(best[i], turns[0][i][0], turns[-1][i][1]) for i in range(len(works))]


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, int | None]:
    """Seconds, and the peak of memory on a GPU."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, torch.cuda.max_memory_allocated(device) if on_gpu else None


@contextmanager
def our_way(precision: str, device: torch.device) -> Iterator[None]:
    """Our side of a comparison: in this precision, and on a GPU compiled at the first call, which is timed apart."""
    fast = fast_path("now") if device.type == "cuda" else nullcontext()
    with matmul_precision(precision), autocast(precision, device), fast:
        yield


def record(rows: Sequence[Row], device: torch.device) -> dict[str, Any]:
    """The benchmark as JSON-ready data, with the machine it ran on."""
    made = environment(device)
    name = made["device"] if device.type == "cuda" else made["processor"]
    found = [asdict(row) | {"ratio": row.ratio} for row in rows]
    return made | {"device": str(device), "device_name": name, "rows": found}
