"""From the bytes of an image file to an array of one shape: crop, resize, grey or colour."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdgs.reading import IMAGE_FORMATS

if TYPE_CHECKING:
    from PIL import Image

LARGE = 1 << 22
"""Pixels above which images are decoded one at a time: each may take gigabytes."""
GREY = ("1", "L", "LA", "La")
BITS_PER_SAMPLE, PHOTOMETRIC = 258, 262
"""Tags of TIFF."""
OTHER_ORDER = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
"""The ends of Pillow's names for 16 bits a channel, such as "RGB;16B": their byte orders."""
TRANSPARENT = "it is transparent in places, and was laid over white"
NPY = "save its values as a floating-point .npy, of white at 1, instead"

logger = logging.getLogger("mmdgs")

_one_at_a_time = threading.Lock()


class Unreadable(Exception):  # noqa: N818  the reader of a set turns it into an error or a warning
    """A file that does not hold an image that can be used; the text says why."""


@dataclass(frozen=True)
class Fit:
    """What images are brought to.

    `size` is the side they are resized to, after a crop to the largest centred square, or one of
    side `crop`. `channels` is 1 (grey) or 3 (RGB). None leaves them as they are.
    """

    size: int | None = None
    channels: int | None = None
    crop: int | None = None


@dataclass(frozen=True)
class Decoded:
    """Pixels (C, H, W), uint8 as stored or float32 in [0, 1], and remarks by kind.

    `bits` are those of a level; None where values are no levels, or were mixed with white.
    """

    pixels: np.ndarray
    remarks: dict[str, str] = field(default_factory=dict)
    bits: int | None = None


def decode(content: bytes, fit: Fit) -> Decoded:
    """The image in these bytes, in 8 bits a channel; the first one of an animation."""
    from PIL import Image, ImageOps

    with _opened(content) as image:
        several = _several(image)
        if _is_deep(image):
            full, remarks = _in_units(image, content)
            remarks["reduced"] = "its 16 or 32 bits a channel were reduced to 8"
            levels = (full * 256).clip(0, 255).astype(np.uint8)
            picture = Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels)
        else:
            picture, remarks = ImageOps.exif_transpose(image), {}
            if _is_transparent(picture):
                remarks["transparent"] = TRANSPARENT
        pixels = np.asarray(_fitted(picture, fit))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return Decoded(pixels, remarks | several)


def decode_deep(
    content: bytes,
    fit: Fit = Fit(),  # noqa: B008  it is frozen
    most: int | None = None,
) -> Decoded:
    """The image in these bytes at full depth, float32 in [0, 1], grey or in colour as stored.

    One of more than `most` pixels is refused before it is decoded.
    A level k of b bits stands for (k + 1/2) / 2^b, with b the container's. Floating-point pixels
    must lie in [0, 1]. What is transparent is laid over white.
    """
    from PIL import Image

    with _opened(content, most) as image:
        several = _several(image)
        bits = None if image.mode == "F" else _bits(image) if _is_deep(image) else 8
        full, remarks = _in_units(image, content)
        planes = [np.ascontiguousarray(plane) for plane in full.transpose(2, 0, 1)]
        if fit.size is not None:
            box, size = _centre((full.shape[1], full.shape[0]), fit.crop), (fit.size, fit.size)
            cut = [Image.fromarray(plane).crop(box) for plane in planes]
            small = [np.asarray(plane.resize(size, Image.Resampling.LANCZOS)) for plane in cut]
            planes = [plane.clip(0, 1) for plane in small]  # it overshoots at edges
    bits = None if "transparent" in remarks else bits
    return Decoded(np.stack(planes), remarks | several, bits)


def is_deep(content: bytes) -> bool:
    """Whether these bytes are an image of more than 8 bits a channel."""
    with _opened(content) as image:
        return _is_deep(image)


def _several(image: Image.Image) -> dict[str, str]:
    """A remark where a file holds several images; a second one of a JPEG is a preview."""
    if image.format in ("JPEG", "MPO") or not getattr(image, "is_animated", False):
        return {}
    all_of_them = ' (pip install "mmdgs[science]" reads all)' if image.format == "TIFF" else ""
    return {"several": f"it holds several images, and the first was taken{all_of_them}"}


