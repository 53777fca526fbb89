"""Gaussian posteriors: density, draws, and the bridge to cleaner levels."""

from __future__ import annotations

import pytest
import torch
from oracles import IMAGE, PLAIN, TARGETS, assert_moments, points, random_covariances
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal

import mmdgs
from mmdgs.linalg.operators import Dense, Diagonal
from mmdgs.noise import CLEAN, NoiseLevel, transition
from mmdgs.targets import GaussianMixture

B, D = 3, 12
TIGHT = {"rtol": 1e-10, "atol": 1e-10}

PAIRS = {
    "alpha=1": (NoiseLevel(sigma=0.3), NoiseLevel(sigma=0.8)),
    "variance preserving": (NoiseLevel(alpha=0.8, sigma=0.6), NoiseLevel(alpha=0.28, sigma=0.96)),
    "alpha grows": (NoiseLevel(alpha=1.1, sigma=0.3), NoiseLevel(alpha=1.5, sigma=1.0)),
}
pairs = pytest.mark.parametrize(("cleaner", "level"), PAIRS.values(), ids=PAIRS.keys())


def build(kind: str, event: tuple[int, ...]) -> tuple[mmdgs.Gaussian, Tensor, Tensor]:
    """A Gaussian, and its flat means (B, D) and dense covariances (B, D, D)."""
    mean = torch.linspace(-2, 2, B * D, dtype=torch.float64).reshape(B, D)
    if kind == "dense":
        matrix = random_covariances(B, D, seed=4)
        return mmdgs.Gaussian(mean.reshape(B, *event), Dense.from_matrix(matrix, torch.Size(event))), mean, matrix
    variances = torch.linspace(0.3, 2.0, B * D, dtype=torch.float64).reshape(B, D)
    cov = Diagonal(variances.reshape(B, *event))
    return mmdgs.Gaussian(mean.reshape(B, *event), cov), mean, torch.diag_embed(variances)


@pytest.mark.parametrize("event", [(D,), IMAGE], ids=["vectors", "images"])
@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_log_prob_is_that_of_torch(kind: str, event: tuple[int, ...], generator: torch.Generator) -> None:
    q, mean, matrix = build(kind, event)
    x = torch.randn(B, D, generator=generator, dtype=torch.float64)
    if kind == "dense":
        reference = MultivariateNormal(mean, matrix)
    else:
        reference = Independent(Normal(mean, matrix.diagonal(dim1=1, dim2=2).sqrt()), 1)
    torch.testing.assert_close(q.log_prob(x.reshape(B, *event)), reference.log_prob(x), **TIGHT)


@pytest.mark.parametrize("event", [(D,), IMAGE], ids=["vectors", "images"])
@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_samples_have_the_moments(kind: str, event: tuple[int, ...], generator: torch.Generator) -> None:
    q, mean, matrix = build(kind, event)
    draws = q.sample((20, 500), generator=generator)
    assert draws.shape == (20, 500, B, *event)
    for row in range(B):
        assert_moments(draws[:, :, row].reshape(-1, D), mean[row], matrix[row])


def test_a_number_of_draws_is_a_shape_of_one_dimension(skewed: GaussianMixture) -> None:
    x_t = points(skewed, (3,), PLAIN, 2)
    gaussian = mmdgs.FullMoments(skewed.denoiser())(x_t, PLAIN)
    for law in (gaussian, skewed, skewed.posterior(x_t, PLAIN)):
        one, other = (law.sample(shape, generator=torch.Generator().manual_seed(0)) for shape in (8, (8,)))
        assert len(one) == 8
        assert torch.equal(one, other)
        with pytest.raises(TypeError, match=r"needs generator=.*generator=torch.Generator\(\).manual_seed\(0\)"):
            law.sample(8)


def test_one_sample_has_the_shape_of_the_mean() -> None:
    q, _, _ = build("dense", IMAGE)
    draw = q.sample(generator=mmdgs.Streams(1, B))
    assert draw.shape == q.mean.shape
    # Each row draws from its own stream, so a row drawn alone gives the same.
    alone = mmdgs.Gaussian(q.mean[1:2], Dense(q.cov.values[1:2], q.cov.vectors[1:2], q.cov.event_shape))
    torch.testing.assert_close(alone.sample(generator=mmdgs.Streams(1, 1, first_row=1)), draw[1:2], **TIGHT)


