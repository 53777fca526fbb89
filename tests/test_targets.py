"""Gaussian mixtures: density, score, noising and the exact posterior."""

from __future__ import annotations

import pytest
import torch
from oracles import as_distribution, assert_moments, points, random_covariances
from torch import Tensor

from mmdgs.noise import NoiseLevel
from mmdgs.targets import GaussianMixture

TIGHT = {"rtol": 1e-11, "atol": 1e-11}
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
MEANS = torch.tensor([[0.0, 0.5], [1.2, -0.3], [-0.8, 0.9]], dtype=torch.float64)
EYE = torch.eye(2, dtype=torch.float64)
FULL = random_covariances(3, 2, seed=5)
VARIANCES = torch.tensor([[0.2, 0.5], [0.3, 0.1], [0.6, 0.4]], dtype=torch.float64)

FORMS: dict[str, tuple[object, Tensor]] = {
    "full": (FULL, FULL),
    "variances": (VARIANCES, torch.diag_embed(VARIANCES)),
    "a deviation each": ([0.2, 0.5, 0.4], torch.stack([s**2 * EYE for s in (0.2, 0.5, 0.4)])),
    "one deviation": (0.3, (0.09 * EYE).expand(3, 2, 2)),
}


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[GaussianMixture, Tensor]:
    """A 2-D mixture with covariances in one of the accepted forms, and the same as matrices."""
    given, matrices = request.param
    return GaussianMixture(WEIGHTS, MEANS, given), matrices


