"""Direct labels of curves (lab/labels.py) cover neither curves nor error bars where there is room beside them."""

from itertools import pairwise

import numpy
import pytest
from matplotlib.figure import Figure

from mmdgs.lab.labels import label_curves


def labelled(bars: bool) -> tuple[Figure, list]:
    """A point with a tall error bar to the right of another point, where that one's label would lie."""
    canvas = Figure(figsize=(6, 4))
    axis = canvas.subplots()
    axis.set(xlim=(0, 10), ylim=(0, 10))
    high = 3.0 if bars else 0.1
    axis.errorbar([5.0], [5.0], yerr=[0.1], fmt="o", color="#3366aa", label="a label of some length")
    axis.errorbar([6.5], [8.0], yerr=[[high], [0.1]], fmt="o", color="#aa3333", label="b")
    label_curves(canvas)
    return canvas, list(axis.texts)


@pytest.mark.parametrize("bars", [True, False])
def test_a_label_leaves_an_error_bar_free(bars: bool):
    canvas, texts = labelled(bars)
    (label,) = (text for text in texts if text.get_text().startswith("a label"))
    axis = canvas.axes[0]
    box = label.get_window_extent()
    bar = axis.transData.transform([(6.5, y) for y in numpy.linspace(5.0, 8.0, 100)])
    covered = [start for start, _ in pairwise(bar) if box.contains(*start)]
    assert bool(covered) is not bars  # without the bar the label does lie there: the test would see one that is covered
