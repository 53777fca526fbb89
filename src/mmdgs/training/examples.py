"""What a training loop draws batches from: tensors in memory, or images kept as bytes on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmdgs.data import ImageSet, dequantised, flipped, midpoints
from mmdgs.randomness import Generator, seeded


@runtime_checkable
class Examples(Protocol):
    """A set of examples; `take` prepares those at some indices, on the device, with the generator's randomness."""

    @property
    def device(self) -> torch.device: ...

    def __len__(self) -> int: ...

    def take(self, indices: Tensor, generator: Generator | None) -> Any: ...


class TensorExamples:
    """Rows of a floating-point tensor, as they are."""

    def __init__(self, data: Tensor) -> None:
        if len(data) == 0 or not data.is_floating_point() or not torch.isfinite(data).all():
            raise ValueError(f"data must be non-empty, floating point and finite, got {data.dtype} {tuple(data.shape)}")
        self.data = data
        self.device = data.device

    def __len__(self) -> int:
        return len(self.data)

    def take(self, indices: Tensor, generator: Generator | None) -> Tensor:
        return self.data[indices.to(self.device, non_blocking=True)]


@dataclass(frozen=True)
class ImageExamples:
    """Images in [0, 1), dequantised with the generator's noise, or in the middle of their steps without one."""

    images: Tensor  # uint8 (n, C, H, W)
    flips: bool = False

    @property
    def device(self) -> torch.device:
        return self.images.device

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Tensor, generator: Generator | None) -> Tensor:
        batch = self.images[indices.to(self.device, non_blocking=True)]
        if generator is None:
            return midpoints(batch)
        return dequantised(flipped(batch, generator) if self.flips else batch, generator)


@dataclass(frozen=True)
class LabelledExamples:
    """Images with their labels: (x, labels)."""

    images: ImageExamples
    labels: Tensor

    @property
    def device(self) -> torch.device:
        return self.images.device

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        return self.images.take(indices, generator), self.labels[indices.to(self.device, non_blocking=True)]


def examples_of(images: ImageSet, *, flips: bool = False, labelled: bool = False) -> Examples:
    """The examples of an image set, on the device it is on."""
    plain = ImageExamples(images.images, flips)
    if not labelled:
        return plain
    assert images.labels is not None
    return LabelledExamples(plain, images.labels)


def batch_order(count: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """The indices of each step's batch: epoch after epoch in a new order, a last incomplete batch left out.

    A function of the seed alone: every process draws the same order, and a resumed run passes over what was done.
    """
    order = seeded(seed)
    while True:
        permutation = torch.randperm(count, generator=order)
        for at in range(0, count - batch_size + 1, batch_size):
            yield permutation[at : at + batch_size]
