"""Philox and its streams: known answers, laws, and what the numbers of a row depend on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from mmdgs import randomness
from mmdgs.randomness import Streams, philox, randn, seeded, signs, uniforms

CPU = torch.device("cpu")
KINDS = ("normal", "sign", "uniform")

# kat_vectors of Random123, philox4x32 with 10 rounds: counter, key, answer.
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1
"""


def test_philox_known_answers() -> None:
    lines = [line.split() for line in KNOWN_ANSWERS.split("\n") if line]
    words = torch.tensor([[int(word, 16) for word in line] for line in lines]).unbind(1)
    assert torch.equal(philox(words[:4], words[4:6]), torch.stack(words[6:]))


def draws(streams: Streams, kind: str, counts: list[int], dtypes: list[torch.dtype]) -> Tensor:
    parts = [
        streams.draw(kind, n, dtype, CPU).double()
        for n, dtype in zip(counts, itertools.cycle(dtypes))
    ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 7, 2**64 - 1])
def test_streams_are_philox_of_seed_row_and_place(kind: str, seed: int) -> None:
    # The counter is (block, high word of the block, row, lane) and the key the two words of the
    # seed.
    row, blocks = 5, range(3)
    key = [torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF)]
    expected = []
    for block in blocks:
        counter = [torch.tensor(c) for c in (block, 0, row, KINDS.index(kind))]
        a, b, c, d = (word.item() for word in philox(counter, key))
        if kind == "normal":
            radius = [math.sqrt(-2 * math.log((word + 1) / 2**32)) for word in (a, b)]
            angle = [2 * math.pi * (word + 1) / 2**32 for word in (c, d)]
            expected += [
                r * f(t) for f in (math.cos, math.sin) for r, t in zip(radius, angle, strict=True)
            ]
        elif kind == "sign":
            expected += [2 * (word & 1) - 1 for word in (a, b, c, d)]
        else:
            expected += [(word >> 8) / 2**24 for word in (a, b, c, d)]
    row_drawn = Streams(seed, rows=8).draw(kind, 12, torch.float64, CPU)[row]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(row_drawn, expected, rtol=1e-12, atol=1e-12)


