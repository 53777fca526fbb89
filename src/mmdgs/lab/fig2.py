"""Figure 2: the samples of Table 1's single chains, drawn beside the data."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.data import Toy
from mmdgs.lab.drawing import COLOURS, UNIT_TICKS, new_figure, scatter, square
from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.lab.toys import LEVEL, METHODS, fit, settings_for, single_chains, together, toys_for

SHOWN = ("learned", "isotropic", "diagonal", "full", "exact")
LIMITS = {"mog": 2.0, "rings": 1.9, "roll": 1.9}
DRAWN = 5_000  # points a panel: enough to show the shape without a solid block


def run(context: Context) -> Outcome:
    """Run (or take from the folder) the first single chain of each method and data set, and draw it."""
    settings = settings_for(context)
    clouds: list[tuple[Toy, dict[str, Tensor]]] = []
    records = {}
    everything = fit(context, toys_for(context), settings)
    jobs = [partial(single_chains, context, fitted, m, settings) for fitted in everything for m in SHOWN]
    together(context, jobs, "chains")
    for fitted in everything:
        one = fitted.toy
        parts = {method: single_chains(context, fitted, method, settings) for method in SHOWN}
        clouds.append((one, {"data": fitted.data.cpu()} | {m: part.tensors["samples"] for m, part in parts.items()}))
        records[one.name] = {
            m: {"mmd_first_chain": part.values["mmd"][0], "repaired": part.values["repaired"]}
            for m, part in parts.items()
        }
    caption = (
        f"Data, and every state of one Gibbs chain of {settings.chain_steps:,} steps for each posterior "
        f"(at most {DRAWN:,} points drawn)."
    )
    text = [
        "One chain, one noise level: each panel is a single Markov chain from the authors' starting point. "
        "A blurred or thickened shape shows a posterior with too much or misplaced variance; a missing part shows "
        "a chain that never got there."
    ]
    table = Table(
        "MMD of the chains drawn, and in brackets the fraction of the covariance that was repaired",
        ["posterior", *(one.title for one, _ in clouds)],
        [
            [METHODS[m], *(f"{r[m]['mmd_first_chain']:.4f} ({100 * r[m]['repaired']:.2f}%)" for r in records.values())]
            for m in SHOWN
        ],
    )
    section = Section("Figure 2: samples of a single chain", text, [table], [Figure("fig2", caption, _draw(clouds))])
    settled = {"sigma": LEVEL.sigma, **asdict(settings)}
    return Outcome({"settings": settled, "single_chain_samples": records}, [section])


def _draw(clouds: list[tuple[Toy, dict[str, Tensor]]]) -> Canvas:
    columns = ("data", *SHOWN)
    canvas, axes = new_figure(len(clouds), len(columns), 2.1)
    for row, (one, by_method) in enumerate(clouds):
        for column, method in enumerate(columns):
            axis = axes[row][column]
            points = by_method[method]
            scatter(axis, points[:: max(1, len(points) // DRAWN)], COLOURS[method], size=2.0)
            title = "data" if method == "data" else METHODS[method]
            square(axis, LIMITS[one.name], title if row == 0 else "", UNIT_TICKS)
        axes[row][0].set_ylabel(one.title, fontsize=10)
    return canvas


EXPERIMENT = Experiment(
    "fig2",
    "Figure 2: samples of single chains",
    "What one long chain draws, for each posterior and data set.",
    run,
)
