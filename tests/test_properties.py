"""Properties of operators and estimators over shapes, dtypes and noise levels from 1e-4 to 1e4.

`make test` tries a few examples, the same each time; `make test-all` hundreds (the profile "more",
conftest.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from oracles import numbers, random_covariances, root_matrix
from torch import Tensor
from torch.distributions import MultivariateNormal

import mmdgs
from mmdgs.linalg import Covariance
from mmdgs.moments import (
    ExactMoments,
    FullMoments,
    IsotropicMoments,
    KrylovMoments,
    Moments,
    SpectralMoments,
)
from mmdgs.moments.contract import FLOOR
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
    linear,
)
from mmdgs.randomness import seeded
from mmdgs.targets import GaussianMixture

hypothesis = pytest.importorskip("hypothesis")
st, given = hypothesis.strategies, hypothesis.given

DTYPES = {torch.float32: 2e-5, torch.float64: 1e-12}
"""Each with the relative error that some hundred operations may have."""
seeds = st.integers(0, 2**31)
sides = st.sampled_from([1, 2, 3, 4, 5, 6])
images = st.tuples(st.integers(1, 3), sides, sides)
decades = st.floats(-4, 4)


def assert_near(estimate: Tensor, expected: Tensor, error: float) -> None:
    """The same but for an error relative to the largest number."""
    assert estimate.shape == expected.shape
    size = max(estimate.abs().max().item(), expected.abs().max().item())
    assert (estimate - expected).abs().max().item() <= error * size, f"{estimate} is not {expected}"


@st.composite
def operators(draw: Callable, shape: tuple[int, int, int]) -> list[Operator]:
    """One of each kind."""
    channels, height, width = shape
    random = seeded(draw(seeds))
    factors = [factor for factor in range(1, 7) if height % factor == 0 and width % factor == 0]
    keep = torch.rand(height, width, generator=random) < draw(st.floats(0.3, 1))
    keep[0, 0] = True  # something is measured
    kinds: list[Operator] = [
        Mask.random(shape, draw(st.floats(0, 0.99)), generator=random),
        Crop(shape, (draw(st.integers(1, height)), draw(st.integers(1, width)))),
        Downsample(shape, factors[-1]),
        Grayscale(shape, draw(st.lists(st.floats(0.1, 10), min_size=channels, max_size=channels))),
        Blur.gaussian(shape, draw(st.floats(0.01, max(height, width) / 2))),
        Blur.motion(shape, draw(st.integers(1, max(height, width))), draw(st.floats(-360, 360))),
        Blur(
            shape, torch.randn(draw(st.integers(1, 9)), draw(st.integers(1, 9)), generator=random)
        ),
        Fourier(shape, keep),
        Matrix(torch.randn(draw(st.integers(1, 9)), math.prod(shape), generator=random), shape),
        linear(lambda x: 3 * x.flip(-1).cumsum(-2), shape),
    ]
    if width > 1:
        kinds.append(Box(shape, (height, width - 1)))
    return kinds


@st.composite
def composed(draw: Callable, first: Operator) -> list[Operator]:
    """Up to three operators, one after another."""
    parts = [first]
    while len(parts) < 3 and len(parts[-1].out_shape) == 3 and draw(st.booleans()):
        parts.append(draw(st.sampled_from(draw(operators(tuple(parts[-1].out_shape))))))
    return parts


@given(images, st.data(), st.sampled_from(list(DTYPES)), seeds, decades, st.integers(1, 3))
def test_operators_are_linear_row_by_row_and_have_their_adjoint(
    shape: tuple[int, int, int],
    data: st.DataObject,
    dtype: torch.dtype,
    seed: int,
    decade: float,
    rows: int,
) -> None:
    kinds = data.draw(operators(shape))
    parts = data.draw(composed(data.draw(st.sampled_from(kinds))))
    whole = compose(*parts)
    u, v = 10**decade * numbers(2, rows, *shape, seed=seed).to(dtype)
    step = u
    for part in parts:
        step = part(step)
    assert torch.equal(step, whole(u))
    for operator in (*kinds, whole):
        y = numbers(rows, *operator.out_shape, seed=seed + 1).to(dtype)
        assert_linear(operator, u, v, y, DTYPES[dtype])


def assert_linear(operator: Operator, u: Tensor, v: Tensor, y: Tensor, error: float) -> None:
    """Linear, row by row, <A u, y> = <u, A' y>, and `squares` is what it says."""
    measured, other, back = operator(u), operator(v), operator.adjoint(y)
    assert measured.dtype == back.dtype == u.dtype
    size = measured.norm() * y.norm() + u.norm() * back.norm()
    assert ((measured * y).sum() - (u * back).sum()).abs() <= error * size, operator
    largest = measured.abs().max() + other.abs().max()
    off = operator(2 * u - 3 * v) - (2 * measured - 3 * other)
    assert off.abs().max() <= 5 * error * largest, operator
    assert_near(torch.cat([operator(row[None]) for row in u]), measured, error)
    squares = operator.squares(u.square())
    if squares is not None:
        eye = torch.eye(u[0].numel(), dtype=u.dtype).reshape(-1, *operator.shape)
        dense = operator(eye).flatten(1).mT
        whole = torch.einsum("id,bd,jd->bij", dense, u.square().flatten(1), dense)
        assert_near(torch.diag_embed(squares.flatten(1)), whole, error)


