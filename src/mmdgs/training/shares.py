"""Which rows of a global batch are whose, and the random streams of those rows."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.randomness import Generator, Streams

if TYPE_CHECKING:
    from accelerate import Accelerator


class Shares:
    """Which rows of a global batch are whose: the process's share, cut into parts, each with its random streams."""

    def __init__(self, batch_size: int, seed: int, accelerator: Accelerator | None, generator: Generator | None):
        count = accelerator.num_processes if accelerator else 1
        self.rank: int = accelerator.process_index if accelerator else 0
        if batch_size % count:
            raise UsageError(f"batch_size {batch_size} cannot be shared evenly by {count} processes")
        self.rows = batch_size // count
        self.seed = seed
        self.given = generator
        self.positions: dict[str, int] = {}
        self.cut(1)

    def cut(self, parts: int) -> None:
        """Cut the share into parts; the random streams go on where they are."""
        if parts > self.rows:
            raise UsageError(f"split must not be more than the {self.rows} examples that a process has, got {parts}")
        if parts > 1 and self.given is not None:
            raise UsageError("a batch can be split only with a random stream for each row: give no generator")
        edges = [round(i * self.rows / parts) for i in range(parts + 1)]
        self.parts = [slice(a, b) for a, b in pairwise(edges)]
        self.generators: list[Generator] = [self._generator(part) for part in self.parts]

    def _generator(self, part: slice) -> Generator:
        if self.given is not None:
            return self.given
        first = self.rank * self.rows + part.start
        return Streams(self.seed, part.stop - part.start, first_row=first, positions=self.positions)

    def of(self, indices: Tensor) -> Tensor:
        """This process's indices of a global batch."""
        return indices[self.rank * self.rows : (self.rank + 1) * self.rows]

    def remember(self) -> None:
        """Note how far the streams are: where a step begins anew, and what a checkpoint needs."""
        if isinstance(self.generators[0], Streams):
            self.positions = self.generators[0].positions
