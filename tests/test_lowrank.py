"""Covariances known along a few directions: against dense formulas, and exact mixtures."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import (
    LEVELS,
    assert_acts_as,
    dense_given,
    image_mixture,
    linear_denoiser,
    numbers,
    points,
    random_covariances,
)
from torch import Tensor

import mmdgs
from mmdgs.errors import UsageError
from mmdgs.linalg import Covariance, Diagonal, Given, LowRank, Spectral
from mmdgs.linalg.iterations import ConjugateGradients
from mmdgs.linalg.solvers import LowRankSolver
from mmdgs.moments import (
    FullMoments,
    GivenMoments,
    IsotropicMoments,
    LowRankMoments,
    SpectralMoments,
)
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.operators import Blur, Box, Downsample, Grayscale, Matrix, Operator
from mmdgs.posterior import Gaussian
from mmdgs.samplers import ancestral_plan, run
from mmdgs.samplers.metropolis import require_exact_draws

SHAPE, B = (2, 3, 4), 3
D = math.prod(SHAPE)
EYE = torch.eye(D, dtype=torch.float64)


MATRICES = random_covariances(B, D, seed=5)
VARIANCES = numbers(B, *SHAPE, seed=1).square() + 0.1
START = numbers(B, *SHAPE, seed=2)
RESTS = {
    "diagonal": Diagonal(VARIANCES),
    "isotropic": Diagonal(torch.tensor(0.7, dtype=torch.float64).expand(B, *SHAPE)),
    "spectral": Spectral(VARIANCES),
    "one spectrum": Spectral(VARIANCES[:1].expand(B, *SHAPE)),
}


def low_rank(
    rest: str = "spectral", count: int = 3, dtype: torch.dtype = torch.float64, fixed: bool = True
) -> LowRank:
    """The directions are a Krylov space of START."""
    own = RESTS[rest].variances.to(dtype)

    def product(v: Tensor) -> Tensor:
        return torch.einsum("bij,nbj->nbi", MATRICES.to(v), v)

    along = type(RESTS[rest])(own)
    return LowRank.along(along, START.to(dtype), product, count, 1e-9, fixed=fixed)


def formula(cov: LowRank) -> Tensor:
    """C^ of linalg/lowrank.py by dense matrices in float64."""
    v = cov.pairs()[0].double().permute(1, 2, 0)
    r, w = type(cov.rest)(cov.rest.variances.double()).dense().expand(B, D, D), MATRICES @ v
    across = r @ v
    known = w @ torch.linalg.solve(v.mT @ w, w.mT)
    return known + r - across @ torch.linalg.solve(v.mT @ across, across.mT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("transformed", [False, True], ids=["itself", "affine"])
@pytest.mark.parametrize("rest", RESTS)
def test_it_is_its_dense_formula(rest: str, transformed: bool, dtype: torch.dtype) -> None:
    """Condition numbers are below 1e3: float64 leaves 12 digits, float32 four."""
    cov = low_rank(rest, dtype=dtype)
    matrix = formula(cov)
    if transformed:
        cov, matrix = cov.affine(0.3, 0.2), 0.3 * matrix + 0.2 * EYE
        assert isinstance(cov, LowRank)
    assert_acts_as(cov, matrix, START.to(dtype), 1e-10 if dtype == torch.float64 else 1e-3)
    assert cov.root_with_info(START.to(dtype))[1]["dropped"].tolist() == [0.0] * B


def test_along_its_directions_it_is_the_covariance_itself() -> None:
    cov = low_rank(count=4)
    v, w = cov.pairs()
    for direction, image in zip(v, w, strict=True):
        torch.testing.assert_close(
            cov.apply(direction.reshape(B, *SHAPE)).flatten(1), image, rtol=1e-10, atol=1e-10
        )
    torch.testing.assert_close(low_rank(count=D + 3).dense(), MATRICES, rtol=1e-9, atol=1e-9)


def test_a_draw_spends_the_products_along_itself() -> None:
    """Of the bridge aC + bI its law is that of C where products reach all directions; each one
    brings it nearer.
    """
    z, a, b = numbers(B, *SHAPE, seed=4), 0.3, 0.2
    base = RESTS["spectral"].affine(a, b)
    root, inverse = (Spectral(base.variances.pow(power)).dense() for power in (0.5, -0.5))
    white = inverse @ (a * MATRICES + b * EYE) @ inverse
    values, vectors = torch.linalg.eigh(white)
    white_root = (vectors * values.sqrt()[:, None]) @ vectors.mT
    exact = (root @ white_root @ z.reshape(B, D, 1)).reshape(z.shape)
    errors = [
        (low_rank(count=count, fixed=False).affine(a, b).root(z) - exact).norm().item()
        for count in (1, 2, 4, D)
    ]
    assert errors[0] < 0.4 * (base.root(z) - exact).norm().item()
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.5 * errors[1]
    assert errors[3] < 1e-8
    # Along the draw's own direction the whitened covariance is exact after spent product.
    spent = low_rank(count=1, fixed=False).affine(a, b).for_draw(z)
    white_z = Spectral(base.variances.pow(-0.5)).apply(z)
    torch.testing.assert_close(
        spent.apply(white_z).flatten(1),
        ((a * MATRICES + b * EYE) @ white_z.reshape(B, D, 1))[..., 0],
        rtol=1e-9,
        atol=1e-9,
    )
    assert spent.fixed
    # Its density is that of other directions: a Metropolis step refuses it.
    with pytest.raises(UsageError, match="along_draws=False"):
        require_exact_draws(low_rank(fixed=False))
    require_exact_draws(low_rank())


def test_an_invariant_space_does_not_end_the_search() -> None:
    """The start is an eigenvector: others must be found elsewhere, and a direction of zeros counts
    for nothing.
    """
    matrix = torch.diag_embed(torch.arange(1.0, D + 1, dtype=torch.float64)).expand(B, D, D)
    start = EYE[0].expand(B, D).reshape(B, *SHAPE)
    cov = LowRank.along(RESTS["spectral"], start, lambda v: v @ matrix[0], D, 1e-9)
    torch.testing.assert_close(cov.dense(), matrix, rtol=1e-8, atol=1e-8)
    extended = cov.bare.extended(START)
    torch.testing.assert_close(
        extended.extended(3 * START).dense(), extended.dense(), rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(cov.bare.dense(), RESTS["spectral"].dense())


def test_an_indefinite_jacobian_breaks_nothing() -> None:
    values = torch.linspace(-0.5, 1.0, D, dtype=torch.float64)
    basis = torch.linalg.qr(numbers(D, D))[0]
    matrix = (basis * values) @ basis.mT
    for share in (0.0, 0.75):
        cov = LowRank.along(RESTS["one spectrum"], START, lambda v: v @ matrix, 8, 1e-4, share)
        eigenvalues = torch.linalg.eigvalsh(cov.dense())
        assert (eigenvalues > 0).all()
        assert eigenvalues.max() < 10 * max(1.0, RESTS["one spectrum"].variances.max().item())
        assert (cov.root_with_info(START)[1]["dropped"] > 0.1).all()
        # What is dropped is left to the rest: with a negative matrix nothing but it remains.
        negative = LowRank.along(RESTS["one spectrum"], START, lambda v: -v, 3, 1e-4, share)
        torch.testing.assert_close(negative.dense(), RESTS["one spectrum"].dense())


def test_an_image_longer_than_a_covariance_can_have_is_cut_and_no_other() -> None:
    """Along e1 the variance is 0.5 and nowhere above 1, so |C e1| <= sqrt(1 * 0.5); ten times the
    square is left to estimates of |C|.
    """
    e1, e2 = EYE[:1], EYE[1:2]
    rest = Diagonal(torch.ones(1, *SHAPE, dtype=torch.float64))
    most = math.sqrt(10 * 1.0 * 0.5)
    for length, expected in ((0.3, 0.3), (2.0, 2.0), (50.0, most)):
        image = 0.5 * e1 + length * e2
        cov = LowRank(
            rest, START[:1], lambda v: v, 1, lambda image=image: (e1[None], image[None]), 1e-6
        )
        out = cov.apply(e1.reshape(1, *SHAPE)).flatten(1)
        torch.testing.assert_close(out, 0.5 * e1 + expected * e2, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("along_draws", [True, False])
def test_draws_are_linear_in_their_noise_only_where_one_covariance_serves_all(
    along_draws: bool,
) -> None:
    mixture, level = image_mixture(), LEVELS["alpha=0.7"]
    x_t = points(mixture, (3, 2, 2), level, rows=2)
    rest = IsotropicMoments(mixture.denoiser(), LevelTable.of({level: 0.3}))
    q = LowRankMoments(mixture.denoiser(), rest, 2, along_draws=along_draws)(x_t, level)
    a, b = numbers(*x_t.shape, seed=1), numbers(*x_t.shape, seed=2)
    apart = q.cov.root(a + b) - q.cov.root(a) - q.cov.root(b)
    assert (apart.abs().max() > 1e-3) == along_draws
    if not along_draws:
        require_exact_draws(q.cov)


OPERATORS: dict[str, Operator] = {
    "box": Box(SHAPE, 2),
    "gray": Grayscale(SHAPE),
    "gaussian": Blur.gaussian(SHAPE, 0.8),
    "lopsided": Blur(SHAPE, torch.rand(2, 3, generator=torch.Generator().manual_seed(0))),
    "matrix": Matrix(numbers(5, D), SHAPE),
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
@pytest.mark.parametrize("rest", RESTS)
def test_given_is_the_closed_form(
    rest: str, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the covariance that the products along the measurements made, by factors and by conjugate
    gradients.
    """
    y, close = numbers(B, *operator.out_shape, seed=3), {"rtol": 1e-7, "atol": 1e-7}
    for iterated in (False, True):
        if iterated:
            monkeypatch.setattr("mmdgs.linalg.solvers.MOST_SHARED", 0)
            monkeypatch.setattr("mmdgs.linalg.solvers.MOST_EACH", 0)
        q = Gaussian(START, low_rank(rest)).given(y, operator, 0.3)
        assert isinstance(q.cov, Given)
        solvers = LowRankSolver | ConjugateGradients if iterated else LowRankSolver
        assert isinstance(q.cov.solver, solvers)
        prior = formula(q.cov.prior)
        torch.testing.assert_close(q.cov.prior.dense(), prior, **close)
        mean, matrix = dense_given(START, prior, operator, y, 0.3)
        torch.testing.assert_close(q.mean, mean, **close)
        assert_acts_as(q.cov, matrix, START, 1e-7, root=not iterated)


