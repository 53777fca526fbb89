"""From the bytes of an image file to an array of one shape: crop, resize, grey or colour."""

from __future__ import annotations

import io
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmdgs.reading import IMAGE_FORMATS

if TYPE_CHECKING:
    from PIL import Image

LARGE = 1 << 22
"""Pixels above which images are decoded one at a time, and not side by side: each may take gigabytes."""
GREY = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N")


_one_at_a_time = threading.Lock()


class Unreadable(Exception):  # noqa: N818  a finding, which the reader of a set turns into an error or a warning
    """A file that does not hold an image that can be used; the text says why."""


@dataclass(frozen=True)
class Fit:
    """What images are brought to.

    `size` is the side of the square they are resized to, after the centre was cropped to a square: the largest
    there is, or one of side `crop`. Without a size images stay as they are. `channels` is 1 (grey) or 3 (RGB);
    without it an image keeps its own kind.
    """

    size: int | None = None
    channels: int | None = None
    crop: int | None = None


def decode(content: bytes, fit: Fit) -> np.ndarray:
    """The image in these bytes, uint8 (channels, height, width); the first one of an animation."""
    from PIL import Image, ImageOps, UnidentifiedImageError  # here: it would slow down every start

    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            _refuse_bombs(image)
            with _one_at_a_time if image.width * image.height > LARGE else nullcontext():
                picture = _fitted(ImageOps.exif_transpose(image), fit)
    except Unreadable:
        raise
    except UnidentifiedImageError as error:
        raise Unreadable(f"not an image of the formats {', '.join(IMAGE_FORMATS)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Unreadable(f"a decompression bomb? {error}") from error
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise Unreadable(str(error) or type(error).__name__) from error
    pixels = np.asarray(picture)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _refuse_bombs(image: Image.Image) -> None:
    from PIL import Image

    # Pillow only warns up to twice its limit. Asking here, and not through a warning filter, holds in every thread.
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels, more than the limit of {limit:,}")


def _fitted(image: Image.Image, fit: Fit) -> Image.Image:
    from PIL import Image

    image = _eight_bits(image)
    grey = image.mode in GREY if fit.channels is None else fit.channels == 1
    if image.has_transparency_data:  # colours under transparency are arbitrary: show white instead
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if grey else "RGB")
    if fit.size is None:
        return image
    image = image.crop(_centre(image.size, fit.crop))
    return image.resize((fit.size, fit.size), Image.Resampling.LANCZOS)


def _eight_bits(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Unreadable("its pixels are 32-bit numbers; expected 8 or 16 bits a channel")
    return image


def _centre(size: tuple[int, int], crop: int | None) -> tuple[int, int, int, int]:
    """The box of a centred square."""
    width, height = size
    side = min(size) if crop is None else crop
    if side > min(size):
        raise Unreadable(f"it has {width} x {height} pixels; expected at least {side} x {side}")
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side
