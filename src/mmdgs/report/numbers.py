"""Numbers with their 95% intervals, and how they are shown and compared in tables.

Values of a cell are numbers by name. A list has one entry for each seed, group or image and is
shown as the mean with its interval (Student's t). A number `fid` beside a list `fid_left_out` (its
values with each seed left out) gets the jackknife interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mmdgs.metrics import interval, jackknife_interval


class Number(NamedTuple):
    """A value, and half the width of its 95% interval; NaN where there is none."""

    value: float
    half: float = math.nan

    def text(self, digits: int | None = None, sign: str = "") -> str:
        """With its interval, to so many digits; None: three, or four where the value is small."""
        if not math.isfinite(self.value):
            return str(self.value)
        digits = (4 if abs(self.value) < 0.1 else 3) if digits is None else digits
        value = f"{self.value:{sign},.{digits}f}"
        return value if math.isnan(self.half) else f"{value} ± {self.half:,.{digits}f}"


@dataclass(frozen=True)
class Measure:
    """How a number is shown: key, title, digits, and which is best (less, more, zero, one)."""

    key: str
    title: str
    digits: int | None = None
    better: str | None = None
    percent: bool = False
    deviation: bool = False  # show the standard deviation over runs in place of the interval

    def of(self, values: Mapping[str, Any], against: Mapping[str, Any] | None = None) -> Number:
        """The number of a cell; with `against`, its difference from another's, pair by pair."""
        own, left_out = values[self.key], values.get(f"{self.key}_left_out", ())
        if against is not None:
            other, others = against[self.key], against.get(f"{self.key}_left_out", ())
            paired = isinstance(own, Sequence)
            own = _differences(own, other) if paired else own - other
            left_out = _differences(left_out, others)
        if not isinstance(own, Sequence):
            return Number(own, jackknife_interval(left_out))
        if not all(map(math.isfinite, own)):  # chains that diverged: no mean, and no interval
            return Number(sum(own))
        if self.deviation and len(own) > 1:
            return Number(statistics.mean(own), statistics.stdev(own))
        return Number(*interval(own))

    def text(self, number: Number, sign: str = "") -> str:
        """The number for a table."""
        if self.percent:
            return Number(100 * number.value, 100 * number.half).text(self.digits, sign) + "%"
        return number.text(self.digits, sign)

    def badness(self, value: float) -> float:
        """Less is better."""
        known = {"more": -value, "zero": abs(value), "one": abs(value - 1)}
        return known.get(self.better or "less", value)

    def best(self, numbers: Mapping[Any, Number]) -> set[Any]:
        """The best of some numbers; none where intervals do not tell it from all others."""
        finite = {key: number for key, number in numbers.items() if math.isfinite(number.value)}
        if self.better is None or not finite:
            return set()
        first = min(finite, key=lambda key: self.badness(finite[key].value))
        value, half = finite.pop(first)
        # Without an interval any difference that is shown counts: a comparison with NaN is false.
        alike = (
            self.badness(other.value) - self.badness(value) <= math.hypot(half, other.half)
            or self.text(Number(other.value)) == self.text(Number(value))
            for other in finite.values()
        )
        return set() if any(alike) else {first}

    def compared(self, own: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[bool | None, str]:
        """Whether a cell is better (None: the paired interval holds zero), and the numbers."""
        values = self.of(own).value, self.of(other).value
        gap = replace(self, deviation=False).of(own, other)
        text = " against ".join(self.text(Number(value)) for value in values)
        text += "" if math.isnan(gap.half) else f", {self.text(gap, '+')}"
        better = self.badness(values[0]) < self.badness(values[1])
        return None if abs(gap.value) <= gap.half else better, text


def _differences(own: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(own, other, strict=False)]
