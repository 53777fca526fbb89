"""Probes of a Jacobian's diagonal: which vectors v are multiplied with J, and the estimate.

    Rademacher    signs everywhere: v * (v' J) has the mean diag J, variance sum_{j != i} J_ji^2 / S
    Lattice       signs at one class of pixels in S, zero elsewhere: sum_{j != i, same class} J_ji^2

Both are unbiased (Bekas et al., 2007). Images couple near pixels most, and the classes are
sublattices whose pixels lie far apart, so what is left is small where J is local. Where J is not
local (high noise) the diagonal is smooth instead, and a probe that misses a pixel shows there the
size of a sum of off-diagonal entries. So Lattice filters its estimate by default, which is then
biased, and nearer. Other data have only the whole row that is known to be smooth: there signs are
filtered towards its mean, by how far the probes disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.jacobians import Linearised, chunks
from mmdgs.operators.contract import along
from mmdgs.randomness import Generator, signs

MOST_CLASSES = 64
FAR = 1000  # a squared distance beyond all that matter here
REACH = 1.2
"""How far to look for the nearest pixel of a class, over the side of the cube that it has to
itself: Hermite's constant is 1.08 in the plane and 1.12 in space."""
WINDOW, GAIN_WINDOW = 5, 9  # sides, in pixels: of the mean, and of the variances of deviations
NOISE_SHARE = 0.7
"""Of the squares at missed pixels, what is taken for noise: a class that missed a pixel lies nearer
to it than its own does. On Jacobians of the MNIST energy and a CIFAR-10 diffusion model the noise
was 0.5 to 0.95 of them (5 probes)."""


Products = Iterable[tuple[Tensor, Tensor]]
"""Some probes v (n, B, ...) at a time, with their products v' J, of the same shape."""
Estimate = tuple[Tensor, Tensor | None]
"""diag J, (B, ...), and its standard error, which broadcasts to it, if it is known."""


@runtime_checkable
class ProbeDesign(Protocol):
    """Which probes, every row's from its own random stream, and what is made of the products."""

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        """Probes (S, B, ...) for a batch (B, ...) such as `like`."""

    def estimate(self, parts: Products, count: int, like: Tensor) -> Estimate:
        """The diagonal from the products with S probes."""


@dataclass(frozen=True)
class Rademacher:
    """Signs everywhere: the paper's probes (its eq. diag:approx).

    `smooth` filters the estimate towards the mean of the row, by how far the products of one number
    are apart.
    """

    smooth: bool = False

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        # Rows first, so that each chain's probes come from its own stream.
        return signs((len(like), count, *like.shape[1:]), like, generator).transpose(0, 1)

    def estimate(self, parts: Products, count: int, like: Tensor) -> Estimate:
        total, squares = torch.zeros_like(like), torch.zeros_like(like)
        smooth = self.smooth and count > 1
        for v, products in parts:
            total += (v * products).sum(0)
            if smooth:
                squares += products.square().sum(0)
        x = total / count
        if not smooth:
            return x, None
        axes = tuple(range(1, x.ndim))
        noise = (squares / count - x.square()).mean(axes, keepdim=True) / (count - 1)
        mean = x.mean(axes, keepdim=True)
        variance = (x - mean).square().mean(axes, keepdim=True)
        return _towards(mean, x, variance, noise, x[0].numel())


@dataclass(frozen=True)
class Lattice:
    """Signs at one class of pixels each, for images (B, C, H, W) or volumes; S classes, or rounds
    of fewer.

    `smooth` filters the estimate by its own noise (Wiener): a deviation from the mean of the 5 x 5
    (x 5) pixels around counts as much as deviations there exceed the noise, which is read off the
    probes that miss a pixel, of the classes that lie farthest from it.
    """

    smooth: bool = True

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        if like.ndim not in (4, 5):
            raise ValueError(
                "lattice probes are for images (B, C, H, W) or volumes (B, C, D, H, W), got shape "
                f"{tuple(like.shape)}"
            )
        classes, rounds = _classes_and_rounds(count)
        signed = signs((len(like), rounds, *like.shape[1:]), like, generator).transpose(0, 1)
        masks = _class_masks(classes, like.shape[1:], like.dtype, like.device)
        return (signed[:, None] * masks[None, :, None]).flatten(0, 1)[:count]

    def estimate(self, parts: Products, count: int, like: Tensor) -> Estimate:
        classes, taken, smooth = _classes_and_rounds(count)[0], 0, self.smooth and count > 1
        total, hits, squares, looks = (torch.zeros_like(like) for _ in range(4))
        for v, products in parts:
            total += (v * products).sum(0)
            hits += (v != 0).sum(0)
            if smooth:
                own = torch.arange(taken, taken + len(v), device=v.device) % classes
                far = _far_masks(classes, v.shape[2:], v.dtype, v.device)[own][:, None]
                squares += (far * products.square()).sum(0)
                looks += far.sum(0)
            taken += len(v)
        diagonal = total / hits
        return (
            filtered(diagonal, NOISE_SHARE * squares / (looks * hits))
            if smooth
            else (diagonal, None)
        )


def design_for(x: Tensor) -> ProbeDesign:
    """The default: `Lattice` for images and volumes, filtered signs for all else."""
    return Lattice() if x.ndim in (4, 5) and min(x.shape[2:]) > 1 else Rademacher(smooth=True)


