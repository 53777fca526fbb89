"""Moment estimators against the exact posterior of a mixture, in float64."""

from __future__ import annotations

import logging
import math
from functools import partial

import pytest
import torch
from oracles import IMAGE, NETWORK_KINDS, PLAIN, exact_networks, linear_denoiser, points
from torch import Tensor

import mmdgs
from mmdgs import jacobians, moments
from mmdgs.cost import counting
from mmdgs.linalg import operators
from mmdgs.linalg.operators import Dense, Diagonal
from mmdgs.moments import contract
from mmdgs.moments.isotropic import by_score
from mmdgs.networks import MLP
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.targets import GaussianMixture

EXACT = {"rtol": 1e-8, "atol": 1e-8}
UNFLOORED = -math.inf  # a floor that repairs nothing, where the estimate itself is under test

fit_by_score = partial(mmdgs.IsotropicMoments.fit, variance_of=by_score)
"""The fit of the paper's formula."""

Target = tuple[GaussianMixture, tuple[int, ...]]


# --- exact estimators -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NETWORK_KINDS)
def test_full_and_exact_diagonal_are_the_true_moments(kind: str, target: Target, level: NoiseLevel) -> None:
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
        assert q.repaired.tolist() == [0.0] * 5  # the covariance of a true posterior needs no repair
    torch.testing.assert_close(full.cov.dense(), exact.covariance, **EXACT)
    assert isinstance(full.cov, Dense)
    assert isinstance(diagonal.cov, Diagonal)


def test_exact_moments(target: Target, level: NoiseLevel) -> None:
    mixture, event = target
    x_t = points(mixture, event, level, rows=5)
    q = mmdgs.ExactMoments(mixture)(x_t, level)
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


def test_results_hold_no_graph(skewed: GaussianMixture, level: NoiseLevel, generator: torch.Generator) -> None:
    # A chain that kept the graph of every step would grow without end.
    x_t = points(skewed, (3,), level, rows=2)
    for post in (
        mmdgs.FullMoments(skewed.denoiser()),
        mmdgs.DiagonalMoments(skewed.denoiser(), probes=None),
        mmdgs.DiagonalMoments(skewed.denoiser(), probes=2),
    ):
        q = post(x_t, level, generator=generator)
        assert not q.mean.requires_grad
        assert not q.cov.diagonal().requires_grad
        assert not x_t.requires_grad


# --- probes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probes", [1, 3])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_probes_are_unbiased_and_vary_at_the_known_rate(
    probes: int, symmetric: bool, level: NoiseLevel, generator: torch.Generator
) -> None:
    """One probe gives v_j sum_i v_i J_ij = J_jj + sum_(i != j) v_i v_j J_ij.

    For a fixed j the products v_i v_j are uncorrelated signs, so the variance is sum_(i != j) J_ij^2 over column
    j; S probes divide it by S.
    """
    jacobian = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    if symmetric:
        jacobian = jacobian + jacobian.mT
    n = 40_000
    x_t = torch.zeros(n, 4, dtype=torch.float64)
    design = mmdgs.Rademacher()
    post = mmdgs.DiagonalMoments(linear_denoiser(jacobian), probes=probes, floor=UNFLOORED, design=design)
    estimates = post(x_t, level, generator=generator).cov.diagonal() / (level.sigma**2 / level.alpha)
    expected_variance = (jacobian.square().sum(0) - jacobian.diagonal().square()) / probes
    # Five standard errors. The variance's relative error is sqrt((kurtosis - 1) / n), and sums of signs have a
    # kurtosis of at most 3.
    error = (expected_variance / n).sqrt()
    assert ((estimates.mean(0) - jacobian.diagonal()).abs() < 5 * error).all()
    torch.testing.assert_close(estimates.var(0), expected_variance, rtol=5 * math.sqrt(2 / n), atol=0)


