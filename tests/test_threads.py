"""CPU threads: counts that are given back, and jobs side by side that stop together."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from mmdgs.runtime import Stopped, side_by_side, stop_if_asked, threads


def test_the_count_is_given_back() -> None:
    with threads(2):
        with threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), threads(1):
            raise KeyError
        assert torch.get_num_threads() == 2
        with threads(None):
            assert torch.get_num_threads() == 2


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_all_jobs_run_on_one_thread_each(workers: int) -> None:
    seen: dict[int, int] = {}

    def job(number: int) -> None:
        seen[number] = torch.get_num_threads()

    with threads(2):
        side_by_side([lambda n=n: job(n) for n in range(5)], workers=workers)
        assert torch.get_num_threads() == 2
    assert seen == dict.fromkeys(range(5), 1)


@pytest.mark.parametrize(
    "failure", [ValueError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_a_failure_stops_the_others_and_is_raised(failure: BaseException) -> None:
    running, stopped = threading.Event(), []

    def fails() -> None:
        running.wait(5)
        raise failure

    def long() -> None:
        running.set()
        try:
            for _ in range(2000):  # 20 s, if nothing stops it
                time.sleep(0.01)
                stop_if_asked()
        except Stopped:
            stopped.append(True)
            raise

    started = time.perf_counter()
    with pytest.raises(type(failure)):
        side_by_side([fails, long], workers=2)
    assert stopped == [True]
    assert time.perf_counter() - started < 5
    stop_if_asked()  # the calling thread itself was asked nothing
