"""Drawing: one look for all figures (no global matplotlib state)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from mmdgs.data.pictures import tiled

BLUE, ORANGE, GREEN, GREY, RED, PINK = "#3566a8", "#e07b1f", "#2f8f5b", "#7a8494", "#c0392b", "#d1478c"
PURPLE, SLATE = "#8a5fb0", "#4a5568"


class Style(NamedTuple):
    """How a row is drawn: its colour, and marker and line as matplotlib writes them."""

    colour: str
    line: str = "o-"


LOOKS = {
    Style(GREY): ("data", "ancestral, small", "small variance", "Rademacher (paper)", "10 products"),
    Style(GREY, "s--"): ("ancestral, large", "large variance", "3 products", "lattice, bridge"),
    Style(GREY, "v:"): ("1 product",),
    Style(SLATE): ("exact",),
    Style(PINK, "^:"): ("second", "spectral, mirrored"),
    Style(RED): ("learned", "diagonal, learned", "Langevin", "many levels, Gibbs", "1 sweep"),
    Style(RED, "s--"): ("consistent annealing", "1 sweep, down first"),
    Style(ORANGE): ("isotropic", "ancestral, isotropic"),
    Style(ORANGE, "s--"): ("Gibbs, isotropic", "isotropic, bridge"),
    Style(PINK): ("spectral", "ancestral, spectral", "spectral, multistep"),
    Style(PINK, "s--"): ("Gibbs, spectral", "spectral, from N(0, I)", "spectral, bridge"),
    Style(PURPLE, "^:"): ("diagonal, 10 Rademacher, from N(0, I)",),
    Style(PURPLE): ("diagonal", "diagonal, Rademacher", "ancestral, diagonal", "modulated, multistep"),
    Style(PURPLE, "s--"): (
        "diagonal, from N(0, I)", "diagonal, lattice", "lattice", "3 products, lattice", "ancestral, full",
        "ancestral, Krylov", "modulated, bridge",
    ),
    Style(BLUE): ("full", "lattice, filtered", "OCM head", "Gibbs (paper)", "3 sweeps", "low-rank, multistep"),
    Style(BLUE, "s--"): ("Krylov", "Gibbs, down first", "3 sweeps, down first", "low-rank, bridge"),
    Style(GREEN): ("moments", "DDIM", "10 sweeps"),
    Style(GREEN, "s--"): ("Heun", "10 sweeps, down first"),
    Style(GREEN, "^:"): ("Hadamard",),
    Style(GREEN, "^-."): ("Heun, guided",),
    Style(PINK, "D-"): ("spectral, EDM levels",),
    Style(PURPLE, "D-"): ("modulated, EDM levels",),
    Style(BLUE, "D-"): ("low rank, one-sided, EDM levels",),
    Style(BLUE, "D:"): ("low rank, one-sided, below 2, EDM levels",),
    Style(SLATE, "D-"): ("Krylov, one-sided, EDM levels",),
    Style(GREEN, "D-"): ("DDIM, EDM levels",),
    Style(RED, "^-"): ("multistep",),
    Style(RED, "^:"): ("multistep, third order",),
    Style(RED, "D--"): ("multistep, eta 1",),
    Style(RED, "o-."): ("multistep, third order, eta 1",),
    Style(SLATE, "D:"): ("MMPS",),
    Style(SLATE, "v:"): ("PiGDM",),
    Style(SLATE, "P:"): ("DPS",),
}  # fmt: skip
STYLES = {row: look for look, rows in LOOKS.items() for row in rows}
"""The look of every row of every table, by its name."""
UNIT_TICKS = (-1, 0, 1)


def style(row: str) -> Style:
    """The look of a row; grey for one without a style of its own."""
    return STYLES.get(row, Style(GREY))


def line_style(row: str) -> dict[str, Any]:
    """Arguments of matplotlib's `plot` and `errorbar` for a row's curve."""
    colour, line = style(row)
    return {"color": colour, "marker": line[0], "linestyle": line[1:], "markersize": 4, "linewidth": 1.3}


def new_figure(
    rows: int, columns: int, size: float = 2.2, *, inches: tuple[float, float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a grid of axes, each about `size` inches; or `inches` wide and high in all."""
    figure = Figure(figsize=inches or (size * columns, size * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, axes.tolist()


def new_panels(count: int, columns: int, size: float) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes in rows of at most so many; the places left in the last row are empty axes."""
    columns = min(count, columns)
    figure, axes = new_figure(-(-count // columns), columns, size)
    places = [axis for row in axes for axis in row]
    for axis in places[count:]:
        axis.set_axis_off()
    return figure, places


def square(axis: Axes, limit: float, title: str = "", ticks: Sequence[float] | None = None) -> None:
    """A square picture of [-limit, limit]^2 with light ticks, at these places if given."""
    axis.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=7, length=2, color=GREY, labelcolor=GREY)
    axis.spines[:].set_color("#cfd6e0")
    if ticks is not None:
        axis.set(xticks=ticks, yticks=ticks)


def labelled(axis: Axes, title: str, across: str, up: str, size: int = 8) -> None:
    """A title and the names of both axes, which have no frame above and to the right."""
    axis.set_title(title, fontsize=size + 1)
    axis.set_xlabel(across, fontsize=size)
    axis.set_ylabel(up, fontsize=size)
    axis.tick_params(labelsize=size - 1)
    axis.spines[["top", "right"]].set_visible(False)


def plain_logs(axis: Axes, ticks: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Ticks of logarithmic axes at these of each decade, or more of them on a short one, written as plain numbers."""
    for line in (axis.xaxis, axis.yaxis):
        if line.get_scale() != "log":
            continue
        low, high = line.get_view_interval()
        line.set_major_locator(LogLocator(subs=ticks if high > 10 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        line.set_major_formatter(lambda value, _: f"{value:,.9f}".rstrip("0").rstrip("."))
        line.set_minor_locator(NullLocator())


def grid(limit: float, points: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, float]:
    """The points (points^2, 2) of a square grid on [-limit, limit]^2, and the area of a cell."""
    line = torch.linspace(-limit, limit, points, dtype=dtype)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], dim=1), (2 * limit / (points - 1)) ** 2


def density(axis: Axes, values: Tensor, limit: float, cmap: str = "Blues", **look: Any) -> None:
    """A density on a square grid (points^2,) as an image."""
    side, ends = round(values.numel() ** 0.5), (-limit, limit, -limit, limit)
    axis.imshow(values.reshape(side, side).numpy(), extent=ends, origin="lower", cmap=cmap, **look)


def scatter(axis: Axes, points: Tensor, colour: str, size: float = 1.0, alpha: float = 0.35) -> None:
    """A cloud of points (n, 2)."""
    across, up = points.mT.numpy()
    axis.scatter(across, up, s=size, c=colour, alpha=alpha, linewidths=0, rasterized=True)


def mosaic(images: Tensor, columns: int = 5, gap: int = 1) -> Tensor:
    """Images (n, 1, H, W) as one picture (rows, columns) of tiles, row after row; NaN between the tiles."""
    return tiled(images, columns, gap=gap, fill=torch.nan)[0]


def _bare(axis: Axes, title: str, size: int = 9) -> None:
    """Axes of an image: a title of this size, no ticks and no frame."""
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=size)
    axis.spines[:].set_visible(False)


def picture(
    axis: Axes, images: Tensor, title: str = "", *, low: float = 0.0, high: float = 1.0, cmap: str = "gray"
) -> AxesImage:
    """A mosaic of images (n, 1, H, W) without ticks, `low` to `high` from one end of the colours to the other."""
    colours = colormaps[cmap].with_extremes(bad="#8d99ab")
    drawn = axis.imshow(mosaic(images).numpy(), cmap=colours, vmin=low, vmax=high, interpolation="nearest")
    _bare(axis, title)
    return drawn


def pictures(panels: Mapping[str, Tensor], size: float = 2.6, *, low: float = 0.0, high: float = 1.0) -> Figure:
    """A row of mosaics of images (n, 1, H, W), by title."""
    canvas, axes = new_figure(1, len(panels), size)
    for axis, (title, images) in zip(axes[0], panels.items(), strict=True):
        picture(axis, images, title, low=low, high=high)
    return canvas


def colour_bar(canvas: Figure, drawn: ScalarMappable, axes: Sequence[Axes], title: str) -> None:
    """The scale of an image beside all these axes."""
    bar = canvas.colorbar(drawn, ax=axes, shrink=0.75, pad=0.01)
    bar.set_label(title, fontsize=8)
    bar.ax.tick_params(labelsize=7)


def class_bars(axis: Axes, rows: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    """The share of each class (named below), a bar for each row in the row's colour."""
    width = 0.8 / len(rows)
    for i, (row, shares) in enumerate(rows.items()):
        places = [c + (i - (len(rows) - 1) / 2) * width for c in range(len(names))]
        axis.bar(places, shares, width=width, color=style(row).colour, label=row)
    axis.set_xticks(range(len(names)), names)
    labelled(axis, "", "", "share of the images")


def colour_picture(axis: Axes, images: Tensor, columns: int, title: str = "", gap: int = 1) -> None:
    """Images uint8 (n, 1 or 3, H, W) as a mosaic without ticks, white between the tiles."""
    canvas = tiled(images.float().expand(-1, 3, -1, -1) / 255, columns, gap=gap, fill=1.0)
    axis.imshow(canvas.movedim(0, -1).numpy(), interpolation="nearest")
    _bare(axis, title, 8)


def image_rows(rows: Mapping[str, Tensor], tile: float = 0.62, titles: Sequence[str] = ()) -> Figure:
    """A strip of images uint8 (n, C, H, W) for each label, one under the other; titles stand above the columns."""
    most = max(len(images) for images in rows.values())
    canvas, axes = new_figure(len(rows), 1, inches=(1.9 + tile * most, tile * len(rows)))
    for (axis,), (label, images) in zip(axes, rows.items(), strict=True):
        colour_picture(axis, images, len(images))
        axis.set_ylabel(label, fontsize=8, rotation=0, ha="right", va="center")
    width = next(iter(rows.values())).shape[3] + 1
    axes[0][0].xaxis.tick_top()
    axes[0][0].set_xticks([width * (i + 0.5) - 1 for i in range(len(titles))], titles, fontsize=8)
    axes[0][0].tick_params(length=0)
    return canvas
