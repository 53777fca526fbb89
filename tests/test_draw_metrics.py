"""Measures of draws from a posterior, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmdgs.metrics import calibration_ratio, coverage_of, crps, psnr, ranks, ssim


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CELLS = 40_000


@pytest.mark.parametrize("draws", [2, 8, 30])
@pytest.mark.parametrize("width", [0.5, 1.0, 2.0])
def test_the_calibration_ratio_is_spread_over_error_whatever_the_number_of_draws(draws: int, width: float) -> None:
    """Draws N(0, w^2) of truths N(0, 1): the mean of S draws has the error 1 + w^2 / S, spread (1 + 1 / S) w^2."""
    found = calibration_ratio(width * normals(draws, CELLS), normals(CELLS, seed=1))
    expected = math.sqrt((1 + 1 / draws) * width**2 / (1 + width**2 / draws))
    assert found == pytest.approx(expected, rel=0.03)
    if width == 1:
        assert expected == 1


@pytest.mark.parametrize(("draws", "level"), [(9, 0.9), (16, 0.9), (40, 0.5), (19, 0.9)])
def test_coverage_is_the_level_for_right_draws(draws: int, level: float) -> None:
    found = coverage_of(normals(draws, CELLS), normals(CELLS, seed=1), level)
    assert found == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / CELLS))


def test_coverage_of_draws_that_are_too_sure() -> None:
    """Draws of half the width: many of them cover 90% of N(0, 1/4), within 0.5 * 1.645, which 58.9% of truths meet."""
    found = coverage_of(0.5 * normals(400, 10_000), normals(10_000, seed=1))
    assert found == pytest.approx(math.erf(0.5 * 1.6449 / math.sqrt(2)), abs=0.02)


def test_ranks_are_uniform_for_right_draws() -> None:
    found = ranks(normals(4, CELLS), normals(CELLS, seed=1))
    shares = torch.bincount(found, minlength=5) / CELLS
    assert (shares - 0.2).abs().max() < 4.5 * math.sqrt(0.16 / CELLS)
    assert ranks(torch.tensor([[1.0, 5.0], [2.0, 6.0]]), torch.tensor([1.5, 9.0])).tolist() == [1, 2]
    assert ranks(torch.zeros(4, 1), torch.zeros(1)).tolist() == [2]


@pytest.mark.parametrize("x", [0.0, 1.3])
def test_crps_of_a_normal_law(x: float) -> None:
    """Of N(0, 1) at x: x (2 Phi(x) - 1) + 2 phi(x) - 1 / sqrt(pi); unbiased with few draws."""
    found = crps(normals(3, 200_000), torch.full((200_000,), x, dtype=torch.float64)).mean().item()
    density = math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    expected = x * math.erf(x / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi)
    assert found == pytest.approx(expected, abs=0.006)


def test_crps_by_pairs() -> None:
    draws, truth = normals(5, 7), normals(7, seed=1)
    pairs = (draws[:, None] - draws[None]).abs().sum((0, 1)) / (5 * 4)
    torch.testing.assert_close(crps(draws, truth), (draws - truth).abs().mean(0) - 0.5 * pairs)


def test_psnr() -> None:
    truth = torch.zeros(2, 1, 4, 4)
    x = truth + torch.tensor([0.1, 0.01])[:, None, None, None]
    torch.testing.assert_close(psnr(x, truth), torch.tensor([20.0, 40.0], dtype=torch.float64), rtol=1e-6, atol=0)
    assert psnr(x.expand(3, 2, 1, 4, 4), truth).shape == (3, 2)
    assert psnr(2 * x, 2 * truth, peak=2.0)[0].item() == pytest.approx(20, rel=1e-6)


def test_ssim_in_closed_form() -> None:
    """Images alike: 1. Two constants a and b: (2 a b + c1) / (a^2 + b^2 + c1). An image and its negative: < 0."""
    x = normals(2, 3, 16, 16)
    torch.testing.assert_close(ssim(x, x), torch.ones(2, dtype=torch.float64))
    a, b = torch.full((1, 1, 12, 12), 0.2), torch.full((1, 1, 12, 12), 0.6)
    assert ssim(a, b).item() == pytest.approx((2 * 0.12 + 1e-4) / (0.04 + 0.36 + 1e-4), rel=1e-6)
    assert (ssim(9 + x, 9 - x) < 0).all()
    # By hand in the middle of 11 x 11 pixels, where there is one window.
    line = torch.exp(-0.5 * (torch.arange(-5, 6, dtype=torch.float64) / 1.5) ** 2)
    window = line[:, None] * line / line.sum() ** 2
    p, q = normals(11, 11), normals(11, 11, seed=1)
    means = [(window * one).sum() for one in (p, q)]
    va, vb = [(window * one * one).sum() - mean**2 for one, mean in zip((p, q), means, strict=True)]
    both = (window * p * q).sum() - means[0] * means[1]
    expected = (2 * means[0] * means[1] + 1e-4) / (means[0] ** 2 + means[1] ** 2 + 1e-4)
    expected = expected * (2 * both + 9e-4) / (va + vb + 9e-4)
    torch.testing.assert_close(ssim(p[None, None], q[None, None])[0], expected)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"draws must be \(draws, \*\(3,\)\)"):
        calibration_ratio(normals(4, 2), normals(3))
    with pytest.raises(ValueError, match="at least 2 draws, got 1"):
        crps(normals(1, 3), normals(3))
    with pytest.raises(ValueError, match="truth must be finite"):
        ranks(normals(2, 1), torch.tensor([math.nan]))
    with pytest.raises(ValueError, match="between 0 and 1, got 90"):
        coverage_of(normals(4, 2), normals(2), 90)
    with pytest.raises(ValueError, match="11 pixels a side"):
        ssim(normals(1, 1, 8, 8), normals(1, 1, 8, 8))
    with pytest.raises(ValueError, match="do not fit the truth's"):
        psnr(normals(3, 4), normals(4, 3))
