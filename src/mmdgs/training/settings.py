"""How the training loop runs: sizes, learning rate, averaging, precision, and how often it reports and saves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmdgs.errors import UsageError
from mmdgs.runtime import check_precision
from mmdgs.training.optimiser import check_optimiser

FLUSH_EVERY, FLUSH_SECONDS = 50, 1.0
"""Steps between two looks at the losses, and seconds where steps are slow: each look waits for the device."""


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; the defaults are the authors' for the 2-D networks (10,000 steps of 100, Adam 1e-4).

    A run ends after `steps`, after `epochs`, or after `minutes`, whichever comes first; with `decay` the learning rate
    falls along a cosine to zero at that end. Minutes are those of a clock: of training, validating and watching; the
    last look and the writing of the model come after them.
    """

    steps: int | None = 10_000
    epochs: float | None = None
    minutes: float | None = None
    batch_size: int = 100
    optimiser: str = "adam"  # or muon
    learning_rate: float = 1e-4
    warmup: int = 0  # steps of linear growth of the learning rate
    decay: bool = False  # cosine decay of the learning rate to zero
    clip: float | None = None  # largest norm of the gradient
    ema: float | None = None  # decay of the exponential moving average of the weights
    precision: str = "float32"
    split: int = 1  # parts a batch is cut into; grows by itself where a step does not fit in memory
    seed: int = 0
    checkpoint_every: int | None = 1_000
    validate_every: int | None = 1_000
    watch: int | None = None  # samples that are drawn and judged on the way; none (or 0): no watching
    watch_every: int | None = 5_000  # steps between two looks; none: at the end only

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "minutes", "batch_size", "learning_rate", "clip", "split"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be positive and finite, got {value}")
        for name in ("checkpoint_every", "validate_every", "watch_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, or none, got {value}")
        if self.warmup < 0:
            raise UsageError(f"warmup must not be negative, got {self.warmup}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"ema must lie between 0 and 1, got {self.ema}")
        object.__setattr__(self, "watch", self.watch or None)
        if self.watch is not None and self.watch < 2:
            raise UsageError(f"watch must be at least 2 samples, or 0 for none, got {self.watch}")
        check_precision(self.precision)
        check_optimiser(self.optimiser)
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise UsageError("say when training ends: steps, epochs or minutes")

    def last_step(self, steps_an_epoch: int) -> int | None:
        """The step after which training ends, where steps or epochs say so."""
        ends = [self.steps] if self.steps is not None else []
        ends += [math.ceil(self.epochs * steps_an_epoch)] if self.epochs is not None else []
        return min(ends) if ends else None

    def rate(self, step: int, fraction: float) -> float:
        """The learning rate at a step, `fraction` of the whole run done."""
        rate = self.learning_rate * min(1.0, (step + 1) / (self.warmup + 1))
        return rate * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction))) if self.decay else rate
