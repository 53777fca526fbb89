"""Moment estimators against the exact posterior of a mixture, in float64."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracles import (
    IMAGE,
    NETWORK_KINDS,
    PLAIN,
    exact_networks,
    image_mixture,
    linear_denoiser,
    numbers,
    points,
)
from torch import Tensor

import mmdgs
from mmdgs import moments
from mmdgs.cost import counting
from mmdgs.linalg import operators
from mmdgs.linalg.operators import Dense, Diagonal
from mmdgs.moments.fitted import by_score
from mmdgs.moments.probes import Rademacher
from mmdgs.networks import MLP
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.targets import GaussianMixture

EXACT = {"rtol": 1e-8, "atol": 1e-8}
UNFLOORED = -math.inf  # a floor that repairs nothing, where the estimate itself is under test

fit_by_score = partial(mmdgs.IsotropicMoments.fit, variance_of=by_score)
"""The fit of the paper's formula."""

Target = tuple[GaussianMixture, tuple[int, ...]]


# --- exact estimators


@pytest.mark.parametrize("kind", NETWORK_KINDS)
def test_full_and_exact_diagonal_are_the_true_moments(
    kind: str, target: Target, level: NoiseLevel
) -> None:
    mixture, event = target
    denoiser = exact_networks(mixture)[kind]
    x_t = points(mixture, event, level, rows=5)
    exact = mixture.posterior(x_t, level)
    full = mmdgs.FullMoments(denoiser)(x_t, level)
    diagonal = mmdgs.DiagonalMoments(denoiser, probes=None)(x_t, level)
    true_diagonal = exact.covariance.diagonal(dim1=1, dim2=2).reshape(x_t.shape)
    for q in (full, diagonal):
        torch.testing.assert_close(q.mean, exact.mean, **EXACT)
        torch.testing.assert_close(q.cov.diagonal(), true_diagonal, **EXACT)
        assert q.repaired.tolist() == [0.0] * 5
    torch.testing.assert_close(full.cov.dense(), exact.covariance, **EXACT)
    assert isinstance(full.cov, Dense)
    assert isinstance(diagonal.cov, Diagonal)


def test_exact_moments(target: Target, level: NoiseLevel) -> None:
    mixture, event = target
    x_t = points(mixture, event, level, rows=5)
    q = mmdgs.moments.ExactMoments(mixture)(x_t, level)
    torch.testing.assert_close(q.mean, mixture.posterior(x_t, level).mean, **EXACT)
    torch.testing.assert_close(q.cov.dense(), mixture.posterior(x_t, level).covariance, **EXACT)


