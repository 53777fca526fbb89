"""Gaussians given measurements, against the closed form by dense matrices; and samplers that go on
from there.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracles import (
    assert_acts_as,
    dense_given,
    gaussian_target,
    image_mixture,
    numbers,
    random_covariances,
    root_matrix,
    skewed_mixture,
)
from torch import Tensor

import mmdgs
from mmdgs.errors import UsageError
from mmdgs.linalg import Covariance, Dense, Diagonal, Given, Krylov, Spectral, iterations
from mmdgs.linalg.iterations import ConjugateGradients, LanczosSolver
from mmdgs.linalg.solvers import ChannelSolver, CholeskySolver, DiagonalSolver
from mmdgs.moments import DiagonalMoments, FullMoments, GivenMoments, KrylovMoments
from mmdgs.operators import (
    Blur,
    Box,
    Crop,
    Downsample,
    Fourier,
    Grayscale,
    Mask,
    Matrix,
    Operator,
    compose,
)
from mmdgs.posterior import Gaussian
from mmdgs.randomness import seeded
from mmdgs.samplers import DDIM, Mirrored, Plan, ancestral_plan, run
from mmdgs.targets import GaussianMixture

SHAPE, B = (2, 4, 4), 3
D = math.prod(SHAPE)


MATRICES = random_covariances(B, D, seed=5)
VARIANCES = numbers(B, *SHAPE, seed=1).square() + 0.1


def product(v: Tensor) -> Tensor:
    return torch.einsum("bij,nbj->nbi", MATRICES, v)


COVARIANCES: dict[str, Covariance] = {
    "isotropic": Diagonal(torch.tensor(0.7, dtype=torch.float64).expand(B, *SHAPE)),
    "diagonal": Diagonal(VARIANCES),
    "dense": Dense.from_matrix(MATRICES, torch.Size(SHAPE)),
    "spectral": Spectral(VARIANCES),
    "one spectrum": Spectral(VARIANCES[:1].expand(B, *SHAPE)),
    "krylov, exact": Krylov(product, VARIANCES, steps=D, floor=1e-9),
}
OPERATORS: dict[str, Operator] = {
    "mask": Mask.random(SHAPE, 0.5, generator=seeded(0)),
    "box": Box(SHAPE, 2),
    "crop": Crop(SHAPE, 2),
    "downsample": Downsample(SHAPE, 2),
    "gray": Grayscale(SHAPE),
    "gaussian": Blur.gaussian(SHAPE, 0.8),
    "lopsided": Blur(SHAPE, torch.rand(2, 3, generator=seeded(0))),
    "fourier": Fourier(SHAPE, torch.rand(4, 4, generator=seeded(0)) < 0.5),
    "matrix": Matrix(numbers(5, D), SHAPE),
    "blurred and smaller": compose(Blur.gaussian(SHAPE, 0.8), Downsample(SHAPE, 2)),
}
MEAN = numbers(B, *SHAPE, seed=2)


@pytest.mark.parametrize("noise", ["number", "by row", "by measurement"])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
@pytest.mark.parametrize("name", [name for name in COVARIANCES if name != "krylov, exact"])
def test_given_is_the_closed_form(name: str, operator: Operator, noise: str) -> None:
    """Means, draws, variances and densities."""
    cov = COVARIANCES[name]
    y = numbers(B, *operator.out_shape, seed=3)
    tau: float | Tensor = {
        "number": 0.3,
        "by row": torch.tensor([0.3, 0.4, 0.5], dtype=torch.float64),
        "by measurement": torch.rand(operator.out_shape, generator=seeded(4), dtype=torch.float64)
        + 0.2,
    }[noise]
    q = Gaussian(MEAN, cov).given(y, operator, tau)
    mean, matrix = dense_given(MEAN, cov.dense(), operator, y, tau)
    torch.testing.assert_close(q.mean, mean, rtol=1e-7, atol=1e-7)
    assert_acts_as(q.cov, matrix, MEAN, 1e-7, root=noise == "number")
    if noise == "number":  # draws of the bridge
        bridged = 0.3 * matrix + 0.2 * torch.eye(D, dtype=torch.float64)
        assert_acts_as(q.cov.affine(0.3, 0.2), bridged, MEAN, 1e-7)


def kind_of(cov: str, operator: str) -> type:
    q = Gaussian(MEAN, COVARIANCES[cov]).given(
        numbers(1, *OPERATORS[operator].out_shape), OPERATORS[operator], 0.3
    )
    return type(q.cov.solver) if isinstance(q.cov, Given) else type(q.cov)


def test_what_is_exact_takes_no_iterations() -> None:
    assert kind_of("isotropic", "mask") is kind_of("diagonal", "box") is Diagonal
    assert kind_of("spectral", "gaussian") is kind_of("isotropic", "gaussian") is Spectral
    for operator in ("crop", "downsample", "gray"):
        assert kind_of("diagonal", operator) is DiagonalSolver
    for cov in ("dense", "krylov, exact"):
        assert kind_of(cov, "box") is kind_of(cov, "matrix") is CholeskySolver
    assert (
        kind_of("one spectrum", "matrix") is kind_of("one spectrum", "lopsided") is CholeskySolver
    )
    for operator in ("box", "mask", "crop"):
        assert kind_of("one spectrum", operator) is ChannelSolver
    assert kind_of("spectral", "box") is CholeskySolver  # a factor for each row
    assert (
        kind_of("spectral", "downsample")
        is kind_of("one spectrum", "blurred and smaller")
        is DiagonalSolver
    )


def test_many_measurements_take_conjugate_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a spectrum for each row; the same system by factors, and where it is iterated."""
    operator, y = OPERATORS["box"], numbers(B, *SHAPE, seed=3)
    factored = Gaussian(MEAN, COVARIANCES["spectral"]).given(y, operator, 0.3)
    monkeypatch.setattr("mmdgs.linalg.solvers.MOST_EACH", 2)
    for name in ("box", "fourier", "lopsided", "matrix"):
        assert kind_of("spectral", name) is ConjugateGradients
        test_given_is_the_closed_form("spectral", OPERATORS[name], "by row")
    q = Gaussian(MEAN, COVARIANCES["spectral"]).given(y, operator, 0.3)
    torch.testing.assert_close(q.mean, factored.mean, rtol=1e-8, atol=1e-8)
    assert set(q.sample_with_info(generator=seeded(0))[1]) == {"cg_iterations", "cg_residual"}