def test_as_many_probes_as_numbers_give_the_true_diagonal(
    target: Target, level: NoiseLevel, generator: torch.Generator
) -> None:
    mixture, event = target
    x_t = points(mixture, event, level, rows=2)
    covariance = mixture.posterior(x_t, level).covariance
    d = math.prod(event)
    with counting() as cost:
        q = mmdgs.DiagonalMoments(mixture.denoiser(), probes=d, floor=UNFLOORED)(x_t, level, generator=generator)
    torch.testing.assert_close(q.cov.diagonal().flatten(1), covariance.diagonal(dim1=1, dim2=2), **EXACT)
    assert cost.products == d
    torch.testing.assert_close(q.mean, mixture.posterior(x_t, level).mean, **EXACT)


def test_a_row_draws_its_own_probes(skewed: GaussianMixture, level: NoiseLevel) -> None:
    x_t = points(skewed, (3,), level, rows=5)
    post = mmdgs.DiagonalMoments(skewed.denoiser(), probes=3)
    together = post(x_t, level, generator=mmdgs.Streams(1, 5)).cov.diagonal()
    alone = post(x_t[2:3], level, generator=mmdgs.Streams(1, 1, first_row=2)).cov.diagonal()
    torch.testing.assert_close(alone, together[2:3], **EXACT)


# --- isotropic --------------------------------------------------------------------------------------------------


