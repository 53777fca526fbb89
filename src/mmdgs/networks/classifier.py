"""A small convolutional classifier of images, whose features serve as yardstick for samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmdgs.networks.dropout import RowDropout
from mmdgs.networks.initial import initialise

SMALLEST = 12
"""Pixels on a side that leave something after two poolings and a convolution."""


class ConvClassifier(nn.Module):
    """x (B, channels, H, W) in [0, 1) -> logits (B, classes); `features(x)` gives the last hidden layer (B, features).

    Three convolutions with pooling after the first two, a mean over what is left of the image, one hidden layer.
    """

    def __init__(
        self, channels: int, outputs: int, *, width: int = 32, features: int = 64, dropout: float = 0.2, seed: int = 0
    ) -> None:
        super().__init__()
        if min(channels, outputs, width, features) < 1:
            raise ValueError(f"sizes must be at least 1, got {channels=}, {outputs=}, {width=}, {features=}")
        with torch.device("meta"):
            self.body = nn.Sequential(
                nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(2 * width, 4 * width, 3), nn.GroupNorm(4, 4 * width), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
                nn.Flatten(), nn.Linear(16 * width, features), nn.ReLU(),
            )  # fmt: skip
            self.head = nn.Sequential(RowDropout(dropout, 0), nn.Linear(features, outputs))
        initialise(self, seed)

    def features(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or min(x.shape[2:]) < SMALLEST:
            size = "x".join(map(str, x.shape[2:])) or f"shape {tuple(x.shape)}"
            raise ValueError(f"the classifier takes images of at least {SMALLEST}x{SMALLEST} pixels, got {size}")
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