@st.composite
def targets(draw: Callable) -> tuple[GaussianMixture, tuple[int, ...]]:
    event = draw(st.sampled_from([(1,), (2,), (5,), (1, 2, 3), (2, 3, 1)]))
    d, components, seed = math.prod(event), draw(st.integers(1, 3)), draw(seeds)
    means = numbers(components, d, seed=seed)
    covariances = random_covariances(components, d, seed)
    return GaussianMixture([1 / components] * components, means, covariances), event


@st.composite
def levels(draw: Callable) -> mmdgs.NoiseLevel:
    return mmdgs.NoiseLevel(alpha=draw(st.floats(0.05, 1)), sigma=10 ** draw(decades))


def estimators(
    mixture: GaussianMixture, x: Tensor, level: mmdgs.NoiseLevel, seed: int
) -> dict[str, Moments]:
    denoiser, random = mixture.denoiser(), seeded(seed)
    return {
        "full": FullMoments(denoiser),
        "diagonal": mmdgs.DiagonalMoments(denoiser, probes=None),
        "probes": mmdgs.DiagonalMoments(denoiser, probes=2),
        "krylov": KrylovMoments(denoiser, steps=x[0].numel()),
        "isotropic": IsotropicMoments.fit(denoiser, x, level, generator=random),
        "spectral": SpectralMoments.fit(denoiser, x, [level], generator=random),
        "exact": ExactMoments(mixture),
    }


def assert_a_covariance(cov: Covariance, like: Tensor, error: float) -> Tensor:
    """Symmetric, positive, and the same through all of its actions on vectors like (B, ...);
    returns it (B, d, d).
    """
    dense, size = cov.dense(), cov.dense().abs().amax((1, 2))
    assert_near(dense, dense.mT, error)
    assert (torch.linalg.eigvalsh(dense / size[:, None, None]) > -error).all()
    assert (cov.diagonal() > 0).all()
    assert_near(cov.diagonal().flatten(1), dense.diagonal(dim1=1, dim2=2), error)
    root = root_matrix(cov, like)
    assert_near(root @ root.mT, dense, error)
    product = torch.einsum("bij,bj->bi", dense, like.flatten(1))
    assert_near(cov.apply(like).flatten(1), product, error)
    assert_near(cov.variance_along(like[None])[0], (like.flatten(1) * product).sum(1), error)
    return dense


@given(targets(), levels(), seeds)
def test_every_estimator_gives_a_covariance_and_its_density(
    target: tuple[GaussianMixture, tuple[int, ...]], level: mmdgs.NoiseLevel, seed: int
) -> None:
    mixture, event = target
    x = mixture.sample((4,), generator=seeded(seed)).reshape(4, *event)
    x_t = mmdgs.add_noise(x, level, generator=seeded(seed + 1))
    truth = mixture.posterior(x_t, level).covariance
    # Variances below a millionth of the noise's are lifted to it: at 1,000 times the data's spread
    # that is all of them.
    values, vectors = torch.linalg.eigh(truth)
    lifted = (vectors * values.clamp(min=FLOOR * level.variance)[:, None, :]) @ vectors.mT
    for name, post in estimators(mixture, x, level, seed).items():
        q = post(x_t, level, generator=seeded(seed + 2))
        dense = assert_a_covariance(q.cov, x_t, 1e-9)
        if name in ("full", "krylov", "exact"):
            assert_near(dense, lifted, 1e-6)
        elif name == "diagonal":
            expected = truth.diagonal(dim1=1, dim2=2).clamp(min=FLOOR * level.variance)
            assert_near(q.cov.diagonal().flatten(1), expected, 1e-6)
        values = torch.linalg.eigvalsh(dense)
        condition = (values[:, -1] / values[:, 0]).max().item()
        if not 0 < condition < 1e8:  # a dense density has no digits left
            continue
        whole = MultivariateNormal(q.mean.flatten(1), dense)
        draw = q.sample(generator=seeded(seed + 3))
        assert_near(q.log_prob(draw), whole.log_prob(draw.flatten(1)), 1e-14 * condition + 1e-9)
