"""Metrics against naive implementations, published values and known laws."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import random_covariances
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from mmdgs import metrics

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # arviz announces its next version at import
    import arviz

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference" / "mmd.npz"
PAPER = [0.25, 0.5, 1.0, 2.0, 4.0]

# --- MMD --------------------------------------------------------------------------------------------------------


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


CONVENTIONS = {"mean distance": "mean-distance", "paper": PAPER, "not halving": [0.3, 1.0, 7.0], "one": [2.0]}
conventions = pytest.mark.parametrize("bandwidths", CONVENTIONS.values(), ids=CONVENTIONS.keys())


@conventions
@pytest.mark.parametrize("block", [1024, 32], ids=["one block", "several blocks"])
def test_mmd_is_its_definition(
    bandwidths, block: int, clouds: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # metrics.mmd is the function; the module is reached through its own name.
    monkeypatch.setitem(metrics.mmd.__globals__, "BLOCK", block)
    a, b = clouds
    expected = naive_mmd(a, b, bandwidths)
    assert metrics.mmd(a, b, bandwidths) == pytest.approx(expected, rel=1e-10)
    assert metrics.mmd(b, a, bandwidths) == pytest.approx(expected, rel=1e-10)


@conventions
def test_mmd_of_a_set_with_itself_is_zero(bandwidths, clouds: tuple[Tensor, Tensor]) -> None:
    a, _ = clouds
    assert metrics.mmd(a, a, bandwidths) == pytest.approx(0.0, abs=1e-12)
    assert metrics.mmd(a, a[torch.randperm(len(a), generator=torch.Generator().manual_seed(1))], bandwidths) == (
        pytest.approx(0.0, abs=1e-12)
    )


@conventions
def test_mmd_in_single_precision_far_from_the_origin(bandwidths, clouds: tuple[Tensor, Tensor]) -> None:
    # Squared distances of points near 1,000 would lose all their digits if they were not centred first. The
    # points themselves are rounded to 6e-5 there.
    a, b = ((x + 1000).float() for x in clouds)
    assert metrics.mmd(a, b, bandwidths) == pytest.approx(naive_mmd(*clouds, bandwidths), abs=1e-4)


def test_default_convention_is_the_mean_distance(clouds: tuple[Tensor, Tensor]) -> None:
    assert metrics.mmd(*clouds) == metrics.mmd(*clouds, "mean-distance")
    assert metrics.mmd(*clouds) != pytest.approx(metrics.mmd(*clouds, PAPER), rel=1e-2)


def test_mmd_of_one_repeated_point_is_zero() -> None:
    point = torch.ones(5, 2)
    assert metrics.mmd(point, point[:3]) == 0.0


@pytest.mark.skipif(not REFERENCE.exists(), reason=f"the reference values are not here: {REFERENCE}")
def test_mmd_against_the_reference() -> None:
    with np.load(REFERENCE) as stored:
        a, b, c = (torch.from_numpy(stored[name]) for name in "abc")
        for other, name in ((b, "mmd_ab"), (c, "mmd_ac")):
            assert metrics.mmd(a, other) == pytest.approx(float(stored[name]), abs=1e-5)


# --- effective sample size --------------------------------------------------------------------------------------


def autoregressive(phi: float, steps: int, chains: int, seed: int = 0) -> Tensor:
    """Stationary chains x' = phi x + e of unit variance, (steps, chains, 1)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, chains, generator=generator, dtype=torch.float64)
    x = [noise[0]]
    for e in noise[1:]:
        x.append(phi * x[-1] + math.sqrt(1 - phi**2) * e)
    return torch.stack(x)[..., None]


def split(chain: Tensor) -> Tensor:
    """Each chain as two halves side by side, as arviz takes them."""
    half = len(chain) // 2
    return torch.cat([chain[:half], chain[half:]], dim=1)


