"""Metrics of images, posteriors and loss curves against closed forms and known laws."""

from __future__ import annotations

import math

import pytest
import scipy.linalg
import torch
from oracles import random_covariances
from torch import Tensor

from mmdgs import metrics
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics.coverage import EXPECTED_COVERAGE
from mmdgs.metrics.diagnostics import running_median
from mmdgs.moments import ExactMoments
from mmdgs.moments.calibrated import likeliest_lift
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import seeded
from mmdgs.targets import GaussianMixture

# --- Fréchet distance -------------------------------------------------------------------------------------------


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def test_frechet_distance_of_gaussians_in_one_dimension_is_the_known_formula():
    mean, cov = torch.tensor([0.5]), torch.tensor([[4.0]])
    other, cov_other = torch.tensor([-1.0]), torch.tensor([[0.25]])
    expected = 1.5**2 + (2.0 - 0.5) ** 2
    assert metrics.gaussian_frechet_distance(mean, cov, other, cov_other) == pytest.approx(expected, rel=1e-12)


def test_frechet_distance_of_commuting_covariances_is_the_distance_of_their_roots():
    a, b = torch.tensor([4.0, 1.0, 0.0, 9.0]), torch.tensor([1.0, 16.0, 2.0, 9.0])
    mean = torch.tensor([1.0, 0.0, -2.0, 0.5])
    expected = 1 + 4 + 0.25 + (a.sqrt() - b.sqrt()).double().square().sum().item()
    found = metrics.gaussian_frechet_distance(mean, a.diag(), torch.zeros(4), b.diag())
    # float32 roots of the expected value are the only rounding here
    assert found == pytest.approx(expected, rel=1e-6)


def test_frechet_distance_agrees_with_the_matrix_square_root():
    a, b = random_covariances(2, 6, seed=3)
    root = scipy.linalg.sqrtm((a @ b).numpy()).real
    expected = (a.trace() + b.trace()).item() - 2 * root.trace()
    found = metrics.gaussian_frechet_distance(torch.zeros(6), a, torch.zeros(6), b)
    assert found == pytest.approx(expected, rel=1e-9)
    assert metrics.gaussian_frechet_distance(torch.zeros(6), b, torch.zeros(6), a) == pytest.approx(found, rel=1e-9)


def test_frechet_distance_of_a_set_to_itself_is_zero_even_with_fewer_rows_than_features():
    few = normals(5, 20)
    assert abs(metrics.frechet_distance(few, few)) < 1e-10
    assert metrics.frechet_distance(few, few + 1) == pytest.approx(20, abs=1e-9)


def test_frechet_distance_of_samples_tends_to_that_of_their_laws():
    a, b = normals(40_000, 3), 2 * normals(40_000, 3, seed=1) + 1
    # three coordinates: squared shift 1 and (2 - 1)^2 each; a standard error of some hundredths
    assert metrics.frechet_distance(a, b) == pytest.approx(6.0, abs=0.15)


def test_moments_of_parts_are_those_of_the_whole():
    x = normals(50, 4) + 7
    parts = [metrics.FeatureMoments.of(part) for part in x.split([1, 20, 29])]
    whole, merged = metrics.FeatureMoments.of(x), parts[0] + parts[1] + parts[2]
    assert merged.count == 50
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.covariance, torch.cov(x.mT), rtol=1e-10, atol=1e-10)
    assert metrics.frechet_distance(merged, x) == pytest.approx(0, abs=1e-9)


def test_features_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="floating point"):
        metrics.frechet_distance(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="not finite"):
        metrics.frechet_distance(torch.full((3, 2), math.nan), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="one dimension"):
        metrics.frechet_distance(torch.zeros(3, 2), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="at least two"):
        metrics.frechet_distance(torch.zeros(1, 2), torch.zeros(3, 2))


# --- calibration ------------------------------------------------------------------------------------------------

LEVEL = NoiseLevel(sigma=0.7)
ROWS = 20_000


