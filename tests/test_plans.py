"""Samplers over many levels: their laws on exact mixtures, their orders of convergence, their cost,
their seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from oracles import assert_moments, gaussian_target, paper_mixture, skewed_mixture
from torch import Tensor

import mmdgs
from mmdgs import metrics, samplers
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, seeded
from mmdgs.samplers import (
    DDIM,
    ConsistentAnnealed,
    FixedVariance,
    Heun,
    Mirrored,
    Multistep,
    Plan,
    State,
)
from mmdgs.targets import GaussianMixture


def exploding(count: int, first: float = 8.0, last: float = 0.02) -> list[NoiseLevel]:
    """Geometric levels with alpha = 1."""
    ratio = (last / first) ** (1 / (count - 1))
    return [NoiseLevel(sigma=first * ratio**i) for i in range(count)]


def preserving(count: int, first: float = 8.0, last: float = 0.02) -> list[NoiseLevel]:
    """The same ratios sigma / alpha with alpha^2 + sigma^2 = 1."""
    alphas = [(1 + level.sigma**2) ** -0.5 for level in exploding(count, first, last)]
    return [
        NoiseLevel(alpha=a, sigma=a * e.sigma)
        for a, e in zip(alphas, exploding(count, first, last), strict=True)
    ]


def noised(target: GaussianMixture, level: NoiseLevel, chains: int, seed: int = 0) -> Tensor:
    """Exact draws of x_t: what a plan starts from when its first level is not yet all noise."""
    return target.noised(level).sample((chains,), generator=seeded(seed))


def sampled(plan: Plan, target: GaussianMixture, chains: int, seed: int = 1) -> Tensor:
    return samplers.run(plan, noised(target, plan.start, chains), seed=seed, progress=None).x


Make = Callable[[GaussianMixture, Sequence[NoiseLevel]], Plan]


def full(target: GaussianMixture) -> mmdgs.FullMoments:
    return mmdgs.FullMoments(target.denoiser())


def down(kernel: Callable, **settings: float) -> Make:
    return lambda target, levels: Plan.down(kernel(target.denoiser(), **settings), levels)


PLANS: dict[str, Make] = {
    "gibbs": lambda t, levels: samplers.gibbs_plan(full(t), levels, sweeps=2),
    "gibbs, down first": lambda t, levels: samplers.gibbs_plan(
        full(t), levels, sweeps=2, noise_first=False
    ),
    "langevin": lambda t, levels: samplers.langevin_plan(t.denoiser(), levels, steps=4, rate=0.15),
    "consistent": down(ConsistentAnnealed),
    "ancestral, full": lambda t, levels: samplers.ancestral_plan(full(t), levels),
    "ancestral, probes": lambda t, levels: samplers.ancestral_plan(
        mmdgs.DiagonalMoments(t.denoiser(), probes=2), levels
    ),
    "mirrored": lambda t, levels: Plan.down(Mirrored(mmdgs.FullMoments(t.denoiser())), levels),
    "small": down(FixedVariance),
    "large": down(FixedVariance, large=True),
    "ddim": down(DDIM),
    "ddim, eta": down(DDIM, eta=0.5),
    "heun": down(Heun),
    "heun, churn": down(Heun, churn=0.1),
    "multistep": down(Multistep),
    "multistep, third order": down(Multistep, order=3),
    "multistep, eta": down(Multistep, eta=1.0),
}
plans = pytest.mark.parametrize("make", PLANS.values(), ids=PLANS.keys())
families = pytest.mark.parametrize("family", [exploding, preserving])
CHAINS = 2_000


def deficit(target: GaussianMixture, x: Tensor) -> float:
    """How much less likely than data the samples are, in nats: of either sign where they are too
    wide or too narrow.
    """
    data = target.sample((20_000,), generator=seeded(10))
    return (target.log_prob(data).mean() - target.log_prob(x).mean()).item()


LAWS = ["gibbs, down first", "langevin", "consistent", "ancestral, full", "mirrored"]
LAWS += ["small", "ddim, eta", "heun, churn", "multistep, eta"]


@pytest.mark.parametrize("name", LAWS)
def test_the_law_approaches_the_target_as_levels_grow(name: str) -> None:
    """The paper's order of Gibbs sweeps keeps a bias: the next test."""
    target, make = paper_mixture(), PLANS[name]
    few, many = (sampled(make(target, exploding(n)), target, CHAINS) for n in (5, 80))
    assert abs(deficit(target, many)) < 0.15
    assert abs(deficit(target, few)) > 3 * abs(deficit(target, many))
    data = target.sample((CHAINS,), generator=seeded(11))
    assert metrics.mmd(many, data) < 0.007  # of data against data: 0.001


