"""Gaussians given measurements, against the closed form by dense matrices; and samplers that go on from there."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from oracles import gaussian_target, image_mixture, random_covariances, skewed_mixture
from torch import Tensor

import mmdgs
from mmdgs.errors import UsageError
from mmdgs.linalg import Covariance, Dense, Diagonal, Given, Krylov, Spectral, iterations
from mmdgs.linalg.iterations import ConjugateGradients, LanczosSolver
from mmdgs.linalg.solvers import ChannelSolver, CholeskySolver, CosineSolver, DiagonalSolver
from mmdgs.moments import DiagonalMoments, ExactMoments, FullMoments, GivenMoments, KrylovMoments
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
    noise_variances,
)
from mmdgs.posterior import Gaussian
from mmdgs.samplers import ancestral_plan, ddim_plan, gibbs_plan, heun_plan, mirrored_plan, run, single_level_plan
from mmdgs.targets import GaussianMixture

SHAPE, B = (2, 4, 4), 3
D = math.prod(SHAPE)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


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
    "krylov, exact": Krylov(product, torch.zeros(B, *SHAPE, dtype=torch.float64), steps=D, floor=1e-9),
}
OPERATORS: dict[str, Operator] = {
    "mask": Mask.random(SHAPE, 0.5, generator=seeded()),
    "box": Box(SHAPE, 2),
    "crop": Crop(SHAPE, 2),
    "downsample": Downsample(SHAPE, 2),
    "gray": Grayscale(SHAPE),
    "gaussian": Blur.gaussian(SHAPE, 0.8),
    "lopsided": Blur(SHAPE, torch.rand(2, 3, generator=seeded())),
    "fourier": Fourier(SHAPE, torch.rand(4, 4, generator=seeded()) < 0.5),
    "matrix": Matrix(numbers(5, D), SHAPE),
    "blurred and smaller": compose(Blur.gaussian(SHAPE, 0.8), Downsample(SHAPE, 2)),
}
MEAN = numbers(B, *SHAPE, seed=2)


def closed_form(cov: Tensor, operator: Operator, y: Tensor, noise: float | Tensor) -> tuple[Tensor, Tensor]:
    """Mean (B, d) and covariance (B, d, d) given y, by dense matrices."""
    a = operator(torch.eye(D, dtype=torch.float64).reshape(D, *SHAPE)).flatten(1).mT
    variances = noise_variances(noise, operator, y).expand(B, *operator.out_shape).flatten(1)
    gain = cov @ a.mT @ torch.linalg.inv(a @ cov @ a.mT + torch.diag_embed(variances))
    left = operator.known(y).flatten(1) - MEAN.flatten(1) @ a.mT
    return MEAN.flatten(1) + (gain @ left[..., None])[..., 0], cov - gain @ a @ cov


def root_matrix(cov: Covariance) -> Tensor:
    """R (B, d, n), column by column."""
    shape = cov.normals(torch.Size(SHAPE))
    basis = torch.eye(math.prod(shape), dtype=torch.float64)
    return torch.stack([cov.root(one.expand(B, -1).reshape(B, *shape)).flatten(1) for one in basis], -1)


@pytest.mark.parametrize("noise", ["number", "by row", "by measurement"])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
@pytest.mark.parametrize("cov", COVARIANCES.values(), ids=COVARIANCES.keys())
def test_given_is_the_closed_form(cov: Covariance, operator: Operator, noise: str) -> None:
    """Means, draws, variances and densities, to the accuracy of conjugate gradients (1e-10) times the condition."""
    y = numbers(B, *operator.out_shape, seed=3)
    tau: float | Tensor = {
        "number": 0.3,
        "by row": torch.tensor([0.3, 0.4, 0.5], dtype=torch.float64),
        "by measurement": torch.rand(operator.out_shape, generator=seeded(4), dtype=torch.float64) + 0.2,
    }[noise]
    q = Gaussian(MEAN, cov).given(y, operator, tau)
    mean, matrix = closed_form(cov.dense(), operator, y, tau)
    close = {"rtol": 1e-7, "atol": 1e-7}
    torch.testing.assert_close(q.mean.flatten(1), mean, **close)
    torch.testing.assert_close(q.cov.dense(), matrix, **close)
    torch.testing.assert_close(q.cov.diagonal().flatten(1), matrix.diagonal(dim1=1, dim2=2), **close)
    torch.testing.assert_close(q.cov.logdet(), torch.logdet(matrix), **close)
    u = numbers(2, B, *SHAPE, seed=6)
    image = torch.einsum("bij,nbj->nbi", matrix, u.flatten(2))
    torch.testing.assert_close(q.variance_along(u), (u.flatten(2) * image).sum(2), **close)
    torch.testing.assert_close(q.cov.apply(u[0]).flatten(1), image[0], **close)
    inverse = torch.linalg.solve(matrix, u[0].flatten(1)[..., None])[..., 0]
    torch.testing.assert_close(q.cov.mahalanobis(u[0]), (u[0].flatten(1) * inverse).sum(1), **close)
    if noise == "number":  # draws, and draws of the bridge
        for scale, shift in ((1.0, 0.0), (0.3, 0.2)):
            root = root_matrix(q.cov.affine(scale, shift))
            expected = scale * matrix + shift * torch.eye(D, dtype=torch.float64)
            torch.testing.assert_close(root @ root.mT, expected, **close)


def kind_of(cov: str, operator: str) -> type:
    q = Gaussian(MEAN, COVARIANCES[cov]).given(numbers(1, *OPERATORS[operator].out_shape), OPERATORS[operator], 0.3)
    return type(q.cov.solver) if isinstance(q.cov, Given) else type(q.cov)


def test_what_is_exact_takes_no_iterations() -> None:
    assert kind_of("isotropic", "mask") is kind_of("diagonal", "box") is Diagonal
    assert kind_of("spectral", "gaussian") is kind_of("isotropic", "gaussian") is Spectral
    for operator in ("crop", "downsample", "gray"):
        assert kind_of("diagonal", operator) is DiagonalSolver
    for cov in ("dense", "krylov, exact"):
        assert kind_of(cov, "box") is kind_of(cov, "matrix") is CholeskySolver
    assert kind_of("one spectrum", "matrix") is kind_of("one spectrum", "lopsided") is CholeskySolver
    for operator in ("box", "mask", "crop"):
        assert kind_of("one spectrum", operator) is ChannelSolver
    assert kind_of("spectral", "box") is CholeskySolver  # a factor for each row
    assert kind_of("spectral", "downsample") is kind_of("one spectrum", "blurred and smaller") is CosineSolver


@pytest.mark.parametrize("name", OPERATORS)
def test_who_measures_every_channel_by_itself_and_alike(name: str) -> None:
    operator = OPERATORS[name]
    assert operator.channelwise is (name not in ("gray", "matrix"))
    if operator.channelwise:
        x = numbers(B, *SHAPE, seed=5)
        y = operator(x)
        torch.testing.assert_close(operator(x.flip(1)), y.flip(1))
        alone = operator(x * (torch.arange(SHAPE[0]) == 0)[:, None, None])
        torch.testing.assert_close(alone[:, 0], y[:, 0])
        assert not alone[:, 1:].any()


def test_a_mask_that_differs_from_channel_to_channel_is_not_alike() -> None:
    keep = torch.rand(SHAPE, generator=seeded()) < 0.5
    assert not Mask(keep).channelwise
    assert not Mask(keep[0, 0], (4,)).channelwise  # numbers in a row have no channels
    test_given_is_the_closed_form(COVARIANCES["one spectrum"], Mask(keep), "number")


def test_many_measurements_take_conjugate_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a spectrum for each row; the same system by factors, and where it is iterated."""
    operator, y = OPERATORS["box"], numbers(B, *SHAPE, seed=3)
    factored = Gaussian(MEAN, COVARIANCES["spectral"]).given(y, operator, 0.3)
    monkeypatch.setattr("mmdgs.linalg.given.MOST_EACH", 2)
    for name in ("box", "fourier", "lopsided", "matrix"):
        assert kind_of("spectral", name) is ConjugateGradients
        test_given_is_the_closed_form(COVARIANCES["spectral"], OPERATORS[name], "by row")
    q = Gaussian(MEAN, COVARIANCES["spectral"]).given(y, operator, 0.3)
    torch.testing.assert_close(q.mean, factored.mean, rtol=1e-8, atol=1e-8)
    assert set(q.sample_with_info(generator=seeded())[1]) == {"cg_iterations", "cg_residual"}


