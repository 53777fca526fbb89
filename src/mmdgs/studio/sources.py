"""What rooms work on: shipped models, examples, uploads (bounded, decoded safely), results."""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data.decoding import Fit, Unreadable, announced, decode, decode_deep, is_deep
from mmdgs.data.transforms import midpoints
from mmdgs.errors import UsageError, unknown_name
from mmdgs.files import read_file, sha256_of
from mmdgs.models import Model, load
from mmdgs.models.shipped import shipped_folders
from mmdgs.reading import reading

EXAMPLES = Path(__file__).parent / "examples"
"""Samples of the models that ship, and results for them that take long (make_examples.py)."""
MOST_BYTES, MOST_PIXELS = 8_000_000, 1 << 24
"""Of an upload. Pillow and Gradio are held to the same while the studio is served."""
SHRINK, CUT = FITS = ("shrink the whole image", "cut out the centre")
"""Shrinking averages noise away; a cut-out keeps it as it is."""
MODELS = {"mnist": "digits", "cifar10": "photos", "celeba": "faces"}
MANY_LEVELS = ("cifar10", "celeba")

_lock = threading.Lock()
_models: dict[str, Model] = {}


def models(*, many_levels: bool = False) -> list[str]:
    """The models of the studio that came with this installation."""
    names = MANY_LEVELS if many_levels else tuple(MODELS)
    return [name for name in names if name in shipped_folders()]


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
    model: str, example: str, upload: str | None = None, fit: str = CUT
) -> numpy.ndarray:
    """The image that a room's controls name: what was uploaded, or else an example."""
    if upload is not None:
        return uploaded(upload, model_of(model), fit)
    if example not in examples(model):
        raise unknown_name("example", str(example), examples(model))
    return decode(read_file(EXAMPLES / f"{example}.png"), Fit()).pixels.copy()


def uploaded(path: str | Path, model: Model, fit: str = SHRINK) -> numpy.ndarray:
    """An uploaded file as an image of the model's size, (C, H, W) in its own colours.

    It is uint8, or where more than 8 bits a channel are stored float32 in [0, 1].
    """
    if fit not in FITS:
        raise unknown_name("way to fit an image", fit, FITS)
    height, width = model.shape[1:]
    shrinks = fit == SHRINK and height == width
    try:
        with reading("the upload", "an image"):
            content = read_file(Path(path), MOST_BYTES)
        decoder = decode_deep if is_deep(content) else decode
        image = decoder(content, Fit(size=height if shrinks else None))
    except Unreadable as error:
        raise UsageError(f"the upload cannot be read: {error}") from error
    announced({kind: [("the upload", remark)] for kind, remark in image.remarks.items()})
    if shrinks:
        return image.pixels.copy()
    top, left = (
        max(0, (size - side) // 2)
        for size, side in zip(image.pixels.shape[1:], (height, width), strict=True)
    )
    return image.pixels[:, top : top + height, left : left + width].copy()


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


def shipped_result(key: str) -> dict[str, numpy.ndarray] | None:
    """The arrays of a result that comes with the package, if it does."""
    file = EXAMPLES / f"{key}.npz"
    if not file.is_file():
        return None
    with numpy.load(file, allow_pickle=False) as arrays:
        return dict(arrays)
