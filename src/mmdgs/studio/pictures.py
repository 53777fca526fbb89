"""Pictures for a page: files inside HTML with words under them, and pictures of the plane.

Draws alternate in one frame, and the uncertainty fades in over the mean: viewer.js moves both.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from mmdgs.uncertainty.page import image_tag
from mmdgs.uncertainty.pictures import in_colours, pooled, top_of

if TYPE_CHECKING:
    from PIL import Image

Captioned = tuple[str, numpy.ndarray]
"""Words, and a uint8 picture."""
VIEWER = files("mmdgs.studio").joinpath("viewer.js").read_text(encoding="utf-8")
BLUE, ORANGE, GREEN, GREY = (66, 133, 214), (232, 119, 34), (24, 160, 88), (128, 138, 152)
"""Colours that are seen on white and on black."""
LIMIT, GRID = 2.4, 145
"""The grid of the plane, in cells of 1/30: at most one standard deviation of the narrowest
posterior, where sums are exact."""
VIEW = 2.0
"""Where pictures of the plane end: the grid does not hold posteriors of points beyond."""
FINER = 2
"""Pictures of the plane are drawn so much larger and then shrunk: smooth lines."""


def figures(pictures: Iterable[Captioned], wide: bool = False, before: str = "") -> str:
    """Pictures with their words, as HTML that wraps to the width of the page."""
    parts = [
        f'<figure class="{"mm-wide" if wide else "mm-small"}">{image_tag(words, picture)}'
        f"<figcaption>{html.escape(words)}</figcaption></figure>"
        for words, picture in pictures
    ]
    return f'<div class="mm-figures">{before}{"".join(parts)}</div>'


def stack(kind: str, pictures: Iterable[Captioned], frame: Sequence[float] = ()) -> str:
    """Pictures over one another, with controls by viewer.js: they take `turns`, or the second
    `fades` in over the first. A `frame` is in shares: left, top, width and height.
    """
    sides = zip(("left", "top", "width", "height"), frame, strict=False)
    place = ";".join(f"{side}:{100 * share:.3f}%" for side, share in sides)
    images = "".join(image_tag(*picture) for picture in pictures)
    images += f'<i style="{place}"></i>' if frame else ""
    return f'<figure class="mm-stack mm-{kind}"><div class="mm-frame">{images}</div></figure>'


def bars(shares: Iterable[tuple[str, float, float]]) -> str:
    """Shares with the right ones beside them, as HTML bars."""
    rows = [
        f'<tr><td>{html.escape(name)}</td><td class="mm-bar">'
        f'<div style="width:{100 * min(share, 1):.1f}%"></div>'
        f'<i style="left:{100 * min(right, 1):.1f}%"></i></td>'
        f"<td>{100 * share:.0f}% (right: {100 * right:.0f}%)</td></tr>"
        for name, share, right in shares
    ]
    return f'<table class="mm-bars">{"".join(rows)}</table>'


def spread_picture(words: str, std: Tensor) -> Captioned:
    """Standard deviations (C, H, W) in colour, and words that say what the colours reach to."""
    values = pooled(std)
    top = top_of(values)
    return f"{words}: std, 0 (black) to {top:.2g}", in_colours(values, top)


def visible_state(x: Tensor, spread: float) -> Tensor:
    """States in [0, 1] units with noise of this spread, at a contrast that can be seen."""
    return 0.5 + (x - 0.5) / (1 + 2 * spread)


def plane_grid() -> tuple[Tensor, float]:
    """A grid (GRID^2, 2) of (x, y) on [-LIMIT, LIMIT]^2, rows upwards; and a cell's area."""
    line = torch.linspace(-LIMIT, LIMIT, GRID, dtype=torch.float64)
    return torch.cartesian_prod(line, line).flip(1), (2 * LIMIT / (GRID - 1)) ** 2


def plane_picture(
    density: Tensor,
    side: int,
    dots: Tensor | None = None,
    at: tuple[float, float] | None = None,
    ellipse: tuple[Tensor, Tensor] | None = None,
) -> numpy.ndarray:
    """A density on the grid (GRID^2,) in blue, from -VIEW to VIEW, as RGBA (side, side, 4).

    `dots` (n, 2) are drawn in orange, a point as a green cross, and a Gaussian (mean, covariance)
    as the ellipses that hold 50% (thick) and 95% of it.
    """
    from PIL import Image, ImageDraw

    strength = (density / density.max()).reshape(GRID, GRID).flip(0).sqrt()  # rows go down
    canvas = numpy.empty((GRID, GRID, 4), dtype=numpy.uint8)
    canvas[..., :3] = BLUE
    canvas[..., 3] = (235 * strength).round().numpy()
    size, cut = FINER * side, (GRID - 1) / 2 * (1 - VIEW / LIMIT)
    box = (cut + 0.5, cut + 0.5, GRID - cut - 0.5, GRID - cut - 0.5)  # between cells' middles
    image = Image.fromarray(canvas).resize((size, size), Image.Resampling.BILINEAR, box=box)

    def place(xy: Tensor) -> list[tuple[float, float]]:
        spots = (xy.double() / VIEW * torch.tensor([1.0, -1.0]).double() + 1) * size / 2
        return [(x, y) for x, y in spots.tolist()]

    _draw_axes(image)
    pen = ImageDraw.Draw(image)
    if dots is not None:
        for x, y in place(dots):
            pen.ellipse((x - 4, y - 4, x + 4, y + 4), fill=(*ORANGE, 190))
    if ellipse is not None:
        mean, covariance = ellipse
        angle = torch.linspace(0, 2 * torch.pi, 181, dtype=torch.float64)
        factor = torch.linalg.cholesky(covariance.double())
        circle = torch.stack([angle.cos(), angle.sin()], 1) @ factor.mT
        # A 2-D Gaussian holds a share p within the radius sqrt(-2 log(1 - p)).
        for share, width in ((0.95, 3), (0.5, 6)):
            spots = place(mean.double() + (-2 * torch.tensor(1 - share).log()).sqrt() * circle)
            pen.line(spots, fill=(*ORANGE, 255), width=width, joint="curve")
    if at is not None:
        ((x, y),) = place(torch.tensor([at]))
        for ends in (((x - 14, y - 14), (x + 14, y + 14)), ((x - 14, y + 14), (x + 14, y - 14))):
            pen.line(ends, fill=(*GREEN, 255), width=7)
    return numpy.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


def _draw_axes(image: Image.Image) -> None:
    """Faint axes through zero, with numbers at -1 and 1."""
    from PIL import ImageDraw, ImageFont

    size, middle = image.width, image.width / 2
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size // 28)
    pen.line(((middle, 0), (middle, size)), fill=(*GREY, 90), width=2)
    pen.line(((0, middle), (size, middle)), fill=(*GREY, 90), width=2)
    for value in (-1, 1):
        spot = middle + value / VIEW * middle
        pen.text((spot, size - 4), str(value), fill=(*GREY, 255), font=font, anchor="mb")
        pen.text((6, size - spot), str(value), fill=(*GREY, 255), font=font, anchor="lm")
