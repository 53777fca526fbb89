"""Ctrl-C and SIGTERM during training: the step ends, a checkpoint is written, then the run ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

SAME_REQUEST = 2.0
"""Seconds within which a second signal is the same request: launchers pass a Ctrl-C on."""
ANNOUNCEMENT = (
    b"\nstopping after this step; a checkpoint will be written "
    b"(Ctrl-C again stops at once, without one)\n"
)


class Interrupted(KeyboardInterrupt):
    """Training that a signal ended after `step` steps, all of which its checkpoint holds."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        super().__init__(f"training stopped at step {step:,}; its checkpoint is written")
        self.step, self.signal = step, number


@contextlib.contextmanager
def stop_requests(*, on: bool, announce: bool) -> Iterator[list[int]]:
    """The signals that came inside this block, which only a later second one interrupts, if `on`.

    Signals reach the main thread alone, and one that the process ignores stays ignored (`nohup`).
    """
    asked: list[int] = []
    first = 0.0

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first
        if not asked:
            first = time.monotonic()
            asked.append(number)
            if announce:
                os.write(2, ANNOUNCEMENT)  # a stream may be in the middle of a write of its own
        elif time.monotonic() - first > SAME_REQUEST:
            raise KeyboardInterrupt

    if not on or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {n: handler for n, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in handlers:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