def test_isotropic_variance_is_the_mean_posterior_variance(paper: GaussianMixture, level: NoiseLevel) -> None:
    # E over x_t of trace Cov[x | x_t] / d, by quadrature: a grid 0.05 apart is exact for widths above 0.2.
    axis = torch.arange(-6, 6, 0.05, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    weight = paper.noised(level).log_prob(grid).exp() * 0.05**2
    traces = paper.posterior(grid, level).covariance.diagonal(dim1=1, dim2=2).mean(1)
    expected = (weight * traces).sum().item()

    generator = torch.Generator().manual_seed(0)
    x = paper.sample((50_000,), generator=generator)
    fitted = fit_by_score(paper.denoiser(), x, level, generator=generator).variances[level]
    # What is averaged is (sigma^2 / alpha)^2 |score|^2 / d; its spread over the same law gives the error.
    terms = (level.sigma**2 / level.alpha) ** 2 * paper.noised(level).score(points(paper, (2,), level, 50_000)).square()
    error = terms.mean(1).std().item() / math.sqrt(len(x))
    assert abs(fitted - expected) < 5 * error
    assert error < 0.01 * expected, "too noisy for the check to mean anything"


def test_isotropic_variance_of_the_paper(paper: GaussianMixture, generator: torch.Generator) -> None:
    # Published for the true density at sigma = 0.2: 0.02014; 200,000 points leave an error of about 5e-5.
    level = NoiseLevel(sigma=0.2)
    x = paper.sample((200_000,), generator=generator)
    post = fit_by_score(paper.denoiser(), x, level, generator=generator)
    assert post.variances[level] == pytest.approx(0.02014, abs=2.5e-4)


def test_isotropic_variance_by_errors_is_the_same_number_from_fewer_points(skewed: GaussianMixture) -> None:
    """At high noise the paper's formula is a small difference of large numbers; the errors are small themselves."""
    level = NoiseLevel(alpha=0.5, sigma=10.0)
    x_t = points(skewed, (3,), level, 200_000)
    exact = skewed.posterior(x_t, level).covariance.diagonal(dim1=1, dim2=2).mean().item()
    spread = {}
    for fit in (mmdgs.IsotropicMoments.fit, fit_by_score):
        found = []
        for seed in range(12):
            generator = torch.Generator().manual_seed(seed)
            x = skewed.sample((2_000,), generator=generator)
            found.append(fit(skewed.denoiser(), x, level, generator=generator).variances[level])
        values = torch.tensor(found)
        spread[fit] = values.std().item()
        assert values.mean().item() == pytest.approx(exact, abs=5 * spread[fit] / math.sqrt(12))
    by_errors, by_the_score = spread.values()
    assert by_errors < 0.05 * by_the_score
    assert by_errors < 0.05 * exact


@pytest.mark.parametrize("kind", NETWORK_KINDS)
def test_isotropic_variance_is_exact_for_a_gaussian(kind: str, level: NoiseLevel, generator: torch.Generator) -> None:
    # N(m, s^2 I) has posterior variance s^2 sigma^2 / (alpha^2 s^2 + sigma^2) everywhere.
    s, d = 0.8, math.prod(IMAGE)
    target = GaussianMixture([1.0], torch.full((1, d), 0.5, dtype=torch.float64), s)
    x = target.sample((20_000,), generator=generator).reshape(-1, *IMAGE)
    noisy = level.alpha**2 * s**2 + level.sigma**2
    other = NoiseLevel(sigma=2.0)
    post = mmdgs.IsotropicMoments.fit(exact_networks(target)[kind], x, [level, other], generator=generator)
    # A variance is a chi-square mean over 240,000 numbers; by the score it is sigma^4 / v times one.
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
    # Of N(0, s^2 I) the exact variance s^2 r / (s^2 + r), r = (sigma / alpha)^2, is nearly straight in logarithms.
    s2, knots = 0.64, [NoiseLevel(sigma=0.1 * 1.3**i) for i in range(12)]
    exact = {level: s2 * level.variance / (s2 + level.variance) for level in knots}
    post = mmdgs.IsotropicMoments(lambda x_t, level: 0 * x_t, LevelTable.of(exact, "variances were fitted at"))
    x_t = torch.zeros(3, 2, dtype=torch.float64)
    for ratio in (0.1, 0.15, 0.4, 1.1):
        for level in (NoiseLevel(sigma=ratio), NoiseLevel(alpha=0.5, sigma=0.5 * ratio)):
            expected = s2 * ratio**2 / (s2 + ratio**2)
            found = post(x_t, level).cov.diagonal()
            torch.testing.assert_close(found, torch.full_like(x_t, expected), rtol=0.01, atol=0)
    assert not caplog.records
    for _ in range(2):
        assert post(x_t, NoiseLevel(sigma=5.0)).cov.diagonal()[0, 0] == exact[knots[-1]]
    assert [record.message for record in caplog.records] == [
        "sigma / alpha of 5 lies outside what variances were fitted at, 0.1 to 1.792"
    ]


def test_isotropic_fit_does_not_depend_on_its_batches(
    skewed: GaussianMixture, level: NoiseLevel, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = skewed.sample((1000,), generator=generator)
    fits = []
    for rows in (4096, 7):
        monkeypatch.setattr(contract, "FIT_ROWS", rows)
        seeded = torch.Generator().manual_seed(1)
        fits.append(mmdgs.IsotropicMoments.fit(skewed.denoiser(), x, level, generator=seeded).variances[level])
    assert fits[0] == pytest.approx(fits[1], rel=1e-12)


def test_isotropic_floor_is_never_silent(level: NoiseLevel, generator: torch.Generator, caplog) -> None:
    # A mean far from x_t implies a score so large that the variance comes out negative.
    denoiser = mmdgs.clean_denoiser(lambda x: x - 100.0)
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        post = fit_by_score(denoiser, torch.zeros(10, 2), level, generator=generator)
    assert post.variances[level] == pytest.approx(moments.FLOOR * level.variance)
    assert "lifted to the floor" in caplog.text


# --- robustness -------------------------------------------------------------------------------------------------


def test_asymmetric_jacobians_are_symmetrised(level: NoiseLevel, generator: torch.Generator) -> None:
    a = torch.randn(3, 3, generator=generator, dtype=torch.float64) + 5 * torch.eye(3, dtype=torch.float64)
    x_t = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    q = mmdgs.FullMoments(linear_denoiser(a))(x_t, level)
    expected = level.sigma**2 / level.alpha * (a + a.mT) / 2
    torch.testing.assert_close(q.cov.dense(), expected.expand(2, 3, 3), **EXACT)
    assert q.repaired.tolist() == [0.0, 0.0]


def test_indefinite_jacobians_are_repaired_and_counted(level: NoiseLevel, generator: torch.Generator) -> None:
    # A rotated Jacobian with eigenvalues 2, 1, 0 and -3: the last two are lifted to the floor, the others kept.
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))
    values = torch.tensor([2.0, 1.0, 0.0, -3.0], dtype=torch.float64)
    jacobian = (rotation * values) @ rotation.mT
    floor = 1e-3
    x_t = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    q = mmdgs.FullMoments(linear_denoiser(jacobian), floor=floor)(x_t, level)
    lifted = (level.sigma**2 / level.alpha * values).clamp(min=floor * (level.sigma / level.alpha) ** 2)
    torch.testing.assert_close(q.cov.dense(), ((rotation * lifted) @ rotation.mT).expand(3, 4, 4), **EXACT)
    assert q.repaired.tolist() == [0.5, 0.5, 0.5]
    assert torch.isfinite(q.log_prob(q.sample(generator=generator))).all()


