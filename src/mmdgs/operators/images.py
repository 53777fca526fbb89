"""Operators on images (C, H, W) and volumes (C, D, H, W): masks, means, blurs, crops, grey.

What is said of height and width holds of every dimension but the first, however many there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.operators.contract import Constant, Operator, along
from mmdgs.runtime import in_full_precision

LUMA = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in grey (ITU-R BT.601)."""
KERNEL_WIDTH = 4.0
"""Standard deviations of a Gaussian kernel kept on each side: the rest is below 1e-4 of it."""


def sides_of(shape: Sequence[int], name: str) -> tuple[int, ...]:
    """The sides of images of a shape: all but the channels."""
    if len(shape) < 3 or min(shape) < 1:
        got = tuple(shape)
        raise ValueError(
            f"{name} is for images (channels, height, width) or volumes (channels, depth, height, "
            f"width), got shape {got}"
        )
    return tuple(shape[1:])


def zero_or_one(keep: Tensor) -> Tensor:
    if not ((keep == 0) | (keep == 1)).all():
        raise ValueError("a mask holds true and false, or 0 and 1 alone: 1 where it is measured")
    if not keep.any():
        raise ValueError("the mask keeps nothing: there is no measurement")
    return keep.bool()


class Mask(Operator):
    """y = keep * x: numbers of x where `keep` is true, and zero elsewhere, whatever y holds there.

    `keep` (of true and false, or of zeros and ones) has x's shape, or that of its last dimensions.
    """

    def __init__(self, keep: Tensor, shape: Sequence[int] | None = None) -> None:
        event = torch.Size(keep.shape if shape is None else shape)
        if keep.ndim > len(event) or keep.shape != event[len(event) - keep.ndim :]:
            shapes = f"{tuple(keep.shape)} does not fit x of shape {tuple(event)}"
            raise ValueError(f"the mask's shape {shapes}")
        super().__init__(event, event)
        self.keep = Constant(zero_or_one(keep).expand(event))

    @classmethod
    def random(cls, shape: Sequence[int], missing: float, *, generator: torch.Generator) -> Mask:
        """A mask that misses that share of the pixels, rounded, at random in all channels."""
        if not 0 <= missing < 1:
            raise ValueError(f"the share of missing pixels must lie in [0, 1), got {missing}")
        places = shape[1:] if len(shape) > 2 else shape
        order = torch.randperm(math.prod(places), generator=generator)
        keep = torch.zeros(len(order), dtype=torch.bool)
        keep[order[: max(1, round((1 - missing) * len(order)))]] = True
        return cls(keep.reshape(tuple(places)), shape)

    @property
    def channelwise(self) -> bool:
        keep = self.keep.tensor
        return keep.ndim > 1 and bool((keep == keep[:1]).all())

    def known(self, y: Tensor) -> Tensor:
        return torch.where(self.keep.at(y).bool(), y, 0.0)

    def squares(self, v: Tensor) -> Tensor:
        return self._forward(v)

    def cosine_gains(self, like: Tensor) -> Tensor | None:
        return self.keep.at(like) if bool(self.keep.tensor.all()) else None

    def cosine_power(self, like: Tensor) -> Tensor:
        return torch.ones_like(self.keep.at(like))

    def _forward(self, x: Tensor) -> Tensor:
        return x * self.keep.at(x)

    def _adjoint(self, y: Tensor) -> Tensor:
        return y * self.keep.at(y)


class Box(Mask):
    """A mask that misses a box of `size` (a number, or one a side), by default central."""

    def __init__(
        self,
        shape: Sequence[int],
        size: int | Sequence[int],
        *,
        front: int | None = None,
        top: int | None = None,
        left: int | None = None,
    ) -> None:
        keep = torch.ones(sides_of(shape, "Box"), dtype=torch.bool)
        keep[_window(shape, size, (front, top, left), "box")] = False
        super().__init__(keep, shape)


class Crop(Operator):
    """A window of `size` (a number, or one a side) of x, by default central."""

    channelwise = True

    def __init__(
        self,
        shape: Sequence[int],
        size: int | Sequence[int],
        *,
        front: int | None = None,
        top: int | None = None,
        left: int | None = None,
    ) -> None:
        sides_of(shape, "Crop")
        window = _window(shape, size, (front, top, left), "crop")
        super().__init__(shape, (shape[0], *(part.stop - part.start for part in window)))
        self._window = slice(None), slice(None), *window

    def squares(self, v: Tensor) -> Tensor:
        return self._forward(v)

    def _forward(self, x: Tensor) -> Tensor:
        return x[self._window]

    def _adjoint(self, y: Tensor) -> Tensor:
        x = y.new_zeros(len(y), *self.shape)
        x[self._window] = y
        return x


