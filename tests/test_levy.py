"""Levy processes by Gibbs sampling against closed forms and quadrature; score-KSD."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import normals
from torch import Tensor

from mmdgs import levy
from mmdgs.levy import Gauss, Increments, Laplace, LevyProcess, Student
from mmdgs.metrics import score_ksd
from mmdgs.metrics.suite import TASKS
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import seeded

LAWS = {"Laplace": Laplace(0.7), "Student": Student(3), "Bernoulli-Laplace": Laplace(0.8, 0.4)}


@pytest.mark.parametrize("task", TASKS)
def test_gauss_has_the_closed_form(task: str) -> None:
    process, noise = LevyProcess(Gauss(0.25)), 0.3
    a = TASKS[task](64)
    y = normals(3, len(a))
    places = torch.arange(1, 65).double()
    prior = 0.25 * torch.minimum(places[:, None], places)
    gain = prior @ a.mT @ torch.linalg.inv(a @ prior @ a.mT + noise**2 * torch.eye(len(a)).double())
    rows = next(process.sweeps(y.repeat(1_000, 1), a, noise, 1, 0, seeded(0)))
    assert (rows.mean.unflatten(0, (-1, 3))[0] - y @ gain.mT).abs().max() < 1e-9
    draws = rows.x.unflatten(0, (-1, 3))[:, 0]
    # Entries of a covariance from 1,000 draws: six deviations of each.
    exact = prior - gain @ a @ prior
    scale = (exact.diagonal()[:, None] * exact.diagonal()).sqrt()
    assert ((draws.mT.cov() - exact).abs() / scale).max() < 6 * math.sqrt(2 / 1_000)


def density(law: Increments, u: Tensor) -> Tensor:
    if isinstance(law, Student):
        return torch.distributions.StudentT(law.degrees).log_prob(u).exp()
    return torch.distributions.Laplace(0.0, law.scale).log_prob(u).exp()


def by_quadrature(law: Increments, y: Tensor, a: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """E[x | y] and Cov[x | y] of two places, over a grid of increments and their zeros."""
    fine = torch.linspace(-14, 14, 1_401).double()
    step = (fine[1] - fine[0]).item()
    some, none = law.share * step * density(law, fine), torch.tensor([1 - law.share])
    values, weights = torch.cat([fine, torch.zeros(1)]), torch.cat([some, none])
    u = torch.cartesian_prod(values, values)
    x = u.cumsum(1)
    log = -0.5 * ((y - x @ a.mT) / noise).square().sum(1)
    p = torch.cartesian_prod(weights, weights).prod(1) * (log - log.max()).exp()
    p = p / p.sum()
    mean = p @ x
    return mean, (x - mean).mT @ (p[:, None] * (x - mean))


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("a", [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0]], [[1.0, 0.6]]])
def test_two_places_have_the_moments_of_quadrature(name: str, a: list[list[float]]) -> None:
    """Diagonal A' A (both places, one of them) and any other, by chains of 2,000 rows: six standard
    errors, and as much for the grid's.
    """
    matrix, noise, rows = torch.tensor(a).double(), 0.6, 2_000
    y = torch.tensor([1.1, -0.4]).double()[: len(matrix)]
    mean, cov = by_quadrature(LAWS[name], y, matrix, noise)
    process = LevyProcess(LAWS[name], 2)
    chain = process.sweeps(y.expand(rows, -1), matrix, noise, 8, 30, seeded(1))
    draws = torch.cat([sweep.x for sweep in chain])
    error = cov.diagonal().sqrt() / math.sqrt(rows)
    assert ((draws.mean(0) - mean).abs() < 6 * error + 2e-3).all()
    tails = 3.0 if isinstance(LAWS[name], Student) else 1.0  # of fourth moments
    assert (
        (draws.var(0) - cov.diagonal()).abs() < 12 * tails * error * cov.diagonal().sqrt()
    ).all()


@pytest.mark.parametrize("name", LAWS)
def test_both_ways_to_draw_agree(name: str) -> None:
    """The Kalman filter and the Cholesky factor, for missing places of a signal."""
    process, a, noise = (
        LevyProcess(LAWS[name], 12),
        torch.eye(12).double()[[0, 1, 4, 5, 8, 11]],
        0.4,
    )
    y = (process.sample(1, seeded(3)) @ a.mT + noise * normals(1, 6)).repeat(1_500, 1)
    first = torch.cat([s.mean for s in process.sweeps(y, a, noise, 4, 30, seeded(4))])
    turned = torch.linalg.qr(normals(6, 6, seed=7)).Q  # the same measurements, turned
    second = torch.cat(
        [s.mean for s in process.sweeps(y @ turned.mT, turned @ a, noise, 4, 30, seeded(5))]
    )
    error = (first.var(0) / 1_500).sqrt()
    assert ((first.mean(0) - second.mean(0)).abs() < 6 * error + 1e-6).all()


@pytest.mark.parametrize("name", LAWS)
def test_the_denoiser_and_its_jacobian_are_those_of_quadrature(name: str) -> None:
    """At x_t = alpha x + sigma e; the errors are those of 4,000 sweeps."""
    level, rows = NoiseLevel(alpha=0.8, sigma=0.5), 80
    x_t = torch.tensor([0.9, -0.2]).double()
    mean, cov = by_quadrature(LAWS[name], x_t / level.alpha, torch.eye(2).double(), level.ratio)
    denoiser = LevyProcess(LAWS[name], 2).denoiser(sweeps=50, burn_in=15)
    x = x_t.repeat(rows, 1).requires_grad_()
    means = denoiser(x, level)
    assert (means.mean(0) - mean).abs().max() < 0.03
    jacobian = torch.stack(
        [torch.autograd.grad(means[:, i].sum(), x, retain_graph=True)[0] for i in range(2)]
    )
    assert (level.tweedie * jacobian.mean(1) - cov).abs().max() < 0.15 * cov.abs().max()
    assert torch.equal(jacobian[0, :, 1], jacobian[1, :, 0])


def test_variances_leave_the_law_of_increments_alone() -> None:
    for law in LAWS.values():
        u = law.prior((200_000,), seeded(1)).sqrt() * normals(200_000)
        again = law.given(u, seeded(2)).sqrt() * normals(200_000, seed=1)
        ends = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]).double()
        assert (again.quantile(ends) - u.quantile(ends)).abs().max() < 0.03


def test_score_ksd_is_its_definition() -> None:
    """By derivatives of the kernel; and n KSD^2 -> E u(x, x) / d for samples of the law."""
    x, scores, c = normals(6, 3), normals(6, 3, seed=1), 0.7

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (c**2 + (a - b).square().sum()).rsqrt()

    total = 0.0
    for i in range(6):
        for j in range(6):
            a, b = x[i], x[j]
            first = torch.autograd.functional.jacobian(kernel, (a, b))
            mixed = torch.autograd.functional.hessian(kernel, (a, b))[0][1]
            total += scores[i] @ scores[j] * kernel(a, b) + scores[i] @ first[1]
            total += scores[j] @ first[0] + mixed.diagonal().sum()
    assert score_ksd(x, scores, c) == pytest.approx(math.sqrt(total / 3) / 6)
    draws = normals(2_000, 3, seed=2)
    own = (3 / c + 3 / c**3) / 3  # E |s|^2 k(0) + d k(0)^3 with |s|^2 of mean 3
    assert 2_000 * score_ksd(draws, -draws, c) ** 2 == pytest.approx(own, rel=0.4)
    assert score_ksd(1.3 * draws, -1.3 * draws, c) > 2 * score_ksd(draws, -draws, c)
    with pytest.raises(ValueError, match="scale -1"):
        score_ksd(draws, draws, -1)


def test_a_diagonal_operator_takes_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levy, "_Dense", None)
    process = LevyProcess(Laplace(1.0), 5)
    list(process.sweeps(normals(2, 2), 3 * torch.eye(5).double()[1:3], 0.1, 1, 0, seeded(0)))
