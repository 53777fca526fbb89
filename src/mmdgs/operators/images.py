"""Operators on images (C, H, W): masks, smaller images, blurs, crops, grey, Fourier."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.operators.contract import Constant, Operator
from mmdgs.runtime import in_full_precision

LUMA = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in grey (ITU-R BT.601)."""
KERNEL_WIDTH = 4.0
"""Standard deviations of a Gaussian kernel kept on each side: the rest is below 1e-4 of it."""


def _image(shape: Sequence[int], name: str) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape) < 1:
        got = tuple(shape)
        raise ValueError(f"{name} is for images (channels, height, width), got shape {got}")
    channels, height, width = shape
    return channels, height, width


def _zero_or_one(keep: Tensor) -> Tensor:
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
        self.keep = Constant(_zero_or_one(keep).expand(event))

    @classmethod
    def random(cls, shape: Sequence[int], missing: float, *, generator: torch.Generator) -> Mask:
        """A mask that misses that share of the pixels, rounded, at random in all channels."""
        if not 0 <= missing < 1:
            raise ValueError(f"the share of missing pixels must lie in [0, 1), got {missing}")
        places = shape[1:] if len(shape) == 3 else shape
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
    """A mask that misses a box of `size` (a number, or height and width), by default central."""

    def __init__(
        self,
        shape: Sequence[int],
        size: int | tuple[int, int],
        *,
        top: int | None = None,
        left: int | None = None,
    ) -> None:
        keep = torch.ones(_image(shape, "Box")[1:], dtype=torch.bool)
        keep[_window(shape, size, top, left, "box")] = False
        super().__init__(keep, shape)


class Crop(Operator):
    """A window of `size` (a number, or height and width) of x, by default central."""

    channelwise = True

    def __init__(
        self,
        shape: Sequence[int],
        size: int | tuple[int, int],
        *,
        top: int | None = None,
        left: int | None = None,
    ) -> None:
        channels, _, _ = _image(shape, "Crop")
        self._window = rows, columns = _window(shape, size, top, left, "crop")
        out_shape = channels, rows.stop - rows.start, columns.stop - columns.start
        super().__init__(shape, out_shape)

    def squares(self, v: Tensor) -> Tensor:
        return self._forward(v)

    def _forward(self, x: Tensor) -> Tensor:
        return x[(..., *self._window)]

    def _adjoint(self, y: Tensor) -> Tensor:
        x = y.new_zeros(len(y), *self.shape)
        x[(..., *self._window)] = y
        return x


def _window(
    shape: Sequence[int], size: int | tuple[int, int], top: int | None, left: int | None, name: str
) -> tuple[slice, slice]:
    """The rows and columns of a window of an image."""
    height, width = (size, size) if isinstance(size, int) else size
    window = []
    for whole, part, start in zip(shape[1:], (height, width), (top, left), strict=True):
        begin = (whole - part) // 2 if start is None else start
        if part < 1 or begin < 0 or begin + part > whole:
            images = f"images of {shape[1]} x {shape[2]}"
            raise ValueError(f"a {name} of {height} x {width} does not fit into {images}")
        window.append(slice(begin, begin + part))
    return window[0], window[1]


