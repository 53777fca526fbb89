"""What rooms work on: shipped models, examples, uploads (bounded, decoded safely), results."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.data.decoding import Fit, Unreadable, announced, decode, decode_deep, is_deep
from mmdgs.data.transforms import midpoints
from mmdgs.errors import UsageError, unknown_name
from mmdgs.files import read_file, sha256_of
from mmdgs.models import Model, load
from mmdgs.models.shipped import PHOTO, shipped_folders
from mmdgs.reading import IMAGE_FORMATS, reading
from mmdgs.studio.streaming import share_of_cores

EXAMPLES = Path(__file__).parent / "examples"
"""Samples of the models that ship, and results for them that take long (make_examples.py)."""
MOST_BYTES, MOST_PIXELS = 8_000_000, 1 << 24
"""Of an upload. Pillow and Gradio are held to the same while the studio is served."""
MOST_WORKED = 1 << 18
"""Pixels that rooms work on: two computations of 16 kB a pixel (`photo`, quality best): 9 GB."""
SHRINK, CUT = FITS = ("shrink it, and its noise", "cut out the centre")
"""Shrinking averages noise away; a cut-out keeps it as it is."""
MODELS = {PHOTO: "any size", "mnist": "digits", "cifar10": "small", "celeba": "faces"}
MANY_LEVELS = ("cifar10", "celeba")
OWN = "your image"
"""What is chosen in place of an example, where there is an upload."""
TIMED_SIDE = 96
"""Pixels a side of the image that an evaluation of a model of any size is timed on."""

_lock = threading.Lock()
_models: dict[str, Model] = {}


def models(*, restoring: bool = False, sampling: bool = False) -> list[str]:
    """The models of the studio that came with this installation, the default first.

    Restoration takes many levels of noise, and samplers take images of a fixed size.
    """
    few = [PHOTO, *MANY_LEVELS] if restoring else [*MANY_LEVELS, "mnist"] if sampling else MODELS
    return [name for name in few if name in shipped_folders()]


def model_of(name: str) -> Model:
    """A model of the studio, loaded once."""
    if name not in models():
        raise unknown_name("model", name, models())
    with _lock:
        if name not in _models:
            _models[name] = load(name)
        return _models[name]


def examples(model: str) -> list[str]:
    """The names of a model's example images."""
    return sorted(file.stem for file in EXAMPLES.glob(f"{model}-*.png"))


def chosen_image(
    model: str,
    example: str | None,
    upload: str | None = None,
    fit: str = CUT,
    size: tuple[int, int] | None = None,
) -> numpy.ndarray:
    """The image that a room's controls name: what was uploaded, or else an example."""
    if upload is not None:
        return uploaded(upload, model_of(model), fit, size)
    if example in (None, OWN):
        raise UsageError("upload an image first, under Your own image")
    if example not in examples(model):
        raise unknown_name("example", str(example), examples(model))
    return decode(read_file(EXAMPLES / f"{example}.png"), Fit()).pixels.copy()