def test_densities_after_the_bridge() -> None:
    operator = OPERATORS["gray"]
    q = Gaussian(MEAN, COVARIANCES["diagonal"]).given(numbers(B, *operator.out_shape), operator, 0.3)
    x_t, level, cleaner = numbers(B, *SHAPE, seed=7), mmdgs.NoiseLevel(1.0), mmdgs.NoiseLevel(0.4)
    bridge = q.bridge(x_t, level, cleaner)
    dense = Gaussian(q.mean, Dense.from_matrix(q.cov.dense(), torch.Size(SHAPE)))
    expected = dense.bridge(x_t, level, cleaner)
    torch.testing.assert_close(bridge.log_prob(x_t), expected.log_prob(x_t))
    torch.testing.assert_close(bridge.mean, expected.mean)


def test_krylov_by_products_is_the_full_covariance() -> None:
    """Fewer steps than dimensions, and so many that conjugate gradients converge; products are never decomposed."""
    operator, y = OPERATORS["downsample"], numbers(B, *OPERATORS["downsample"].out_shape)
    like = torch.zeros(B, *SHAPE, dtype=torch.float64)
    q = Gaussian(MEAN, Krylov(product, like, steps=D - 1, floor=1e-9)).given(y, operator, 0.3)
    assert isinstance(q.cov, Given)
    assert isinstance(q.cov.solver, LanczosSolver)
    mean, matrix = closed_form(MATRICES, operator, y, 0.3)
    torch.testing.assert_close(q.mean.flatten(1), mean, rtol=1e-6, atol=1e-6)
    root = root_matrix(q.cov)
    torch.testing.assert_close(root @ root.mT, matrix, rtol=1e-4, atol=1e-4)
    _, info = q.sample_with_info(generator=seeded())
    assert set(info) == {"repaired", "krylov_error", "cg_iterations", "cg_residual"}
    assert (info["cg_residual"] < 1e-8).all()


