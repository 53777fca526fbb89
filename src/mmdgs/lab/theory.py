"""The paper's theorems in numbers, in float64 on mixtures whose posteriors are known.

With D(x_t) = E[x | x_t], p~ the noised density and s its score:

    Theorem 2       Cov[x | x_t] = (sigma^2 / alpha) dD/dx_t
    Theorem 3       arg min over m, C of KL(p(x | x_t) || N(m, C)) is the mean D and that covariance
    Appendix B      E[-hess log p~] = E[s s'] under p~, so that the formulas of the isotropic variance agree
    Appendix A.2    p~ has a clean model if and only if F(p~) / F(k) is positive semi-definite (theory_existence)
    Section 2.2     the joint KL bounds the marginal KL; and the footnote of A.2 (both in theory_bounds)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.jacobians import mean_and_jacobian
from mmdgs.lab.drawing import BLUE, GREEN, GREY, ORANGE, RED, density, grid, labelled, new_figure, plain_logs, square
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.labels import label_curves
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.theory_bounds import always_clean, joint_kl
from mmdgs.lab.theory_existence import existence, records_table, with_symbols
from mmdgs.lab.toys import four_gaussians
from mmdgs.metrics import kl_divergence
from mmdgs.moments import FullMoments, IsotropicMoments
from mmdgs.moments.isotropic import by_score
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, seeded
from mmdgs.runtime import threads
from mmdgs.targets import GaussianMixture

LEVEL = NoiseLevel(sigma=0.2)
POINTS = torch.tensor([[0.0, 0.0], [0.2, 0.2], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)  # the paper's figure 1
SHOWN = torch.cat([POINTS, POINTS.new_tensor([[-1.0, 0.2], [-0.3, -1.0]])])
START = (-0.6, 0.5, -0.3, 0.4, 0.2)  # a wrong start of the search: m, then log L_11, L_21, log L_22
REACH = 8.0  # quadrature ends this many standard deviations beyond the outer means, and leaves out less than 1e-14
SIGMAS = (0.1, 0.2, 0.4, 0.8)
PALETTE = (BLUE, ORANGE, GREEN, RED)
ROUNDING = 1e-10
"""What float64 leaves of an identity in these sums."""
SEARCHED = 1e-7
"""A minimum is flat: float64 resolves the KL to 1e-16, so the minimiser to about 1e-8."""
UNLIKELY = 4.5
"""Standard errors: a deviation this large comes with probability 1e-5."""

Records = list[dict[str, Any]]
Case = tuple[str, GaussianMixture, NoiseLevel]


def run(context: Context) -> Outcome:
    """Put the six statements to the test."""
    with threads(1):  # a second one gains a fifth where the machine is idle, and loses tenfold where it is not
        parts = {
            "covariance_identity": _covariance_identity(context.quick, seeded(context.seed, "draws")),
            "kl_optimum": _kl_optimum(context.quick),
            "fisher_identity": _fisher_identity(context.quick, seeded(context.seed, "data")),
            "existence": existence(context.quick),
            "joint_kl": joint_kl(),
            "always_clean": always_clean(),
        }
    return Outcome({name: records for name, (records, _) in parts.items()}, [section for _, section in parts.values()])


def skewed_density() -> GaussianMixture:
    """Three Gaussians with unequal weights and full covariances: nothing about it is symmetric."""
    weights = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    covariances = [[[0.16, 0.10], [0.10, 0.12]], [[0.05, -0.06], [-0.06, 0.30]], [[0.40, 0.00], [0.00, 0.02]]]
    return GaussianMixture(weights, weights.new_tensor([[-0.8, -0.5], [0.7, 0.6], [0.4, -1.2]]), covariances)


def _cases() -> list[Case]:
    return [
        ("four Gaussians, sigma 0.2", four_gaussians(), LEVEL),
        ("skewed, sigma 0.4", skewed_density(), NoiseLevel(sigma=0.4)),
        ("skewed, alpha 0.8, sigma 0.6", skewed_density(), NoiseLevel(alpha=0.8, sigma=0.6)),
    ]


def _covariance_identity(quick: bool, generator: Generator) -> tuple[Records, Section]:
    """Theorem 2: exact posterior covariances against the denoiser's Jacobian on a grid of x_t, and against draws."""
    where, _ = grid(2.0, 21 if quick else 61)
    count = 20_000 if quick else 200_000
    records: Records = []
    for title, mixture, level in _cases():
        error = FullMoments(mixture.denoiser())(where, level).cov.dense() - mixture.posterior(where, level).covariance
        scores = _standard_scores(mixture, level, count, generator)
        records.append(
            {
                "case": title,
                "points": len(where),
                "largest_error": error.abs().max().item(),
                "draws": count,
                "rms_score": scores.square().mean().sqrt().item(),
                "largest_score": scores.abs().max().item(),
                "scores": scores.tolist(),
            }
        )
    text = (
        rf"The exact covariance of $p(x \mid x_t)$ at {len(where):,} points $x_t$, and that of {count:,} draws from "
        rf"the exact posterior at {len(SHOWN)} points, against $(\sigma^2 / \alpha)\, \partial D / \partial x_t$."
    )
    claims = [
        _claim("the exact covariance is that of the Jacobian", records, "largest_error", ROUNDING),
        _claim("draws deviate from it by no more standard errors than chance", records, "largest_score", UNLIKELY),
    ]
    caption = (
        "At some points $x_t$ (crosses) the exact posterior's one-standard-deviation ellipse (green) and that of the "
        "Jacobian (dashed), with a line from $x_t$ to the posterior's mean. Right: draws against the Jacobian."
    )
    title = "Posterior covariances; scores are deviations of draws from the Jacobian / standard error"
    table = records_table(title, records, without=("points", "draws"))
    figure = Figure("theory_covariance", caption, _draw_covariances(records))
    return records, Section("Theorem 2: the covariance is the denoiser's Jacobian", [text], [table], [figure], claims)