def test_products_along_the_measurements_end_at_the_mean_of_the_full_covariance() -> None:
    """One product is nearer than the rest alone, as many as there are measurements are exact."""
    operator, y = OPERATORS["matrix"], numbers(B, 5, seed=3)
    exact, _ = dense_given(START, MATRICES, operator, y, 0.3)

    def error(cov: Covariance) -> float:
        return (Gaussian(START, cov).given(y, operator, 0.3).mean - exact).norm().item()

    errors = [error(low_rank("isotropic", count)) for count in (1, 2, 5)]
    assert errors[0] < 0.7 * error(RESTS["isotropic"])
    assert errors[1] < errors[0]
    assert errors[2] < 1e-8


def spectral(denoiser: mmdgs.Denoiser, shape: tuple[int, ...]) -> SpectralMoments:
    d = math.prod(shape)
    table = LevelTable(
        [0.1, 10.0],
        torch.stack([torch.linspace(a, 0.1, d).double().reshape(shape) for a in (0.5, 1)]),
    )
    return SpectralMoments(denoiser, table)


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS.keys())
def test_with_as_many_products_as_dimensions_it_is_the_full_covariance(level: NoiseLevel) -> None:
    target, shape = image_mixture(), (3, 2, 2)
    x_t = points(target, shape, level, 5)
    full = FullMoments(target.denoiser())(x_t, level)
    q = LowRankMoments(target.denoiser(), spectral(target.denoiser(), shape), products=12)(
        x_t, level
    )
    torch.testing.assert_close(q.mean, full.mean)
    torch.testing.assert_close(q.cov.dense(), full.cov.dense(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(q.log_prob(x_t), full.log_prob(x_t), rtol=1e-8, atol=1e-8)


def test_under_more_noise_than_below_the_covariance_is_the_rest() -> None:
    target, shape = image_mixture(), (3, 2, 2)
    denoiser, rest = target.denoiser(), spectral(target.denoiser(), shape)
    for level in (NoiseLevel(alpha=0.5, sigma=1.0), NoiseLevel(alpha=2.0, sigma=3.9)):
        x_t = points(target, shape, level, 5)
        q = LowRankMoments(denoiser, rest, below=2.0)(x_t, level)
        always = LowRankMoments(denoiser, rest)(x_t, level)
        expected = rest.covariance(x_t, level) if level.ratio == 2.0 else always.cov
        torch.testing.assert_close(q.mean, always.mean)
        torch.testing.assert_close(q.cov.dense(), expected.dense())


def test_rows_do_not_depend_on_their_batch_and_products_are_counted() -> None:
    target, shape = image_mixture(), (3, 2, 2)
    operator, y, x0 = Downsample(shape, 2), numbers(4, 3, 1, 1), 4 * numbers(4, *shape)
    moments = LowRankMoments(target.denoiser(), spectral(target.denoiser(), shape), products=2)
    levels = mmdgs.schedules.geometric(3, 4.0, 0.2)

    def plan(rows: slice, given: bool) -> mmdgs.samplers.Plan:
        return ancestral_plan(
            GivenMoments(moments, y[rows], operator, 0.1) if given else moments, levels
        )

    for given in (False, True):
        whole = run(plan(slice(None), given), x0, progress=None)
        part = run(plan(slice(1, 3), given), x0[1:3], first_chain=1, progress=None)
        torch.testing.assert_close(whole.x[1:3], part.x, rtol=1e-9, atol=1e-9)
        assert (whole.cost.forwards, whole.cost.products) == (
            3,
            3 * 2 if given else 2 * 2,
        )  # the last step is a mean


def test_what_is_refused() -> None:
    denoiser = linear_denoiser(torch.eye(4, dtype=torch.float64))
    rest = IsotropicMoments(denoiser, LevelTable([1.0], [0.5]))
    with pytest.raises(TypeError, match="FullMoments"):
        LowRankMoments(denoiser, FullMoments(denoiser))  # type: ignore[arg-type]
    large = torch.ones(1, 1, 40, 40)
    q = LowRankMoments(lambda x_t, level: 0.5 * x_t, rest)(large, NoiseLevel(1.0))
    with pytest.raises(UsageError, match="1024"):
        q.cov.spectrum()
