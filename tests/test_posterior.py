"""Gaussian posteriors: density, draws, and the bridge to cleaner levels."""

from __future__ import annotations

import pytest
import torch
from oracles import IMAGE, PLAIN, TARGETS, assert_moments, numbers, points, random_covariances
from torch import Tensor
from torch.distributions import MultivariateNormal

import mmdgs
from mmdgs.linalg.operators import Dense, Diagonal
from mmdgs.noise import CLEAN, NoiseLevel, transition
from mmdgs.randomness import seeded
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
    variances = torch.linspace(0.3, 2.0, B * D, dtype=torch.float64).reshape(B, D)
    dense = kind == "dense"
    matrix = random_covariances(B, D, seed=4) if dense else torch.diag_embed(variances)
    event_shape = torch.Size(event)
    cov = (
        Dense.from_matrix(matrix, event_shape) if dense else Diagonal(variances.reshape(B, *event))
    )
    return mmdgs.Gaussian(mean.reshape(B, *event), cov), mean, matrix


@pytest.mark.parametrize("event", [(D,), IMAGE], ids=["vectors", "images"])
@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_density_is_torchs_and_samples_have_the_moments(
    kind: str, event: tuple[int, ...], generator: torch.Generator
) -> None:
    q, mean, matrix = build(kind, event)
    x = numbers(B, D)
    reference = MultivariateNormal(mean, matrix)
    torch.testing.assert_close(q.log_prob(x.reshape(B, *event)), reference.log_prob(x), **TIGHT)
    draws = q.sample((4, 500), generator=generator)
    assert draws.shape == (4, 500, B, *event)
    for row in range(B):
        assert_moments(draws[:, :, row].reshape(-1, D), mean[row], matrix[row])


def test_a_number_of_draws_is_a_shape_of_one_dimension(skewed: GaussianMixture) -> None:
    x_t = points(skewed, (3,), PLAIN, 2)
    gaussian = mmdgs.FullMoments(skewed.denoiser())(x_t, PLAIN)
    for law in (gaussian, skewed, skewed.posterior(x_t, PLAIN)):
        by_number, by_shape = (law.sample(shape, generator=seeded(0)) for shape in (8, (8,)))
        assert len(by_number) == 8
        assert torch.equal(by_number, by_shape)
        with pytest.raises(TypeError, match="generator="):
            law.sample(8)


@pairs
def test_bridge_is_exact_for_a_gaussian(
    cleaner: NoiseLevel, level: NoiseLevel, gaussian: GaussianMixture
) -> None:
    # The joint law of (x_s, x_t) written down, and conditioned by the textbook formula.
    m, s, eye = gaussian.means[0], gaussian.covariances[0], torch.eye(3, dtype=torch.float64)
    a, _ = transition(cleaner, level)
    cov_s = cleaner.alpha**2 * s + cleaner.sigma**2 * eye
    cov_t = level.alpha**2 * s + level.sigma**2 * eye
    gain = (a * cov_s) @ torch.linalg.inv(cov_t)
    x_t = points(gaussian, (3,), level, rows=5)
    expected_mean = cleaner.alpha * m + (x_t - level.alpha * m) @ gain.mT
    expected_cov = cov_s - gain @ cov_t @ gain.mT

    q = mmdgs.moments.ExactMoments(gaussian)(x_t, level).bridge(x_t, level, cleaner)
    torch.testing.assert_close(q.mean, expected_mean, **TIGHT)
    torch.testing.assert_close(q.cov.dense(), expected_cov.expand(5, 3, 3), **TIGHT)


@pairs
@pytest.mark.parametrize("name", TARGETS)
def test_bridge_has_the_moments_of_a_mixture(
    cleaner: NoiseLevel, level: NoiseLevel, name: str
) -> None:
    # x_s is itself a mixture and x_t = a x_s + b e, so x_s | x_t is known exactly.
    make, event = TARGETS[name]
    mixture = make()
    x_t = points(mixture, event, level, rows=6)
    a, b = transition(cleaner, level)
    exact = mixture.noised(cleaner).posterior(x_t, NoiseLevel(alpha=a, sigma=b))
    q = mmdgs.moments.ExactMoments(mixture)(x_t, level).bridge(x_t, level, cleaner)
    torch.testing.assert_close(q.mean, exact.mean, **TIGHT)
    torch.testing.assert_close(q.cov.dense(), exact.covariance, **TIGHT)


@pairs
def test_bridge_of_a_diagonal_is_the_diagonal_of_the_bridge(
    cleaner: NoiseLevel, level: NoiseLevel
) -> None:
    mixture, event = TARGETS["image"][0](), IMAGE
    x_t = points(mixture, event, level, rows=4)
    full, diagonal = (
        moments(x_t, level).bridge(x_t, level, cleaner)
        for moments in (
            mmdgs.FullMoments(mixture.denoiser()),
            mmdgs.DiagonalMoments(mixture.denoiser(), probes=None),
        )
    )
    torch.testing.assert_close(diagonal.mean, full.mean, **TIGHT)
    torch.testing.assert_close(diagonal.cov.diagonal(), full.cov.diagonal(), **TIGHT)


def test_bridge_to_clean_is_the_posterior_itself(skewed: GaussianMixture) -> None:
    level = NoiseLevel(alpha=0.7, sigma=0.6)
    x_t = points(skewed, (3,), level, rows=4)
    q = mmdgs.moments.ExactMoments(skewed)(x_t, level)
    assert q.bridge(x_t, level, CLEAN) is q
    # It is what the formula tends to: at sigma_s = 1e-7 terms in sigma_s^2 are below 1e-12.
    near = q.bridge(x_t, level, NoiseLevel(sigma=1e-7))
    torch.testing.assert_close(near.mean, q.mean, **TIGHT)
    torch.testing.assert_close(near.cov.dense(), q.cov.dense(), **TIGHT)
