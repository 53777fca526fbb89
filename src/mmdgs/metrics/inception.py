"""Inception v3 as image metrics use it (Szegedy et al., 2016): TensorFlow's of 5 December 2015.

It differs from the Inception v3 of other libraries in its weights and 1,008 classes, in average
pooling that leaves padding out, and in the maximum pooling of its last block. Modules are named as
in the public state dict. Images are prepared as TensorFlow 1 did it, as in papers: see `prepared`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d, relu

SIZE, FEATURES, CLASSES = 299, 2048, 1008
RESIZE = "bilinear to 299 x 299, aligned as TensorFlow 1 does"
"""How images are brought to the network's size, in the words of a record."""


def resized_as_tensorflow(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c 299 299"]:
    """Bilinear, pixel i of the result at i h / 299 of the image: the first pixels coincide."""
    if tuple(x.shape[-2:]) == (SIZE, SIZE):
        return x
    rows, columns = (_interpolation(length, x) for length in x.shape[-2:])
    return rows @ x @ columns.mT


def _interpolation(length: int, like: Tensor) -> Tensor:
    """The matrix (299, length) that interpolates linearly along one side."""
    place = torch.arange(SIZE, dtype=torch.float64) * (length / SIZE)
    lower = place.floor().long().clamp(max=length - 1)
    weight = place - lower
    matrix = torch.zeros(SIZE, length, dtype=torch.float64)
    row = torch.arange(SIZE)
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

    def __init__(self, inputs: int, outputs: int, kernel: Any, stride: int = 1, pad: bool = True):
        super().__init__()
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (sides[0] // 2, sides[1] // 2) if pad else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, sides, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.bn(self.conv(x)))


Layer = tuple[str, int, Any]
"""The name of a convolution, its channels out and its kernel."""


class Block(nn.Module):
    """Branches side by side and one that pools; without channels for it the block halves the side.

    A branch is a chain of layers; a list at its end forks it.
    """

    def __init__(
        self, inputs: int, branches: list[list[Any]], pooled: int = 0, last: bool = False
    ) -> None:
        super().__init__()
        self.chains: list[list[list[str]]] = []
        self.last, self.halves = last, pooled == 0
        for branch in branches:
            channels = inputs
            self.chains.append([])
            for i, step in enumerate(branch):
                fork: list[Layer] = step if isinstance(step, list) else [step]
                down = (2, False) if self.halves and i + 1 == len(branch) else (1, True)
                for name, outputs, kernel in fork:
                    setattr(self, name, Convolution(channels, outputs, kernel, *down))
                self.chains[-1].append([layer[0] for layer in fork])
                channels = fork[0][1]
        if pooled:
            self.branch_pool = Convolution(inputs, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for chain in self.chains:
            outputs = [x]
            for names in chain:
                outputs = [getattr(self, name)(outputs[0]) for name in names]
            parts += outputs
        if self.halves:
            return torch.cat([*parts, max_pool2d(x, 3, 2)], 1)
        if self.last:
            return torch.cat([*parts, self.branch_pool(max_pool2d(x, 3, 1, 1))], 1)
        averaged = avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        return torch.cat([*parts, self.branch_pool(averaged)], 1)


def _double(*layers: tuple[int, Any]) -> list[Layer]:
    return [(f"branch3x3dbl_{i + 1}", *layer) for i, layer in enumerate(layers)]


def _35x35(inputs: int, pooled: int) -> Block:
    five: list[Any] = [("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)]
    double = _double((64, 1), (96, 3), (96, 3))
    return Block(inputs, [[("branch1x1", 64, 1)], five, double], pooled)


def _17x17(inputs: int, inner: int) -> Block:
    """7 x 7 convolutions, each as a row and a column."""
    row, column = (1, 7), (7, 1)
    seven = [(inner, 1), (inner, row), (192, column)]
    double = [(inner, 1), (inner, column), (inner, row), (inner, column), (192, row)]
    branches: list[list[Any]] = [[("branch1x1", 192, 1)]]
    for name, layers in (("branch7x7", seven), ("branch7x7dbl", double)):
        branches.append([(f"{name}_{i + 1}", *layer) for i, layer in enumerate(layers)])
    return Block(inputs, branches, 192)


def _8x8(inputs: int, *, last: bool) -> Block:
    """The network's last block takes the maximum where the others take the mean."""
    fork = [("branch3x3_2a", 384, (1, 3)), ("branch3x3_2b", 384, (3, 1))]
    double_fork = [("branch3x3dbl_3a", 384, (1, 3)), ("branch3x3dbl_3b", 384, (3, 1))]
    double: list[Any] = [*_double((448, 1), (384, 3)), double_fork]
    three: list[Any] = [("branch3x3_1", 384, 1), fork]
    return Block(inputs, [[("branch1x1", 320, 1)], three, double], 192, last)


class InceptionV3(nn.Module):
    """Prepared images (n, 3, 299, 299) -> features (n, 2048): the last block's mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, 2, pad=False)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, pad=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, pad=False)
        self.Mixed_5b, self.Mixed_5c = _35x35(192, 32), _35x35(256, 64)
        self.Mixed_5d = _35x35(288, 64)
        self.Mixed_6a = Block(288, [[("branch3x3", 384, 3)], _double((64, 1), (96, 3), (96, 3))])
        self.Mixed_6b, self.Mixed_6c = _17x17(768, 128), _17x17(768, 160)
        self.Mixed_6d, self.Mixed_6e = _17x17(768, 160), _17x17(768, 192)
        seven = [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)]
        named: list[Any] = [(f"branch7x7x3_{i + 1}", *layer) for i, layer in enumerate(seven)]
        self.Mixed_7a = Block(768, [[("branch3x3_1", 192, 1), ("branch3x3_2", 320, 3)], named])
        self.Mixed_7b, self.Mixed_7c = _8x8(1280, last=False), _8x8(FEATURES, last=True)

    def forward(self, x: Float[Tensor, "n 3 299 299"]) -> Float[Tensor, "n 2048"]:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(max_pool2d(x, 3, 2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(max_pool2d(x, 3, 2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        return self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x))).mean((2, 3))