def wavy(steps: int, chains: int) -> Tensor:
    """A slow chain with a damped swing on it: its autocorrelations stay positive, but do not fall monotonically."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(steps, chains, generator=generator, dtype=torch.float64)
    swing = [noise[0], noise[1]]
    for e in noise[2:]:
        swing.append(1.8 * swing[-1] - 0.95 * swing[-2] + e)
    return autoregressive(0.97, steps, chains) + 0.1 * torch.stack(swing)[..., None]


CHAINS = {
    "phi=0.5": (lambda chains: autoregressive(0.5, 2000, chains), 3e-3),
    "phi=0.9": (lambda chains: autoregressive(0.9, 2000, chains), 3e-3),
    "wavy": (lambda chains: wavy(2000, chains), 3e-3),
    "independent": (lambda chains: autoregressive(0.0, 2000, chains), 0.05),
    "alternating": (lambda chains: autoregressive(-0.4, 2000, chains), 0.1),
}


@pytest.mark.parametrize(("make", "tolerance"), CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("chains", [1, 4])
def test_ess_is_that_of_arviz(make, tolerance: float, chains: int) -> None:
    # arviz scales autocovariances by n where we scale by n - 1: some parts in a thousand. It also adds one lone
    # autocorrelation past the last positive pair, of a size up to 2 / sqrt(n): next to an autocorrelation time of
    # 1 or less that is some per cent, next to a long one nothing.
    chain = make(chains)
    theirs = float(arviz.ess(chain[..., 0].mT.numpy(), method="mean"))
    assert metrics.effective_sample_size(split(chain)) == pytest.approx(theirs, rel=tolerance)


@pytest.mark.parametrize("phi", [0.0, 0.6, 0.9, -0.4])
def test_ess_of_an_autoregressive_chain(phi: float) -> None:
    # Known: n (1 - phi) / (1 + phi). The estimate's own error at 80,000 draws is some per cent.
    chain = autoregressive(phi, steps=20_000, chains=4)
    expected = 80_000 * (1 - phi) / (1 + phi)
    assert metrics.effective_sample_size(chain) == pytest.approx(expected, rel=0.1)


def test_ess_is_the_worst_coordinate(generator: torch.Generator) -> None:
    slow, fast = autoregressive(0.9, 2000, 2), autoregressive(0.1, 2000, 2, seed=1)
    worst = metrics.effective_sample_size(slow)
    for chain in (torch.cat([slow, fast], dim=2), torch.cat([fast, slow], dim=2)):
        assert metrics.effective_sample_size(chain) == pytest.approx(worst)
        assert metrics.effective_sample_size(chain[..., None]) == pytest.approx(worst)  # any event shape


def test_ess_of_chains_stuck_in_different_modes_is_low() -> None:
    apart = autoregressive(0.0, 1000, 4) + 20 * torch.arange(4.0)[:, None]
    # Each chain looks perfect by itself; together they are worth about one draw each.
    assert metrics.effective_sample_size(apart) < 8


@pytest.mark.parametrize("place", [0, 1])
def test_ess_of_a_coordinate_that_never_moves_is_not_a_number(place: int) -> None:
    chain = autoregressive(0.5, 100, 2).repeat(1, 1, 2)
    chain[..., place] = 1.0
    assert math.isnan(metrics.effective_sample_size(chain))


# --- modes ------------------------------------------------------------------------------------------------------


def test_mode_statistics() -> None:
    modes = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 50.0]])
    labels = torch.tensor([[0, 1, 1], [0, 1, 0], [1, 1, 1], [1, 1, 0], [0, 1, 1]])  # (steps, chains)
    chain = modes[labels] + 0.3
    result = metrics.mode_statistics(chain, modes)
    assert result.weights == pytest.approx([5 / 15, 10 / 15, 0.0])
    assert result.switches == [2, 0, 4]


# --- divergence -------------------------------------------------------------------------------------------------


def test_kl_on_a_grid_is_the_closed_form() -> None:
    # A grid 0.05 apart is exact to rounding for Gaussians this wide, and nothing is left beyond 10.
    axis = torch.arange(-10, 10, 0.05, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    means = torch.tensor([[0.3, -0.5], [-0.4, 0.2]], dtype=torch.float64)
    p, q = (
        MultivariateNormal(m, c + 0.3 * torch.eye(2)) for m, c in zip(means, random_covariances(2, 2, 7), strict=True)
    )
    expected = kl_divergence(p, q).item()
    got = metrics.kl_divergence(p.log_prob(grid), q.log_prob(grid), 0.05**2)
    assert got == pytest.approx(expected, rel=1e-9)
    assert metrics.kl_divergence(p.log_prob(grid), p.log_prob(grid), 0.05**2) == 0.0


def test_kl_without_common_support() -> None:
    minus = -math.inf
    log_p = torch.tensor([math.log(0.5), math.log(0.5), minus])
    # Where p is zero q does not matter, not even q = 0; where p is not, q = 0 is infinitely wrong.
    assert metrics.kl_divergence(log_p, torch.tensor([math.log(0.5), math.log(0.5), minus]), 1.0) == 0.0
    assert metrics.kl_divergence(log_p, torch.tensor([0.0, minus, 0.0]), 1.0) == math.inf
