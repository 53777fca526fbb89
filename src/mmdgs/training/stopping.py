"""Ctrl-C and SIGTERM during training: the step is finished, a checkpoint is written, and then the run ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST = 2.0
"""Seconds within which a second signal is the same request: launchers pass on a Ctrl-C that every process has had."""
ANNOUNCEMENT = b"\nstopping after this step; a checkpoint will be written (Ctrl-C again stops at once, without one)\n"


class Interrupted(KeyboardInterrupt):
    """Training that a signal ended after `step` steps, all of which its checkpoint holds."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        super().__init__(f"training stopped at step {step:,}; its checkpoint is written")
        self.step = step
        self.signal = number


@contextlib.contextmanager
def stop_requests(*, announce: bool) -> Iterator[list[int]]:
    """The signals that came inside this block, which no longer interrupt it; a later second one does.

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

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {one: signal.getsignal(one) for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN}
    for one in before:
        signal.signal(one, note)
    try:
        yield asked
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
