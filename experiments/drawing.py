"""The look of the experiments' rows, and figures that only they draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from mmdgs.data.pictures import tiled
from mmdgs.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    SLATE,
    bare,
    labelled,
    new_figure,
)


class Style(NamedTuple):
    """A row's colour, and its marker and line as matplotlib writes them."""

    colour: str
    line: str = "o-"


LOOKS = {
    Style(GREY): ("data", "ancestral, small", "small variance", "Rademacher (paper)"),
    Style(GREY, "s--"): ("ancestral, large", "large variance"),
    Style(SLATE): ("exact",),
    Style(PINK, "^:"): ("second", "spectral, mirrored"),
    Style(RED): ("learned", "diagonal, learned", "Langevin", "many levels, Gibbs", "1 sweep"),
    Style(RED, "s--"): ("consistent annealing", "1 sweep, down first"),
    Style(ORANGE): ("isotropic", "ancestral, isotropic"),
    Style(ORANGE, "s--"): ("Gibbs, isotropic", "isotropic, bridge"),
    Style(PINK): ("spectral", "ancestral, spectral", "spectral, multistep"),
    Style(PINK, "s--"): ("Gibbs, spectral", "spectral, from N(0, I)", "spectral, bridge"),
    Style(PURPLE, "^:"): ("diagonal, 10 Rademacher, from N(0, I)",),
    Style(PURPLE): ("diagonal", "diagonal, Rademacher", "ancestral, diagonal",
                    "modulated, multistep"),
    Style(PURPLE, "s--"): (
        "diagonal, from N(0, I)", "diagonal, lattice", "lattice", "ancestral, full",
        "ancestral, Krylov", "modulated, bridge",
    ),
    Style(BLUE): ("full", "lattice, filtered", "OCM head", "Gibbs (paper)", "3 sweeps",
                  "low-rank, multistep"),
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
    Style(BLUE, "^-"): ("particles",),
    Style(ORANGE, "^--"): ("TDS",),
    Style(GREEN, "D-."): ("MCG-Diff",),
    Style(PINK, "v:"): ("bridge with sweeps",),
    Style(SLATE, "D:"): ("MMPS", "MMPS (azula)"),
    Style(SLATE, "v:"): ("PiGDM", "PiGDM (azula)"),
    Style(SLATE, "P:"): ("DPS", "DPS (azula)"),
    Style(SLATE, "s:"): ("DiffPIR (azula)",),
}  # fmt: skip
STYLES = {row: look for look, rows in LOOKS.items() for row in rows}


def style(row: str) -> Style:
    """The look of a row; grey for one without a style of its own."""
    return STYLES.get(row, Style(GREY))


def line_style(row: str) -> dict[str, Any]:
    """Arguments of matplotlib's `plot` and `errorbar` for a row's curve."""
    colour, line = style(row)
    look = {"marker": line[0], "linestyle": line[1:], "markersize": 4, "linewidth": 1.3}
    return {"color": colour, **look}


def legend(canvas: Figure) -> None:
    """The name of every curve of all panels once, to the right of them."""
    handles: dict[str, Any] = {}
    for axis in canvas.axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    canvas.legend(handles.values(), handles, loc="outside right center", frameon=False, fontsize=8)


def plain_logs(axis: Axes, ticks: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Ticks of logarithmic axes at these of each decade, or more of them on a short one, written as
    plain numbers.
    """
    for line in (axis.xaxis, axis.yaxis):
        if line.get_scale() != "log":
            continue
        low, high = line.get_view_interval()
        line.set_major_locator(
            LogLocator(subs=ticks if high > 10 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
        )
        line.set_major_formatter(lambda value, _: f"{value:,.9f}".rstrip("0").rstrip("."))
        line.set_minor_locator(NullLocator())


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
    bare(axis, title, 8)


def image_rows(
    rows: Mapping[str, Tensor], tile: float = 0.62, titles: Sequence[str] = ()
) -> Figure:
    """A strip of images uint8 (n, C, H, W) for each label, one under the other; titles stand above
    the columns.
    """
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