@contextmanager
def _opened(content: bytes, most: int | None = None) -> Iterator[Image.Image]:
    """The image in these bytes, not decoded yet; any error with it becomes `Unreadable`."""
    from PIL import Image, UnidentifiedImageError  # here: it would slow down every start

    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            # Pillow only warns up to twice its limit, and warning filters are not per thread.
            limit, size = Image.MAX_IMAGE_PIXELS, f"{image.width} x {image.height} pixels"
            if most is not None and image.width * image.height > most:
                raise Unreadable(f"it has {size}, and {most:,} are the most")
            if limit is not None and image.width * image.height > limit:
                raise Unreadable(f"a decompression bomb? {size}, more than the limit of {limit:,}")
            with _one_at_a_time if image.width * image.height > LARGE else nullcontext():
                yield image
    except Unreadable:
        raise
    except UnidentifiedImageError as error:
        formats = ", ".join(IMAGE_FORMATS)
        raise Unreadable(f"not an image of {formats}, or a kind of TIFF not read; {NPY}") from error
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise Unreadable(str(error) or type(error).__name__) from error


def _raw_modes(image: Image.Image) -> set[str]:
    """How pixels are stored, in Pillow's words, such as "RGB;16B"."""
    tiles = (tile.args for tile in getattr(image, "tile", ()))
    return {args if isinstance(args, str) else str(args[0]) if args else "" for args in tiles}


def _bits(image: Image.Image) -> int:
    """Bits a channel as they are stored."""
    if image.format == "TIFF":
        stored = image.tag_v2.get(BITS_PER_SAMPLE, (8,))  # type: ignore[attr-defined]
        return max(stored) if isinstance(stored, tuple) else int(stored)
    if image.format == "PPM":
        args = image.tile[0].args  # type: ignore[attr-defined]
        return 16 if image.mode == "I" or (isinstance(args, tuple) and args[1] > 255) else 8
    return 16 if any(";16" in mode for mode in _raw_modes(image)) else 8


def _is_deep(image: Image.Image) -> bool:
    return image.mode in ("I", "F") or _bits(image) > 8


def _is_transparent(image: Image.Image) -> bool:
    """Whether some pixel is not opaque."""
    if not image.has_transparency_data:
        return False
    return int(np.asarray(image.convert("RGBA").getchannel("A")).min()) < 255


def _in_units(image: Image.Image, content: bytes) -> tuple[np.ndarray, dict[str, str]]:
    """Colours (H, W, C) in [0, 1], over white, and remarks on them."""
    if image.mode == "F":
        return _floating(image), {}
    deep = _is_deep(image)
    bits = _bits(image) if deep else 8
    levels, alpha, top = _deep_levels(image, content) if deep else _levels(image), None, 2**bits - 1
    if levels.shape[2] in (2, 4):
        levels, alpha = levels[..., :-1], levels[..., -1:] / np.float32(top)
    low, high = int(levels.min()), int(levels.max())
    remarks = span_remarks(low, high, bits) if deep else {}
    colours = ((levels + 0.5) / (1 << bits)).astype(np.float32)
    if alpha is None or alpha.min() == 1:
        return colours, remarks
    return colours * alpha + (1 - alpha), remarks | {"transparent": TRANSPARENT}


def span_remarks(low: int, high: int, bits: int) -> dict[str, str]:
    """Where the levels of a deep image lie; a warning where they may be of fewer bits."""
    top = (1 << bits) - 1
    span = f"its {bits}-bit values lie between {low:,} and {high:,}; {top:,} is white"
    if not 0 < high < top // 2:
        return {"deep": span}
    used = max(8, high.bit_length())
    return {"dark": f"{span}. If these are data of {used} bits, say --range 0,{(1 << used) - 1}"}


