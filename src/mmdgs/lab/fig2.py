"""Figure 2: the samples of Table 1's single chains, drawn beside the data."""

from __future__ import annotations

from dataclasses import asdict

from matplotlib.figure import Figure as Canvas

from mmdgs.lab.drawing import UNIT_TICKS, new_figure, scatter, square, style
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Measure, Results
from mmdgs.lab.report import Figure, Section
from mmdgs.lab.toys import LEVEL, METHODS, Sets, fit, single_chains, toy_settings

SHOWN = ("learned", "isotropic", "diagonal", "full", "exact")
LIMITS = {"mog": 2.0, "rings": 1.9, "roll": 1.9}
DRAWN = 5_000  # points a panel: enough to show the shape without a solid block


def run(context: Context) -> Outcome:
    """Run (or take from the folder) the single chains of each method and data set, and draw the first."""
    settings = toy_settings(context, seeds=1, second_order=False)
    sets = fit(context, settings)
    chains = single_chains(context, sets, settings, SHOWN)
    text = [
        "One chain, one noise level: each panel is a single Markov chain from the authors' starting point. "
        "A blurred or thickened shape shows a posterior with too much or misplaced variance; a missing part shows "
        "a chain that never got there."
    ]
    table = chains.table(
        f"MMD of the chains (mean ± std of {settings.seeds * settings.runs}), and the share of variances repaired",
        [Measure("mmd", "MMD", deviation=True), Measure("repaired", "repaired", 2, percent=True)],
        head="posterior",
        rows={method: METHODS[method] for method in SHOWN},
        columns={name: fitted[0].toy.title for name, fitted in sets.items()},
    )
    caption = (
        f"Data, and every state of one Gibbs chain of {settings.chain_steps:,} steps for each posterior "
        f"(at most {DRAWN:,} points drawn)."
    )
    section = Section(
        "Figure 2: samples of a single chain", text, [table], [Figure("fig2", caption, _draw(sets, chains))]
    )
    records = {"settings": {"sigma": LEVEL.sigma, **asdict(settings)}, "single_chains": chains.records()}
    return Outcome(records, [section])


def _draw(sets: Sets, chains: Results) -> Canvas:
    columns = ("data", *SHOWN)
    canvas, axes = new_figure(len(sets), len(columns), 2.1)
    for row, (name, (fitted, *_)) in zip(axes, sets.items(), strict=True):
        for axis, method in zip(row, columns, strict=True):
            points = fitted.data.cpu() if method == "data" else chains.parts[method, name].tensors["samples"]
            scatter(axis, points[:: max(1, len(points) // DRAWN)], style(method).colour, size=2.0)
            square(axis, LIMITS[name], METHODS.get(method, method) if row is axes[0] else "", UNIT_TICKS)
            axis.label_outer()
        row[0].set_ylabel(fitted.toy.title, fontsize=10)
    return canvas
