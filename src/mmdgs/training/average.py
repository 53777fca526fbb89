"""The exponential moving average of a network's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Average:
    """The exponential moving average of a network's weights, which can take their place for a while."""

    def __init__(self, network: nn.Module, decay: float | None, *, keep_start: bool = False) -> None:
        self.keep_start = keep_start
        self.names = [name for name, _ in network.named_parameters()]
        self.live = [p.detach() for p in network.parameters()]
        self.decay = decay
        self.weights = [p.clone() for p in self.live] if decay is not None else self.live

    def update(self, step: int) -> None:
        """Move towards the live weights; at the start faster, so that the first weights are soon forgotten.

        Unless they are worth keeping: those of an earlier model are an average themselves.
        """
        if self.decay is not None:
            decay = self.decay if self.keep_start else min(self.decay, (1 + step) / (10 + step))
            get_ema_multi_avg_fn(decay)(self.weights, self.live, 0)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The network computes with the average inside this block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def settle(self) -> None:
        """Leave the average in the network for good."""
        if self.decay is not None:
            for live, average in zip(self.live, self.weights, strict=True):
                live.copy_(average)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.weights, strict=True)) if self.decay is not None else {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, weight in zip(self.names, self.weights, strict=True):
            if name in tensors:
                weight.copy_(tensors[name])

    def _exchange(self) -> None:
        if self.decay is None:
            return
        for live, average in zip(self.live, self.weights, strict=True):
            kept = live.clone()
            live.copy_(average)
            average.copy_(kept)
