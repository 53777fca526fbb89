"""The perceptron: its closed-form derivatives, and what its seed promises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from mmdgs.networks import MLP, PerceptronHessian

EXACT = {"rtol": 1e-8, "atol": 1e-8}


def sequential(activation: type[nn.Module], bias: bool = True) -> nn.Sequential:
    layers = [nn.utils.skip_init(nn.Linear, a, b, bias=bias) for a, b in ((3, 8), (8, 6), (6, 2))]
    generator = torch.Generator().manual_seed(3)
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.6, generator=generator)
    return nn.Sequential(layers[0], activation(), layers[1], activation(), layers[2])


PERCEPTRONS = {
    "the authors' shape": lambda: MLP(2, 2, width=16, depth=4),
    "one hidden layer": lambda: MLP(5, 1, width=7, depth=1),
    "four outputs": lambda: MLP(3, 4, width=8, depth=2),
    "one input": lambda: MLP(1, 1, width=5, depth=3),
    "sequential": lambda: sequential(nn.SiLU),
    "tanh": lambda: sequential(nn.Tanh),
    "no bias": lambda: sequential(nn.Tanh, bias=False),
}


@pytest.mark.parametrize("make", PERCEPTRONS.values(), ids=PERCEPTRONS.keys())
def test_closed_form_gradient_and_hessian(make, generator: torch.Generator) -> None:
    network = make().double()
    inputs = next(network.parameters()).shape[1]
    x = 2 * torch.randn(6, inputs, generator=generator, dtype=torch.float64)
    closed_form = PerceptronHessian.of(network)
    assert closed_form is not None
    gradient, hessian = closed_form(x)

    def energy(row: Tensor) -> Tensor:
        return network(row[None]).sum()

    slope = torch.func.grad(energy)
    torch.testing.assert_close(gradient, torch.stack([slope(row) for row in x]), **EXACT)
    curvature = torch.func.jacrev(slope)
    torch.testing.assert_close(hessian, torch.stack([curvature(row) for row in x]), **EXACT)


class Doubled(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked() -> MLP:
    network = MLP(2, 2, width=4, depth=1)
    network.register_forward_hook(lambda module, inputs, output: 2 * output)
    return network


OTHERS = {
    "a subclass": lambda: Doubled(2, 2, width=4, depth=1),
    "a hook": hooked,
    "another activation": lambda: sequential(nn.ReLU),
    "an activation last": lambda: nn.Sequential(*sequential(nn.Tanh), nn.Tanh()),
    "no activation": lambda: sequential(nn.Tanh)[:1],
    "a function": lambda: torch.sum,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_whatever_else_a_network_computes_is_differentiated_instead(make) -> None:
    assert PerceptronHessian.of(make()) is None


def weights(seed: int) -> Tensor:
    return torch.cat([p.detach().flatten() for p in MLP(2, 2, seed=seed).parameters()])


def test_the_seed_decides_the_weights_side_by_side() -> None:
    # Networks are made in jobs that run side by side: one must not draw from another's numbers.
    before, expected = torch.get_rng_state(), [weights(seed) for seed in range(2)]
    assert not torch.equal(*expected)
    with ThreadPoolExecutor(2) as pool:
        drawn = list(pool.map(weights, [0, 1] * 10))
    torch.set_rng_state(before)
    assert all(torch.equal(got, expected[i % 2]) for i, got in enumerate(drawn))
    # The authors' four hidden layers of 400 and two outputs.
    assert len(expected[0]) == 2 * 400 + 3 * 400 * 400 + 400 * 2 + 4 * 400 + 2


@pytest.mark.parametrize(("name", "value"), [("depth", -1), ("width", 0)])
def test_impossible_sizes_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        MLP(2, 2, **{name: value})
