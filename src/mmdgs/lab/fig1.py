"""Figure 1: the true posterior p(x | x_t) of the four-Gaussian mixture, and what each approximation makes of it."""

from __future__ import annotations

from dataclasses import asdict

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor
from torch.distributions import MultivariateNormal

from mmdgs.data import toy
from mmdgs.lab.drawing import GREEN, ORANGE, UNIT_TICKS, density, grid, new_figure, square
from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.lab.toys import LEVEL, METHODS, fit, settings_for
from mmdgs.metrics import kl_divergence
from mmdgs.targets import GaussianMixture

POINTS = [(0.0, 0.0), (0.2, 0.2), (1.0, 0.0), (1.0, 1.0)]
SHOWN = ("full", "diagonal", "isotropic", "learned", "moments")
LIMIT = 2.0
GRID = 241  # cells of 0.017, an eighth of the narrowest standard deviation, 0.14


def run(context: Context) -> Outcome:
    """Train on the mixture, then compare each posterior with the true one at POINTS."""
    settings = settings_for(context)
    (fitted,) = fit(context, [toy("mog")], settings)
    x_t = torch.tensor(POINTS, device=context.device)
    where, cell = grid(LIMIT, GRID)
    mixture = toy("mog").density().to(dtype=torch.float64)
    truth = _true_log_density(mixture, where)
    laws: dict[str, list[MultivariateNormal]] = {}
    repaired = {}
    for method in SHOWN:
        q = fitted.moments[method](x_t, LEVEL)
        repaired[method] = 0.0 if q.repaired is None else q.repaired.mean().item()
        means, covariances = q.mean.detach().double().cpu(), q.cov.dense().detach().double().cpu()
        laws[method] = [MultivariateNormal(m, c) for m, c in zip(means, covariances, strict=True)]
    divergence = {
        method: [kl_divergence(truth[i], law.log_prob(where), cell) for i, law in enumerate(laws[method])]
        for method in SHOWN
    }
    records = {
        "settings": {"sigma": LEVEL.sigma, "points": POINTS, **asdict(settings)},
        "kl_true_to_approximation": divergence,
        "repaired": repaired,
        "isotropic_variance": fitted.isotropic_variance,
        "means": {m: [law.mean.tolist() for law in laws[m]] for m in SHOWN},
        "covariances": {m: [law.covariance_matrix.tolist() for law in laws[m]] for m in SHOWN},
    }
    figures = [
        Figure("fig1_mixture", "The data density and its noised version at sigma = 0.2.", _draw_mixture(mixture)),
        Figure(
            "fig1_posteriors",
            "Top row: the true posterior p(x | x_t) at four noisy points x_t (green crosses). Below: contours of each "
            "approximation (orange; solid 50%, dashed 95% of its mass) over the true posterior, with "
            "KL(true || approximation).",
            _draw_posteriors(truth, laws, divergence, where),
        ),
    ]
    return Outcome(
        records, [Section("Figure 1: denoising posteriors", _text(divergence), [_table(divergence, repaired)], figures)]
    )


def _true_log_density(mixture: GaussianMixture, where: Tensor) -> Tensor:
    """log p(x | x_t) on the grid for each of POINTS, (points, grid)."""
    rows = []
    for point in POINTS:
        x_t = torch.tensor([point], dtype=where.dtype).expand(len(where), -1)
        rows.append(mixture.posterior(x_t, LEVEL).log_prob(where))
    return torch.stack(rows)


def _table(divergence: dict[str, list[float]], repaired: dict[str, float]) -> Table:
    header = ["approximation", *(f"x_t = ({x:g}, {y:g})" for x, y in POINTS), "repaired"]
    rows = [[METHODS[m], *(f"{value:.3f}" for value in divergence[m]), f"{100 * repaired[m]:.0f}%"] for m in SHOWN]
    trained = [i for i, m in enumerate(SHOWN) if m != "moments"]
    best = frozenset((min(trained, key=lambda i: divergence[SHOWN[i]][j]), j + 1) for j in range(len(POINTS)))
    return Table(
        "KL divergence from the true posterior to each approximation (nats)",
        header,
        rows,
        "Smaller is better. No Gaussian can do better than the one with the true moments (last row, Theorem 3); "
        "bold: the best of the approximations that come from a network. "
        "Repaired: eigenvalues or variances lifted to the floor.",
        best=best,
    )


def _text(divergence: dict[str, list[float]]) -> list[str]:
    total = {method: sum(values) for method, values in divergence.items()}
    order = sorted((m for m in SHOWN if m != "moments"), key=lambda m: total[m])
    return [
        "The mixture of four Gaussians (standard deviation 0.2) is noised with sigma = 0.2. An energy network trained "
        "by denoising score matching gives the full, diagonal and isotropic approximations; a second network, trained "
        "by KL minimisation, predicts a mean and a diagonal covariance.",
        "Summed over the four points, from closest to farthest: "
        + ", ".join(f"{METHODS[m]} ({total[m]:.3f})" for m in order)
        + f"; the floor for any Gaussian is {total['moments']:.3f}.",
    ]


def _draw_mixture(mixture: GaussianMixture) -> Canvas:
    where, _ = grid(LIMIT, GRID)
    canvas, axes = new_figure(1, 2, 2.6)
    for axis, law, title in zip(axes[0], (mixture, mixture.noised(LEVEL)), ("clean p(x)", "noisy p(x_t)"), strict=True):
        density(axis, law.log_prob(where).exp(), LIMIT)
        square(axis, LIMIT, title)
    return canvas


def _draw_posteriors(
    truth: Tensor, laws: dict[str, list[MultivariateNormal]], divergence: dict[str, list[float]], where: Tensor
) -> Canvas:
    canvas, axes = new_figure(1 + len(SHOWN), len(POINTS), 1.9)
    line = torch.linspace(-LIMIT, LIMIT, GRID).numpy()
    for row, method in enumerate((None, *SHOWN)):
        for i, point in enumerate(POINTS):
            axis = axes[row][i]
            density(axis, truth[i].exp(), LIMIT)
            axis.plot(*point, "x", color=GREEN, markersize=6, markeredgewidth=1.6)
            if method is None:
                square(axis, LIMIT, f"true, x_t = ({point[0]:g}, {point[1]:g})", UNIT_TICKS)
            else:
                law = laws[method][i]
                peak = law.log_prob(law.mean)
                # A 2-D Gaussian holds 50% and 95% of its mass within -2 log(1 - p) of squared Mahalanobis radius.
                levels = [float(peak + torch.tensor(1 - p).log()) for p in (0.95, 0.5)]
                height = law.log_prob(where).reshape(GRID, GRID).numpy()
                axis.contour(line, line, height, levels=levels, colors=ORANGE, linewidths=1.3, linestyles=["--", "-"])
                square(axis, LIMIT, f"KL = {divergence[method][i]:.3f}", UNIT_TICKS)
            if i == 0:
                name = "true posterior" if method is None else METHODS[method]
                axis.set_ylabel(name, fontsize=8)
    return canvas


EXPERIMENT = Experiment(
    "fig1",
    "Figure 1: posterior approximations",
    "True and approximate denoising posteriors of a four-Gaussian mixture, with their KL divergences.",
    run,
)