class Downsample(Operator):
    """Means over blocks of `factor` x `factor` pixels: the measurement of super-resolution."""

    channelwise = True

    def __init__(self, shape: Sequence[int], factor: int) -> None:
        channels, height, width = _image(shape, "Downsample")
        if not isinstance(factor, int) or factor < 1 or height % factor or width % factor:
            sides = f"{height} and {width}"
            raise ValueError(f"the factor must be a whole number dividing {sides}, got {factor}")
        super().__init__(shape, (channels, height // factor, width // factor))
        self.factor = factor
        self._folds = [Constant(_folded(n, factor).square()) for n in (height, width)]

    def squares(self, v: Tensor) -> Tensor:
        return self._forward(v) / self.factor**2

    @in_full_precision
    def cosine_squares(self, v: Tensor) -> Tensor:
        """Each cosine of x becomes one cosine of y, but for a factor (aliasing)."""
        down, across = (fold.at(v) for fold in self._folds)
        return down @ v @ across.mT

    def _forward(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(x, self.factor)

    def _adjoint(self, y: Tensor) -> Tensor:
        wide = y.repeat_interleave(self.factor, -1).repeat_interleave(self.factor, -2)
        return wide / self.factor**2


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
        channels, height, width = _image(shape, "Grayscale")
        if weights is None:
            weights = LUMA if channels == 3 else [1 / channels] * channels
        if len(weights) != channels or not any(weights):
            got = f"{channels} weights, not all zero, got {list(weights)}"
            raise ValueError(f"Grayscale needs {got}")
        super().__init__(shape, (1, height, width))
        self.weights = Constant(torch.tensor(weights, dtype=torch.float64)[:, None, None])

    def squares(self, v: Tensor) -> Tensor:
        return (self.weights.at(v).square() * v).sum(1, keepdim=True)

    def _forward(self, x: Tensor) -> Tensor:
        return (self.weights.at(x) * x).sum(1, keepdim=True)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self.weights.at(y) * y


class Blur(Operator):
    """Convolution of each channel with a centred kernel (height, width); edges are mirrored.

    A kernel that is symmetric along both axes is diagonal in cosines, and conditioning on it is
    exact.
    """

    channelwise = True

    def __init__(self, shape: Sequence[int], kernel: Tensor) -> None:
        _, height, width = _image(shape, "Blur")
        kernel = torch.as_tensor(kernel)
        if kernel.ndim != 2 or not torch.isfinite(kernel).all() or not kernel.any():
            got = tuple(kernel.shape)
            raise ValueError(f"a kernel is finite, (height, width), not all zero, got {got}")
        super().__init__(shape, shape)
        self.kernel = Constant(kernel.double())
        self._places = [_mirrored(n, k) for n, k in zip((height, width), kernel.shape, strict=True)]
        self._lines = self._separated()

    def _separated(self) -> list[Constant] | None:
        """Matrices along columns and rows, where the kernel is a product of two lines: faster.

        On a CPU a Gaussian blur of 180 images of 8 x 8 took 10 ms by convolution, and its adjoint
        23 ms.
        """
        kernel = self.kernel.tensor
        at = divmod(int(kernel.abs().argmax()), kernel.shape[1])
        lines = kernel[:, at[1]], kernel[at[0]] / kernel[at]
        near = 1e-14 * float(kernel.abs().max())
        if not torch.allclose(lines[0][:, None] * lines[1], kernel, rtol=1e-12, atol=near):
            return None
        matrices = []
        for line, places, n in zip(lines, self._places, self.shape[1:], strict=True):
            matrix = torch.zeros(n, n, dtype=torch.float64)
            for i in range(n):
                matrix[i].index_add_(0, places[i : i + len(line)], line.flip(0))
            matrices.append(Constant(matrix))
        return matrices

    @classmethod
    def gaussian(cls, shape: Sequence[int], sigma: float) -> Blur:
        """A Gaussian kernel with a standard deviation in pixels, up to half the larger side."""
        most = max(_image(shape, "Blur")[1:]) / 2
        if not 0 < sigma <= most:
            limits = f"positive and at most half the image's larger side, {most:g}, got {sigma:g}"
            raise ValueError(f"the standard deviation of a blur must be {limits}")
        reach = max(1, math.ceil(KERNEL_WIDTH * sigma))
        places = torch.arange(-reach, reach + 1, dtype=torch.float64)
        line = (-0.5 * (places / sigma).square()).exp()
        line /= line.sum()
        return cls(shape, line[:, None] * line)

    @classmethod
    def motion(cls, shape: Sequence[int], length: int, angle: float = 45.0) -> Blur:
        """A kernel along a line of so many pixels, at an angle in degrees from the horizontal."""
        most = max(_image(shape, "Blur")[1:])
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
        return cls(shape, kernel / kernel.sum())

    def cosine_gains(self, like: Tensor) -> Tensor | None:
        """sum_ab k_ab cos(pi f a / H) cos(pi g b / W) at frequencies f, g."""
        kernel = self.kernel.tensor
        symmetric = all(size % 2 for size in kernel.shape) and all(
            torch.allclose(kernel, kernel.flip(axis), rtol=1e-12) for axis in (0, 1)
        )
        if not symmetric:
            return None
        waves = [
            (math.pi / n * torch.arange(n).double()[:, None] * (torch.arange(k) - k // 2)).cos()
            for n, k in zip(self.shape[1:], kernel.shape, strict=True)
        ]
        return (waves[0] @ kernel @ waves[1].mT).expand(self.shape).to(like)

    def cosine_power(self, like: Tensor) -> Tensor:
        """|sum_ab k_ab exp(i pi (f a / H + g b / W))|^2, the mean over both signs of f."""
        kernel = self.kernel.tensor
        waves = [
            (1j * math.pi / n * torch.arange(n).double()[:, None] * torch.arange(k)).exp()
            for n, k in zip(self.shape[1:], kernel.shape, strict=True)
        ]
        across = kernel.to(waves[0].dtype) @ waves[1].mT
        power = ((waves[0] @ across).abs().square() + (waves[0].conj() @ across).abs().square()) / 2
        return power.expand(self.shape).to(like)

    @in_full_precision
    def _forward(self, x: Tensor) -> Tensor:
        if self._lines is not None:
            return self._lines[0].at(x) @ x @ self._lines[1].at(x).mT
        rows, columns = (places.to(x.device) for places in self._places)
        wide = x.index_select(2, rows).index_select(3, columns)
        kernel = self.kernel.at(x).flip(0, 1)[None, None]  # conv2d does not turn the kernel round
        return functional.conv2d(wide.flatten(0, 1)[:, None], kernel)[:, 0].reshape(x.shape)

    @in_full_precision
    def _adjoint(self, y: Tensor) -> Tensor:
        if self._lines is not None:
            return self._lines[0].at(y).mT @ y @ self._lines[1].at(y)
        rows, columns = (places.to(y.device) for places in self._places)
        kernel = self.kernel.at(y).flip(0, 1)[None, None]
        wide = functional.conv_transpose2d(y.flatten(0, 1)[:, None], kernel)[:, 0]
        wide = wide.unflatten(0, y.shape[:2])
        tall = wide.new_zeros(*wide.shape[:2], y.shape[2], wide.shape[3]).index_add_(2, rows, wide)
        return torch.zeros_like(y).index_add_(3, columns, tall)


def _mirrored(size: int, kernel: int) -> Tensor:
    """The places of a line that goes on, for half a kernel on each side, as its mirror image."""
    before = kernel - 1 - (kernel - 1) // 2
    places = torch.arange(-before, size + kernel - 1 - before) % (2 * size)
    return torch.minimum(places, 2 * size - 1 - places)


class Fourier(Operator):
    """Orthonormal Fourier coefficients of each channel where a mask (H, W) keeps them (all: None).

    (C, H, W) -> (C, H, W, 2): real, imaginary. Frequency zero comes first, as in torch.fft.fft2.
    """

    channelwise = True

    def __init__(self, shape: Sequence[int], keep: Tensor | None = None) -> None:
        sides = _image(shape, "Fourier")[1:]
        keep = torch.ones(sides, dtype=torch.bool) if keep is None else keep
        if keep.shape != sides:
            raise ValueError(f"the mask's shape {tuple(keep.shape)} does not fit {sides}")
        super().__init__(shape, (*shape, 2))
        self.keep = Constant(_zero_or_one(keep)[..., None])

    def known(self, y: Tensor) -> Tensor:
        return torch.where(self.keep.at(y).bool(), y, 0.0)

    def _forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.fft2(x, norm="ortho")) * self.keep.at(x)

    def _adjoint(self, y: Tensor) -> Tensor:
        kept = torch.view_as_complex((y * self.keep.at(y)).contiguous())
        return torch.fft.ifft2(kept, norm="ortho").real
