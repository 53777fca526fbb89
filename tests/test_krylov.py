"""Krylov covariances against dense ones, in float64, and what the estimator promises."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from oracles import PLAIN, SCALED, assert_acts_as, linear_denoiser, numbers, random_covariances
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import mmdgs
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.operators import Dense
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.samplers import Plan
from mmdgs.targets import GaussianMixture

EXACT = {"rtol": 1e-8, "atol": 1e-8}


def mixture(d: int) -> GaussianMixture:
    return GaussianMixture([0.6, 0.4], 0.5 * numbers(2, d), random_covariances(2, d, seed=1))


def network(d: int) -> mmdgs.Denoiser:
    """A smooth random function, with a Jacobian neither symmetric nor positive."""
    linear, inner, outer = (numbers(d, d, seed=seed) / math.sqrt(d) for seed in (1, 2, 3))
    return mmdgs.clean_denoiser(
        lambda x: 0.6 * x + 0.3 * x @ linear.mT + torch.tanh(x @ inner.mT) @ outer.mT
    )


def rotated(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues, (d, d)."""
    vectors, _ = torch.linalg.qr(numbers(len(values), len(values), seed=seed))
    return (vectors * values) @ vectors.mT


def operator(
    matrices: Tensor, steps: int, floor: float = 1e-6, calls: list[int] | None = None
) -> Krylov:
    """The Krylov operator of matrices (B, d, d), and how many vectors each of its products took."""

    def product(v: Tensor) -> Tensor:
        if calls is not None:
            calls.append(len(v))
        return torch.einsum("bij,nbj->nbi", matrices, v)

    return Krylov(product, matrices[..., 0], steps, floor)


def lifted(matrices: Tensor, floor: float = 1e-6) -> Dense:
    dense = Dense.from_matrix(matrices, matrices.shape[2:])
    return Dense(dense.values.clamp(min=floor), dense.vectors, dense.event_shape)


def relative(estimate: Tensor, expected: Tensor) -> Tensor:
    return (estimate - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)


@pytest.mark.parametrize(
    "make", [lambda d: mixture(d).denoiser(), network], ids=["mixture", "network"]
)
@pytest.mark.parametrize(("d", "steps", "floor"), [(2, 7, None), (16, 16, 1e-6)])
def test_with_all_steps_it_is_the_full_covariance(
    make, d: int, steps: int, floor: float | None
) -> None:
    denoiser, x_t, level = make(d), numbers(3, d, seed=4), SCALED
    full = mmdgs.FullMoments(denoiser, floor)(x_t, level)
    q = mmdgs.KrylovMoments(denoiser, steps, floor)(x_t, level)
    z = numbers(3, d, seed=5)
    torch.testing.assert_close(q.mean, full.mean, **EXACT)
    torch.testing.assert_close(q.log_prob(x_t), full.log_prob(x_t), **EXACT)
    assert_acts_as(q.cov, full.cov.dense(), x_t, 1e-8)
    root, info = q.cov.root_with_info(z)
    torch.testing.assert_close(root, full.cov.root(z), **EXACT)
    torch.testing.assert_close(info["repaired"], full.repaired, **EXACT)
    assert info["krylov_error"].tolist() == [0.0] * 3


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
    z = numbers(8, 200, seed=1)
    expected = lifted(matrices).root(z)
    errors, estimates = [], []
    for steps in (1, 2, 5, 10, 20, 40):
        root, info = operator(matrices, steps).root_with_info(z)
        errors.append(relative(root, expected))
        estimates.append(info["krylov_error"])
    error, estimate = torch.stack(errors), torch.stack(estimates)
    assert (error[1:] < 0.95 * error[:-1]).all(), "more steps must bring it closer"
    ratio = torch.where(error > 1e-12, estimate / error, 1.0)
    # An estimate by T alone cannot know what no step has seen: with a gap it is now and then far
    # too low.
    assert ratio.min() > (0.02 if values is SPECTRA["with a gap"] else 0.15)
    # The first steps gain a digit at once, and the estimate looks back by one.
    assert ratio[:2].max() < 15
    assert ratio[2:].max() < 7
    assert 0.5 < ratio.median() < 2.5


