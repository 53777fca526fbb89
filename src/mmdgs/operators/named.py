"""Operators by the names they have on the command line, such as sr:4 or box:16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import torch

from mmdgs.errors import UsageError, nearest
from mmdgs.files import opened
from mmdgs.operators.contract import Operator
from mmdgs.operators.images import Blur, Box, Downsample, Grayscale, Mask
from mmdgs.randomness import seeded
from mmdgs.reading import IMAGE_FORMATS, reading

Make = Callable[[Sequence[int], float, int], Operator]
"""(shape, the number after the colon, seed) -> the operator."""


def _whole(value: float, name: str) -> int:
    if value != int(value):
        raise ValueError(f"{name} takes a whole number, got {value:g}")
    return int(value)


NAMED: dict[str, tuple[str, Make]] = {
    "sr": ("sr:4", lambda shape, value, seed: Downsample(shape, _whole(value, "sr"))),
    "box": ("box:16", lambda shape, value, seed: Box(shape, _whole(value, "box"))),
    "random": (
        "random:0.8",
        lambda shape, value, seed: Mask.random(shape, value, generator=seeded(seed, "random mask")),
    ),
    "blur": ("blur:1.5", lambda shape, value, seed: Blur.gaussian(shape, value)),
    "motion": ("motion:9", lambda shape, value, seed: Blur.motion(shape, _whole(value, "motion"))),
    "gray": ("gray", lambda shape, value, seed: Grayscale(shape)),
}
"""Each with an example: super-resolution, a missing box, a share of missing pixels, a blur's standard deviation, the
length of a motion, grey images."""


def parse_operator(text: str, shape: Sequence[int], *, seed: int = 0) -> Operator:
    """An operator on images of a shape from text: a name and its number, or an image file of a mask (white: measured).

    A random mask is drawn from the seed.
    """
    path = Path(text).expanduser()
    if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"):
        return _mask_file(path, shape)
    name, _, number = text.partition(":")
    examples = ", ".join(example for example, _ in NAMED.values())
    if name not in NAMED:
        raise UsageError(
            f"unknown operator {text!r}{nearest(name, NAMED)}; expected one such as {examples}, or mask.png"
        )
    example, make = NAMED[name]
    try:
        if (":" in example) != bool(number):
            raise ValueError("a number" if number else "no number")
        return make(shape, float(number or 0), seed)
    except (OverflowError, ValueError) as error:
        raise UsageError(f"the operator {text!r} cannot be made ({error}); an example is {example}") from error


def _mask_file(path: Path, shape: Sequence[int]) -> Mask:
    from PIL import Image  # here: it would slow down every start

    with (
        opened(path) as stream,
        reading(f"the mask {path}", "an image"),
        Image.open(stream, formats=IMAGE_FORMATS) as image,
    ):
        if (image.height, image.width) != tuple(shape[1:]):  # before any pixel is decoded
            expected = " x ".join(map(str, shape[1:]))
            raise UsageError(
                f"the mask {path} is {image.height} x {image.width} pixels, and the model's images are {expected}"
            )
        pixels = torch.from_numpy(numpy.array(image.convert("L")))
    try:
        return Mask(pixels >= 128, shape)
    except ValueError as error:
        raise UsageError(f"the mask {path}: {error}") from error
