"""The U-Net of the paper's image experiments: Ho et al. (2020), with the noise level as an option.

Images have any size: a level of the pyramid halves the resolution (rounding up), and the way up
brings each map to the size of the one it meets. By default it is the authors' network, 32.9 million
parameters at 3x32x32 without conditioning.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmdgs.derivatives import group_norm
from mmdgs.networks.building import initialise
from mmdgs.networks.dropout import RowDropout
from mmdgs.noise import NoiseLevel, NoiseLevels

GROUPS, CHANNELS_A_GROUP = 32, 4
FREQUENCIES = 64  # of the noise level's embedding: a period from 0.02 to 100 in log(sigma / alpha)
PERIODS = (0.02, 100.0)


class GroupNorm(nn.GroupNorm):
    """torch's group norm, written out where compiled, and on a GPU where weights are fixed.

    The compiler makes better kernels of it; torch's own has no forward-mode derivative in the
    channels-last layout (for training energies), and a second derivative that cannot be batched
    (for products with their Jacobian). Elsewhere torch's own is faster.
    """

    def forward(self, x: Tensor) -> Tensor:
        plain = self.weight.requires_grad or not x.is_cuda or not torch.is_grad_enabled()
        if plain and not torch.compiler.is_compiling():
            return super().forward(x)
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def _norm(channels: int) -> GroupNorm:
    """Group norm in 32 groups, or as many as leave four channels to a group."""
    most = max(1, min(GROUPS, channels // CHANNELS_A_GROUP))
    return GroupNorm(next(g for g in range(most, 0, -1) if channels % g == 0), channels)


class ResidualBlock(nn.Module):
    """x + conv(dropout(silu(norm(conv(silu(norm(x))) + embedding))))."""

    def __init__(
        self, inputs: int, outputs: int, embedding: int, dropout: float, layer: int
    ) -> None:
        super().__init__()
        self.norm1 = _norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.level = nn.Linear(embedding, outputs) if embedding else None
        self.norm2 = _norm(outputs)
        self.dropout = RowDropout(dropout, layer)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x)))
        if self.level is not None:
            h = h + self.level(embedding)[:, :, None, None]
        return self.shortcut(x) + self.conv2(self.dropout(functional.silu(self.norm2(h))))


class Attention(nn.Module):
    """x + self-attention over the pixels, one head.

    Written out: torch's fused kernel cannot be differentiated twice, as energies and covariances
    need. Products have the channels last, as a GPU's convolutions have them: nothing is moved.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).mT.chunk(3, dim=2)  # (B, pixels, C)
        weights = (q @ k.mT * q.shape[2] ** -0.5).softmax(dim=-1)
        return x + self.out((weights @ v).mT.reshape(x.shape))


