"""A head of structured covariance: a U-Net for the scales of pixels, and beside it a spectrum for every noise level.

    (inputs, level) -> log s and log v, (B, colours, H, W) each, along channels        (linalg/modulated.py)

log v is a table over levels, equally far apart in log(sigma / alpha) and interpolated linearly between them. It is
trained with the rest: with the places of large errors told apart, the spectrum of what is left is another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmdgs.networks.unet import UNet
from mmdgs.noise import NoiseLevel, NoiseLevels

LARGEST = 8.0
"""Of |log s|: what keeps a wild network finite."""


class SpectrumHead(nn.Module):
    """`size` (H, W) and `ends` (the smallest and largest sigma / alpha) belong to the table, the rest to the U-Net."""

    def __init__(
        self,
        channels: int = 6,
        outputs: int = 6,
        *,
        size: Sequence[int] = (32, 32),
        ends: Sequence[float] = (0.01, 50.0),
        knots: int = 24,
        width: int = 64,
        multipliers: Sequence[int] = (1, 2, 2),
        blocks: int = 1,
        attention: Sequence[int] = (2,),
        dropout: float = 0.0,
        conditional: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        low, high = ends
        if outputs % 2 or not 0 < low <= high < math.inf or knots < 1 or (knots == 1) != (low == high):
            raise ValueError(
                f"need an even number of outputs, and knots between two ends (one where these are equal), got "
                f"{outputs=}, {ends=}, {knots=}"
            )
        self.first, self.step = math.log(low), math.log(high / low) / max(1, knots - 1)
        self.scales = UNet(
            channels, outputs // 2, width=width, multipliers=multipliers, blocks=blocks, attention=attention,
            dropout=dropout, conditional=conditional, seed=seed,
        )  # fmt: skip
        self.log_variances = nn.Parameter(torch.zeros(knots, outputs // 2, *size))

    @property
    def ratios(self) -> list[float]:
        """sigma / alpha of the table's levels."""
        return [math.exp(self.first + self.step * k) for k in range(len(self.log_variances))]

    def spectrum(self, level: NoiseLevel | NoiseLevels) -> Tensor:
        """log v at a level, or at a level for each row: (1 or B, colours, H, W)."""
        table = self.log_variances
        ratio = torch.as_tensor(level.sigma / level.alpha, dtype=table.dtype, device=table.device)
        place = (ratio.log().reshape(-1, 1) - self.first) / (self.step or 1.0)
        knots = torch.arange(len(table), dtype=table.dtype, device=table.device)
        weights = (1 - (place.clamp(0, len(table) - 1) - knots).abs()).clamp(min=0)  # of the two knots around it
        return (weights[:, :, None, None, None] * table).sum(1)

    def forward(self, x: Tensor, level: NoiseLevel | NoiseLevels) -> Tensor:
        scales = self.scales(x, level) if self.scales.conditional else self.scales(x)
        scales = scales.to(self.log_variances.dtype).clamp(-LARGEST, LARGEST)
        if scales.shape[2:] != self.log_variances.shape[2:]:
            raise ValueError(
                f"the spectrum is of images {tuple(self.log_variances.shape[2:])}, got {tuple(scales.shape[2:])}"
            )
        return torch.cat([scales, self.spectrum(level).expand_as(scales)], 1)
