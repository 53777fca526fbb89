"""A tiny TorchScript network in the place of Inception: six known features of an image."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from mmdgs.metrics.inception import CLASSES, prepared
from mmdgs.metrics.inception_file import KnownOutput, probe_image
from mmdgs.randomness import seeded

FEATURES = 6


class Fake(nn.Module):
    """Mean of each channel and of its square, of prepared images."""

    def __init__(self, scale: float = 1.0, *, head: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        if head:
            self.register_buffer("output", torch.randn(CLASSES, FEATURES, generator=seeded(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.cat([x.mean((2, 3)), x.square().mean((2, 3))], 1)


class RawFake(Fake):
    """The same of levels 0..255, which it prepares by itself."""

    def forward(self, x: Tensor, return_features: bool = False) -> Tensor:
        rows = torch.floor(torch.arange(299) * (x.shape[2] / 299)).long()
        columns = torch.floor(torch.arange(299) * (x.shape[3] / 299)).long()
        above, left = torch.clamp(rows + 1, max=x.shape[2] - 1), torch.clamp(columns + 1, max=x.shape[3] - 1)
        u = (torch.arange(299) * (x.shape[2] / 299) - rows)[:, None]
        v = torch.arange(299) * (x.shape[3] / 299) - columns
        x = (1 - u) * x[:, :, rows] + u * x[:, :, above]
        x = (1 - v) * x[:, :, :, columns] + v * x[:, :, :, left]
        x = (x - 128) / 128
        found = self.scale * torch.cat([x.mean((2, 3)), x.square().mean((2, 3))], 1)
        return found if return_features else found.sum(1)


def fake_known() -> KnownOutput:
    """What `Fake` gives for the probe image."""
    values = Fake()(prepared(probe_image()))[0].tolist()
    return KnownOutput(FEATURES, 1, tuple(values), 0.01)


def fake_script(file: Path, scale: float = 1.0, *, raw: bool = False, head: bool = False) -> Path:
    """The fake network as a TorchScript file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(RawFake(scale) if raw else Fake(scale, head=head)).save(str(file))
    return file
