"""Table 2 with more images: FIDs of up to 50,000, the paper's number, by its two samplers and Heun.

    python -m experiments table2-seeds --minutes 25
    python -m experiments table2-seeds --minutes 25 --resume
    python -m experiments.tables --from table2=runs/table2-seeds

A seed is a part of the run's folder: the Inception features of its images (in 16 bits: 4 MB for
1,000 images, which are not kept) and what they cost. So no seed is sampled twice.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace

import numpy
import torch
from matplotlib.figure import Figure as Canvas

from experiments import table2
from experiments.drawing import legend, line_style
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Results
from experiments.sampler_cells import FID, Sampling
from mmdgs.data import image_set
from mmdgs.errors import UsageError
from mmdgs.metrics import extrapolated
from mmdgs.metrics.features import image_features
from mmdgs.report.drawing import new_figure
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.workspace import Part

MOST_IMAGES = 50_000
STOPS = (1, 2, 4, 10)
"""Times the images of Table 2 (5,000) at which a FID is taken: the last is the paper's number."""
KEPT = ("evaluations", "milliseconds", "repaired")
"""Numbers of a seed besides its features."""


def run(context: Context) -> Outcome:
    """Tune Langevin's step as Table 2 does, and add seeds until all images are there."""
    settings, sampling = table2.prepared(context)
    if settings.measure is not FID:
        raise UsageError("table2-seeds measures FIDs, so it has no --quick")
    each, most = settings.images // settings.seeds, settings.most_images
    factor, _ = table2.best_rate(table2.tuned(sampling, settings))
    cells = table2.table2_cells(sampling.model, factor, settings)
    n, heun = settings.levels, settings.heun[-1]
    costs = {
        (table2.HEUN, heun): 2.0 * heun - 1,
        (table2.GUIDED, heun): 2 * (2.0 * heun - 1),
        (table2.LANGEVIN, n): table2.langevin_evaluations(n, settings),
        (table2.GIBBS, n): table2.gibbs_evaluations(n, settings),
    }
    counts = sorted({k for stop in STOPS if (k := stop * settings.images) < most} | {most})
    keys = [(key, count) for key in costs if key in cells for count in counts]
    keys.sort(key=lambda key: costs[key[0]] * key[1])  # the cheapest first
    seeds = Seeds(replace(sampling, judge=replace(sampling.judge, metrics=("fid",))))
    own = {(key[0], count): cells[key] for key, count in keys}
    numbers = {key: key[1] // each for key in own}
    depends, across = seeds.sampling.depends, "first images"
    grid = Grid("papers", own, seeds, depends, across, more_seeds=numbers)
    results = grid.run(context, least=0)
    named = asdict(settings) | {"model": sampling.model.source}
    records = {"settings": named, "papers": results.records()}
    return Outcome(records, [_section(results)], left=results.open())


@dataclass(frozen=True, eq=False)
class Seeds:
    """Measures cells by the features of their seeds; those without features are sampled first."""

    sampling: Sampling

    def __call__(self, cell: Cell) -> Part:
        """The FID of all seeds of a cell, and those with each left out."""
        parts = [self._part(cell, seed) for seed in cell.seeds]
        numbers = {key: statistics.mean(part.values[key] for part in parts) for key in KEPT}
        fids = self.sampling.judge.fid_of([part.tensors["features"] for part in parts])
        return Part({**fids, **numbers, "images": cell.column})

    def _part(self, cell: Cell, seed: int) -> Part:
        """A seed from the folder, or sampled now."""
        context, judge = self.sampling.context, self.sampling.judge

        def compute() -> Part:
            context.check_time()
            x, cost = self.sampling.images(replace(cell, seeds=(seed,)))
            assert judge.inception is not None
            images, device = image_set(x, "a seed"), judge.device
            features = image_features(images, judge.inception, keep=True, device=device).features
            assert features is not None
            kept = {"features": features.to(torch.float16)}
            return Part({key: cost[key] for key in KEPT}, kept)

        depends = {"cell": cell.what, "seed": seed, "on": self.sampling.depends}
        return context.workspace.part(f"seed-{cell.row}-{seed}", depends, compute)


def _section(results: Results) -> Section:
    text = ["Seeds are added one by one; ± 95%, from leaving out each."]
    columns = {n: f"{n:,} images" for n in sorted(results.columns)}
    if not columns:
        return Section("More seeds", text)
    tables = [results.table("FID of more images", [FID], head="sampler", columns=columns)]
    claims = []
    if shared := [n for n in results.columns if all(results.has(row, n) for row in table2.PAPER)]:
        both = [results.values(row, max(shared)) for row in (table2.GIBBS, table2.LANGEVIN)]
        claims = [table2.no_worse(f"{table2.GIBBS} is no worse than Langevin", *both)]
    caption = f"FID against the number of images. Dotted: extrapolated to {MOST_IMAGES:,}."
    figures = [Figure("table2_more", caption, count_figure(results, MOST_IMAGES))]
    return Section("More seeds", text, tables, figures, claims)


def count_figure(results: Results, usual: int) -> Canvas:
    """FIDs against images; from a row's last, dotted, a + c / n up to the usual number."""
    canvas, ((axis,),) = new_figure(1, 1, inches=(7.2, 4.2))
    results.draw(axis, FID)
    for row in results.rows:
        last = max(n for n in results.columns if results.has(row, n))
        if last < usual:
            values, counts = results.values(row, last), numpy.geomspace(last, usual, 30)
            by = [extrapolated(values["fid"], values["fid_left_out"], n / last) for n in counts]
            look = line_style(row) | {"linestyle": ":", "marker": "o", "markerfacecolor": "white"}
            axis.plot(counts, by, **look, markevery=[-1])
    axis.set_xlabel("images")
    legend(canvas)
    return canvas
