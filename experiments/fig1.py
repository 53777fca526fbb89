"""Figure 1, posterior approximations: the true p(x | x_t) of the four-Gaussian mixture, and what
each approximation makes of it.

The paper's claim: a full covariance from the denoiser is closer to the true posterior than one
variance and than a learned variance.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from matplotlib.figure import Figure as Canvas

from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results
from experiments.table1 import toys_of
from mmdgs.demo import figures
from mmdgs.demo.figures import APPROXIMATIONS, LIMIT, POINTS, approximation, draw_posteriors
from mmdgs.demo.page import POSTERIORS_CAPTION
from mmdgs.demo.toys import LEVEL, METHODS, TRAINED, four_gaussians
from mmdgs.report.drawing import density, grid, new_figure, square
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.workspace import Part

KL = Measure("kl", "KL", 3, "less")


def run(context: Context) -> Outcome:
    """Train on the mixture, then compare each posterior with the true one at POINTS."""
    toys = toys_of(replace(context, seeds=1))
    fitted = toys.fit(["mog"], context.seed)["mog"][0]
    cells = {(method, name): point for method in APPROXIMATIONS for name, point in POINTS.items()}

    def measure(cell: Cell) -> Part:
        return Part(approximation(fitted, cell.row, cell.what))

    results = Grid("posterior", cells, measure, toys.settings, "x_t").run(context)
    text = (
        r"The mixture of four Gaussians (standard deviation 0.2) is noised with $\sigma = 0.2$. "
        "Analytic approximations come from an energy network trained by score matching, the "
        "learned one from a network trained by KL."
    )
    note = (
        "Smaller is better. No Gaussian can do better than the one with the true moments (last "
        "row, Theorem 3). Bold: the best of the approximations that come from a network."
    )
    title = "KL divergence from the true posterior to each approximation (nats)"
    rows = {method: METHODS[method] for method in APPROXIMATIONS}
    columns = {name: f"$x_t$ = {name}" for name in POINTS}
    shown: Any = {"head": "approximation", "rows": rows, "columns": columns, "note": note}
    table = results.table(title, [KL], compared=TRAINED, **shown)
    mixture = r"The data density and its noised version at $\sigma = 0.2$."
    drawn = [
        Figure("fig1_mixture", mixture, _draw_mixture()),
        Figure("fig1_posteriors", POSTERIORS_CAPTION, draw_posteriors(results.cells)),
    ]
    settings = {"sigma": LEVEL.sigma, **asdict(toys.settings)}
    section = Section("Figure 1: denoising posteriors", [text], [table], drawn, _claims(results))
    return Outcome({"settings": settings, "posteriors": results.records()}, [section])


def _claims(results: Results) -> list[Claim]:
    total = {m: sum(results.number(m, x, KL).value for x in POINTS) for m in APPROXIMATIONS}
    order = [*sorted(set(total) & set(TRAINED), key=total.__getitem__), "moments"]
    sums = ", ".join(f"{METHODS[method]} {total[method]:.3f}" for method in order)
    closer = total["full"] < min(total["isotropic"], total["learned"])
    best = min(total.values()) == total["moments"]
    return [
        Claim("full is closer than isotropic and learned, summed over the points", closer, sums),
        Claim("none is closer than the Gaussian with the true moments", best),
    ]


def _draw_mixture() -> Canvas:
    where, _ = grid(LIMIT, figures.GRID)
    canvas, axes = new_figure(1, 2, 2.6)
    laws = {"clean $p(x)$": four_gaussians(), "noisy $p(x_t)$": four_gaussians().noised(LEVEL)}
    for axis, (title, law) in zip(axes[0], laws.items(), strict=True):
        density(axis, law.log_prob(where).exp(), LIMIT)
        square(axis, LIMIT, title)
    return canvas
