"""A set of images in memory, with its labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.files import sha256_of

SAMPLES = "samples"
"""The split of images that are no part of a data set."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images as stored: `images` uint8 (n, channels, height, width), `labels` int64 (n,).

    `name` is "mnist", "cifar10", "celeba" or the folder's name, `split` the part of it, `classes`
    the names of the labels, `skipped` the unreadable files that were left out, and `names` the
    files of the images below their folder, where each has its own.
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            got = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise UsageError(f"images must be uint8 (n, channels, height, width), got {got}")
        labels, count = self.labels, len(self)
        if labels is not None and (labels.dtype, *labels.shape) != (torch.int64, count):
            got = f"{labels.dtype} {tuple(labels.shape)}"
            raise UsageError(f"labels must be int64 ({count},), one for each image, got {got}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the pixels, with their shape."""
        shape, pixels = tuple(self.images.shape), self.images.cpu().contiguous().numpy()
        return sha256_of(repr(shape).encode(), pixels.data)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set on another device."""
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, images=self.images.to(device), labels=labels)

    def take(self, indices: slice | Tensor | Sequence[int]) -> ImageSet:
        """The images at these indices, in that order: a slice (no copy), or whole numbers."""
        rows = torch.arange(len(self), device=self.images.device)
        if not isinstance(indices, slice):
            indices = torch.as_tensor(indices, device=self.images.device)
            # An empty list makes a tensor of floats, which cannot be an index.
            indices = indices.long() if indices.numel() == 0 else indices
        labels = None if self.labels is None else self.labels[indices]
        names = tuple(self.names[i] for i in rows[indices].tolist()) if self.names else ()
        return replace(self, images=self.images[indices], labels=labels, names=names)


def spread(total: int, count: int) -> Tensor:
    """At most `count` indices, evenly over `total` examples: some sets are sorted by class."""
    return torch.arange(0, total, max(1, total // count))[:count]
