"""Noise levels and the forward kernel."""

from __future__ import annotations

import pytest
import torch
from oracles import assert_moments

from mmdgs.noise import CLEAN, NoiseLevel, add_noise, transition
from mmdgs.targets import GaussianMixture

CLEANER, NOISIER = NoiseLevel(alpha=0.9, sigma=0.3), NoiseLevel(alpha=0.6, sigma=0.8)


def test_level_is_a_value() -> None:
    level = NoiseLevel(sigma=2)
    assert level.alpha == 1.0
    assert level == NoiseLevel(alpha=1, sigma=2.0)
    assert {level: "found"}[NoiseLevel(sigma=2.0)] == "found"
    with pytest.raises(AttributeError):
        level.sigma = 3.0  # type: ignore[misc]


def test_derived_numbers() -> None:
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
def test_add_noise_is_the_forward_kernel(start: NoiseLevel, level: NoiseLevel, generator: torch.Generator) -> None:
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)
    a, b = transition(start, level)
    x_t = add_noise(x.expand(100_000, 2), level, generator=generator, start=start)
    assert_moments(x_t, a * x, b**2 * torch.eye(2, dtype=torch.float64))


def test_noising_in_two_stages_reaches_the_noised_target(skewed: GaussianMixture, generator: torch.Generator) -> None:
    x = skewed.sample((100_000,), generator=generator)
    x_s = add_noise(x, CLEANER, generator=generator)
    x_t = add_noise(x_s, NOISIER, generator=generator, start=CLEANER)
    for points, level in ((x_s, CLEANER), (x_t, NOISIER)):
        assert_moments(points, skewed.noised(level).mean(), skewed.noised(level).covariance())


@pytest.mark.parametrize("levels", [(NOISIER, CLEANER), (CLEANER, CLEANER)], ids=["reversed", "equal"])
def test_wrong_order_is_refused(levels: tuple[NoiseLevel, NoiseLevel], generator: torch.Generator) -> None:
    start, level = levels
    with pytest.raises(ValueError, match=r"wrong order.*cleaner level \(smaller sigma / alpha\) first"):
        add_noise(torch.zeros(1, 2), level, generator=generator, start=start)