def probed_diagonal(
    at: Linearised, design: ProbeDesign, count: int, like: Tensor, generator: Generator
) -> Estimate:
    """diag J (B, ...) by products with `count` probes, and its standard error if it is known."""
    v = design.draw(count, like, generator)
    parts = (v[start:stop] for start, stop in chunks(count, like))
    return design.estimate(((part, at.pull(part)) for part in parts), count, like)


def filtered(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Wiener's filter of x with noise of known variance, (B, C, ...) each, and its error."""
    mean = _window_mean(x, WINDOW)
    variance = _window_mean((x - mean).square(), GAIN_WINDOW)
    count = WINDOW ** (x.ndim - 2) * x.shape[1]
    return _towards(mean, x, variance, _window_mean(noise, GAIN_WINDOW), count)


def _towards(
    mean: Tensor, x: Tensor, variance: Tensor, noise: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """x drawn to the mean of `count` numbers, as far as noise explains its variance; its error."""
    gain = (variance - noise).clamp(min=0) / variance.clamp(min=torch.finfo(x.dtype).tiny)
    # What is left of the noise: gain * noise of the deviation, and noise / count of the mean.
    return mean + gain * (x - mean), ((gain + 1 / count) * noise.clamp(min=0)).sqrt()


def _window_mean(x: Tensor, side: int) -> Tensor:
    """The mean over a window and all channels, at the edges over what there is of it."""
    if x.ndim == 4:
        pooled = functional.avg_pool2d(
            x, side, stride=1, padding=side // 2, count_include_pad=False
        )
    else:  # avg_pool3d refuses volumes that are thinner than the window
        pooled = along(x, [_window(n, side).to(x) for n in x.shape[2:]])
    return pooled.mean(1, keepdim=True).expand_as(x)


def _window(size: int, side: int) -> Tensor:
    """The matrix of means over a window of a line."""
    places = torch.arange(size, dtype=torch.float64)
    near = ((places[:, None] - places).abs() <= side // 2).double()
    return near / near.sum(1, keepdim=True)


def _classes_and_rounds(count: int) -> tuple[int, int]:
    """S probes as rounds of classes, as few rounds as there may be."""
    rounds = -(-count // MOST_CLASSES)
    return -(-count // rounds), rounds


def pixel_classes(classes: int, channels: int, *sides: int) -> Tensor:
    """The class (i + a j + k c) mod m of each number of an image (C, H, W).

    A volume's next coefficient is a^2 (Korobov's lattices), so that two numbers still say all.
    """
    a, k = _best_lattice(classes, min(channels, 3), len(sides))
    lines = (torch.arange(length) for length in (channels, *sides))
    return _class_of(classes, a, k, torch.meshgrid(*lines, indexing="ij"))


def _class_of(classes: int, a: int | Tensor, k: int | Tensor, places: Sequence[Tensor]) -> Tensor:
    """The class of places (channel, then one number a side)."""
    channel, *sides = places
    return sum((a**power * i for power, i in enumerate(sides)), k * channel) % classes


@lru_cache(maxsize=8)  # a chain asks for the same at every step
def _class_masks(
    classes: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Ones at the pixels of each class, (classes, C, H, W)."""
    place = pixel_classes(classes, *shape)
    return torch.stack([place == c for c in range(classes)]).to(device, dtype)


@lru_cache(maxsize=8)
def _far_masks(classes: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ones at the pixels that lie far from each class, (classes, C, H, W)."""
    place = pixel_classes(classes, *shape)
    steps = _far_steps(classes, min(shape[0], 3), len(shape) - 1)
    far = [sum((place + step) % classes == c for step in steps) for c in range(classes)]
    return torch.stack(far).to(device, dtype)  # type: ignore[arg-type]


def _offsets(classes: int, channels: int, ndim: int) -> tuple[list[Tensor], Tensor]:
    """Offsets between pixels (channel, then one number a side), and their squared lengths."""
    most = math.ceil(REACH * classes ** (1 / ndim))
    reach = torch.arange(-most, most + 1)
    *sides, channel = torch.cartesian_prod(*[reach] * ndim, torch.arange(1 - channels, channels)).T
    squares = channel**2 + sum(side**2 for side in sides)
    return [channel, *sides], squares.masked_fill(squares == 0, FAR)


@cache
def _best_lattice(classes: int, channels: int, ndim: int) -> tuple[int, int]:
    """(a, k) with the largest distance within a class, and the fewest pairs at that distance."""
    offsets, squares = _offsets(classes, channels, ndim)
    k = torch.arange(classes)[:, None]
    scores = []
    for a in range(classes):
        within = torch.where(_class_of(classes, a, k, offsets) == 0, squares, FAR)
        least = within.min(1).values
        scores.append(least * (1 + len(squares)) - (within == least[:, None]).sum(1))
    best = int(torch.cat(scores).argmax())
    return best // classes, best % classes


@cache
def _far_steps(classes: int, channels: int, ndim: int) -> tuple[int, ...]:
    """Of the other classes, as steps from a pixel's own, the farthest third."""
    offsets, squares = _offsets(classes, channels, ndim)
    classes_of = _class_of(classes, *_best_lattice(classes, channels, ndim), offsets)
    nearest = torch.full((classes,), FAR).scatter_reduce(0, classes_of, squares, "amin")[1:]
    least = nearest.sort(descending=True).values[max(1, len(nearest) // 3) - 1]
    return tuple((1 + (nearest >= least).nonzero()[:, 0]).tolist())
