"""Losses by their formulas and their optima, and a training that must recover a known score."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import NETWORK_KINDS, exact_networks, paper_mixture, points
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal

import mmdgs
from mmdgs import losses
from mmdgs.denoisers import score
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Generator, seeded, uniforms
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings, train

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
Target = tuple[GaussianMixture, tuple[int, ...]]


@pytest.mark.parametrize("kind", NETWORK_KINDS)
def test_dsm_is_its_formula(
    kind: str, target: Target, level: NoiseLevel, generator: torch.Generator
) -> None:
    # 1/2 |score(x_t) + e / sigma|^2 with the noise e that the same seed gives.
    mixture, event = target
    x = mixture.sample((6,), generator=generator).reshape(6, *event)
    x_t = add_noise(x, level, generator=seeded(3))
    e = (x_t - level.alpha * x) / level.sigma
    expected = 0.5 * (mixture.noised(level).score(x_t) + e / level.sigma).flatten(1).square().sum(1)
    loss = losses.dsm(exact_networks(mixture)[kind], x, level, generator=seeded(3))
    assert loss.shape == (6,)
    torch.testing.assert_close(loss, expected, **TIGHT)


def test_dsm_is_least_at_the_true_mean(
    skewed: GaussianMixture, level: NoiseLevel, generator: torch.Generator
) -> None:
    # E[loss(D)] = alpha^2 / (2 sigma^4) (E trace Cov[x | x_t] + E |D - D*|^2): the exact denoiser
    # D* is the minimum, and any other is above it by its distance.
    x = skewed.sample((50_000,), generator=generator)
    x_t = add_noise(x, level, generator=seeded(3))
    exact = skewed.posterior(x_t, level)
    scale = level.alpha**2 / (2 * level.sigma**4)
    least = losses.dsm(skewed.denoiser(), x, level, generator=seeded(3))
    gaps = [least - scale * exact.covariance.diagonal(dim1=1, dim2=2).sum(1)]
    for shift in (lambda x: 0.1 * x.sin(), lambda x: -0.05 * x, lambda x: 0 * x + 0.1):
        other = mmdgs.clean_denoiser(lambda x_t, shift=shift: exact.mean + shift(x_t))
        excess = losses.dsm(other, x, level, generator=seeded(3)) - least
        gaps.append(excess - scale * shift(x_t).square().sum(1))
    for gap in gaps:  # each has mean zero: five standard errors
        assert abs(gap.mean()) < 5 * gap.std() / math.sqrt(len(gap))


def test_kl_is_the_negative_log_density(
    target: Target, level: NoiseLevel, generator: torch.Generator
) -> None:
    mixture, event = target
    x = mixture.sample((6,), generator=generator).reshape(6, *event)
    x_t = add_noise(x, level, generator=seeded(3))
    mean, log_std = 0.3 * x_t, 0.1 * x_t - 1
    learned = mmdgs.LearnedMoments(lambda x_t: (0.3 * x_t, 0.1 * x_t - 1))
    expected = -Independent(Normal(mean, log_std.exp()), len(event)).log_prob(x)
    torch.testing.assert_close(losses.kl(learned, x, level, generator=seeded(3)), expected, **TIGHT)

    exact = mixture.posterior(x_t, level)
    dense = MultivariateNormal(exact.mean.flatten(1), exact.covariance)
    loss = losses.kl(mmdgs.moments.ExactMoments(mixture), x, level, generator=seeded(3))
    torch.testing.assert_close(loss, -dense.log_prob(x.flatten(1)), **TIGHT)


def test_kl_is_least_at_the_true_moments(level: NoiseLevel, generator: torch.Generator) -> None:
    # Target N(0, s^2): the posterior is N(g x_t, c). The loss's slope in (gain, log std) vanishes
    # there, within five standard errors, and not a tenth away from it.
    s = 0.8
    noisy = level.alpha**2 * s**2 + level.sigma**2
    gain, log_std = level.alpha * s**2 / noisy, 0.5 * math.log(s**2 * level.sigma**2 / noisy)
    x = s * torch.randn(50_000, 1, generator=generator, dtype=torch.float64)

    def slopes(*at: float) -> Tensor:
        parameters = [torch.full_like(x, value).requires_grad_(True) for value in at]
        learned = mmdgs.LearnedMoments(
            lambda x_t: (parameters[0] * x_t, parameters[1].expand_as(x_t))
        )
        loss = losses.kl(learned, x, level, generator=seeded(3))
        each = torch.cat(torch.autograd.grad(loss.sum(), parameters), dim=1)
        return each.mean(0).abs() / (each.std(0) / math.sqrt(len(x)))

    assert (slopes(gain, log_std) < 5).all()
    assert slopes(1.1 * gain, log_std)[0] > 5
    assert slopes(gain, log_std + 0.1)[1] > 5


@pytest.mark.parametrize("construct", [mmdgs.energy_denoiser, mmdgs.score_denoiser])
def test_training_recovers_the_score_of_a_mixture(construct) -> None:
    # E |s - s*|^2 / E |s*|^2 on fresh noisy points: 500 steps reach about 0.01; untrained it is
    # about 1.
    level = NoiseLevel(sigma=0.5)
    mixture = paper_mixture().to(dtype=torch.float32)
    network = MLP(2, 2, width=64, depth=2, seed=0)
    denoiser = construct(network)
    x_t = points(mixture, (2,), level, rows=5000, seed=1)
    exact = mixture.noised(level).score(x_t)

    def error() -> float:
        with torch.no_grad():
            off = score(denoiser, x_t, level) - exact
        return (off.square().sum() / exact.square().sum()).item()

    assert error() > 0.5
    data = mixture.sample((20_000,), generator=seeded(0))
    settings = TrainingSettings(steps=500, batch_size=300, learning_rate=5e-3, decay=True)

    def loss(x: Tensor, generator: Generator) -> Tensor:
        return losses.dsm(denoiser, x, level, generator=generator)

    train(network, loss, data, settings, progress=None)
    assert error() < 0.02


def fit(seed: int) -> tuple[Tensor, MLP]:
    network = MLP(2, 4, width=8, depth=1, seed=0)
    post, data = mmdgs.LearnedMoments(network), torch.randn(64, 2, generator=seeded(0))

    def loss(x: Tensor, generator: Generator) -> Tensor:
        return losses.kl(post, x, NoiseLevel(sigma=0.5), generator=generator)

    settings = TrainingSettings(steps=30, batch_size=20, learning_rate=1e-2, seed=seed)
    return train(network, loss, data, settings, progress=None), network


def test_the_seed_decides_the_losses() -> None:
    (first, network), (second, same), (third, _) = fit(0), fit(0), fit(1)
    assert first.shape == (30,)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    for a, b in zip(network.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)


class Weight(torch.nn.Module):
    """One number, which starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))


def test_the_noise_comes_from_the_seed_too() -> None:
    drawn = []

    def loss(x: Tensor, generator: Generator) -> Tensor:
        drawn.append(uniforms(x.shape, x, generator).tolist())
        return network.value.expand(len(x))

    for seed in (0, 0, 1):
        network = Weight()
        train(network, loss, torch.ones(4, 1), TrainingSettings(steps=1, seed=seed), progress=None)
    assert drawn[0] == drawn[1] != drawn[2]


def test_every_point_is_seen_once_an_epoch_in_training_mode() -> None:
    data = torch.arange(12.0)[:, None]
    network, seen = MLP(1, 1, width=2, depth=1, seed=0), []

    def loss(x: Tensor, generator: Generator) -> Tensor:
        assert network.training
        seen.append(x[:, 0].tolist())
        return network(x).square().sum(1)

    train(network, loss, data, TrainingSettings(steps=6, batch_size=4), progress=None)
    for epoch in (seen[:3], seen[3:]):
        assert sorted(point for batch in epoch for point in batch) == data[:, 0].tolist()
    assert seen[:3] != seen[3:]
    assert not network.training
