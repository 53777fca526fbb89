"""Probes of a Jacobian's diagonal: which vectors v are multiplied with J, and what is made of the products.

    Rademacher    signs at every number: the mean of v * (v' J) over S probes has the variance  sum_{j != i} J_ji^2 / S
    Lattice       signs at one class of pixels in S, zero elsewhere: the variance is  sum_{j != i, same class} J_ji^2
    Hadamard      signs everywhere that cancel between classes: the lattice's estimate where S is a power of 2

All are unbiased (Bekas et al., 2007). Images couple near pixels most, and the classes are sublattices whose pixels lie
far apart, so that what is left is small where J is local: with 5 probes no two of a pixel's neighbours share its
class. Where J is not local (high noise) the diagonal is smooth instead, and the products say how noisy they are: a
probe that misses a pixel shows there the size of a sum of off-diagonal entries. So Lattice filters its estimate by
default, which is then not unbiased any more, and nearer (docs/probes.md). Of data that are no images nothing is known
to be smooth but the whole row: there signs are filtered towards its mean, by how far the probes disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.jacobians import Linearised, chunks
from mmdgs.randomness import Generator, signs, uniforms

MOST_CLASSES = 64
FAR = 1000
"""A squared distance beyond all that matter here."""
WINDOW, GAIN_WINDOW = 5, 9
"""Sides of windows, in pixels: of the mean, and of the variances that say how much of a deviation from it counts."""
NOISE_SHARE = 0.7
"""Of the squares at missed pixels, what is taken for noise: a class that missed a pixel lies nearer to it than its own
does. On Jacobians of the MNIST energy and a CIFAR-10 diffusion model the noise was 0.5 to 0.95 of them (5 probes)."""


@runtime_checkable
class DiagonalSums(Protocol):
    """What is summed over products with probes, and the diagonal that comes of it."""

    def add(self, v: Tensor, products: Tensor) -> None:
        """Take in some probes v (n, B, ...) and their products v' J, of the same shape."""

    def estimate(self) -> tuple[Tensor, Tensor | None]:
        """diag J, (B, ...), and its standard error, which broadcasts to it; None where that is not known."""


@runtime_checkable
class ProbeDesign(Protocol):
    """Which probes: S of them for a batch, every row's from its own random stream, and what is to be summed."""

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        """Probes (S, B, ...) for a batch (B, ...) such as `like`."""

    def diagonal(self, count: int, like: Tensor) -> DiagonalSums: ...


class _Mean:
    def __init__(self, count: int, like: Tensor, smooth: bool = False) -> None:
        self.count, self.smooth = count, smooth and count > 1
        self.total, self.squares = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, v: Tensor, products: Tensor) -> None:
        self.total += (v * products).sum(0)
        if self.smooth:
            self.squares += products.square().sum(0)

    def estimate(self) -> tuple[Tensor, Tensor | None]:
        found = self.total / self.count
        if not self.smooth:
            return found, None
        axes = tuple(range(1, found.ndim))
        noise = (self.squares / self.count - found.square()).mean(axes, keepdim=True) / (self.count - 1)
        mean = found.mean(axes, keepdim=True)
        return _towards(mean, found, (found - mean).square().mean(axes, keepdim=True), noise, found[0].numel())


@dataclass(frozen=True)
class Rademacher:
    """Signs everywhere: the paper's probes (its eq. diag:approx).

    `smooth` filters the estimate by its own noise, towards the mean of the row; the noise is how far the products of
    one number are apart.
    """

    smooth: bool = False

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        # Rows first, so that each chain's probes come from its own stream.
        return signs((len(like), count, *like.shape[1:]), like, generator).transpose(0, 1)

    def diagonal(self, count: int, like: Tensor) -> DiagonalSums:
        return _Mean(count, like, self.smooth)


