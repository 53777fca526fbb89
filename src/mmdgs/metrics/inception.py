"""Inception v3 as image metrics use it: TensorFlow's network of 5 December 2015, 1,008 classes (Szegedy et al., 2016).

It differs from the Inception v3 of other libraries in its weights, in average pooling that leaves padding out, and in
the maximum pooling of its last block. Modules are named as in the public state dict, so that it loads as it is.
Images are prepared as TensorFlow 1 did it, since numbers in papers were made so: see `prepared`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d, relu

SIZE = 299
FEATURES = 2048
CLASSES = 1008
RESIZE = "bilinear to 299 x 299, aligned as TensorFlow 1 does"
"""How images are brought to the network's size, in the words of a record."""


def resized_as_tensorflow(x: Float[Tensor, "n c h w"], size: int = SIZE) -> Float[Tensor, "n c size size"]:
    """Bilinear, pixel i of the result at i h / size of the image: the first pixels coincide, not the outer edges."""
    if tuple(x.shape[-2:]) == (size, size):
        return x
    rows, columns = (_interpolation(length, size, x) for length in x.shape[-2:])
    return rows @ x @ columns.mT


def _interpolation(length: int, size: int, like: Tensor) -> Tensor:
    """The matrix (size, length) that interpolates linearly along one side."""
    place = torch.arange(size, dtype=torch.float64) * (length / size)
    lower = place.floor().long().clamp(max=length - 1)
    weight = place - lower
    matrix = torch.zeros(size, length, dtype=torch.float64)
    row = torch.arange(size)
    matrix[row, lower] += 1 - weight
    matrix[row, (lower + 1).clamp(max=length - 1)] += weight  # beyond the last pixel it is repeated
    return matrix.to(like)


def as_colour(images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n 3 h w"]:
    """Levels 0..255 in floating point; grey is repeated in the three channels."""
    return images.float().expand(-1, 3, -1, -1)


def prepared(images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n 3 299 299"]:
    """What the network takes: (x - 128) / 128 of the resized levels."""
    return (resized_as_tensorflow(as_colour(images)) - 128) / 128


class Convolution(nn.Module):
    """Convolution without bias, batch normalisation with the stored statistics, ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, *, pad: bool = True
    ) -> None:
        super().__init__()
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (sides[0] // 2, sides[1] // 2) if pad else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, sides, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.bn(self.conv(x)))


def _averaged(x: Tensor) -> Tensor:
    return avg_pool2d(x, 3, 1, 1, count_include_pad=False)


class BlockA(nn.Module):
    """35 x 35: branches of 1 x 1, 5 x 5, twice 3 x 3, and pooling."""

    def __init__(self, inputs: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Convolution(inputs, 64, 1)
        self.branch5x5_1 = Convolution(inputs, 48, 1)
        self.branch5x5_2 = Convolution(48, 64, 5)
        self.branch3x3dbl_1 = Convolution(inputs, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3)
        self.branch3x3dbl_3 = Convolution(96, 96, 3)
        self.branch_pool = Convolution(inputs, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(_averaged(x))], 1)


class BlockB(nn.Module):
    """35 x 35 to 17 x 17."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3 = Convolution(inputs, 384, 3, 2, pad=False)
        self.branch3x3dbl_1 = Convolution(inputs, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3)
        self.branch3x3dbl_3 = Convolution(96, 96, 3, 2, pad=False)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, max_pool2d(x, 3, 2)], 1)


class BlockC(nn.Module):
    """17 x 17: 7 x 7 convolutions, each as a row and a column."""

    def __init__(self, inputs: int, inner: int) -> None:
        super().__init__()
        self.branch1x1 = Convolution(inputs, 192, 1)
        self.branch7x7_1 = Convolution(inputs, inner, 1)
        self.branch7x7_2 = Convolution(inner, inner, (1, 7))
        self.branch7x7_3 = Convolution(inner, 192, (7, 1))
        self.branch7x7dbl_1 = Convolution(inputs, inner, 1)
        self.branch7x7dbl_2 = Convolution(inner, inner, (7, 1))
        self.branch7x7dbl_3 = Convolution(inner, inner, (1, 7))
        self.branch7x7dbl_4 = Convolution(inner, inner, (7, 1))
        self.branch7x7dbl_5 = Convolution(inner, 192, (1, 7))
        self.branch_pool = Convolution(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), seven, double, self.branch_pool(_averaged(x))], 1)


class BlockD(nn.Module):
    """17 x 17 to 8 x 8."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3_1 = Convolution(inputs, 192, 1)
        self.branch3x3_2 = Convolution(192, 320, 3, 2, pad=False)
        self.branch7x7x3_1 = Convolution(inputs, 192, 1)
        self.branch7x7x3_2 = Convolution(192, 192, (1, 7))
        self.branch7x7x3_3 = Convolution(192, 192, (7, 1))
        self.branch7x7x3_4 = Convolution(192, 192, 3, 2, pad=False)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([three, seven, max_pool2d(x, 3, 2)], 1)


class BlockE(nn.Module):
    """8 x 8; the network's last block takes the maximum where the others take the mean."""

    def __init__(self, inputs: int, *, last: bool) -> None:
        super().__init__()
        self.last = last
        self.branch1x1 = Convolution(inputs, 320, 1)
        self.branch3x3_1 = Convolution(inputs, 384, 1)
        self.branch3x3_2a = Convolution(384, 384, (1, 3))
        self.branch3x3_2b = Convolution(384, 384, (3, 1))
        self.branch3x3dbl_1 = Convolution(inputs, 448, 1)
        self.branch3x3dbl_2 = Convolution(448, 384, 3)
        self.branch3x3dbl_3a = Convolution(384, 384, (1, 3))
        self.branch3x3dbl_3b = Convolution(384, 384, (3, 1))
        self.branch_pool = Convolution(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = max_pool2d(x, 3, 1, 1) if self.last else _averaged(x)
        parts = [self.branch3x3_2a(three), self.branch3x3_2b(three)]
        parts += [self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double)]
        return torch.cat([self.branch1x1(x), *parts, self.branch_pool(pooled)], 1)


class InceptionV3(nn.Module):
    """Prepared images (n, 3, 299, 299) -> features (n, 2048), the mean of the last block over its 8 x 8 places."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, 2, pad=False)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, pad=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, pad=False)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = BlockA(192, 32), BlockA(256, 64), BlockA(288, 64)
        self.Mixed_6a = BlockB(288)
        self.Mixed_6b, self.Mixed_6c = BlockC(768, 128), BlockC(768, 160)
        self.Mixed_6d, self.Mixed_6e = BlockC(768, 160), BlockC(768, 192)
        self.Mixed_7a = BlockD(768)
        self.Mixed_7b, self.Mixed_7c = BlockE(1280, last=False), BlockE(FEATURES, last=True)

    def forward(self, x: Float[Tensor, "n 3 299 299"]) -> Float[Tensor, "n 2048"]:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(max_pool2d(x, 3, 2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(max_pool2d(x, 3, 2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        return self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x))).mean((2, 3))