def test_an_indefinite_jacobian_breaks_no_draw() -> None:
    """A network's Jacobian may be indefinite, and conjugate gradients diverge on it: here |x| grows to thousands."""
    values = torch.linspace(-0.5, 1.0, D, dtype=torch.float64)
    basis = torch.linalg.qr(numbers(D, D))[0]
    matrix = (basis * values) @ basis.mT
    cov = Krylov(lambda v: v @ matrix, torch.zeros(B, *SHAPE, dtype=torch.float64), steps=20, floor=1e-4)
    y = numbers(B, *SHAPE)
    q = Gaussian(MEAN, cov).given(y, OPERATORS["box"], 0.05)
    x = q.sample(generator=seeded())
    assert torch.isfinite(x).all()
    assert x.abs().max() < 20
    assert (q.cov.variance_along(numbers(1, B, *SHAPE)) >= 0).all()


def test_what_did_not_converge_is_told(caplog: pytest.LogCaptureFixture) -> None:
    iterations._warn_once.cache_clear()
    cov = Krylov(product, torch.zeros(B, *SHAPE, dtype=torch.float64), steps=2, floor=1e-9)
    with caplog.at_level(logging.WARNING, "mmdgs"):
        for _ in range(2):
            q = Gaussian(MEAN, cov).given(numbers(B, *SHAPE), OPERATORS["mask"], 0.01)
            _, info = q.sample_with_info(generator=seeded())
    assert (info["cg_residual"] > 1e-3).all()
    assert info["cg_iterations"].tolist() == [4.0] * B  # two for the mean, two for the draw
    assert [record.message for record in caplog.records if "did not converge in 2 iterations" in record.message] != []
    assert len(caplog.records) == 1


def test_draws_have_the_conditioned_moments() -> None:
    operator, y = OPERATORS["gray"], numbers(B, *OPERATORS["gray"].out_shape)
    q = Gaussian(MEAN, COVARIANCES["diagonal"]).given(y, operator, 0.3)
    count = 20_000
    x = q.sample(count, generator=seeded()).flatten(2)
    mean, matrix = closed_form(COVARIANCES["diagonal"].dense(), operator, y, 0.3)
    scale = matrix.diagonal(dim1=1, dim2=2).sqrt()
    assert ((x.mean(0) - mean) / scale).abs().max() < 4.5 / math.sqrt(count)  # of 96 standard errors
    centred = x - mean
    found = torch.einsum("nbi,nbj->bij", centred, centred) / count
    assert ((found - matrix) / scale[:, :, None] / scale[:, None]).abs().max() < 6.5 / math.sqrt(count)


