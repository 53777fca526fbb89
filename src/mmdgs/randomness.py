"""Explicit randomness: every draw takes a `torch.Generator` or a `Streams`, never the global one.

`Streams` gives every row of a batch (every chain) a random stream of its own. It is counter based:
number `j` of row `r` is a pure function of (seed, purpose, r, j), the Philox4x32-10 generator of
Salmon et al. (2011, "Parallel random numbers: as easy as 1, 2, 3"). So a chain's numbers do not
depend on how many chains run beside it, on which process or device runs it, or on where a run was
cut in pieces.

    key        the seed: two words
    counter    the block of four numbers: two words; the row; purpose and kind of number: one word

Philox is a bijection of the counter, so streams of one seed with different purposes share no block
of numbers. Nothing adds to a seed: what needs randomness of its own names its purpose.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import index

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
SEEDS, GENERATOR_SEEDS = 1 << 64, 1 << 32
KIND_BITS = 0b11
# Philox4x32: the two multipliers and the two key increments of Salmon et al. (2011), table 2.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
AHEAD, MOST_AHEAD = {"cpu": 1 << 15, "cuda": 1 << 20}, 4096
"""Numbers that are generated ahead, over all rows by device and of one row at the most: it spreads
the hundred tensor operations of Philox over many short draws, and changes no number."""


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The multipliers (2,), and what each round has added to the key (rounds, 2)."""
    added = torch.arange(ROUNDS)[:, None] * torch.tensor(INCREMENTS)
    return torch.tensor(MULTIPLIERS, device=device), added.to(device)


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
    """Four 32-bit words (4, ...) from a counter of four words (...) and a key of two, in int64."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    even, odd = torch.stack([c0, c2]), torch.stack([c1, c3])
    dims = [1] * c0.ndim
    multipliers, added = (c.reshape(*c.shape, *dims) for c in _constants(c0.device))
    for round_key in (torch.stack(tuple(key)) + added) & WORD:
        # The 64-bit products wrap around in int64 without losing a bit.
        products = (even * multipliers).flip(0)
        even, odd = ((products >> 32) & WORD) ^ odd ^ round_key, products & WORD
    return torch.stack([even, odd], 1).flatten(0, 1)


def _normals(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Box-Muller: pairs of 32-bit words (4, ...) to standard normals (4, ...)."""
    uniform = (words.to(dtype) + 1) * 2.0**-32  # in (0, 1]
    radius = (-2 * uniform[:2].log()).sqrt()
    angle = (2 * math.pi) * uniform[2:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()])


def _signs(words: Tensor, dtype: torch.dtype) -> Tensor:
    return (words & 1).to(dtype) * 2 - 1


def _uniforms(words: Tensor, dtype: torch.dtype) -> Tensor:
    # 24 bits, so that float32 holds the number exactly and never rounds it up to 1.
    return (words >> 8).to(dtype) * 2.0**-24


@dataclass
class _Lane:
    """One kind of number drawn from all rows in turn, and what was generated ahead."""

    number: int
    convert: Callable[[Tensor, torch.dtype], Tensor]
    position: int = 0  # the next number each row will get
    start: int = 0  # the position of the buffer's first column
    buffer: Tensor | None = None