def exact_posterior() -> tuple[Tensor, Gaussian]:
    """Points of a correlated Gaussian in two dimensions, and their exact posterior given a noisy view."""
    cov = torch.tensor([[[1.0, 0.6], [0.6, 0.5]]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    target = GaussianMixture(one, torch.tensor([[0.3, -1.0]], dtype=torch.float64), cov)
    x = target.sample((ROWS,), generator=seeded(0))
    return x, ExactMoments(target)(add_noise(x, LEVEL, generator=seeded(1)), LEVEL)


def test_an_exact_posterior_is_calibrated():
    x, q = exact_posterior()
    found = metrics.calibration(x, q)
    # z^2 has variance 2 and the two coordinates are correlated: five standard errors
    assert found.variance == pytest.approx(1, abs=5 * math.sqrt(2 / ROWS))
    assert found.within_one == pytest.approx(EXPECTED_COVERAGE[0], abs=0.015)
    assert found.within_two == pytest.approx(EXPECTED_COVERAGE[1], abs=0.01)
    assert found.count == 2 * ROWS
    marginal = torch.distributions.Normal(q.mean, q.cov.diagonal().sqrt())
    assert found.nll == pytest.approx(-marginal.log_prob(x).mean().item(), rel=1e-12)


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_a_variance_that_is_wrong_by_a_factor_shows_that_factor(factor):
    x, q = exact_posterior()
    wrong = metrics.calibration(x, Gaussian(q.mean, Diagonal(factor * q.cov.diagonal())))
    assert wrong.variance == pytest.approx(metrics.calibration(x, q).variance / factor, rel=1e-12)
    assert wrong.variance == pytest.approx(1 / factor, rel=0.06)
    assert (wrong.within_one > EXPECTED_COVERAGE[0]) == (factor > 1)
    assert wrong.nll > metrics.calibration(x, q).nll


def test_calibration_looks_at_the_pixels_of_a_mask_only():
    x, q = exact_posterior()
    variances = q.cov.diagonal().clone()
    variances[:, 1] /= 2
    half = Gaussian(q.mean, Diagonal(variances))
    first = torch.tensor([True, False]).expand_as(x)
    assert metrics.calibration(x, half, first).variance == pytest.approx(1, abs=0.06)
    assert metrics.calibration(x, half, ~first).variance == pytest.approx(2, abs=0.12)
    nothing = metrics.calibration(x, half, torch.zeros_like(first))
    assert nothing.count == 0
    assert math.isnan(nothing.variance)


def test_a_fitted_floor_is_the_size_of_errors_the_variances_do_not_know():
    """x - mean has variance v + e where v is told and e is not: tiny v are best lifted to about e."""
    told = torch.logspace(-8, 1, 40_000, dtype=torch.float64).reshape(-1, 1)
    x = (told + 1e-2).sqrt() * normals(40_000, 1)
    q = Gaussian(torch.zeros_like(x), Diagonal(told))
    floor, scale = likeliest_lift([(x, q)], 1.0)
    assert 0.8e-2 < floor < 2e-2
    assert 0.9 < scale < 1.3

    def nll(floor: float, scale: float) -> float:
        return metrics.calibration(x, Gaussian(q.mean, Diagonal(scale * told.clamp(min=floor)))).nll

    grid = torch.logspace(-6, 1, 71, dtype=torch.float64)
    assert nll(floor, scale) <= min(nll(limit.item(), s) for limit in grid for s in (0.9, 1.0, 1.1)) + 1e-4
    # In units of another size the floor is another number, and the variance the same.
    other = likeliest_lift([(x, q)], 0.01)
    assert 0.01 * other[0] == pytest.approx(floor, rel=0.3)
    # Where the variances are right, none of them is worth lifting: a floor costs likelihood.
    right = Gaussian(torch.zeros_like(x), Diagonal(told))
    assert likeliest_lift([(told.sqrt() * normals(40_000, 1), right)], 1.0)[0] < 1e-5


def test_reliability_is_the_diagonal_for_right_variances_and_leaves_it_for_wrong_ones():
    std = torch.logspace(-3, 0, 60_000, dtype=torch.float64).reshape(-1, 1)
    x = std * normals(60_000, 1)
    right = metrics.reliability(x, Gaussian(torch.zeros_like(x), Diagonal(std.square())), bins=12)
    assert sum(right.counts) == 60_000
    torch.testing.assert_close(torch.tensor(right.observed), torch.tensor(right.predicted), rtol=0.05, atol=0)
    assert right.predicted[-1] / right.predicted[0] > 500
    blunt = metrics.reliability(x, Gaussian(torch.zeros_like(x), Diagonal(torch.ones(1, 1).expand_as(x).double())))
    assert blunt.predicted == [1.0]
    assert blunt.observed[0] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-9)


def test_residuals_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="posterior's shape"):
        metrics.calibration(torch.zeros(3, 2), Gaussian(torch.zeros(3, 4), Diagonal(torch.ones(3, 4))))