def _window(
    shape: Sequence[int], size: int | Sequence[int], corner: Sequence[int | None], name: str
) -> tuple[slice, ...]:
    """The places of a window of an image along each side; its `corner` as front, top, left."""
    sides = shape[1:]
    sizes = [size] * len(sides) if isinstance(size, int) else list(size)
    starts = [*[None] * (len(sides) - len(corner)), *corner][-len(sides) :]
    window = []
    for whole, part, start in zip(sides, sizes, starts, strict=True):
        begin = (whole - part) // 2 if start is None else start
        if part < 1 or begin < 0 or begin + part > whole:
            wholes, parts = (" x ".join(map(str, lengths)) for lengths in (sides, sizes))
            raise ValueError(f"a {name} of {parts} does not fit into images of {wholes}")
        window.append(slice(begin, begin + part))
    return tuple(window)


class Downsample(Operator):
    """Means over blocks of `factor` pixels a side: the measurement of super-resolution.

    A volume of thick slices has one factor a side, such as (4, 1, 1).
    """

    channelwise = True

    def __init__(self, shape: Sequence[int], factor: int | Sequence[int]) -> None:
        sides = sides_of(shape, "Downsample")
        factors = (factor,) * len(sides) if isinstance(factor, int) else tuple(factor)
        if len(factors) != len(sides) or any(
            not isinstance(f, int) or f < 1 or n % f for n, f in zip(sides, factors, strict=True)
        ):
            whole = " and ".join(map(str, sides))
            raise ValueError(f"the factor must be a whole number dividing {whole}, got {factor}")
        super().__init__(shape, (shape[0], *(n // f for n, f in zip(sides, factors, strict=True))))
        self.factors = factors
        self._folds = [
            Constant(_folded(n, f).square()) for n, f in zip(sides, factors, strict=True)
        ]

    def squares(self, v: Tensor) -> Tensor:
        return self._forward(v) / math.prod(self.factors)

    @in_full_precision
    def cosine_squares(self, v: Tensor) -> Tensor:
        """Each cosine of x becomes one cosine of y, but for a factor (aliasing)."""
        return along(v, [fold.at(v) for fold in self._folds])

    def _forward(self, x: Tensor) -> Tensor:
        if len(self.factors) == 2:
            return functional.avg_pool2d(x, self.factors)
        for dim, factor in enumerate(self.factors, start=2):
            x = x.unflatten(dim, (-1, factor)).mean(dim + 1)
        return x

    def _adjoint(self, y: Tensor) -> Tensor:
        for dim, factor in enumerate(self.factors, start=2):
            y = y.repeat_interleave(factor, dim)
        return y / math.prod(self.factors)


def _folded(size: int, factor: int) -> Tensor:
    """Means over blocks in the cosines of both sides, (size / factor, size): one number a column.

    The mean of cos(pi k (n + 1/2) / N) over a block is a factor times cos(pi k (m + 1/2) / M), M =
    N / factor, and at k = 2 M q +- r that is (-1)^q cos(pi r (m + 1/2) / M), which is zero at r =
    M.
    """
    few = size // factor
    k = torch.arange(size)
    turns, r = (k + few) // (2 * few), ((k + few) % (2 * few) - few).abs()
    wave, half = math.pi * k.double() / 2, math.sqrt(0.5)
    gains = torch.where(k == 0, 1.0, (wave / few).sin() / (factor * (wave / size).sin()))
    gains = gains * (1 - 2 * (turns % 2)) / math.sqrt(factor)
    gains = gains * torch.where(k == 0, half, 1.0) / torch.where(r == 0, half, 1.0)
    folded = torch.zeros(few + 1, size, dtype=torch.float64)
    folded[r, k] = gains
    return folded[:few]


class Grayscale(Operator):
    """A weighted sum of the channels, (C, H, W) -> (1, H, W); for three channels by `LUMA`."""

    def __init__(self, shape: Sequence[int], weights: Sequence[float] | None = None) -> None:
        channels, *sides = shape[0], *sides_of(shape, "Grayscale")
        if weights is None:
            weights = LUMA if channels == 3 else [1 / channels] * channels
        if len(weights) != channels or not any(weights):
            got = f"{channels} weights, not all zero, got {list(weights)}"
            raise ValueError(f"Grayscale needs {got}")
        super().__init__(shape, (1, *sides))
        line = torch.tensor(weights, dtype=torch.float64)
        self.weights = Constant(line.reshape(-1, *[1] * len(sides)))

    def squares(self, v: Tensor) -> Tensor:
        return (self.weights.at(v).square() * v).sum(1, keepdim=True)

    def _forward(self, x: Tensor) -> Tensor:
        return (self.weights.at(x) * x).sum(1, keepdim=True)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self.weights.at(y) * y


class Blur(Operator):
    """Convolution of each channel with a centred kernel, one side for each; edges are mirrored.

    A kernel that is symmetric along all axes is diagonal in cosines, and conditioning on it is
    exact.
    """

    channelwise = True

    def __init__(self, shape: Sequence[int], kernel: Tensor) -> None:
        sides = sides_of(shape, "Blur")
        kernel = torch.as_tensor(kernel)
        if kernel.ndim != len(sides) or not torch.isfinite(kernel).all() or not kernel.any():
            got = f"{len(sides)} dimensions, finite, not all zero, got {tuple(kernel.shape)}"
            raise ValueError(f"a kernel for images of shape {tuple(shape)} has {got}")
        super().__init__(shape, shape)
        self.kernel = Constant(kernel.double())
        self._places = [_mirrored(n, k) for n, k in zip(sides, kernel.shape, strict=True)]
        self._lines = self._separated()
        if self._lines is None:
            self._gains = Constant(torch.fft.rfftn(self.kernel.tensor, [*map(len, self._places)]))

    def _separated(self) -> list[Constant] | None:
        """Matrices along the sides, where the kernel is a product of lines: faster.

        On a CPU a Gaussian blur of 180 images of 8 x 8 took 10 ms by convolution, and its adjoint
        23 ms.
        """
        kernel, ndim = self.kernel.tensor, self.kernel.tensor.ndim
        top = torch.unravel_index(kernel.abs().argmax(), kernel.shape)
        lines = [kernel.movedim(d, -1)[(*top[:d], *top[d + 1 :])] for d in range(ndim)]
        lines[1:] = [line / kernel[top] for line in lines[1:]]
        near = 1e-14 * float(kernel.abs().max())
        if not torch.allclose(_outer(lines), kernel, rtol=1e-12, atol=near):
            return None
        matrices = []
        for line, places, n in zip(lines, self._places, self.shape[1:], strict=True):
            matrix = torch.zeros(n, n, dtype=torch.float64)
            for i in range(n):
                matrix[i].index_add_(0, places[i : i + len(line)], line.flip(0))
            matrices.append(Constant(matrix))
        return matrices

    @classmethod
    def gaussian(cls, shape: Sequence[int], sigma: float | Sequence[float]) -> Blur:
        """A Gaussian kernel with a standard deviation in pixels, or one a side.

        It is at most half the largest side. One of 0 leaves its side as it is.
        """
        sides = sides_of(shape, "Blur")
        widths = [sigma] * len(sides) if isinstance(sigma, int | float) else list(sigma)
        most = max(sides) / 2
        if len(widths) != len(sides) or min(widths) < 0 or not 0 < max(widths) <= most:
            limits = f"positive and at most half the image's larger side, {most:g}, got {sigma}"
            raise ValueError(f"the standard deviation of a blur must be {limits}")
        lines = []
        for width in widths:
            reach = max(1, math.ceil(KERNEL_WIDTH * width)) if width else 0
            places = torch.arange(-reach, reach + 1, dtype=torch.float64)
            line = (-0.5 * (places / (width or 1)).square()).exp()
            lines.append(line / line.sum())
        return cls(shape, _outer(lines))

    @classmethod
    def motion(cls, shape: Sequence[int], length: int, angle: float = 45.0) -> Blur:
        """A kernel along a line of so many pixels, at an angle in degrees from the horizontal.

        In a volume it lies in the slices.
        """
        sides = sides_of(shape, "Blur")
        most = max(sides[-2:])
        if not isinstance(length, int) or not 1 <= length <= most:
            limits = f"a whole number of pixels from 1 to {most}, the image's, got {length}"
            raise ValueError(f"the length of a motion must be {limits}")
        size = length + 1 - length % 2
        kernel = torch.zeros(size, size, dtype=torch.float64)
        turn = math.radians(angle)
        for step in torch.linspace(-(length - 1) / 2, (length - 1) / 2, 8 * length).tolist():
            row, column = size // 2 - step * math.sin(turn), size // 2 + step * math.cos(turn)
            for r in {math.floor(row), math.ceil(row)}:
                for c in {math.floor(column), math.ceil(column)}:
                    if 0 <= r < size and 0 <= c < size:
                        kernel[r, c] += (1 - abs(row - r)) * (1 - abs(column - c))
        return cls(shape, (kernel / kernel.sum())[(None,) * (len(sides) - 2)])

    def cosine_gains(self, like: Tensor) -> Tensor | None:
        """sum_ab k_ab cos(pi f a / H) cos(pi g b / W) at frequencies f, g."""
        kernel = self.kernel.tensor
        symmetric = all(size % 2 for size in kernel.shape) and all(
            torch.allclose(kernel, kernel.flip(axis), rtol=1e-12) for axis in range(kernel.ndim)
        )
        if not symmetric:
            return None
        waves = [
            (math.pi / n * torch.arange(n).double()[:, None] * (torch.arange(k) - k // 2)).cos()
            for n, k in zip(self.shape[1:], kernel.shape, strict=True)
        ]
        return along(kernel, waves, lead=0).expand(self.shape).to(like)

    def cosine_power(self, like: Tensor) -> Tensor:
        """|sum_ab k_ab exp(i pi (f a / H + g b / W))|^2, the mean over both signs of f."""
        kernel = self.kernel.tensor
        *waves, last = (
            (1j * math.pi / n * torch.arange(n).double()[:, None] * torch.arange(k)).exp()
            for n, k in zip(self.shape[1:], kernel.shape, strict=True)
        )
        signs = [*product(*((wave, wave.conj()) for wave in waves))]
        kernel = kernel.to(last.dtype)
        power = torch.stack([along(kernel, [*s, last], lead=0).abs().square() for s in signs])
        return power.mean(0).expand(self.shape).to(like)

    @in_full_precision
    def _forward(self, x: Tensor) -> Tensor:
        if self._lines is not None:
            return along(x, [line.at(x) for line in self._lines])
        for dim, places in enumerate(self._places, start=2):
            x = x.index_select(dim, places.to(x.device))
        return self._convolved(x)[self._inside]

    @in_full_precision
    def _adjoint(self, y: Tensor) -> Tensor:
        if self._lines is not None:
            return along(y, [line.at(y).mT for line in self._lines])
        x = y.new_zeros(*y.shape[:2], *map(len, self._places))
        x[self._inside] = y
        x = self._convolved(x, adjoint=True)
        for dim, (places, n) in enumerate(zip(self._places, self.shape[1:], strict=True), start=2):
            folded = x.new_zeros(*x.shape[:dim], n, *x.shape[dim + 1 :])
            x = folded.index_add_(dim, places.to(x.device), x)
        return x

    def _convolved(self, x: Tensor, *, adjoint: bool = False) -> Tensor:
        """The circular convolution with the kernel, by Fourier transforms, or its adjoint.

        At 256 x 256 on a CPU a motion over 15 pixels takes a third of the time of torch's
        convolution, and its adjoint a thirtieth.
        """
        sides = x.shape[2:]
        waves = torch.fft.rfftn(x, sides)
        gains = self._gains.at(waves)
        return torch.fft.irfftn(waves * (gains.conj() if adjoint else gains), sides)

    @property
    def _inside(self) -> tuple[Any, ...]:
        """Where the convolution of mirrored images does not reach round their ends."""
        return (..., *(slice(size - 1, None) for size in self.kernel.tensor.shape))


def _outer(lines: Sequence[Tensor]) -> Tensor:
    """The product of lines, one a dimension."""
    whole = lines[0]
    for line in lines[1:]:
        whole = whole[..., None] * line
    return whole


def _mirrored(size: int, kernel: int) -> Tensor:
    """The places of a line that goes on, for half a kernel on each side, as its mirror image."""
    before = kernel - 1 - (kernel - 1) // 2
    places = torch.arange(-before, size + kernel - 1 - before) % (2 * size)
    return torch.minimum(places, 2 * size - 1 - places)
