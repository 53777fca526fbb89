"""How benchmarks measure and report: pieces of work in turns, rates, ratios, and what they ran on."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from mmdgs.version import __version__

REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One line of a benchmark: the same work done the plain way and ours, in units per second."""

    name: str
    unit: str
    plain: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.ours / self.plain


@dataclass(frozen=True)
class Work:
    """A piece of work to be timed, and how many units it does."""

    call: Callable[[], object]
    units: int


def rates(works: Sequence[Work], device: torch.device, repeats: int = REPEATS) -> list[float]:
    """Units per second of each piece of work: the best of some repeats after a warm-up.

    The pieces take turns, so that a change in the machine's speed meets all of them; and the best is
    taken, since the machine's other work only ever slows.
    """
    best = [float("inf")] * len(works)
    for repeat in range(-1, repeats):
        for i, work in enumerate(works):
            started = time.perf_counter()
            work.call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat >= 0:
                best[i] = min(best[i], time.perf_counter() - started)
    return [work.units / seconds for work, seconds in zip(works, best, strict=True)]


def record(rows: Sequence[Row], device: torch.device) -> dict[str, object]:
    """The benchmark as JSON-ready data, with what it ran on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "mmdgs": __version__,
        "torch": torch.__version__,
        "device": str(device),
        "device_name": name,
        "threads": torch.get_num_threads(),
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
    }
