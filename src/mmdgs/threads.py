"""CPU threads: how many a computation may use, and jobs side by side.

Networks and states this small gain nothing from sharing one operation between threads, and lose much where
another program wants a core (a training step was seen to take ten times as long). So small work runs on
one thread, and independent pieces of it run side by side.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import torch

from mmdgs.progress import progress_bar


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
