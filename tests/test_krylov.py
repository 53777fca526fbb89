"""Krylov covariances against dense ones, in float64, and what the estimator promises around them."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from nets import tiny_unet
from oracles import IMAGE, PLAIN, SCALED, assert_moments, image_mixture, linear_denoiser, points, random_covariances
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import mmdgs
from mmdgs.linalg import operators
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.operators import Dense
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.samplers import Plan
from mmdgs.targets import GaussianMixture

EXACT = {"rtol": 1e-8, "atol": 1e-8}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixture(d: int) -> GaussianMixture:
    return GaussianMixture([0.6, 0.4], 0.5 * random(2, d), random_covariances(2, d, seed=1))


def network(d: int) -> mmdgs.Denoiser:
    """A smooth random function, with a Jacobian neither symmetric nor positive."""
    linear, inner, outer = (random(d, d, seed=seed) / math.sqrt(d) for seed in (1, 2, 3))
    return mmdgs.clean_denoiser(lambda x: 0.6 * x + 0.3 * x @ linear.mT + torch.tanh(x @ inner.mT) @ outer.mT)


def rotated(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues, (d, d)."""
    vectors, _ = torch.linalg.qr(random(len(values), len(values), seed=seed))
    return (vectors * values) @ vectors.mT


def operator(matrices: Tensor, steps: int, floor: float = 1e-6, calls: list[int] | None = None) -> Krylov:
    """The Krylov operator of matrices (B, d, d), and how many vectors each of its products took."""

    def product(v: Tensor) -> Tensor:
        if calls is not None:
            calls.append(len(v))
        return torch.einsum("bij,nbj->nbi", matrices, v)

    return Krylov(product, matrices[..., 0], steps, floor)


def lifted(matrices: Tensor, floor: float = 1e-6) -> Dense:
    dense = Dense.from_matrix(matrices, matrices.shape[2:])
    return Dense(dense.values.clamp(min=floor), dense.vectors, dense.event_shape)


def relative(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)


# --- as many steps as dimensions: the dense covariance ------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda d: mixture(d).denoiser(), network], ids=["mixture", "network"])
@pytest.mark.parametrize(("d", "steps"), [(2, 2), (2, 7), (16, 16), (200, 200)])
@pytest.mark.parametrize("floor", [None, 1e-6], ids=["the rule", "1e-6"])
def test_with_all_steps_it_is_the_full_covariance(make, d: int, steps: int, floor: float | None) -> None:
    denoiser, x_t, level = make(d), random(3, d, seed=4), SCALED
    full = mmdgs.FullMoments(denoiser, floor)(x_t, level)
    q = mmdgs.KrylovMoments(denoiser, steps, floor)(x_t, level)
    z = random(3, d, seed=5)
    torch.testing.assert_close(q.mean, full.mean, **EXACT)
    root, info = q.cov.root_with_info(z)
    torch.testing.assert_close(root, full.cov.root(z), **EXACT)
    torch.testing.assert_close(info["repaired"], full.repaired, **EXACT)
    assert info["krylov_error"].tolist() == [0.0] * 3
    torch.testing.assert_close(q.log_prob(x_t), full.log_prob(x_t), **EXACT)
    torch.testing.assert_close(q.variance_along(z), full.variance_along(z), **EXACT)
    torch.testing.assert_close(q.cov.diagonal(), full.cov.diagonal(), **EXACT)
    torch.testing.assert_close(q.cov.dense(), full.cov.dense(), **EXACT)


def test_the_network_above_needs_symmetrising_and_repair() -> None:
    jacobian = torch.func.jacrev(lambda x: network(16)(x[None], PLAIN)[0])(random(16))
    assert (jacobian - jacobian.mT).norm() > 0.5 * jacobian.norm()
    assert mmdgs.FullMoments(network(16))(random(3, 16, seed=4), PLAIN).repaired.min() > 0