class Point:
    """The denoiser of data that are the one point 0."""

    def __call__(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        return 0 * x_t


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda d, q, levels: samplers.gibbs_plan(q, levels, sweeps=3), 1.159),
        (lambda d, q, levels: samplers.langevin_plan(d, levels, steps=5, rate=0.062), 1.126),
    ],
    ids=["gibbs", "langevin"],
)
def test_how_much_noise_a_state_has_beyond_its_level_at_the_papers_settings(
    make: Callable, expected: float
) -> None:
    """A sweep at (t, s) takes an excess e - 1 of variance to q^2 (e - 1), q = (sigma_s /
    sigma_t)^2; a step of Langevin takes e to (1 - r)^2 e + 2 r; each level makes it 1 / q times as
    large. The fixed points are in docs/use/sample.md."""
    levels = mmdgs.schedules.geometric(232, 50, 0.01)[-60:]
    plan = make(Point(), mmdgs.DiagonalMoments(Point(), probes=1, floor=1e-12), levels)
    chains = 400
    start = plan.noise((16,), chains, generator=mmdgs.randomness.Streams(0, chains))
    but_the_last_mean = replace(plan, steps=plan.steps[:-1])
    x = samplers.run(but_the_last_mean, start, seed=1, progress=None).x.double()
    excess = x.square().mean().item() / levels[-1].sigma ** 2
    assert excess == pytest.approx(expected, abs=0.04)


