"""What the training loop takes and what it leaves: a loss, looks at a model on the way, and how it went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mmdgs.randomness import Generator
from mmdgs.training.examples import Examples

PerExampleLoss = Callable[[Any, Generator], Tensor]
"""(batch as the examples give it, generator) -> one loss per example."""


@dataclass(frozen=True)
class Validation:
    """A held-out set and the loss to measure on it; `keep_best` is called when it is the lowest so far."""

    examples: Examples
    loss: PerExampleLoss
    keep_best: Callable[[float, int], None] | None = None


@dataclass(frozen=True)
class Watch:
    """A look at the model on the way, with its averaged weights: (step) -> numbers for the metrics.

    `keep_best` is called when the number of the name `judged_by` is the lowest so far.
    """

    look: Callable[[int], Mapping[str, float]]
    judged_by: str | None = None
    keep_best: Callable[[float, int], None] | None = None


@dataclass
class Trained:
    """What a run leaves beside the weights: the loss of every step, validations and looks, and how it went.

    `seconds` are all of them, `watch_seconds` those of looks; the rate is that of the rest.
    """

    losses: Tensor  # (steps,)
    validations: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    examples_a_second: float = 0.0
    split: int = 1
    ended_by: str = "steps"
    watches: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    watch_seconds: float = 0.0
