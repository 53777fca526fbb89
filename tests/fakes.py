"""A tiny network in the place of Inception: six known features of an image, as a TorchScript file."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from mmdgs.metrics.inception import CLASSES, prepared
from mmdgs.metrics.inception_file import Standard, probe_image
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


def fake_known() -> Standard:
    """`Fake` as the standard network, with what it gives for the probe image."""
    values = Fake()(prepared(probe_image()))[0].tolist()
    return Standard(Fake, FEATURES, 1, tuple(values), 0.01)


def fake_script(file: Path, scale: float = 1.0, *, head: bool = False) -> Path:
    """The fake network as a TorchScript file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Fake(scale, head=head)).save(str(file))
    return file
