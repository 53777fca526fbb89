"""From the bytes of an image file to an array of one shape: crop, resize, grey or colour."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mmdgs.reading import IMAGE_FORMATS

if TYPE_CHECKING:
    from PIL import Image

LARGE = 1 << 22
"""Pixels above which images are decoded one at a time, and not side by side: each may take gigabytes."""
GREY = ("1", "L", "LA", "La")
BITS_PER_SAMPLE, PHOTOMETRIC = 258, 262
"""Tags of TIFF."""
_OTHER = "B" if sys.byteorder == "little" else "L"
SIXTEEN = {
    f"{colours};16{order}": f"{colours};16{other}"
    for colours in ("RGB", "RGBA", "RGBX")
    for order, other in {"B": "L", "L": "B", "N": _OTHER}.items()
}
"""Pillow's names for colours of 16 bits a channel, and those for the same in the other byte order."""
TRANSPARENT = "it is transparent in places, and was laid over white"
NPY = "save its values as a floating-point .npy, of white at 1, instead"


logger = logging.getLogger("mmdgs")

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


@dataclass(frozen=True)
class Decoded:
    """Pixels (C, H, W): uint8 as they are stored, or float32 in [0, 1]; and by kind, sentences on what was done."""

    pixels: np.ndarray
    remarks: dict[str, str] = field(default_factory=dict)


def decode(content: bytes, fit: Fit) -> Decoded:
    """The image in these bytes, in 8 bits a channel; the first one of an animation."""
    with _opened(content) as image:
        if _is_deep(image):
            full, remarks = _composited(*_full(image, content))
            remarks["reduced"] = "its 16 or 32 bits a channel were reduced to 8"
            picture = _eight_bits(full)
        else:
            from PIL import ImageOps

            picture, remarks = ImageOps.exif_transpose(image), {}
            if _is_transparent(picture):
                remarks["transparent"] = TRANSPARENT
        pixels = np.asarray(_fitted(picture, fit))
    return Decoded(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1), remarks)


def decode_deep(content: bytes, fit: Fit = Fit()) -> Decoded:  # noqa: B008  it is frozen
    """The image in these bytes at full depth, float32 in [0, 1], grey or in colour as it is stored.

    A level k of b bits stands for (k + 1/2) / 2^b: the full scale is that of the container. Floating-point pixels must
    lie in [0, 1]. What is transparent is laid over white.
    """
    with _opened(content) as image:
        full, remarks = _composited(*_full(image, content))
        if fit.size is not None:
            full = _resized(full, fit.size, fit.crop)
    return Decoded(np.ascontiguousarray(full.transpose(2, 0, 1)), remarks)


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """The image in these bytes, not decoded yet; whatever goes wrong with it becomes `Unreadable`."""
    from PIL import Image, UnidentifiedImageError  # here: it would slow down every start

    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            _refuse_bombs(image)
            with _one_at_a_time if image.width * image.height > LARGE else nullcontext():
                yield image
    except Unreadable:
        raise
    except UnidentifiedImageError as error:
        raise Unreadable(
            f"not an image of the formats {', '.join(IMAGE_FORMATS)}, or of a kind of TIFF that is not read; {NPY}"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Unreadable(f"a decompression bomb? {error}") from error
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise Unreadable(str(error) or type(error).__name__) from error


def _raw_modes(image: Image.Image) -> set[str]:
    """How pixels are stored, in Pillow's words, such as "RGB;16B"."""
    found = (tile.args for tile in getattr(image, "tile", ()))
    return {args if isinstance(args, str) else str(args[0]) if args else "" for args in found}


def _bits(image: Image.Image) -> int:
    """Bits a channel as they are stored."""
    if image.format == "TIFF":
        stored = image.tag_v2.get(BITS_PER_SAMPLE, (8,))  # type: ignore[attr-defined]
        return max(stored) if isinstance(stored, tuple) else int(stored)
    if image.format == "PPM":
        args = image.tile[0].args  # type: ignore[attr-defined]
        return 16 if image.mode == "I" or (isinstance(args, tuple) and args[1] > 255) else 8
    return 16 if any(";16" in mode for mode in _raw_modes(image)) else 8


def is_deep(content: bytes) -> bool:
    """Whether these bytes are an image of more than 8 bits a channel."""
    with _opened(content) as image:
        return _is_deep(image)


def _is_deep(image: Image.Image) -> bool:
    return image.mode in ("I", "F") or _bits(image) > 8


def _is_transparent(image: Image.Image) -> bool:
    """Whether some pixel is not opaque."""
    return image.has_transparency_data and int(np.asarray(image.convert("RGBA").getchannel("A")).min()) < 255


def _full(image: Image.Image, content: bytes) -> tuple[np.ndarray, np.ndarray | None, dict[str, str]]:
    """Colours (H, W, C) in [0, 1], alpha (H, W) in [0, 1] where there is any, and what is to be said of them."""
    if not _is_deep(image):
        return *_shallow(image), {}
    if image.mode == "F":
        return *_floating(image), {}
    bits = _bits(image)
    levels = _levels(image, content, bits)
    alpha = None
    if levels.shape[2] in (2, 4):
        levels, alpha = levels[..., :-1], levels[..., -1] / np.float32((1 << bits) - 1)
    low, high, top = int(levels.min()), int(levels.max()), (1 << bits) - 1
    said = f"its values, of {bits} bits, lie between {low:,} and {high:,}; {top:,} is white"
    remarks = {"deep": said}
    if 0 < high < top // 2:
        used = max(8, high.bit_length())
        remarks = {
            "dark": f"{said}. If these are data of {used} bits, rescale them first: save the values divided by "
            f"{1 << used:,} as a floating-point .npy"
        }
    return ((levels + 0.5) / (1 << bits)).astype(np.float32), alpha, remarks


def _shallow(image: Image.Image) -> tuple[np.ndarray, np.ndarray | None]:
    from PIL import ImageOps

    picture = ImageOps.exif_transpose(image)
    grey = picture.mode in GREY
    if not picture.has_transparency_data:
        pixels = np.asarray(picture.convert("L" if grey else "RGB"))
        return _midpoints(pixels[..., None] if grey else pixels), None
    pixels = np.asarray(picture.convert("RGBA"))
    return _midpoints(pixels[..., : 1 if grey else 3]), pixels[..., 3] / np.float32(255)


def _midpoints(levels: np.ndarray) -> np.ndarray:
    return (levels.astype(np.float32) + np.float32(0.5)) / 256


def _white_is_zero(image: Image.Image) -> bool:
    return image.format == "TIFF" and image.tag_v2.get(PHOTOMETRIC) == 0  # type: ignore[attr-defined]


def _floating(image: Image.Image) -> tuple[np.ndarray, None]:
    from PIL import ImageOps

    pixels = np.asarray(ImageOps.exif_transpose(image))
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):  # so that NaN is refused too
        raise Unreadable(f"its floating-point values lie between {low:.4g} and {high:.4g}, expected 0 to 1; {NPY}")
    if _white_is_zero(image):
        raise Unreadable(f"its floating-point values are inverted (white is 0); {NPY}")
    return pixels.astype(np.float32)[..., None], None