def test_learned_moments_read_the_network(target: Target, level: NoiseLevel) -> None:
    mixture, event = target
    x_t = points(mixture, event, level, rows=5)
    exact = mixture.posterior(x_t, level)
    variances = exact.covariance.diagonal(dim1=1, dim2=2).reshape(x_t.shape)

    def pair(x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        return mixture.posterior(x_t, level).mean, 0.5 * variances.log()

    for network in (pair, lambda x_t: torch.cat(pair(x_t, level), dim=1)):
        q = mmdgs.LearnedMoments(network)(x_t, level)
        torch.testing.assert_close(q.mean, exact.mean, **EXACT)
        torch.testing.assert_close(q.cov.diagonal(), variances, **EXACT)


# --- probes


@pytest.mark.parametrize("probes", [1, 3])
def test_probes_are_unbiased_and_vary_at_the_known_rate(
    probes: int, level: NoiseLevel, generator: torch.Generator
) -> None:
    """One probe gives v_j sum_i v_i J_ij = J_jj + sum_(i != j) v_i v_j J_ij.

    For a fixed j the products v_i v_j are uncorrelated signs, so the variance is sum_(i != j)
    J_ij^2 over column j; S probes divide it by S.
    """
    jacobian, n = numbers(4, 4), 40_000
    post = mmdgs.DiagonalMoments(
        linear_denoiser(jacobian), probes=probes, floor=UNFLOORED, design=Rademacher()
    )
    q = post(torch.zeros(n, 4, dtype=torch.float64), level, generator=generator)
    estimates = q.cov.diagonal() / level.tweedie
    variance = (jacobian.square().sum(0) - jacobian.diagonal().square()) / probes
    # Five standard errors. The variance's relative error is sqrt((kurtosis - 1) / n), and sums of
    # signs have a kurtosis of at most 3.
    error = (variance / n).sqrt()
    assert ((estimates.mean(0) - jacobian.diagonal()).abs() < 5 * error).all()
    torch.testing.assert_close(estimates.var(0), variance, rtol=5 * math.sqrt(2 / n), atol=0)


def test_as_many_probes_as_numbers_give_the_true_diagonal(
    target: Target, level: NoiseLevel, generator: torch.Generator
) -> None:
    mixture, event = target
    x_t, d = points(mixture, event, level, rows=2), math.prod(event)
    exact = mixture.posterior(x_t, level)
    post = mmdgs.DiagonalMoments(mixture.denoiser(), probes=d, floor=UNFLOORED)
    with counting() as cost:
        q = post(x_t, level, generator=generator)
    assert cost.products == d
    variances = exact.covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(q.cov.diagonal().flatten(1), variances, **EXACT)
    torch.testing.assert_close(q.mean, exact.mean, **EXACT)


# --- isotropic


def test_isotropic_variance_by_errors_is_the_same_number_from_fewer_points(
    skewed: GaussianMixture,
) -> None:
    """At high noise the paper's formula is a small difference of large numbers; errors are small
    themselves.
    """
    level, seeds = NoiseLevel(alpha=0.5, sigma=10.0), 12
    x_t = points(skewed, (3,), level, 40_000)
    exact = skewed.posterior(x_t, level).covariance.diagonal(dim1=1, dim2=2).mean().item()

    def spread(fit: Callable) -> float:
        variances = []
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            x = skewed.sample((2_000,), generator=generator)
            variances.append(fit(skewed.denoiser(), x, level, generator=generator).variances[level])
        std = torch.tensor(variances).std().item()
        assert sum(variances) / seeds == pytest.approx(exact, abs=5 * std / math.sqrt(seeds))
        return std

    by_errors = spread(mmdgs.IsotropicMoments.fit)
    assert by_errors < 0.05 * spread(fit_by_score)
    assert by_errors < 0.05 * exact


@pytest.mark.parametrize("kind", NETWORK_KINDS)
def test_isotropic_variance_is_exact_for_a_gaussian(
    kind: str, level: NoiseLevel, generator: torch.Generator
) -> None:
    # N(m, s^2 I) has posterior variance s^2 sigma^2 / (alpha^2 s^2 + sigma^2) everywhere.
    s, d = 0.8, math.prod(IMAGE)
    target = GaussianMixture([1.0], torch.full((1, d), 0.5, dtype=torch.float64), s)
    x = target.sample((20_000,), generator=generator).reshape(-1, *IMAGE)
    noisy = level.alpha**2 * s**2 + level.sigma**2
    other = NoiseLevel(sigma=2.0)
    post = mmdgs.IsotropicMoments.fit(
        exact_networks(target)[kind], x, [level, other], generator=generator
    )
    # A variance is a chi-square mean over 240,000 numbers; by the score it is sigma^4 / v times
    # one.
    relative = math.sqrt(2 / x.numel())
    exact, exact_other = s**2 * level.sigma**2 / noisy, s**2 * 4 / (s**2 + 4)
    assert post.variances[level] == pytest.approx(exact, rel=5 * relative)
    assert post.variances[other] == pytest.approx(exact_other, rel=5 * relative)
    paper = fit_by_score(exact_networks(target)[kind], x, level, generator=generator)
    error = level.sigma**4 / level.alpha**2 / noisy * relative
    assert paper.variances[level] == pytest.approx(exact, abs=5 * error)

    x_t = points(target, IMAGE, level, rows=3)
    q = post(x_t, level)
    torch.testing.assert_close(q.mean, target.posterior(x_t, level).mean, **EXACT)
    assert torch.equal(q.cov.diagonal(), torch.full_like(x_t, post.variances[level]))


def test_isotropic_variance_between_fitted_levels(caplog: pytest.LogCaptureFixture) -> None:
    # Of N(0, s^2 I) the exact variance s^2 r / (s^2 + r), r = (sigma / alpha)^2, is nearly straight
    # in logarithms.
    s2, knots = 0.64, [NoiseLevel(sigma=0.1 * 1.3**i) for i in range(12)]
    exact = {level: s2 * level.variance / (s2 + level.variance) for level in knots}
    table = LevelTable.of(exact, "variances were fitted at")
    post = mmdgs.IsotropicMoments(lambda x_t, level: 0 * x_t, table)
    x_t = torch.zeros(3, 2, dtype=torch.float64)
    for level in (NoiseLevel(0.15), NoiseLevel(1.1), NoiseLevel(alpha=0.5, sigma=0.2)):
        expected = torch.full_like(x_t, s2 * level.variance / (s2 + level.variance))
        torch.testing.assert_close(post(x_t, level).cov.diagonal(), expected, rtol=0.01, atol=0)
    assert not caplog.records
    for _ in range(2):
        assert post(x_t, NoiseLevel(sigma=5.0)).cov.diagonal()[0, 0] == exact[knots[-1]]
    assert len(caplog.records) == 1


def test_isotropic_floor_is_never_silent(
    level: NoiseLevel, generator: torch.Generator, caplog
) -> None:
    # A mean far from x_t implies a score so large that the variance comes out negative.
    denoiser = mmdgs.clean_denoiser(lambda x: x - 100.0)
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        post = fit_by_score(denoiser, torch.zeros(10, 2), level, generator=generator)
    assert post.variances[level] == pytest.approx(moments.FLOOR * level.variance)
    assert "lifted to the floor" in caplog.text
    assert (post(torch.zeros(3, 2), level).repaired == 1).all()


# --- robustness


def test_indefinite_jacobians_are_repaired_and_counted(
    level: NoiseLevel, generator: torch.Generator
) -> None:
    # A rotated Jacobian with eigenvalues 2, 1, 0 and -3: the last two are lifted to the floor, the
    # others kept. An antisymmetric part is no covariance, and is left out.
    rotation, _ = torch.linalg.qr(numbers(4, 4))
    skew = numbers(4, 4, seed=1)
    values = torch.tensor([2.0, 1.0, 0.0, -3.0], dtype=torch.float64)
    denoiser = linear_denoiser((rotation * values) @ rotation.mT + skew - skew.mT)
    q = mmdgs.FullMoments(denoiser, floor=1e-3)(numbers(3, 4), level)
    lifted = (level.tweedie * values).clamp(min=1e-3 * level.variance)
    expected = ((rotation * lifted) @ rotation.mT).expand(3, 4, 4)
    torch.testing.assert_close(q.cov.dense(), expected, **EXACT)
    assert q.repaired.tolist() == [0.5, 0.5, 0.5]
    assert torch.isfinite(q.log_prob(q.sample(generator=generator))).all()


def test_negative_variances_are_repaired_and_counted(
    level: NoiseLevel, generator: torch.Generator
) -> None:
    jacobian = torch.diag(torch.tensor([2.0, -1.0, 1.0, 0.5], dtype=torch.float64))
    expected = level.tweedie * jacobian.diagonal()
    # The one negative value is the size of the error: 0.75 of it is the floor, which 0.5 lies
    # below.
    floors = (None, 0.75 * level.tweedie, 0.5), (1e-6, 1e-6 * level.variance, 0.25)
    for probes in (None, 2):  # a diagonal Jacobian makes probes exact
        for floor, least, share in floors:
            post = mmdgs.DiagonalMoments(linear_denoiser(jacobian), probes=probes, floor=floor)
            q = post(numbers(3, 4), level, generator=generator)
            lifted = expected.clamp(min=least).expand(3, 4)
            torch.testing.assert_close(q.cov.diagonal(), lifted, **EXACT)
            assert q.repaired.tolist() == [share] * 3


# --- cost


class Counted:
    """A denoiser that counts its forward passes."""

    def __init__(self, denoiser: mmdgs.Denoiser) -> None:
        self.denoiser, self.calls = denoiser, 0

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        self.calls += 1
        return self.denoiser(x_t, level)


@pytest.mark.parametrize(
    "make",
    [mmdgs.FullMoments, *(partial(mmdgs.DiagonalMoments, probes=probes) for probes in (None, 10))],
    ids=["full", "diagonal", "10 probes"],
)
def test_one_forward_pass_and_the_same_numbers_however_products_are_grouped(
    make, level: NoiseLevel
) -> None:
    """Of 400 rows products go one by one, of 100 in chunks, and of 2 all at once."""
    counted = Counted(image_mixture().denoiser())
    x_t = points(image_mixture(), IMAGE, level, rows=400)
    whole = make(counted)(x_t, level, generator=Streams(0, 400)).cov.diagonal()
    assert counted.calls == 1
    for rows in (100, 2):
        part = make(counted)(x_t[:rows], level, generator=Streams(0, rows)).cov.diagonal()
        torch.testing.assert_close(part, whole[:rows], rtol=1e-10, atol=1e-10)


class Unbatchable(torch.autograd.Function):
    """x^3, with a backward pass that looks at its numbers and so cannot be batched."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2 if gradient.abs().sum().item() > 0 else torch.zeros_like(x)


@pytest.mark.parametrize("make", [mmdgs.FullMoments, partial(mmdgs.DiagonalMoments, probes=3)])
def test_products_one_by_one_where_they_cannot_be_batched(make, level: NoiseLevel, caplog) -> None:
    x_t = torch.linspace(0.5, 2, 6, dtype=torch.float64).reshape(2, 3)
    with caplog.at_level(logging.INFO, logger="mmdgs"):
        q = make(mmdgs.clean_denoiser(Unbatchable.apply))(x_t, level, generator=Streams(0, 2))
    assert "one by one" in caplog.text
    # The Jacobian is diagonal, so that all three estimators find diag(3 x^2).
    torch.testing.assert_close(q.cov.diagonal(), level.sigma**2 / level.alpha * 3 * x_t**2, **EXACT)


def test_a_covariance_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # 8 x 3072 x 3072 float32 numbers are 302 MB; four copies 1.2 GB.
    monkeypatch.setattr(operators, "available_memory", lambda device: 10**9)
    counted = Counted(linear_denoiser(torch.eye(3072)))
    with pytest.raises(mmdgs.errors.CovarianceTooLargeError) as caught:
        mmdgs.FullMoments(counted)(torch.zeros(8, 3, 32, 32), PLAIN)
    assert "1.2 GB" in str(caught.value)

    assert counted.calls == 0, "it must be refused before any work is done"


def test_a_covariance_that_takes_too_many_products_is_refused_unless_asked_for() -> None:
    x_t, calls = torch.zeros(3, 1, 10, 10), []

    def denoiser(x: Tensor, level: NoiseLevel) -> Tensor:
        calls.append(len(x))
        return 0.5 * x

    with pytest.raises(mmdgs.UsageError, match="most_products=300"):
        mmdgs.FullMoments(denoiser, most_products=299)(x_t, PLAIN)
    assert calls == [], "it is refused before any work"
    for most in (300, None):
        q = mmdgs.FullMoments(denoiser, most_products=most)(x_t, PLAIN)
        torch.testing.assert_close(q.cov.diagonal(), torch.full_like(x_t, 0.5 * PLAIN.tweedie))


@pytest.mark.parametrize("make", [mmdgs.FullMoments, partial(mmdgs.DiagonalMoments, probes=None)])
def test_closed_form_moments_are_those_by_products(
    make, level: NoiseLevel, generator: torch.Generator
) -> None:
    network = MLP(3, 2, width=16, depth=3, seed=1).double()
    x_t = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    closed = make(mmdgs.energy_denoiser(network))(x_t, level)
    # A function hides the network's closed form.
    products = make(mmdgs.energy_denoiser(lambda x: network(x)))(x_t, level)
    torch.testing.assert_close(closed.mean, products.mean, **EXACT)
    torch.testing.assert_close(closed.cov.dense(), products.cov.dense(), **EXACT)


class Scaled(MLP):
    """A perceptron with a forward pass of its own, which the inherited closed form knows nothing
    of.
    """

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


def test_a_closed_form_speaks_for_its_own_network_only(
    level: NoiseLevel, generator: torch.Generator
) -> None:
    denoiser = mmdgs.energy_denoiser(Scaled(3, 2, width=16, depth=2, seed=1).double())
    x_t = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        mmdgs.FullMoments(denoiser)(x_t, level).mean, denoiser(x_t, level), **EXACT
    )


@pytest.mark.parametrize("make", [mmdgs.FullMoments, partial(mmdgs.DiagonalMoments, probes=None)])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_covariance_that_is_not_finite_is_never_repaired(make, value: float) -> None:
    # The floor would hide minus infinity, so the rows are checked before anything is lifted to it.
    slope = torch.tensor([[1.0], [value], [0.5]], dtype=torch.float64)
    broken = mmdgs.clean_denoiser(lambda x: Slope.apply(x, slope))
    with pytest.raises(mmdgs.NonFiniteError, match="chain 1"):
        make(broken)(torch.ones(3, 2, dtype=torch.float64), NoiseLevel(sigma=0.5))


class Slope(torch.autograd.Function):
    """The identity, with a derivative that is said to be `slope`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient):
        # Not slope * gradient: zero times infinity would be NaN, and make every case the same.
        (slope,) = ctx.saved_tensors
        return torch.where(gradient == 0, 0.0, slope), None