def test_a_unet_with_attention_as_a_score() -> None:
    unet, level = tiny_unet().double().eval(), SCALED
    denoiser = mmdgs.score_denoiser(lambda x: 5 * unet(x))
    x_t = random(2, 1, 8, 8)
    full = mmdgs.FullMoments(denoiser)(x_t, level)
    q = mmdgs.KrylovMoments(denoiser, steps=64)(x_t, level)
    z = random(2, 1, 8, 8, seed=1)
    torch.testing.assert_close(q.cov.root(z), full.cov.root(z), **EXACT)
    # Reverse mode alone is off by more than a thousand tolerances: the test sees whether J is symmetrised.
    trusting = mmdgs.KrylovMoments(denoiser, steps=20, symmetric=True)(x_t, level)
    assert relative(trusting.cov.root(z), full.cov.root(z)).min() > 1e-5


@pytest.mark.parametrize("steps", [4, 12])
def test_bridges_are_those_of_the_full_covariance(steps: int) -> None:
    """Repair first, then scale and shift: the order is seen where eigenvalues are lifted."""
    matrix = rotated(torch.tensor([-0.5, -0.1, 0.4, 1.2], dtype=torch.float64).repeat_interleave(3))
    denoiser, x_t = linear_denoiser(matrix), random(2, *IMAGE)
    cleaner, level = NoiseLevel(alpha=0.8, sigma=0.6), NoiseLevel(alpha=0.28, sigma=0.96)
    # By the rule a draw's floor is that of its own Ritz values, whose weights are random.
    floor = 1e-6 if steps == 4 else None
    full = mmdgs.FullMoments(denoiser, floor)(x_t, level)
    q = mmdgs.KrylovMoments(denoiser, steps, floor)(x_t, level)
    z = random(2, *IMAGE, seed=1)
    for ours, theirs in (
        (q.bridge(x_t, level, cleaner), full.bridge(x_t, level, cleaner)),
        (
            mmdgs.Gaussian(q.mean, q.cov.affine(0.3, 0.2).affine(2.0, 0.1)),
            mmdgs.Gaussian(full.mean, full.cov.affine(0.6, 0.5)),
        ),
    ):
        torch.testing.assert_close(ours.mean, theirs.mean, **EXACT)
        # Four eigenvalues: four steps are as good as twelve.
        torch.testing.assert_close(ours.cov.root(z), theirs.cov.root(z), **EXACT)
        torch.testing.assert_close(ours.cov.mahalanobis(z), theirs.cov.mahalanobis(z), **EXACT)
        torch.testing.assert_close(ours.cov.dense(), theirs.cov.dense(), **EXACT)
        if steps == 12:
            torch.testing.assert_close(ours.log_prob(z), theirs.log_prob(z), **EXACT)
            torch.testing.assert_close(ours.variance_along(z), theirs.variance_along(z), **EXACT)


# --- fewer steps ------------------------------------------------------------------------------------------------

SPECTRA = {
    "well conditioned": torch.linspace(0.1, 3, 200, dtype=torch.float64),
    "up to the floor": torch.linspace(1e-6, 1, 200, dtype=torch.float64),
    "over six decades": torch.logspace(0, -6, 200, dtype=torch.float64),
    "indefinite": torch.linspace(-0.2, 1, 200, dtype=torch.float64),
    "with a gap": torch.cat([torch.linspace(0, 0.01, 180), torch.linspace(1, 1.05, 20)]).double(),
}
spectra = pytest.mark.parametrize("values", SPECTRA.values(), ids=SPECTRA.keys())


@spectra
def test_roots_converge_and_the_error_estimate_follows(values: Tensor) -> None:
    matrices = rotated(values).expand(8, 200, 200)
    z = random(8, 200, seed=1)
    expected = lifted(matrices).root(z)
    errors, estimates = [], []
    for steps in (1, 2, 5, 10, 20, 40, 80):
        root, info = operator(matrices, steps).root_with_info(z)
        errors.append(relative(root, expected))
        estimates.append(info["krylov_error"])
    error, estimate = torch.stack(errors), torch.stack(estimates)
    assert (error[1:] < 0.95 * error[:-1]).all(), "more steps must bring it closer"
    ratio = torch.where(error > 1e-12, estimate / error, 1.0)
    # An estimate by T alone cannot know what no step has seen: with a gap it is now and then far too low.
    assert ratio.min() > (0.02 if values is SPECTRA["with a gap"] else 0.15)
    # The first steps gain a digit at once, and the estimate looks back by one.
    assert ratio[:2].max() < 15
    assert ratio[2:].max() < 7
    assert 0.5 < ratio.median() < 2.5


