"""Figure 1: the true posterior p(x | x_t) of the four-Gaussian mixture, and what each approximation makes of it."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache, partial

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor
from torch.distributions import MultivariateNormal

from mmdgs.lab.drawing import GREEN, ORANGE, UNIT_TICKS, density, grid, new_figure, square
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Cell, Grid, Measure, Results
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.toys import LEVEL, METHODS, TRAINED, Fitted, fit, four_gaussians, toy_settings
from mmdgs.lab.workspace import Part
from mmdgs.metrics import kl_divergence

POINTS = {f"({x:g}, {y:g})": (x, y) for x, y in ((0.0, 0.0), (0.2, 0.2), (1.0, 0.0), (1.0, 1.0))}
SHOWN = ("full", "diagonal", "isotropic", "learned", "moments")
LIMIT = 2.0
VIEW = 1.6  # of the pictures of posteriors
GRID = 241  # cells of 0.017, an eighth of the narrowest standard deviation, 0.14
KL = Measure("kl", "KL", 3, "less")


def run(context: Context) -> Outcome:
    """Train on the mixture, then compare each posterior with the true one at POINTS."""
    settings = toy_settings(context, seeds=1, second_order=False)
    fitted = fit(context, settings, ["mog"])["mog"][0]
    cells = {(method, name): point for method in SHOWN for name, point in POINTS.items()}
    found = Grid("posterior", cells, partial(_compared, fitted), depends=settings, across="x_t").run(context)
    text = [
        r"The mixture of four Gaussians (standard deviation 0.2) is noised with $\sigma = 0.2$. Analytic "
        "approximations come from an energy network trained by score matching, the learned one from a network "
        "trained by KL.",
    ]
    table = found.table(
        "KL divergence from the true posterior to each approximation (nats)",
        [KL],
        head="approximation",
        rows={method: METHODS[method] for method in SHOWN},
        columns={name: f"$x_t$ = {name}" for name in POINTS},
        compared=TRAINED,
        note="Smaller is better. No Gaussian can do better than the one with the true moments (last row, Theorem 3). "
        f"Bold: the best of the approximations that come from a network. {_repairs(found)}",
    )
    total = {m: sum(found.number(m, name, KL).value for name in POINTS) for m in SHOWN}
    order = [m for m in sorted(total, key=total.__getitem__) if m in TRAINED]
    sums = ", ".join(f"{METHODS[m]} {total[m]:.3f}" for m in (*order, "moments"))
    claims = [
        Claim(
            "the full covariance is closer than one variance and than the learned one, summed over the four points",
            total["full"] < min(total["isotropic"], total["learned"]),
            sums,
        ),
        Claim("none is closer than the Gaussian with the true moments", min(total.values()) == total["moments"]),
    ]
    caption = (
        r"Top row: the true posterior $p(x \mid x_t)$ at four noisy points $x_t$ (green crosses). Below: contours of "
        "each approximation (orange; solid 50%, dashed 95% of its mass) over the true posterior, with the KL "
        "divergence from the true posterior to it, in nats."
    )
    figures = [
        Figure("fig1_mixture", r"The data density and its noised version at $\sigma = 0.2$.", _draw_mixture()),
        Figure("fig1_posteriors", caption, _draw_posteriors(found)),
    ]
    records = {"settings": {"sigma": LEVEL.sigma, **asdict(settings)}, "posteriors": found.records()}
    return Outcome(records, [Section("Figure 1: denoising posteriors", text, [table], figures, claims)])


def _repairs(found: Results) -> str:
    """A sentence on the covariances that had to be repaired."""
    share = max(found.number(method, name, "repaired").value for method in SHOWN for name in POINTS)
    return f"At most {share:.0%} of a covariance's eigenvalues had to be lifted to the floor." if share else ""


def _compared(fitted: Fitted, cell: Cell) -> Part:
    """The approximation at a point, and its divergence from the true posterior."""
    q = fitted.moments[cell.row](torch.tensor([cell.what]).to(fitted.data), LEVEL)
    mean, covariance = (one[0].detach().double().cpu() for one in (q.mean, q.cov.dense()))
    where, area = grid(LIMIT, GRID)
    values = {
        "kl": kl_divergence(_true_log_density(cell.what), MultivariateNormal(mean, covariance).log_prob(where), area),
        "repaired": 0.0 if q.repaired is None else q.repaired.item(),
        "mean": mean.tolist(),
        "covariance": covariance.tolist(),
    }
    return Part(values)


@cache
def _true_log_density(point: tuple[float, float]) -> Tensor:
    """log p(x | x_t) on the grid, (GRID^2,)."""
    where, _ = grid(LIMIT, GRID)
    return four_gaussians().posterior(where.new_tensor([point]).expand(len(where), -1), LEVEL).log_prob(where)


def _draw_mixture() -> Canvas:
    where, _ = grid(LIMIT, GRID)
    canvas, axes = new_figure(1, 2, 2.6)
    laws = {"clean $p(x)$": four_gaussians(), "noisy $p(x_t)$": four_gaussians().noised(LEVEL)}
    for axis, (title, law) in zip(axes[0], laws.items(), strict=True):
        density(axis, law.log_prob(where).exp(), LIMIT)
        square(axis, LIMIT, title)
    return canvas


def _draw_posteriors(found: Results) -> Canvas:
    where, _ = grid(LIMIT, GRID)
    canvas, axes = new_figure(1 + len(SHOWN), len(POINTS), 1.9)
    line = torch.linspace(-LIMIT, LIMIT, GRID).numpy()
    for column, (name, point) in enumerate(POINTS.items()):
        truth = _true_log_density(point).exp()
        for row, method in enumerate(("", *SHOWN)):
            axis = axes[row][column]
            density(axis, truth, LIMIT)
            axis.plot(*point, "x", color=GREEN, markersize=6, markeredgewidth=1.6)
            square(axis, VIEW, f"$x_t$ = {name}", UNIT_TICKS)
            axis.label_outer()
            if method:
                values = found.values(method, name)
                law = MultivariateNormal(where.new_tensor(values["mean"]), where.new_tensor(values["covariance"]))
                # A 2-D Gaussian holds 50% and 95% of its mass within -2 log(1 - p) of squared Mahalanobis radius.
                levels = [float(law.log_prob(law.mean) + torch.tensor(1 - p).log()) for p in (0.95, 0.5)]
                height = law.log_prob(where).reshape(GRID, GRID).numpy()
                axis.contour(line, line, height, levels=levels, colors=ORANGE, linewidths=1.3, linestyles=["--", "-"])
                axis.set_title(f"KL {values['kl']:.2f}", fontsize=9)
            if column == 0:
                axis.set_ylabel(METHODS.get(method, "true posterior"), fontsize=9)
    return canvas
