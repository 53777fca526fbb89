"""Direct labels: the name of every curve of a panel beside one of its points, in the curve's colour.

Each label takes the place with the least cost among PLACES around each point of its curve. A place costs where it
covers another label, a marker or a curve, or leaves the panel, and where its point lies on points of other curves.
Labels are placed one after the other, then again, now that all others are known, until none moves. A label that lies
further off has a thin line to its point.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

ROUNDS = 20
"""At most so often is each label placed."""
GAP, STEP = 5.0, 7.0
"""Points of the page from a marker to its label's nearer edge, across, and to the label's middle, upwards."""
PLACES = (
    (1.0, 0.0), (-1.0, 0.0), (1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0), (0.0, 1.5), (0.0, -1.5),
    *((across, up) for up in (2.2, -2.2, 3.4, -3.4) for across in (1.0, -1.0)),
)  # fmt: skip
"""Where a label may lie from its point, in GAP across and in STEP upwards: to the right first, far off last."""
NEAR = 2.0
"""A label higher or lower than this, in STEP, has a line to its point."""
COVERS_LABEL, LEAVES_PANEL, COVERS_MARKER, COVERS_CURVE = 50.0, 50.0, 10.0, 1.5
SHARED_POINT, NEAR_OTHER, INNER_POINT, LATER_PLACE = 3.0, 2.0, 1.0, 0.15
"""Costs: of an overlap with another label, of leaving the panel, of each marker that is covered, of each PIXELS of a
curve; of each point of another curve within SHARED of its own, and as near to the label; of a point that is not an end
of its curve, and of each place that comes later in PLACES. What the line to a label crosses costs as what the label
covers."""
SHARED, MARKER = 5.0, 3.0
"""Points of the page; and half the width of a marker, in pixels."""
PIXELS = 6.0
"""Distance between the points at which a curve is followed."""


class _Curve(NamedTuple):
    name: str
    colour: str
    data: NDArray[numpy.float64]  # (n, 2), in data units
    points: NDArray[numpy.float64]  # (n, 2), in pixels
    path: NDArray[numpy.float64]  # the curve and its error bars followed, in pixels


class _Place(NamedTuple):
    point: int
    shape: tuple[Bbox, ...]  # what the label and its line take up, in pixels
    offset: tuple[float, float]  # from the point, in points of the page
    side: float  # 1: right of the point, -1: left
    cost: float


def label_curves(canvas: Figure, size: float = 8.0) -> None:
    """Label every curve with a name in all panels of a figure; call it last, when limits and titles are set."""
    canvas.draw_without_rendering()  # fixes the layout, and so the pixels
    for axis in canvas.axes:
        _label_panel(axis, size)


def _label_panel(axis: Axes, size: float) -> None:
    curves = {curve.name: curve for curve in _curves(axis)}
    nameless = list(_nameless(axis))
    places = {name: list(_places(axis, curve, list(curves.values()), nameless, size)) for name, curve in curves.items()}
    chosen: dict[str, _Place] = {}
    for _ in range(ROUNDS):
        before = dict(chosen)
        for name, own in places.items():
            taken = [box for other, place in chosen.items() if other != name for box in place.shape]
            costs = [place.cost + COVERS_LABEL * _covered(place, taken) for place in own]
            chosen[name] = own[costs.index(min(costs))]
        if chosen == before:
            break
    for name, place in chosen.items():
        _write(axis, curves[name], place, size)


def _covered(place: _Place, taken: list[Bbox]) -> int:
    return sum(own.overlaps(other) for own in place.shape for other in taken)


def _curves(axis: Axes) -> Iterator[_Curve]:
    for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
        line, _, bars = handle if isinstance(handle, ErrorbarContainer) else (handle, (), ())
        if not isinstance(line, Line2D):
            continue
        data = numpy.asarray(line.get_xydata(), dtype=float)
        points = axis.transData.transform(data)
        segments = [axis.transData.transform(bar) for some in bars for bar in some.get_segments() if len(bar)]
        path = numpy.concatenate([_followed(one) for one in (points, *segments)])
        yield _Curve(name, str(line.get_color()), data, points, path)


def _nameless(axis: Axes) -> Iterator[NDArray[numpy.float64]]:
    """The lines of a panel that get no label, followed."""
    parts = {
        part for one in axis.containers if isinstance(one, ErrorbarContainer) for part in (one.lines[0], *one.lines[1])
    }
    for line in axis.lines:
        if line not in parts and str(line.get_label()).startswith("_"):
            yield _followed(line.get_transform().transform(numpy.asarray(line.get_xydata(), dtype=float)))


def _followed(points: NDArray[numpy.float64], every: float = PIXELS) -> NDArray[numpy.float64]:
    """Points every so many pixels along a path."""
    pieces = [points[:1]]
    for start, end in pairwise(points):
        count = max(2, int(numpy.hypot(*(end - start)) / every))
        pieces.append(start + (end - start) * numpy.linspace(0, 1, count)[1:, None])
    return numpy.concatenate(pieces)


def _places(
    axis: Axes, curve: _Curve, curves: list[_Curve], nameless: list[NDArray[numpy.float64]], size: float
) -> Iterator[_Place]:
    width, height = _extent(axis, curve.name, size)
    pixels = axis.figure.dpi / 72
    panel, last = axis.get_window_extent(), len(curve.points) - 1
    others = numpy.concatenate([numpy.full((1, 2), numpy.inf), *(one.points for one in curves if one is not curve)])
    everything = [(one.points, COVERS_MARKER, MARKER) for one in curves]
    everything += [(path, COVERS_CURVE, 0.0) for path in (*(one.path for one in curves), *nameless)]
    everything += [(others, NEAR_OTHER, 1.2 * GAP * pixels)]
    for i, (x, y) in enumerate(curve.points):
        shared = int((numpy.hypot(*(others - (x, y)).T) < SHARED * pixels).sum())
        for later, (across, up) in enumerate(PLACES):
            offset = (across * GAP, up * STEP)
            left = x + offset[0] * pixels - width * (0.5 if across == 0 else across < 0)
            box = Bbox.from_bounds(left, y + offset[1] * pixels - height / 2, width, height)
            line = _line(x, y, box) if abs(up) > NEAR else ()
            cost = LATER_PLACE * later + INNER_POINT * (0 < i < last) + SHARED_POINT * shared
            cost += LEAVES_PANEL * (box.x0 < panel.x0 or box.x1 > panel.x1 or box.y0 < panel.y0 or box.y1 > panel.y1)
            cost += sum(each * _inside(points, box.padded(by)) for points, each, by in everything)
            cost += sum(
                each * _inside(points, part.padded(by)) for points, each, by in everything[:-1] for part in line
            )
            yield _Place(i, (box, *line), offset, across, cost)


def _line(x: float, y: float, label: Bbox) -> tuple[Bbox, ...]:
    """Small boxes along the line from a point, which they leave out, to a label's nearer edge."""
    ends = numpy.array([(x, y), (min(max(x, label.x0), label.x1), min(max(y, label.y0), label.y1))])
    return tuple(Bbox.from_bounds(a - 1, b - 1, 2, 2) for a, b in _followed(ends, 3.0)[2:-1])


def _inside(points: NDArray[numpy.float64], box: Bbox) -> int:
    return int(((points > box.min) & (points < box.max)).all(1).sum())


def _extent(axis: Axes, name: str, size: float) -> tuple[float, float]:
    """Width and height of a text in pixels."""
    text = axis.text(0, 0, name, fontsize=size)
    box = text.get_window_extent()
    text.remove()
    return box.width, box.height


def _write(axis: Axes, curve: _Curve, place: _Place, size: float) -> None:
    corner = (float(place.side < 0), float(place.offset[1] < 0))  # of the label: the one nearest to the point
    line = {"arrowstyle": "-", "color": curve.colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": corner}
    label = axis.annotate(
        curve.name, curve.data[place.point], place.offset, textcoords="offset points", fontsize=size,
        color=curve.colour, va="center", ha="center" if place.side == 0 else "left" if place.side > 0 else "right",
        path_effects=[withStroke(linewidth=2, foreground="white")],
        arrowprops=line if abs(place.offset[1]) > NEAR * STEP else None,
    )  # fmt: skip
    label.set_in_layout(False)  # the panel stays where the places were looked for