def test_the_error_estimate_is_exact_where_a_covariance_is_its_own_mirror_image() -> None:
    # Half of its steps find a tridiagonal C that is the same from both ends, and the estimate goes on as C does.
    diagonal, coupling = torch.tensor([2.0, 3.0, 2.5, 2.0]).double(), torch.tensor([0.9, 0.5, 0.7, 0.4]).double()
    errors = []
    for steps in (3, 4):  # the estimate is the larger of this step's and the last one's
        off = torch.cat([coupling[:steps], coupling[: steps - 1].flip(0)])
        along = torch.cat([diagonal[:steps], diagonal[:steps].flip(0)])
        matrices = (torch.diag(along) + torch.diag(off, 1) + torch.diag(off, -1))[None]
        z = 2 * torch.eye(2 * steps, dtype=torch.float64)[:1]
        root, info = operator(matrices, steps).root_with_info(z)
        errors.append(relative(root, lifted(matrices).root(z)))
    torch.testing.assert_close(info["krylov_error"], torch.stack(errors).amax(0), rtol=1e-6, atol=0)


def test_roots_converge_as_fast_as_polynomials_can() -> None:
    """The square root is analytic but for x <= 0, so that Chebyshev series on [a, b] converge like R^-n.

    R = (sqrt(b) + sqrt(a)) / (sqrt(b) - sqrt(a)), and |sqrt| <= sqrt(a + b) on the ellipse through 0: an error of
    2 sqrt(a + b) R^-n / (R - 1) at degree n (Trefethen, 2013, theorem 8.2), and Lanczos within twice the best.
    """
    a, b = 0.01, 1.0
    matrices = rotated(torch.linspace(a, b, 200, dtype=torch.float64))[None]
    z = random(1, 200, seed=1)
    r = (math.sqrt(b) + math.sqrt(a)) / (math.sqrt(b) - math.sqrt(a))
    for steps in (1, 5, 10, 20, 40):
        error = (operator(matrices, steps).root(z) - lifted(matrices).root(z)).norm()
        assert error <= 4 * math.sqrt(a + b) * r ** (1 - steps) / (r - 1) * z.norm()


@spectra
def test_mahalanobis_grows_to_its_value_from_below(values: Tensor) -> None:
    # Gauss quadrature of 1 / x, all of whose even derivatives are positive; without repair, which has a kink.
    matrices = rotated(values.clamp(min=1e-3))[None]
    r = random(1, 200, seed=1)
    expected = lifted(matrices).mahalanobis(r)
    found = torch.stack([operator(matrices, steps).mahalanobis(r) for steps in (1, 2, 5, 10, 20, 40, 80, 199)])
    assert (found[1:] >= found[:-1] * (1 - 1e-10)).all()
    assert (found <= expected * (1 + 1e-10)).all()
    torch.testing.assert_close(found[-1], expected, rtol=1e-8, atol=0)


def test_a_distance_follows_a_vector_that_was_changed_in_place() -> None:
    cov = operator(rotated(torch.linspace(0.1, 1, 200, dtype=torch.float64))[None], 10)
    r = random(1, 200, seed=1)
    before = cov.mahalanobis(r).clone()
    torch.testing.assert_close(cov.mahalanobis(r.mul_(2)), 4 * before)


def test_draws_have_the_covariance() -> None:
    # 8 steps of 12 leave a relative error of 1e-4, far below the statistical error of 5,000 draws.
    target, level = image_mixture(), SCALED
    x_t = points(target, IMAGE, level, rows=1).expand(5_000, *IMAGE)
    exact = target.posterior(x_t[:1], level)
    q = mmdgs.KrylovMoments(target.denoiser(), steps=8)(x_t, level)
    draws, info = q.sample_with_info(generator=torch.Generator().manual_seed(0))
    assert info["krylov_error"].max() < 1e-3
    assert_moments(draws.flatten(1), exact.mean.flatten(), exact.covariance[0])


