"""Metrics of features, posteriors and loss curves against closed forms and known laws."""

from __future__ import annotations

import math

import pytest
import scipy.linalg
import torch
from oracles import normals, random_covariances
from torch import Tensor

from experiments.mnist import instability
from mmdgs import metrics
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics.reports import reliability_of
from mmdgs.moments import ExactMoments
from mmdgs.moments.calibrated import likeliest_lift
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import seeded
from mmdgs.targets import GaussianMixture

# --- Fréchet distance


def law(mean: Tensor, covariance: Tensor) -> metrics.FeatureMoments:
    return metrics.FeatureMoments(2, mean.double(), covariance.double())


def test_frechet_distance_of_commuting_covariances_is_the_distance_of_their_roots():
    a, b = torch.tensor([4.0, 1.0, 0.0, 9.0]), torch.tensor([1.0, 16.0, 2.0, 9.0])
    mean = torch.tensor([1.0, 0.0, -2.0, 0.5])
    expected = 1 + 4 + 0.25 + (a.sqrt() - b.sqrt()).double().square().sum().item()
    distance = metrics.frechet_distance(law(mean, a.diag()), law(torch.zeros(4), b.diag()))
    assert distance == pytest.approx(expected, rel=1e-6)  # float32 roots of the expected value


def test_frechet_distance_agrees_with_the_matrix_square_root():
    a, b = random_covariances(2, 6, seed=3)
    root = scipy.linalg.sqrtm((a @ b).numpy()).real
    expected = (a.trace() + b.trace()).item() - 2 * root.trace()
    first, second = law(torch.zeros(6), a), law(torch.zeros(6), b)
    assert metrics.frechet_distance(first, second) == pytest.approx(expected, rel=1e-9)
    assert metrics.frechet_distance(second, first) == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_of_a_set_to_itself_is_zero_even_with_fewer_rows_than_features():
    few = normals(5, 20)
    assert abs(metrics.frechet_distance(few, few)) < 1e-10
    assert metrics.frechet_distance(few, few + 1) == pytest.approx(20, abs=1e-9)


