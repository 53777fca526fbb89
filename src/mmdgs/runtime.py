"""How work runs: CPU threads and jobs side by side, precision, progress, and the environment.

Small networks gain nothing from sharing one operation between threads, and lose much where another
program wants a core. So small work runs on one thread, and independent pieces run side by side.

torch is imported where it is used: the help of the command line does without it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from mmdgs.errors import UsageError
from mmdgs.version import __version__

if TYPE_CHECKING:
    import torch
    from tqdm import tqdm

F = TypeVar("F", bound=Callable[..., Any])

BAR_DELAY = 1.0
"""Seconds of work before the bar of a loop appears."""
LINE_EVERY = 30.0
"""Seconds between two lines of progress where there is no terminal to draw a bar on."""
_quiet = False


def show_progress(on: bool) -> None:
    """Switch all progress of this process on (as it is at the start) or off."""
    global _quiet
    _quiet = not on


def progress_bar(
    total: int, label: str | None, unit: str = "step", delay: float = BAR_DELAY, *, first: int = 0
) -> tqdm | ProgressLines:
    """A bar with rate and time left, which vanishes at the end; a label of None switches it off.

    Off a terminal it is one line on stderr every LINE_EVERY seconds. `first` is what an earlier,
    resumed run did.
    """
    from tqdm.auto import tqdm

    shown = bool(label) and not _quiet
    how: dict[str, Any] = {"leave": False, "disable": None if shown else True}
    bar = tqdm(total=total, desc=label, unit=unit, delay=delay, initial=first, **how)
    # tqdm has found out by now whether there is a terminal or a notebook.
    return ProgressLines(total, label or "", unit, first) if shown and bar.disable else bar


class ProgressLines:
    """What loops use of tqdm's bar, as log lines: "training: 40%, 12.1 step/s, 01:39 left".

    There is one line every LINE_EVERY seconds, however many loops run: it names the outermost
    loop, and the one that has just advanced.
    """

    running: ClassVar[list[ProgressLines]] = []
    last_line: ClassVar[float] = -math.inf

    def __init__(self, total: float, label: str, unit: str, first: float = 0) -> None:
        self.total, self.label, self.unit = total, label, unit
        self.n, self.first = first, first
        self.unit_scale = False  # of tqdm: rates are scaled here always
        self.postfix: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        self.started = time.monotonic()
        self.running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.running.remove(self)

    def set_postfix(self, postfix: Mapping[str, Any], refresh: bool = True) -> None:
        """What lines say besides: names and values."""
        self.postfix = postfix

    def update(self, n: float = 1) -> None:
        """Count n more, and write a line where it is time for one."""
        self.n += n
        now = time.monotonic()
        if not self.running:
            return
        if now - max(ProgressLines.last_line, self.running[0].started) >= LINE_EVERY:
            ProgressLines.last_line = now
            loops = dict.fromkeys((self.running[0], self))
            print("; ".join(loop.line(now) for loop in loops), file=sys.stderr, flush=True)

    def line(self, now: float) -> str:
        """How far the loop is."""
        from tqdm import tqdm

        words = [f"{100 * self.n / self.total:.0f}%" if self.total else f"{self.n:,} {self.unit}s"]
        if self.n > self.first:
            rate = (self.n - self.first) / max(now - self.started, 1e-9)
            fast = f"{tqdm.format_sizeof(rate)} {self.unit}/s"
            words.append(fast if rate >= 1 else f"{1 / rate:.3g} s/{self.unit}")
            if self.total:
                left = tqdm.format_interval(max(self.total - self.n, 0) / rate)
                words.append(f"{left} left")
        words += [f"{name} {value}" for name, value in self.postfix.items()]
        return f"{self.label}: {', '.join(words)}"


PRECISIONS = ("float32", "tf32", "bf16")


def check_precision(precision: str) -> None:
    """UsageError for an unknown precision."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """TF32 in matrix products for "tf32" (torch's convolutions use it by default)."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """bf16 inside networks for "bf16"."""
    import torch

    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def in_full_precision(function: F) -> F:
    """A function of tensors in which autocast and TF32 are off.

    Low precision is for networks: with it a positive matrix may come out as one that is not.
    """

    @functools.wraps(function)
    def full(*args: Any, **kwargs: Any) -> Any:
        import torch

        device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
        lowered = torch.is_autocast_enabled(device)
        matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        if not lowered and (device == "cpu" or not (cudnn or matmul != "highest")):
            return function(*args, **kwargs)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        try:
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)
        finally:
            torch.set_float32_matmul_precision(matmul)
            torch.backends.cudnn.allow_tf32 = cudnn

    return full  # type: ignore[return-value]


def device_name(device: torch.device) -> str:
    """A GPU by its name, and else the kind of device."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def environment(device: torch.device, *, precision: str | None = None) -> dict[str, Any]:
    """Versions, platform, device and threads, JSON-ready, with the networks' precision if known."""
    import numpy
    import torch

    entries = {
        "mmdgs": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }
    return entries if precision is None else entries | {"precision": precision}


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run a block on `count` CPU threads; None changes nothing."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def ticks_of(tick: Callable[[int], object]) -> Iterator[Callable[[int], None]]:
    """Counts what a block adds to a bar; where the block fails, that is taken back."""
    total = 0

    def counted(number: int) -> None:
        nonlocal total
        tick(number)
        total += number

    try:
        yield counted
    except Exception:
        tick(-total)
        raise


class Stopped(BaseException):
    """Raised inside a job that was asked to stop; no `except Exception` may swallow it."""


_job = threading.local()


def stop_if_asked() -> None:
    """Called by long loops at every step: ends a job whose companions failed."""
    event = getattr(_job, "stop", None)
    if event is not None and event.is_set():
        raise Stopped


@contextlib.contextmanager
def stoppable(event: threading.Event) -> Iterator[None]:
    """A block of this thread that ends with `Stopped` at its next step once the event is set."""
    before, _job.stop = getattr(_job, "stop", None), event
    try:
        yield
    finally:
        _job.stop = before


def side_by_side(
    jobs: Sequence[Callable[[], object]], *, workers: int, progress: str | None = None
) -> None:
    """Run independent jobs on several workers, one CPU thread each.

    If one fails or Ctrl-C comes, the others stop at their next step and the failure is raised.
    """
    stop = threading.Event()

    def work(job: Callable[[], object]) -> None:
        with contextlib.suppress(Stopped), stoppable(stop):
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
