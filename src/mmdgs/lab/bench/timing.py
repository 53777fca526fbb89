"""How benchmarks measure and report: pieces of work in turns, rates, ratios, memory, and what they ran on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mmdgs.compiled import fast_path
from mmdgs.runtime import environment

REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One line of a benchmark: the same work done the plain way and ours.

    Both are numbers in `unit`: a rate ("images/s") or a time ("s/image-step"). `first_call` is how long our first call
    took, which may compile; memory is the peak in bytes, where the device counts it; `error` is the relative difference
    of our result from the plain one in float32.
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

    @property
    def ratio(self) -> float:
        """How many times as fast as the plain way."""
        return self.ours / self.plain if self.unit.endswith("/s") else self.plain / self.ours


@dataclass(frozen=True)
class Work:
    """A piece of work to be timed, and how many units it does."""

    call: Callable[[], object]
    units: int


@dataclass(frozen=True)
class Measured:
    """Units a second, the seconds of the best call and of the very first, and the peak of allocated bytes on a GPU."""

    rate: float
    seconds: float
    first_call: float
    memory: int | None


def measure(works: Sequence[Work], device: torch.device, repeats: int = REPEATS) -> list[Measured]:
    """Each piece of work: the best of some repeats, after a first call that is timed apart and a warm-up.

    The pieces take turns, so that a change in the machine's speed meets all of them; and the best is
    taken, since the machine's other work only ever slows. What is compiled is compiled in the first call, and what was
    compiled for a first call alone in the second.
    """
    first = [_timed(work, device) for work in works]
    turns = [[_timed(work, device) for work in works] for _ in range(1 + repeats)][1:]
    found = []
    for i, work in enumerate(works):
        seconds = min(turn[i][0] for turn in turns)
        found.append(Measured(work.units / seconds, seconds, first[i][0], turns[-1][i][1]))
    return found


def _timed(work: Work, device: torch.device) -> tuple[float, int | None]:
    """Seconds, and the peak of memory on a GPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        work.call()
        return time.perf_counter() - started, None
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    work.call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started, torch.cuda.max_memory_allocated(device)


def row(name: str, unit: str, plain: Measured, ours: Measured, **more: Any) -> Row:
    """A row of two measurements: of their rates, or of their times a unit where the unit is one of time."""
    numbers = (plain.rate, ours.rate) if unit.endswith("/s") else (1 / plain.rate, 1 / ours.rate)
    return Row(name, unit, *numbers, first_call=ours.first_call, plain_memory=plain.memory, memory=ours.memory, **more)


def record(rows: Sequence[Row], device: torch.device) -> dict[str, Any]:
    """The benchmark as JSON-ready data, with what it ran on."""
    made = environment(device)
    name = made["device"] if device.type == "cuda" else made["processor"]
    return made | {
        "device": str(device),
        "device_name": name,
        "rows": [asdict(one) | {"ratio": one.ratio} for one in rows],
    }


def compiled_at_once(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """On a GPU programs are made at the first call, which is timed apart, and not after many."""
    return fast_path("now") if device.type == "cuda" else contextlib.nullcontext()
