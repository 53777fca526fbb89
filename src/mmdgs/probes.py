"""Probes of a Jacobian's diagonal: which vectors v are multiplied with J, and what is made of the products.

    Rademacher    signs at every number: the mean of v * (v' J) over S probes has the variance  sum_{j != i} J_ji^2 / S
    Lattice       signs at one class of pixels in S, zero elsewhere: the variance is  sum_{j != i, same class} J_ji^2

Both are unbiased (Bekas et al., 2007). Images couple near pixels most, and the classes are sublattices whose pixels lie
far apart, so that what is left is small where J is local: with 5 probes no two of a pixel's neighbours share its
class. Where J is not local (high noise) the diagonal is smooth instead, and the products say how noisy they are: a
probe that misses a pixel shows there the size of a sum of off-diagonal entries.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.randomness import Generator, signs

MOST_CLASSES = 32
WINDOW = 5
NOISE_SHARE = 0.5
"""Of the squares at missed pixels, what is taken for noise: they hold a pixel's neighbours, which its own class does
not. On Jacobians of the MNIST energy and a CIFAR-10 diffusion model squares were 1.6 to 3 times the true error."""


@runtime_checkable
class DiagonalSums(Protocol):
    """What is summed over products with probes, and the diagonal that comes of it."""

    def add(self, v: Tensor, products: Tensor) -> None:
        """Take in some probes v (n, B, ...) and their products v' J, of the same shape."""

    def estimate(self) -> Tensor:
        """diag J, (B, ...)."""


@runtime_checkable
class ProbeDesign(Protocol):
    """Which probes: S of them for a batch, every row's from its own random stream, and what is to be summed."""

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        """Probes (S, B, ...) for a batch (B, ...) such as `like`."""

    def diagonal(self, count: int, like: Tensor) -> DiagonalSums: ...


class _Mean:
    def __init__(self, count: int, like: Tensor) -> None:
        self.count, self.total = count, torch.zeros_like(like)

    def add(self, v: Tensor, products: Tensor) -> None:
        self.total += (v * products).sum(0)

    def estimate(self) -> Tensor:
        return self.total / self.count


@dataclass(frozen=True)
class Rademacher:
    """Signs everywhere: the paper's probes (its eq. diag:approx)."""

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        # Rows first, so that each chain's probes come from its own stream.
        return signs((len(like), count, *like.shape[1:]), like, generator).transpose(0, 1)

    def diagonal(self, count: int, like: Tensor) -> DiagonalSums:
        return _Mean(count, like)


@dataclass(frozen=True)
class Lattice:
    """Signs at one class of pixels each, for images (B, C, H, W); S probes are S classes (or some rounds of fewer).

    `smooth` filters the estimate by its own noise, which is not unbiased any more, and nearer: within windows of
    5 x 5 pixels, a deviation from the mean counts as much as it exceeds the noise (Wiener's filter).
    """

    smooth: bool = True

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        if like.ndim != 4:
            raise ValueError(f"lattice probes are for images (B, C, H, W), got shape {tuple(like.shape)}")
        classes, rounds = _classes_and_rounds(count)
        signed = signs((len(like), rounds, *like.shape[1:]), like, generator).transpose(0, 1)
        masks = _class_masks(classes, like.shape[1:], like.dtype, like.device)
        return (signed[:, None] * masks[None, :, None]).flatten(0, 1)

    def diagonal(self, count: int, like: Tensor) -> DiagonalSums:
        classes, rounds = _classes_and_rounds(count)
        return _LatticeSums(classes, rounds, like, self.smooth and classes > 1)


class _LatticeSums:
    def __init__(self, classes: int, rounds: int, like: Tensor, smooth: bool) -> None:
        self.classes, self.rounds, self.smooth = classes, rounds, smooth
        self.hits, self.missed = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, v: Tensor, products: Tensor) -> None:
        self.hits += (v * products).sum(0)
        if self.smooth:
            self.missed += torch.where(v == 0, products, 0).square().sum(0)

    def estimate(self) -> Tensor:
        found = self.hits / self.rounds
        if not self.smooth:
            return found
        noise = NOISE_SHARE * self.missed / (self.rounds**2 * (self.classes - 1))
        return filtered(found, noise)


def filtered(x: Tensor, noise: Tensor) -> Tensor:
    """Wiener's filter of images x (B, C, H, W) with noise of known variance (B, C, H, W), over windows and channels."""
    mean = _window_mean(x)
    variance = _window_mean((x - mean).square())
    gain = (variance - _window_mean(noise)).clamp(min=0) / variance.clamp(min=torch.finfo(x.dtype).tiny)
    return mean + gain * (x - mean)


def _window_mean(x: Tensor) -> Tensor:
    """The mean over a window and all channels, at the edges over what there is of it."""
    pooled = functional.avg_pool2d(x, WINDOW, stride=1, padding=WINDOW // 2, count_include_pad=False)
    return pooled.mean(1, keepdim=True).expand_as(x)


def _classes_and_rounds(count: int) -> tuple[int, int]:
    """S probes as classes times rounds: as many classes as there may be."""
    classes = next(m for m in range(min(count, MOST_CLASSES), 0, -1) if count % m == 0)
    return classes, count // classes


def pixel_classes(classes: int, channels: int, height: int, width: int) -> Tensor:
    """The class of each number of an image, (C, H, W): (i + a j + k c) mod m, with the a, k that keep classes apart."""
    a, k = _best_lattice(classes, min(channels, 3))
    c, i, j = torch.meshgrid(torch.arange(channels), torch.arange(height), torch.arange(width), indexing="ij")
    return (i + a * j + k * c) % classes


@lru_cache(maxsize=8)
def _class_masks(classes: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ones at the pixels of each class, (classes, C, H, W): kept, for a chain asks for the same at every step."""
    place = pixel_classes(classes, *shape)
    return torch.stack([place == c for c in range(classes)]).to(device, dtype)


@cache
def _best_lattice(classes: int, channels: int) -> tuple[int, int]:
    """(a, k) with the largest distance within a class; among equals the fewest pairs at that distance."""
    reach = range(-classes, classes + 1) if classes < 6 else range(-6, 7)
    offsets = [
        (di, dj, dc)
        for di, dj, dc in itertools.product(reach, reach, range(-channels + 1, channels))
        if (di, dj, dc) != (0, 0, 0)
    ]

    def closeness(a: int, k: int) -> tuple[int, int]:
        near = [di**2 + dj**2 + dc**2 for di, dj, dc in offsets if (di + a * dj + k * dc) % classes == 0]
        least = min(near, default=0)
        return -least, near.count(least)

    return min(itertools.product(range(classes), range(classes)), key=lambda pair: closeness(*pair))
