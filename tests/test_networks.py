"""The perceptron: its closed-form derivatives, and what its seed promises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from mmdgs.networks import MLP

EXACT = {"rtol": 1e-8, "atol": 1e-8}


@pytest.mark.parametrize(
    ("inputs", "outputs", "width", "depth"), [(2, 2, 16, 4), (5, 1, 7, 1), (3, 4, 8, 2), (1, 1, 5, 3)]
)
def test_mlp_gradient_and_hessian(
    inputs: int, outputs: int, width: int, depth: int, generator: torch.Generator
) -> None:
    network = MLP(inputs, outputs, width=width, depth=depth, seed=0).double()
    x = 2 * torch.randn(6, inputs, generator=generator, dtype=torch.float64)
    gradient, hessian = network.gradient_and_hessian(x)

    def energy(row: Tensor) -> Tensor:
        return network(row[None]).sum()

    torch.testing.assert_close(gradient, torch.stack([torch.func.grad(energy)(row) for row in x]), **EXACT)
    torch.testing.assert_close(
        hessian, torch.stack([torch.func.jacrev(torch.func.grad(energy))(row) for row in x]), **EXACT
    )


def weights(seed: int) -> Tensor:
    return torch.cat([p.detach().flatten() for p in MLP(2, 2, seed=seed).parameters()])


def test_the_seed_decides_the_weights() -> None:
    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_the_seed_decides_the_weights_side_by_side() -> None:
    # Networks are made in jobs that run side by side: one must not draw from another's numbers.
    before, expected = torch.get_rng_state(), [weights(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(weights, [0, 1] * 40))
    torch.set_rng_state(before)  # what is under test is the weights; the global state is every test's business
    same = sum(torch.equal(got, expected[i % 2]) for i, got in enumerate(made))
    assert same == len(made), f"{len(made) - same} of {len(made)} networks got other weights"


def test_the_default_is_the_network_of_the_authors() -> None:
    # Four hidden layers of 400 and two outputs: 2 x 400 + 3 x 400 x 400 + 400 x 2 weights, 4 x 400 + 2 biases.
    assert weights(0).numel() == 2 * 400 + 3 * 400 * 400 + 400 * 2 + 4 * 400 + 2


@pytest.mark.parametrize("sizes", [{"depth": 0}, {"width": 0}, {"depth": -1}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    (name, value), *_ = sizes.items()
    with pytest.raises(ValueError, match=rf"sizes must be at least 1, got .*{name}={value}"):
        MLP(2, 2, **sizes)
