"""Pictures: images as a grid, as PNG."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.files import write_atomically

GAP = 2
BACKGROUND = 40  # a dark grey between the tiles
SCALE = 3
"""How wide a pixel of small images is drawn."""


def tiled(images: Tensor, columns: int, *, gap: int, fill: float) -> Tensor:
    """Images (n, C, H, W) as one picture (C, rows, columns) of tiles, with `fill` between them."""
    count, channels, height, width = images.shape
    rows = math.ceil(count / columns)
    shape = (channels, rows * (height + gap) - gap, columns * (width + gap) - gap)
    picture = torch.full(shape, fill, dtype=images.dtype)
    for i, image in enumerate(images):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        picture[:, top : top + height, left : left + width] = image
    return picture


def image_grid(x: Tensor, columns: int | None = None) -> numpy.ndarray:
    """Images (n, C, H, W) in [0, 1] as one uint8 picture (rows, columns[, 3]), about square."""
    if x.ndim != 4 or x.shape[1] not in (1, 3) or len(x) == 0:
        raise ValueError(f"need images (n, 1 or 3, height, width), got shape {tuple(x.shape)}")
    bytes_ = (x.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8)
    picture = tiled(bytes_, columns or math.ceil(math.sqrt(len(x))), gap=GAP, fill=BACKGROUND)
    framed = functional.pad(picture, [GAP] * 4, value=BACKGROUND)
    return (framed[0] if len(framed) == 1 else framed.permute(1, 2, 0)).numpy()


def png(picture: numpy.ndarray, scale: int = 1) -> bytes:
    """A uint8 picture as a PNG file, each pixel `scale` pixels wide."""
    from PIL import Image  # here: it would slow down every start

    image = Image.fromarray(picture)
    if scale > 1:
        image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    content = io.BytesIO()
    # On photographs it takes twice as long, for a few percent.
    image.save(content, format="PNG", optimize=image.width * image.height <= 1 << 17)
    return content.getvalue()


def jpeg(picture: numpy.ndarray, most: int, quality: int = 92) -> bytes:
    """A uint8 picture as a JPEG file, of at most so many pixels a side."""
    from PIL import Image

    image, content = Image.fromarray(picture), io.BytesIO()
    image.thumbnail((most, most), Image.Resampling.LANCZOS)
    image.save(content, format="JPEG", quality=quality, subsampling=0)
    return content.getvalue()


def save_grid(
    path: Path | str, x: Tensor, *, columns: int | None = None, scale: int = SCALE
) -> Path:
    """Write images (n, C, H, W) in [0, 1] as one PNG picture, each pixel `scale` pixels wide."""
    path = Path(path)
    write_atomically(path, png(image_grid(x, columns), scale))
    return path
