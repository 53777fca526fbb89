"""What a model is judged on, level by level: images of its kind, known by their shape, and levels over its range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from mmdgs.data import ImageSet, dequantised, load_images, spread
from mmdgs.errors import UsageError
from mmdgs.lab.drawing import new_figure
from mmdgs.lab.experiment import Context
from mmdgs.lab.grid import Measure, Results
from mmdgs.lab.labels import label_curves
from mmdgs.lab.report import Figure
from mmdgs.models import Model
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.schedules import geometric

DATA: dict[tuple[int, ...], str] = {(1, 28, 28): "mnist", (3, 32, 32): "cifar10", (3, 64, 64): "celeba"}
"""The images of a model, by their shape."""
ACROSS = "sigma / alpha"


def data_of(model: Model) -> str:
    """The name of a model's images."""
    if model.shape not in DATA:
        raise UsageError(f"no images are known for a model of {model.shape}; known: {list(DATA)}")
    return DATA[model.shape]


def stored_images(context: Context, model: Model, split: str) -> ImageSet:
    """The images of a model's kind, from the folder (or .zip of faces) of their set in --data-dir."""
    channels, height, _ = model.shape
    for folder, data in _places(data_of(model), context.data_dir):
        try:
            if split != "train" and model.trained_on(f"{data}:{split}"):
                raise UsageError(
                    f"{model.source} was trained on {data}:{split}, so these images are not held out; put a "
                    f"faces*.zip of others into {Path(context.data_dir or '.') / data}"
                )
            return load_images(data, split, data_dir=folder, size=height, channels=channels)
        except UsageError as error:
            reason = error
    raise reason


def _places(name: str, data_dir: str | None) -> Iterator[tuple[str | None, str]]:
    """Where a set may be: a folder or faces*.zip of its name inside --data-dir, and --data-dir itself."""
    if data_dir is not None and (inside := Path(data_dir) / name).is_dir():
        yield from ((None, str(zipped)) for zipped in sorted(inside.glob("faces*.zip")))
        yield str(inside), name
    yield data_dir, name


def held_out_images(context: Context, model: Model, split: str, count: int) -> Tensor:
    """Images spread over a set, dequantised, as the model has them."""
    stored = stored_images(context, model, split).images
    images = stored[spread(len(stored), count)].to(context.device)
    return model.scaled(dequantised(images, Streams(context.seed, len(images), purpose=f"{split} images")))


def chosen_levels(levels: Sequence[NoiseLevel], count: int) -> dict[float, NoiseLevel]:
    """About `count` of the levels by sigma / alpha (four digits), equally far apart in its logarithm, ends included."""
    by = {float(f"{level.sigma / level.alpha:.4g}"): level for level in levels}
    if len(by) <= count:
        return by
    wanted = [level.sigma for level in geometric(count, max(by), min(by))]
    nearest = [min(by, key=lambda ratio: abs(math.log(ratio / one))) for one in wanted]
    return {ratio: by[ratio] for ratio in nearest}


def titles(found: Results) -> dict[float, str]:
    """The columns of a table over levels."""
    return {ratio: f"{ACROSS} {ratio:.3g}" for ratio in found.columns}


def costs(found: Results) -> dict[str, str]:
    """The rows of a table over levels, each with the evaluations of one posterior."""
    every = {row: part.values.get("evaluations") for (row, _), part in found.parts.items()}
    return {row: row if count is None else f"{row} ({count:g})" for row, count in every.items()}


def over_levels(found: Results, name: str, caption: str, measures: Sequence[tuple[Measure, str]]) -> Figure:
    """A panel for each measure and its logarithmic axes: curves over levels, or bars where there is one level."""
    one = len(found.columns) == 1
    canvas, axes = new_figure(1, len(measures), inches=(2.2 + 3.6 * len(measures), 2.4 if one else 3.4))
    for i, (panel, (measure, log)) in enumerate(zip(axes[0], measures, strict=True)):
        if one:
            found.draw_bars(panel, found.columns[0], measure, named=i == 0)
        else:
            found.draw(panel, measure, log=log)
    if not one:
        label_curves(canvas)
    return Figure(name, caption, canvas)
