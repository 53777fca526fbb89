"""Functions of tensors recorded as CUDA graphs: all their kernels are launched at once, by a replay.

A function that is recorded takes nothing and returns tensors: it reads buffers that stay where they are, so that
other numbers go in by a copy, and what it returns is written over by the next replay. It must not wait for the device.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

WARM_UPS = 3
"""Runs before the recording, in which libraries set themselves up; three, as PyTorch's notes on CUDA graphs say."""

_recording = threading.Lock()
_unfinished: list[torch.cuda.CUDAGraph] = []
"""Recordings that failed: torch's allocator may go on asking them (before torch 2.12), so they must not be freed."""
_kept = threading.local()


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps some ten megabytes for every stream it has seen."""
    return torch.cuda.Stream(device)


class Recorded(Generic[T]):
    """A function as a CUDA graph. `family` names recordings of a thread that take turns in the same memory.

    `warm_up` stands in for the function in the runs before, which must be enough to set everything up.
    """

    def __init__(
        self,
        function: Callable[[], T],
        device: torch.device,
        *,
        warm_up: Callable[[], object] | None = None,
        family: str | None = None,
    ) -> None:
        self.graph = torch.cuda.CUDAGraph()
        stream = _recording_stream(device)
        with _recording:
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                _warm_up(warm_up or function)
                self.result = self._capture(function, device, family)
            torch.cuda.current_stream(device).wait_stream(stream)

    def _capture(self, function: Callable[[], T], device: torch.device, family: str | None) -> T:
        collecting = gc.isenabled()
        gc.disable()  # what it frees may be another graph's, and that is no time for it
        _unfinished.append(self.graph)
        # The last graph of a family is kept for its memory, which would stay reserved, and of no use, without it.
        if not hasattr(_kept, "graphs"):
            _kept.graphs = {}
        last = _kept.graphs.pop((device, family), None) if family else None
        try:
            # Other threads may go on: "global" would forbid them to allocate memory meanwhile.
            self.graph.capture_begin(None if last is None else last.pool(), capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                self.graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        _unfinished.remove(self.graph)
        if family:
            _kept.graphs[device, family] = self.graph
        return result

    def replay(self) -> T:
        """Run it again on what its buffers hold now; the result is the same tensors, written over."""
        self.graph.replay()
        return self.result


def _warm_up(function: Callable[[], object]) -> None:
    """Some runs, in which nothing may wait for the device: a recording that fails leaves torch in disorder."""
    mode = torch.cuda.get_sync_debug_mode()
    function()  # the first may load and compile, and wait for that
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(WARM_UPS - 1):
                function()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits = [str(warning.message) for warning in found if "called a synchronizing" in str(warning.message)]
    if waits:
        raise RuntimeError(waits[0])
