"""Metrics against naive implementations, published values and known laws."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import random_covariances
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from mmdgs import metrics

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference" / "mmd.npz"

# --- MMD


def naive_mmd(a: Tensor, b: Tensor, bandwidths: str | list[float]) -> float:
    """The definition, with every pair of points written out."""
    both = torch.cat([a, b])
    if bandwidths == "mean-distance":
        n = len(both)
        mean = torch.cdist(both, both).square().sum().item() / (n * (n - 1))
        bandwidths = [mean * factor for factor in (0.25, 0.5, 1, 2, 4)]

    def kernel_mean(x: Tensor, y: Tensor) -> float:
        squared = (x[:, None] - y[None]).square().sum(-1)
        return sum((-squared / width).exp().mean().item() for width in bandwidths)

    return kernel_mean(a, a) + kernel_mean(b, b) - 2 * kernel_mean(a, b)


@pytest.fixture
def clouds(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two sets of different sizes and laws."""
    a = torch.randn(130, 3, generator=generator, dtype=torch.float64)
    return a, 0.3 + 1.2 * torch.randn(70, 3, generator=generator, dtype=torch.float64)


CONVENTIONS = ["mean-distance", [0.25, 0.5, 1.0, 2.0, 4.0], [0.3, 1.0, 7.0], [2.0]]
"""The authors', that of the paper's text, widths that do not halve, and one."""
conventions = pytest.mark.parametrize("bandwidths", CONVENTIONS, ids=str)


@conventions
@pytest.mark.parametrize("times", [1, 9], ids=["one block", "several blocks"])
def test_mmd_is_its_definition(bandwidths, times: int, clouds: tuple[Tensor, Tensor]) -> None:
    a, b = clouds[0].repeat(times, 1), clouds[1]
    expected = naive_mmd(a, b, bandwidths)
    assert metrics.mmd(a, b, bandwidths) == pytest.approx(expected, rel=1e-10)
    assert metrics.mmd(b, a, bandwidths) == pytest.approx(expected, rel=1e-10)


@conventions
def test_mmd_of_a_set_with_itself_is_zero(bandwidths, clouds: tuple[Tensor, Tensor]) -> None:
    a, _ = clouds
    for same in (a, a.flip(0)):
        assert metrics.mmd(a, same, bandwidths) == pytest.approx(0.0, abs=1e-12)
    point = torch.ones(5, 2)
    assert metrics.mmd(point, point[:3], bandwidths) == pytest.approx(0.0, abs=1e-12)


@conventions
def test_mmd_in_single_precision_far_from_the_origin(
    bandwidths, clouds: tuple[Tensor, Tensor]
) -> None:
    # Squared distances of points near 1,000 would lose all their digits if they were not centred
    # first. The points themselves are rounded to 6e-5 there.
    a, b = ((x + 1000).float() for x in clouds)
    assert metrics.mmd(a, b, bandwidths) == pytest.approx(naive_mmd(*clouds, bandwidths), abs=1e-4)


def test_default_convention_is_the_mean_distance(clouds: tuple[Tensor, Tensor]) -> None:
    assert metrics.mmd(*clouds) == metrics.mmd(*clouds, "mean-distance")


@pytest.mark.skipif(not REFERENCE.exists(), reason=f"there is no {REFERENCE}")
def test_mmd_against_the_reference() -> None:
    with np.load(REFERENCE) as stored:
        a, b, c = (torch.from_numpy(stored[name]) for name in "abc")
        for other, name in ((b, "mmd_ab"), (c, "mmd_ac")):
            assert metrics.mmd(a, other) == pytest.approx(float(stored[name]), abs=1e-5)


# --- divergence


def test_kl_on_a_grid_is_the_closed_form() -> None:
    # A grid 0.05 apart is exact to rounding for Gaussians this wide, and nothing is left beyond 10.
    axis = torch.arange(-10, 10, 0.05, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    means = torch.tensor([[0.3, -0.5], [-0.4, 0.2]], dtype=torch.float64)
    p, q = (
        MultivariateNormal(m, c + 0.3 * torch.eye(2))
        for m, c in zip(means, random_covariances(2, 2, 7), strict=True)
    )
    expected = kl_divergence(p, q).item()
    got = metrics.kl_divergence(p.log_prob(grid), q.log_prob(grid), 0.05**2)
    assert got == pytest.approx(expected, rel=1e-9)
    assert metrics.kl_divergence(p.log_prob(grid), p.log_prob(grid), 0.05**2) == 0.0


def test_kl_without_common_support() -> None:
    # Where p is zero q does not matter, not even q = 0; where p is not, q = 0 is infinitely wrong.
    log_p, narrower = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 1.0]]).log()
    assert metrics.kl_divergence(log_p, log_p, 1.0) == 0.0
    assert metrics.kl_divergence(log_p, narrower, 1.0) == math.inf
