"""What looks at a model's samples while it trains: the contract. Samplers and measures are beside this layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from mmdgs.data import ImageSet
from mmdgs.models import Model
from mmdgs.training.settings import TrainingSettings


@dataclass(frozen=True)
class Seen:
    """What a look found: numbers for the metrics, and a picture (PNG)."""

    values: Mapping[str, float]
    picture: bytes | None = None


class Watcher(Protocol):
    """Called at a step, while the model has its averaged weights. It draws no number that training would."""

    @property
    def judged_by(self) -> str | None:
        """The value that is lowest for the best model; none: it gives no such value."""

    def __call__(self, step: int, /) -> Seen: ...


MakeWatcher = Callable[[Model, ImageSet, TrainingSettings], Watcher]
"""(the model that will train, its training images, how it trains) -> what watches it."""