def test_half_precision_has_full_covariances_too(generator: torch.Generator) -> None:
    x_t = torch.randn(4, 2, generator=generator)
    denoiser = mmdgs.score_denoiser(lambda x: -x / 2)
    q = mmdgs.FullMoments(denoiser)(x_t.bfloat16(), PLAIN)
    assert q.mean.dtype == torch.bfloat16
    exact = mmdgs.FullMoments(denoiser)(x_t, PLAIN).cov.dense()
    torch.testing.assert_close(q.cov.dense().float(), exact, rtol=2e-2, atol=2e-2)


def test_a_perceptrons_closed_form_under_autocast(generator: torch.Generator) -> None:
    post = mmdgs.FullMoments(mmdgs.energy_denoiser(MLP(2, 2, width=16, depth=2)))
    x_t = torch.randn(5, 2, generator=generator)
    plain = post(x_t, PLAIN)
    with torch.autocast("cpu", torch.bfloat16):
        q = post(x_t, PLAIN)
    torch.testing.assert_close(q.mean, plain.mean)
    torch.testing.assert_close(q.cov.diagonal(), plain.cov.diagonal())


def test_a_perceptron_of_another_width_is_explained() -> None:
    denoiser = mmdgs.energy_denoiser(MLP(2, 2, width=4))
    for estimate in (denoiser, mmdgs.FullMoments(denoiser)):
        with pytest.raises(ValueError, match=r"\(4, 3\)"):
            estimate(torch.zeros(4, 3), PLAIN)
