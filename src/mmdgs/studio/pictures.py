"""Pictures for a page: small PNG files inside the HTML, with words under them, and pictures of the plane."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from mmdgs.data.pictures import png
from mmdgs.generation.posterior_pictures import in_colours, pooled, top_of

if TYPE_CHECKING:
    from PIL import Image

BLUE, ORANGE, GREEN, GREY = (66, 133, 214), (232, 119, 34), (24, 160, 88), (128, 138, 152)
"""Colours that are seen on white and on black."""
FINER = 2
"""Pictures of the plane are drawn so much larger and then shrunk: smooth lines."""


def figures(items: Iterable[tuple[str, numpy.ndarray]], wide: bool = False) -> str:
    """uint8 pictures with a caption each, as HTML that wraps to the width of the page."""
    kind = "mm-wide" if wide else "mm-small"
    found = [
        f'<figure class="{kind}"><img alt="{html.escape(words, quote=True)}" src="{data_uri(picture)}">'
        f"<figcaption>{html.escape(words)}</figcaption></figure>"
        for words, picture in items
    ]
    return f'<div class="mm-figures">{"".join(found)}</div>'


def data_uri(picture: numpy.ndarray) -> str:
    """A uint8 picture as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png(picture)).decode()


def spread_picture(words: str, std: Tensor) -> tuple[str, numpy.ndarray]:
    """Standard deviations (C, H, W) in colour, and words that say what the colours reach to."""
    values = pooled(std)
    top = top_of(values)
    return f"{words}: std, 0 (black) to {top:.2g} (yellow)", in_colours(values, top)


def square_grid(limit: float, points: int) -> tuple[Tensor, float]:
    """The points (x, y) of a grid on [-limit, limit]^2, (points^2, 2), row by row upwards; and the area of a cell."""
    line = torch.linspace(-limit, limit, points, dtype=torch.float64)
    return torch.cartesian_prod(line, line).flip(1), (2 * limit / (points - 1)) ** 2


def plane_picture(
    density: Tensor,
    limit: float,
    side: int,
    *,
    view: float,
    dots: Tensor | None = None,
    at: tuple[float, float] | None = None,
    ellipse: tuple[Tensor, Tensor] | None = None,
) -> numpy.ndarray:
    """A density on a square grid (points^2,) over [-limit, limit]^2 in blue, as RGBA with nothing where it is zero.

    The picture shows [-view, view]^2.
    `dots` (n, 2) are drawn in orange, a point as a green cross, and a Gaussian (mean, covariance) as the ellipses that
    hold 50% (thick) and 95% of it.
    """
    from PIL import Image, ImageDraw

    points = round(density.numel() ** 0.5)
    strength = (density / density.max()).reshape(points, points).flip(0).sqrt()  # the picture's rows go down
    canvas = numpy.empty((points, points, 4), dtype=numpy.uint8)
    canvas[..., :3] = BLUE
    canvas[..., 3] = (235 * strength).round().numpy()
    size, cut = FINER * side, (points - 1) / 2 * (1 - view / limit)
    box = (cut + 0.5, cut + 0.5, points - cut - 0.5, points - cut - 0.5)  # from the middle of a cell to another's
    image = Image.fromarray(canvas).resize((size, size), Image.Resampling.BILINEAR, box=box)

    def place(xy: Tensor) -> list[tuple[float, float]]:
        spots = (xy.double() / view * torch.tensor([1.0, -1.0]).double() + 1) * size / 2
        return [(x, y) for x, y in spots.tolist()]

    _ticks(image, view)
    pen = ImageDraw.Draw(image)
    if dots is not None:
        for x, y in place(dots):
            pen.ellipse((x - 4, y - 4, x + 4, y + 4), fill=(*ORANGE, 190))
    if ellipse is not None:
        mean, covariance = ellipse
        angle = torch.linspace(0, 2 * torch.pi, 181, dtype=torch.float64)
        circle = torch.stack([angle.cos(), angle.sin()], 1) @ torch.linalg.cholesky(covariance.double()).mT
        # A 2-D Gaussian holds a share p within the radius sqrt(-2 log(1 - p)).
        for share, width in ((0.95, 3), (0.5, 6)):
            radius = (-2 * torch.tensor(1 - share).log()).sqrt()
            pen.line(place(mean.double() + radius * circle), fill=(*ORANGE, 255), width=width, joint="curve")
    if at is not None:
        ((x, y),) = place(torch.tensor([at]))
        for ends in (((x - 14, y - 14), (x + 14, y + 14)), ((x - 14, y + 14), (x + 14, y - 14))):
            pen.line(ends, fill=(*GREEN, 255), width=7)
    return numpy.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


def _ticks(image: Image.Image, limit: float) -> None:
    """Faint axes through zero, with numbers at whole ones."""
    from PIL import ImageDraw, ImageFont

    size = image.width
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size // 28)
    middle = size / 2
    pen.line(((middle, 0), (middle, size)), fill=(*GREY, 90), width=2)
    pen.line(((0, middle), (size, middle)), fill=(*GREY, 90), width=2)
    for value in range(-int(limit) + 1, int(limit)):
        if value:
            spot = middle + value / limit * middle
            pen.text((spot, size - 4), str(value), fill=(*GREY, 255), font=font, anchor="mb")
            pen.text((6, size - spot), str(value), fill=(*GREY, 255), font=font, anchor="lm")


def bars(shares: Iterable[tuple[str, float, float]]) -> str:
    """Shares with the right ones beside them, as HTML bars."""
    rows = [
        f'<tr><td>{html.escape(name)}</td><td class="mm-bar"><div style="width:{100 * min(share, 1):.1f}%"></div>'
        f'<i style="left:{100 * min(right, 1):.1f}%"></i></td>'
        f"<td>{100 * share:.0f}% (right: {100 * right:.0f}%)</td></tr>"
        for name, share, right in shares
    ]
    return f'<table class="mm-bars">{"".join(rows)}</table>'
