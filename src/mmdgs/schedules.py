"""Noise levels as data: the usual schedules, each a tuple of levels, the noisiest first.

Variance exploding (alpha = 1): `geometric` and `edm`. Variance preserving (alpha^2 + sigma^2 = 1):
with noise of variance beta_t added at step t of T, counted from the clean end,

    alpha_t^2 = (1 - beta_1) ... (1 - beta_t),    sigma_t^2 = 1 - alpha_t^2.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from mmdgs.errors import UsageError, nearest, shown
from mmdgs.noise import NoiseLevel

Levels = tuple[NoiseLevel, ...]

MOST_LEVELS = 100_000
"""Of a schedule: networks are trained with a thousand or four thousand."""


def geometric(count: int, first: float, last: float) -> Levels:
    """sigma from `first` down to `last` by equal factors (Song and Ermon, 2019).

    NCSNv2 (Song and Ermon, 2020) has 232 levels from 50 to 0.01 for CIFAR-10.
    """
    _require_count(count, 2)
    _require_order("first", first, "last", last)
    fractions = [i / (count - 1) for i in range(count)]
    return tuple(NoiseLevel(sigma=first ** (1 - u) * last**u) for u in fractions)


def edm(count: int, largest: float = 80.0, smallest: float = 0.002, rho: float = 7.0) -> Levels:
    """sigma from `largest` to `smallest`, even in sigma^(1 / rho) (Karras et al., 2022, eq. 5)."""
    _require_count(count, 2)
    _require_order("largest", largest, "smallest", smallest)
    if not 0 < rho < math.inf:
        raise ValueError(f"rho must be positive and finite, got {rho}")
    start, end = largest ** (1 / rho), smallest ** (1 / rho)
    fractions = [i / (count - 1) for i in range(count)]
    return tuple(NoiseLevel(sigma=(start + u * (end - start)) ** rho) for u in fractions)


def variance_preserving_linear(
    count: int = 1000, first_beta: float = 1e-4, last_beta: float = 0.02
) -> Levels:
    """beta_t from `first_beta`, at the clean end, to `last_beta` evenly (DDPM, Ho et al., 2020)."""
    _require_count(count, 1)
    for name, beta in (("first_beta", first_beta), ("last_beta", last_beta)):
        if not 0 < beta < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {beta}")
    gap = (last_beta - first_beta) / max(1, count - 1)
    return _variance_preserving([first_beta + i * gap for i in range(count)])


def variance_preserving_cosine(
    count: int = 1000, offset: float = 0.008, largest_beta: float = 0.999
) -> Levels:
    """beta_t = 1 - a(t) / a(t - 1), at most `largest_beta` (Nichol and Dhariwal, 2021, eq. 17).

    a(t) = cos^2(pi / 2 (t / T + offset) / (1 + offset)).
    """
    _require_count(count, 1)
    if not 0 <= offset < math.inf:
        raise ValueError(f"offset must not be negative, got {offset}")
    if not 0 < largest_beta < 1:
        raise ValueError(f"largest_beta must lie between 0 and 1, got {largest_beta}")
    times = [t / count for t in range(count + 1)]
    kept = [math.cos(math.pi / 2 * (t + offset) / (1 + offset)) ** 2 for t in times]
    return _variance_preserving([min(1 - b / a, largest_beta) for a, b in pairwise(kept)])


def _variance_preserving(betas: Sequence[float]) -> Levels:
    levels, kept = [], 1.0
    for beta in betas:
        kept *= 1 - beta
        levels.append(NoiseLevel(alpha=math.sqrt(kept), sigma=math.sqrt(1 - kept)))
    return tuple(reversed(levels))


SPACINGS: dict[str, Callable[[int, int, int], int]] = {
    "even": lambda k, count, total: round(k * (total - 1) / max(1, count - 1)),
    "leading": lambda k, count, total: k * (total // count),
    "trailing": lambda k, count, total: round((k + 1) * total / count) - 1,
}
"""Which levels a spacing keeps: (k, count, total) -> the place counted from the clean end."""


def subsampled(levels: Sequence[NoiseLevel], count: int, spacing: str = "even") -> Levels:
    """`count` of T levels, the noisiest first. With t the place of a level from the clean end on,

        even       t = k (T - 1) / (count - 1), rounded: both ends are kept; one: the noisiest
        leading    t = k (T // count): from the cleanest on
        trailing   t = (k + 1) T / count - 1, rounded: up to the noisiest

    for k = 0 to count - 1: the three ways in which diffusers spaces its timesteps (Lin et al.,
    2024, table 2; "even" is its "linspace").
    """
    total = len(levels)
    _require_count(count, 1)
    if count > total:
        raise ValueError(f"cannot take {count} of {total} levels; count must be at most {total}")
    if spacing not in SPACINGS:
        raise ValueError(f"spacing must be one of {', '.join(SPACINGS)}, got {spacing!r}")
    if spacing == "even" and count == 1:
        return (levels[0],)
    places = [SPACINGS[spacing](k, count, total) for k in reversed(range(count))]
    return tuple(levels[total - 1 - place] for place in places)


SCHEDULES: dict[str, tuple[Callable[..., Levels], str]] = {
    "geometric": (geometric, "geometric:232:50:0.01"),
    "linear": (variance_preserving_linear, "linear:1000"),
    "cosine": (variance_preserving_cosine, "cosine:1000"),
    "edm": (edm, "edm:18"),
}
"""Schedules by the names they have on the command line, with an example each."""


def parse_levels(text: str) -> Levels:
    """Levels from a schedule's name and its arguments in order, such as "geometric:232:50:0.01"."""
    name, *words = text.split(":")
    if name not in SCHEDULES:
        examples = ", ".join(example for _, example in SCHEDULES.values())
        hint = (
            f"{nearest(name, SCHEDULES)}: expected a schedule and its numbers, such as {examples}"
        )
        raise UsageError(f"unknown noise levels {text!r}{hint}")
    schedule, example = SCHEDULES[name]
    parameters = inspect.signature(schedule).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    form = ":".join(
        [name, *required, *(f"[{p.name}]" for p in parameters if p.name not in required)]
    )
    try:
        if not len(required) <= len(words) <= len(parameters):
            raise ValueError(f"{len(words)} numbers")
        return schedule(*map(int, words[:1]), *map(float, words[1:]))
    except (ValueError, OverflowError) as error:
        reason = f"({error}): expected {form}, such as {example}"
        raise UsageError(f"the noise levels {text!r} cannot be read {reason}") from error


def _require_count(count: int, least: int) -> None:
    if not isinstance(count, int) or count < least:
        raise ValueError(f"count must be a whole number of at least {least}, got {count!r}")
    if count > MOST_LEVELS:
        raise ValueError(f"count must be at most {MOST_LEVELS:,}, got {shown(count)}")


def _require_order(first_name: str, first: float, last_name: str, last: float) -> None:
    for name, value in ((first_name, first), (last_name, last)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if first <= last:
        raise ValueError(f"{first_name} must be larger than {last_name}, got {first} and {last}")