def _levels(image: Image.Image) -> np.ndarray:
    """Levels (H, W, 1 to 4) of an image of 8 bits a channel, the last of 2 or 4 is alpha."""
    from PIL import ImageOps

    picture = ImageOps.exif_transpose(image)
    grey = picture.mode in GREY
    if picture.has_transparency_data:
        pixels = np.asarray(picture.convert("RGBA"))
        return pixels[..., [0, 3]] if grey else pixels
    pixels = np.asarray(picture.convert("L" if grey else "RGB"))
    return pixels[..., None] if grey else pixels


def _white_is_zero(image: Image.Image) -> bool:
    tags: Any = getattr(image, "tag_v2", {})
    return image.format == "TIFF" and tags.get(PHOTOMETRIC) == 0


def _floating(image: Image.Image) -> np.ndarray:
    from PIL import ImageOps

    pixels = np.asarray(ImageOps.exif_transpose(image))
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):  # so that NaN is refused too
        span = f"its floating-point values lie between {low:.4g} and {high:.4g}"
        raise Unreadable(f"{span}, expected 0 to 1; {NPY}")
    if _white_is_zero(image):
        raise Unreadable(f"its floating-point values are inverted (white is 0); {NPY}")
    return pixels.astype(np.float32)[..., None]


def _deep_levels(image: Image.Image, content: bytes) -> np.ndarray:
    """Levels (H, W, 1 to 4) of an image of more than 8 bits a channel."""
    from PIL import ImageOps

    bits, modes = _bits(image), _raw_modes(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        levels = np.asarray(ImageOps.exif_transpose(image)).astype(np.uint16)
        if _white_is_zero(image):
            levels = ((1 << bits) - 1 - levels).astype(np.uint16)
        return levels[..., None]
    raw = modes.pop() if len(modes) == 1 else "several kinds"
    if raw == "LA;16B":  # both bytes of both channels
        parts = _as_raw_mode(content, "RGBA").astype(np.uint16)
        return parts[..., 0::2] << 8 | parts[..., 1::2]
    colours, _, order = raw.partition(";16")
    if colours not in ("RGB", "RGBA", "RGBX") or order not in OTHER_ORDER or bits != 16:
        stored = f"{bits} bits as {raw} ({image.mode})"
        raise Unreadable(f"its pixels are stored in {stored}, which is not read; {NPY}")
    # Pillow keeps the high bytes alone: the low ones are the high ones of the other byte order.
    swapped = f"{colours};16{OTHER_ORDER[order]}"
    high, low = (_as_raw_mode(content, mode).astype(np.uint16) for mode in (raw, swapped))
    return (high << 8 | low)[..., : 4 if colours == "RGBA" else 3]


def _as_raw_mode(content: bytes, raw: str) -> np.ndarray:
    """The bytes that Pillow decodes where pixels are stored in a raw mode."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
        image.tile = [
            tile._replace(args=(raw, *tile.args[1:]) if isinstance(tile.args, tuple) else raw)
            for tile in image.tile
        ]
        return np.asarray(ImageOps.exif_transpose(image))


def announced(remarks: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Log the remarks on images by kind: the first with its name, and how many others there are."""
    for kind, images in remarks.items():
        (where, remark), others = images[0], len(images) - 1
        more = f" (and so for {others:,} other image{'s' * (others > 1)})" if others else ""
        level = logging.INFO if kind == "deep" else logging.WARNING
        logger.log(level, "%s: %s%s", where, remark, more)


def _fitted(image: Image.Image, fit: Fit) -> Image.Image:
    from PIL import Image

    grey = image.mode in GREY if fit.channels is None else fit.channels == 1
    if image.has_transparency_data:  # colours under transparency are arbitrary: show white
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if grey else "RGB")
    if fit.size is None:
        return image
    image = image.crop(_centre(image.size, fit.crop))
    return image.resize((fit.size, fit.size), Image.Resampling.LANCZOS)


def _centre(size: tuple[int, int], crop: int | None) -> tuple[int, int, int, int]:
    """The box of a centred square."""
    width, height = size
    side = min(size) if crop is None else crop
    if side > min(size):
        raise Unreadable(f"it has {width} x {height} pixels; expected at least {side} x {side}")
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side
