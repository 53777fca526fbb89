"""Drawing: one look for all figures (no global matplotlib state)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

from mmdgs.data.pictures import tiled

BLUE, ORANGE, GREEN, GREY = "#3566a8", "#e07b1f", "#2f8f5b", "#7a8494"
RED, PINK, PURPLE, SLATE = "#c0392b", "#d1478c", "#8a5fb0", "#4a5568"
UNIT_TICKS = (-1, 0, 1)


def new_figure(
    rows: int, columns: int, size: float = 2.2, *, inches: tuple[float, float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a grid of axes, each about `size` inches; or `inches` wide and high in all."""
    figure = Figure(figsize=inches or (size * columns, size * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, axes.tolist()


def new_panels(count: int, columns: int, size: float) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes in rows of at most so many; the last row may have empty axes."""
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


def grid(limit: float, points: int) -> tuple[Tensor, float]:
    """The points (points^2, 2) of a square grid on [-limit, limit]^2, and the area of a cell."""
    line = torch.linspace(-limit, limit, points, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], dim=1), (2 * limit / (points - 1)) ** 2


def density(axis: Axes, values: Tensor, limit: float) -> None:
    """A density on a square grid (points^2,) as an image."""
    side, ends = round(values.numel() ** 0.5), (-limit, limit, -limit, limit)
    axis.imshow(values.reshape(side, side).numpy(), extent=ends, origin="lower", cmap="Blues")


def scatter(
    axis: Axes, points: Tensor, colour: str, size: float = 1.0, alpha: float = 0.35
) -> None:
    """A cloud of points (n, 2)."""
    across, up = points.mT.numpy()
    axis.scatter(across, up, s=size, c=colour, alpha=alpha, linewidths=0, rasterized=True)


def bare(axis: Axes, title: str, size: int = 9) -> None:
    """Axes of an image: a title of this size, no ticks and no frame."""
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=size)
    axis.spines[:].set_visible(False)


def picture(
    axis: Axes,
    images: Tensor,
    title: str = "",
    *,
    ends: tuple[float, float] = (0, 1),
    cmap: str = "gray",
) -> AxesImage:
    """A mosaic of images (n, 1, H, W), five in a row, coloured between two ends."""
    colours = colormaps[cmap].with_extremes(bad="#8d99ab")
    mosaic = tiled(images, 5, gap=1, fill=torch.nan)[0].numpy()
    low, high = ends
    drawn = axis.imshow(mosaic, cmap=colours, vmin=low, vmax=high, interpolation="nearest")
    bare(axis, title)
    return drawn


def pictures(panels: Mapping[str, Tensor], size: float = 2.6) -> Figure:
    """A row of mosaics of images (n, 1, H, W), by title."""
    canvas, axes = new_figure(1, len(panels), size)
    for axis, (title, images) in zip(axes[0], panels.items(), strict=True):
        picture(axis, images, title)
    return canvas
