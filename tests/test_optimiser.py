"""Adam and Muon by name: whose a weight is, what Muon's steps are, and what a checkpoint keeps of
both.
"""

from __future__ import annotations

import pytest
import torch
from nets import tiny_unet
from torch import Tensor, nn

from mmdgs.errors import UsageError
from mmdgs.networks import MLP
from mmdgs.randomness import seeded
from mmdgs.training.step import (
    Muon,
    load_optimisers,
    make_optimisers,
    optimiser_tensors,
    orthogonal,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def parameters_of(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimiser.param_groups for p in group["params"]]


@pytest.mark.parametrize("shape", [(32, 100), (100, 32), (64, 64)])
def test_a_matrix_keeps_its_directions_and_loses_their_sizes(shape: tuple[int, int]) -> None:
    matrices = random(3, *shape) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    for before, after in zip(matrices.double(), orthogonal(matrices).double(), strict=True):
        u, sizes, v = torch.linalg.svd(before, full_matrices=False)
        turned = u.T @ after @ v.T
        new = turned.diagonal()
        torch.testing.assert_close(turned, new.diag(), rtol=0, atol=1e-4)  # the same directions
        wide = sizes > 0.05 * sizes.max()  # five iterations lift those above some hundredths
        assert new[wide].min() > 0.6
        assert new.max() < 1.3


def stepped(
    optimisers: list[torch.optim.Optimizer], parameters: list[nn.Parameter], gradients: list[Tensor]
) -> None:
    for i, p in enumerate(parameters):
        p.grad = torch.empty_like(p).copy_(gradients[i])
    for optimiser in optimisers:
        optimiser.step()


# On CPUs without bf16 torch takes another way, and says so.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_steps_are_torchs_own() -> None:
    # torch's takes matrices one by one, and in bf16 everywhere.
    start = [random(40, 60, seed=1), random(40, 60, seed=2), random(70, 35, seed=3)]
    ours, theirs = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    own = Muon(ours, lr=0.1)
    torchs = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        gradients = [random(*x.shape, seed=10 * step + i) for i, x in enumerate(start)]
        stepped([own], ours, gradients)
        stepped([torchs], theirs, gradients)
    for a, b, x in zip(ours, theirs, start, strict=True):
        assert (a - x).norm() > 1
        assert (a - b).norm() < 0.02 * (a - x).norm()


@pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"]
)
def test_a_convolution_is_a_matrix_whatever_its_layout(layout: torch.memory_format) -> None:
    start, gradient = random(32, 16, 3, 3), random(32, 16, 3, 3, seed=1)
    flat = nn.Parameter(start.flatten(1).clone())
    image = nn.Parameter(start.to(memory_format=layout))
    stepped([Muon([flat], 0.1)], [flat], [gradient.flatten(1)])
    stepped([Muon([image], 0.1)], [image], [gradient])
    torch.testing.assert_close(image.flatten(1), flat, rtol=1e-5, atol=1e-5)
    assert image.is_contiguous(memory_format=layout)


def test_matrices_are_muons_and_all_else_is_adams() -> None:
    network = tiny_unet(width=32)
    adam, muon = make_optimisers("muon", list(network.parameters()), 1e-3)
    names = {id(p): name for name, p in network.named_parameters()}
    theirs = [names[id(p)] for p in parameters_of(adam)]
    ours = [names[id(p)] for p in parameters_of(muon)]
    assert sorted(theirs + ours) == sorted(names.values())
    assert "first.weight" in theirs
    assert "last.2.weight" in theirs
    assert not any(name.endswith("bias") for name in ours)
    assert all(
        name in ours for name in names.values() if "conv" in name and name.endswith("weight")
    )


def test_without_matrices_there_is_adam_alone_and_no_muon() -> None:
    parameters = list(MLP(2, 2, width=16).parameters())
    (adam,) = make_optimisers("adam", parameters, 1e-3)
    assert isinstance(adam, torch.optim.Adam)
    with pytest.raises(UsageError, match="muon"):
        make_optimisers("muon", parameters, 1e-3)


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_a_state_that_was_stored_goes_on(name: str) -> None:
    def new() -> list[nn.Parameter]:
        return [nn.Parameter(random(*shape)) for shape in ((40, 50), (32, 8, 3, 3), (7,))]

    def gradients(step: int) -> list[Tensor]:
        return [random(*p.shape, seed=5 + step) for p in new()]

    whole = new()
    optimisers = make_optimisers(name, whole, 0.01)
    stepped(optimisers, whole, gradients(0))
    kept = {key: value.clone() for key, value in optimiser_tensors(optimisers).items()}
    halves = [nn.Parameter(p.detach().clone()) for p in whole]
    stepped(optimisers, whole, gradients(1))

    others = make_optimisers(name, halves, 0.01)
    load_optimisers(others, kept)
    stepped(others, halves, gradients(1))
    for a, b in zip(whole, halves, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
