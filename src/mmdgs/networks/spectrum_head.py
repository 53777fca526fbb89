"""A head of structured covariance: a U-Net for pixels' scales, a spectrum for every level.

    (inputs, level) -> log s and log v, (B, colours, H, W) each, in channels (linalg/spectral.py)

log v is a table over levels, equally far apart in log(sigma / alpha) and interpolated linearly. It
is trained with the rest, since the scales change the spectrum of what is left.
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
    """`size` (H, W) and `ends` (of sigma / alpha) are the table's, other options the U-Net's."""

    def __init__(
        self, channels: int = 6, outputs: int = 6, *, size: Sequence[int] = (32, 32),
        ends: Sequence[float] = (0.01, 50.0), knots: int = 24, width: int = 64,
        multipliers: Sequence[int] = (1, 2, 2), blocks: int = 1, attention: Sequence[int] = (2,),
        dropout: float = 0.0, conditional: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        low, high = ends
        placed = 0 < low <= high < math.inf and knots >= 1 and (knots == 1) == (low == high)
        if outputs % 2 or not placed:
            raise ValueError(
                "need an even number of outputs, and knots between two ends (one where these are "
                f"equal), got {outputs=}, {ends=}, {knots=}"
            )
        self.first, self.step = math.log(low), math.log(high / low) / max(1, knots - 1)
        self.scales = UNet(
            channels, outputs // 2, width=width, multipliers=multipliers, blocks=blocks,
            attention=attention, dropout=dropout, conditional=conditional, seed=seed,
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
        # Of the two knots around the place:
        weights = (1 - (place.clamp(0, len(table) - 1) - knots).abs()).clamp(min=0)
        return (weights[:, :, None, None, None] * table).sum(1)

    def forward(self, x: Tensor, level: NoiseLevel | NoiseLevels) -> Tensor:
        scales = self.scales(x, level) if self.scales.conditional else self.scales(x)
        scales = scales.to(self.log_variances.dtype).clamp(-LARGEST, LARGEST)
        size, own = tuple(scales.shape[2:]), tuple(self.log_variances.shape[2:])
        if size != own:
            raise ValueError(f"the spectrum is of images {own}, got {size}")
        return torch.cat([scales, self.spectrum(level).expand_as(scales)], 1)