def test_the_probes_of_log_det_are_unbiased_and_say_their_error() -> None:
    """A sign vector s has E s'As = tr A and a variance of 2 sum_(i != j) A_ij^2; here A = log C."""
    d, probes = 8, 2000
    denoiser, x_t = mixture(d).denoiser(), random(2, d, seed=4)
    cov = mmdgs.FullMoments(denoiser)(x_t, PLAIN).cov
    log = (cov.vectors * cov.values.log()[:, None, :]) @ cov.vectors.mT
    off = log.square().sum((1, 2)) - log.diagonal(dim1=1, dim2=2).square().sum(1)
    error = (2 * off / probes).sqrt()
    q = mmdgs.KrylovMoments(denoiser, steps=d - 1, probes=probes)(x_t, PLAIN, generator=mmdgs.Streams(0, 2))
    found, said = q.cov.logdet_with_error()
    assert ((found - cov.logdet()).abs() < 5 * error).all()
    # The relative error of a standard deviation over n draws is about 1 / sqrt(2 n) = 0.016, a sixth of this.
    torch.testing.assert_close(said, error, rtol=0.1, atol=0)
    torch.testing.assert_close(q.cov.logdet(), found, rtol=0, atol=0)
    expected = -0.5 * (cov.mahalanobis(x_t - q.mean) + found + d * math.log(2 * math.pi))
    torch.testing.assert_close(q.log_prob(x_t), expected, **EXACT)


def test_the_probes_of_the_diagonal_are_unbiased() -> None:
    d, probes = 16, 4000
    denoiser, x_t = mixture(d).denoiser(), random(2, d, seed=4)
    cov = mmdgs.FullMoments(denoiser)(x_t, PLAIN).cov.affine(0.5, 0.1)
    error = ((cov.dense().square().sum(1) - cov.diagonal().square()) / probes).sqrt()
    q = mmdgs.KrylovMoments(denoiser, steps=3, probes=probes)(x_t, PLAIN, generator=mmdgs.Streams(0, 2))
    assert ((q.cov.affine(0.5, 0.1).diagonal() - cov.diagonal()).abs() < 5 * error).all()
    torch.testing.assert_close(q.cov.affine(0.5, 0.1).dense(), cov.dense(), **EXACT)


@pytest.mark.parametrize("floor", [None, 0.1], ids=["the rule", "0.1"])
def test_the_diagonal_is_that_of_the_repaired_matrix(floor: float | None) -> None:
    """Of images: the trace of what was lifted is in it, and no pixel lies at the floor where none of the matrix's does.

    A smooth covariance and a network's error: nearly half of its eigenvalues are negative.
    """
    place = torch.cartesian_prod(torch.arange(12.0), torch.arange(12.0)).double()
    smooth = torch.exp(-torch.cdist(place, place).square() / 8)
    matrix = 0.5 * (1 + 0.5 * torch.sin(place[:, 0])).sqrt().outer((1 + 0.5 * torch.sin(place[:, 0])).sqrt()) * smooth
    error = 0.05 * random(144, 144) / math.sqrt(2)
    denoiser, x_t = linear_denoiser(matrix + error + error.mT), random(2, 1, 12, 12)
    q = mmdgs.KrylovMoments(denoiser, steps=40, floor=floor, probes=20)(x_t, PLAIN, generator=mmdgs.Streams(0, 2))
    found, dense = q.cov.diagonal(), q.cov.as_dense().diagonal()
    plain = mmdgs.FullMoments(denoiser, floor=1e-6)(x_t, PLAIN).cov.diagonal()
    assert (dense.sum() / plain.sum()).item() > 1.05, "much was lifted"
    # The floor by the rule is that of two probes: some percent off.
    rtol = 0.06 if floor is None else 0.03
    torch.testing.assert_close(found.flatten(1).sum(1), dense.flatten(1).sum(1), rtol=rtol, atol=0)
    least = mmdgs.FullMoments(denoiser, floor)(x_t, PLAIN).cov.values.min()
    assert found.min() >= 0.9 * least
    assert ((found < 1.2 * least).double().mean() - (dense < 1.2 * least).double().mean()).abs() < 0.05, "no speckle"


