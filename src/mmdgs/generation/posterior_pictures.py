"""Pictures of a posterior: standard deviations in colour with a scale, components that walk, and one overview."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from mmdgs.data.pictures import png
from mmdgs.generation.posteriors import ImagePosterior
from mmdgs.linalg.components import inside

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

COLOURS = (
    (0, 0, 4),
    (40, 11, 84),
    (101, 21, 110),
    (159, 42, 99),
    (212, 72, 66),
    (245, 125, 21),
    (250, 193, 39),
    (252, 255, 164),
)
"""From nothing to most: "inferno", which is read in grey as well."""
SIDE = 192
"""How wide small images are drawn, about."""
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
    return next(unit * one for one in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if unit * one >= 0.999 * most)


def in_colours(values: Tensor, top: float) -> numpy.ndarray:
    """Numbers (H, W) from 0 to `top` in colour, uint8 (H, W, 3)."""
    places = (values / top).clamp(0, 1).double().numpy()
    at = numpy.linspace(0, 1, len(COLOURS))
    return (
        numpy.stack([numpy.interp(places, at, [c[i] for c in COLOURS]) for i in range(3)], -1).round().astype("uint8")
    )


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
    """The images mean + step * std * direction, for each component; of the region where there is one."""
    found = seen.walk(STEPS)
    found = found if seen.region is None else inside(found, seen.region)
    return [[enlarged(pixels(one)) for one in row] for row in found]


def direction_picture(seen: ImagePosterior, i: int) -> numpy.ndarray:
    """A component itself: grey is no change, brighter and darker are changes either way."""
    one = seen.directions[i]
    one = one if seen.region is None else inside(one, seen.region)
    # Nearly all of it within the greys: single pixels would take them for themselves.
    top = torch.quantile(one.abs().flatten(), 0.995).clamp(min=1e-12)
    return enlarged(pixels(0.5 + 0.5 * one / top))


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
    x, y, w, h = (round(scale * one) for one in seen.region)
    image = Image.fromarray(picture)
    ImageDraw.Draw(image).rectangle((x, y, x + w - 1, y + h - 1), outline=FRAME, width=max(1, round(scale / 3), 2))
    return numpy.asarray(image)


def main_pictures(seen: ImagePosterior) -> dict[str, numpy.ndarray]:
    """The pictures of the whole image, by what they show."""
    found = {} if seen.truth is None else {"truth": enlarged(pixels(seen.truth))}
    found |= {"noisy": enlarged(pixels(seen.noisy)), "mean": framed(enlarged(pixels(seen.mean)), seen)}
    return found


def overview(seen: ImagePosterior) -> bytes:
    """One PNG: the image, its mean, uncertainty and draws; then a row for each component."""
    values = pooled(seen.std)
    top = top_of(values)
    first = dict(main_pictures(seen))
    first[f"std, 0 to {top:.2g}"] = enlarged(in_colours(values, top))
    first |= {f"draw {i + 1}": enlarged(pixels(one)) for i, one in enumerate(seen.draws[:SHOWN_DRAWS])}
    rows = [first]
    for i, row in enumerate(walk_pictures(seen)):
        words = ["mean" if step == 0 else f"{step:+g} std" for step in STEPS]
        words[0] = f"component {i + 1}: {words[0]}"
        rows.append(dict(zip(words, row, strict=True)) | {"what changes": direction_picture(seen, i)})
    return png(_rows(rows))


def _rows(rows: list[dict[str, numpy.ndarray]]) -> numpy.ndarray:
    """Rows of pictures with words above them."""
    from PIL import Image, ImageDraw

    font = _font(14)
    widths = [sum(one.shape[1] + GAP for one in row.values()) + GAP for row in rows]
    heights = [max(one.shape[0] for one in row.values()) + LINE + GAP for row in rows]
    canvas = Image.new("RGB", (max(widths), sum(heights) + GAP), PAPER)
    pen, y = ImageDraw.Draw(canvas), 0
    for row, height in zip(rows, heights, strict=True):
        x = GAP
        for word, picture in row.items():
            _write(pen, (x, y + 3), word, font, picture.shape[1])
            canvas.paste(Image.fromarray(picture), (x, y + LINE))
            x += picture.shape[1] + GAP
        y += height
    return numpy.asarray(canvas)


def _write(pen: ImageDraw.ImageDraw, at: tuple[int, int], word: str, font: ImageFont.FreeTypeFont, width: int) -> None:
    while word and pen.textlength(word, font=font) > width:
        word = word[:-1]
    pen.text(at, word, fill=INK, font=font)


def _font(size: int) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)  # type: ignore[return-value]
