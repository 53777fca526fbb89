"""Pictures: images as a grid, as PNG."""

from __future__ import annotations

import io
import math

import numpy
import torch
from PIL import Image
from torch import Tensor

GAP = 2
BACKGROUND = 40  # a dark grey between the tiles


def image_grid(x: Tensor, columns: int | None = None) -> numpy.ndarray:
    """Images (n, C, H, W) in [0, 1] as one uint8 picture (rows, columns[, 3]), as square as can be."""
    if x.ndim != 4 or x.shape[1] not in (1, 3) or len(x) == 0:
        raise ValueError(f"need images (n, 1 or 3, height, width), got shape {tuple(x.shape)}")
    count, channels, height, width = x.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    tiles = (x.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8)
    picture = torch.full((channels, rows * (height + GAP) + GAP, columns * (width + GAP) + GAP), BACKGROUND).byte()
    for i, tile in enumerate(tiles):
        top, left = GAP + (i // columns) * (height + GAP), GAP + (i % columns) * (width + GAP)
        picture[:, top : top + height, left : left + width] = tile
    return (picture[0] if channels == 1 else picture.permute(1, 2, 0)).numpy()


def png(picture: numpy.ndarray, scale: int = 1) -> bytes:
    """A uint8 picture as a PNG file, each pixel `scale` pixels wide."""
    image = Image.fromarray(picture)
    if scale > 1:
        image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    content = io.BytesIO()
    image.save(content, format="PNG", optimize=True)
    return content.getvalue()
