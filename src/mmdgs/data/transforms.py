"""From stored images to what networks see, and back, on the device of the images.

A stored level k in 0..255 stands for the interval [k / 256, (k + 1) / 256): `dequantised` draws a
point of it, `midpoints` takes its middle, `to_uint8` finds the interval of a point.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from mmdgs.errors import UsageError
from mmdgs.randomness import Generator, signs, uniforms

LEVELS = 256
STEPS = 1 << 16
"""Places within a level: 8 bits and these 16 fill float32's 24, so 255 + u never rounds to 256."""
LUMA = (19595, 38470, 7471)
"""ITU-R 601-2 weights of red, green and blue in 65536ths, as Pillow has them."""
BLOCK = 1024
"""Images resized at a time, which bounds the memory."""


def dequantised(images: UInt8[Tensor, "n c h w"], generator: Generator) -> Float[Tensor, "n c h w"]:
    """(x + u) / 256 in [0, 1), float32, with u uniform in [0, 1)."""
    _check_stored(images)
    like = torch.empty(0, dtype=torch.float32, device=images.device)
    u = uniforms(images.shape, like, generator).mul(STEPS).floor().div(STEPS)
    return (u + images) / LEVELS


def midpoints(images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    """(x + 1/2) / 256, float32: `dequantised` without randomness."""
    _check_stored(images)
    return (images.float() + 0.5) / LEVELS


def to_uint8(x: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """floor(256 x), clamped to 0..255: the level that a point of [0, 1) lies in."""
    if not x.is_floating_point():
        raise UsageError(f"x must be floating point, got {x.dtype}")
    return (LEVELS * x).floor().clamp(0, LEVELS - 1).to(torch.uint8)


def flipped(images: Shaped[Tensor, "n c h w"], generator: Generator) -> Shaped[Tensor, "n c h w"]:
    """Each image mirrored left to right with probability 1/2."""
    like = torch.empty(0, dtype=torch.float32, device=images.device)
    mirror = signs((len(images),), like, generator) > 0
    return torch.where(mirror[:, None, None, None], images.flip(-1), images)


def resized(
    images: UInt8[Tensor, "n c h w"], size: int | tuple[int, int]
) -> UInt8[Tensor, "n c new_h new_w"]:
    """Stored images resized to size x size, or to a height and width: bicubic, antialiased."""
    sides = (size, size) if isinstance(size, int) else size
    if tuple(images.shape[-2:]) == sides:
        return images
    out = images.new_empty(*images.shape[:2], *sides)
    for start in range(0, len(images), BLOCK):
        x = images[start : start + BLOCK].float()
        x = interpolate(x, sides, mode="bicubic", antialias=True)
        out[start : start + BLOCK] = x.round().clamp(0, LEVELS - 1).to(torch.uint8)
    return out


def crops(images: Sequence[Tensor], side: int, count: int, generator: Generator) -> Tensor:
    """Square parts (count, C, side, side) at random places of images (C, H, W), as many of each."""
    corners = uniforms((count, 2), torch.empty(0), generator)
    parts = []
    for i, corner in enumerate(corners):
        image = images[i * len(images) // count]
        free = torch.tensor(image.shape[1:]) - side
        top, left = torch.minimum((corner * (free + 1)).long(), free).tolist()
        parts.append(image[:, top : top + side, left : left + side])
    return torch.stack(parts)


def recoloured(images: UInt8[Tensor, "n c h w"], channels: int) -> UInt8[Tensor, "n channels h w"]:
    """Stored images with 1 channel (the luma) or 3 (grey repeated)."""
    if images.shape[1] == channels:
        return images
    if channels == 3:
        return images.expand(-1, 3, -1, -1).contiguous()
    red, green, blue = (weight * images[:, i : i + 1].int() for i, weight in enumerate(LUMA))
    return ((red + green + blue + (1 << 15)) >> 16).to(torch.uint8)


def _check_stored(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise UsageError(f"images must be a uint8 tensor of levels 0 to 255, got {got}")