COUNTS = {
    "at once": [9001],
    "one by one, then the rest": [1] * 11 + [8990],
    "odd pieces": [3, 1, 7, 2, 4099, 5, 4884],
    "nothing in between": [5, 0, 6, 0, 8990],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize(
    "dtypes",
    [[torch.float64], [torch.float64, torch.float64, torch.float32]],
    ids=["one dtype", "dtypes in turn"],
)
def test_a_row_does_not_depend_on_how_it_is_drawn(
    kind: str, counts: list[int], dtypes: list[torch.dtype]
) -> None:
    together = Streams(3, rows=2).draw(kind, sum(counts), torch.float64, CPU)
    # A float32 radius sqrt(-2 log u) near 0 comes from u within 6e-8 of 1: it is off by up to
    # sqrt(2 * 6e-8).
    tolerance = 0.0 if dtypes == [torch.float64] else 5e-4
    torch.testing.assert_close(
        draws(Streams(3, rows=2), kind, counts, dtypes), together, rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(kind: str) -> None:
    many = Streams(3, rows=9).draw(kind, 30, torch.float64, CPU)
    assert torch.equal(
        Streams(3, rows=2, first_row=6).draw(kind, 30, torch.float64, CPU), many[6:8]
    )
    assert torch.equal(Streams(3, rows=1).draw(kind, 30, torch.float64, CPU), many[:1])
    # One seed a row gives each row the first stream of that seed.
    assert torch.equal(Streams([5, 3], rows=2).draw(kind, 30, torch.float64, CPU)[1:], many[:1])
    # More rows than numbers made ahead: nothing is made ahead then, and nothing else changes.
    assert torch.equal(Streams(3, rows=10_000).draw(kind, 5, torch.float64, CPU)[:9], many[:, :5])


@pytest.mark.parametrize("shape", [(1, 50_000), (50_000, 1)], ids=["along a row", "over rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_laws(shape: tuple[int, int], dtype: torch.dtype) -> None:
    like = torch.empty(0, dtype=dtype)
    streams = Streams(11, rows=shape[0])
    normal, sign, uniform = (
        draw(shape, like, streams).double().flatten() for draw in (randn, signs, uniforms)
    )
    # Kolmogorov-Smirnov at a level of 1e-4.
    assert stats.kstest(normal.numpy(), "norm").pvalue > 1e-4
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-4
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert sign.abs().eq(1).all()
    # Five standard errors of the mean of n numbers of unit variance.
    assert abs(sign.mean()) < 5 / math.sqrt(sign.numel())


def test_independence() -> None:
    n = 100_000
    rows = Streams(2, rows=3)
    normal, sign, uniform = (rows.draw(kind, n, torch.float64, CPU) for kind in KINDS)
    other = Streams(3, rows=1).draw("normal", n, torch.float64, CPU)
    series = torch.cat([normal, sign, math.sqrt(12) * (uniform - 0.5), other])
    # Squares too: the pairs of Box-Muller are uncorrelated by symmetry, even where they are not
    # independent.
    squares = torch.cat([normal.square() - 1, other.square() - 1]) / math.sqrt(2)
    series = torch.cat([series, squares])
    for lag in (0, 1, 2, 3, 4):
        correlation = series[:, : n - lag] @ series[:, lag:].mT / (n - lag)
        if lag == 0:
            # A sign's square is constant and a normal's own square is another row, so only the
            # diagonal is not 0.
            correlation = correlation - torch.diag(correlation.diagonal())
        # 5.5 standard errors over some 600 numbers.
        assert correlation.abs().max() < 5.5 / math.sqrt(n)


@pytest.mark.parametrize("draw", [randn, signs, uniforms])
def test_torch_generators(draw) -> None:
    like = torch.empty(0, dtype=torch.float64)
    a, b = (draw((3, 4), like, seeded(5)) for _ in range(2))
    assert a.dtype == torch.float64
    assert torch.equal(a, b)
    values = draw((400, 500), like, seeded(6)).flatten()
    mean = 0.5 if draw is uniforms else 0.0
    assert abs(values.mean() - mean) < 5 / math.sqrt(len(values))
    assert draw is not signs or set(values.tolist()) == {-1.0, 1.0}


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"needs generator="):
        randn((2,), torch.empty(0), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"3 streams but the batch has 2 rows"):
        randn((2, 2), torch.empty(0), Streams(0, rows=3))
    with pytest.raises(ValueError, match=r"2 seeds for 3 chains"):
        Streams([1, 2], rows=3)
    with pytest.raises(ValueError, match=r"at least one row, got 0"):
        Streams(0, rows=0)


def words_of(seed: int, purpose: str, rows: int = 8, count: int = 512) -> set[float]:
    drawn = Streams(seed, rows, purpose=purpose).draw("uniform", count, torch.float64, CPU)
    # Pairs of 24 bits: 4,096 of them coincide by chance once in 10^7 tries, single numbers in most.
    return {float(pair) for pair in (drawn[:, ::2] * 2**24 + drawn[:, 1::2]).flatten()}


def test_seeds_and_purposes_share_no_number() -> None:
    purposes = ["", "start", "steps", "noise", "probes"]
    words = [words_of(seed, purpose) for seed in (0, 1, 2, 2**63) for purpose in purposes]
    assert len(set().union(*words)) == sum(map(len, words))


def test_generators_and_child_seeds_know_their_purpose() -> None:
    purposes = ("a", "b", "1 a")
    seeds = [randomness.child_seed(seed, purpose) for seed in (0, 1, 2) for purpose in purposes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    small, large = (torch.rand(4, generator=seeded(seed)) for seed in (5, 5 + 2**32))
    assert not torch.equal(small, large)
    assert seeded(0, "a").initial_seed() == randomness.child_seed(0, "a")
    assert seeded(0).initial_seed() == 0


@pytest.mark.parametrize("seed", [-1, 2**64, 2**70])
def test_seeds_beyond_64_bits_are_refused(seed: int) -> None:
    for use in (lambda: Streams(seed, 1), lambda: Streams([seed], 1), lambda: seeded(seed, "a")):
        with pytest.raises(ValueError, match=f"from 0 to 2\\^64 - 1, got {seed}"):
            use()


def test_a_position_beyond_32_bits_is_another_block() -> None:
    place = 4 * (2**33 + 5)
    far, near = (
        Streams(0, 2, positions={"uniform": at}).draw("uniform", 8, torch.float64, CPU)
        for at in (place, 20)
    )
    assert not torch.equal(far, near)
    block = [torch.tensor(word) for word in (5, 2, 1, KINDS.index("uniform"))]
    expected = (philox(block, [torch.tensor(0)] * 2) >> 8).double() / 2**24
    assert torch.equal(far[1, :4], expected)