def test_wrong_measurements_are_refused() -> None:
    q = Gaussian(MEAN, COVARIANCES["isotropic"])
    operator = OPERATORS["downsample"]
    with pytest.raises(UsageError, match=r"have shape \(B, 2, 2, 2\), got \(3, 2, 4, 4\)"):
        q.given(MEAN, operator, 0.1)
    with pytest.raises(UsageError, match="measurements for 2 rows, and the posterior has 3"):
        q.given(numbers(2, 2, 2, 2), operator, 0.1)
    with pytest.raises(UsageError, match="must be positive and finite, got 0"):
        q.given(numbers(B, 2, 2, 2), operator, 0)
    with pytest.raises(UsageError, match=r"does not fit x of shape \(2, 4, 4\)"):
        q.given(numbers(B, 3, 2, 2), Downsample((3, 4, 4), 2), 0.1)
    large = torch.ones(1, 1, 40, 40)
    far = Gaussian(large, Spectral(large)).given(large, Box((1, 40, 40), 2), 0.1)
    with pytest.raises(UsageError, match="use draws, or variance_along"):
        far.cov.diagonal()


# --- mixtures, and samplers ---------------------------------------------------------------------------------------


def test_a_mixture_given_measurements_is_bayes_rule() -> None:
    """log p(x | y) + log p(y) = log p(x) + log p(y | x), with the same p(y) at every x."""
    mixture, matrix, noise = skewed_mixture(), numbers(2, 3), 0.4
    y = numbers(4, 2, seed=1)
    posterior = mixture.given(y, matrix, noise)
    x = numbers(6, 4, 3, seed=2)
    likelihood = -0.5 * ((y - x @ matrix.mT) / noise).square().sum(-1)
    evidence = mixture.log_prob(x) + likelihood - torch.stack([posterior.log_prob(one) for one in x])
    torch.testing.assert_close(evidence, evidence[:1].expand_as(evidence), rtol=1e-10, atol=1e-10)
    single = posterior.mixture(2)
    torch.testing.assert_close(single.log_prob(x[:, 2]), torch.stack([posterior.log_prob(one)[2] for one in x]))
    with pytest.raises(ValueError, match="does not fit a mixture in 3 dimensions"):
        mixture.given(y, numbers(2, 4), noise)


