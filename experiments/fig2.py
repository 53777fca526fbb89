"""Figure 2, samples of single chains: those of Table 1's single chains, drawn beside the data."""

from __future__ import annotations

from dataclasses import asdict, replace

from experiments.experiment import Context
from experiments.grid import Measure
from experiments.table1 import single_grid, toys_of
from mmdgs.data import TOYS
from mmdgs.demo.figures import CHAINS, draw_chains
from mmdgs.demo.page import RUNS, chains_caption
from mmdgs.demo.toys import LEVEL, METHODS
from mmdgs.report.page import Figure, Outcome, Section

MEASURES = (RUNS, Measure("repaired", "repaired", 2, percent=True))


def run(context: Context) -> Outcome:
    """Run (or take from the folder) the single chains of each method and data set, and draw the
    first.
    """
    toys = toys_of(replace(context, seeds=context.seeds or 1))
    sets = toys.fit(context.data or TOYS, context.seed)
    results = single_grid(context, sets, toys.settings, CHAINS)
    text = (
        "One chain, one noise level: each panel is a single Markov chain from the authors' "
        "starting point. A blurred or thickened shape shows a posterior with too much or misplaced "
        "variance; a missing part shows a chain that never got there."
    )
    count = toys.settings.seeds * toys.settings.runs
    title = f"MMD of the chains (mean ± std of {count}), and the share of variances repaired"
    rows = {method: METHODS[method] for method in CHAINS}
    columns = {name: fitted[0].toy.title for name, fitted in sets.items()}
    table = results.table(title, MEASURES, head="posterior", rows=rows, columns=columns)
    samples = {key: part.tensors["samples"] for key, part in results.parts.items()}
    drawn = draw_chains({name: fitted[0] for name, fitted in sets.items()}, samples)
    figure = Figure("fig2", chains_caption(toys.settings), drawn)
    settings = {"sigma": LEVEL.sigma, **asdict(toys.settings)}
    section = Section("Figure 2: samples of a single chain", [text], [table], [figure])
    return Outcome({"settings": settings, "single_chains": results.records()}, [section])
