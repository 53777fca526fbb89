"""Ctrl-C: while a command starts it leaves at once, and from then on it is KeyboardInterrupt."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C stopped, as shells have it."""


def leave_on_interrupt() -> None:
    """Let Ctrl-C say "stopped" and end the process, unless a program has set a handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Let Ctrl-C be KeyboardInterrupt again, so that work can be put away."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    # Nothing has begun, and an exception in the middle of an import may get lost.
    sys.stderr.write("\nstopped\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)