def test_densities_after_the_bridge() -> None:
    operator = OPERATORS["gray"]
    q = Gaussian(MEAN, COVARIANCES["diagonal"]).given(
        numbers(B, *operator.out_shape), operator, 0.3
    )
    x_t, level, cleaner = numbers(B, *SHAPE, seed=7), mmdgs.NoiseLevel(1.0), mmdgs.NoiseLevel(0.4)
    bridge = q.bridge(x_t, level, cleaner)
    dense = Gaussian(q.mean, Dense.from_matrix(q.cov.dense(), torch.Size(SHAPE)))
    expected = dense.bridge(x_t, level, cleaner)
    torch.testing.assert_close(bridge.log_prob(x_t), expected.log_prob(x_t))
    torch.testing.assert_close(bridge.mean, expected.mean)


def test_krylov_by_products_is_the_full_covariance() -> None:
    """Fewer steps than dimensions, and so many that conjugate gradients converge; products are
    never decomposed.
    """
    operator, y = OPERATORS["downsample"], numbers(B, *OPERATORS["downsample"].out_shape)
    q = Gaussian(MEAN, Krylov(product, MEAN, steps=D - 1, floor=1e-9)).given(y, operator, 0.3)
    assert isinstance(q.cov, Given)
    assert isinstance(q.cov.solver, LanczosSolver)
    mean, matrix = dense_given(MEAN, MATRICES, operator, y, 0.3)
    torch.testing.assert_close(q.mean, mean, rtol=1e-6, atol=1e-6)
    root = root_matrix(q.cov, MEAN)
    torch.testing.assert_close(root @ root.mT, matrix, rtol=1e-4, atol=1e-4)
    _, info = q.sample_with_info(generator=seeded(0))
    assert set(info) == {"repaired", "krylov_error", "cg_iterations", "cg_residual"}
    assert (info["cg_residual"] < 1e-8).all()


