"""What a training loop draws batches from, in what order, and which rows of a batch are whose.

Images are kept as bytes on the device. All randomness is a function of the seed and of the row of
the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmdgs.data import TOYS, ImageSet, dequantised, flipped, load_images, midpoints, spread, toy
from mmdgs.data.folders import load_pictures
from mmdgs.data.transforms import resized
from mmdgs.errors import UsageError
from mmdgs.identity import digest_of
from mmdgs.models import CLASSES, Model
from mmdgs.models.config import ANY_SIZE
from mmdgs.randomness import Generator, Streams, child_seed, seeded, signs, uniforms
from mmdgs.training.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

FLIPPED = ("cifar10", "celeba")
"""Sets whose images may be mirrored; digits may not."""
VALIDATION_EXAMPLES = 2_000
HEAD_VALIDATION = {"cuda": 1_000, "cpu": 64}
"""Of a head, whose loss takes products with its denoiser's Jacobian."""
TOY_POINTS = 10_000
SMALLER = (0.6, 0.95)
"""Of copies of photographs: few images teach more at several sizes (Zhang et al., 2017, DnCNN)."""


@runtime_checkable
class Examples(Protocol):
    """A set of examples; `take` prepares those at some indices, on the device."""

    @property
    def device(self) -> torch.device: ...

    def __len__(self) -> int: ...

    def take(self, indices: Tensor, generator: Generator | None) -> Any: ...


class TensorExamples:
    """Rows of a floating-point tensor, as they are."""

    def __init__(self, data: Tensor) -> None:
        if len(data) == 0 or not data.is_floating_point() or not torch.isfinite(data).all():
            got = f"{data.dtype} {tuple(data.shape)}"
            raise ValueError(f"data must be non-empty, floating point and finite, got {got}")
        self.data = data
        self.device = data.device

    def __len__(self) -> int:
        return len(self.data)

    def take(self, indices: Tensor, generator: Generator | None) -> Tensor:
        return self.data[indices.to(self.device, non_blocking=True)]


@dataclass(frozen=True)
class ImageExamples:
    """Images in [0, 1), dequantised with the generator's noise, or else at the midpoints of levels.

    With labels an example is a pair: (x, labels).
    """

    images: Tensor  # uint8 (n, C, H, W)
    flips: bool = False
    labels: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.images.device

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Tensor, generator: Generator | None) -> Any:
        indices = indices.to(self.device, non_blocking=True)
        batch = self.images[indices]
        if generator is None:
            x = midpoints(batch)
        else:
            x = dequantised(flipped(batch, generator) if self.flips else batch, generator)
        return x if self.labels is None else (x, self.labels[indices])


@dataclass(frozen=True)
class CropExamples:
    """Square parts of images of any sizes, an example an image.

    Their places, flips and turns are drawn by the generator; without one they are the centres.
    """

    pixels: Tensor  # uint8 (C, of all images, row after row)
    table: Tensor  # int64 (n, 3): where an image begins, its height and width
    crop: int
    flips: bool = False
    turns: bool = False

    @classmethod
    def of(cls, images: Sequence[Tensor], crop: int, **kinds: bool) -> CropExamples:
        """Of images (C, H, W) of the same channels."""
        sizes = torch.tensor([image.shape[1:] for image in images])
        ends = sizes.prod(1).cumsum(0)
        firsts = torch.cat([ends.new_zeros(1), ends[:-1]])
        pixels = torch.cat([image.flatten(1) for image in images], 1)
        return cls(pixels, torch.cat([firsts[:, None], sizes], 1), crop, **kinds)

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    def __len__(self) -> int:
        return len(self.table)

    def to(self, device: torch.device) -> CropExamples:
        """The same on another device."""
        return replace(self, pixels=self.pixels.to(device), table=self.table.to(device))

    def take(self, indices: Tensor, generator: Generator | None) -> Tensor:
        firsts, heights, widths = self.table[indices.to(self.device, non_blocking=True)].unbind(1)
        free = torch.stack([heights, widths], 1) - self.crop
        like = torch.empty(0, dtype=torch.float32, device=self.device)
        if generator is None:
            corners = free // 2
        else:
            drawn = uniforms((len(indices), 2), like, generator)
            corners = torch.minimum((drawn * (free + 1)).long(), free)
        sides = torch.arange(self.crop, device=self.device)
        rows = (corners[:, :1] + sides) * widths[:, None] + firsts[:, None]
        columns = corners[:, 1:] + sides
        batch = self.pixels[:, rows[:, :, None] + columns[:, None, :]].transpose(0, 1)
        if generator is None:
            return midpoints(batch)
        batch = flipped(batch, generator) if self.flips else batch
        if self.turns:  # with mirrors, a transposition makes all quarter turns
            batch = flipped(flipped(batch.mT, generator).mT, generator)
            across = signs((len(batch),), like, generator)[:, None, None, None] > 0
            batch = torch.where(across, batch.mT, batch)
        return dequantised(batch, generator)


@dataclass(frozen=True)
class Sets:
    """Examples to train and to validate on, with what the model must know of them."""

    train: Examples
    held_out: Examples
    shape: tuple[int | None, ...]
    classes: tuple[str, ...] = ()
    images: ImageSet | None = None  # those to train on, as they are stored
    digest: str | None = None  # of all images with their labels; points come from the seed


