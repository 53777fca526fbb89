"""Optimal covariance matching against exact posteriors: targets, their loss and its minimum, heads
and their scale.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from oracles import PLAIN, SCALED, TARGETS, gaussian_target, linear_denoiser, points
from torch import Tensor

import mmdgs
from mmdgs import losses
from mmdgs.cost import counting
from mmdgs.linalg.operators import Diagonal
from mmdgs.moments.calibrated import fitted_floors
from mmdgs.moments.ocm import START, OcmMoments, RatioHead, RatioScale, ratio_target
from mmdgs.moments.probes import Rademacher
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel, NoiseLevels, add_noise
from mmdgs.randomness import Streams, seeded
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings, train

EXACT = {"rtol": 1e-8, "atol": 1e-8}
Target = tuple[GaussianMixture, tuple[int, ...]]


def exact_ratio(mixture: GaussianMixture, x_t: Tensor, level: NoiseLevel) -> Tensor:
    """Var[x | x_t] / (sigma / alpha)^2 in closed form."""
    diagonal = mixture.posterior(x_t, level).covariance.diagonal(dim1=1, dim2=2)
    return (diagonal / level.variance).reshape(x_t.shape)


def within(values: Tensor, expected: Tensor | float, errors: float = 5.0) -> bool:
    """Whether means over rows are as expected, each within so many standard errors."""
    off = (values.mean(0) - expected).abs() / (values.std(0) / math.sqrt(len(values)))
    return bool((off < errors).all())


# --- targets


@pytest.mark.parametrize("probes", [1, 3])
def test_targets_are_unbiased_for_the_true_ratio(
    probes: int, target: Target, level: NoiseLevel
) -> None:
    mixture, event = target
    x_t = points(mixture, event, level, rows=1).expand(4_000, *event)
    mean, y = ratio_target(mixture.denoiser(), x_t, level, generator=seeded(1), probes=probes)
    torch.testing.assert_close(mean[:1], mixture.posterior(x_t[:1], level).mean, **EXACT)
    # A lattice with a class of its own for every pixel has no noise at all: five standard errors,
    # or rounding.
    exact = exact_ratio(mixture, x_t[:1], level)[0]
    assert ((y.mean(0) - exact).abs() < 5 * y.std(0) / math.sqrt(len(y)) + 1e-9).all()


def test_targets_are_in_full_precision_whatever_is_around_them() -> None:
    network = MLP(2, 2, width=16, depth=1, seed=0)
    denoiser = mmdgs.score_denoiser(network)
    x_t = torch.randn(5, 2, generator=seeded(0))
    plain = ratio_target(denoiser, x_t, PLAIN, generator=seeded(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert denoiser(x_t, PLAIN).sub(plain[0]).abs().max() > 1e-4  # bf16 makes a difference
        inside = ratio_target(denoiser, x_t, PLAIN, generator=seeded(1))
    for a, b in zip(plain, inside, strict=True):
        assert torch.equal(a, b)


# --- the loss


def test_the_loss_is_its_formula(
    target: Target, level: NoiseLevel, generator: torch.Generator
) -> None:
    # With signs of one probe: w |h - alpha v * (J' v)|^2, the Jacobian being (alpha / sigma^2) Cov.
    mixture, event = target
    x = mixture.sample((6,), generator=generator).reshape(6, *event)
    draws = seeded(3)
    x_t = add_noise(x, level, generator=draws)
    v = Rademacher().draw(1, x_t, draws)[0].flatten(1)
    jacobian = mixture.posterior(x_t, level).covariance / level.tweedie
    y = level.alpha * v * torch.einsum("bij,bi->bj", jacobian, v)
    mean = mixture.posterior(x_t, level).mean
    expected = 7.0 * (0.1 * x_t + 0.2 * mean - y.reshape(x_t.shape)).flatten(1).square().sum(1)
    loss = losses.ocm(
        lambda x_t, mean, level: 0.1 * x_t + 0.2 * mean, mixture.denoiser(), x, level,
        generator=seeded(3), design=Rademacher(), weight=lambda level: 7.0,
    )  # fmt: skip
    torch.testing.assert_close(loss, expected, **EXACT)


def test_the_exact_diagonal_is_the_minimum(
    skewed: GaussianMixture, level: NoiseLevel, generator: torch.Generator
) -> None:
    # E[loss(h)] = const + E |h - r|^2: the slope along any shift is zero at r, and another head
    # lies above it by its distance. Each mean within five standard errors.
    x = skewed.sample((8_000,), generator=generator)

    def loss(head) -> Tensor:
        return losses.ocm(head, skewed.denoiser(), x, level, generator=seeded(3))

    def oracle(x_t: Tensor, mean: Tensor, level: NoiseLevel) -> Tensor:
        return exact_ratio(skewed, x_t, level)

    x_t = add_noise(x, level, generator=seeded(3))
    least = loss(oracle)
    for shift in (torch.sin, torch.ones_like):
        above, below = (
            loss(lambda x, mean, level, s=s, f=shift: oracle(x, mean, level) + s * f(x)) - least
            for s in (0.1, -0.1)
        )
        assert within((above - below) / 2, 0.0)
        squares = (0.1 * shift(x_t)).square().sum(1)
        torch.testing.assert_close((above + below) / 2, squares, **EXACT)


def test_a_level_for_each_row_is_the_loop_over_rows() -> None:
    # Networks' denoisers take rows of levels; a row's noise and probes come from its own stream.
    denoiser = mmdgs.noise_denoiser(MLP(3, 3, width=8, depth=1, conditional=True, seed=1).double())
    scale = RatioScale((0.1, 1.0, 3.0), (0.9, 0.5, 0.1), (1.0, 2.0, 3.0), 0.7)
    head = RatioHead(MLP(6, 3, width=8, depth=1, conditional=True, seed=2).double(), scale)
    x = torch.randn(3, 3, generator=seeded(0), dtype=torch.float64)
    levels = [PLAIN, SCALED, NoiseLevel(alpha=0.3, sigma=0.9)]
    loss = functools.partial(losses.ocm, head, denoiser, probes=2, weight=scale.weight)
    together = loss(x, NoiseLevels.of(levels, x), generator=Streams(5, 3))
    for row, level in enumerate(levels):
        alone = loss(x[row : row + 1], level, generator=Streams(5, 1, row))
        torch.testing.assert_close(alone, together[row : row + 1], **EXACT)


def test_a_head_learns_the_constant_diagonal_of_a_gaussian() -> None:
    # A Gaussian's denoiser is linear, its posterior covariance (C^-1 + alpha^2 / sigma^2)^-1 at
    # every x_t. 400 steps of one probe come within 2% of it; the start, the mean over coordinates,
    # is 30% off.
    mixture, level = gaussian_target(), SCALED
    covariance = mixture.covariances[0]
    precision = torch.linalg.inv(covariance) + torch.eye(3, dtype=torch.float64) / level.variance
    exact = torch.linalg.inv(precision).diagonal() / level.variance
    x = mixture.sample((5_000,), generator=seeded(0))
    scale = RatioScale.fit(mixture.denoiser(), x[:200], [level], seed=0, probes=4)
    network = MLP(6, 3, width=16, depth=1, seed=0).double()
    head = RatioHead(network, scale)
    x_t = add_noise(x[:1000], level, generator=seeded(9))

    def error() -> float:
        with torch.no_grad():
            ratio = OcmMoments(mixture.denoiser(), head)(x_t, level).cov.diagonal() / level.variance
        return ((ratio - exact).norm(dim=1) / exact.norm()).mean().item()

    def loss(x: Tensor, generator: torch.Generator) -> Tensor:
        return losses.ocm(
            head, mixture.denoiser(), x, level, generator=generator, weight=scale.weight
        )

    assert error() > 0.1
    settings = TrainingSettings(steps=400, batch_size=200, learning_rate=1e-2, decay=True)
    train(network, loss, x, settings, progress=None)
    assert error() < 0.02


# --- the estimator


@pytest.mark.parametrize("name", TARGETS)
def test_with_an_oracle_for_a_head_it_is_the_exact_diagonal(name: str, level: NoiseLevel) -> None:
    make, event = TARGETS[name]
    mixture = make()
    x_t = points(mixture, event, level, rows=5)
    head = lambda x_t, mean, level: exact_ratio(mixture, x_t, level)  # noqa: E731
    moments = OcmMoments(mixture.denoiser(), head)
    with counting() as cost:
        q = moments(x_t, level)
    exact = mmdgs.DiagonalMoments(mixture.denoiser(), probes=None)(x_t, level)
    torch.testing.assert_close(q.mean, exact.mean, **EXACT)
    torch.testing.assert_close(q.cov.diagonal(), exact.cov.diagonal(), **EXACT)
    assert isinstance(q.cov, Diagonal)
    assert q.repaired.tolist() == [0.0] * 5
    assert (cost.forwards, cost.products) == (2, 0)  # the denoiser and the head


def test_heads_that_cannot_be() -> None:
    denoiser, x_t = linear_denoiser(torch.eye(2)), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"got \(3, 1\)"):
        OcmMoments(denoiser, lambda x_t, mean, level: x_t[:, :1])(x_t, PLAIN)
    with pytest.raises(mmdgs.NonFiniteError, match="covariance"):
        OcmMoments(denoiser, lambda x_t, mean, level: x_t / 0)(x_t, PLAIN)


# --- heads and their scale


def test_a_network_of_zeros_is_the_mean_ratio_of_the_level() -> None:
    scale = RatioScale((0.1, 1.0, 10.0), (0.9, 0.4, 0.01), (1.0, 2.0, 4.0), 0.5)
    head = RatioHead(lambda inputs: torch.zeros_like(inputs[:, :2]), scale)
    x_t = torch.randn(3, 2, generator=seeded(0), dtype=torch.float64)
    for ratio, mean in ((1.0, 0.4), (0.01, 0.9), (1e3, 0.01), (math.sqrt(10), 0.2 / 10**0.5)):
        ratios = head(x_t, x_t, NoiseLevel(alpha=0.5, sigma=0.5 * ratio))
        torch.testing.assert_close(ratios, torch.full_like(x_t, mean))
    assert scale.weight(NoiseLevel(sigma=1.0)) == pytest.approx(1 / 4)


@pytest.mark.slow
def test_the_scale_is_measured() -> None:
    # E r and E y^2 of one Gaussian, known in closed form: of one probe y has the variance alpha^2
    # sum_(j != i) J_ij^2.
    mixture = gaussian_target()
    levels = [NoiseLevel(alpha=0.6, sigma=0.8), NoiseLevel(sigma=0.5)]
    x = mixture.sample((4_000,), generator=seeded(0))
    scale = RatioScale.fit(mixture.denoiser(), x, levels, seed=1)
    assert scale.ratios == pytest.approx((0.5, 4 / 3))
    for level in levels:
        x_t = add_noise(x[:1], level, generator=seeded(2))
        whole = mixture.posterior(x_t, level).covariance[0] / level.variance
        assert scale.mean(level) == pytest.approx(whole.diagonal().mean().item(), rel=0.05)
        assert scale.weight(level) == pytest.approx(3 / whole.square().sum().item(), rel=0.05)
    assert scale.data_std == pytest.approx(x.std().item())
    again = RatioScale.fit(mixture.denoiser(), x, levels, seed=1)
    assert again == scale == RatioScale(**scale.to_json())


def constant(value: float, inputs: Tensor) -> Tensor:
    return torch.full_like(inputs[:, :4], value)


def test_a_finished_head_is_lifted_to_the_errors_of_its_denoiser() -> None:
    """Errors of variance 0.5 at sigma 1 and 0.1 at 1/3, where heads say less or more: less is
    lifted.
    """
    target = GaussianMixture([1.0], torch.zeros(1, 4).double(), 1.0)
    x = target.sample((4_000,), generator=seeded(0))
    scale = RatioScale((1 / 3, 1.0), (0.5, 0.5), (1.0, 1.0))
    for said, expected in ((1e-4, (0.9, 0.5)), (0.3, (0.9, 0.5)), (0.95, (1e-6, 1e-6))):
        out = math.log(math.expm1(2 * said)) - START  # twice the mean of 0.5
        head = RatioHead(functools.partial(constant, out), scale)
        fitted = fitted_floors(OcmMoments(target.denoiser(), head), x, scale, seed=0)
        assert fitted.floors == pytest.approx(expected, rel=0.13)  # ten floors a decade
        assert RatioScale(**fitted.to_json()) == fitted
        own = OcmMoments(target.denoiser(), RatioHead(head.network, fitted))
        for level in (NoiseLevel(sigma=1.0), NoiseLevel(alpha=0.5, sigma=0.5 / 3)):
            q = own(x[:3], level)
            variance = max(said, fitted.floor(level)) * level.variance
            torch.testing.assert_close(q.cov.diagonal(), torch.full_like(x[:3], variance))
            assert (q.repaired == float(fitted.floor(level) > said)).all()
            given = replace(own, floor=1e-6)(x[:3], level).cov.diagonal()
            torch.testing.assert_close(given, torch.full_like(given, said * level.variance))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1.0, 2.0), (1.0,), (1.0, 1.0)), "means"),
        (((2.0, 1.0), (1.0, 1.0), (1.0, 1.0)), "rising"),
        (((1.0,), (1.0,), (1.0,), 0.0), "data_std"),
    ],
)
def test_scales_that_cannot_be(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RatioScale(*arguments)
