"""Progress bars: one look for all long work, quiet off a terminal, usable in notebooks."""

from __future__ import annotations

from tqdm.auto import tqdm

BAR_DELAY = 1.0
"""Seconds of work before the bar of a loop appears."""


def progress_bar(total: int, label: str | None, unit: str = "step", delay: float = BAR_DELAY) -> tqdm:
    """A bar with rate and time left, which vanishes at the end; a label of None switches it off."""
    return tqdm(total=total, desc=label, unit=unit, delay=delay, leave=False, disable=not label or None)
