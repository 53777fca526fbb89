"""Noise levels as data: the usual schedules, each a tuple of levels, the noisiest first.

Variance exploding (alpha = 1): `geometric` and `edm`. Variance preserving (alpha^2 + sigma^2 = 1): with noise of
variance beta_t added at step t of T, counted from the clean end,

    alpha_t^2 = (1 - beta_1) ... (1 - beta_t),    sigma_t^2 = 1 - alpha_t^2.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence

from mmdgs.errors import UsageError, nearest, shown
from mmdgs.noise import NoiseLevel

Levels = tuple[NoiseLevel, ...]

MOST_LEVELS = 100_000
"""Of a schedule: networks are trained with a thousand or four thousand."""


def geometric(count: int, first: float, last: float) -> Levels:
    """sigma from `first` down to `last` by equal factors (Song and Ermon, 2019).

    Song and Ermon (2020, NCSNv2) have 232 levels from 50 to 0.01 for CIFAR-10, and 500 from 90 for CelebA 64x64.
    """
    _require_count(count, 2)
    _require_order("first", first, "last", last)
    fractions = [i / (count - 1) for i in range(count)]
    return tuple(NoiseLevel(sigma=first ** (1 - u) * last**u) for u in fractions)


def edm(count: int, largest: float = 80.0, smallest: float = 0.002, rho: float = 7.0) -> Levels:
    """sigma from `largest` down to `smallest`, evenly spaced in sigma^(1 / rho) (Karras et al., 2022, eq. 5)."""
    _require_count(count, 2)
    _require_order("largest", largest, "smallest", smallest)
    if not 0 < rho < math.inf:
        raise ValueError(f"rho must be positive and finite, got {rho}")
    start, end = largest ** (1 / rho), smallest ** (1 / rho)
    return tuple(NoiseLevel(sigma=(start + i / (count - 1) * (end - start)) ** rho) for i in range(count))


def variance_preserving_linear(count: int = 1000, first_beta: float = 1e-4, last_beta: float = 0.02) -> Levels:
    """beta_t from `first_beta` (clean end) to `last_beta` in equal steps (Ho et al., 2020, DDPM)."""
    _require_count(count, 1)
    for name, beta in (("first_beta", first_beta), ("last_beta", last_beta)):
        if not 0 < beta < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {beta}")
    gap = (last_beta - first_beta) / max(1, count - 1)
    return _variance_preserving([first_beta + i * gap for i in range(count)])


def variance_preserving_cosine(count: int = 1000, offset: float = 0.008, largest_beta: float = 0.999) -> Levels:
    """beta_t = 1 - a(t) / a(t - 1), at most `largest_beta`; a(t) = cos^2(pi / 2 (t / T + offset) / (1 + offset)).

    Nichol and Dhariwal (2021), eq. 17.
    """
    _require_count(count, 1)
    if not 0 <= offset < math.inf:
        raise ValueError(f"offset must not be negative, got {offset}")
    if not 0 < largest_beta < 1:
        raise ValueError(f"largest_beta must lie between 0 and 1, got {largest_beta}")
    kept = [math.cos(math.pi / 2 * (t / count + offset) / (1 + offset)) ** 2 for t in range(count + 1)]
    return _variance_preserving([min(1 - kept[t] / kept[t - 1], largest_beta) for t in range(1, count + 1)])


def _variance_preserving(betas: Sequence[float]) -> Levels:
    """The levels of these betas, which go from the clean end on."""
    levels, kept = [], 1.0
    for beta in betas:
        kept *= 1 - beta
        levels.append(NoiseLevel(alpha=math.sqrt(kept), sigma=math.sqrt(1 - kept)))
    return tuple(reversed(levels))


def subsampled(levels: Sequence[NoiseLevel], count: int, spacing: str = "even") -> Levels:
    """`count` of T levels, the noisiest first. With t the place of a level counted from the clean end, 0 to T - 1:

        even       t = k (T - 1) / (count - 1), rounded: both ends are kept (diffusers: "linspace"); one: the noisiest
        leading    t = k (T // count): from the cleanest on
        trailing   t = (k + 1) T / count - 1, rounded: up to the noisiest

    for k = 0 to count - 1: the three ways in which diffusers spaces its timesteps (Lin et al., 2024, table 2).
    """
    total = len(levels)
    _require_count(count, 1)
    if count > total:
        raise ValueError(f"cannot take {count} of {total} levels; count must be at most {total}")
    if spacing not in SPACINGS:
        raise ValueError(f"spacing must be one of {', '.join(SPACINGS)}, got {spacing!r}")
    return tuple(levels[total - 1 - SPACINGS[spacing](k, count, total)] for k in reversed(range(count)))


SPACINGS: dict[str, Callable[[int, int, int], int]] = {
    "even": lambda k, count, total: round(k * (total - 1) / (count - 1)) if count > 1 else total - 1,
    "leading": lambda k, count, total: k * (total // count),
    "trailing": lambda k, count, total: round((k + 1) * total / count) - 1,
}
"""Which levels a spacing keeps: (k, count, total) -> the place counted from the clean end."""


SCHEDULES: dict[str, tuple[Callable[..., Levels], str]] = {
    "geometric": (geometric, "geometric:232:50:0.01"),
    "linear": (variance_preserving_linear, "linear:1000"),
    "cosine": (variance_preserving_cosine, "cosine:1000"),
    "edm": (edm, "edm:18"),
}
"""Schedules by the names they have on the command line, with an example each."""


def parse_levels(text: str) -> Levels:
    """Levels from text: a schedule's name and its arguments in order, such as "geometric:232:50:0.01" or "edm:18"."""
    name, *words = text.split(":")
    if name not in SCHEDULES:
        examples = ", ".join(example for _, example in SCHEDULES.values())
        raise UsageError(
            f"unknown noise levels {text!r}{nearest(name, SCHEDULES)}: expected a schedule and its numbers, such as "
            f"{examples}"
        )
    schedule, example = SCHEDULES[name]
    parameters = inspect.signature(schedule).parameters.values()
    form = ":".join([name, *(p.name if p.default is p.empty else f"[{p.name}]" for p in parameters)])
    needed = sum(p.default is p.empty for p in parameters)
    try:
        if not needed <= len(words) <= len(parameters):
            raise ValueError(f"{len(words)} numbers")
        return schedule(*(int(words[i]) if i == 0 else float(words[i]) for i in range(len(words))))
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"the noise levels {text!r} cannot be read ({error}): expected {form}, such as {example}"
        ) from error


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
        raise ValueError(f"{first_name} must be larger than {last_name}, got {first} and {last}: the noisiest is first")