@pytest.mark.parametrize("estimator", [FullMoments, KrylovMoments, lambda one: DiagonalMoments(one, probes=None)])
def test_a_gaussian_denoiser_given_measurements_is_exact(estimator: object) -> None:
    """For Gaussian data with independent coordinates (and any Gaussian, by full covariances) p(x | x_t, y) is exact."""
    diagonal = GaussianMixture([1.0], torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64), [[0.3, 1.0, 2.0]])
    target = diagonal if estimator not in (FullMoments, KrylovMoments) else gaussian_target()
    level, matrix = mmdgs.NoiseLevel(0.7), numbers(2, 3)
    x_t, y = numbers(5, 3, seed=8), numbers(5, 2, seed=9)
    q = GivenMoments(estimator(target.denoiser()), y, matrix, 0.3)(x_t, level)  # type: ignore[operator]
    both = torch.cat([x_t, y * level.sigma / 0.3], 1)  # one measurement of both, at the same noise
    stacked = torch.cat([torch.eye(3, dtype=torch.float64), matrix * level.sigma / 0.3])
    exact = target.given(both, stacked, level.sigma)
    torch.testing.assert_close(q.mean, exact.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(q.cov.dense(), exact.covariance, rtol=1e-6, atol=1e-6)


def test_gibbs_with_the_exact_posterior_leaves_p_of_x_given_y_invariant() -> None:
    target, matrix = gaussian_target(), numbers(1, 3)
    y = torch.tensor([[1.0]], dtype=torch.float64)
    exact = target.given(y, matrix, 0.5)
    chains = 4_000
    start = exact.sample(chains, generator=seeded())[:, 0]
    plan = single_level_plan(GivenMoments(ExactMoments(target), y, matrix, 0.5), mmdgs.NoiseLevel(0.8), steps=10)
    x = run(plan, start, progress=None).x
    mean, cov = exact.mean[0], exact.covariance[0]
    z = torch.linalg.solve_triangular(torch.linalg.cholesky(cov), (x - mean).mT, upper=False)
    assert z.mean(1).abs().max() < 4 / math.sqrt(chains)
    assert (z @ z.mT / chains - torch.eye(3)).abs().max() < 6 / math.sqrt(chains)


@pytest.mark.parametrize("mirrored", [False, True], ids=["ancestral", "mirrored"])
def test_chains_down_the_levels_draw_from_p_of_x_given_y(mirrored: bool) -> None:
    """For Gaussian data the chain is exact but for its start and its last step's level, at any number of levels."""
    target, matrix = gaussian_target(), numbers(2, 3)
    y, chains = torch.tensor([[1.0, -0.5]], dtype=torch.float64), 4_000
    exact = target.given(y, matrix, 0.5)
    moments = GivenMoments(FullMoments(target.denoiser()), y, matrix, 0.5)
    levels = mmdgs.schedules.geometric(5, 100.0, 0.01)
    plan = mirrored_plan(moments, levels) if mirrored else ancestral_plan(moments, levels, mean_last=False)
    x = run(plan, 100 * numbers(chains, 3, seed=3), progress=None).x
    z = torch.linalg.solve_triangular(torch.linalg.cholesky(exact.covariance[0]), (x - exact.mean[0]).mT, upper=False)
    assert z.mean(1).abs().max() < 4.5 / math.sqrt(chains)
    assert (z @ z.mT / chains - torch.eye(3)).abs().max() < 6 / math.sqrt(chains)


def test_every_plan_takes_the_estimator_and_rows_do_not_depend_on_their_batch() -> None:
    target = image_mixture()
    shape = (3, 2, 2)
    operator, y = Grayscale(shape), numbers(4, 1, 2, 2)
    levels = mmdgs.schedules.geometric(3, 4.0, 0.2)
    x0 = 4 * numbers(4, *shape)
    for estimator in (DiagonalMoments(target.denoiser(), probes=2), KrylovMoments(target.denoiser(), steps=3)):

        def plans(rows: slice, estimator: mmdgs.Moments = estimator) -> list[mmdgs.samplers.Plan]:
            given = GivenMoments(estimator, y[rows], operator, 0.1)
            return [
                gibbs_plan(given, levels, sweeps=2),
                ancestral_plan(given, levels),
                mirrored_plan(given, levels),
                single_level_plan(given, levels[1], steps=2),
                ddim_plan(given.denoiser, levels),
                heun_plan(given.denoiser, levels),
            ]

        for whole, part in zip(plans(slice(None)), plans(slice(2, 4)), strict=True):
            found = run(whole, x0, progress=None)
            again = run(part, x0[2:], first_chain=2, progress=None)
            torch.testing.assert_close(found.x[2:], again.x, rtol=1e-8, atol=1e-8)
            # The gray image is nearly that of y, where the noise of the last level allows it.
            assert (operator(found.x) - y).abs().max() < 1.5


def test_the_conditioned_mean_costs_one_evaluation() -> None:
    target = image_mixture()
    given = GivenMoments(DiagonalMoments(target.denoiser(), probes=2), numbers(1, 1, 2, 2), Grayscale((3, 2, 2)), 0.1)
    plan = ddim_plan(given.denoiser, mmdgs.schedules.geometric(3, 4.0, 0.2))
    cost = run(plan, numbers(2, 3, 2, 2), progress=None).cost
    assert (cost.forwards, cost.products) == (3, 6)


@pytest.mark.parametrize("operator", [Downsample((3, 8, 8), 2), Blur.motion((3, 8, 8), 5), Box((3, 8, 8), 4)])
def test_low_precision_is_for_networks_alone(operator: Operator) -> None:
    """Within bf16 autocast the systems are those without: a matrix rounded to bf16 is not positive any more."""
    cov = Spectral(300 * torch.rand(1, 3, 8, 8, generator=seeded(0)).pow(3).expand(2, -1, -1, -1))
    q = Gaussian(torch.zeros(2, 3, 8, 8), cov)
    y = operator(torch.ones(2, 3, 8, 8))
    plain = q.given(y, operator, 0.02).sample(generator=seeded(1))
    with torch.autocast("cpu", torch.bfloat16):
        low = q.given(y, operator, 0.02).sample(generator=seeded(1))
    torch.testing.assert_close(low, plain)