def test_log_prob_is_that_of_torch(
    pair: tuple[GaussianMixture, Tensor], generator: torch.Generator
) -> None:
    mixture, matrices = pair
    torch.testing.assert_close(mixture.covariances, matrices, **TIGHT)
    reference = as_distribution(WEIGHTS, MEANS, matrices)
    x = 3 * torch.randn(4, 5, 2, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(mixture.log_prob(x), reference.log_prob(x), **TIGHT)
    torch.testing.assert_close(mixture.log_prob(x[0, 0]), reference.log_prob(x[0, 0]), **TIGHT)


def test_score_is_the_gradient(
    pair: tuple[GaussianMixture, Tensor], generator: torch.Generator
) -> None:
    mixture, matrices = pair
    x = torch.randn(50, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    whole = as_distribution(WEIGHTS, MEANS, matrices).log_prob(x).sum()
    torch.testing.assert_close(mixture.score(x.detach()), *torch.autograd.grad(whole, x), **TIGHT)


def test_noised_is_the_mixture_of_x_t(
    pair: tuple[GaussianMixture, Tensor], level: NoiseLevel
) -> None:
    mixture, matrices = pair
    covariances = level.alpha**2 * matrices + level.sigma**2 * EYE
    expected = as_distribution(WEIGHTS, level.alpha * MEANS, covariances)
    x_t = points(mixture, (2,), level, rows=50)
    torch.testing.assert_close(mixture.noised(level).log_prob(x_t), expected.log_prob(x_t), **TIGHT)


def test_moments(pair: tuple[GaussianMixture, Tensor]) -> None:
    mixture, matrices = pair
    mean = WEIGHTS @ MEANS
    second = torch.einsum("k,kij->ij", WEIGHTS, matrices + MEANS[:, :, None] * MEANS[:, None])
    torch.testing.assert_close(mixture.mean(), mean, **TIGHT)
    torch.testing.assert_close(mixture.covariance(), second - torch.outer(mean, mean), **TIGHT)


def test_samples_have_the_moments(
    pair: tuple[GaussianMixture, Tensor], generator: torch.Generator
) -> None:
    mixture, _ = pair
    x = mixture.sample((100, 1000), generator=generator)
    assert x.shape == (100, 1000, 2)
    assert_moments(x.reshape(-1, 2), mixture.mean(), mixture.covariance())
    assert mixture.sample(generator=generator).shape == (2,)


def test_posterior_is_bayes_rule(pair: tuple[GaussianMixture, Tensor], level: NoiseLevel) -> None:
    # On a grid 0.06 apart a Gaussian of standard deviation above 0.15 sums to its integral to
    # 1e-15, and the widest one (about 0.7, within 3 of the origin) has nothing left beyond 9.
    mixture, matrices = pair
    axis = torch.arange(-9, 9, 0.06, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    prior = as_distribution(WEIGHTS, MEANS, matrices).log_prob(grid)
    x_t = points(mixture, (2,), level, rows=4)
    posterior = mixture.posterior(x_t, level)
    for row in range(len(x_t)):
        joint = prior - (x_t[row] - level.alpha * grid).square().sum(1) / (2 * level.sigma**2)
        weight = torch.softmax(joint, dim=0)
        mean = weight @ grid
        covariance = torch.einsum("n,ni,nj->ij", weight, grid - mean, grid - mean)
        torch.testing.assert_close(posterior.mean[row], mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(posterior.covariance[row], covariance, rtol=1e-9, atol=1e-9)
        at = int(joint.argmax())
        x = grid[at].expand(len(x_t), 2)
        expected = weight[at].log() - 2 * torch.tensor(0.06, dtype=torch.float64).log()
        torch.testing.assert_close(posterior.log_prob(x)[row], expected, rtol=1e-9, atol=1e-9)


def test_posterior_samples_have_the_moments(
    target: tuple[GaussianMixture, tuple[int, ...]], level: NoiseLevel, generator: torch.Generator
) -> None:
    mixture, event = target
    x_t = points(mixture, event, level, rows=2)
    posterior = mixture.posterior(x_t, level)
    draws = posterior.sample((10, 2000), generator=generator)
    assert draws.shape == (10, 2000, 2, *event)
    for row in range(2):
        flat = draws[:, :, row].reshape(-1, mixture.dim)
        assert_moments(flat, posterior.mean[row].flatten(), posterior.covariance[row])
    assert posterior.sample(generator=generator).shape == x_t.shape


def test_images_are_vectors_in_another_shape(
    target: tuple[GaussianMixture, tuple[int, ...]], level: NoiseLevel
) -> None:
    mixture, event = target
    flat = points(mixture, (mixture.dim,), level, rows=6)
    shaped = flat.reshape(6, *event)
    torch.testing.assert_close(mixture.log_prob(shaped), mixture.log_prob(flat))
    torch.testing.assert_close(mixture.score(shaped).flatten(1), mixture.score(flat))
    images, vectors = mixture.posterior(shaped, level), mixture.posterior(flat, level)
    assert images.mean.shape == shaped.shape
    torch.testing.assert_close(images.mean.flatten(1), vectors.mean)
    torch.testing.assert_close(images.covariance, vectors.covariance)
    torch.testing.assert_close(images.log_prob(shaped), vectors.log_prob(flat))


def test_denoiser_jacobian_is_the_posterior_covariance(
    skewed: GaussianMixture, level: NoiseLevel
) -> None:
    # Theorem 2 of the paper, for any alpha: Cov[x | x_t] = (sigma^2 / alpha) dD/dx_t.
    x_t = points(skewed, (3,), level, rows=4)
    for row in x_t:
        jacobian = torch.func.jacrev(lambda x: skewed.denoiser()(x[None], level)[0])(row)
        covariance = skewed.posterior(row[None], level).covariance[0]
        torch.testing.assert_close(level.sigma**2 / level.alpha * jacobian, covariance, **TIGHT)


def test_a_weight_of_zero_is_no_component(generator: torch.Generator) -> None:
    mixture = GaussianMixture([0.0, 1.0], torch.tensor([[50.0], [0.0]], dtype=torch.float64), 1.0)
    x = mixture.sample((10_000,), generator=generator)
    assert x.abs().max() < 6
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(x[:, 0])
    torch.testing.assert_close(mixture.log_prob(x), expected, **TIGHT)
    assert torch.isfinite(mixture.score(x)).all()


def test_far_points_stay_finite(paper: GaussianMixture, level: NoiseLevel) -> None:
    # 1,000 standard deviations out every component underflows; log_prob, score and mean must not.
    x = torch.tensor([[300.0, -300.0]], dtype=torch.float64)
    assert torch.isfinite(paper.log_prob(x)).all()
    torch.testing.assert_close(paper.score(x), -(x - torch.tensor([[1.0, -1.0]])) / 0.04, **TIGHT)
    assert torch.isfinite(paper.posterior(x, level).mean).all()
