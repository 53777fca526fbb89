"""Optimal covariance matching against exact posteriors: targets, their loss and its minimum, heads and their scale."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace

import pytest
import torch
from oracles import IMAGE, PLAIN, SCALED, TARGETS, gaussian_target, linear_denoiser, points
from torch import Tensor

import mmdgs
from mmdgs import losses
from mmdgs.cost import counting
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics import compare_diagonals, relative_error
from mmdgs.moments.calibrated import fitted_floors
from mmdgs.moments.ocm import START, OcmMoments, RatioHead, RatioScale, ratio_target, unbiased_design
from mmdgs.moments.probes import Lattice, Rademacher
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
    """Whether means over the first dimension are as expected, each within so many standard errors."""
    off = (values.mean(0) - expected).abs() / (values.std(0) / math.sqrt(len(values)))
    return bool((off < errors).all())


# --- targets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probes", [1, 3])
def test_targets_are_unbiased_for_the_true_ratio(probes: int, target: Target, level: NoiseLevel) -> None:
    mixture, event = target
    x_t = points(mixture, event, level, rows=1).expand(4_000, *event)
    mean, y = ratio_target(mixture.denoiser(), x_t, level, generator=seeded(1), probes=probes)
    torch.testing.assert_close(mean[:1], mixture.posterior(x_t[:1], level).mean, **EXACT)
    # A lattice with a class of its own for every pixel has no noise at all: five standard errors, or rounding.
    exact = exact_ratio(mixture, x_t[:1], level)[0]
    assert ((y.mean(0) - exact).abs() < 5 * y.std(0) / math.sqrt(len(y)) + 1e-9).all()


def test_images_have_unfiltered_lattices_and_points_signs() -> None:
    assert unbiased_design(torch.zeros(1, *IMAGE)) == Lattice(smooth=False)
    assert unbiased_design(torch.zeros(1, 3)) == Rademacher()


def test_targets_are_in_full_precision_whatever_is_around_them() -> None:
    network = MLP(2, 2, width=16, depth=1, seed=0)
    denoiser = mmdgs.score_denoiser(network)
    x_t = torch.randn(5, 2, generator=seeded(0))
    plain = ratio_target(denoiser, x_t, PLAIN, generator=seeded(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert denoiser(x_t, PLAIN).sub(plain[0]).abs().max() > 1e-4  # bf16 does make a difference here
        inside = ratio_target(denoiser, x_t, PLAIN, generator=seeded(1))
    for a, b in zip(plain, inside, strict=True):
        assert torch.equal(a, b)


# --- the loss ---------------------------------------------------------------------------------------------------


def test_the_loss_is_its_formula(target: Target, level: NoiseLevel, generator: torch.Generator) -> None:
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
    # E[loss(h)] = const + E |h - r|^2: the slope along any shift is zero at r, and another head lies above it by its
    # distance. Each mean within five standard errors.
    x = skewed.sample((20_000,), generator=generator)

    def loss(head) -> Tensor:
        return losses.ocm(head, skewed.denoiser(), x, level, generator=seeded(3))

    def oracle(x_t: Tensor, mean: Tensor, level: NoiseLevel) -> Tensor:
        return exact_ratio(skewed, x_t, level)

    x_t = add_noise(x, level, generator=seeded(3))
    least = loss(oracle)
    for shift in (lambda x: 0.1 * torch.sin(x), lambda x: -0.05 * x, lambda x: torch.full_like(x, 0.1)):
        above = loss(lambda x_t, mean, level, shift=shift: oracle(x_t, mean, level) + shift(x_t)) - least
        below = loss(lambda x_t, mean, level, shift=shift: oracle(x_t, mean, level) - shift(x_t)) - least
        assert within((above - below) / 2, 0.0)
        torch.testing.assert_close((above + below) / 2, shift(x_t).square().sum(1), **EXACT)


def test_the_true_minimum_is_told_from_a_wrong_one(skewed: GaussianMixture, level: NoiseLevel) -> None:
    # The same slope a tenth beside the exact diagonal is not zero: the test above can fail.
    x = skewed.sample((20_000,), generator=seeded(0))
    theta = torch.zeros(len(x), 1, dtype=x.dtype, requires_grad=True)

    def head(x_t: Tensor, mean: Tensor, level: NoiseLevel) -> Tensor:
        return 1.1 * exact_ratio(skewed, x_t, level) + theta

    losses.ocm(head, skewed.denoiser(), x, level, generator=seeded(3)).sum().backward()
    assert not within(theta.grad, 0.0)


def test_a_level_for_each_row_is_the_loop_over_rows() -> None:
    # Networks' denoisers take rows of levels; a row's noise and probes come from its own stream.
    denoiser = mmdgs.noise_denoiser(MLP(3, 3, width=8, depth=1, conditional=True, seed=1).double())
    scale = RatioScale((0.1, 1.0, 3.0), (0.9, 0.5, 0.1), (1.0, 2.0, 3.0), 0.7)
    head = RatioHead(MLP(6, 3, width=8, depth=1, conditional=True, seed=2).double(), scale)
    x = torch.randn(3, 3, generator=seeded(0), dtype=torch.float64)
    levels = [PLAIN, SCALED, NoiseLevel(alpha=0.3, sigma=0.9)]
    together = losses.ocm(
        head, denoiser, x, NoiseLevels.of(levels, x), generator=Streams(5, 3), probes=2, weight=scale.weight
    )
    apart = [
        losses.ocm(head, denoiser, x[i : i + 1], one, generator=Streams(5, 1, i), probes=2, weight=scale.weight)
        for i, one in enumerate(levels)
    ]
    torch.testing.assert_close(together, torch.cat(apart), **EXACT)


def test_gradients_go_into_the_head_alone() -> None:
    network, own = MLP(2, 2, width=8, depth=1, seed=0), MLP(4, 2, width=8, depth=1, seed=1)
    head = RatioHead(own, RatioScale((0.5,), (0.3,), (1.0,)))
    x = torch.randn(4, 2, generator=seeded(0))
    losses.ocm(head, mmdgs.energy_denoiser(network), x, PLAIN, generator=seeded(1)).sum().backward()
    assert all(p.grad is None for p in network.parameters())
    assert all(p.grad is not None for p in own.parameters())


def test_a_head_learns_the_constant_diagonal_of_a_gaussian() -> None:
    # A Gaussian's denoiser is linear, its posterior covariance (C^-1 + alpha^2 / sigma^2)^-1 at every x_t. 400 steps of
    # one probe come within 2% of it; the start, the mean over coordinates, is 30% off.
    mixture, level = gaussian_target(), SCALED
    covariance = mixture.covariances[0]
    precision = torch.linalg.inv(covariance) + level.alpha**2 / level.sigma**2 * torch.eye(3, dtype=torch.float64)
    exact = torch.linalg.inv(precision).diagonal() / level.variance
    x = mixture.sample((5_000,), generator=seeded(0))
    scale = RatioScale.fit(mixture.denoiser(), x[:200], [level], seed=0, probes=4)
    network = MLP(6, 3, width=16, depth=1, seed=0).double()
    head = RatioHead(network, scale)
    x_t = add_noise(x[:1000], level, generator=seeded(9))

    def error() -> float:
        with torch.no_grad():
            found = OcmMoments(mixture.denoiser(), head)(x_t, level).cov.diagonal() / level.variance
        return ((found - exact).norm(dim=1) / exact.norm()).mean().item()

    def loss(x: Tensor, generator: torch.Generator) -> Tensor:
        return losses.ocm(head, mixture.denoiser(), x, level, generator=generator, weight=scale.weight)

    assert error() > 0.1
    train(network, loss, x, TrainingSettings(steps=400, batch_size=200, learning_rate=1e-2, decay=True), progress=None)
    assert error() < 0.02


# --- the estimator ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_with_an_oracle_for_a_head_it_is_the_exact_diagonal(name: str, level: NoiseLevel) -> None:
    make, event = TARGETS[name]
    mixture = make()
    x_t = points(mixture, event, level, rows=5)
    moments = OcmMoments(mixture.denoiser(), lambda x_t, mean, level: exact_ratio(mixture, x_t, level))
    with counting() as cost:
        q = moments(x_t, level)
    exact = mmdgs.DiagonalMoments(mixture.denoiser(), probes=None)(x_t, level)
    torch.testing.assert_close(q.mean, exact.mean, **EXACT)
    torch.testing.assert_close(q.cov.diagonal(), exact.cov.diagonal(), **EXACT)
    assert isinstance(q.cov, Diagonal)
    assert q.repaired.tolist() == [0.0] * 5
    assert (cost.forwards, cost.products) == (2, 0)  # the denoiser and the head


def test_a_head_sees_the_noisy_and_the_denoised(level: NoiseLevel) -> None:
    seen = {}

    def head(x_t: Tensor, mean: Tensor, level: NoiseLevel) -> Tensor:
        seen.update(x_t=x_t, mean=mean, level=level)
        return torch.ones_like(x_t)

    x_t = torch.randn(3, 2, generator=seeded(0), dtype=torch.float64)
    q = OcmMoments(linear_denoiser(0.5 * torch.eye(2, dtype=torch.float64)), head)(x_t, level)
    assert torch.equal(seen["x_t"], x_t)
    torch.testing.assert_close(seen["mean"], 0.5 * x_t)
    assert seen["level"] == level
    torch.testing.assert_close(q.cov.diagonal(), torch.full_like(x_t, level.variance))


def test_variances_are_floored_and_counted(level: NoiseLevel) -> None:
    ratios = torch.tensor([[0.5, -1.0], [0.0, 1e-9]], dtype=torch.float64)
    x_t = torch.zeros(2, 2, dtype=torch.float64)
    q = OcmMoments(linear_denoiser(torch.eye(2, dtype=torch.float64)), lambda x_t, mean, level: ratios)(x_t, level)
    expected = torch.tensor([[0.75, 0.75], [1e-6, 1e-6]], dtype=torch.float64) * level.variance
    torch.testing.assert_close(q.cov.diagonal(), expected)
    assert q.repaired.tolist() == [1.0, 1.0]


def test_heads_that_cannot_be() -> None:
    denoiser, x_t = linear_denoiser(torch.eye(2)), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"the head must return its input's shape \(3, 2\), got \(3, 1\)"):
        OcmMoments(denoiser, lambda x_t, mean, level: x_t[:, :1])(x_t, PLAIN)
    with pytest.raises(mmdgs.NonFiniteError, match="covariance"):
        OcmMoments(denoiser, lambda x_t, mean, level: x_t / 0)(x_t, PLAIN)
    head = RatioHead(MLP(4, 3, width=4, depth=1), RatioScale((0.5,), (1.0,), (1.0,)))
    with pytest.raises(ValueError, match=r"must return the data's shape \(3, 2\), got \(3, 3\)"):
        OcmMoments(denoiser, head)(x_t, PLAIN)


# --- heads and their scale --------------------------------------------------------------------------------------


def test_a_network_of_zeros_is_the_mean_ratio_of_the_level() -> None:
    scale = RatioScale((0.1, 1.0, 10.0), (0.9, 0.4, 0.01), (1.0, 2.0, 4.0), 0.5)
    head = RatioHead(lambda inputs: torch.zeros_like(inputs[:, :2]), scale)
    x_t = torch.randn(3, 2, generator=seeded(0), dtype=torch.float64)
    for ratio, mean in (
        (0.1, 0.9),
        (1.0, 0.4),
        (10.0, 0.01),
        (0.01, 0.9),
        (1e3, 0.01),
        (math.sqrt(10.0), 0.2 / 10**0.5),
    ):
        found = head(x_t, x_t, NoiseLevel(alpha=0.5, sigma=0.5 * ratio))
        torch.testing.assert_close(found, torch.full_like(x_t, mean))
    assert scale.weight(NoiseLevel(sigma=1.0)) == pytest.approx(1 / 4)


def test_a_head_depends_on_the_ratio_of_the_level_alone() -> None:
    # The same problem rescaled: x_t and sigma times c, alpha times c.
    network = MLP(4, 2, width=8, depth=1, conditional=True, seed=0).double()
    head = RatioHead(network, RatioScale((0.1, 3.0), (0.9, 0.1), (1.0, 1.0), 0.5))
    x_t, mean = torch.randn(2, 5, 2, generator=seeded(0), dtype=torch.float64)
    one = head(x_t, mean, NoiseLevel(alpha=1.0, sigma=0.8))
    other = head(0.3 * x_t, mean, NoiseLevel(alpha=0.3, sigma=0.24))
    torch.testing.assert_close(one, other, **EXACT)
    assert (one > 0).all()


@pytest.mark.slow
def test_the_scale_is_measured() -> None:
    # E r and E y^2 of one Gaussian, known in closed form: of one probe y has the variance alpha^2 sum_(j != i) J_ij^2.
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


def test_a_scale_comes_back_from_json() -> None:
    for floors in ((), (1e-3, 1e-2)):
        scale = RatioScale((0.1, 1.0), (0.9, 0.4), (1.0, 2.0), 0.5, floors)
        assert RatioScale(**json.loads(json.dumps(scale.to_json()))) == scale


def constant(value: float, inputs: Tensor) -> Tensor:
    return torch.full_like(inputs[:, :4], value)


def test_a_finished_head_is_lifted_to_the_errors_of_its_denoiser() -> None:
    """Errors of variance 0.5 at sigma 1 and 0.1 at 1/3, where heads say less or more: less is lifted."""
    target = GaussianMixture(torch.ones(1).double(), torch.zeros(1, 4).double(), torch.eye(4).double()[None])
    x = target.sample((4_000,), generator=seeded(0))
    scale = RatioScale((1 / 3, 1.0), (0.5, 0.5), (1.0, 1.0))
    for said, expected in ((1e-4, (0.9, 0.5)), (0.3, (0.9, 0.5)), (0.95, (1e-6, 1e-6))):
        out = math.log(math.expm1(2 * said)) - START  # twice the mean of 0.5
        head = RatioHead(functools.partial(constant, out), scale)
        found = fitted_floors(OcmMoments(target.denoiser(), head), x, scale, seed=0)
        assert found.floors == pytest.approx(expected, rel=0.13)  # ten floors a decade
        assert RatioScale(**found.to_json()) == found
        own = OcmMoments(target.denoiser(), RatioHead(head.network, found))
        for level in (NoiseLevel(sigma=1.0), NoiseLevel(alpha=0.5, sigma=0.5 / 3)):
            q = own(x[:3], level)
            wanted = max(said, found.floor(level)) * level.variance
            torch.testing.assert_close(q.cov.diagonal(), torch.full_like(x[:3], wanted))
            assert (q.repaired == float(found.floor(level) > said)).all()
            given = replace(own, floor=1e-6)(x[:3], level).cov.diagonal()
            torch.testing.assert_close(given, torch.full_like(given, said * level.variance))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (), ()), "ratios must be positive numbers"),
        (((1.0, 2.0), (1.0,), (1.0, 1.0)), "means must be positive numbers, one for each of 2 levels"),
        (((1.0,), (-1.0,), (1.0,)), "means must be positive"),
        (((2.0, 1.0), (1.0, 1.0), (1.0, 1.0)), "rise from one to the next"),
        (((1.0,), (1.0,), (1.0,), 1.0, (1.0, 2.0)), "floors must be positive numbers, one for each of 1 levels"),
        (((1.0,), (1.0,), (1.0,), 0.0), "data_std must be positive and finite, got 0.0"),
    ],
    ids=["none", "too few", "negative", "order", "floors", "no spread"],
)
def test_scales_that_cannot_be(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RatioScale(*arguments)


# --- comparisons ------------------------------------------------------------------------------------------------


def test_the_error_without_the_exact_diagonal_is_the_error() -> None:
    # Two estimates with noise of standard deviation 1 about v*: within 1% over 400,000 numbers.
    v, exact, one, two = torch.randn(4, 4_000, 100, generator=seeded(0), dtype=torch.float64)
    exact, v = 2 + 0.5 * exact, 2 + 0.3 * v
    expected = ((v - exact).norm() / exact.norm()).item()
    assert relative_error(v, exact + one, exact + two)[0] == pytest.approx(expected, rel=0.01)
    assert relative_error(v, exact, exact)[0] == pytest.approx(expected, rel=1e-12)
    assert math.isnan(relative_error(v, one - one, two)[0])
    # Of v* itself products of independent noise of variance 1 are left, about zero with the standard error n^(-1/2).
    found, resolution = relative_error(exact, exact + one, exact + two)
    assert resolution == pytest.approx(400_000**-0.25 / exact.square().mean().sqrt().item(), rel=0.05)
    assert found < 2.5 * resolution


@pytest.mark.slow
def test_estimators_side_by_side(skewed: GaussianMixture) -> None:
    # Of a mixture with correlations: the exact diagonal has no error and fits; probes have the error of their number; a
    # variance four times too large has the error 3 and z^2 = 1/4.
    level, mixture = PLAIN, skewed
    x = mixture.sample((4_000,), generator=seeded(0))
    oracle = OcmMoments(mixture.denoiser(), lambda x_t, mean, level: exact_ratio(mixture, x_t, level))
    wide = OcmMoments(mixture.denoiser(), lambda x_t, mean, level: 4 * exact_ratio(mixture, x_t, level))
    probed = mmdgs.DiagonalMoments(mixture.denoiser(), probes=2, floor=-math.inf)
    estimators = {"oracle": oracle, "wide": wide, "probed": probed}
    found = compare_diagonals(estimators, mixture.denoiser(), x, level, seed=3, reference_probes=1)
    assert found["oracle"].error < 0.1  # a third of what one product is off by
    assert found["wide"].error == pytest.approx(3, rel=0.02)
    assert found["oracle"].calibration.variance == pytest.approx(1, rel=0.1)
    assert found["wide"].calibration.variance == pytest.approx(found["oracle"].calibration.variance / 4, rel=1e-6)
    assert found["oracle"].calibration.nll < found["wide"].calibration.nll
    assert found["oracle"].resolution < 0.1
    # A mean that is off by 10 where the variances of one coordinate are tiny: floor and scale are those of that error.
    far = mmdgs.clean_denoiser(lambda x_t: 0 * x_t + 10)
    sure = OcmMoments(far, lambda x_t, mean, level: torch.tensor([1e-3, 1e4, 1e4], dtype=x_t.dtype).expand_as(x_t))
    lifted = compare_diagonals({"sure": sure}, mixture.denoiser(), x, level, seed=3)["sure"]
    assert lifted.calibration.variance > 1e4
    assert lifted.fitted.variance == pytest.approx(1, rel=0.1)
    x_t = add_noise(x, level, generator=Streams(3, len(x)))
    covariance = mixture.posterior(x_t, level).covariance
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    off = (covariance.square().sum((1, 2)) - diagonal.square().sum(1)).mean() / 2
    assert found["probed"].error == pytest.approx((off / diagonal.square().sum(1).mean()).sqrt().item(), rel=0.1)
    assert (found["probed"].cost.forwards, found["probed"].cost.products) == (1, 2)
    assert (found["oracle"].cost.forwards, found["oracle"].cost.products) == (2, 0)
