"""Noise levels and the forward kernel."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import assert_moments

from mmdgs.noise import CLEAN, LevelTable, NoiseLevel, NoiseLevels, add_noise, transition
from mmdgs.randomness import seeded
from mmdgs.targets import GaussianMixture

CLEANER, NOISIER = NoiseLevel(alpha=0.9, sigma=0.3), NoiseLevel(alpha=0.6, sigma=0.8)


def test_a_level_is_a_value_and_a_number_alone_is_sigma() -> None:
    level = NoiseLevel(sigma=2)
    assert level == NoiseLevel(2.0) == NoiseLevel(alpha=1, sigma=2.0)
    assert {level: "value"}[NoiseLevel(sigma=2.0)] == "value"
    with pytest.raises(AttributeError):
        level.sigma = 3.0  # type: ignore[misc]
    assert repr(NoiseLevel(0.2)) == "NoiseLevel(alpha=1.0, sigma=0.2)"
    with pytest.raises(TypeError, match="positional"):
        NoiseLevel(0.5, 0.2)  # which is which?
    assert NOISIER.variance == pytest.approx((0.8 / 0.6) ** 2, rel=1e-15)
    assert NOISIER.tweedie == pytest.approx(0.64 / 0.6, rel=1e-15)


def test_transitions_compose() -> None:
    # clean -> s -> t adds up to clean -> t.
    a, b = transition(CLEANER, NOISIER)
    assert a * CLEANER.alpha == pytest.approx(NOISIER.alpha, rel=1e-15)
    assert (a * CLEANER.sigma) ** 2 + b**2 == pytest.approx(NOISIER.sigma**2, rel=1e-15)
    assert transition(CLEAN, NOISIER) == pytest.approx((NOISIER.alpha, NOISIER.sigma), rel=1e-15)


@pytest.mark.parametrize(
    ("start", "level"),
    [(CLEAN, NoiseLevel(sigma=0.5)), (CLEAN, NOISIER), (CLEANER, NOISIER)],
    ids=["alpha = 1", "alpha < 1", "between levels"],
)
def test_add_noise_is_the_forward_kernel(
    start: NoiseLevel, level: NoiseLevel, generator: torch.Generator
) -> None:
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)
    a, b = transition(start, level)
    x_t = add_noise(x.expand(100_000, 2), level, generator=generator, start=start)
    assert_moments(x_t, a * x, b**2 * torch.eye(2, dtype=torch.float64))


def test_noising_in_two_stages_reaches_the_noised_target(
    skewed: GaussianMixture, generator: torch.Generator
) -> None:
    x = skewed.sample((100_000,), generator=generator)
    x_s = add_noise(x, CLEANER, generator=generator)
    x_t = add_noise(x_s, NOISIER, generator=generator, start=CLEANER)
    for points, level in ((x_s, CLEANER), (x_t, NOISIER)):
        assert_moments(points, skewed.noised(level).mean(), skewed.noised(level).covariance())


def test_wrong_order_is_refused() -> None:
    for start in (NOISIER, CLEANER):
        with pytest.raises(ValueError, match="order"):
            transition(start, CLEANER)


# --- values by level

RATIOS = [0.013, 0.7, 9.1]
VALUES = [3.7e-5, 0.3, 0.11]


def test_a_table_is_exact_where_it_is_known_and_straight_in_logarithms_between() -> None:
    table = LevelTable(RATIOS, VALUES)
    for place, (ratio, value) in enumerate(zip(RATIOS, VALUES, strict=True)):
        assert table[NoiseLevel(sigma=ratio)] == value
        assert table[NoiseLevel(alpha=0.25, sigma=0.25 * ratio)] == value
        assert table.place(NoiseLevel(sigma=ratio)) == place
    for share in (0.1, 0.5, 0.8):
        for low in (0, 1):
            ratio = RATIOS[low] ** (1 - share) * RATIOS[low + 1] ** share
            expected = (1 - share) * math.log(VALUES[low]) + share * math.log(VALUES[low + 1])
            assert math.log(table[NoiseLevel(sigma=ratio)]) == pytest.approx(expected, rel=1e-12)
            assert table.place(NoiseLevel(sigma=ratio)) == pytest.approx(low + share, rel=1e-12)
    assert table[NoiseLevel(sigma=1e-5)] == VALUES[0]
    assert table[NoiseLevel(sigma=1e5)] == VALUES[-1]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_rows_of_a_table_are_its_levels_one_by_one(shape: tuple[int, ...], count: int) -> None:
    values = torch.rand(count, *shape, generator=seeded(0), dtype=torch.float64)
    table = LevelTable(RATIOS[:count], values)
    levels = [NoiseLevel(sigma=ratio) for ratio in (0.001, 0.013, 0.2, 0.7, 5.0, 50.0)]
    rows = NoiseLevels.of(levels, torch.empty(len(levels), 3, dtype=torch.float64))
    each = torch.stack([torch.as_tensor(table[level], dtype=torch.float64) for level in levels])
    expected = each.reshape(len(levels), 1, *shape)
    torch.testing.assert_close(table[rows], expected, rtol=1e-12, atol=0)


def test_a_table_of_levels_in_any_order() -> None:
    levels = {
        NoiseLevel(alpha=0.5, sigma=0.1): 2.0,
        NoiseLevel(sigma=4.0): 3.0,
        NoiseLevel(sigma=0.1): 1.0,
    }
    table = LevelTable.of(levels)
    assert table.ratios.tolist() == [0.1, 0.2, 4.0]
    assert all(table[level] == value for level, value in levels.items())
    assert table.covers(list(levels))
    assert not table.covers([NoiseLevel(sigma=5.0)])


@pytest.mark.parametrize(
    ("ratios", "values", "message"),
    [
        ([], [], "K at least 1"),
        ([1.0], [1.0, 2.0], r"\(2,\)"),
        ([1.0, 1.0], [1.0, 1.0], "rising"),
        ([1.0], [-1.0], "negative"),
        ([1.0], [math.nan], "finite"),
    ],
)
def test_what_is_no_table(ratios: list[float], values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LevelTable(ratios, values)
