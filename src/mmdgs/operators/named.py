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

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")


def _whole(value: float) -> int:
    if value != int(value):
        raise ValueError(f"a whole number is needed, got {value:g}")
    return int(value)


def _random(shape: Sequence[int], missing: float, seed: int) -> Mask:
    return Mask.random(shape, missing, generator=seeded(seed, "random mask"))


IDENTITY = "none"
NAMED: dict[str, tuple[str, Callable[[Sequence[int], float, int], Operator]]] = {
    IDENTITY: (IDENTITY, lambda shape, value, seed: Mask(torch.ones(*shape, dtype=torch.bool))),
    "sr": ("sr:4", lambda shape, value, seed: Downsample(shape, _whole(value))),
    "box": ("box:16", lambda shape, value, seed: Box(shape, _whole(value))),
    "random": ("random:0.8", _random),
    "blur": ("blur:1.5", lambda shape, value, seed: Blur.gaussian(shape, value)),
    "motion": ("motion:9", lambda shape, value, seed: Blur.motion(shape, _whole(value))),
    "gray": ("gray", lambda shape, value, seed: Grayscale(shape)),
}
"""An example, and (shape, the number after the colon, seed) -> the operator: noise alone,
super-resolution, a missing box, a share of missing pixels, a blur's standard deviation, the length
of a motion, grey.
"""


def parse_operator(text: str, shape: Sequence[int], *, seed: int = 0) -> Operator:
    """An operator on images from text: a name and its number, or a mask's file (white: measured).

    A random mask is drawn from the seed.
    """
    path = Path(text).expanduser()
    if path.suffix.lower() in SUFFIXES:
        return _mask_file(path, shape)
    name, _, number = text.partition(":")
    if name not in NAMED:
        examples = ", ".join(example for example, _ in NAMED.values())
        hint = f"{nearest(name, NAMED)}; expected one such as {examples}, or mask.png"
        raise UsageError(f"unknown operator {text!r}{hint}")
    example, make = NAMED[name]
    try:
        if (":" in example) != bool(number):
            raise ValueError("a number" if number else "no number")
        return make(shape, float(number or 0), seed)
    except (OverflowError, ValueError) as error:
        hint = f"({error}); an example is {example}"
        raise UsageError(f"the operator {text!r} cannot be made {hint}") from error


def divisor(text: str) -> int:
    """What the sides of images must be multiples of, for an operator from text to measure them."""
    name, _, number = text.partition(":")
    return int(number) if name == "sr" and number.isdecimal() and int(number) else 1


def shape_behind(text: str, channels: int, sides: Sequence[int]) -> tuple[int, ...]:
    """The shape of the images whose measurements by an operator from text have these sides."""
    return channels, *(side * divisor(text) for side in sides)


def _mask_file(path: Path, shape: Sequence[int]) -> Mask:
    from PIL import Image  # here: it would slow down every start

    with (
        opened(path) as stream,
        reading(f"the mask {path}", "an image"),
        Image.open(stream, formats=IMAGE_FORMATS) as image,
    ):
        if (image.height, image.width) != tuple(shape[1:]):  # before any pixel is decoded
            sizes = f"{image.height} x {image.width} pixels, the images {shape[1]} x {shape[2]}"
            raise UsageError(f"the mask {path} has {sizes}")
        pixels = torch.from_numpy(numpy.array(image.convert("L")))
    try:
        return Mask(pixels >= 128, shape)
    except ValueError as error:
        raise UsageError(f"the mask {path}: {error}") from error
