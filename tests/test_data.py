"""The 2-D data sets against the densities that are said to be theirs."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import assert_moments
from sklearn import datasets

from mmdgs import metrics
from mmdgs.data import TOYS, toy
from mmdgs.randomness import seeded

N = 5_000
names = pytest.mark.parametrize("name", TOYS)


@names
def test_points_follow_the_density(name: str) -> None:
    chosen = toy(name)
    data, density = chosen.sample(N, 0), chosen.density()
    assert data.shape == (N, 2)
    assert data.dtype == torch.float32
    exact = density.to(dtype=torch.float64)
    # The authors' circles are spaced evenly, not drawn: their moments are closer than these errors,
    # never further.
    assert_moments(data.double(), exact.mean(), exact.covariance())
    # The width of the curve shows in the log density: data and draws have the same mean, within
    # five standard errors.
    logs = [exact.log_prob(x) for x in (data.double(), exact.sample((N,), generator=seeded(3)))]
    error = math.sqrt(sum(log.var().item() / len(log) for log in logs))
    assert abs(logs[0].mean() - logs[1].mean()) < 5 * error
    # A look at the whole: the squared MMD of two sets of n from one law is about (2 / n) times the
    # kernel's value 5.
    drawn = density.sample((N // 2,), generator=seeded(1))
    assert metrics.mmd(data[torch.randperm(N, generator=seeded(2))[: N // 2]], drawn) < 5e-3


@pytest.mark.parametrize("n", [1, 51, 1_000])
@pytest.mark.parametrize("seed", [0, 3, 2**32 - 1])
def test_rings_and_roll_have_the_numbers_of_scikit_learn(n: int, seed: int) -> None:
    rings, _ = datasets.make_circles(n, noise=0.05, factor=0.5, random_state=seed)
    assert torch.equal(toy("rings").sample(n, seed), torch.tensor(1.3 * rings, dtype=torch.float32))
    roll, _ = datasets.make_swiss_roll(n, noise=0.5, random_state=seed)
    assert torch.equal(
        toy("roll").sample(n, seed), torch.tensor(0.1 * roll[:, [0, 2]], dtype=torch.float32)
    )


def test_mixture_of_the_paper() -> None:
    chosen = toy("mog")
    density = chosen.density()
    assert density.weights.tolist() == [0.25] * 4
    assert sorted(map(tuple, density.means.tolist())) == [(-1, -1), (-1, 1), (1, -1), (1, 1)]
    torch.testing.assert_close(density.covariances, 0.04 * torch.eye(2).expand(4, 2, 2))
    assert torch.equal(chosen.modes, density.means)
    assert chosen.start == (1.0, 1.0)
