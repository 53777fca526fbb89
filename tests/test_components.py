"""Principal components of posteriors, against exact mixtures and matrices."""

from __future__ import annotations

import pytest
import torch
from oracles import LEVELS, random_covariances
from torch import Tensor

import mmdgs
from mmdgs.errors import UsageError
from mmdgs.linalg.components import inside, largest_pairs, principal_components
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.operators import Covariance, Dense, Diagonal
from mmdgs.linalg.spectral import Spectral
from mmdgs.operators import Box
from mmdgs.targets import GaussianMixture

SHAPE = (2, 5, 6)
D = 60
REGION = (1, 2, 3, 2)
Region = tuple[int, int, int, int]


def mixture() -> GaussianMixture:
    means = torch.linspace(-1, 1, 2 * D, dtype=torch.float64).reshape(2, D)
    return GaussianMixture([0.6, 0.4], means, random_covariances(2, D, seed=1))


def noisy(level: mmdgs.NoiseLevel, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return mixture().noised(level).sample((rows,), generator=generator).reshape(rows, *SHAPE)


def within(matrix: Tensor, region: Region | None) -> Tensor:
    """The rows and columns of matrices (B, d, d) that belong to a region."""
    places = torch.arange(D).reshape(SHAPE)
    kept = (places if region is None else inside(places, region)).flatten()
    return matrix[:, kept][:, :, kept]


def largest(matrix: Tensor, k: int) -> Tensor:
    """The k largest eigenvalues, by LAPACK."""
    return torch.linalg.eigvalsh(matrix)[..., -k:].flip(-1)


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize("region", [None, REGION], ids=["whole", "region"])
def test_against_the_covariance_of_a_mixture(
    level: mmdgs.NoiseLevel, region: Region | None
) -> None:
    x_t, denoiser = noisy(level), mixture().denoiser()
    expected = largest(within(mixture().posterior(x_t, level).covariance, region), 5)
    estimators = [
        mmdgs.FullMoments(denoiser),
        mmdgs.KrylovMoments(denoiser, steps=4),
        mmdgs.KrylovMoments(denoiser, D),
    ]
    results = [moments(x_t, level).components(5, region, tolerance=1e-7) for moments in estimators]
    results.append(mmdgs.moments.components(denoiser, x_t, level, 5, region, tolerance=1e-7))
    for components in results:
        torch.testing.assert_close(components.variances, expected, rtol=1e-6, atol=0)
        assert components.directions.shape == (3, 5, *SHAPE)
        assert (components.residuals <= 1e-6).all()
        v = components.directions.flatten(2)
        gram = v @ v.mT
        torch.testing.assert_close(gram, torch.eye(5).double().expand_as(gram), rtol=0, atol=1e-9)
    torch.testing.assert_close(results[1].directions, results[0].directions, rtol=0, atol=1e-5)
    if region is not None:
        outside = results[1].directions.clone()
        inside(outside, region).zero_()
        assert outside.abs().max() == 0


def test_a_residual_is_that_of_its_pair() -> None:
    level = LEVELS["alpha=0.7"]
    x_t = noisy(level)
    q = mmdgs.KrylovMoments(mixture().denoiser(), steps=4)(x_t, level)
    few = q.components(4, tolerance=1e-3, most=9)
    matrix = mixture().posterior(x_t, level).covariance
    v = few.directions.flatten(2)
    off = (v @ matrix - few.variances[..., None] * v).norm(dim=2) / few.variances
    torch.testing.assert_close(few.residuals, off, rtol=1e-6, atol=1e-12)
    assert few.products == 9
    assert few.residuals.max() > 1e-3  # nine products are too few, and it says so
    loose, tight = (q.components(4, tolerance=tolerance) for tolerance in (0.1, 1e-6))
    assert loose.products < tight.products <= D
    assert loose.residuals.max() <= 0.1


def eigen_of(values: list[float], d: int = 200) -> Tensor:
    """A symmetric matrix with these eigenvalues, and small ones."""
    rest = torch.linspace(0.05, 0.01, d - len(values), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    return basis * torch.cat([torch.tensor(values, dtype=torch.float64), rest]) @ basis.T


@pytest.mark.parametrize(
    "values",
    [[3.0, 2.0, 2.0, 1.0], [1.0, 1.0, 0.5, 0.4], [2.0, 1.0, 0.0, -4.0], [1.0, 1.0, 1.0, 0.9]],
)
def test_equal_and_negative_eigenvalues(values: list[float]) -> None:
    matrix, like = eigen_of(values), torch.zeros(1, 200, dtype=torch.float64)
    pairs = largest_pairs(lambda v: v @ matrix, like, 3, tolerance=1e-9)
    torch.testing.assert_close(pairs.variances[0], largest(matrix, 3), rtol=1e-9, atol=0)
    assert pairs.products < 120


def test_a_multiple_of_the_identity_and_a_matrix_of_rank_one() -> None:
    like, u = torch.zeros(2, 9, dtype=torch.float64), torch.arange(1.0, 10, dtype=torch.float64)
    flat = largest_pairs(lambda v: 0.3 * v, like, 4, tolerance=1e-9).variances
    torch.testing.assert_close(flat, torch.full_like(flat, 0.3))
    rank_one = largest_pairs(lambda v: (v @ u)[..., None] * u, like, 2, tolerance=1e-9).variances
    torch.testing.assert_close(rank_one[:, 0], u.square().sum().expand(2))
    assert rank_one[:, 1].abs().max() < 1e-9


@pytest.mark.parametrize("region", [None, REGION], ids=["whole", "region"])
@pytest.mark.parametrize("kind", ["diagonal", "spectral", "given", "affine"])
def test_every_kind_of_covariance(kind: str, region: Region | None) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.zeros(2, *SHAPE, dtype=torch.float64)
    variances = torch.rand(2, *SHAPE, generator=generator, dtype=torch.float64) + 0.1
    cov: Covariance = Diagonal(variances) if kind == "diagonal" else Spectral(variances)
    if kind == "given":
        y = torch.zeros(2, *SHAPE, dtype=torch.float64)
        cov = mmdgs.Gaussian(mean, cov).given(y, Box(SHAPE, 3), 0.2).cov
    if kind == "affine":
        matrix = Dense.from_matrix(cov.dense(), mean.shape[1:]).dense()
        cov = Krylov(lambda v: torch.einsum("nbd,bde->nbe", v, matrix), mean, 5, 1e-9).affine(
            2.0, 0.5
        )
    dense = within(cov.dense(), region)
    components = principal_components(cov, mean, 3, region, tolerance=1e-8)
    torch.testing.assert_close(components.variances, largest(dense, 3), rtol=1e-7, atol=0)
    v = components.directions
    v = (v if region is None else inside(v, region)).flatten(2)
    along = torch.einsum("bkd,bde,bke->bk", v, dense, v)
    torch.testing.assert_close(along, components.variances, rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("k", "region", "says"),
    [
        (0, None, "from 1 to 60, got 0"),
        (13, REGION, "from 1 to 12, got 13"),
        (1, (0, 0, 7, 1), "6 wide and 5 high"),
        (1, (0, 0, 2), "four whole numbers"),
    ],
)
def test_what_is_refused(k: int, region: Region | None, says: str) -> None:
    q = mmdgs.Gaussian(torch.zeros(1, *SHAPE), Diagonal(torch.ones(1, *SHAPE)))
    with pytest.raises(UsageError, match=says):
        q.components(k, region)