def test_an_indefinite_jacobian_breaks_no_draw() -> None:
    """A network's Jacobian may be indefinite, and conjugate gradients diverge on it: here |x| grows
    to thousands.
    """
    values = torch.linspace(-0.5, 1.0, D, dtype=torch.float64)
    basis = torch.linalg.qr(numbers(D, D))[0]
    matrix = (basis * values) @ basis.mT
    cov = Krylov(lambda v: v @ matrix, MEAN, steps=20, floor=1e-4)
    y = numbers(B, *SHAPE)
    q = Gaussian(MEAN, cov).given(y, OPERATORS["box"], 0.05)
    x = q.sample(generator=seeded(0))
    assert torch.isfinite(x).all()
    assert x.abs().max() < 20
    assert (q.cov.variance_along(numbers(1, B, *SHAPE)) >= 0).all()


def test_what_did_not_converge_is_told(caplog: pytest.LogCaptureFixture) -> None:
    iterations._warn_once.cache_clear()
    cov = Krylov(product, MEAN, steps=2, floor=1e-9)
    q = Gaussian(MEAN, cov).given(numbers(B, *SHAPE), OPERATORS["mask"], 0.01)
    _, info = q.sample_with_info(generator=seeded(0))
    assert (info["cg_residual"] > 1e-3).all()
    assert info["cg_iterations"].tolist() == [4.0] * B  # two for the mean, two for the draw
    assert "did not converge" in caplog.text


def test_the_info_of_a_draw_is_that_of_both_systems() -> None:
    """Iterations add up, and the larger residual stays: here the draw solves the mean's system."""
    cov, operator = Krylov(product, MEAN, steps=2, floor=1e-9), OPERATORS["gaussian"]
    y = numbers(B, *SHAPE)
    q = Gaussian(MEAN, cov).given(y, operator, 0.01)
    assert isinstance(q.cov, Given)
    z = torch.cat([torch.zeros(B, D).double(), (y - operator(MEAN)).flatten(1) / 0.01], 1)
    _, info = q.cov.root_with_info(z)
    torch.testing.assert_close(info["cg_residual"], q.cov.mean_info["cg_residual"])
    assert torch.equal(info["cg_iterations"], 2 * q.cov.mean_info["cg_iterations"])


def test_a_row_takes_the_iterations_that_it_would_take_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mmdgs.linalg.solvers.MOST_EACH", 2)
    operator, y = OPERATORS["lopsided"], numbers(B, *SHAPE, seed=3)
    y[0] = operator(MEAN)[0]  # says what the mean says: there is nothing to solve
    y[1] *= 100

    def iterations_of(rows: list[int]) -> list[float]:
        q = Gaussian(MEAN[rows], Spectral(VARIANCES[rows])).given(y[rows], operator, 0.3)
        assert isinstance(q.cov, Given)
        return q.cov.mean_info["cg_iterations"].tolist()

    together = iterations_of([0, 1, 2])
    assert together == [iterations_of([i, i])[0] for i in range(B)]
    assert together[0] == 0 < together[1]


def test_wrong_measurements_are_refused() -> None:
    q, operator = Gaussian(MEAN, COVARIANCES["isotropic"]), OPERATORS["downsample"]
    for y, noise, said in (
        (MEAN, 0.1, r"\(3, 2, 4, 4\)"),
        (numbers(2, 2, 2, 2), 0.1, "2 rows"),
        (numbers(B, 2, 2, 2), 0, "positive"),
    ):
        with pytest.raises(UsageError, match=said):
            q.given(y, operator, noise)


def test_a_mixture_given_measurements_is_bayes_rule() -> None:
    """log p(x | y) + log p(y) = log p(x) + log p(y | x), with the same p(y) at every x."""
    mixture, matrix, noise = skewed_mixture(), numbers(2, 3), 0.4
    y = numbers(4, 2, seed=1)
    posterior = mixture.given(y, matrix, noise)
    x = numbers(6, 4, 3, seed=2)
    likelihood = -0.5 * ((y - x @ matrix.mT) / noise).square().sum(-1)
    evidence = (
        mixture.log_prob(x) + likelihood - torch.stack([posterior.log_prob(point) for point in x])
    )
    torch.testing.assert_close(evidence, evidence[:1].expand_as(evidence), rtol=1e-10, atol=1e-10)
    single = posterior.mixture(2)
    torch.testing.assert_close(
        single.log_prob(x[:, 2]), torch.stack([posterior.log_prob(point)[2] for point in x])
    )
    with pytest.raises(ValueError, match="3 dimensions"):
        mixture.given(y, numbers(2, 4), noise)