class Streams:
    """One random stream per row of a batch.

    With one integer seed row `r` gets stream `(seed, first_row + r)`; with a sequence of seeds, one
    per row, row `r` gets stream `(seeds[r], 0)`. `purpose` names what the numbers are for: those of
    "start" and of "steps" are independent. A new `Streams` with the `positions` of another goes on
    from there.
    """

    def __init__(
        self,
        seed: int | Sequence[int],
        rows: int,
        first_row: int = 0,
        *,
        purpose: str = "",
        positions: Mapping[str, int] | None = None,
    ) -> None:
        if rows < 1:
            raise ValueError(f"Streams needs at least one row, got {rows}")
        streams = _streams(seed, rows, first_row)
        if len(streams) != rows:
            got = f"{len(streams)} seeds for {rows} chains"
            raise ValueError(f"seed must be one integer or one per chain: got {got}")
        self.rows = rows
        words = torch.tensor([[s & WORD, (s >> 32) & WORD] for s, _ in streams])
        self._key = words.T[:, :, None]  # (2, rows, 1)
        self._row = torch.tensor([row for _, row in streams])[:, None]
        self._placed: dict[torch.device, tuple[Tensor, Tensor]] = {}
        # The purpose's bits in the counter's last word, above those of the kind of number.
        digest = hashlib.sha256(purpose.encode()).digest() if purpose else bytes(4)
        code = int.from_bytes(digest[:4], "big") & ~KIND_BITS
        kinds = {"normal": _normals, "sign": _signs, "uniform": _uniforms}
        self._lanes = {
            kind: _Lane(code | number, convert, (positions or {}).get(kind, 0))
            for number, (kind, convert) in enumerate(kinds.items())
        }

    @property
    def positions(self) -> dict[str, int]:
        """How many numbers of each kind every row has drawn."""
        return {kind: lane.position for kind, lane in self._lanes.items()}

    def draw(self, kind: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next `count` numbers of every row, (rows, count)."""
        lane = self._lanes[kind]
        work = torch.float64 if dtype == torch.float64 else torch.float32
        buffer = lane.buffer
        if buffer is None or buffer.dtype != work or buffer.device != device:
            lane.start = lane.position // 4 * 4  # Philox makes four words at a time
            buffer = torch.empty(self.rows, 0, dtype=work, device=device)
        offset = lane.position - lane.start
        missing = offset + count - buffer.shape[1]
        if missing > 0:
            end = lane.start + buffer.shape[1]  # always a multiple of four
            ahead = max(missing, min(AHEAD.get(device.type, AHEAD["cpu"]) // self.rows, MOST_AHEAD))
            blocks = torch.arange(end // 4, (end + ahead + 3) // 4, device=device)
            buffer = torch.cat([buffer, self._evaluate(lane, blocks, work)], dim=1)[:, offset:]
            lane.start, offset = lane.position, 0
        lane.buffer = buffer
        lane.position += count
        return buffer[:, offset : offset + count].to(dtype)

    def _evaluate(self, lane: _Lane, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of blocks of four, (rows, 4 blocks)."""
        # Nothing here waits for a GPU that is still at work: the next step is prepared meanwhile.
        if blocks.device not in self._placed:
            placed = self._key.to(blocks.device), self._row.to(blocks.device)
            self._placed[blocks.device] = placed
        key, row = self._placed[blocks.device]
        counter = (blocks & WORD, blocks >> 32, row, torch.full_like(blocks, lane.number))
        return lane.convert(philox(counter, key.unbind()), dtype).movedim(0, -1).flatten(1)


def _streams(seed: int | Sequence[int], rows: int, first_row: int) -> list[tuple[int, int]]:
    """(seed, row) of each row's stream."""
    try:
        shared = checked_seed(index(seed))  # type: ignore[arg-type]
    except TypeError:  # not one integer: then one for each row, in a list, an array or a tensor
        if not isinstance(seed, Iterable):
            raise TypeError(f"seed must be an integer or one per chain, got {seed!r}") from None
        return [(checked_seed(s), 0) for s in seed]
    return [(shared, first_row + row) for row in range(rows)]


def checked_seed(seed: int) -> int:
    """A seed, which must be a whole number and fit into the 64 bits of Philox's key."""
    if not hasattr(seed, "__index__") or not 0 <= index(seed) < SEEDS:
        raise ValueError(f"a seed must be a whole number from 0 to 2^64 - 1, got {seed}")
    return index(seed)


def child_seed(seed: int, purpose: str) -> int:
    """A seed made of a seed and what it is for: 63 bits of their SHA-256."""
    digest = hashlib.sha256(f"{checked_seed(seed)} {purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


Generator = torch.Generator | Streams


def _draw(kind: str, shape: Sequence[int], like: Tensor, generator: Generator | None) -> Tensor:
    if generator is None:
        raise TypeError(
            "this draw needs generator=torch.Generator().manual_seed(0), or "
            "mmdgs.randomness.Streams(0, rows) for one stream a row; the global one is never used"
        )
    if isinstance(generator, Streams):
        if shape[0] != generator.rows:
            got = f"{generator.rows} streams but the batch has {shape[0]} rows"
            raise ValueError(f"the generator has {got}")
        drawn = generator.draw(kind, math.prod(shape[1:]), like.dtype, like.device)
        return drawn.reshape(shape)
    # Draw where the generator lives: a CPU generator then gives the same numbers for every device.
    drawn = torch.empty(tuple(shape), dtype=like.dtype, device=generator.device)
    if kind == "normal":
        drawn.normal_(generator=generator)
    elif kind == "uniform":
        drawn.uniform_(generator=generator)
    else:
        drawn.random_(0, 2, generator=generator).mul_(2).sub_(1)
    return drawn.to(like.device)


def as_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """The shape of draws, where a number stands for one dimension."""
    return (index(shape),) if hasattr(shape, "__index__") else tuple(shape)


def randn(shape: Sequence[int], like: Tensor, generator: Generator | None) -> Tensor:
    """Standard normals of the given shape, rows first, in the dtype and on the device of `like`."""
    return _draw("normal", shape, like, generator)


def randn_like(x: Tensor, generator: Generator | None) -> Tensor:
    """Standard normals of the shape, dtype and device of x."""
    return _draw("normal", x.shape, x, generator)


def signs(shape: Sequence[int], like: Tensor, generator: Generator | None) -> Tensor:
    """Rademacher numbers, +1 or -1 with equal probability."""
    return _draw("sign", shape, like, generator)


def uniforms(shape: Sequence[int], like: Tensor, generator: Generator | None) -> Tensor:
    """Uniform numbers in [0, 1)."""
    return _draw("uniform", shape, like, generator)


def spawn_seeds(rows: int, device: torch.device, generator: Generator) -> Tensor:
    """A seed for each row, (rows,), for streams that are to be drawn from later, or never."""
    numbers = 2**24 * uniforms((rows, 2), torch.empty(0, device=device), generator)
    high, low = numbers.long().unbind(1)
    return (high << 24) | low


def seeded(seed: int, purpose: str = "", device: torch.device | str = "cpu") -> torch.Generator:
    """A torch.Generator seeded for a purpose; without one by `manual_seed(seed)`.

    Seeds that torch's CPU generator, which has 32 bits, would cut off are hashed.
    """
    plain = not purpose and checked_seed(seed) < GENERATOR_SEEDS
    return torch.Generator(device=device).manual_seed(seed if plain else child_seed(seed, purpose))