def _levels(image: Image.Image, content: bytes, bits: int) -> np.ndarray:
    """Levels (H, W, 1 to 4) of an image of more than 8 bits a channel."""
    from PIL import ImageOps

    (raw,) = _raw_modes(image) if len(_raw_modes(image)) == 1 else ("several kinds",)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        levels = np.asarray(ImageOps.exif_transpose(image)).astype(np.uint16)
        if _white_is_zero(image):
            levels = ((1 << bits) - 1 - levels).astype(np.uint16)
        return levels[..., None]
    if raw == "LA;16B":  # both bytes of both channels
        parts = _as_raw_mode(content, "RGBA").astype(np.uint16)
        return parts[..., 0::2] << 8 | parts[..., 1::2]
    if raw not in SIXTEEN or bits != 16:
        raise Unreadable(f"its pixels are stored in {bits} bits as {raw} ({image.mode}), which is not read; {NPY}")
    # Pillow keeps the high bytes of colours alone. The low ones are those it takes for high in the other byte order.
    high, low = (_as_raw_mode(content, mode).astype(np.uint16) for mode in (raw, SIXTEEN[raw]))
    return (high << 8 | low)[..., : 4 if raw.startswith("RGBA") else 3]


def _as_raw_mode(content: bytes, raw: str) -> np.ndarray:
    """The bytes that Pillow decodes where pixels are stored in a raw mode."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
        image.tile = [
            tile._replace(args=(raw, *tile.args[1:]) if isinstance(tile.args, tuple) else raw) for tile in image.tile
        ]
        return np.asarray(ImageOps.exif_transpose(image))


def _composited(
    colours: np.ndarray, alpha: np.ndarray | None, remarks: dict[str, str]
) -> tuple[np.ndarray, dict[str, str]]:
    """Colours (H, W, C) over white."""
    if alpha is None or alpha.min() == 1:
        return colours, remarks
    over = alpha[..., None].astype(np.float32)
    return colours * over + (1 - over), {**remarks, "transparent": TRANSPARENT}


def _eight_bits(full: np.ndarray) -> Image.Image:
    """Colours (H, W, C) in [0, 1] as a picture of 8 bits a channel."""
    from PIL import Image

    levels = (full * 256).clip(0, 255).astype(np.uint8)
    return Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels)


def _resized(full: np.ndarray, size: int, crop: int | None) -> np.ndarray:
    """The centre of an image (H, W, C), resized in floating point."""
    from PIL import Image

    box = _centre((full.shape[1], full.shape[0]), crop)
    planes = [Image.fromarray(np.ascontiguousarray(full[..., c])).crop(box) for c in range(full.shape[2])]
    made = [np.asarray(plane.resize((size, size), Image.Resampling.LANCZOS)) for plane in planes]
    return np.stack(made, -1).clip(0, 1)  # the filter overshoots at edges


def announced(found: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Log what was done to images, each kind once: the first of them with its name, and how many others there are."""
    for kind, images in found.items():
        (where, remark), others = images[0], len(images) - 1
        more = f" (and so for {others:,} other image{'s' * (others > 1)})" if others else ""
        logger.log(logging.INFO if kind == "deep" else logging.WARNING, "%s: %s%s", where, remark, more)


def _refuse_bombs(image: Image.Image) -> None:
    from PIL import Image

    # Pillow only warns up to twice its limit. Asking here, and not through a warning filter, holds in every thread.
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels, more than the limit of {limit:,}")


def _fitted(image: Image.Image, fit: Fit) -> Image.Image:
    from PIL import Image

    grey = image.mode in GREY if fit.channels is None else fit.channels == 1
    if image.has_transparency_data:  # colours under transparency are arbitrary: show white instead
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
