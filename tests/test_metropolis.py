"""Metropolis within Gibbs: exact for any proposal, against mixtures whose law is known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from experiments import digs
from mmdgs import CLEAN, Gaussian, Gibbs, KrylovMoments, NoiseLevel
from mmdgs.errors import NonFiniteError, UsageError
from mmdgs.linalg.operators import Dense
from mmdgs.moments import ExactMoments
from mmdgs.randomness import seeded
from mmdgs.samplers import Kernel, MetropolisGibbs, Plan, State, run, single_level_plan
from mmdgs.targets import GaussianMixture

LEVEL = NoiseLevel(alpha=0.8, sigma=1.0)
TARGET = GaussianMixture(
    [0.7, 0.3],
    torch.tensor([[-1.5, 0.0], [1.5, 1.0]], dtype=torch.float64),
    torch.tensor([[0.3, 0.5], [0.6, 0.2]], dtype=torch.float64),
)
CHAINS = 2000


@dataclass(frozen=True)
class Wrong:
    """A proposal that is off on purpose: the covariance times a factor, the mean shifted."""

    moments: ExactMoments
    factor: float
    shift: float

    @property
    def denoiser(self):
        return self.moments.denoiser

    def __call__(self, x_t: Tensor, level: NoiseLevel, *, generator=None) -> Gaussian:
        q = self.moments(x_t, level)
        return Gaussian(
            q.mean + self.shift, Dense.from_matrix(self.factor * q.cov.dense(), x_t.shape[1:])
        )


def statistics(x: Tensor) -> Tensor:
    """Numbers of a sample (n, 2): means, three second moments, the share on the right, a tail."""
    right, far = (x[:, 0] > 0).double(), (x[:, 1] > 1.5).double()
    return torch.stack(
        [x[:, 0], x[:, 1], x[:, 0] ** 2, x[:, 1] ** 2, x[:, 0] * x[:, 1], right, far]
    )


def deviations(x: Tensor) -> Tensor:
    """How many standard errors the statistics of draws are from those of the target."""
    exact = statistics(TARGET.sample(1_000_000, generator=seeded(5)))
    found = statistics(x)
    return (found.mean(1) - exact.mean(1)).abs() / (exact.std(1) / len(x) ** 0.5)


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 0.0), (3.0, 0.0), (0.5, 0.4), (2.0, -1.0)])
def test_the_target_is_invariant_whatever_the_proposal(factor: float, shift: float) -> None:
    moments = Wrong(ExactMoments(TARGET), factor, shift)
    x0 = TARGET.sample(CHAINS, generator=seeded(1))
    plan = single_level_plan(MetropolisGibbs(moments, TARGET.log_prob), LEVEL, steps=20)
    found = run(plan, x0, progress=None)
    assert deviations(found.x).max() < 4
    assert 0.02 < found.info["accepted"].mean() < 0.95


def test_the_metropolis_step_is_what_makes_it_so() -> None:
    """The same wrong proposal without it is far off, so that the test above can fail."""
    x0 = TARGET.sample(CHAINS, generator=seeded(1))
    plan = single_level_plan(Gibbs(Wrong(ExactMoments(TARGET), 2.0, -1.0)), LEVEL, steps=20)
    assert deviations(run(plan, x0, progress=None).x).max() > 20


def test_an_exact_posterior_is_always_accepted() -> None:
    cov = torch.tensor([[[1.0, 0.6], [0.6, 0.8]]], dtype=torch.float64)
    one = GaussianMixture([1.0], torch.tensor([[0.3, -0.2]], dtype=torch.float64), cov)
    plan = single_level_plan(MetropolisGibbs(ExactMoments(one), one.log_prob), LEVEL, steps=50)
    found = run(plan, one.sample(200, generator=seeded(0)), progress=None)
    assert (found.info["accepted"] == 1).all()


def test_a_constant_changes_nothing_and_a_step_costs_one_density() -> None:
    calls = []

    def shifted(x: Tensor) -> Tensor:
        calls.append(len(x))
        return TARGET.log_prob(x) + 1000

    x0 = TARGET.sample(50, generator=seeded(0))
    kernels = (
        MetropolisGibbs(ExactMoments(TARGET), density) for density in (TARGET.log_prob, shifted)
    )
    plans = [single_level_plan(kernel, LEVEL, steps=9) for kernel in kernels]
    assert torch.equal(*(run(plan, x0, progress=None).x for plan in plans))
    assert calls == [50] * 10


def test_a_density_of_zero_is_never_entered() -> None:
    def half(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 0, TARGET.log_prob(x), -torch.inf)

    x0 = torch.full((500, 2), 1.0, dtype=torch.float64)
    found = run(
        single_level_plan(MetropolisGibbs(ExactMoments(TARGET), half), LEVEL, steps=20),
        x0,
        progress=None,
    )
    assert (found.x[:, 0] > 0).all()
    assert found.info["accepted"].mean() > 0.1
    with pytest.raises(NonFiniteError, match="chain 0, 1, "):
        run(
            single_level_plan(MetropolisGibbs(ExactMoments(TARGET), half), LEVEL, steps=1),
            -x0,
            progress=None,
        )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_other_densities_that_are_not_finite_are_refused(value: float) -> None:
    kernel = MetropolisGibbs(
        ExactMoments(TARGET), lambda x: torch.where(x[:, 0] > 0, x.new_tensor(value), 0.0)
    )
    with pytest.raises(NonFiniteError, match="log density is not finite"):
        run(
            single_level_plan(kernel, LEVEL, steps=50),
            torch.full((8, 2), -1.5).double(),
            progress=None,
        )


def test_bad_use_is_refused() -> None:
    state, kernel = (
        State(torch.zeros(3, 2).double()),
        MetropolisGibbs(ExactMoments(TARGET), lambda x: x),
    )
    assert isinstance(kernel, Kernel)
    with pytest.raises(ValueError, match=r"must return a tensor \(3,\).*got \(3, 2\)"):
        kernel.step(state, LEVEL, CLEAN, generator=seeded(0))
    with pytest.raises(ValueError, match="clean data"):
        kernel.step(state, LEVEL, NoiseLevel(0.1), generator=seeded(0))
    wide = GaussianMixture([0.5, 0.5], torch.eye(2, 40).double(), 1.0)
    krylov = MetropolisGibbs(KrylovMoments(wide.denoiser(), steps=3), wide.log_prob)
    with pytest.raises(UsageError, match="only nearly"):
        krylov.step(State(torch.zeros(3, 40).double()), LEVEL, CLEAN, generator=seeded(0))


def test_moments_by_importance_are_those_of_the_posterior() -> None:
    """With many points the mean is the exact one, and the covariance too but for the share that is
    added.
    """
    x_t = torch.tensor([[0.2, -0.1], [-1.0, 0.7]], dtype=torch.float64)
    found = digs.ImportanceMoments(TARGET.log_prob, 200_000)(x_t, LEVEL, generator=seeded(0))
    exact = TARGET.posterior(x_t, LEVEL)
    assert (found.mean - exact.mean).abs().max() < 0.02
    added = digs.DEFENSIVE * LEVEL.variance * torch.eye(2)
    assert (found.cov.dense() - added - exact.covariance).abs().max() < 0.02


def test_mala_leaves_the_target_as_it_is() -> None:
    x0 = TARGET.sample(CHAINS, generator=seeded(1))
    found = run(Plan.along(digs.Mala(TARGET, 0.4), [(CLEAN, CLEAN)] * 30), x0, progress=None)
    assert deviations(found.x).max() < 4
    assert 0.3 < found.info["accepted"].mean() < 0.98