def read_sets(recipe: Recipe, device: torch.device, denoiser: Model | None = None) -> Sets:
    """The examples of a recipe, on a device; a head's have its denoiser's size and colours."""
    most = VALIDATION_EXAMPLES if denoiser is None else by_device(HEAD_VALIDATION, device)
    if recipe.data in TOYS:
        points, seed = toy(recipe.data), recipe.training.seed
        train = points.sample(recipe.limit or TOY_POINTS, child_seed(seed, "data"))
        held_out = points.sample(most, child_seed(seed, "validation"))
        return Sets(TensorExamples(train.to(device)), TensorExamples(held_out.to(device)), (2,))

    if recipe.crop is not None:
        return _crops(recipe, recipe.crop, device)
    size, channels = recipe.size, None
    if denoiser is not None and len(denoiser.shape) == 3:
        channels, height, width = denoiser.shape
        size = height if size is None and height == width else size
    common: dict[str, Any] = {"size": size, "channels": channels, "unreadable": recipe.unreadable}
    images, test = (
        load_images(recipe.data, split, data_dir=recipe.data_dir, limit=limit, **common)
        for split, limit in (("train", recipe.limit), ("test", None))
    )
    digest = digest_of(images.digest, images.labels, test.digest, test.labels)
    images, test = images.to(device), test.to(device)
    labelled = recipe.param == CLASSES
    if labelled and images.labels is None:
        raise UsageError(f"the data {recipe.data!r} has no labels to train a classifier on")
    test = test.take(spread(len(test), most).to(device))
    flips = recipe.data in FLIPPED if recipe.flips is None else recipe.flips
    train_examples = ImageExamples(images.images, flips, images.labels if labelled else None)
    held_out_examples = ImageExamples(test.images, labels=test.labels if labelled else None)
    return Sets(train_examples, held_out_examples, images.shape, images.classes, images, digest)


def _crops(recipe: Recipe, crop: int, device: torch.device) -> Sets:
    """Crops of a folder or zip of images of any size."""
    common: dict[str, Any] = {"least": crop, "unreadable": recipe.unreadable}
    images = load_pictures(recipe.data, "train", limit=recipe.limit, **common)
    held_out = load_pictures(recipe.data, "test", channels=len(images[0]), **common)
    kinds = {"flips": recipe.flips is not False, "turns": recipe.turns}
    copies = smaller_copies(images, recipe.smaller, crop, recipe.training.seed)
    train = CropExamples.of([*images, *copies], crop, **kinds).to(device)
    test = CropExamples.of(held_out, crop).to(device)
    digest = digest_of(*images, *held_out)
    return Sets(train, test, (len(images[0]), *ANY_SIZE), digest=digest)


def smaller_copies(images: Sequence[Tensor], count: int, least: int, seed: int) -> list[Tensor]:
    """Copies of each image, sides times a number drawn from SMALLER, but at least `least`."""
    drawn = uniforms((count, len(images)), torch.empty(0), seeded(seed, "smaller"))
    low, high = SMALLER
    return [
        resized(image[None], tuple(max(least, round(by * side)) for side in image.shape[1:]))[0]
        for row in (low + (high - low) * drawn).tolist()
        for image, by in zip(images, row, strict=True)
    ]


def batch_order(count: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """The indices of each step's batch: every epoch a new order, a last incomplete batch left out.

    A function of the seed alone, so every process draws the same, and a resumed run skips ahead.
    """
    order = seeded(seed, "order")
    while True:
        permutation = torch.randperm(count, generator=order)
        for at in range(0, count - batch_size + 1, batch_size):
            yield permutation[at : at + batch_size]


class Shares:
    """A process's share of a global batch, cut into parts, each with its random streams."""

    def __init__(self, batch_size: int, seed: int, accelerator: Accelerator | None) -> None:
        count = accelerator.num_processes if accelerator else 1
        if batch_size % count:
            raise UsageError(f"batch_size {batch_size} is no multiple of the {count} processes")
        self.rows = batch_size // count
        self.first = self.rows * (accelerator.process_index if accelerator else 0)
        self.seed = seed
        self.positions: dict[str, int] = {}
        self.cut(1)

    def cut(self, parts: int) -> None:
        """Cut the share into parts; the random streams continue where they are."""
        if parts > self.rows:
            raise UsageError(f"split must not exceed a process's {self.rows} examples, got {parts}")
        edges = list(pairwise(round(i * self.rows / parts) for i in range(parts + 1)))
        common: dict[str, Any] = {"purpose": "noise", "positions": self.positions}
        self.parts = [slice(a, b) for a, b in edges]
        self.streams = [
            Streams(self.seed, b - a, first_row=self.first + a, **common) for a, b in edges
        ]

    def of(self, indices: Tensor) -> Tensor:
        """This process's indices of a global batch."""
        return indices[self.first : self.first + self.rows]

    def remember(self) -> None:
        """Note how far the streams are: where a step begins anew, and what a checkpoint needs."""
        self.positions = self.streams[0].positions


def by_device(counts: dict[str, int], device: torch.device) -> int:
    """The number for a kind of device; that of the CPU where it has none of its own."""
    return counts.get(device.type, counts["cpu"])


def some(examples: Examples, counts: dict[str, int], seed: int, most: int | None = None) -> Tensor:
    """Examples spread over all: as many as `counts` says for their device, at most `most`."""
    count = by_device(counts, examples.device)
    indices = spread(len(examples), count if most is None else min(count, most))
    return examples.take(indices, Streams(seed, len(indices), purpose="examples"))