def test_the_error_estimate_is_exact_where_a_covariance_is_its_own_mirror_image() -> None:
    # Half of its steps find a tridiagonal C that is the same from both ends, and the estimate goes
    # on as C does.
    diagonal = torch.tensor([2.0, 3.0, 2.5, 2.0]).double()
    coupling = torch.tensor([0.9, 0.5, 0.7, 0.4]).double()
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
    """The square root is analytic but for x <= 0, so that Chebyshev series on [a, b] converge like
    R^-n.

    R = (sqrt(b) + sqrt(a)) / (sqrt(b) - sqrt(a)), and |sqrt| <= sqrt(a + b) on the ellipse through
    0: an error of 2 sqrt(a + b) R^-n / (R - 1) at degree n (Trefethen, 2013, theorem 8.2), and
    Lanczos within twice the best.
    """
    a, b = 0.01, 1.0
    matrices = rotated(torch.linspace(a, b, 200, dtype=torch.float64))[None]
    z = numbers(1, 200, seed=1)
    r = (math.sqrt(b) + math.sqrt(a)) / (math.sqrt(b) - math.sqrt(a))
    for steps in (1, 5, 10, 20, 40):
        error = (operator(matrices, steps).root(z) - lifted(matrices).root(z)).norm()
        assert error <= 4 * math.sqrt(a + b) * r ** (1 - steps) / (r - 1) * z.norm()


@spectra
def test_mahalanobis_grows_to_its_value_from_below(values: Tensor) -> None:
    # Gauss quadrature of 1 / x, all of whose even derivatives are positive; without repair, which
    # has a kink.
    matrices = rotated(values.clamp(min=1e-3))[None]
    r = numbers(1, 200, seed=1)
    expected = lifted(matrices).mahalanobis(r)
    distances = torch.stack([operator(matrices, steps).mahalanobis(r) for steps in (1, 5, 20, 199)])
    assert (distances[1:] >= distances[:-1] * (1 - 1e-10)).all()
    assert (distances <= expected * (1 + 1e-10)).all()
    torch.testing.assert_close(distances[-1], expected, rtol=1e-8, atol=0)


def test_the_probes_of_log_det_are_unbiased() -> None:
    """A sign vector s has E s'As = tr A and a variance of 2 sum_(i != j) A_ij^2; here A = log C."""
    d, probes = 8, 1000
    denoiser, x_t = mixture(d).denoiser(), numbers(2, d, seed=4)
    cov = mmdgs.FullMoments(denoiser)(x_t, PLAIN).cov
    log = (cov.vectors * cov.values.log()[:, None, :]) @ cov.vectors.mT
    off = log.square().sum((1, 2)) - log.diagonal(dim1=1, dim2=2).square().sum(1)
    error = (2 * off / probes).sqrt()
    q = mmdgs.KrylovMoments(denoiser, steps=d - 1, probes=probes)(
        x_t, PLAIN, generator=mmdgs.randomness.Streams(0, 2)
    )
    logdet = q.cov.logdet()
    assert ((logdet - cov.logdet()).abs() < 5 * error).all()
    expected = -0.5 * (cov.mahalanobis(x_t - q.mean) + logdet + d * math.log(2 * math.pi))
    torch.testing.assert_close(q.log_prob(x_t), expected, **EXACT)


def test_the_probes_of_the_diagonal_are_unbiased() -> None:
    d, probes = 16, 4000
    denoiser, x_t = mixture(d).denoiser(), numbers(2, d, seed=4)
    cov = mmdgs.FullMoments(denoiser)(x_t, PLAIN).cov.affine(0.5, 0.1)
    error = ((cov.dense().square().sum(1) - cov.diagonal().square()) / probes).sqrt()
    q = mmdgs.KrylovMoments(denoiser, steps=3, probes=probes)(
        x_t, PLAIN, generator=mmdgs.randomness.Streams(0, 2)
    )
    assert ((q.cov.affine(0.5, 0.1).diagonal() - cov.diagonal()).abs() < 5 * error).all()
    torch.testing.assert_close(q.cov.affine(0.5, 0.1).dense(), cov.dense(), **EXACT)