@dataclass(frozen=True)
class Curve:
    """A denoiser whose mean is 2 + 3 l + b l^2 in l = -log(sigma / alpha), whatever it is shown."""

    bend: float = 0.0

    def __call__(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        return torch.full_like(x_t, self.at(-math.log(level.ratio)))

    def at(self, along: float) -> float:
        return 2 + 3 * along + self.bend * along**2

    def steady(self, along: float, rate: float) -> float:
        """f with f' = rate (D - f): what y nears."""
        slope = 3 - 2 * self.bend / rate
        return 2 + slope * (along - 1 / rate) + self.bend * along**2


def walked(plan: Plan, x: Tensor, generator: Streams) -> list[State]:
    """The states of a plan, all but the clean one."""
    states = [State(x)]
    for kernel, level, following in plan.steps[:-1]:
        states.append(kernel.step(states[-1], level, following, generator=generator)[0])
    return states


@pytest.mark.parametrize(("order", "bend"), [(2, 0.0), (3, 0.7)])
@families
def test_steps_by_several_means_are_exact_where_these_are_a_polynomial(
    order: int, bend: float, family: Callable
) -> None:
    """dy/dl = D - y, D = 2 + 3 l + b l^2: y = f(l) + (y_0 - f(l_0)) e^(l_0 - l), f = b l^2 + (3 - 2
    b)(l - 1) + 2.
    """
    levels, known = family(6), order - 1  # steps until it has means enough
    begin, end = (-math.log(levels[i].ratio) for i in (known, -1))
    x, generator = torch.randn(6, 3, dtype=torch.float64, generator=seeded(0)), Streams(0, 6)
    plan = Plan.down(Multistep(Curve(bend), order=order), levels)
    states = walked(plan, x, generator)
    ddim, _ = samplers.DDIM(Curve(bend)).step(states[0], levels[0], levels[1], generator=generator)
    torch.testing.assert_close(states[1].x, ddim.x)  # nothing came before

    steady = partial(Curve(bend).steady, rate=1.0)
    start = states[known].x / levels[known].alpha - steady(begin)
    expected = steady(end) + start * math.exp(begin - end)
    torch.testing.assert_close(states[-1].x / levels[-1].alpha, expected)


@pytest.mark.parametrize(
    ("order", "bend", "eta", "inflation"),
    [(2, 0.0, 0.5, 1.0), (2, 0.0, 2.0, 1.5), (3, 0.7, 1.0, 1.0)],
)
@families
def test_steps_with_noise_have_the_law_of_the_sde_where_means_are_a_polynomial(
    order: int, bend: float, eta: float, inflation: float, family: Callable
) -> None:
    """dy = k (D - y) dl + noise, k = 1 + eta: y is f(l) + (y_0 - f(l_0)) e^(k (l_0 - l)) and noise
    of the variance (1 - e^(-2 eta (l - l_0))) s^2, with f = D - f' / k and s = sigma / alpha, times
    the inflation squared."""
    levels, known = family(5), order - 1
    x, generator = torch.zeros(4, 20_000, dtype=torch.float64), Streams(0, 4)
    kernel = Multistep(Curve(bend), order=order, eta=eta, inflation=inflation)
    states = walked(Plan.down(kernel, levels), x, generator)
    begin, end = (-math.log(levels[i].ratio) for i in (known, -1))

    steady = partial(Curve(bend).steady, rate=1 + eta)
    fall = math.exp((1 + eta) * (begin - end))
    start = states[known].x / levels[known].alpha - steady(begin)
    noise = states[-1].x / levels[-1].alpha - steady(end) - start * fall
    variance = (1 - math.exp(-2 * eta * (end - begin))) * (inflation * levels[-1].ratio) ** 2
    zero, expected = torch.zeros(1).double(), torch.full((1, 1), variance).double()
    assert_moments(noise.reshape(-1, 1), zero, expected)


@families
def test_a_midpoint_step_takes_the_mean_where_the_polynomial_is_in_its_middle(
    family: Callable,
) -> None:
    """y_s = D(l + h / 2) + e^-h (y_t - D(l + h / 2)) where means are a polynomial of l, the same
    for all x.
    """
    levels = family(5)
    x, generator = torch.randn(6, 3, dtype=torch.float64, generator=seeded(0)), Streams(0, 6)
    states = walked(Plan.down(Multistep(Curve(0.7), order=3, midpoint=True), levels), x, generator)
    begin, end = (-math.log(level.ratio) for level in levels[-2:])
    middle = Curve(0.7).at((begin + end) / 2)
    expected = middle + math.exp(begin - end) * (states[-2].x / levels[-2].alpha - middle)
    torch.testing.assert_close(states[-1].x / levels[-1].alpha, expected)


@pytest.mark.parametrize(
    ("make", "order"), [("ddim", 1), ("heun", 2), ("multistep", 2), ("multistep, third order", 3)]
)
@families
def test_the_order_of_a_method_for_the_ode(make: str, order: int, family: Callable) -> None:
    """A Gaussian N(m, v) goes along y - m ~ sqrt(v + s^2): errors fall as (1 / steps)^order."""
    target = GaussianMixture(
        [1.0], torch.tensor([[0.5]]).double(), torch.tensor([[[0.4]]]).double()
    )
    start = torch.linspace(-6, 6, 9, dtype=torch.float64)[:, None]
    errors = []
    for count in (40, 80, 160):
        levels = family(count, first=100, last=0.1)  # where the first step is DDIM's, D is flat
        plan, first, last = PLANS[make](target, levels), levels[0], levels[-1]
        before = replace(plan, steps=plan.steps[:-1])
        x = samplers.run(before, start * first.alpha, progress=None).x / last.alpha
        exact = 0.5 + (start - 0.5) * math.sqrt((0.4 + last.ratio**2) / (0.4 + first.ratio**2))
        errors.append((x - exact).abs().max().item())
    for more, fewer in zip(errors[1:], errors[:-1], strict=True):
        assert order - 0.2 < math.log2(fewer / more) < order + 0.6


@families
def test_ancestral_sampling_with_the_full_covariance_is_exact_for_a_gaussian_in_few_steps(
    family: Callable,
) -> None:
    target = gaussian_target()
    plan = samplers.ancestral_plan(full(target), family(4, last=1e-3))
    x = sampled(plan, target, 10_000)
    assert_moments(x, target.means[0], target.covariances[0])


def test_the_noise_drawn_into_the_cleanest_level_can_be_bounded() -> None:
    """Row by row, in mean absolute value, by scaling: the draws before are the same, and so is what
    lies below.
    """
    target = gaussian_target()
    moments, levels = full(target), exploding(4, last=0.05)
    free, bounded = (
        samplers.ancestral_plan(moments, levels, last_noise=most) for most in (None, 0.1)
    )
    assert bounded.steps[:-2] == free.steps[:-2]
    x = target.sample((500,), generator=seeded(0)) + levels[-2].sigma * torch.randn(
        500, target.dim, generator=seeded(1), dtype=torch.float64
    )
    kernels = [plan.steps[-2].kernel for plan in (free, bounded)]
    drawn = [kernel.step(State(x), *levels[-2:], generator=seeded(2))[0].x for kernel in kernels]
    mean = moments(x, levels[-2]).bridge(x, *levels[-2:]).mean
    noise = [y - mean for y in drawn]
    sizes = noise[0].abs().mean(1)
    assert 0.2 < (sizes > 0.1).double().mean() < 0.99  # some are bounded, some are not
    torch.testing.assert_close(noise[1].abs().mean(1), sizes.clamp(max=0.1))
    torch.testing.assert_close(noise[1] * sizes.clamp(min=0.1)[:, None], noise[0] * 0.1)
    one = [samplers.ancestral_plan(moments, levels[-1:], last_noise=most) for most in (0.1, None)]
    assert one[0] == one[1]


def test_the_fixed_variances_miss_by_an_error_of_first_order() -> None:
    """Small is too narrow, large too wide, and both errors halve as the steps double."""
    target = GaussianMixture([1.0], torch.zeros(1, 2, dtype=torch.float64), 1.0)
    for large, sign in ((False, -1), (True, 1)):
        errors = []
        for count in (16, 32):
            x = sampled(
                Plan.down(FixedVariance(target.denoiser(), large=large), exploding(count)),
                target,
                40_000,
            )
            errors.append(sign * (x.var().item() - 1))
        assert all(error > 0.02 for error in errors)
        assert errors[0] / errors[1] == pytest.approx(2, rel=0.35)


def test_langevin_at_one_level_has_its_known_stationary_variance() -> None:
    """x <- (1 - a / v) x + sqrt(2 a) z settles at v / (1 - a / (2 v)), v the variance of x_t."""
    std, level, rate = 0.8, NoiseLevel(alpha=0.7, sigma=0.6), 0.5
    target = GaussianMixture([1.0], torch.zeros(1, 2, dtype=torch.float64), std)
    v, a = (level.alpha * std) ** 2 + level.sigma**2, rate * level.sigma**2
    kernel = samplers.Langevin(target.denoiser(), rate)
    x0 = noised(target, level, 20_000)
    x = samplers.run(Plan.along(kernel, [(level, level)] * 60), x0, seed=3, progress=None).x
    assert x.var().item() == pytest.approx(v / (1 - a / (2 * v)), rel=0.02)


@families
def test_consistent_annealing_keeps_the_noise_of_the_levels(family: Callable) -> None:
    """Where D is the clean x, the state at every level is N(alpha x, sigma^2)."""
    clean = torch.tensor([[0.5, -1.0]], dtype=torch.float64)
    levels = family(6, first=2.0, last=0.1)
    seen: list[State] = []
    plan = Plan.down(ConsistentAnnealed(lambda x_t, level: clean.expand_as(x_t)), levels)
    x0 = levels[0].alpha * clean + levels[0].sigma * torch.randn(
        50_000, 2, generator=seeded(0), dtype=torch.float64
    )
    samplers.run(plan, x0, callback=lambda step, state, info: seen.append(state), progress=None)
    for level, state in zip([*levels[1:], None], seen, strict=True):
        if level is None:
            assert torch.equal(state.x, clean.expand_as(state.x))
        else:
            eye = level.sigma**2 * torch.eye(2, dtype=torch.float64)
            assert_moments(state.x, level.alpha * clean[0], eye)


@plans
def test_levels_of_another_alpha_are_the_same_problem_rescaled(make: Make) -> None:
    """x / alpha does not know which family its levels are of: the same numbers come out."""
    if make is PLANS["large"]:
        pytest.skip("DDPM's large variance is a number of x_t's own scale")
    target = skewed_mixture()
    exploded, preserved = make(target, exploding(7)), make(target, preserving(7))
    x0 = noised(target, exploded.start, 5)
    one = samplers.run(exploded, x0, seed=4, progress=None).x
    two = samplers.run(preserved, preserved.start.alpha * x0, seed=4, progress=None).x
    assert torch.allclose(one, two, atol=1e-9)


@pytest.mark.parametrize(("kernel", "some"), [(DDIM, slice(9)), (Multistep, slice(3, 5))])
@families
def test_eta_one_is_the_small_variance_in_all_of_ddim_and_the_first_step_of_multistep(
    kernel: Callable, some: slice, family: Callable
) -> None:
    target, levels = skewed_mixture(), family(9)[some]
    x0 = noised(target, levels[0], 6)
    kernels = kernel(target.denoiser(), eta=1.0), FixedVariance(target.denoiser())
    ends = [
        samplers.run(Plan.down(kernel, levels), x0, seed=2, progress=None).x for kernel in kernels
    ]
    assert torch.allclose(*ends, atol=1e-10)


def test_gibbs_is_the_papers_algorithm_written_out() -> None:
    """Algorithm 2 by hand: noise up by sigma_{t+1}^2 - sigma_t^2, down by the Gaussian of the
    analytic moments.
    """
    target, levels = skewed_mixture(), exploding(4, 2.0, 0.2)
    moments = full(target)
    x0 = noised(target, levels[0], 3)
    plan = samplers.gibbs_plan(moments, levels, sweeps=2)
    found = samplers.run(plan, x0, seed=8, progress=None).x
    draws, x = Streams(8, 3, purpose="steps"), x0
    for noisier, cleaner in pairwise(levels):
        variance = noisier.sigma**2 - cleaner.sigma**2
        for _ in range(2):
            x_t = x + math.sqrt(variance) * mmdgs.randomness.randn((3, 3), x, draws)
            q = moments(x_t, noisier)
            gain = variance / noisier.sigma**2
            mean = gain * q.mean + (1 - gain) * x_t
            cov = gain**2 * q.cov.dense() + gain * cleaner.sigma**2 * torch.eye(3).double()
            values, vectors = torch.linalg.eigh(cov)
            z = mmdgs.randomness.randn((3, 3), x, draws)[..., None]
            x = mean + (vectors @ (values.sqrt()[..., None] * (vectors.mT @ z)))[..., 0]
    assert torch.allclose(found, target.denoiser()(x, levels[-1]), atol=1e-8)


@plans
def test_a_chain_does_not_know_its_batch(make: Make) -> None:
    target = skewed_mixture()
    plan = make(target, exploding(5))
    x0 = noised(target, plan.start, 6)
    whole = samplers.run(plan, x0, seed=9, progress=None).x
    parts = [
        samplers.run(plan, x0[i : i + 2], seed=9, first_chain=i, progress=None).x for i in (0, 2, 4)
    ]
    assert torch.allclose(whole, torch.cat(parts), atol=1e-12)


COSTS = {
    "gibbs": (2 * 9 + 1, 2 * 9 * 3),
    "langevin": (4 * 10 + 1, 0),
    "consistent": (10, 0),
    "ancestral, full": (10, 9 * 3),  # the last step takes the mean alone
    "ancestral, probes": (10, 9 * 2),
    "small": (10, 0),
    "ddim": (10, 0),
    "heun": (2 * 9 + 1, 0),
    "multistep": (10, 0),
}


@pytest.mark.parametrize("name", COSTS)
def test_a_run_says_what_it_cost(name: str) -> None:
    target = skewed_mixture()
    plan = PLANS[name](target, exploding(10))
    result = samplers.run(plan, noised(target, plan.start, 7), progress=None)
    assert (result.cost.forwards, result.cost.products) == COSTS[name]
    assert result.cost.evaluations == result.cost.forwards + 2 * result.cost.products
    assert result.seconds > 0


def test_a_chain_may_end_with_a_mean() -> None:
    """Of a Gaussian of variance v the means at noise s^2 have variance v^2 / (v + s^2); draws have
    v.
    """
    variance, level, chains = 2.0, NoiseLevel(sigma=1.5), 10_000
    target = GaussianMixture(torch.ones(1), torch.zeros(1, 1), variance * torch.eye(1)[None])
    denoiser = target.denoiser()
    x0 = target.sample((chains,), generator=torch.Generator().manual_seed(1))
    moments = mmdgs.FullMoments(denoiser)
    for mean, expected in ((False, variance), (True, variance**2 / (variance + level.sigma**2))):
        plan = samplers.single_level_plan(moments, level, steps=3, mean=mean)
        found = samplers.run(plan, x0, seed=2, progress=None).x
        assert found.var().item() == pytest.approx(expected, rel=5 * (2 / chains) ** 0.5)
        assert found.mean().item() == pytest.approx(0, abs=5 * (expected / chains) ** 0.5)
    with pytest.raises(ValueError, match="clean data"):
        samplers.GibbsMean(denoiser).step(State(x0), level, ONE, generator=Streams(0, chains))


ONE = NoiseLevel(sigma=1.0)
REFUSED: list[tuple[Callable, str]] = [
    (lambda d: samplers.langevin_plan(d, exploding(3), rate=2.5), "rate"),
    (lambda d: samplers.gibbs_plan(mmdgs.FullMoments(d), exploding(3), sweeps=0), "sweeps"),
    (lambda d: samplers.gibbs_plan(mmdgs.FullMoments(d), exploding(3)[:1]), "at least 2"),
    (lambda d: Plan.down(DDIM(d), exploding(5)[::-1]), "wrong order"),
    (lambda d: DDIM(d, eta=1.5), "eta"),
    (lambda d: Heun(d, churn=-1), "churn"),
    (lambda d: Multistep(d, order=4), "order"),
    (lambda d: Multistep(d, eta=math.nan), "eta"),
    (lambda d: ConsistentAnnealed(d, eta=0.0), "eta"),
    (lambda d: ConsistentAnnealed(d, factor=0.5), "factor"),
    (lambda d: samplers.single_level_plan(samplers.Heun(d), ONE, steps=1, mean=True), "Heun"),
]


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_what_a_plan_refuses(make: Callable, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(skewed_mixture().denoiser())


@plans
def test_a_state_that_is_not_finite_stops_the_run(make: Make) -> None:
    target = skewed_mixture()
    plan = make(target, exploding(3))

    class Broken:
        def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
            mean = target.denoiser()(x_t, level)
            return torch.where(torch.arange(len(mean))[:, None] == 1, torch.nan, mean)

    def broken(kernel: object) -> object:
        name = "moments" if hasattr(kernel, "moments") else "denoiser"
        inner = getattr(kernel, name)
        swapped = Broken() if name == "denoiser" else type(inner)(Broken())
        return type(kernel)(**{**kernel.__dict__, name: swapped})

    bad = Plan(plan.start, tuple(step._replace(kernel=broken(step.kernel)) for step in plan.steps))
    with pytest.raises(mmdgs.NonFiniteError, match="chain"):
        samplers.run(bad, noised(target, plan.start, 3), first_chain=10, progress=None)
