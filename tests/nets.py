"""Small networks, models, images and pipelines for the tests of the image half."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn

from mmdgs.models import Model, ModelConfig
from mmdgs.networks import UNet, preset
from mmdgs.randomness import seeded

N = TypeVar("N", bound=nn.Module)


def lively(network: N, seed: int = 0) -> N:
    """A network with no weight at zero: a fresh U-Net puts out zeros, which would hide every
    mistake.
    """
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=0.3 / max(1, parameter[0].numel()) ** 0.5)
    return network


def tiny_unet(channels: int = 1, outputs: int | None = None, **options: object) -> UNet:
    """The preset unet-tiny, with every weight drawn."""
    return lively(UNet(channels, outputs, **{**preset("unet-tiny")[1], **options}))


def tiny_model(
    param: str = "energy", shape: tuple[int, ...] = (1, 8, 8), **changes: object
) -> Model:
    """A model that answers in a millisecond: a tiny U-Net with every weight drawn."""
    network, options = preset("unet-tiny")
    keys = {
        "network": network,
        "options": options,
        "param": param,
        "shape": shape,
        "sigma": 0.5,
        **changes,
    }
    model = Model.build(ModelConfig(**keys))
    lively(model.network)
    model.network.eval()
    return model


def random_images(n: int, shape: tuple[int, int, int] = (1, 8, 8), seed: int = 0) -> Tensor:
    """Stored images, uint8 (n, *shape)."""
    return torch.randint(0, 256, (n, *shape), generator=seeded(seed)).byte()


def save_pictures(folder: Path, images: Iterable[Tensor], names: Iterable[str] = ()) -> Path:
    """PNG files of images, uint8 (C, H, W), by number or by these names, folders and all."""
    for name, image in zip(names or (f"{i:03}" for i in count()), images, strict=False):
        file = folder / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
        Image.fromarray(pixels.numpy()).save(file)
    return folder


def tiny_diffusers_unet(**changes: object) -> Any:
    """A UNet2DModel of diffusers on 1x8x8 images, with attention and every weight drawn."""
    from diffusers import UNet2DModel  # takes seconds to import

    keys = {
        "sample_size": 8,
        "in_channels": 1,
        "out_channels": 1,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 4,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return lively(UNet2DModel(**{**keys, **changes})).eval()


def tiny_pipeline(scheduler: Any = None, **changes: object) -> Any:
    """A DDPMPipeline with a tiny network, silent."""
    from diffusers import DDPMPipeline, DDPMScheduler

    pipe = DDPMPipeline(
        tiny_diffusers_unet(**changes), DDPMScheduler() if scheduler is None else scheduler
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