def uploaded(
    path: str | Path, model: Model, fit: str = SHRINK, size: tuple[int, int] | None = None
) -> numpy.ndarray:
    """An uploaded file (C, H, W) in its own colours, of the model's size or another `size`.

    A model of any size takes it as it is, up to MOST_WORKED pixels. It is uint8, or where more than
    8 bits a channel are stored float32 in [0, 1].
    """
    if fit not in FITS:
        raise unknown_name("way to fit an image", fit, FITS)
    height, width = size or model.shape[1:]
    shrinks = fit == SHRINK and height == width and not model.any_size
    try:
        with reading("the upload", "an image"):
            content = read_file(Path(path), MOST_BYTES)
        decoder = decode_deep if is_deep(content) else decode
        image = decoder(content, Fit(size=height if shrinks else None))
    except Unreadable as error:
        raise UsageError(f"the upload cannot be read: {error}") from error
    announced({kind: [("the upload", remark)] for kind, remark in image.remarks.items()})
    sides = image.pixels.shape[1:]
    if model.any_size:
        share = math.sqrt(min(1.0, MOST_WORKED / math.prod(sides)))
        height, width = (max(1, int(share * side)) for side in sides)
        if fit == SHRINK and share < 1:
            return _resized(image.pixels, (height, width))
    top, left = (
        max(0, (side - most) // 2) for side, most in zip(sides, (height, width), strict=True)
    )
    return image.pixels[:, top : top + height, left : left + width].copy()


def described(stored: numpy.ndarray, upload: str | None) -> str:
    """The size of an image that a room works on, and what was made of an upload for it."""
    height, width = stored.shape[1:]
    words = f"{width} x {height} pixels"
    if upload is not None:
        from PIL import Image  # here: it would slow down every start

        with Image.open(upload, formats=IMAGE_FORMATS) as image:
            pixels = image.width * image.height
        words += f" of the upload's {pixels:,}" if pixels != height * width else " of your own"
    return words


def _resized(pixels: numpy.ndarray, sides: tuple[int, int]) -> numpy.ndarray:
    """A stored image with these sides, of the same kind of numbers."""
    image = torch.from_numpy(pixels.copy())[None].float()
    image = functional.interpolate(image, sides, mode="bicubic", antialias=True)[0]
    if pixels.dtype == numpy.uint8:
        return image.round().clamp(0, 255).numpy().astype(numpy.uint8)
    return image.clamp(0, 1).numpy()


@lru_cache
def seconds_of(name: str) -> float:
    """Seconds of one evaluation of a model for each pixel: the shortest of five."""
    model = model_of(name)
    model = model.sized(TIMED_SIDE, TIMED_SIDE)
    level = model.levels[len(model.levels) // 2]
    x_t = level.sigma * torch.ones(1, *model.shape)
    with torch.no_grad(), share_of_cores():
        times = [time.perf_counter() for _ in range(6) if model(x_t, level) is not None]
    shortest = min(after - before for before, after in pairwise(times))
    return shortest / math.prod(model.shape[1:])


def duration(name: str, shape: Sequence[int], evaluations: float) -> str:
    """How long so many evaluations of the whole of an image take, in words."""
    seconds = seconds_of(name) * math.prod(shape[1:]) * evaluations
    if seconds < 90:
        return f"about {max(1, round(seconds, -1 if seconds > 20 else 0)):.0f} s"
    return f"about {round(seconds / 60)} minutes"


def in_units(stored: numpy.ndarray) -> Tensor:
    """A stored image (C, H, W), uint8 or float32, in [0, 1] units."""
    image = torch.from_numpy(stored)
    return midpoints(image[None])[0] if image.dtype == torch.uint8 else image


def check_bounds(**bounds: tuple[int, int, int]) -> None:
    """Raise UsageError for a (value, least, most) that lies outside of what the studio takes."""
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise UsageError(
                f"{name} must be {least} to {most} here, got {value}; the command takes more"
            )


def key_of(
    request: Any, model: Model, stored: numpy.ndarray, mask: numpy.ndarray | None = None
) -> str:
    """The name of a result: a hash of the settings, the weights, the image and the mask."""
    inputs = [array.tobytes().hex() for array in (stored, mask) if array is not None]
    parts = [asdict(request), model.digest, stored.shape, inputs]
    return f"{type(request).__name__.lower()}-{sha256_of(parts)[:16]}"


def ships(key: str) -> bool:
    """Whether a result comes with the package."""
    return (EXAMPLES / f"{key}.npz").is_file()


def shipped_result(key: str) -> dict[str, numpy.ndarray] | None:
    """The arrays of a result that comes with the package, if it does."""
    if not ships(key):
        return None
    with numpy.load(EXAMPLES / f"{key}.npz", allow_pickle=False) as arrays:
        return dict(arrays)
