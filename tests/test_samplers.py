"""Kernels and the driver: one conformance test over all kernels, then what only some of them
promise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles import SCALED, assert_moments, skewed_mixture
from scipy import stats
from torch import Tensor

import mmdgs
from mmdgs.linalg import repair
from mmdgs.linalg.operators import Diagonal
from mmdgs.noise import CLEAN, NoiseLevel, transition
from mmdgs.randomness import seeded
from mmdgs.samplers import Kernel, Run, State, single_level_plan
from mmdgs.targets import GaussianMixture

MEAN, STD = (1.0, -0.5), 0.7


def spherical() -> GaussianMixture:
    """N(MEAN, STD^2 I): its posterior is an isotropic Gaussian, so that every estimator can be
    exact for it.
    """
    return GaussianMixture([1.0], torch.tensor([MEAN], dtype=torch.float64), STD)


def posterior_variance(level: NoiseLevel) -> float:
    return STD**2 * level.sigma**2 / (level.alpha**2 * STD**2 + level.sigma**2)


def learned(target: GaussianMixture) -> mmdgs.LearnedMoments:
    def network(x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        mean = target.posterior(x_t, level).mean
        return mean, torch.full_like(mean, 0.5 * math.log(posterior_variance(level)))

    return mmdgs.LearnedMoments(network)


class IsotropicAnywhere(dict):
    """The exact isotropic variance of the spherical target at every level."""

    def __contains__(self, level: object) -> bool:
        return isinstance(level, NoiseLevel)

    def __missing__(self, level: NoiseLevel) -> float:
        return posterior_variance(level)


Make = Callable[[GaussianMixture], Kernel]
KERNELS: dict[str, Make] = {
    "full": lambda target: mmdgs.Gibbs(mmdgs.FullMoments(target.denoiser())),
    "diagonal": lambda target: mmdgs.Gibbs(mmdgs.DiagonalMoments(target.denoiser(), probes=None)),
    "probes": lambda target: mmdgs.Gibbs(mmdgs.DiagonalMoments(target.denoiser(), probes=2)),
    "krylov": lambda target: mmdgs.Gibbs(mmdgs.KrylovMoments(target.denoiser(), steps=2)),
    "isotropic": lambda target: mmdgs.Gibbs(
        mmdgs.IsotropicMoments(target.denoiser(), IsotropicAnywhere())
    ),
    "learned": lambda target: mmdgs.Gibbs(learned(target)),
    "exact moments": lambda target: mmdgs.Gibbs(mmdgs.moments.ExactMoments(target)),
    "exact": lambda target: mmdgs.samplers.ExactGibbs(target),
}


def chained(
    kernel: Kernel, x0: Tensor, steps: int, level: NoiseLevel = SCALED, **options: object
) -> Run:
    """A run at one level with every state."""
    plan = single_level_plan(kernel, level, steps=steps)
    return mmdgs.samplers.run(
        plan, x0, **{"keep": range(1, steps + 1), "progress": None, **options}
    )


kernels = pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS.keys())


@kernels
def test_one_step_has_the_exact_law(
    make: Make, level: NoiseLevel, generator: torch.Generator
) -> None:
    """From x the state is N(m + K alpha (x - m), K^2 sigma^2 + C), K = alpha s^2 / (alpha^2 s^2 +
    sigma^2).
    """
    x0 = torch.tensor([3.0, 0.0], dtype=torch.float64)
    mean = torch.tensor(MEAN, dtype=torch.float64)
    state = State(x0.expand(8_000, 2).reshape(-1, 2, 1, 1).clone())
    before = state.x.clone()
    following, info = make(spherical()).step(state, level, CLEAN, generator=generator)
    assert following.x.shape == before.shape
    assert following.x.dtype == torch.float64
    assert all(value.shape == (8_000,) for value in info.values())
    assert torch.equal(state.x, before), "a step must not change the state it was given"

    gain = level.alpha * STD**2 / (level.alpha**2 * STD**2 + level.sigma**2)
    variance = (gain * level.sigma) ** 2 + posterior_variance(level)
    expected = mean + gain * level.alpha * (x0 - mean)
    assert_moments(following.x.flatten(1), expected, variance * torch.eye(2, dtype=torch.float64))


@kernels
def test_a_chain_does_not_depend_on_its_neighbours(make: Make, generator: torch.Generator) -> None:
    x0 = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    together = chained(make(spherical()), x0, 10, seed=5).samples
    alone = chained(make(spherical()), x0[4:5], 10, seed=5, first_chain=4).samples
    # Not to the last bit: matrix products of another batch size round differently. The chain
    # contracts, so that rounding does not grow.
    torch.testing.assert_close(alone[:, 0], together[:, 4], rtol=1e-10, atol=1e-10)
    assert (together[:, 3] - together[:, 4]).abs().min() > 0, "each chain has numbers of its own"
    assert torch.equal(chained(make(spherical()), x0, 10, seed=5).samples, together)
    assert not torch.equal(chained(make(spherical()), x0, 10, seed=6).samples, together)


def assert_follows(x: Tensor, mixture: GaussianMixture) -> None:
    """Independent points follow the mixture: moments, and Kolmogorov-Smirnov at 1e-4 along three
    directions.
    """
    assert_moments(x, mixture.mean(), mixture.covariance())
    for direction in torch.randn(3, mixture.dim, generator=seeded(9), dtype=torch.float64):
        means = (mixture.means @ direction).numpy()
        stds = torch.einsum("i,kij,j->k", direction, mixture.covariances, direction).sqrt().numpy()
        weights = mixture.weights.numpy()

        def cdf(t: np.ndarray, means=means, stds=stds, weights=weights) -> np.ndarray:
            return stats.norm.cdf((t[:, None] - means) / stds) @ weights

        assert stats.kstest((x @ direction).numpy(), cdf).pvalue > 1e-4


WIDE = {"alpha=1": NoiseLevel(sigma=1.5), "alpha=0.7": NoiseLevel(alpha=0.7, sigma=1.2)}
wide = pytest.mark.parametrize("level", WIDE.values(), ids=WIDE.keys())
"""Levels so noisy that a chain forgets where it was within some steps."""


@wide
@pytest.mark.parametrize("start", ["from the target", "from one point"])
def test_exact_gibbs_leaves_the_mixture_invariant(
    start: str, level: NoiseLevel, generator: torch.Generator
) -> None:
    # From the target it stays there. From one point it goes there: the slowest linear mode keeps
    # alpha^2 s^2 / (alpha^2 s^2 + sigma^2) < 0.6 a step, so 25 steps leave less than 1e-5 of the
    # start.
    mixture, chains = skewed_mixture(), 5_000
    x0, steps = mixture.sample((chains,), generator=generator), 3
    if start == "from one point":
        x0, steps = torch.tensor([[1.2, -0.3, 0.4]], dtype=torch.float64).expand(chains, 3), 25
    result = chained(mmdgs.samplers.ExactGibbs(mixture), x0, steps, level, seed=1, keep=None)
    assert_follows(result.x, mixture)
    assert result.repaired == 0.0


MOMENTS = {
    "full": lambda target: mmdgs.FullMoments(target.denoiser()),
    "full of an energy": lambda target: mmdgs.FullMoments(
        mmdgs.energy_denoiser(lambda x_t, level: -target.noised(level).log_prob(x_t))
    ),
    "exact moments": lambda target: mmdgs.moments.ExactMoments(target),
}


@wide
@pytest.mark.parametrize("make", MOMENTS.values(), ids=MOMENTS.keys())
def test_pseudo_gibbs_is_exact_for_a_gaussian(
    make, level: NoiseLevel, gaussian: GaussianMixture
) -> None:
    # The posterior of a Gaussian is Gaussian, so nothing is approximated. What is left of the start
    # is checked to be far below the standard error, 1e-2.
    largest = gaussian.values.max().item() * level.alpha**2
    assert 4 * (largest / (largest + level.sigma**2)) ** 25 < 1e-4
    x0 = torch.full((3_000, 3), 4.0, dtype=torch.float64)
    chain = mmdgs.gibbs_chain(make(gaussian), x0, level, steps=25, thin=25, seed=2, progress=None)
    assert_follows(chain[-1], gaussian)


@pytest.mark.parametrize(
    "make", [lambda t: mmdgs.Gibbs(mmdgs.FullMoments(t.denoiser())), mmdgs.samplers.ExactGibbs]
)
def test_one_bridged_step_has_the_exact_law(
    make, gaussian: GaussianMixture, generator: torch.Generator
) -> None:
    # At a pair of levels the sweep is Gibbs on (x_s, x_t): from x_s up to x_t = a x_s + b e, and
    # down to x_s | x_t, which is Gaussian for a Gaussian target: mean alpha_s m + G (x_t - alpha_t
    # m), covariance S_s - G S_t G'.
    cleaner, level = NoiseLevel(alpha=0.9, sigma=0.4), NoiseLevel(alpha=0.6, sigma=0.9)
    a, b = transition(cleaner, level)
    m, noised = gaussian.means[0], [gaussian.noised(one).covariances[0] for one in (cleaner, level)]
    gain = a * noised[0] @ torch.linalg.inv(noised[1])
    x_s = torch.tensor([3.0, 2.0, -4.0], dtype=torch.float64)
    mean = cleaner.alpha * m + gain @ (a * x_s - level.alpha * m)
    covariance = noised[0] - gain @ noised[1] @ gain.mT + b**2 * gain @ gain.mT
    state, _ = make(gaussian).step(State(x_s.expand(8_000, 3)), level, cleaner, generator=generator)
    assert_moments(state.x, mean, covariance)


def test_a_run_goes_on_where_an_earlier_one_ended() -> None:
    kernel = mmdgs.samplers.ExactGibbs(spherical())
    x0 = torch.zeros(3, 2, dtype=torch.float64)
    whole = chained(kernel, x0, 10, seed=5)
    first = chained(kernel, x0, 4, seed=5)
    # As from a file, in another process.
    kept = mmdgs.randomness.Streams(5, 3, purpose="steps", positions=first.streams.positions)
    for streams in (kept, first.streams):
        rest = chained(kernel, first.x, 6, seed=streams)
        assert torch.equal(torch.cat([first.samples, rest.samples]), whole.samples)


@pytest.mark.parametrize(("burn_in", "thin"), [(3, 4), (0, 20)])
def test_burn_in_and_thinning_choose_among_the_states(burn_in: int, thin: int) -> None:
    post, x0 = mmdgs.moments.ExactMoments(spherical()), torch.zeros(2, 2, dtype=torch.float64)
    every = mmdgs.gibbs_chain(post, x0, SCALED, steps=20, progress=None)
    assert every.shape == (20, 2, 2)
    some = mmdgs.gibbs_chain(post, x0, SCALED, steps=20, burn_in=burn_in, thin=thin, progress=None)
    assert torch.equal(some, every[burn_in + thin - 1 :: thin])


def two_places(x_t: Tensor) -> Tensor:
    """Pulls to 0 with Jacobian 1/2 below 50, and to 100 with Jacobian -1/2 above."""
    return torch.where(x_t > 50, 150 - 0.5 * x_t, 0.5 * x_t)


def test_the_repaired_fraction_is_reported(caplog, monkeypatch) -> None:
    monkeypatch.setattr(
        repair, "_seen", repair.WATCHED
    )  # a posterior warns by itself, once a process
    post = mmdgs.FullMoments(mmdgs.clean_denoiser(two_places))
    # Chain 0 stays where all is well; all of chain 1's eigenvalues need repair, and half of chain
    # 2's.
    x0 = torch.tensor([[0.0, 0.0], [100.0, 100.0], [0.0, 100.0]], dtype=torch.float64)
    level = NoiseLevel(sigma=0.5)
    result = chained(mmdgs.Gibbs(post), x0, 8, level)
    assert result.info["repaired"].tolist() == [0.0, 1.0, 0.5]
    assert result.repaired == pytest.approx(0.5)
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        mmdgs.gibbs_chain(post, x0[:1], level, steps=8, progress=None)
        assert caplog.text == "", "nothing was repaired, so there is nothing to say"
        mmdgs.gibbs_chain(post, x0, level, steps=8, progress=None)
    assert "3 chains, 8 steps: 50% of the variances" in caplog.text
    assert "more than usual" in caplog.text


class Breaks:
    """Standard normal moments, except that one chain's mean or variance breaks at a step."""

    def __init__(self, part: str, value: float, step: int, chain: int) -> None:
        self.part, self.value, self.step, self.chain, self.calls = part, value, step, chain, 0

    def __call__(self, x_t: Tensor, level: NoiseLevel, *, generator=None) -> mmdgs.Gaussian:
        parts = {"mean": torch.zeros_like(x_t), "covariance": torch.ones_like(x_t)}
        if self.calls == self.step:
            parts[self.part][self.chain, 1] = self.value
        self.calls += 1
        return mmdgs.Gaussian(parts["mean"], Diagonal(parts["covariance"]))


@pytest.mark.parametrize(("part", "value"), [("mean", math.nan), ("covariance", -math.inf)])
def test_what_is_not_finite_is_named_with_step_and_chain(part: str, value: float) -> None:
    kernel = mmdgs.Gibbs(Breaks(part, value, step=3, chain=2))
    with pytest.raises(mmdgs.NonFiniteError, match=f"denoising {part} .* step 3, chain 12") as e:
        chained(kernel, torch.zeros(4, 2), 6, NoiseLevel(sigma=1.0), first_chain=10)
    assert (e.value.step, e.value.chains) == (3, [12])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps"), ({"steps": 5, "burn_in": 3, "thin": 3}, "thin=3")],
)
def test_impossible_runs_are_refused(options: dict[str, int], message: str) -> None:
    post, x0 = mmdgs.moments.ExactMoments(spherical()), torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        mmdgs.gibbs_chain(post, x0, SCALED, **options)
