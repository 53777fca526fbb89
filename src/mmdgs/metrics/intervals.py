"""Intervals: of a mean, and by the jackknife over groups of what is no mean, such as FID.

For the jackknife (Tukey, 1958) the statistic is taken again with each group left out. Groups are of
one size and independent of each other, such as the samples of one seed each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t with whole degrees of freedom, for probabilities above 1/2.

    With t = sqrt(freedom) tan(a), P(|T| < t) is a finite sum of powers of cos(a) (Abramowitz and
    Stegun, 26.7.3 and 26.7.4), which grows with a and is solved by bisection.
    """
    odd = freedom % 2

    def within(angle: float) -> float:
        cosine = math.cos(angle)
        term = total = 0.0 if freedom == 1 else cosine if odd else 1.0
        for k in range(2 + odd, freedom - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        total *= math.sin(angle)
        return 2 / math.pi * (angle + total) if odd else total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < 2 * probability - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% confidence interval (Student's t)."""
    if len(values) < 2:
        return values[0], math.nan
    count, mean = len(values), math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, student_quantile(0.975, count - 1) * math.sqrt(variance / count)


def jackknife_interval(left_out: Sequence[float]) -> float:
    """Half the width of the 95% interval of a statistic, from its values with a group left out.

    For a difference of two numbers of the same groups, give the differences. NaN where there are no
    two groups.
    """
    groups = len(left_out)
    # Their spread around the mean, times groups - 1, since each value has all groups but one.
    return (groups - 1) * interval(left_out)[1] if groups > 1 else math.nan


def extrapolated(value: float, left_out: Sequence[float], times: float) -> float:
    """A statistic of `times` as many samples, by the jackknife, if its bias is as one over n.

    That of a FID nearly is (docs/use/evaluate.md). NaN where there are no two groups.
    """
    groups = len(left_out)
    if groups < 2:
        return math.nan
    bias = (groups - 1) * (math.fsum(left_out) / groups - value)
    return value - bias * (1 - 1 / times)
