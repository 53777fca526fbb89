"""A small convolutional classifier of images, whose features serve as yardstick for samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmdgs.networks.building import initialise
from mmdgs.networks.dropout import RowDropout

SMALLEST = 12
"""Pixels on a side that leave something after two poolings and a convolution."""


class ConvClassifier(nn.Module):
    """x (B, channels, H, W) in [0, 1) -> logits (B, classes).

    Three convolutions with pooling after the first two, a mean over what is left of the image, one
    hidden layer, which `features(x)` (B, features) returns.
    """

    def __init__(
        self, channels: int, outputs: int, *, width: int = 32, features: int = 64,
        dropout: float = 0.2, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        if min(channels, outputs, width, features) < 1:
            sizes = f"{channels=}, {outputs=}, {width=}, {features=}"
            raise ValueError(f"sizes must be at least 1, got {sizes}")
        with torch.device("meta"):
            layers: list[nn.Module] = []
            for inputs, wide, padding in ((channels, 1, 1), (width, 2, 1), (2 * width, 4, 0)):
                layers += [nn.Conv2d(inputs, wide * width, 3, padding=padding)]
                layers += [nn.GroupNorm(4, wide * width), nn.ReLU()]
                layers += [nn.AdaptiveAvgPool2d(2) if wide == 4 else nn.MaxPool2d(2)]
            layers += [nn.Flatten(), nn.Linear(16 * width, features), nn.ReLU()]
            self.body = nn.Sequential(*layers)
            self.head = nn.Sequential(RowDropout(dropout, 0), nn.Linear(features, outputs))
        initialise(self, seed)

    def features(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or min(x.shape[2:]) < SMALLEST:
            got = f"expected images of at least {SMALLEST}x{SMALLEST} pixels, got {tuple(x.shape)}"
            raise ValueError(f"the classifier: {got}")
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
