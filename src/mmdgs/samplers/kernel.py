"""The contract of a sampler's step: what goes in, what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from mmdgs.linalg.operators import raise_non_finite
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator


@dataclass(frozen=True)
class State:
    """What the next step needs: the batch of chains x (chains, ...)."""

    x: Tensor


Info = Mapping[str, Tensor]
"""What a person wants to see of a step, by name: one number per chain, (chains,)."""


@runtime_checkable
class Kernel(Protocol):
    """One step of a sampler at a pair of levels, from `level` down to a cleaner `following`."""

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]: ...


def finite(x: Tensor) -> Tensor:
    """A state that a step has made, which must be finite."""
    raise_non_finite("sampled state", x)
    return x
