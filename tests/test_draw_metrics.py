"""Measures of draws from a posterior, against closed forms."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from oracles import normals
from torch import Tensor

from mmdgs.metrics import calibration_ratio, coverage_of, crps, psnr, ranks, ssim
from mmdgs.metrics.draws import coverage_weights

CELLS = 40_000


@pytest.mark.parametrize("draws", [2, 8, 30])
@pytest.mark.parametrize("width", [0.5, 1.0, 2.0])
def test_the_calibration_ratio_is_spread_over_error_whatever_the_number_of_draws(
    draws: int, width: float
) -> None:
    """Draws N(0, w^2) of truths N(0, 1): the mean of S draws has the error 1 + w^2 / S, spread (1 +
    1 / S) w^2.
    """
    ratio = calibration_ratio(width * normals(draws, CELLS), normals(CELLS, seed=1))
    expected = math.sqrt((1 + 1 / draws) * width**2 / (1 + width**2 / draws))
    assert ratio == pytest.approx(expected, rel=0.03)
    assert expected == 1 or width != 1


def two_modes(*shape: int, width: float = 0.2, seed: int = 0) -> Tensor:
    """Half of the numbers around -1 and half around 1."""
    return torch.sign(normals(*shape, seed=seed + 50)) + width * normals(*shape, seed=seed)


LAWS = {
    "normal": normals,
    "log-normal": lambda *shape, seed=0: normals(*shape, seed=seed).exp(),
    "two modes": two_modes,
}


def deviation(draws: int, level: float = 0.9) -> float:
    """Of the mean of CELLS weights, for right draws."""
    return coverage_weights(draws, level).std().item() / math.sqrt(CELLS)


@pytest.mark.parametrize(("draws", "level"), [(4, 0.9), (9, 0.5), (64, 0.9)])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_coverage_is_the_level_for_right_draws_of_any_law(law, draws: int, level: float) -> None:
    """Its weights have a standard deviation of 1.9 with four draws, and less with more."""
    coverage = coverage_of(law(draws, CELLS), law(CELLS, seed=1), level)
    assert coverage == pytest.approx(level, abs=4 * deviation(draws, level))


@pytest.mark.parametrize("draws", [4, 16])
@pytest.mark.parametrize(("width", "shift"), [(0.6, 0.0), (1.5, 0.0), (0.6, 0.7)])
@pytest.mark.parametrize("law", ["normal", "log-normal"])
def test_coverage_is_that_of_the_law_of_the_draws_whatever_their_number(
    law: str, width: float, shift: float, draws: int
) -> None:
    """N(b, w^2) for N(0, 1): the 90% interval b +- 1.645 w holds 67.6% where w = 0.6 (once read as
    81% of 8 draws).
    """
    x, truth = shift + width * normals(draws, CELLS), normals(CELLS, seed=1)
    if law == "log-normal":
        x, truth = x.exp(), truth.exp()
    cumulative = NormalDist().cdf
    expected = cumulative(shift + 1.6449 * width) - cumulative(shift - 1.6449 * width)
    assert coverage_of(x, truth) == pytest.approx(expected, abs=0.015 + 3 * deviation(draws))


@pytest.mark.parametrize("draws", [4, 16])
def test_coverage_of_two_modes_that_are_too_narrow(draws: int) -> None:
    """Modes of width 0.1 for 0.3: the interval of the law ends within the modes, at +-1.128; it
    holds 66.5%.
    """
    end, mode = 1 + 0.1 * NormalDist().inv_cdf(0.9), NormalDist(1, 0.3)
    coverage = coverage_of(two_modes(draws, CELLS, width=0.1), two_modes(CELLS, width=0.3, seed=1))
    assert coverage == pytest.approx(mode.cdf(end) - mode.cdf(-end), abs=0.05)


def test_numbers_that_are_equal_to_all_draws_say_nothing_of_coverage() -> None:
    """A border that is black in the truth and in every draw; any order of equal numbers is as
    likely.
    """
    assert coverage_of(torch.zeros(4, 5), torch.zeros(5)) == pytest.approx(0.9)
    assert coverage_of(torch.zeros(4, 5), torch.ones(5)) == pytest.approx(0, abs=0.01)
    assert ranks(torch.zeros(4, 1), torch.zeros(1)).tolist() == [2]


def test_ranks_are_uniform_for_right_draws() -> None:
    shares = torch.bincount(ranks(normals(4, CELLS), normals(CELLS, seed=1)), minlength=5) / CELLS
    assert (shares - 0.2).abs().max() < 4.5 * math.sqrt(0.16 / CELLS)
    draws = torch.tensor([[1.0, 5.0], [2.0, 6.0]])
    assert ranks(draws, torch.tensor([1.5, 9.0])).tolist() == [1, 2]


@pytest.mark.parametrize("x", [0.0, 1.3])
def test_crps_of_a_normal_law(x: float) -> None:
    """Of N(0, 1) at x: x (2 Phi(x) - 1) + 2 phi(x) - 1 / sqrt(pi); unbiased with few draws."""
    score = crps(normals(3, 200_000), torch.full((200_000,), x)).mean().item()
    density = math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    expected = x * math.erf(x / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi)
    assert score == pytest.approx(expected, abs=0.006)


def test_crps_by_pairs() -> None:
    draws, truth = normals(5, 7), normals(7, seed=1)
    pairs = (draws[:, None] - draws[None]).abs().sum((0, 1)) / (5 * 4)
    torch.testing.assert_close(crps(draws, truth), (draws - truth).abs().mean(0) - 0.5 * pairs)


def test_psnr() -> None:
    truth = torch.zeros(2, 1, 4, 4)
    x = truth + torch.tensor([0.1, 0.01])[:, None, None, None]
    assert psnr(x, truth).tolist() == pytest.approx([20, 40], rel=1e-6)
    assert psnr(x.expand(3, 2, 1, 4, 4), truth).shape == (3, 2)
    assert psnr(2 * x, 2 * truth, peak=2.0)[0].item() == pytest.approx(20, rel=1e-6)


def test_ssim_in_closed_form() -> None:
    """Images alike: 1. Two constants a and b: (2 a b + c1) / (a^2 + b^2 + c1). An image and its
    negative: < 0.
    """
    x = normals(2, 3, 16, 16)
    torch.testing.assert_close(ssim(x, x), torch.ones(2, dtype=torch.float64))
    a, b = torch.full((1, 1, 12, 12), 0.2), torch.full((1, 1, 12, 12), 0.6)
    assert ssim(a, b).item() == pytest.approx((2 * 0.12 + 1e-4) / (0.04 + 0.36 + 1e-4), rel=1e-6)
    assert (ssim(9 + x, 9 - x) < 0).all()
    # By hand in the middle of 11 x 11 pixels, where there is one window.
    line = torch.exp(-0.5 * (torch.arange(-5, 6, dtype=torch.float64) / 1.5) ** 2)
    window = line[:, None] * line / line.sum() ** 2
    p, q = normals(11, 11), normals(11, 11, seed=1)
    a, b = ((window * x).sum() for x in (p, q))
    va, vb = ((window * x * x).sum() - mean**2 for x, mean in ((p, a), (q, b)))
    both = (window * p * q).sum() - a * b
    expected = (2 * a * b + 1e-4) / (a**2 + b**2 + 1e-4) * (2 * both + 9e-4) / (va + vb + 9e-4)
    torch.testing.assert_close(ssim(p[None, None], q[None, None])[0], expected)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: calibration_ratio(normals(4, 2), normals(3)), r"\(3,\)"),
        (lambda: crps(normals(1, 3), normals(3)), "got 1"),
        (lambda: ranks(normals(2, 1), torch.tensor([math.nan])), "finite"),
        (lambda: coverage_of(normals(4, 2), normals(2), 90), "got 90"),
        (lambda: ssim(normals(1, 1, 8, 8), normals(1, 1, 8, 8)), "11 pixels"),
        (lambda: psnr(normals(3, 4), normals(4, 3)), r"\(3, 4\)"),
    ],
)
def test_what_makes_no_sense_is_refused(call, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()
