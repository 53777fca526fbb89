"""FIDs of up to 50,000 images for Table 2: rows by ever more seeds, at several numbers of images.

A seed is a part of the run's folder: the Inception features of its images (in 16 bits: 4 MB for 1,000 images, which are
not kept) and what they cost. So no seed is sampled twice, a run that was stopped goes on with the next one, and seeds
may be made on several machines: --skip-seeds leaves the first so many to another run, and once the parts of all runs
lie in one folder --resume puts them together.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.data import image_set
from mmdgs.errors import UsageError
from mmdgs.generation import Method
from mmdgs.lab.drawing import line_style, new_figure
from mmdgs.lab.experiment import TimeIsUp
from mmdgs.lab.grid import Cell, Grid, Results
from mmdgs.lab.labels import label_curves
from mmdgs.lab.report import Figure, Section
from mmdgs.lab.sampler_cells import FID, Sampling
from mmdgs.lab.workspace import Part
from mmdgs.metrics import extrapolated
from mmdgs.metrics.features import image_features

ACROSS = "first images"
STOPS = (1, 2, 4, 10)
"""Times the images of the table (5,000) at which a FID is taken: the last is the paper's number."""
KEPT = ("evaluations", "milliseconds", "repaired")
"""Numbers of a seed besides its features."""


@dataclass(frozen=True, eq=False)
class ManySeeds:
    """The features of seeds of a table's sampler, and the FID of the images of many of them."""

    sampling: Sampling

    @classmethod
    def of(cls, sampling: Sampling) -> ManySeeds:
        """Those of a table's sampler; what else it measures is no part of them."""
        return cls(replace(sampling, judge=replace(sampling.judge, metrics=("fid",))))

    @property
    def a_seed(self) -> int:
        """Images a seed."""
        return self.sampling.settings.images // self.sampling.settings.seeds

    def stops(self, most: int) -> list[int]:
        """Numbers of images, ascending, at which a FID is taken."""
        if most % self.a_seed or most < 2 * self.a_seed:
            raise UsageError(
                f"--most-images must be a multiple of the images a seed ({self.a_seed:,}), and two of them or more; "
                f"got {most:,}"
            )
        return sorted({n for one in STOPS if (n := one * self.sampling.settings.images) < most} | {most})

    def run(self, methods: Mapping[str, Method], costs: Mapping[str, float], most: int) -> Results:
        """FIDs of the rows at every stop, until the time is up; the cheapest first, by the costs of an image."""
        keys = [(row, n) for row in methods for n in self.stops(most)]
        keys.sort(key=lambda key: costs[key[0]] * key[1])
        return Grid(
            "papers", {(row, n): methods[row] for row, n in keys}, self, self.sampling.depends, ACROSS,
            more_seeds={(row, n): n // self.a_seed for row, n in keys},
        ).run(replace(self.sampling.context, only=None), least=0)  # fmt: skip

    def section(self, found: Results) -> Section:
        """What a report shows of them."""
        text = f"Seeds of {self.a_seed:,} images are added one by one; ± 95%, from leaving out each."
        columns = {n: f"{n:,} images" for n in sorted(found.columns)}
        if not columns:
            return Section("More seeds", [text, *found.unfinished()])
        table = found.table("FID of more images", [FID], head="sampler", columns=columns)
        usual = STOPS[-1] * self.sampling.settings.images
        caption = f"FID against the number of images. Dotted: extrapolated to {usual:,} by a + c / n."
        figures = [Figure("table2_more", caption, count_figure(found, usual))]
        return Section("More seeds", [text, *found.unfinished()], [table], figures)

    def keep(self, cell: Cell, images: Tensor, cost: Mapping[str, Any]) -> None:
        """Keep the features of images that the table has made, one seed after the other."""
        for seed, x in zip(cell.seeds, images.split(self.a_seed), strict=True):
            self._part(cell, seed, partial(self._features, x, cost))

    def __call__(self, cell: Cell) -> Part:
        """The FID of all seeds of a cell, and those with each left out; seeds without features are sampled first."""
        parts = []
        for seed in cell.seeds:
            with contextlib.suppress(_LeftToAnotherRun):
                parts.append(self._part(cell, seed, partial(self._sampled, cell, seed)))
        if len(parts) < len(cell.seeds):
            raise TimeIsUp(f"{cell.name}: the parts of {len(cell.seeds) - len(parts)} seeds are in another folder")
        numbers = {key: statistics.mean(one.values[key] for one in parts) for key in KEPT}
        found = self.sampling.judge.fid_of([one.tensors["features"] for one in parts])
        return Part({**found, **numbers, "images": cell.column})

    def _sampled(self, cell: Cell, seed: int) -> Part:
        context = self.sampling.context
        if seed - cell.seed < (context.skip_seeds or 0):
            raise _LeftToAnotherRun
        context.check_time()
        return self._features(*self.sampling.images(replace(cell, seeds=(seed,))))

    def _part(self, cell: Cell, seed: int, compute: Callable[[], Part]) -> Part:
        depends = {"cell": cell.what, "seed": seed, "on": self.sampling.depends}
        return self.sampling.context.workspace.part(f"seed-{cell.row}-{seed}", depends, compute)

    def _features(self, x: Tensor, cost: Mapping[str, Any]) -> Part:
        judge = self.sampling.judge
        assert judge.inception is not None
        found = image_features(image_set(x, "a seed"), judge.inception, keep=True, device=judge.device).features
        assert found is not None
        return Part({key: cost[key] for key in KEPT}, {"features": found.to(torch.float16)})


def count_figure(found: Results, usual: int) -> Canvas:
    """FIDs against the number of images; from a row's last, dotted, to what it would be of the usual number."""
    canvas, ((axis,),) = new_figure(1, 1, inches=(7.2, 4.2))
    axis.margins(x=0.2)  # room for labels
    found.draw(axis, FID)
    for row in found.rows:
        last = max(n for n in found.columns if found.has(row, n))
        if last < usual:
            values, counts = found.values(row, last), numpy.geomspace(last, usual, 30)
            by = [extrapolated(values["fid"], values["fid_left_out"], n / last) for n in counts]
            look = line_style(row) | {"linestyle": ":", "marker": "o", "markerfacecolor": "white"}
            axis.plot(counts, by, **look, markevery=[-1])
    axis.set_xlabel("images")
    label_curves(canvas)
    return canvas


class _LeftToAnotherRun(Exception):  # noqa: N818 - not an error
    """A seed that --skip-seeds leaves out is not in the folder."""