@pairs
def test_bridge_is_exact_for_a_gaussian(cleaner: NoiseLevel, level: NoiseLevel, gaussian: GaussianMixture) -> None:
    # The joint law of (x_s, x_t) written down, and conditioned by the textbook formula.
    m, s, eye = gaussian.means[0], gaussian.covariances[0], torch.eye(3, dtype=torch.float64)
    a, _ = transition(cleaner, level)
    cov_s = cleaner.alpha**2 * s + cleaner.sigma**2 * eye
    cov_t = level.alpha**2 * s + level.sigma**2 * eye
    gain = (a * cov_s) @ torch.linalg.inv(cov_t)
    x_t = points(gaussian, (3,), level, rows=5)
    expected_mean = cleaner.alpha * m + (x_t - level.alpha * m) @ gain.mT
    expected_cov = cov_s - gain @ cov_t @ gain.mT

    q = mmdgs.ExactMoments(gaussian)(x_t, level).bridge(x_t, level, cleaner)
    torch.testing.assert_close(q.mean, expected_mean, **TIGHT)
    torch.testing.assert_close(q.cov.dense(), expected_cov.expand(5, 3, 3), **TIGHT)


@pairs
@pytest.mark.parametrize("name", TARGETS)
def test_bridge_has_the_moments_of_a_mixture(cleaner: NoiseLevel, level: NoiseLevel, name: str) -> None:
    # x_s is itself a mixture and x_t = a x_s + b e, so x_s | x_t is known exactly.
    make, event = TARGETS[name]
    mixture = make()
    x_t = points(mixture, event, level, rows=6)
    a, b = transition(cleaner, level)
    exact = mixture.noised(cleaner).posterior(x_t, NoiseLevel(alpha=a, sigma=b))
    q = mmdgs.ExactMoments(mixture)(x_t, level).bridge(x_t, level, cleaner)
    torch.testing.assert_close(q.mean, exact.mean, **TIGHT)
    torch.testing.assert_close(q.cov.dense(), exact.covariance, **TIGHT)


@pairs
def test_bridge_of_a_diagonal_is_the_diagonal_of_the_bridge(cleaner: NoiseLevel, level: NoiseLevel) -> None:
    mixture, event = TARGETS["image"][0](), IMAGE
    x_t = points(mixture, event, level, rows=4)
    full = mmdgs.FullMoments(mixture.denoiser())(x_t, level).bridge(x_t, level, cleaner)
    diagonal = mmdgs.DiagonalMoments(mixture.denoiser(), probes=None)(x_t, level).bridge(x_t, level, cleaner)
    torch.testing.assert_close(diagonal.mean, full.mean, **TIGHT)
    torch.testing.assert_close(diagonal.cov.diagonal(), full.cov.diagonal(), **TIGHT)


def test_bridge_to_clean_is_the_posterior_itself(skewed: GaussianMixture) -> None:
    level = NoiseLevel(alpha=0.7, sigma=0.6)
    x_t = points(skewed, (3,), level, rows=4)
    q = mmdgs.ExactMoments(skewed)(x_t, level)
    assert q.bridge(x_t, level, CLEAN) is q
    # ... and it is what the formula tends to: at sigma_s = 1e-7 all terms in sigma_s^2 are below 1e-12.
    near = q.bridge(x_t, level, NoiseLevel(sigma=1e-7))
    torch.testing.assert_close(near.mean, q.mean, **TIGHT)
    torch.testing.assert_close(near.cov.dense(), q.cov.dense(), **TIGHT)


def test_bridge_keeps_the_repaired_fraction() -> None:
    q = mmdgs.Gaussian(torch.zeros(2, 2), Diagonal(torch.ones(2, 2)), torch.tensor([0.5, 0.0]))
    bridged = q.bridge(torch.zeros(2, 2), NoiseLevel(sigma=1.0), NoiseLevel(sigma=0.5))
    assert bridged.repaired.tolist() == [0.5, 0.0]


def test_wrong_order_is_refused() -> None:
    q, _, _ = build("diagonal", (D,))
    with pytest.raises(ValueError, match=r"wrong order"):
        q.bridge(q.mean, NoiseLevel(sigma=0.2), NoiseLevel(sigma=0.3))