def test_the_diagonal_is_in_the_units_of_x_at_any_alpha() -> None:
    """Of a diagonal Jacobian signs see the diagonal itself, whatever their number."""
    gains = torch.linspace(0.2, 0.9, 20, dtype=torch.float64)
    denoiser, x_t = mmdgs.clean_denoiser(lambda x: gains * x), numbers(2, 20)
    moments = mmdgs.KrylovMoments(denoiser, steps=3, floor=1e-9, probes=2)
    q = moments(x_t, SCALED, generator=torch.Generator().manual_seed(0))
    expected = (SCALED.tweedie * gains).expand(2, -1)
    torch.testing.assert_close(q.cov.diagonal(), expected, **EXACT)


@pytest.mark.parametrize("floor", [None, 0.1], ids=["the rule", "0.1"])
def test_the_diagonal_is_that_of_the_repaired_matrix(floor: float | None) -> None:
    """Of images: the trace of what was lifted is in it, and no pixel lies at the floor where none
    of the matrix's does.

    A smooth covariance and a network's error: nearly half of its eigenvalues are negative.
    """
    place = torch.cartesian_prod(torch.arange(12.0), torch.arange(12.0)).double()
    smooth = torch.exp(-torch.cdist(place, place).square() / 8)
    scale = (0.5 + 0.25 * torch.sin(place[:, 0])).sqrt()
    matrix = scale.outer(scale) * smooth
    error = 0.05 * numbers(144, 144) / math.sqrt(2)
    denoiser, x_t = linear_denoiser(matrix + error + error.mT), numbers(2, 1, 12, 12)
    q = mmdgs.KrylovMoments(denoiser, steps=40, floor=floor, probes=20)(
        x_t, PLAIN, generator=mmdgs.randomness.Streams(0, 2)
    )
    diagonal, dense = q.cov.diagonal(), q.cov.as_dense().diagonal()
    plain = mmdgs.FullMoments(denoiser, floor=1e-6)(x_t, PLAIN).cov.diagonal()
    assert (dense.sum() / plain.sum()).item() > 1.05, "much was lifted"
    # The floor by the rule is that of two probes: some percent off.
    rtol = 0.06 if floor is None else 0.03
    torch.testing.assert_close(
        diagonal.flatten(1).sum(1), dense.flatten(1).sum(1), rtol=rtol, atol=0
    )
    least = mmdgs.FullMoments(denoiser, floor)(x_t, PLAIN).cov.values.min()
    assert diagonal.min() >= 0.9 * least
    low, expected = ((variances < 1.2 * least).double().mean() for variances in (diagonal, dense))
    assert (low - expected).abs() < 0.05, "no speckle"


def test_variance_along_directions_takes_one_product() -> None:
    matrices = random_covariances(2, 20, seed=0)
    calls: list[int] = []
    cov = operator(matrices, steps=3, calls=calls).affine(0.5, 0.1)
    u = numbers(4, 2, 20)
    expected = lifted(matrices).affine(0.5, 0.1).variance_along(u)
    torch.testing.assert_close(cov.variance_along(u), expected, **EXACT)
    assert calls == [4]
    # What cannot be a variance is lifted to the floor.
    negative = operator(-matrices, steps=3, floor=0.25).variance_along(u)
    torch.testing.assert_close(negative, 0.25 * u.square().sum(-1), **EXACT)


def test_rows_that_end_early_do_not_disturb_the_others() -> None:
    some, eye = random_covariances(2, 12, seed=0), torch.eye(12, dtype=torch.float64)
    matrices = torch.stack([eye, some[0], 0 * eye, some[1]])
    z = numbers(4, 12)
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
    expected = torch.stack([z[0] @ z[0], z[0] @ z[3]])
    torch.testing.assert_close(cov.mahalanobis(z)[[0, 3]], expected, **EXACT)