def test_variance_along_directions_takes_one_product() -> None:
    matrices = random_covariances(2, 20, seed=0)
    calls: list[int] = []
    cov = operator(matrices, steps=3, calls=calls).affine(0.5, 0.1)
    u = random(4, 2, 20)
    expected = lifted(matrices).affine(0.5, 0.1).variance_along(u)
    torch.testing.assert_close(cov.variance_along(u), expected, **EXACT)
    assert calls == [4]
    # What cannot be a variance is lifted to the floor.
    negative = operator(-matrices, steps=3, floor=0.25).variance_along(u)
    torch.testing.assert_close(negative, 0.25 * u.square().sum(-1), **EXACT)


def test_directions_of_any_leading_shape() -> None:
    q = mmdgs.KrylovMoments(mixture(6).denoiser(), steps=3)(random(2, 6), PLAIN)
    full = mmdgs.FullMoments(mixture(6).denoiser())(random(2, 6), PLAIN)
    u = random(5, 3, 2, 6, seed=1)
    torch.testing.assert_close(q.variance_along(u), full.variance_along(u), **EXACT)
    torch.testing.assert_close(q.variance_along(u[1, 2]), full.variance_along(u)[1, 2], **EXACT)
    with pytest.raises(ValueError, match=r"end in the posterior's shape \(2, 6\), got \(6,\)"):
        q.variance_along(u[0, 0, 0])


# --- invariant spaces and repair ----------------------------------------------------------------------------------


def test_an_isotropic_covariance_takes_one_step() -> None:
    matrices = 0.7 * torch.eye(50, dtype=torch.float64).expand(3, 50, 50)
    calls: list[int] = []
    z = random(3, 50)
    root, info = operator(matrices, steps=10, calls=calls).root_with_info(z)
    torch.testing.assert_close(root, math.sqrt(0.7) * z, **EXACT)
    assert info["krylov_error"].tolist() == [0.0] * 3
    assert len(calls) == 1


def test_low_rank_and_identity_take_a_few_steps() -> None:
    factor = random(50, 3)
    matrices = (0.2 * torch.eye(50, dtype=torch.float64) + factor @ factor.mT).expand(2, 50, 50)
    calls: list[int] = []
    z = random(2, 50, seed=1)
    root, info = operator(matrices, steps=30, calls=calls).root_with_info(z)
    torch.testing.assert_close(root, lifted(matrices).root(z), **EXACT)
    assert info["krylov_error"].tolist() == [0.0] * 2
    assert len(calls) <= 5, "four eigenvalues, and one step for rounding"


def test_rows_that_end_early_do_not_disturb_the_others() -> None:
    some, eye = random_covariances(2, 12, seed=0), torch.eye(12, dtype=torch.float64)
    matrices = torch.stack([eye, some[0], 0 * eye, some[1]])
    z = random(4, 12)
    z[3] = 0
    cov = operator(matrices, steps=7)
    root, info = cov.root_with_info(z)
    alone = operator(matrices[1:2], steps=7).root_with_info(z[1:2])
    torch.testing.assert_close(root[1:2], alone[0], **EXACT)
    torch.testing.assert_close(info["krylov_error"][1:2], alone[1]["krylov_error"], **EXACT)
    assert alone[1]["krylov_error"] > 0
    torch.testing.assert_close(root[0], z[0], **EXACT)
    torch.testing.assert_close(root[2], 1e-3 * z[2], **EXACT)  # the floor's root
    assert torch.equal(root[3], z[3])
    assert info["repaired"].tolist() == [0.0, 0.0, 1.0, 0.0]
    torch.testing.assert_close(cov.mahalanobis(z)[[0, 3]], torch.stack([z[0] @ z[0], z[0] @ z[3]]), **EXACT)


@pytest.mark.parametrize("floor", [1e-6, 0.5])
@pytest.mark.parametrize(
    ("values", "fraction"),
    [
        ([-0.3, 1.0, 2.0], 1 / 3),
        ([-0.3, -0.2, 2.0], 2 / 3),
        ([-0.3, -0.29, 2.0], 2 / 3),  # rounding grows as values come close
        ([-0.3, -0.2, -0.1], 1.0),
        ([0.6, 1.0, 2.0], 0.0),
    ],
)
def test_ritz_values_below_the_floor_are_lifted_and_counted(values: list[float], fraction: float, floor: float) -> None:
    # Three eigenvalues, so three Ritz values, though ten steps were offered.
    matrices = rotated(torch.tensor(values, dtype=torch.float64).repeat_interleave(5))[None]
    z = random(1, 15, seed=1)
    root, info = operator(matrices, 10, floor).root_with_info(z)
    torch.testing.assert_close(root, lifted(matrices, floor).root(z), **EXACT)
    assert info["repaired"].item() == pytest.approx(fraction)
    torch.testing.assert_close(
        operator(matrices, 10, floor).mahalanobis(z), lifted(matrices, floor).mahalanobis(z), **EXACT
    )