@dataclass(frozen=True)
class Lattice:
    """Signs at one class of pixels each, for images (B, C, H, W); S probes are S classes, or rounds of fewer.

    `smooth` filters the estimate by its own noise: a deviation from the mean of the 5 x 5 pixels around counts as much
    as deviations there exceed the noise (Wiener's filter). The noise is read off the probes that miss a pixel, and of
    these off the classes that lie farthest from it.
    """

    smooth: bool = True

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        _require_images(like, "lattice probes")
        classes, rounds = _classes_and_rounds(count)
        signed = signs((len(like), rounds, *like.shape[1:]), like, generator).transpose(0, 1)
        masks = _class_masks(classes, like.shape[1:], like.dtype, like.device)
        return (signed[:, None] * masks[None, :, None]).flatten(0, 1)[:count]

    def diagonal(self, count: int, like: Tensor) -> DiagonalSums:
        return _LatticeSums(count, like, self.smooth and count > 1)


class _LatticeSums:
    def __init__(self, count: int, like: Tensor, smooth: bool) -> None:
        self.classes, self.smooth, self.taken = _classes_and_rounds(count)[0], smooth, 0
        self.total, self.hits, self.squares, self.looks = (torch.zeros_like(like) for _ in range(4))

    def add(self, v: Tensor, products: Tensor) -> None:
        self.total += (v * products).sum(0)
        self.hits += (v != 0).sum(0)
        if self.smooth:
            own = torch.arange(self.taken, self.taken + len(v), device=v.device) % self.classes
            far = _far_masks(self.classes, v.shape[2:], v.dtype, v.device)[own][:, None]
            self.squares += (far * products.square()).sum(0)
            self.looks += far.sum(0)
        self.taken += len(v)

    def estimate(self) -> tuple[Tensor, Tensor | None]:
        found = self.total / self.hits
        if not self.smooth:
            return found, None
        return filtered(found, NOISE_SHARE * self.squares / (self.looks * self.hits))


@dataclass(frozen=True)
class Hadamard:
    """Signs at every pixel of an image (B, C, H, W) that cancel between classes: rows of Hadamard matrices.

    Probe s is  v_i = z_i H[s, class of i],  z random signs. Over all m rows  sum_s H[s, a] H[s, b] = 0  for classes
    a != b, so that only pixels of one class are left: the estimate is that of Lattice(smooth=False) with m classes,
    number for number. Orders are powers of 2: where S is none, S rows of the next order, drawn at random, leave the
    variance J_ji^2 (m - S) / (S (m - 1)) of a pixel j of another class.
    """

    def draw(self, count: int, like: Tensor, generator: Generator) -> Tensor:
        _require_images(like, "Hadamard probes")
        order = min(1 << (count - 1).bit_length(), MOST_CLASSES)
        blocks = -(-count // order)
        z = signs((len(like), blocks, 1, *like.shape[1:]), like, generator)
        rows = uniforms((len(like), blocks, order), like, generator).argsort(2)
        place = pixel_classes(order, *like.shape[1:]).to(like.device)
        matrix = _hadamard(order).to(like.device, like.dtype)[:, place]  # (order, C, H, W)
        return (z * matrix[rows]).flatten(1, 2)[:, :count].transpose(0, 1)

    def diagonal(self, count: int, like: Tensor) -> DiagonalSums:
        return _Mean(count, like)


@cache
def _hadamard(order: int) -> Tensor:
    """Sylvester's Hadamard matrix (order, order), the order a power of 2."""
    if order == 1:
        return torch.ones(1, 1)
    half = _hadamard(order // 2)
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])


def design_for(x: Tensor) -> ProbeDesign:
    """The design that is taken where none is named: `Lattice` for images (B, C, H, W), filtered signs for all else."""
    return Lattice() if x.ndim == 4 and min(x.shape[2:]) > 1 else Rademacher(smooth=True)


def probed_diagonal(
    at: Linearised, design: ProbeDesign, count: int, like: Tensor, generator: Generator
) -> tuple[Tensor, Tensor | None]:
    """diag J (B, ...) of a linearised denoiser by products with `count` probes, and its standard error if that is
    known; `like` is the denoiser's input's like."""
    v = design.draw(count, like, generator)
    sums = design.diagonal(count, like)
    for start, stop in chunks(count, like):
        sums.add(v[start:stop], at.pull(v[start:stop]))
    return sums.estimate()