# --- loss curves ------------------------------------------------------------------------------------------------


def smooth_curve(steps: int = 2_000) -> Tensor:
    """An exponential fall from 100 to 10 with noise of standard deviation 1 (numbers in nobody's favour)."""
    t = torch.arange(steps, dtype=torch.float64)
    return 10 + 90 * (-t / 300).exp() + normals(steps)


def test_a_smooth_curve_has_no_spikes():
    found = metrics.instability(smooth_curve())
    assert found.spikes == ()
    assert found.spike_fraction == 0
    assert 0 < found.largest_jump < 0.06  # the largest of 1,800 normals over 90
    assert found.failed_at is None
    assert found.steps == 2_000


def test_spikes_are_found_where_they_are_and_the_scale_does_not_matter():
    losses = smooth_curve()
    losses[[250, 700, 1_500]] += torch.tensor([60.0, 45.0, 900.0], dtype=torch.float64)  # the first in the steep part
    found = metrics.instability(losses)
    assert found.spikes == (250, 700, 1_500)
    assert found.spike_fraction == pytest.approx(3 / 1_800)
    assert found.largest_jump == pytest.approx(10, rel=0.1)
    scaled = metrics.instability(1e-3 * losses - 50)
    assert scaled.spikes == found.spikes
    assert scaled.largest_jump == pytest.approx(found.largest_jump, rel=1e-6)


def test_a_drop_is_no_spike():
    losses = smooth_curve()
    losses[900] -= 500
    assert metrics.instability(losses).spikes == ()


def test_only_the_steps_before_a_loss_that_is_not_finite_count():
    losses = smooth_curve()
    losses[1_000], losses[1_200] = math.nan, 1e9
    found = metrics.instability(losses)
    assert (found.failed_at, found.steps, found.spikes) == (1_000, 1_000, ())
    early = metrics.instability(torch.tensor([1.0, math.inf, 2.0]))
    assert (early.failed_at, early.steps) == (1, 1)
    assert math.isnan(early.largest_jump)


def test_a_curve_that_only_rises_has_an_infinite_jump_and_a_short_one_is_refused():
    assert metrics.instability(torch.arange(500.0)).largest_jump == math.inf
    with pytest.raises(ValueError, match="too few"):
        metrics.instability(torch.ones(50))


def test_the_running_median_looks_back_only_and_its_deviation_does_not_see_a_trend():
    losses = torch.tensor([5.0, 1.0, 3.0, 100.0, 2.0])
    assert running_median(losses, 3)[0].tolist() == [3.0, 3.0]
    noise = normals(4_000)
    for curve in (noise, noise - 0.05 * torch.arange(4_000)):
        # the window's own trend is 10 standard deviations deep
        assert running_median(curve)[1].mean().item() == pytest.approx(1, abs=0.05)


# --- classes ----------------------------------------------------------------------------------------------------


def test_shares_entropy_and_distance_of_classes():
    shares = metrics.class_shares(torch.tensor([0, 0, 1, 3]), 4)
    assert shares.tolist() == [0.5, 0.25, 0, 0.25]
    assert metrics.entropy(shares) == pytest.approx(1.5 * math.log(2))
    assert f"{metrics.entropy(torch.tensor([0.0, 1.0])):.3f}" == "0.000"  # and no minus before it
    assert metrics.entropy(torch.full((10,), 0.1)) == pytest.approx(math.log(10), rel=1e-6)
    assert metrics.total_variation(shares, torch.full((4,), 0.25, dtype=torch.float64)) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="between 0 and 2"):
        metrics.class_shares(torch.tensor([0, 3]), 3)