def _standard_scores(mixture: GaussianMixture, level: NoiseLevel, count: int, generator: Generator) -> Tensor:
    """(covariance of draws - that of Theorem 2) / standard error, for the three entries at each of SHOWN."""
    draws = mixture.posterior(SHOWN, level).sample((count,), generator=generator)
    centred = draws - draws.mean(0)
    products = torch.stack([centred[..., i] * centred[..., j] for i, j in ((0, 0), (0, 1), (1, 1))], dim=-1)
    matrix = FullMoments(mixture.denoiser())(SHOWN, level).cov.dense().flatten(1)[:, [0, 1, 3]]
    return ((products.mean(0) - matrix) / (products.std(0) / math.sqrt(count))).flatten()


def _draw_covariances(records: Records) -> Canvas:
    canvas, axes = new_figure(1, 4, 2.9)
    where, _ = grid(2.0, 161)
    for i, (title, mixture, level) in enumerate(_cases()):
        axis = axes[0][i]
        density(axis, mixture.noised(level).log_prob(where).exp(), 2.0)
        exact, analytic = mixture.posterior(SHOWN, level), FullMoments(mixture.denoiser())(SHOWN, level)
        for x_t, m, a, b in zip(SHOWN, exact.mean, exact.covariance, analytic.cov.dense(), strict=True):
            axis.plot(*torch.stack([x_t, m]).mT, color=ORANGE, linewidth=1)
            _ellipse(axis, m, a, color=GREEN, linewidth=3, alpha=0.5)
            _ellipse(axis, m, b, color="black", linewidth=0.9, linestyle=(0, (3, 2)))
        axis.plot(*SHOWN.mT, "x", color=ORANGE, markersize=5, markeredgewidth=1.5)
        square(axis, 2.0, with_symbols(title), range(-2, 3))
        scores = records[i]["scores"]
        axes[0][3].plot(torch.linspace(i - 0.3, i + 0.3, len(scores)), scores, ".", color=BLUE)
    axes[0][3].axhspan(-2, 2, color=GREY, alpha=0.15, linewidth=0)
    axes[0][3].set(ylim=(-4.5, 4.5), xlim=(-0.5, 2.5))
    axes[0][3].set_xticks(range(3), ["four", "skewed", "skewed,\n" + r"$\alpha$ 0.8"])
    labelled(axes[0][3], "covariance of draws", "", "deviation / standard error")
    return canvas


