"""Intervals: of a mean, and of a number that is none, such as a FID, by the jackknife over groups (Tukey, 1958).

For the jackknife the number is taken again with each group left out. Groups are of one size and independent of each
other, such as the samples of one seed each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% confidence interval (Student's t)."""
    if len(values) < 2:
        return values[0], math.nan
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), float(half)


def jackknife_interval(left_out: Sequence[float]) -> float:
    """Half the width of the 95% interval (Student's t) of a number, from its values with each group left out.

    For a difference of two numbers of the same groups, give the differences. NaN where there are no two groups.
    """
    groups = len(left_out)
    if groups < 2:
        return math.nan
    error = math.sqrt(groups - 1) * statistics.pstdev(left_out)
    return float(student.ppf(0.975, groups - 1) * error)
