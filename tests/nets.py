"""Small networks, models and images for the tests of the image half."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from mmdgs.models import Model, ModelConfig
from mmdgs.networks import UNet, preset
from mmdgs.randomness import seeded

N = TypeVar("N", bound=nn.Module)


def lively(network: N, seed: int = 0) -> N:
    """A network with no weight at zero: a fresh U-Net puts out zeros, which would hide every mistake."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=0.3 / max(1, parameter[0].numel()) ** 0.5)
    return network


def tiny_unet(channels: int = 1, outputs: int | None = None, **options: object) -> UNet:
    """The preset unet-tiny, with every weight drawn."""
    return lively(UNet(channels, outputs, **{**preset("unet-tiny")[1], **options}))


def tiny_model(param: str = "energy", shape: tuple[int, ...] = (1, 8, 8), **changes: object) -> Model:
    """A model that answers in a millisecond: a tiny U-Net with every weight drawn."""
    network, options = preset("unet-tiny")
    keys = {"network": network, "options": options, "param": param, "shape": shape, "sigma": 0.5, **changes}
    model = Model(ModelConfig(**keys))
    lively(model.network)
    model.network.eval()
    return model


def random_images(n: int, shape: tuple[int, int, int] = (1, 8, 8), seed: int = 0) -> Tensor:
    """Stored images, uint8 (n, *shape)."""
    return torch.randint(0, 256, (n, *shape), generator=seeded(seed)).byte()
