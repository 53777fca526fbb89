"""Work in a thread of its own, which tells how far it is, and stops where the page no longer waits for it."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from mmdgs.runtime import Stopped, stoppable, threads

T = TypeVar("T")

BEAT = 0.3
"""Seconds between two frames that a page sees."""
JOBS = 2
"""Computations at a time; more wait in line."""

_workers = ThreadPoolExecutor(2 * JOBS, thread_name_prefix="studio")
"""The same threads for all work: torch keeps memory for each thread that has ever called it. There are some to spare
for work that was stopped and has not come to its next step yet."""


def threads_a_job() -> int:
    """CPU threads of one computation, so that all together have the cores there are."""
    return max(1, len(os.sched_getaffinity(0)) // JOBS)


class Tell(Generic[T]):
    """Called by the work with what it has so far; of several between two looks the page sees the last."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self.changed = threading.Condition()
        self.latest: list[T] = []
        self.told_at = 0.0
        self.finished = False
        self.error: BaseException | None = None

    def __call__(self, what: T) -> None:
        if self.stop.is_set():
            raise Stopped
        with self.changed:
            self.latest = [what]
            self.told_at = time.monotonic()
            self.changed.notify()

    def due(self, every: float = BEAT) -> bool:
        """Whether it is time to tell again; stops the work where that is asked for."""
        if self.stop.is_set():
            raise Stopped
        return time.monotonic() - self.told_at >= every

    def take(self) -> T | None:
        """What was told since the last look; waits for it. None: the work has ended."""
        with self.changed:
            self.changed.wait_for(lambda: self.latest or self.finished)
            found, self.latest = self.latest, []
        return found[0] if found else None


def streamed(work: Callable[[Tell[T]], Any], stop: threading.Event | None = None) -> Iterator[T]:
    """What the work tells, as it comes. Errors of the work are raised.

    Where the event is set or the iterator is closed, the work ends at its next step.
    """
    tell: Tell[T] = Tell(stop or threading.Event())

    def run() -> None:
        try:
            with stoppable(tell.stop), threads(threads_a_job()):
                work(tell)
        except Stopped:
            pass
        except BaseException as error:
            tell.error = error
        finally:
            with tell.changed:
                tell.finished = True
                tell.changed.notify()

    _workers.submit(contextvars.copy_context().run, run)
    try:
        while (found := tell.take()) is not None:
            yield found
        if tell.error is not None:
            raise tell.error
    except GeneratorExit:
        tell.stop.set()
        raise
