"""Direct labels of curves (lab/labels.py) cover neither lines nor error bars where there is room beside them."""

from itertools import pairwise

import numpy
import pytest
from matplotlib.figure import Figure

from mmdgs.lab.labels import label_curves


def labelled(obstacle: str | None) -> tuple[Figure, list]:
    """Something tall to the right of a point, where its label would lie: an error bar, or a line without a name."""
    canvas = Figure(figsize=(6, 4))
    axis = canvas.subplots()
    axis.set(xlim=(0, 10), ylim=(0, 10))
    high = 3.0 if obstacle == "error bar" else 0.1
    axis.errorbar([5.0], [5.0], yerr=[0.1], fmt="o", color="#3366aa", label="a label of some length")
    axis.errorbar([6.5], [8.0], yerr=[[high], [0.1]], fmt="o", color="#aa3333", label="b")
    if obstacle == "line":
        axis.plot([6.5, 6.5], [4.8, 8.0])
    label_curves(canvas)
    return canvas, list(axis.texts)


@pytest.mark.parametrize("obstacle", ["error bar", "line", None])
def test_a_label_leaves_lines_and_error_bars_free(obstacle: str | None):
    canvas, texts = labelled(obstacle)
    assert [text.get_text() for text in texts] == ["a label of some length", "b"]  # the line has none
    box = texts[0].get_window_extent()
    bar = canvas.axes[0].transData.transform([(6.5, y) for y in numpy.linspace(5.0, 8.0, 100)])
    covered = [start for start, _ in pairwise(bar) if box.contains(*start)]
    assert bool(covered) is (obstacle is None)  # with none in the way the label does lie there: a cover would be seen
