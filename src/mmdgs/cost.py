"""What work costs, counted where it is done: evaluations of the denoiser and products with its
Jacobian.

Counts are those of one chain: a batch goes through the network together, and each of its rows is
evaluated once. An evaluation of an energy's denoiser has a gradient inside, and counts as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

PRODUCT = 2.0
"""Forward passes that a vector-Jacobian product takes: its backward pass has two products for each
one forward.
"""


@dataclass
class Cost:
    """Evaluations of the denoiser and products with its Jacobian, for each chain."""

    forwards: int = 0
    products: int = 0

    @property
    def evaluations(self) -> float:
        """All of it in forward passes: the number to compare samplers by."""
        return self.forwards + PRODUCT * self.products

    def times(self, chains: int) -> Cost:
        """That of several chains."""
        return Cost(chains * self.forwards, chains * self.products)


_counters: ContextVar[tuple[Cost, ...]] = ContextVar("mmdgs_cost", default=())


def spend(*, forwards: int = 0, products: int = 0) -> None:
    """Note work done, on every counter that is open."""
    for cost in _counters.get():
        cost.forwards += forwards
        cost.products += products


@contextlib.contextmanager
def counting() -> Iterator[Cost]:
    """A counter of what is done inside the block."""
    cost = Cost()
    token = _counters.set((*_counters.get(), cost))
    try:
        yield cost
    finally:
        _counters.reset(token)