class _Down(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        return self.conv(x)


class _Up(nn.Module):
    """Nearest-neighbour enlargement to the size of the next skip connection, and a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        (height, width), size = x.shape[-2:], like.shape[-2:]
        if torch.compiler.is_compiling() and size == (2 * height, 2 * width):
            # The same, but its derivative is a sum, not a scatter with atomics; (B, H, 2, W, 2, C).
            last = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(-1, -1, 2, -1, 2, -1)
            return self.conv(last.reshape(len(x), *size, -1).permute(0, 3, 1, 2))
        return self.conv(functional.interpolate(x, size=size, mode="nearest"))


class LevelEmbedding(nn.Module):
    """log(sigma / alpha), as sines and cosines through a small perceptron: (B, 4 width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second = nn.Linear(2 * FREQUENCIES, 4 * width), nn.Linear(4 * width, 4 * width)
        self.layers = nn.Sequential(first, nn.SiLU(), second)

    def forward(self, x: Tensor, level: NoiseLevel | NoiseLevels) -> Tensor:
        ratio = torch.as_tensor(level.sigma / level.alpha, dtype=torch.float32, device=x.device)
        position = ratio.log().reshape(-1, 1)
        ends = [2 * math.pi / period for period in PERIODS]
        exponents = torch.linspace(0, 1, FREQUENCIES, device=x.device)
        angles = position * (ends[0] * (ends[1] / ends[0]) ** exponents)
        features = torch.cat([angles.sin(), angles.cos()], dim=1).to(x.dtype)
        return functional.silu(self.layers(features)).expand(len(x), -1)


class UNet(nn.Module):
    """x (B, channels, H, W) -> (B, outputs, H, W), as net(x), or net(x, level) if conditional.

    `attention` lists the levels of the pyramid (0: full resolution, 1: half ...) with
    self-attention; the middle has one more. The last layer and the ends of all branches start at 0.
    """

    def __init__(
        self, channels: int = 3, outputs: int | None = None, *, width: int = 128,
        multipliers: Sequence[int] = (1, 2, 2, 2), blocks: int = 2, attention: Sequence[int] = (1,),
        dropout: float = 0.1, conditional: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        outputs = channels if outputs is None else outputs
        if min(channels, outputs, width, blocks, *multipliers) < 1 or not multipliers:
            sizes = f"{channels=}, {outputs=}, {width=}, {blocks=}, {multipliers=}"
            raise ValueError(f"sizes must be at least 1, got {sizes}")
        lowest = len(multipliers) - 1
        if any(not 0 <= level <= lowest for level in attention):
            raise ValueError(f"attention must name levels from 0 to {lowest}, got {attention}")
        self.channels, self.conditional = channels, conditional
        embedding = 4 * width if conditional else 0
        layers = itertools.count()

        def block(inputs: int, outputs: int) -> ResidualBlock:
            return ResidualBlock(inputs, outputs, embedding, dropout, next(layers))

        with torch.device("meta"):
            self.embedding = LevelEmbedding(width) if conditional else None
            self.first = nn.Conv2d(channels, width, 3, padding=1)
            self.down, self.up = nn.ModuleList(), nn.ModuleList()
            now, skips = width, [width]
            for level, multiplier in enumerate(multipliers):
                for _ in range(blocks):
                    stage: list[nn.Module] = [block(now, width * multiplier)]
                    now = width * multiplier
                    stage += [Attention(now)] if level in attention else []
                    self.down.append(nn.ModuleList(stage))
                    skips.append(now)
                if level < lowest:
                    self.down.append(nn.ModuleList([_Down(now)]))
                    skips.append(now)
            self.middle = nn.ModuleList([block(now, now), Attention(now), block(now, now)])
            for level, multiplier in reversed(list(enumerate(multipliers))):
                for i in range(blocks + 1):
                    up: dict[str, nn.Module] = {}
                    if i == 0 and level < lowest:
                        up["up"] = _Up(now)
                    up["block"] = block(now + skips.pop(), width * multiplier)
                    now = width * multiplier
                    up |= {"attention": Attention(now)} if level in attention else {}
                    self.up.append(nn.ModuleDict(up))
            self.last = nn.Sequential(_norm(now), nn.SiLU(), nn.Conv2d(now, outputs, 3, padding=1))
        ends = [m.conv2 for m in self.modules() if isinstance(m, ResidualBlock)]
        ends += [m.out for m in self.modules() if isinstance(m, Attention)]
        initialise(self, seed, zero=[*ends, self.last[-1]])

    def forward(self, x: Tensor, level: NoiseLevel | NoiseLevels | None = None) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(f"expected images (B, {self.channels}, H, W), got {tuple(x.shape)}")
        if self.conditional and level is None:
            raise ValueError("this network is conditional: call it as net(x, level)")
        embedding = None if self.embedding is None else self.embedding(x, level)
        h = self.first(x)
        skips = [h]
        for stage in self.down:
            for layer in stage.children():
                h = layer(h, embedding)
            skips.append(h)
        for layer in self.middle:
            h = layer(h, embedding)
        for stage in self.up:
            assert isinstance(stage, nn.ModuleDict)
            skip = skips.pop()
            if "up" in stage:
                h = stage["up"](h, skip)
            h = stage["block"](torch.cat([h, skip], dim=1), embedding)
            if "attention" in stage:
                h = stage["attention"](h, embedding)
        return self.last(h)
