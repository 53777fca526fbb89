"""A set of images in memory, with its labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mmdgs.errors import UsageError

HASHED = 1024  # images at a time


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images as they were stored, 8 bits a channel: `images` uint8 (n, channels, height, width), `labels` int64 (n,).

    `name` is "mnist", "cifar10", "celeba" or the folder's name, `split` the part that was asked for,
    `classes` the names of the labels, `skipped` the unreadable files that were left out, and `names` the files of the
    images below their folder, where each has its own.
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
            raise UsageError(
                f"images must be uint8 (n, channels, height, width), got {self.images.dtype} {tuple(self.images.shape)}"
            )
        labels = self.labels
        if labels is not None and (labels.dtype != torch.int64 or labels.shape != self.images.shape[:1]):
            raise UsageError(
                f"labels must be int64 ({len(self)},), one for each image, got {labels.dtype} {tuple(labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the pixels, with their shape; taken once, since a set is not changed."""
        found = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        for part in self.images.cpu().split(HASHED):
            found.update(part.contiguous().numpy().data)
        return found.hexdigest()

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set on another device."""
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, images=self.images.to(device), labels=labels)

    def take(self, indices: slice | Tensor | Sequence[int]) -> ImageSet:
        """The images at these indices, in that order: a slice (no copy), a tensor or a sequence of integers."""
        if not isinstance(indices, slice):
            indices = torch.as_tensor(indices, device=self.images.device)
            if indices.ndim != 1:
                raise UsageError(f"indices must be one-dimensional, got shape {tuple(indices.shape)}")
            # An empty list makes a tensor of floats, which cannot be an index.
            indices = indices.long() if indices.numel() == 0 else indices
        labels = None if self.labels is None else self.labels[indices]
        names = self.names
        if names:
            names = names[indices] if isinstance(indices, slice) else tuple(names[i] for i in indices.tolist())
        return replace(self, images=self.images[indices], labels=labels, names=names)


def spread(total: int, count: int) -> Tensor:
    """At most `count` indices, evenly over `total` examples: some sets are sorted by class."""
    return torch.arange(0, total, max(1, total // count))[:count]
