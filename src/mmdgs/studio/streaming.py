"""Work in threads that reports its state to a page, and stops once nobody waits for it."""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

from mmdgs.runtime import Stopped, stop_if_asked, stoppable, threads

T = TypeVar("T")

BEAT = 0.3
"""Seconds between two frames that a page sees."""
JOBS = 2
"""Computations at a time; more wait in line."""

_workers = ThreadPoolExecutor(2 * JOBS, thread_name_prefix="studio")
"""The same threads for all work: torch keeps memory for each thread that has ever called it. There
are some to spare for work that was stopped and has not come to its next step yet."""


class Tell(Generic[T]):
    """Called by work with its state; of several states between two looks the page sees the last."""

    def __init__(self, every: float = BEAT) -> None:
        self.every, self.told_at = every, 0.0
        self.latest: deque[T] = deque(maxlen=1)
        self.changed = threading.Event()

    def __call__(self, state: T) -> None:
        stop_if_asked()
        self.latest.append(state)
        self.told_at = time.monotonic()
        self.changed.set()

    def due(self) -> bool:
        """Whether it is time to report again; stops the work where that is asked for."""
        stop_if_asked()
        return time.monotonic() - self.told_at >= self.every


Changes = dict[Any, Any]
"""What a handler answers: values, or Gradio's updates, for the components that change."""


class Run(NamedTuple):
    """What go starts: `work` reports states, and `change` says what each changes on the page.

    `saved` is the name and content of the download, from the last state that was shown, and None
    where there is nothing in it yet. `lines` are shown at once, where they are known.
    """

    work: Callable[[Tell[Any]], Any]
    change: Callable[[Any], Changes]
    saved: Callable[[Any], tuple[str, bytes] | None]
    lines: tuple[str, str] | None = None
    words: str = "Starting ..."


QUIET: Tell[Any] = Tell(every=math.inf)
"""For work that nobody watches."""


def share_of_cores() -> AbstractContextManager[None]:
    """Run a block on the threads that are its own where all JOBS run."""
    return threads(max(1, len(os.sched_getaffinity(0)) // JOBS))


def streamed(work: Callable[[Tell[T]], T], stop: threading.Event | None = None) -> Iterator[T]:
    """The states that the work reports, as they come, and then what it returns.

    Errors of the work are raised. Once the event is set or the iterator is closed, it ends at its
    next step.
    """
    stop, tell = stop or threading.Event(), Tell[T]()

    def run() -> None:
        with contextlib.suppress(Stopped), stoppable(stop), share_of_cores():
            tell(work(tell))

    job = _workers.submit(contextvars.copy_context().run, run)
    job.add_done_callback(lambda _: tell.changed.set())
    try:
        while tell.latest or not job.done():
            tell.changed.wait()
            tell.changed.clear()
            if tell.latest:
                yield tell.latest.pop()
        job.result()
    except GeneratorExit:
        stop.set()
        raise


class Stops:
    """What ends a visitor's work in a room: the stop button, another click on go, or leaving."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], threading.Event] = {}

    def begin(self, room: str, visitor: str) -> None:
        """Work of a room is asked for: what ran there before ends."""
        self.event(room, visitor).set()
        self.events[visitor, room] = threading.Event()

    def event(self, room: str, visitor: str) -> threading.Event:
        """Set once the work is to end."""
        return self.events.setdefault((visitor, room), threading.Event())

    def leave(self, visitor: str) -> None:
        """The visitor is gone, and so is all work for them."""
        for key in [key for key in self.events if key[0] == visitor]:
            self.events.pop(key).set()

    def end(self) -> None:
        """All work ends."""
        for event in list(self.events.values()):
            event.set()


STOPS = Stops()
