"""What rooms work on: models that ship, examples, uploads (bounded, decoded safely), results that are kept."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data.decoding import Fit, Unreadable, announced, decode, decode_deep, is_deep
from mmdgs.data.single import NamedImage
from mmdgs.data.transforms import midpoints
from mmdgs.errors import UsageError, unknown_name
from mmdgs.files import read_file
from mmdgs.models import Model, load
from mmdgs.models.shipped import shipped_names
from mmdgs.reading import reading

EXAMPLES = Path(__file__).parent / "examples"
"""Samples of the models that ship, and results for them that take long: `python -m mmdgs.studio.make_examples`."""
MOST_BYTES, MOST_PIXELS = 8_000_000, 1 << 24
"""Of an upload. Pillow and Gradio are held to the same."""
SHRINK, CUT = "shrink the whole image", "cut out the centre"
FITS = (SHRINK, CUT)
"""Shrinking averages noise away; a cut-out keeps it as it is."""
OWN = {"mnist": "digits", "cifar10": "photos", "celeba": "faces"}
MANY_LEVELS = ("cifar10", "celeba")
"""Models of the studio, and those of many noise levels."""
KEPT = 64
"""Results that the process remembers."""

_lock = threading.Lock()
_models: dict[str, Model] = {}
_results: OrderedDict[str, dict[str, numpy.ndarray]] = OrderedDict()


def models(*, many_levels: bool = False) -> list[str]:
    """The models of the studio that came with this installation."""
    names = MANY_LEVELS if many_levels else tuple(OWN)
    return [name for name in names if name in shipped_names()]


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


def example(model: str, name: str) -> numpy.ndarray:
    """An example image, uint8 (C, H, W)."""
    if name not in examples(model):
        raise unknown_name("example", str(name), examples(model))
    return decode(read_file(EXAMPLES / f"{name}.png"), Fit()).pixels.copy()


def uploaded(path: str | Path, model: Model, fit: str = SHRINK) -> numpy.ndarray:
    """An uploaded file as an image of the model's size, (C, H, W) in its own colours.

    It is uint8, or where more than 8 bits a channel are stored float32 in [0, 1].
    """
    if fit not in FITS:
        raise unknown_name("way to fit an image", fit, FITS)
    height, width = model.shape[1:]
    try:
        with reading("the upload", "an image"):
            content = read_file(Path(path), MOST_BYTES)
        _refuse_large(content)
        decoder = decode_deep if is_deep(content) else decode
        shrinks = fit == SHRINK and height == width
        image = decoder(content, Fit(size=height if shrinks else None))
        announced({kind: [("the upload", remark)] for kind, remark in image.remarks.items()})
        found = image.pixels.copy()
        if shrinks:
            return found
    except Unreadable as error:
        raise UsageError(f"the upload cannot be read: {error}") from error
    top, left = (max(0, (have - want) // 2) for have, want in zip(found.shape[1:], (height, width), strict=True))
    return found[:, top : top + height, left : left + width].copy()


def chosen_image(model: str, chosen: str, file: str | None, fit: str) -> numpy.ndarray:
    """The image that a room's controls name: what was uploaded, or else an example."""
    return example(model, chosen) if file is None else uploaded(file, model_of(model), fit)


def _refuse_large(content: bytes) -> None:
    """Refuse more pixels than are allowed, before any of them is decoded."""
    import io

    from PIL import Image

    from mmdgs.reading import IMAGE_FORMATS

    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            width, height = image.size
    except Exception:  # decode says what is wrong with it
        return
    if width * height > MOST_PIXELS:
        raise Unreadable(f"it has {width} x {height} pixels, more than the limit of {MOST_PIXELS:,}")


def in_colours_of(model: Model, stored: numpy.ndarray, name: str, *, clean: bool) -> tuple[NamedImage, tuple[str, ...]]:
    """A stored image with as many channels as the model's, in [0, 1] units, and a sentence where they were made."""
    image = NamedImage(name, in_units(stored))
    made, remarks = image.in_channels(model.shape[0], clean=clean)
    return NamedImage(name, made), remarks


def in_units(stored: numpy.ndarray) -> Tensor:
    """A stored image (C, H, W), uint8 or float32, in [0, 1] units."""
    image = torch.from_numpy(stored)
    return midpoints(image[None])[0] if image.dtype == torch.uint8 else image


def key_of(room: str, **settings: Any) -> str:
    """The name of a result: what it depends on, as a hash."""
    text = json.dumps([room, settings], sort_keys=True, default=str)
    return f"{room}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def kept(key: str) -> Mapping[str, numpy.ndarray] | None:
    """The arrays of a result that ships or was made before."""
    with _lock:
        if key in _results:
            _results.move_to_end(key)
            return _results[key]
    file = EXAMPLES / f"{key}.npz"
    if not file.is_file():
        return None
    with numpy.load(file, allow_pickle=False) as found:
        return keep(key, {name: found[name] for name in found.files})


def keep(key: str, arrays: Mapping[str, numpy.ndarray]) -> Mapping[str, numpy.ndarray]:
    """Remember a result; the oldest are forgotten."""
    with _lock:
        _results[key] = dict(arrays)
        while len(_results) > KEPT:
            _results.popitem(last=False)
        return _results[key]


def tensors(arrays: Mapping[str, numpy.ndarray]) -> dict[str, Tensor]:
    """Arrays as float32 tensors: those that ship are in half precision."""
    return {name: torch.from_numpy(numpy.array(value)).float() for name, value in arrays.items()}