def test_moments_of_parts_are_those_of_the_whole():
    x = normals(50, 4) + 7
    parts = [metrics.FeatureMoments.of(part) for part in x.split([1, 20, 29])]
    whole, merged = metrics.FeatureMoments.of(x), parts[0] + parts[1] + parts[2]
    assert merged.count == 50
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.covariance, torch.cov(x.mT), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), "floating point"),
        (torch.full((3, 2), math.nan), "not finite"),
        (torch.zeros(3, 4), "one dimension"),
        (torch.zeros(1, 2), "at least two"),
    ],
)
def test_features_that_make_no_sense_are_refused(features: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        metrics.frechet_distance(features, torch.zeros(3, 2))


# --- calibration


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_a_variance_that_is_wrong_by_a_factor_shows_that_factor(factor: float):
    """Points of a correlated Gaussian, and their exact posterior given a noisy view."""
    level, rows = NoiseLevel(sigma=0.7), 20_000
    cov = torch.tensor([[[1.0, 0.6], [0.6, 0.5]]], dtype=torch.float64)
    target = GaussianMixture([1.0], torch.tensor([[0.3, -1.0]], dtype=torch.float64), cov)
    x = target.sample((rows,), generator=seeded(0))
    q = ExactMoments(target)(add_noise(x, level, generator=seeded(1)), level)
    z = metrics.standardised(x, Gaussian(q.mean, Diagonal(factor * q.cov.diagonal())))
    # z^2 has variance 2 and the two coordinates are correlated: five standard errors
    assert z.square().mean().item() * factor == pytest.approx(1, abs=5 * math.sqrt(2 / rows))
    if factor == 1:
        assert (z.abs() <= 1).double().mean().item() == pytest.approx(0.683, abs=0.015)
        assert (z.abs() <= 2).double().mean().item() == pytest.approx(0.954, abs=0.01)
    with pytest.raises(ValueError, match="shape"):
        metrics.standardised(x[:, :1], q)


def test_a_fitted_floor_is_the_size_of_errors_the_variances_do_not_know():
    """x - mean has variance v + e where v is known and e is not: tiny v are lifted to about e."""
    known = torch.logspace(-8, 1, 20_000, dtype=torch.float64).reshape(-1, 1)
    x = (known + 1e-2).sqrt() * normals(20_000, 1)
    q = Gaussian(torch.zeros_like(x), Diagonal(known))
    floor, scale = likeliest_lift([(x, q)], 1.0)
    assert 0.8e-2 < floor < 2e-2
    assert 0.9 < scale < 1.3

    def nll(floor: float, scale: float) -> float:
        lifted = Gaussian(q.mean, Diagonal(scale * known.clamp(min=floor)))
        return -lifted.log_prob(x).mean().item()

    grid = torch.logspace(-6, 1, 36, dtype=torch.float64).tolist()
    assert nll(floor, scale) <= min(nll(f, s) for f in grid for s in (0.9, 1.0, 1.1)) + 1e-4
    # In units of another size the floor is another number, and the variance the same.
    assert 0.01 * likeliest_lift([(x, q)], 0.01)[0] == pytest.approx(floor, rel=0.3)
    # Where the variances are right, none of them is worth lifting: a floor costs likelihood.
    assert likeliest_lift([(known.sqrt() * normals(20_000, 1), q)], 1.0)[0] < 1e-5


def test_reliability_is_the_diagonal_for_right_variances_and_leaves_it_for_wrong_ones():
    std = torch.logspace(-3, 0, 60_000, dtype=torch.float64)
    squares = (std * normals(60_000)).square()
    right = reliability_of(squares, std.square())
    assert sum(right.counts) == 60_000
    assert right.observed == pytest.approx(right.predicted, rel=0.05)
    assert right.predicted[-1] / right.predicted[0] > 500
    blunt = reliability_of(squares, torch.ones_like(squares))
    assert blunt.predicted == [1.0]
    assert blunt.observed[0] == pytest.approx(squares.mean().sqrt().item(), rel=1e-9)


# --- loss curves


def smooth_curve(steps: int = 2_000) -> Tensor:
    """An exponential fall from 100 to 10 with noise of standard deviation 1."""
    return 10 + 90 * (-torch.arange(steps, dtype=torch.float64) / 300).exp() + normals(steps)


def test_spikes_are_found_where_they_are_and_the_scale_does_not_matter():
    losses = smooth_curve()
    quiet = instability(losses, 200)
    assert (quiet.spikes, quiet.failed_at, quiet.steps) == ((), None, 2_000)
    losses[900] -= 500  # a drop is no spike
    losses[[250, 700, 1_500]] += torch.tensor([60.0, 45.0, 900.0], dtype=torch.float64)
    rough = instability(losses, 200)
    assert rough.spikes == (250, 700, 1_500)
    assert rough.spike_fraction == pytest.approx(3 / 1_800)
    assert instability(1e-3 * losses - 50, 200).spikes == rough.spikes


def test_only_the_steps_before_a_loss_that_is_not_finite_count():
    losses = smooth_curve()
    losses[1_000], losses[1_200] = math.nan, 1e9
    failed = instability(losses, 200)
    assert (failed.failed_at, failed.steps, failed.spikes) == (1_000, 1_000, ())
    assert math.isnan(instability(torch.tensor([1.0, math.inf, 2.0]), 200).largest_jump)


# --- classes


def test_shares_entropy_and_distance_of_classes():
    shares = metrics.class_shares(torch.tensor([0, 0, 1, 3]), 4)
    assert shares.tolist() == [0.5, 0.25, 0, 0.25]
    assert metrics.entropy(shares) == pytest.approx(1.5 * math.log(2))
    assert f"{metrics.entropy(torch.tensor([0.0, 1.0])):.3f}" == "0.000"  # and no minus before it
    even = torch.full((4,), 0.25, dtype=torch.float64)
    assert metrics.total_variation(shares, even) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="between 0 and 2"):
        metrics.class_shares(torch.tensor([0, 3]), 3)
