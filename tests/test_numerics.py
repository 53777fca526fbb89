"""Numerics of our own in the place of a library's, against scipy."""

from __future__ import annotations

import math
import statistics

import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import t as student

from mmdgs.metrics import extrapolated, interval, jackknife_interval
from mmdgs.metrics.intervals import student_quantile
from mmdgs.noise import NoiseLevel
from mmdgs.samplers.langevin import LARGEST, suggested_rate, variance_factor


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 10, 31, 100, 9_999])
@pytest.mark.parametrize("probability", [0.5, 0.75, 0.975, 0.9999])
def test_students_quantile(freedom: int, probability: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(
        student.ppf(probability, freedom), rel=1e-10, abs=1e-12
    )


def test_the_interval_of_a_mean_and_that_of_the_jackknife_agree() -> None:
    values = [0.3, 1.7, -0.4, 2.2, 0.9]
    mean, half = interval(values)
    low, high = student.interval(
        0.95, 4, loc=statistics.mean(values), scale=statistics.stdev(values) / math.sqrt(5)
    )
    assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-12)
    # The mean with each value left out: the jackknife of a mean is the plain interval.
    left_out = [(sum(values) - value) / 4 for value in values]
    assert jackknife_interval(left_out) == pytest.approx(half, rel=1e-12)
    assert math.isnan(jackknife_interval([1.0]))
    assert interval([2.0])[0] == 2.0
    assert math.isnan(interval([2.0])[1])


def test_a_bias_of_one_over_the_count_is_taken_off() -> None:
    """Exactly for a + c / n, and in the mean for the variance over n, whose bias is -v / n."""
    law = lambda n: 3.3 + 26_000 / n  # noqa: E731
    assert extrapolated(law(5_000), [law(4_000)] * 5, 10) == pytest.approx(law(50_000), rel=1e-12)
    assert extrapolated(law(5_000), [law(4_000)] * 5, math.inf) == pytest.approx(3.3, rel=1e-12)
    assert extrapolated(law(5_000), [law(4_000)] * 5, 1) == law(5_000)
    values = [0.3, 1.7, -0.4, 2.2, 0.9]
    left_out = [statistics.pvariance(values[:i] + values[i + 1 :]) for i in range(5)]
    assert extrapolated(statistics.pvariance(values), left_out, math.inf) == pytest.approx(
        statistics.variance(values)
    )
    assert math.isnan(extrapolated(1.0, [1.0], 2))


@pytest.mark.parametrize("gamma", [1.001, 1.0373, 1.3, 3.0, 100.0])
@pytest.mark.parametrize("steps", [1, 5, 100])
def test_the_suggested_rate_is_the_minimum(gamma: float, steps: int) -> None:
    found = minimize_scalar(
        lambda rate: abs(variance_factor(rate, gamma, steps) - 1),
        bounds=(1e-5, LARGEST),
        method="bounded",
        options={"xatol": 1e-10},
    )
    levels = [NoiseLevel(sigma=0.1 * gamma), NoiseLevel(sigma=0.1)]
    assert suggested_rate(levels, steps) == pytest.approx(found.x, abs=1e-6)