def _kl_optimum(quick: bool) -> tuple[Records, Section]:
    """Theorem 3: the Gaussian closest to the true posterior, found by search, against the analytic moments."""
    mixture = four_gaussians()
    where, cell = grid(2.5, 101 if quick else 161)
    q = FullMoments(mixture.denoiser())(POINTS, LEVEL)
    laws = list(zip(q.mean, torch.linalg.cholesky(q.cov.dense()), strict=True))
    truth = [_bayes(mixture, x_t, where) for x_t in POINTS]
    records: Records = []
    for x_t, log_p, (m, root) in zip(POINTS, truth, laws, strict=True):
        found_m, found_root = _closest_gaussian(log_p, where, cell)
        records.append(
            {
                "x_t": x_t.tolist(),
                "kl_start": kl_divergence(log_p, _log_normal(where, *_unpack(POINTS.new_tensor(START))), cell),
                "kl_found": kl_divergence(log_p, _log_normal(where, found_m, found_root), cell),
                "kl_analytic": kl_divergence(log_p, _log_normal(where, m, root), cell),
                "mean_distance": (found_m - m).abs().max().item(),
                "covariance_distance": (found_root @ found_root.mT - root @ root.mT).abs().max().item(),
            }
        )
    text = (
        r"$\mathrm{KL}(p(x \mid x_t) \,\|\, N(m, C))$ is minimised by L-BFGS over $m$ and a Cholesky factor of $C$, "
        r"on a grid and from a wrong start. The result is compared with the analytic moments $D$ and "
        r"$\sigma^2\, \partial D / \partial x_t$."
    )
    claims = [
        _claim("the mean that is found is $D$", records, "mean_distance", SEARCHED),
        _claim("the covariance that is found is that of Theorem 2", records, "covariance_distance", SEARCHED),
    ]
    caption = "KL from the true posterior to the analytic Gaussian, changed in one way: least where it is not changed."
    title = r"The closest Gaussian at $\sigma = 0.2$; distances are the largest over entries"
    table = records_table(title, records)
    figure = Figure("theory_kl", caption, _draw_divergences(truth, laws, where, cell))
    return records, Section("Theorem 3: no Gaussian is closer than the analytic one", [text], [table], [figure], claims)


def _bayes(mixture: GaussianMixture, x_t: Tensor, where: Tensor) -> Tensor:
    """log p(x | x_t) = log p(x_t | x) + log p(x) - log p~(x_t) at x = where (n, 2), from the definition; (n,)."""
    noise = _log_normal(where, x_t, LEVEL.sigma * torch.eye(2, dtype=x_t.dtype))
    return noise + mixture.log_prob(where) - mixture.noised(LEVEL).log_prob(x_t)


def _log_normal(x: Tensor, m: Tensor, root: Tensor) -> Tensor:
    """log N(x; m, L L') at x (n, 2) for a lower triangular L; (n,)."""
    z = torch.linalg.solve_triangular(root, (x - m).mT, upper=False)
    return -0.5 * z.square().sum(0) - root.diagonal().log().sum() - math.log(2 * math.pi)


def _unpack(parameters: Tensor) -> tuple[Tensor, Tensor]:
    """m and L from (m_1, m_2, log L_11, L_21, log L_22)."""
    a, b, c = parameters[2:]
    return parameters[:2], torch.stack([a.exp(), torch.zeros_like(a), b, c.exp()]).reshape(2, 2)


