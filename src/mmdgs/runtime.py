"""How work runs here: CPU threads and jobs side by side, precision, progress, and what records say of it.

Networks and states this small gain nothing from sharing one operation between threads, and lose much where
another program wants a core (a training step was seen to take ten times as long). So small work runs on
one thread, and independent pieces of it run side by side.

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
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO, TypeVar

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
FORECAST_AFTER, LONG = 2.0, 20.0
"""Seconds after which a loop says how long it will take, and the least that is worth it."""

_quiet = False


def show_progress(wanted: bool) -> None:
    """Switch all progress of this process on (as it is at the start) or off."""
    global _quiet
    _quiet = not wanted


def progress_bar(
    total: int, label: str | None, unit: str = "step", delay: float = BAR_DELAY, *, first: int = 0
) -> tqdm | ProgressLines:
    """A bar with rate and time left, which vanishes at the end; a label of None switches it off.

    Off a terminal (a log file, a batch job) it is one line on stderr every LINE_EVERY seconds. On both, a long loop
    says after its first steps how long it will take. `first` is what was done by a run that this one goes on from.
    """
    from tqdm.auto import tqdm

    shown = bool(label) and not _quiet
    bar = tqdm(
        total=total, desc=label, unit=unit, delay=delay, initial=first, leave=False, disable=None if shown else True
    )
    # tqdm has found out by now whether there is a terminal or a notebook.
    if shown and bar.disable:
        bar = ProgressLines(total, label or "", unit, first)
    if shown and unit != "B":
        _forecast_once(bar, label or "", unit, first)
    return bar


def _forecast_once(bar: tqdm | ProgressLines, label: str, unit: str, first: int) -> None:
    """Have a bar say once how long its loop will take, by its first steps; a loop inside another says nothing.

    The very first step is not counted: it may wait for what later ones do not.
    """
    update, since = bar.update, math.nan
    start: float = first
    over = False

    def updated(n: float = 1) -> None:
        nonlocal since, start, over
        update(n)
        now = time.monotonic()
        if over or not bar.total or not _is_outermost(bar):
            return
        if math.isnan(since):
            since, start = now, bar.n
        elif now - since >= FORECAST_AFTER and bar.n > start:
            over, each, count = True, (now - since) / (bar.n - start), bar.total - first
            if bar.n < bar.total and count * each >= LONG:
                by = f"{count:,.0f} {unit}s, {_in_words(each)} each, by the first {bar.n - first:,.0f}"
                bar.write(f"{label}: about {_in_words(count * each)} ({by})", file=sys.stderr)

    bar.update = updated  # type: ignore[method-assign]


def _is_outermost(bar: tqdm | ProgressLines) -> bool:
    """Whether the loop of a bar runs inside no other."""
    return ProgressLines.running[:1] == [bar] if isinstance(bar, ProgressLines) else bar.pos == 0


def _in_words(seconds: float) -> str:
    """A length of time, to two digits or so: 19 ms, 4.2 s, 12 min, 3.1 h."""
    units = (("h", 3600.0, 7200.0), ("min", 60.0, 120.0), ("s", 1.0, 1.0), ("ms", 0.001, 0.0))
    unit, size = next((unit, size) for unit, size, least in units if seconds >= least)
    return f"{seconds / size:.2g} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"


class ProgressLines:
    """What loops use of tqdm's bar, as lines of a log: "training: 40%, 12.1 step/s, 01:39 left, loss 0.21".

    There is one line every LINE_EVERY seconds, however many loops run inside each other or side by side: it names the
    outermost loop, and the one that has just gone on.
    """

    running: ClassVar[list[ProgressLines]] = []
    last_line: ClassVar[float] = -math.inf

    def __init__(self, total: float, label: str, unit: str, first: float = 0) -> None:
        self.total, self.label, self.unit = total, label, unit
        self.n: float = first
        self.first: float = first
        self.unit_scale = False  # of tqdm: rates are scaled here always
        self.told: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        """Begin; what a run before this one has done is no part of the rate."""
        self.started = time.monotonic()
        self.running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.running.remove(self)

    @staticmethod
    def write(line: str, file: TextIO) -> None:
        """Write a line of its own."""
        print(line, file=file, flush=True)

    def set_postfix(self, told: Mapping[str, Any], refresh: bool = True) -> None:
        """What lines say besides: names and values."""
        self.told = told

    def update(self, n: float = 1) -> None:
        """Count n more, and write a line where it is time for one."""
        self.n += n
        now = time.monotonic()
        if self.running and now - max(ProgressLines.last_line, self.running[0].started) >= LINE_EVERY:
            ProgressLines.last_line = now
            loops = dict.fromkeys((self.running[0], self))
            print("; ".join(loop.line(now) for loop in loops), file=sys.stderr, flush=True)

    def line(self, now: float) -> str:
        """How far the loop is."""
        from tqdm import tqdm

        words = [f"{100 * self.n / self.total:.0f}%" if self.total else f"{self.n:,} {self.unit}s"]
        if self.n > self.first:
            rate = (self.n - self.first) / max(now - self.started, 1e-9)
            words += [f"{tqdm.format_sizeof(rate)} {self.unit}/s" if rate >= 1 else f"{1 / rate:.3g} s/{self.unit}"]
            words += [f"{tqdm.format_interval(max(self.total - self.n, 0) / rate)} left"] if self.total else []
        return f"{self.label}: {', '.join([*words, *(f'{name} {value}' for name, value in self.told.items())])}"


PRECISIONS = ("float32", "tf32", "bf16")


def check_precision(precision: str) -> None:
    """Refuse a precision there is not."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """TF32 in matrix products, where it was asked for (torch's convolutions use it by themselves)."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """bf16 inside networks, where it was asked for."""
    import torch

    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def in_full_precision(function: F) -> F:
    """A function of tensors that low precision does not reach: autocast and TF32 are off in it.

    Low precision is for networks. With it a matrix loses what tells it from one that is not positive.
    """

    @functools.wraps(function)
    def full(*args: Any, **kwargs: Any) -> Any:
        import torch

        device = next(one.device.type for one in args if isinstance(one, torch.Tensor))
        lowered = torch.is_autocast_enabled(device)
        if not lowered and (device == "cpu" or not _tf32(torch)):
            return function(*args, **kwargs)
        matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        try:
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)
        finally:
            torch.set_float32_matmul_precision(matmul)
            torch.backends.cudnn.allow_tf32 = cudnn

    return full  # type: ignore[return-value]


def _tf32(torch: Any) -> bool:
    """Whether matrix products or convolutions may take TF32."""
    return torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"


def device_name(device: torch.device) -> str:
    """A GPU by its name, and else the kind of device."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def environment(device: torch.device, *, precision: str | None = None) -> dict[str, Any]:
    """Versions, platform, device and threads as JSON-ready data; the precision of networks where it is known."""
    import numpy
    import torch

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
    """Counts what a block tells a bar; where the block fails, that is taken back."""
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
    """Raised inside a job that was asked to stop; no error, so no `except Exception` may swallow it."""


_job = threading.local()


def stop_if_asked() -> None:
    """Called by long loops at every step: ends a job whose companions failed or were interrupted."""
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


def side_by_side(jobs: Sequence[Callable[[], object]], *, workers: int, progress: str | None = None) -> None:
    """Run independent jobs on several workers, one CPU thread each; they leave their results where they like.

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
