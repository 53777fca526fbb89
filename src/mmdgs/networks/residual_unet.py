"""A convolutional U-Net without norms or attention, for photographs of any size.

Residual blocks at each level of a pyramid, sums in place of concatenations (Zhang et al., 2021,
"Plug-and-play image restoration with deep denoiser prior"), and the noise level as a scale and a
shift inside each block. Nothing averages over the image, so a part of it is denoised as it would
be alone but for its margins. Sides that the pyramid cannot halve are padded by reflection inside.
Weights lie with channels last: on a CPU large images then take 0.7 to 0.8 of the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmdgs.networks.building import initialise
from mmdgs.networks.unet import LevelEmbedding
from mmdgs.noise import NoiseLevel, NoiseLevels

EMBEDDING = 32
"""Width of the level's embedding, a quarter of its numbers."""
SMALLEST = 16
"""Pixels a side: below, reflection has nothing to reflect."""


class Block(nn.Module):
    """h + conv(silu((1 + scale) conv(h) + shift)), scale and shift from the level's embedding."""

    def __init__(self, channels: int, embedding: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.level = nn.Linear(embedding, 2 * channels) if embedding else None
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, h: Tensor, embedding: Tensor | None) -> Tensor:
        return h + self.conv2(functional.silu(self._modulated(h, embedding)))

    def _modulated(self, h: Tensor, embedding: Tensor | None) -> Tensor:
        """(1 + scale) conv(h) + shift; where all rows have one level that is a convolution."""
        if self.level is None or embedding is None:
            return self.conv1(h)
        scale, shift = self.level(embedding).chunk(2, dim=1)
        if len(embedding) > 1:
            return self.conv1(h) * (1 + scale[..., None, None]) + shift[..., None, None]
        by, shift = 1 + scale[0], shift[0]
        weight = self.conv1.weight * by[:, None, None, None]
        return functional.conv2d(h, weight, self.conv1.bias * by + shift, padding=1)


class ResidualUNet(nn.Module):
    """x (B, channels, H, W) -> (B, outputs, H, W), as net(x), or net(x, level) if conditional.

    `widths` are the channels at full, half, quarter ... resolution, `blocks` how many residual
    blocks each has on the way down and again on the way up; the lowest has them once. What comes
    out at a place depends on x up to `reach` pixels from it.
    """

    smallest = SMALLEST

    def __init__(
        self, channels: int = 3, outputs: int | None = None, *,
        widths: Sequence[int] = (64, 128, 192, 256), blocks: Sequence[int] = (3, 3, 3, 2),
        conditional: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        outputs = channels if outputs is None else outputs
        if len(widths) != len(blocks) or not widths or min(channels, outputs, *widths, *blocks) < 1:
            raise ValueError(
                "need as many widths as blocks, and sizes of at least 1, got "
                f"{channels=}, {outputs=}, {widths=}, {blocks=}"
            )
        self.channels, self.conditional = channels, conditional
        self.multiple = 2 ** (len(widths) - 1)
        along = [2 * count * 2**i for i, count in enumerate(blocks)]  # pixels that blocks look
        self.reach = 2 + 2 * sum(along[:-1]) + along[-1] + self.multiple - 1
        embedding = 4 * EMBEDDING if conditional else 0

        def stage(width: int, count: int) -> nn.ModuleList:
            return nn.ModuleList(Block(width, embedding) for _ in range(count))

        with torch.device("meta"):
            self.embedding = LevelEmbedding(EMBEDDING) if conditional else None
            self.first = nn.Conv2d(channels, widths[0], 3, padding=1)
            self.down, self.up = nn.ModuleList(), nn.ModuleList()  # blocks, full size first
            self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
            for width, below, count in zip(widths, widths[1:], blocks, strict=False):
                self.down.append(stage(width, count))
                self.shrink.append(nn.Conv2d(4 * width, below, 1))
                self.grow.append(nn.Conv2d(below, 4 * width, 1))
                self.up.append(stage(width, count))
            self.lowest = stage(widths[-1], blocks[-1])
            self.last = nn.Conv2d(widths[0], outputs, 3, padding=1)
        ends = [module.conv2 for module in self.modules() if isinstance(module, Block)]
        initialise(self, seed, zero=[*ends, self.last])
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor, level: NoiseLevel | NoiseLevels | None = None) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.channels or min(x.shape[2:]) < SMALLEST:
            sizes = f"(B, {self.channels}, H, W) of at least {SMALLEST} x {SMALLEST} pixels"
            raise ValueError(f"expected images {sizes}, got {tuple(x.shape)}")
        if self.conditional and level is None:
            raise ValueError("this network is conditional: call it as net(x, level)")
        embedding = None
        if self.embedding is not None:
            embedding = self.embedding(x[:1] if isinstance(level, NoiseLevel) else x, level)
        height, width = x.shape[2:]
        margins = -width % self.multiple, -height % self.multiple
        if any(margins):
            x = functional.pad(x, (0, margins[0], 0, margins[1]), mode="reflect")
        h, skips = self.first(x), []
        for stage, shrink in zip(self.down, self.shrink, strict=True):
            h = _through(stage, h, embedding)
            skips.append(h)
            h = shrink(functional.pixel_unshuffle(h, 2))
        h = _through(self.lowest, h, embedding)
        for stage, grow in zip(reversed(self.up), reversed(self.grow), strict=True):
            h = skips.pop() + functional.pixel_shuffle(grow(h), 2)
            h = _through(stage, h, embedding)
        return self.last(h)[..., :height, :width]


def _through(blocks: nn.Module, h: Tensor, embedding: Tensor | None) -> Tensor:
    for block in blocks.children():
        h = block(h, embedding)
    return h