def test_negative_variances_are_repaired_and_counted(level: NoiseLevel, generator: torch.Generator) -> None:
    jacobian = torch.diag(torch.tensor([2.0, -1.0, 1.0, 0.5], dtype=torch.float64))
    x_t = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    for probes in (None, 2):  # a diagonal Jacobian makes probes exact
        expected = level.sigma**2 / level.alpha * jacobian.diagonal()
        # The one negative value is the size of the error: 0.75 of it is the floor, which 0.5 lies below.
        for floor, least, share in ((None, 0.75 * -expected[1].item(), 0.5), (1e-6, 1e-6 * level.variance, 0.25)):
            post = mmdgs.DiagonalMoments(linear_denoiser(jacobian), probes=probes, floor=floor)
            q = post(x_t, level, generator=generator)
            torch.testing.assert_close(q.cov.diagonal(), expected.clamp(min=least).expand(3, 4), **EXACT)
            assert q.repaired.tolist() == [share] * 3


def test_an_independent_output_has_no_variance(level: NoiseLevel) -> None:
    # Where the mean does not depend on a coordinate at all autograd gives no gradient; it counts as zero.
    half = mmdgs.clean_denoiser(lambda x: torch.cat([x[:, :1], torch.ones_like(x[:, 1:])], dim=1))
    q = mmdgs.FullMoments(half)(torch.zeros(2, 2, dtype=torch.float64), level)
    assert q.repaired.tolist() == [0.5, 0.5]


# --- cost -------------------------------------------------------------------------------------------------------


class Counted:
    """A denoiser that counts its forward passes."""

    def __init__(self, denoiser: mmdgs.Denoiser) -> None:
        self.denoiser, self.calls = denoiser, 0

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        self.calls += 1
        return self.denoiser(x_t, level)