def test_a_covariance_that_is_not_finite_is_never_repaired() -> None:
    slope = torch.tensor([[1.0], [math.nan], [0.5]], dtype=torch.float64)
    q = mmdgs.KrylovMoments(mmdgs.clean_denoiser(lambda x: Bent.apply(x, slope)))(random(3, 20), PLAIN)
    with pytest.raises(mmdgs.NonFiniteError, match="denoising covariance is not finite at chain 1;"):
        q.sample(generator=torch.Generator().manual_seed(0))


class Bent(torch.autograd.Function):
    """The identity, with a derivative that is said to be `slope`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, slope: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


# --- products ---------------------------------------------------------------------------------------------------


class Once(torch.autograd.Function):
    """x -> A x, whose backward pass cannot be differentiated; its forward mode can be."""

    @staticmethod
    def forward(x: Tensor, matrix: Tensor) -> Tensor:
        return x @ matrix.mT

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0], None

    @staticmethod
    def jvp(ctx, tangent, _):
        return tangent @ ctx.saved_tensors[0].mT


@pytest.mark.parametrize("beside", [0.0, 4.0], ids=["all of it", "a part of it"])
def test_forward_mode_where_a_network_cannot_be_differentiated_twice(beside: float, caplog) -> None:
    matrix, x_t = random(6, 6) + 4 * torch.eye(6, dtype=torch.float64), random(2, 6, seed=1)
    denoiser = mmdgs.clean_denoiser(lambda x: Once.apply(x, matrix) + beside * x)
    expected = 0.25 * (0.5 * (matrix + matrix.mT) + beside * torch.eye(6, dtype=torch.float64))
    with caplog.at_level(logging.INFO, logger="mmdgs"):
        q = mmdgs.KrylovMoments(denoiser, steps=6)(x_t, PLAIN)
        torch.testing.assert_close(q.cov.dense(), expected.expand(2, 6, 6), **EXACT)
    assert caplog.text.count("cannot be differentiated twice") == 1


def test_fused_attention_is_explained() -> None:
    def fused(x: Tensor) -> Tensor:
        heads = x.reshape(len(x), 1, 4, 8)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape)

    x_t = random(2, 32).float()
    z = random(2, 32, seed=1).float()
    q = mmdgs.KrylovMoments(mmdgs.clean_denoiser(fused), steps=3)(x_t, PLAIN)
    with pytest.raises(mmdgs.UsageError, match=r"fused|Fused") as caught:
        q.cov.root(z)
    for part in ("sdpa_kernel(SDPBackend.MATH)", "symmetric=True", "DiagonalMoments(denoiser, probes=10)"):
        assert part in str(caught.value)
    # And the advice works.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        q = mmdgs.KrylovMoments(mmdgs.clean_denoiser(fused), steps=32)(x_t, PLAIN)
        expected = mmdgs.FullMoments(mmdgs.clean_denoiser(fused))(x_t, PLAIN).cov.root(z)
    torch.testing.assert_close(q.cov.root(z), expected, rtol=1e-3, atol=1e-4)


class Counted:
    """A denoiser that counts its forward passes."""

    def __init__(self, denoiser: mmdgs.Denoiser) -> None:
        self.denoiser, self.calls = denoiser, 0

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        self.calls += 1
        return self.denoiser(x_t, level)


@pytest.mark.parametrize("budget", [1, 70, 1 << 22], ids=["one by one", "in chunks", "at once"])
def test_one_forward_pass_and_the_same_numbers_however_products_are_grouped(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_t = random(3, 6)
    full = mmdgs.FullMoments(network(6))(x_t, PLAIN)
    monkeypatch.setattr(mmdgs.jacobians, "CPU_NUMBERS", budget)
    counted = Counted(network(6))
    q = mmdgs.KrylovMoments(counted, steps=6)(x_t, PLAIN)
    torch.testing.assert_close(q.cov.dense(), full.cov.dense(), **EXACT)
    torch.testing.assert_close(q.cov.root(x_t), full.cov.root(x_t), **EXACT)
    assert counted.calls == 1


def test_energies_and_mixtures_say_that_their_jacobian_is_symmetric(monkeypatch: pytest.MonkeyPatch) -> None:
    target = mixture(4)
    energy = mmdgs.energy_denoiser(lambda x, level: -target.noised(level).log_prob(x))
    x_t, z = random(2, 4), random(2, 4, seed=1)
    twice = mmdgs.KrylovMoments(energy, steps=3, symmetric=False)(x_t, PLAIN).cov.root(z)

    def never(*_: object) -> None:
        raise AssertionError("J v is not needed where J is symmetric")

    monkeypatch.setattr(mmdgs.jacobians, "_pushforward", never)
    for denoiser in (energy, target.denoiser()):
        torch.testing.assert_close(mmdgs.KrylovMoments(denoiser, steps=3)(x_t, PLAIN).cov.root(z), twice, **EXACT)
    with pytest.raises(AssertionError, match="not needed"):
        mmdgs.KrylovMoments(network(4), steps=3)(x_t, PLAIN)


# --- the estimator ------------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_batch() -> None:
    denoiser, x_t = network(30), random(5, 30, seed=4)
    post = mmdgs.KrylovMoments(denoiser, steps=6)

    def numbers(rows: slice, first: int, count: int) -> list[Tensor]:
        streams = mmdgs.Streams(1, count, first_row=first)
        q = post(x_t[rows], PLAIN, generator=streams)
        x, info = q.sample_with_info(generator=streams)
        return [x, *info.values(), q.log_prob(x_t[rows] + 1), q.cov.diagonal()]

    together, again, alone = numbers(slice(0, 5), 0, 5), numbers(slice(0, 5), 0, 5), numbers(slice(3, 4), 3, 1)
    assert not torch.equal(together[0][2], together[0][3])
    for one, same, single in zip(together, again, alone, strict=True):
        assert torch.equal(one, same)
        torch.testing.assert_close(single, one[3:4], **EXACT)


def test_a_chain_is_that_of_the_full_covariance(skewed: GaussianMixture) -> None:
    x0 = torch.zeros(50, 3, dtype=torch.float64)
    path = [(SCALED, NoiseLevel(sigma=0.3)), (NoiseLevel(sigma=0.3), CLEAN)] * 15
    full, ours, rough = (
        mmdgs.run(Plan.along(mmdgs.Gibbs(post), path), x0, seed=3, keep=range(1, 31), progress=None)
        for post in (
            mmdgs.FullMoments(skewed.denoiser()),
            mmdgs.KrylovMoments(skewed.denoiser(), steps=3),
            mmdgs.KrylovMoments(skewed.denoiser(), steps=1),
        )
    )
    torch.testing.assert_close(ours.samples, full.samples, rtol=1e-6, atol=1e-6)
    assert ours.info.keys() == {"repaired", "krylov_error"}
    assert ours.info["krylov_error"].max() == 0
    assert rough.info["krylov_error"].min() > 0.01
    assert ours.repaired == 0


def test_the_repaired_fraction_of_a_chain_is_reported(caplog) -> None:
    matrix = rotated(torch.tensor([-0.5, 0.5], dtype=torch.float64))
    post = mmdgs.KrylovMoments(linear_denoiser(matrix), steps=2)
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        mmdgs.gibbs_chain(post, random(4, 2), PLAIN, steps=3, progress=None)
    assert "50% of the variances" in caplog.text
    assert post(random(4, 2), PLAIN).repaired is None, "it is known of a draw, not before"


def test_single_precision_is_double_up_to_rounding() -> None:
    target = mixture(40)
    x_t, z = random(3, 40), random(3, 40, seed=1)
    double = mmdgs.KrylovMoments(target.denoiser(), steps=8)(x_t, PLAIN).cov
    single = mmdgs.KrylovMoments(target.to(dtype=torch.float32).denoiser(), steps=8)(x_t.float(), PLAIN).cov
    root, info = single.root_with_info(z.float())
    assert {root.dtype, *(value.dtype for value in info.values()), single.mahalanobis(z.float()).dtype} == {
        torch.float32
    }
    torch.testing.assert_close(root.double(), double.root(z), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(single.mahalanobis(z.float()).double(), double.mahalanobis(z), rtol=1e-4, atol=0)
    half = mmdgs.KrylovMoments(mmdgs.score_denoiser(lambda x: -x / 2), steps=4)(x_t.bfloat16(), PLAIN)
    draw = half.sample(generator=torch.Generator().manual_seed(0))
    assert draw.dtype == torch.bfloat16
    torch.testing.assert_close(half.cov.root(z.bfloat16()).double(), math.sqrt(0.25 * 0.875) * z, rtol=2e-2, atol=2e-2)


class Watched:
    """A denoiser that remembers, weakly, the input its graph begins at."""

    def __init__(self, network: Callable[[Tensor], Tensor]) -> None:
        self.network = network
        self.inputs: list[weakref.ref] = []

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        self.inputs.append(weakref.ref(x_t))
        return self.network(x_t)

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.inputs)


@pytest.mark.parametrize("twice", [True, False], ids=["differentiated twice", "forward mode"])
def test_the_graph_goes_with_the_posterior(twice: bool) -> None:
    matrix = 0.1 * random(8, 8)
    watched = Watched((lambda x: 0.5 * x + torch.sin(x @ matrix)) if twice else (lambda x: Once.apply(x, matrix)))
    gc.disable()  # reference counts alone must free it: a chain would wait long for the collector
    try:
        q = mmdgs.KrylovMoments(watched, steps=2)(random(2, 8), PLAIN)
        x = q.sample(generator=torch.Generator().manual_seed(0))
        assert watched.alive == 1
        assert not x.requires_grad
        del q
        assert watched.alive == 0
        counts: list[int] = []
        mmdgs.gibbs_chain(
            mmdgs.KrylovMoments(watched, steps=2),
            random(2, 8),
            PLAIN,
            steps=4,
            callback=lambda *_: counts.append(watched.alive),
            progress=None,
        )
        assert counts == [0] * 4
    finally:
        gc.enable()


def test_densities_need_a_generator_where_they_draw() -> None:
    q = mmdgs.KrylovMoments(network(6), steps=3)(random(2, 6), PLAIN)
    for draw in (q.cov.diagonal, q.cov.logdet, lambda: q.log_prob(random(2, 6))):
        with pytest.raises(TypeError, match=r"need the generator=.*steps >= 6"):
            draw()


@pytest.mark.parametrize("name", ["steps", "probes"])
@pytest.mark.parametrize("value", [0, -1, 2.5, None, True])
def test_steps_and_probes_must_be_whole(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive whole number, got {value!r}"):
        mmdgs.KrylovMoments(network(2), **{name: value})


def test_a_basis_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # 8 x 400 x 3072 float32 numbers are 39 MB, twice that with what a step works on.
    monkeypatch.setattr(operators, "available_memory", lambda device: 5 * 10**7)
    q = mmdgs.KrylovMoments(mmdgs.clean_denoiser(lambda x: 0.5 * x), steps=400)(torch.zeros(8, 3, 32, 32), PLAIN)
    with pytest.raises(mmdgs.CovarianceTooLargeError, match=r"8 x 400 x 3072 numbers need about 0.1 GB.*fewer steps"):
        q.cov.root(q.mean)


def test_probes_go_through_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    post = mmdgs.KrylovMoments(network(6), steps=3, probes=7)
    x_t = random(2, 6)
    at_once = post(x_t, PLAIN, generator=mmdgs.Streams(0, 2)).cov
    monkeypatch.setattr(mmdgs.linalg.krylov, "BASIS_NUMBERS", 80)  # two probes of 36 numbers
    chunked = post(x_t, PLAIN, generator=mmdgs.Streams(0, 2)).cov
    torch.testing.assert_close(chunked.logdet(), at_once.logdet(), **EXACT)
    torch.testing.assert_close(chunked.diagonal(), at_once.diagonal(), **EXACT)
    torch.testing.assert_close(chunked.dense(), at_once.dense(), **EXACT)
