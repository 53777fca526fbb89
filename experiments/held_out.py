"""Images that a model is judged on: of its kind, known by their shape, and not seen by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from experiments.experiment import Context
from mmdgs.data import ImageSet, dequantised, load_images, spread
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.randomness import Streams

DATA = {(1, 28, 28): "mnist", (3, 32, 32): "cifar10", (3, 64, 64): "celeba"}
"""The images of a model, by their shape."""


def data_of(model: Model) -> str:
    """The name of a model's images."""
    if model.shape not in DATA:
        raise UsageError(f"no images are known for a model of {model.shape}; known: {list(DATA)}")
    return DATA[model.shape]


def stored_images(context: Context, model: Model, split: str) -> ImageSet:
    """The images of a model's kind, from their folder (or .zip of faces) in --data-dir."""
    channels, height, _ = model.shape
    for folder, data in _places(data_of(model), context.data_dir):
        try:
            if split != "train" and model.trained_on(f"{data}:{split}"):
                place = Path(context.data_dir or ".") / data
                raise UsageError(
                    f"{model.source} was trained on {data}:{split}, so these images are not held "
                    f"out; put a faces*.zip of others into {place}"
                )
            return load_images(data, split, data_dir=folder, size=height, channels=channels)
        except UsageError as error:
            reason = error
    raise reason


def _places(name: str, data_dir: str | None) -> Iterator[tuple[str | None, str]]:
    """A folder or faces*.zip of the set's name inside --data-dir, and --data-dir itself."""
    if data_dir is not None and (inside := Path(data_dir) / name).is_dir():
        yield from ((None, str(zipped)) for zipped in sorted(inside.glob("faces*.zip")))
        yield str(inside), name
    yield data_dir, name


def held_out_images(context: Context, model: Model, split: str, count: int) -> Tensor:
    """Images spread over a set, dequantised, as the model has them."""
    stored = stored_images(context, model, split).images
    images = stored[spread(len(stored), count)].to(context.device)
    streams = Streams(context.seed, len(images), purpose=f"{split} images")
    return model.scaled(dequantised(images, streams))