@pytest.mark.parametrize("floor", [1e-6, 0.5])
@pytest.mark.parametrize(
    ("values", "fraction"), [([-0.3, -0.29, 2.0], 2 / 3), ([0.6, 1.0, 2.0], 0.0)]
)
def test_ritz_values_below_the_floor_are_lifted_and_counted(
    values: list[float], fraction: float, floor: float
) -> None:
    # Three eigenvalues, so three Ritz values, though ten steps were offered.
    matrices = rotated(torch.tensor(values, dtype=torch.float64).repeat_interleave(5))[None]
    z = numbers(1, 15, seed=1)
    root, info = operator(matrices, 10, floor).root_with_info(z)
    torch.testing.assert_close(root, lifted(matrices, floor).root(z), **EXACT)
    assert info["repaired"].item() == pytest.approx(fraction)
    distance = operator(matrices, 10, floor).mahalanobis(z)
    torch.testing.assert_close(distance, lifted(matrices, floor).mahalanobis(z), **EXACT)


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
    matrix, x_t = numbers(6, 6) + 4 * torch.eye(6, dtype=torch.float64), numbers(2, 6, seed=1)
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

    x_t = numbers(2, 32).float()
    z = numbers(2, 32, seed=1).float()
    q = mmdgs.KrylovMoments(mmdgs.clean_denoiser(fused), steps=3)(x_t, PLAIN)
    with pytest.raises(mmdgs.UsageError, match=r"fused|Fused") as caught:
        q.cov.root(z)
    assert "sdpa_kernel(SDPBackend.MATH)" in str(caught.value)
    # And the advice works.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        q = mmdgs.KrylovMoments(mmdgs.clean_denoiser(fused), steps=32)(x_t, PLAIN)
        expected = mmdgs.FullMoments(mmdgs.clean_denoiser(fused))(x_t, PLAIN).cov.root(z)
    torch.testing.assert_close(q.cov.root(z), expected, rtol=1e-3, atol=1e-4)


def test_a_row_does_not_depend_on_its_batch() -> None:
    denoiser, x_t = network(30), numbers(5, 30, seed=4)
    post = mmdgs.KrylovMoments(denoiser, steps=6)

    def of_rows(first: int, count: int) -> list[Tensor]:
        streams, rows = mmdgs.randomness.Streams(1, count, first_row=first), x_t[first:][:count]
        q = post(rows, PLAIN, generator=streams)
        x, info = q.sample_with_info(generator=streams)
        return [x, *info.values(), q.log_prob(rows + 1), q.cov.diagonal()]

    together = of_rows(0, 5)
    assert not torch.equal(together[0][2], together[0][3])
    for whole, again, alone in zip(together, of_rows(0, 5), of_rows(3, 1), strict=True):
        assert torch.equal(whole, again)
        torch.testing.assert_close(alone, whole[3:4], **EXACT)


def test_a_chain_is_that_of_the_full_covariance(skewed: GaussianMixture) -> None:
    x0 = torch.zeros(50, 3, dtype=torch.float64)
    path = [(SCALED, NoiseLevel(sigma=0.3)), (NoiseLevel(sigma=0.3), CLEAN)] * 15

    def chain(post: mmdgs.Moments) -> mmdgs.samplers.Run:
        plan = Plan.along(mmdgs.Gibbs(post), path)
        return mmdgs.samplers.run(plan, x0, seed=3, keep=range(1, 31), progress=None)

    full = chain(mmdgs.FullMoments(skewed.denoiser()))
    ours, rough = (chain(mmdgs.KrylovMoments(skewed.denoiser(), steps=k)) for k in (3, 1))
    torch.testing.assert_close(ours.samples, full.samples, rtol=1e-6, atol=1e-6)
    assert ours.info.keys() == {"repaired", "krylov_error"}
    assert ours.info["krylov_error"].max() == 0
    assert rough.info["krylov_error"].min() > 0.01
    assert ours.repaired == 0


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
    matrix = 0.1 * numbers(8, 8)
    smooth = lambda x: 0.5 * x + torch.sin(x @ matrix)  # noqa: E731
    watched = Watched(smooth if twice else lambda x: Once.apply(x, matrix))
    gc.disable()  # reference counts alone must free it: a chain would wait long for the collector
    try:
        q = mmdgs.KrylovMoments(watched, steps=2)(numbers(2, 8), PLAIN)
        x = q.sample(generator=torch.Generator().manual_seed(0))
        assert watched.alive == 1
        assert not x.requires_grad
        del q
        assert watched.alive == 0
        counts: list[int] = []
        mmdgs.gibbs_chain(
            mmdgs.KrylovMoments(watched, steps=2), numbers(2, 8), PLAIN, steps=4, progress=None,
            callback=lambda *_: counts.append(watched.alive),
        )  # fmt: skip
        assert counts == [0] * 4
    finally:
        gc.enable()
