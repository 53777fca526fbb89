"""NCSNv2, a RefineNet (Song & Ermon, 2020, "Improved techniques for training score-based models").

    score(x_t) = body(2 x_t / alpha - 1) / sigma

The body does not know the noise level, so any level is served. Four stages of residual blocks (the
last two dilated) go down to half the resolution, four refine blocks come back up. Modules and
parameters carry the names of the public checkpoints. Any image size; x in [0, 1].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmdgs.networks.building import initialise
from mmdgs.noise import NoiseLevel, NoiseLevels

EPSILON = 1e-5  # inside both roots of the norm, as in the public code


def _conv(
    inputs: int, outputs: int, kernel: int = 3, dilation: int = 1, bias: bool = True
) -> nn.Conv2d:
    """A convolution that keeps the resolution."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation, bias=bias)


class InstanceNormPlus(nn.Module):
    """gamma (instance norm(x) + alpha m) + beta, m the channels' means standardised over channels.

    Written out: torch's goes through batch norm, whose backward pass cannot be batched.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha, self.gamma, self.beta = (nn.Parameter(torch.empty(channels)) for _ in range(3))
        self.reset()

    def reset(self) -> None:
        """Put out plain instance norm with the channels' means added."""
        with torch.no_grad():
            self.alpha.fill_(1)
            self.gamma.fill_(1)
            self.beta.zero_()

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        centred = x - means
        normed = centred * (centred.square().mean((2, 3), keepdim=True) + EPSILON).rsqrt()
        spread = means - means.mean(1, keepdim=True)
        variance = spread.square().sum(1, keepdim=True) / (x.shape[1] - 1)
        standardised = spread * (variance + EPSILON).rsqrt()
        alpha, gamma, beta = (p[:, None, None] for p in (self.alpha, self.gamma, self.beta))
        return gamma * (normed + alpha * standardised) + beta


class ConvMeanPool(nn.Module):
    """A convolution, then the mean over 2x2 pixels (at an odd edge over those that are there)."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3) -> None:
        super().__init__()
        self.conv = _conv(inputs, outputs, kernel)

    def forward(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(self.conv(x), 2, ceil_mode=True)


class DilatedBlock(nn.Module):
    """shortcut(x) + conv2(elu(norm(conv1(elu(norm(x)))))); `down` halves if not dilated."""

    def __init__(self, inputs: int, outputs: int, *, down: bool = False, dilation: int = 1) -> None:
        super().__init__()
        between = inputs if down else outputs
        self.normalize1 = InstanceNormPlus(inputs)
        self.conv1 = _conv(inputs, between, dilation=dilation)
        self.normalize2 = InstanceNormPlus(between)
        self.conv2: nn.Module
        self.shortcut: nn.Module | None = None
        if down and dilation == 1:
            self.conv2 = ConvMeanPool(between, outputs)
            self.shortcut = ConvMeanPool(inputs, outputs, 1)
        else:
            self.conv2 = _conv(between, outputs, dilation=dilation)
            if down or inputs != outputs:
                self.shortcut = _conv(inputs, outputs, 3 if dilation > 1 else 1, dilation)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(functional.elu(self.normalize1(x)))
        h = self.conv2(functional.elu(self.normalize2(h)))
        return h + (x if self.shortcut is None else self.shortcut(x))


class ResidualConvolutions(nn.ModuleDict):
    """Blocks of two stages (elu, 3x3 convolution without bias), each block added to its input."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.blocks = [(f"{i}_1_conv", f"{i}_2_conv") for i in range(1, blocks + 1)]
        for name in itertools.chain(*self.blocks):
            self[name] = _conv(channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.blocks:
            x = x + self[second](functional.elu(self[first](functional.elu(x))))
        return x


class Fusion(nn.Module):
    """A 3x3 convolution of each input, brought to the size of the first, and their sum."""

    def __init__(self, inputs: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(_conv(channels, outputs) for channels in inputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        first, *others = (conv(x) for conv, x in zip(self.convs, inputs, strict=True))
        size = first.shape[-2:]
        for h in others:
            if h.shape[-2:] != size:
                h = functional.interpolate(h, size=size, mode="bilinear", align_corners=True)
            first = first + h
        return first


class ChainedPooling(nn.Module):
    """Twice: a 5x5 maximum, a 3x3 convolution without bias, added to what was there."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(_conv(channels, channels, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = path = functional.elu(x)
        for conv in self.convs:
            path = conv(functional.max_pool2d(path, 5, stride=1, padding=2))
            x = x + path
        return x


class RefineBlock(nn.Module):
    """Adapt each input, fuse them at the first one's size, pool in a chain, adapt the output."""

    def __init__(self, inputs: Sequence[int], outputs: int, *, last: bool = False) -> None:
        super().__init__()
        self.adapt_convs = nn.ModuleList(ResidualConvolutions(channels, 2) for channels in inputs)
        self.msf = Fusion(inputs, outputs) if len(inputs) > 1 else None
        self.crp = ChainedPooling(outputs)
        self.output_convs = ResidualConvolutions(outputs, 3 if last else 1)

    def forward(self, *inputs: Tensor) -> Tensor:
        adapted = [adapt(x) for adapt, x in zip(self.adapt_convs, inputs, strict=True)]
        fused = adapted[0] if self.msf is None else self.msf(*adapted)
        return self.output_convs(self.crp(fused))


class NCSNv2(nn.Module):
    """The score at any level: net(x_t, level), x_t (B, channels, H, W) -> (B, outputs, H, W)."""

    def __init__(
        self, channels: int = 3, outputs: int | None = None, *, width: int = 128, seed: int = 0
    ) -> None:
        super().__init__()
        outputs = channels if outputs is None else outputs
        if min(channels, outputs) < 1 or width < 2:  # the norm standardises over channels
            sizes = f"{channels=}, {outputs=}, {width=}"
            raise ValueError(f"sizes must be at least 1, the width 2, got {sizes}")
        self.channels, wide = channels, 2 * width
        with torch.device("meta"):
            self.begin_conv = _conv(channels, width)
            self.res1 = nn.Sequential(DilatedBlock(width, width), DilatedBlock(width, width))
            first = DilatedBlock(width, wide, down=True)
            self.res2 = nn.Sequential(first, DilatedBlock(wide, wide))
            self.res3, self.res4 = (
                nn.Sequential(
                    DilatedBlock(wide, wide, down=True, dilation=dilation),
                    DilatedBlock(wide, wide, dilation=dilation),
                )
                for dilation in (2, 4)
            )
            self.refine1 = RefineBlock([wide], wide)
            self.refine2 = RefineBlock([wide, wide], wide)
            self.refine3 = RefineBlock([wide, wide], width)
            self.refine4 = RefineBlock([width, width], width, last=True)
            self.normalizer = InstanceNormPlus(width)
            self.end_conv = _conv(width, outputs)
        initialise(self, seed)
        for module in self.modules():
            if isinstance(module, InstanceNormPlus):
                module.reset()

    def body(self, x: Tensor) -> Tensor:
        """What the levels share, of images in [-1, 1]."""
        h1 = self.res1(self.begin_conv(x))
        h2 = self.res2(h1)
        h3 = self.res3(h2)
        h4 = self.res4(h3)
        h = self.refine4(h1, self.refine3(h2, self.refine2(h3, self.refine1(h4))))
        return self.end_conv(functional.elu(self.normalizer(h)))

    def forward(self, x: Tensor, level: NoiseLevel | NoiseLevels) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(f"expected images (B, {self.channels}, H, W), got {tuple(x.shape)}")
        return self.body(2 * x / level.alpha - 1) / level.sigma
