"""Pictures of a posterior: standard deviations in colour, components that walk, one overview."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from mmdgs.data.pictures import png
from mmdgs.linalg.components import inside
from mmdgs.uncertainty.image import ImagePosterior

if TYPE_CHECKING:
    from PIL import ImageFont

COLOURS = (
    (0, 0, 4), (40, 11, 84), (101, 21, 110), (159, 42, 99),
    (212, 72, 66), (245, 125, 21), (250, 193, 39), (252, 255, 164),
)  # fmt: skip
"""From nothing to most: "inferno", which is read in grey as well."""
SIDE = 192
"""How wide small images are drawn, about."""
MOST_SIDE = 512
"""Of the pictures in an overview."""
STEPS = (-2.0, -1.0, 0.0, 1.0, 2.0)
SHOWN_DRAWS = 4
INK, PAPER, FRAME = (32, 36, 44), (255, 255, 255), (255, 64, 64)
GAP, LINE = 8, 22


def pixels(image: Tensor) -> numpy.ndarray:
    """An image (C, H, W) in [0, 1] as uint8 (H, W, 3)."""
    bytes_ = (image.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return bytes_.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()


def enlarged(picture: numpy.ndarray, side: int = SIDE) -> numpy.ndarray:
    """Each pixel so often that small pictures are about `side` wide."""
    scale = max(1, round(side / max(picture.shape[:2])))
    return picture.repeat(scale, 0).repeat(scale, 1)


def top_of(std: Tensor) -> float:
    """Where the scale of standard deviations ends: a round number above nearly all of them."""
    most = max(torch.quantile(std.flatten()[: 1 << 20].float(), 0.995).item(), 1e-4)
    unit = 10.0 ** math.floor(math.log10(most))
    return next(unit * n for n in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if unit * n >= 0.999 * most)


def in_colours(values: Tensor, top: float) -> numpy.ndarray:
    """Numbers (H, W) from 0 to `top` in colour, uint8 (H, W, 3)."""
    places = (values / top).clamp(0, 1).double().numpy()
    at = numpy.linspace(0, 1, len(COLOURS))
    channels = [numpy.interp(places, at, channel) for channel in zip(*COLOURS, strict=True)]
    return numpy.stack(channels, -1).round().astype("uint8")


def pooled(std: Tensor) -> Tensor:
    """One standard deviation a pixel (H, W): the root mean square over the channels."""
    return std.square().mean(0).sqrt()


def std_picture(std: Tensor) -> numpy.ndarray:
    """The map of standard deviations (C, H, W) with its scale beside it."""
    from PIL import Image, ImageDraw

    values = pooled(std)
    top = top_of(values)
    body = enlarged(in_colours(values, top))
    height, width = body.shape[:2]
    canvas = Image.new("RGB", (width + GAP + 64, max(height, 3 * LINE)), PAPER)
    canvas.paste(Image.fromarray(body), (0, 0))
    ramp = in_colours(torch.linspace(top, 0, canvas.height)[:, None].expand(-1, 16), top)
    canvas.paste(Image.fromarray(ramp), (width + GAP, 0))
    pen = ImageDraw.Draw(canvas)
    for share in (0.0, 0.5, 1.0):
        y = round((1 - share) * (canvas.height - 16))
        pen.text((width + GAP + 21, y), f"{share * top:.3g}", fill=INK, font=_font(13))
    return numpy.asarray(canvas)


def walk_pictures(seen: ImagePosterior) -> list[list[numpy.ndarray]]:
    """The images mean + step * std * direction of each component, cut to the region if any."""
    return [[enlarged(pixels(image)) for image in walk] for walk in seen.walk(STEPS, seen.region)]


def direction_picture(seen: ImagePosterior, i: int) -> numpy.ndarray:
    """A component itself: grey is no change, brighter and darker are changes either way."""
    direction = seen.directions[i]
    direction = direction if seen.region is None else inside(direction, seen.region)
    # A quantile, since single pixels would take all greys for themselves.
    top = torch.quantile(direction.abs().flatten(), 0.995).clamp(min=1e-12)
    return enlarged(pixels(0.5 + 0.5 * direction / top))


def strip(pictures: list[numpy.ndarray]) -> numpy.ndarray:
    """Pictures of one height beside each other, white between them."""
    between = numpy.full((pictures[0].shape[0], GAP, 3), 255, dtype=numpy.uint8)
    parts = [part for picture in pictures for part in (between, picture)][1:]
    return numpy.concatenate(parts, 1)


def framed(picture: numpy.ndarray, seen: ImagePosterior) -> numpy.ndarray:
    """A picture of the whole image with a line around the region."""
    if seen.region is None:
        return picture
    from PIL import Image, ImageDraw

    scale = picture.shape[0] / seen.mean.shape[1]
    x, y, w, h = (round(scale * place) for place in seen.region)
    image = Image.fromarray(picture)
    ImageDraw.Draw(image).rectangle(
        (x, y, x + w - 1, y + h - 1), outline=FRAME, width=max(1, round(scale / 3), 2)
    )
    return numpy.asarray(image)


def main_pictures(seen: ImagePosterior) -> dict[str, numpy.ndarray]:
    """The pictures of the whole image, by what they show."""
    truth = {} if seen.truth is None else {"truth": enlarged(pixels(seen.truth))}
    mean = framed(enlarged(pixels(seen.mean)), seen)
    return {**truth, "noisy": enlarged(pixels(seen.noisy)), "mean": mean}


def overview(seen: ImagePosterior) -> bytes:
    """One PNG: the image, its mean, uncertainty and draws; then a row for each component."""
    values = pooled(seen.std)
    top = top_of(values)
    first = main_pictures(seen) | {f"std, 0 to {top:.2g}": enlarged(in_colours(values, top))}
    for i, draw in enumerate(seen.draws[:SHOWN_DRAWS], 1):
        first[f"draw {i}"] = enlarged(pixels(draw))
    rows = [{word: _reduced(picture) for word, picture in first.items()}]
    for i, row in enumerate(walk_pictures(seen)):
        words = ["mean" if step == 0 else f"{step:+g} std" for step in STEPS]
        words[0] = f"component {i + 1}: {words[0]}"
        shown = dict(zip(words, row, strict=True))
        rows.append(shown | {"what changes": direction_picture(seen, i)})
    return png(_rows(rows))


def _reduced(picture: numpy.ndarray) -> numpy.ndarray:
    """A picture of at most MOST_SIDE pixels a side."""
    from PIL import Image

    image = Image.fromarray(picture)
    image.thumbnail((MOST_SIDE, MOST_SIDE), Image.Resampling.BOX)
    return numpy.asarray(image)


def _rows(rows: list[dict[str, numpy.ndarray]]) -> numpy.ndarray:
    """Rows of pictures with words above them."""
    from PIL import Image, ImageDraw

    font = _font(14)
    widths = [sum(picture.shape[1] + GAP for picture in row.values()) + GAP for row in rows]
    heights = [max(picture.shape[0] for picture in row.values()) + LINE + GAP for row in rows]
    canvas = Image.new("RGB", (max(widths), sum(heights) + GAP), PAPER)
    pen, y = ImageDraw.Draw(canvas), 0
    for row, height in zip(rows, heights, strict=True):
        x = GAP
        for word, picture in row.items():
            while word and pen.textlength(word, font=font) > picture.shape[1]:
                word = word[:-1]
            pen.text((x, y + 3), word, fill=INK, font=font)
            canvas.paste(Image.fromarray(picture), (x, y + LINE))
            x += picture.shape[1] + GAP
        y += height
    return numpy.asarray(canvas)


def _font(size: int) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)  # type: ignore[return-value]