@pytest.mark.parametrize(
    "estimator",
    [FullMoments, KrylovMoments, lambda denoiser: DiagonalMoments(denoiser, probes=None)],
)
def test_a_gaussian_denoiser_given_measurements_is_exact(estimator: Any) -> None:
    """For Gaussian data with independent coordinates (and any Gaussian, by full covariances) p(x |
    x_t, y) is exact.
    """
    diagonal = GaussianMixture(
        [1.0], torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64), [[0.3, 1.0, 2.0]]
    )
    target = diagonal if estimator not in (FullMoments, KrylovMoments) else gaussian_target()
    level, matrix = mmdgs.NoiseLevel(0.7), numbers(2, 3)
    x_t, y = numbers(5, 3, seed=8), numbers(5, 2, seed=9)
    q = GivenMoments(estimator(target.denoiser()), y, matrix, 0.3)(x_t, level)
    both = torch.cat([x_t, y * level.sigma / 0.3], 1)  # one measurement of both, at the same noise
    stacked = torch.cat([torch.eye(3, dtype=torch.float64), matrix * level.sigma / 0.3])
    exact = target.given(both, stacked, level.sigma)
    torch.testing.assert_close(q.mean, exact.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(q.cov.dense(), exact.covariance, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mirrored", [False, True], ids=["ancestral", "mirrored"])
def test_chains_down_the_levels_draw_from_p_of_x_given_y(mirrored: bool) -> None:
    """For Gaussian data the chain is exact but for its start and its last step's level, at any
    number of levels.
    """
    target, matrix = gaussian_target(), numbers(2, 3)
    y, chains = torch.tensor([[1.0, -0.5]], dtype=torch.float64), 4_000
    exact = target.given(y, matrix, 0.5)
    moments = GivenMoments(FullMoments(target.denoiser()), y, matrix, 0.5)
    levels = mmdgs.schedules.geometric(5, 100.0, 0.01)
    plan = (
        Plan.down(Mirrored(moments), levels)
        if mirrored
        else ancestral_plan(moments, levels, mean_last=False)
    )
    x = run(plan, 100 * numbers(chains, 3, seed=3), progress=None).x
    z = torch.linalg.solve_triangular(
        torch.linalg.cholesky(exact.covariance[0]), (x - exact.mean[0]).mT, upper=False
    )
    assert z.mean(1).abs().max() < 4.5 / math.sqrt(chains)
    assert (z @ z.mT / chains - torch.eye(3)).abs().max() < 6 / math.sqrt(chains)


def test_the_conditioned_mean_costs_one_evaluation() -> None:
    target = image_mixture()
    given = GivenMoments(
        DiagonalMoments(target.denoiser(), probes=2), numbers(1, 1, 2, 2), Grayscale((3, 2, 2)), 0.1
    )
    plan = Plan.down(DDIM(given.denoiser), mmdgs.schedules.geometric(3, 4.0, 0.2))
    cost = run(plan, numbers(2, 3, 2, 2), progress=None).cost
    assert (cost.forwards, cost.products) == (3, 6)


@pytest.mark.parametrize("operator", [Downsample((3, 8, 8), 2), Box((3, 8, 8), 4)])
def test_low_precision_is_for_networks_alone(operator: Operator) -> None:
    """Within bf16 autocast the systems are those without: a matrix rounded to bf16 is not positive
    any more.
    """
    cov = Spectral(300 * torch.rand(1, 3, 8, 8, generator=seeded(0)).pow(3).expand(2, -1, -1, -1))
    q = Gaussian(torch.zeros(2, 3, 8, 8), cov)
    y = operator(torch.ones(2, 3, 8, 8))
    plain = q.given(y, operator, 0.02).sample(generator=seeded(1))
    with torch.autocast("cpu", torch.bfloat16):
        low = q.given(y, operator, 0.02).sample(generator=seeded(1))
    torch.testing.assert_close(low, plain)