def _closest_gaussian(log_p: Tensor, where: Tensor, cell: float) -> tuple[Tensor, Tensor]:
    """arg min over m, L of KL(p || N(m, L L')) = const - sum p log N cell, by L-BFGS from START."""
    p = log_p.exp() * cell
    parameters = POINTS.new_tensor(START).requires_grad_(True)
    search = torch.optim.LBFGS(
        [parameters], max_iter=200, tolerance_grad=1e-10, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def objective() -> float:
        loss = -(p * _log_normal(where, *_unpack(parameters))).sum()
        (parameters.grad,) = torch.autograd.grad(loss, parameters)
        return loss.item()

    search.step(objective)
    return _unpack(parameters.detach())


def _draw_divergences(truth: list[Tensor], laws: list[tuple[Tensor, Tensor]], where: Tensor, cell: float) -> Canvas:
    canvas, axes = new_figure(1, 2, 3.4)
    scales, shifts = torch.logspace(-0.5, 0.5, 33).double(), torch.linspace(-0.3, 0.3, 33).double()
    for x_t, log_p, (m, root), colour in zip(POINTS, truth, laws, PALETTE, strict=True):
        scaled = [kl_divergence(log_p, _log_normal(where, m, s.sqrt() * root), cell) for s in scales]
        shifted = [kl_divergence(log_p, _log_normal(where, m + t, root), cell) for t in shifts]
        axes[0][0].plot(scales, scaled, color=colour, label=f"$x_t$ = ({x_t[0]:g}, {x_t[1]:g})")
        axes[0][1].plot(shifts, shifted, color=colour)
    axes[0][0].axvline(1, color=GREY, linewidth=0.8, linestyle=":")
    axes[0][1].axvline(0, color=GREY, linewidth=0.8, linestyle=":")
    labelled(axes[0][0], "covariance scaled", "$s$", r"KL($p$ || N($m$, $s\,C$))")
    labelled(axes[0][1], "mean shifted", "$t$", r"KL($p$ || N($m + (t, t)$, $C$))")
    label_curves(canvas)
    return canvas


def _fisher_identity(quick: bool, generator: Generator) -> tuple[Records, Section]:
    """Appendix B: E[-grad^2 log p~] = E[s s'], and the isotropic variance three ways."""
    mixture = four_gaussians()
    sizes = [100 * 4**k for k in range(4 if quick else 5)]
    repeats = 10 if quick else 40
    records: Records = []
    for sigma in SIGMAS:
        record = _expectations(mixture, NoiseLevel(sigma=sigma), 161 if quick else 241)
        for n in sizes:
            estimates = POINTS.new_tensor([_estimate(mixture, sigma, n, generator) for _ in range(repeats)])
            record["rms_errors"].append((estimates - record["variance_score"]).square().mean().sqrt().item())
        record["estimate"], record["standard_error"] = estimates[0].item(), record["deviation"] / math.sqrt(sizes[-1])
        records.append(record | {"sizes": sizes, "repeats": repeats})
    text = (
        r"$E[-\nabla^2 \log \tilde{p}]$ and $E[s\, s^T]$ by quadrature. Where these are the same, so are the mean of "
        r"$\mathrm{tr}\, \mathrm{Cov}[x \mid x_t] / d$ and $\sigma^2 - \sigma^4\, E\|s\|^2 / d$, the isotropic "
        f"variance. It is also estimated from {sizes[-1]:,} data."
    )
    off = max(abs(r["estimate"] - r["variance_score"]) / r["standard_error"] for r in records)
    claims = [
        _claim("both matrices are the same", records, "largest_error", ROUNDING),
        Claim(f"estimates are within {UNLIKELY} standard errors", off < UNLIKELY, f"{off:.1f}, the farthest"),
    ]
    caption = (
        f"Left: root mean square error of {repeats} estimates from $n$ data (points), and the standard error that "
        "quadrature predicts (lines). Right: the variance by quadrature, and one estimate. Bars: two standard errors."
    )
    title = f"The isotropic variance; estimates from {sizes[-1]:,} data"
    table = records_table(title, records, without=("repeats", "deviation"))
    figure = Figure("theory_fisher", caption, _draw_fisher(records))
    return records, Section("Appendix B: the Fisher identity", [text], [table], [figure], claims)


def _expectations(mixture: GaussianMixture, level: NoiseLevel, points: int) -> dict[str, Any]:
    """E[-hess log p~] and E[s s'] by quadrature, the variances they give, and the deviation of one draw's estimate."""
    noised = mixture.noised(level)
    reach = noised.means.abs().max().item() + REACH * noised.values.max().sqrt().item()
    where, cell = grid(reach, points)
    weight = noised.log_prob(where).exp() * cell
    s = noised.score(where)
    _, jacobian = mean_and_jacobian(mixture.denoiser(), where, level)
    hessian = (level.alpha * jacobian - torch.eye(2, dtype=s.dtype)) / level.sigma**2
    information = torch.einsum("n,ni,nj->ij", weight, s, s)
    trace = mixture.posterior(where, level).covariance.diagonal(dim1=1, dim2=2).sum(1)
    single = level.variance * (1 - level.sigma**2 * s.square().sum(1) / 2)  # what one draw x_t says of the variance
    variance = (weight * single).sum()
    return {
        "sigma": level.sigma,
        "largest_error": (information + torch.einsum("n,nij->ij", weight, hessian)).abs().max().item(),
        "information": information.tolist(),
        "variance_trace": (weight * trace).sum().item() / 2,
        "variance_score": variance.item(),
        "deviation": (weight * (single - variance).square()).sum().sqrt().item(),
        "rms_errors": [],
    }


def _estimate(mixture: GaussianMixture, sigma: float, n: int, generator: Generator) -> float:
    """The isotropic variance as a user gets it, from n data."""
    level = NoiseLevel(sigma=sigma)
    x = mixture.sample((n,), generator=generator)
    fitted = IsotropicMoments.fit(mixture.denoiser(), x, level, generator=generator, variance_of=by_score)
    return fitted.variances[level]


def _draw_fisher(records: Records) -> Canvas:
    canvas, axes = new_figure(1, 2, 3.4)
    left, right = axes[0]
    for r, colour in zip(records, PALETTE, strict=True):
        label, bars = rf"$\sigma$ = {r['sigma']:g}", [2 * rms / math.sqrt(2 * r["repeats"]) for rms in r["rms_errors"]]
        left.errorbar(r["sizes"], r["rms_errors"], bars, fmt="o", color=colour, markersize=4, elinewidth=1, label=label)
        left.loglog(r["sizes"], [r["deviation"] / math.sqrt(n) for n in r["sizes"]], color=colour, linewidth=1)
        right.errorbar(r["sigma"], r["estimate"], 2 * r["standard_error"], fmt="o", color=colour, capsize=3)
    sigmas = torch.logspace(-1.1, 0, 16).tolist()
    exact = [_expectations(four_gaussians(), NoiseLevel(sigma=sigma), 81)["variance_score"] for sigma in sigmas]
    right.loglog(sigmas, exact, color=GREY, zorder=0, label="quadrature")
    right.loglog(sigmas, [sigma**2 for sigma in sigmas], ":", color=GREY, zorder=0, label=r"$\sigma^2$, a flat prior's")
    labelled(left, "error of the estimate", "number of data $n$", "root mean square error")
    labelled(right, "isotropic variance", r"$\sigma$", "variance")
    plain_logs(left, (1.0,))
    plain_logs(right, (1.0, 3.0))
    label_curves(canvas)
    return canvas


def _claim(text: str, records: Records, name: str, limit: float) -> Claim:
    """The claim that a number is below a limit in all records."""
    largest = max(record[name] for record in records)
    return Claim(text, largest < limit, f"at most {largest:.2g}")


def _ellipse(axis: Axes, mean: Tensor, covariance: Tensor, **style: Any) -> None:
    """The points one standard deviation from the mean: m + C^(1/2) u, u on the unit circle."""
    angle = torch.linspace(0, 2 * math.pi, 101, dtype=mean.dtype)
    circle = torch.stack([angle.cos(), angle.sin()])
    axis.plot(*(mean[:, None] + torch.linalg.cholesky(covariance) @ circle), **style)
