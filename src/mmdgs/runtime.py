"""How work runs here: CPU threads and jobs side by side, precision, progress bars, and what records say of it.

Networks and states this small gain nothing from sharing one operation between threads, and lose much where
another program wants a core (a training step was seen to take ten times as long). So small work runs on
one thread, and independent pieces of it run side by side.
"""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import numpy
import torch
from tqdm.auto import tqdm

from mmdgs.errors import UsageError
from mmdgs.version import __version__

BAR_DELAY = 1.0
"""Seconds of work before the bar of a loop appears."""


def progress_bar(total: int, label: str | None, unit: str = "step", delay: float = BAR_DELAY) -> tqdm:
    """A bar with rate and time left, which vanishes at the end; a label of None switches it off."""
    return tqdm(total=total, desc=label, unit=unit, delay=delay, leave=False, disable=not label or None)


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


def device_name(device: torch.device) -> str:
    """A GPU by its name, and else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def environment(device: torch.device, *, precision: str | None = None) -> dict[str, Any]:
    """Versions, platform, device and threads as JSON-ready data; the precision of networks where it is known."""
    found = {
        "mmdgs": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }
    return found if precision is None else found | {"precision": precision}


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


class Stopped(BaseException):
    """Raised inside a job that was asked to stop; no error, so no `except Exception` may swallow it."""


_job = threading.local()


def stop_if_asked() -> None:
    """Called by long loops at every step: ends a job whose companions failed or were interrupted."""
    event = getattr(_job, "stop", None)
    if event is not None and event.is_set():
        raise Stopped


def side_by_side(jobs: Sequence[Callable[[], object]], *, workers: int, progress: str | None = None) -> None:
    """Run independent jobs on several workers, one CPU thread each; they leave their results where they like.

    If one fails or Ctrl-C comes, the others stop at their next step and the failure is raised.
    """
    stop = threading.Event()

    def work(job: Callable[[], object]) -> None:
        _job.stop = stop
        with contextlib.suppress(Stopped):
            stop_if_asked()
            job()

    bar = progress_bar(len(jobs), progress, unit="part", delay=0)
    with bar, threads(1), ThreadPoolExecutor(max(1, min(workers, len(jobs)))) as pool:
        pending = {pool.submit(work, job) for job in jobs}
        try:
            while pending:
                # A short timeout: without one, Ctrl-C would wait for the next job to end.
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                    bar.update()
        except BaseException:
            stop.set()
            raise