def filtered(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Wiener's filter of images x (B, C, H, W) with noise of known variance (B, C, H, W), over windows and channels.

    With the standard error of what comes out.
    """
    mean = _window_mean(x, WINDOW)
    variance, noise = _window_mean((x - mean).square(), GAIN_WINDOW), _window_mean(noise, GAIN_WINDOW)
    return _towards(mean, x, variance, noise, WINDOW**2 * x.shape[1])


def _towards(mean: Tensor, x: Tensor, variance: Tensor, noise: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """x, of whose deviations from the mean of `count` numbers as much is left as their variance exceeds the noise's.

    What is left of the noise, gain * noise of the deviation and noise / count of the mean, is the error.
    """
    gain = (variance - noise).clamp(min=0) / variance.clamp(min=torch.finfo(x.dtype).tiny)
    return mean + gain * (x - mean), ((gain + 1 / count) * noise.clamp(min=0)).sqrt()


def _window_mean(x: Tensor, side: int) -> Tensor:
    """The mean over a window and all channels, at the edges over what there is of it."""
    pooled = functional.avg_pool2d(x, side, stride=1, padding=side // 2, count_include_pad=False)
    return pooled.mean(1, keepdim=True).expand_as(x)


def _require_images(like: Tensor, what: str) -> None:
    if like.ndim != 4:
        raise ValueError(f"{what} are for images (B, C, H, W), got shape {tuple(like.shape)}")


def _classes_and_rounds(count: int) -> tuple[int, int]:
    """S probes as rounds of classes, as few rounds as there may be; the last may lack some classes."""
    rounds = -(-count // MOST_CLASSES)
    return -(-count // rounds), rounds


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


@lru_cache(maxsize=8)
def _far_masks(classes: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ones at the pixels that lie far from each class, (classes, C, H, W)."""
    place, steps = pixel_classes(classes, *shape), _far_steps(classes, min(shape[0], 3))
    far = [sum((place + step) % classes == c for step in steps) for c in range(classes)]
    return torch.stack(far).to(device, dtype)  # type: ignore[arg-type]


def _offsets(classes: int, channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Offsets (di, dj, dc) between pixels, and their squared lengths, as far as classes can lie apart."""
    reach = torch.arange(-min(classes, 9), min(classes, 9) + 1)  # the best lattice of 64 classes: 8.6 apart
    di, dj, dc = torch.cartesian_prod(reach, reach, torch.arange(1 - channels, channels)).T
    squares = di**2 + dj**2 + dc**2
    return di, dj, dc, squares.masked_fill(squares == 0, FAR)


@cache
def _best_lattice(classes: int, channels: int) -> tuple[int, int]:
    """(a, k) with the largest distance within a class; among equals the fewest pairs at that distance."""
    di, dj, dc, squares = _offsets(classes, channels)
    a, k = torch.cartesian_prod(torch.arange(classes), torch.arange(classes))[:, :, None].unbind(1)
    within = torch.where((di + a * dj + k * dc) % classes == 0, squares, FAR)
    least = within.min(1).values
    pairs = (within == least[:, None]).sum(1)
    best = (least * (1 + len(di)) - pairs).argmax()
    return int(a[best]), int(k[best])


@cache
def _far_steps(classes: int, channels: int) -> tuple[int, ...]:
    """Of the other classes, as steps from a pixel's own, the third whose nearest pixel is farthest."""
    a, k = _best_lattice(classes, channels)
    di, dj, dc, squares = _offsets(classes, channels)
    nearest = torch.full((classes,), FAR).scatter_reduce(0, (di + a * dj + k * dc) % classes, squares, "amin")[1:]
    least = nearest.sort(descending=True).values[max(1, len(nearest) // 3) - 1]
    return tuple((1 + (nearest >= least).nonzero()[:, 0]).tolist())