@pytest.mark.parametrize("budget", [1, 1 << 12, 1 << 22], ids=["one by one", "in chunks", "at once"])
@pytest.mark.parametrize(
    "make",
    [
        mmdgs.FullMoments,
        *(lambda den, probes=probes: mmdgs.DiagonalMoments(den, probes=probes) for probes in (None, 1, 10, 100)),
    ],
    ids=["full", "diagonal", "1 probe", "10 probes", "100 probes"],
)
def test_one_forward_pass_and_the_same_numbers_however_products_are_grouped(
    make, budget: int, target: Target, level: NoiseLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, event = target
    x_t = points(mixture, event, level, rows=30)
    once = make(mixture.denoiser())(x_t, level, generator=mmdgs.Streams(0, 30))
    monkeypatch.setattr(jacobians, "CPU_NUMBERS", budget)
    counted = Counted(mixture.denoiser())
    q = make(counted)(x_t, level, generator=mmdgs.Streams(0, 30))
    assert counted.calls == 1
    torch.testing.assert_close(q.cov.diagonal(), once.cov.diagonal(), rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize(
    "make",
    [
        mmdgs.FullMoments,
        lambda den: mmdgs.DiagonalMoments(den, probes=None),
        lambda den: mmdgs.DiagonalMoments(den, probes=3),
    ],
    ids=["full", "diagonal", "probes"],
)
def test_products_one_by_one_where_they_cannot_be_batched(make, level: NoiseLevel, caplog) -> None:
    x_t = torch.linspace(0.5, 2, 6, dtype=torch.float64).reshape(2, 3)
    with caplog.at_level(logging.INFO, logger="mmdgs"):
        q = make(mmdgs.clean_denoiser(Unbatchable.apply))(x_t, level, generator=mmdgs.Streams(0, 2))
    assert "batched products are not available" in caplog.text
    # The Jacobian is diagonal, so that all three estimators find diag(3 x^2).
    torch.testing.assert_close(q.cov.diagonal(), level.sigma**2 / level.alpha * 3 * x_t**2, **EXACT)


def test_a_covariance_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # 8 x 3072 x 3072 float32 numbers are 302 MB; four copies 1.2 GB.
    monkeypatch.setattr(operators, "available_memory", lambda device: 10**9)
    counted = Counted(linear_denoiser(torch.eye(3072)))
    with pytest.raises(mmdgs.CovarianceTooLargeError) as caught:
        mmdgs.FullMoments(counted)(torch.zeros(8, 3, 32, 32), PLAIN)
    message = str(caught.value)
    for part in ("8 x 3072 x 3072 float32", "1.2 GB", "1.0 GB are free on cpu", "DiagonalMoments(denoiser, probes=10)"):
        assert part in message
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, mmdgs.UsageError)
    assert counted.calls == 0, "it must be refused before any work is done"


def test_a_covariance_that_takes_too_many_products_is_refused_unless_asked_for() -> None:
    x_t, calls = torch.zeros(3, 1, 10, 10), []

    def denoiser(x: Tensor, level: NoiseLevel) -> Tensor:
        calls.append(len(x))
        return 0.5 * x

    with pytest.raises(mmdgs.UsageError, match=r"take 300 products .* limit is 299\. KrylovMoments.*most_products=300"):
        mmdgs.FullMoments(denoiser, most_products=299)(x_t, PLAIN)
    assert calls == [], "it is refused before any work"
    for most in (300, None):
        q = mmdgs.FullMoments(denoiser, most_products=most)(x_t, PLAIN)
        torch.testing.assert_close(q.cov.diagonal(), torch.full_like(x_t, 0.5 * PLAIN.tweedie))


def test_few_dimensions_have_full_covariances_for_any_number_of_chains() -> None:
    many = torch.zeros(moments.full.MOST_PRODUCTS, 2)
    assert mmdgs.FullMoments(mmdgs.clean_denoiser(lambda x: 0.5 * x))(many, PLAIN).mean.shape == many.shape


def test_available_memory_is_known_on_linux() -> None:
    free = operators.available_memory(torch.device("cpu"))
    assert free is None or 0 < free < 1 << 50
    assert operators.available_memory(torch.device("meta")) is None


@pytest.mark.parametrize(
    "make", [mmdgs.FullMoments, lambda den: mmdgs.DiagonalMoments(den, probes=None)], ids=["full", "diagonal"]
)
def test_closed_form_moments_are_those_by_products(make, level: NoiseLevel, generator: torch.Generator) -> None:
    network = MLP(3, 2, width=16, depth=3, seed=1).double()
    x_t = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    closed = make(mmdgs.energy_denoiser(network))(x_t, level)
    # A function hides the network's closed form.
    products = make(mmdgs.energy_denoiser(lambda x: network(x)))(x_t, level)
    torch.testing.assert_close(closed.mean, products.mean, **EXACT)
    torch.testing.assert_close(closed.cov.dense(), products.cov.dense(), **EXACT)


class Scaled(MLP):
    """A perceptron with a forward pass of its own, which the inherited closed form knows nothing of."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


def test_a_closed_form_speaks_for_its_own_network_only(level: NoiseLevel, generator: torch.Generator) -> None:
    denoiser = mmdgs.energy_denoiser(Scaled(3, 2, width=16, depth=2, seed=1).double())
    x_t = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(mmdgs.FullMoments(denoiser)(x_t, level).mean, denoiser(x_t, level), **EXACT)


@pytest.mark.parametrize("make", [mmdgs.FullMoments, lambda d: mmdgs.DiagonalMoments(d, probes=None)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_covariance_that_is_not_finite_is_never_repaired(make, value: float) -> None:
    # The floor would hide minus infinity, so the rows are checked before anything is lifted to it.
    slope = torch.tensor([[1.0], [value], [0.5]], dtype=torch.float64)
    broken = mmdgs.clean_denoiser(lambda x: Slope.apply(x, slope))
    with pytest.raises(mmdgs.NonFiniteError, match="denoising covariance is not finite at chain 1;"):
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


def test_true_moments_are_repaired_where_rounding_makes_them_negative() -> None:
    # Two needles: the covariance is that of their distance, rank one but for 4e-10, which float32 cannot hold.
    needles = GaussianMixture([0.5, 0.5], [[-0.3, -0.17], [0.3, 0.17]], 2e-5)
    q = mmdgs.ExactMoments(needles)(torch.zeros(50, 2), NoiseLevel(sigma=1.0))
    assert (q.repaired == 0.5).all()
    assert torch.isfinite(q.sample(generator=torch.Generator().manual_seed(0))).all()


def test_an_isotropic_variance_below_the_floor_counts_as_repaired(generator: torch.Generator) -> None:
    x = torch.randn(100, 2, generator=generator)
    steep = fit_by_score(mmdgs.score_denoiser(lambda x: -9 * x), x, PLAIN, generator=generator)
    q = steep(x, PLAIN)
    assert (q.repaired == 1).all()
    torch.testing.assert_close(q.cov.diagonal(), torch.full_like(x, moments.FLOOR * PLAIN.variance))


def test_half_precision_has_full_covariances_too(generator: torch.Generator) -> None:
    x_t = torch.randn(4, 2, generator=generator)
    denoiser = mmdgs.score_denoiser(lambda x: -x / 2)
    q = mmdgs.FullMoments(denoiser)(x_t.bfloat16(), PLAIN)
    assert q.mean.dtype == torch.bfloat16
    exact = mmdgs.FullMoments(denoiser)(x_t, PLAIN).cov.dense()
    torch.testing.assert_close(q.cov.dense().float(), exact, rtol=2e-2, atol=2e-2)


def test_a_network_that_is_changed_later_is_followed(generator: torch.Generator) -> None:
    network = MLP(2, 2, width=8, depth=2, seed=0)
    denoiser, x_t = mmdgs.energy_denoiser(network), torch.randn(5, 2, generator=generator)
    network.layers[2] = torch.nn.utils.skip_init(torch.nn.Linear, 8, 8)
    torch.nn.init.constant_(network.layers[2].weight, 0.3)
    torch.nn.init.constant_(network.layers[2].bias, 0.1)
    torch.testing.assert_close(mmdgs.FullMoments(denoiser)(x_t, PLAIN).mean, denoiser(x_t, PLAIN).detach())
    network.register_forward_hook(lambda module, inputs, output: 3 * output)
    torch.testing.assert_close(mmdgs.FullMoments(denoiser)(x_t, PLAIN).mean, denoiser(x_t, PLAIN).detach())


def test_another_precision_inside_a_network_does_not_leak(generator: torch.Generator) -> None:
    x_t = torch.randn(4, 2, generator=generator)
    inside = mmdgs.score_denoiser(lambda x: -x.double())
    assert inside(x_t, PLAIN).dtype == torch.float32
    torch.testing.assert_close(inside(x_t, PLAIN), mmdgs.score_denoiser(lambda x: -x)(x_t, PLAIN))


@pytest.mark.parametrize("kind", [moments.FullMoments, partial(moments.DiagonalMoments, probes=None)])
def test_a_perceptrons_closed_form_under_autocast(kind) -> None:
    """bf16 was summed in place into float32, which torch refuses."""
    denoiser = mmdgs.energy_denoiser(MLP(2, 2, width=16, depth=2))
    x_t, level = torch.randn(5, 2, generator=torch.Generator().manual_seed(1)), mmdgs.NoiseLevel(sigma=0.5)
    expected = kind(denoiser)(x_t, level)
    with torch.autocast("cpu", torch.bfloat16):
        found = kind(denoiser)(x_t, level)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.cov.diagonal(), expected.cov.diagonal())


@pytest.mark.parametrize("make", [mmdgs.energy_denoiser, mmdgs.score_denoiser, mmdgs.noise_denoiser])
def test_a_perceptron_of_another_width_is_explained(make) -> None:
    denoiser, level = make(MLP(2, 2, width=4)), mmdgs.NoiseLevel(sigma=0.5)
    for estimate in (denoiser, moments.FullMoments(denoiser), moments.DiagonalMoments(denoiser, probes=None)):
        with pytest.raises(ValueError, match=r"does not take x_t of shape \(4, 3\)"):
            estimate(torch.zeros(4, 3), level)
