"""Principal components of posteriors, against exact mixtures and matrices."""

from __future__ import annotations

import pytest
import torch
from oracles import LEVELS, random_covariances
from torch import Tensor

import mmdgs
from mmdgs.errors import UsageError
from mmdgs.linalg.components import block_lanczos, inside, principal_components
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.operators import Covariance, Dense, Diagonal
from mmdgs.linalg.spectral import Spectral
from mmdgs.operators import Box
from mmdgs.targets import GaussianMixture

SHAPE = (2, 5, 6)
D = 60
REGION = (1, 2, 3, 2)


def mixture() -> GaussianMixture:
    means = torch.linspace(-1, 1, 2 * D, dtype=torch.float64).reshape(2, D)
    return GaussianMixture([0.6, 0.4], means, random_covariances(2, D, seed=1))


def noisy(level: mmdgs.NoiseLevel, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return mixture().noised(level).sample((rows,), generator=generator).reshape(rows, *SHAPE)


def exact(x_t: Tensor, level: mmdgs.NoiseLevel, k: int, region: tuple[int, int, int, int] | None) -> Tensor:
    """The k largest eigenvalues of the mixture's own posterior covariance, by LAPACK."""
    matrix = mixture().posterior(x_t, level).covariance
    places = torch.arange(D).reshape(SHAPE)
    kept = (places if region is None else inside(places, region)).flatten()
    return torch.linalg.eigvalsh(matrix[:, kept][:, :, kept])[:, -k:].flip(1)


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize("region", [None, REGION], ids=["whole", "region"])
def test_against_the_covariance_of_a_mixture(level: mmdgs.NoiseLevel, region: tuple[int, int, int, int] | None) -> None:
    x_t, denoiser = noisy(level), mixture().denoiser()
    expected = exact(x_t, level, 5, region)
    estimators = [mmdgs.FullMoments(denoiser), mmdgs.KrylovMoments(denoiser, steps=4), mmdgs.KrylovMoments(denoiser, D)]
    found = [moments(x_t, level).components(5, region, tolerance=1e-7) for moments in estimators]
    found.append(mmdgs.components(denoiser, x_t, level, 5, region, tolerance=1e-7))
    for one in found:
        torch.testing.assert_close(one.variances, expected, rtol=1e-6, atol=0)
        assert one.directions.shape == (3, 5, *SHAPE)
        assert (one.residuals <= 1e-6).all()
        gram = torch.einsum("bkd,bld->bkl", one.directions.flatten(2), one.directions.flatten(2))
        torch.testing.assert_close(gram, torch.eye(5).double().expand_as(gram), rtol=0, atol=1e-9)
    torch.testing.assert_close(found[1].directions, found[0].directions, rtol=0, atol=1e-5)
    if region is not None:
        outside = found[1].directions.clone()
        inside(outside, region).zero_()
        assert outside.abs().max() == 0


def test_a_residual_is_that_of_its_pair() -> None:
    level = LEVELS["alpha=0.7"]
    x_t = noisy(level)
    q = mmdgs.KrylovMoments(mixture().denoiser(), steps=4)(x_t, level)
    found = q.components(4, tolerance=1e-3, most=9)
    matrix = mixture().posterior(x_t, level).covariance
    v = found.directions.flatten(2)
    off = (v @ matrix - found.variances[..., None] * v).norm(dim=2) / found.variances
    torch.testing.assert_close(found.residuals, off, rtol=1e-6, atol=1e-12)
    assert found.products == 9
    assert found.residuals.max() > 1e-3  # nine products are too few, and it says so
    loose, tight = (q.components(4, tolerance=one) for one in (0.1, 1e-6))
    assert loose.products < tight.products <= D
    assert loose.residuals.max() <= 0.1


def eigen_of(values: list[float], d: int = 200) -> Tensor:
    """A symmetric matrix with these eigenvalues, and small ones."""
    rest = torch.linspace(0.05, 0.01, d - len(values), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    return basis @ torch.diag(torch.cat([torch.tensor(values, dtype=torch.float64), rest])) @ basis.T


@pytest.mark.parametrize(
    "values", [[3.0, 2.0, 2.0, 1.0], [1.0, 1.0, 0.5, 0.4], [2.0, 1.0, 0.0, -4.0], [1.0, 1.0, 1.0, 0.9]]
)
def test_equal_and_negative_eigenvalues(values: list[float]) -> None:
    matrix = eigen_of(values)
    found = block_lanczos(lambda v: v @ matrix, torch.zeros(1, 200, dtype=torch.float64), 3, tolerance=1e-9)
    expected = torch.linalg.eigvalsh(matrix)[-3:].flip(0)
    torch.testing.assert_close(found.variances[0], expected, rtol=1e-9, atol=0)
    assert found.products < 120


def test_a_multiple_of_the_identity_and_a_matrix_of_rank_one() -> None:
    like = torch.zeros(2, 9, dtype=torch.float64)
    flat = block_lanczos(lambda v: 0.3 * v, like, 4, tolerance=1e-9)
    torch.testing.assert_close(flat.variances, torch.full((2, 4), 0.3, dtype=torch.float64))
    u = torch.arange(1.0, 10, dtype=torch.float64)
    one = block_lanczos(lambda v: (v @ u)[..., None] * u, like, 2, tolerance=1e-9)
    torch.testing.assert_close(one.variances[:, 0], torch.full((2,), u.square().sum().item(), dtype=torch.float64))
    assert one.variances[:, 1].abs().max() < 1e-9


def test_float32_reaches_its_precision() -> None:
    matrix = eigen_of([3.0, 2.0, 1.5]).float()
    found = block_lanczos(lambda v: v @ matrix, torch.zeros(1, 200), 3, tolerance=1e-4)
    torch.testing.assert_close(found.variances[0], torch.tensor([3.0, 2.0, 1.5]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("region", [None, REGION], ids=["whole", "region"])
@pytest.mark.parametrize("kind", ["diagonal", "spectral", "given", "affine"])
def test_every_kind_of_covariance(kind: str, region: tuple[int, int, int, int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.zeros(2, *SHAPE, dtype=torch.float64)
    variances = torch.rand(2, *SHAPE, generator=generator, dtype=torch.float64) + 0.1
    cov: Covariance = Diagonal(variances) if kind == "diagonal" else Spectral(variances)
    if kind == "given":
        y = torch.zeros(2, *SHAPE, dtype=torch.float64)
        cov = mmdgs.Gaussian(mean, cov).given(y, Box(SHAPE, 3), 0.2).cov
    if kind == "affine":
        matrix = Dense.from_matrix(cov.dense(), mean.shape[1:]).dense()
        cov = Krylov(lambda v: torch.einsum("nbd,bde->nbe", v, matrix), mean, 5, 1e-9).affine(2.0, 0.5)
    places = torch.arange(D).reshape(SHAPE)
    kept = (places if region is None else inside(places, region)).flatten()
    dense = cov.dense()[:, kept][:, :, kept]
    found = principal_components(cov, mean, 3, region, tolerance=1e-8)
    torch.testing.assert_close(found.variances, torch.linalg.eigvalsh(dense)[:, -3:].flip(1), rtol=1e-7, atol=0)
    v = inside(found.directions, region).flatten(2) if region else found.directions.flatten(2)
    torch.testing.assert_close(torch.einsum("bkd,bde,bke->bk", v, dense, v), found.variances, rtol=1e-7, atol=0)


def test_rows_do_not_depend_on_their_batch() -> None:
    level = LEVELS["alpha=1"]
    x_t = noisy(level)
    both, alone = (mmdgs.components(mixture().denoiser(), rows, level, 2, tolerance=1e-8) for rows in (x_t, x_t[:1]))
    torch.testing.assert_close(both.variances[:1], alone.variances, rtol=1e-8, atol=0)
    torch.testing.assert_close(both.directions[:1], alone.directions, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("k", "region", "says"),
    [
        (0, None, "from 1 to 60, got 0"),
        (61, None, "from 1 to 60, got 61"),
        (13, REGION, "from 1 to 12, got 13"),
        (1, (0, 0, 7, 1), "does not lie within the image, which is 6 wide and 5 high"),
        (1, (-1, 0, 2, 2), "does not lie within"),
        (1, (0, 0, 2), "four whole numbers"),
    ],
)
def test_what_is_refused(k: int, region: tuple[int, int, int, int] | None, says: str) -> None:
    q = mmdgs.Gaussian(torch.zeros(1, *SHAPE), Diagonal(torch.ones(1, *SHAPE)))
    with pytest.raises(UsageError, match=says):
        q.components(k, region)
