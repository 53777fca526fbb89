"""What a model is judged on, level by level: images of its kind, known by their shape, and levels over its range."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from mmdgs.data import dequantised, load_images, spread
from mmdgs.errors import UsageError
from mmdgs.lab.experiment import Context
from mmdgs.models import Model
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.schedules import geometric

DATA: dict[tuple[int, ...], str] = {(1, 28, 28): "mnist", (3, 32, 32): "cifar10", (3, 64, 64): "celeba"}
"""The images of a model, by their shape."""


def data_of(model: Model) -> str:
    """The name of a model's images."""
    if model.shape not in DATA:
        raise UsageError(f"no images are known for a model of {model.shape}; known: {list(DATA)}")
    return DATA[model.shape]


def held_out(context: Context, model: Model, split: str, count: int, seed: int) -> Tensor:
    """Images spread over a set, dequantised, as the model has them."""
    channels, height, _ = model.shape
    stored = load_images(data_of(model), split, data_dir=context.data_dir, size=height, channels=channels).images
    images = stored[spread(len(stored), count)].to(context.device)
    return model.scaled(dequantised(images, Streams(context.seed + seed, len(images))))


def chosen_levels(levels: Sequence[NoiseLevel], count: int) -> list[NoiseLevel]:
    """About `count` of the levels, equally far apart in log(sigma / alpha), both ends among them."""
    if len(levels) <= count:
        return list(levels)
    ratios = [level.sigma / level.alpha for level in levels]
    wanted = [level.sigma for level in geometric(count, ratios[0], ratios[-1])]
    places = [_nearest(ratios, one) for one in wanted]
    return [levels[i] for i in dict.fromkeys(places)]


def _nearest(ratios: Sequence[float], wanted: float) -> int:
    return min(range(len(ratios)), key=lambda i: abs(math.log(ratios[i] / wanted)))
