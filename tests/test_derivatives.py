"""Second derivatives by hand against autograd's, in float64: single layers, and energies of whole
networks.
"""

from __future__ import annotations

import pytest
import torch
from nets import tiny_unet
from torch import Tensor, nn
from torch.nn import functional

from mmdgs import jacobians
from mmdgs.denoisers import energy_denoiser
from mmdgs.derivatives import SecondOrder
from mmdgs.jacobians import linearised
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import randn, seeded

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return randn(shape, torch.empty(0, dtype=torch.float64), seeded(seed))


X = numbers(2, 4, 7, 6)
WEIGHT, BIAS, NORM = numbers(6, 4, 3, 3, seed=1), numbers(6, seed=2), numbers(4, seed=1)
LAYERS = {
    "convolution": lambda x: torch.conv2d(x, WEIGHT, BIAS, 1, 1, 1, 1),
    "without a bias": lambda x: torch.conv2d(x, WEIGHT, None, (1, 1), (0, 2), (1, 1), 1),
    "stride": lambda x: torch.conv2d(x, WEIGHT, None, 2, 1, 1, 1),
    "dilation": lambda x: torch.conv2d(x, WEIGHT, None, 1, 2, 2, 1),
    "groups": lambda x: torch.conv2d(x, WEIGHT[:, :2], None, 1, 1, 1, 2),
    "wide padding": lambda x: torch.conv2d(x, WEIGHT[..., :1, :1], None, 1, 1, 1, 1),
    "a word for the padding": lambda x: torch.conv2d(x, WEIGHT, None, 1, "same", 1, 1),
    "group norm": lambda x: functional.group_norm(x, 2, NORM, numbers(4, seed=2), 1e-3),
    "group norm, no weights": lambda x: functional.group_norm(x, 4),
    "norm of points": lambda x: functional.group_norm(x.flatten(2)[..., 0], 2, NORM),
}


def hessian_product(layer, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[str]]:
    """The gradient of an energy with one layer in it, the product of its Hessian with v, and the
    graph's nodes.
    """
    point = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(True)
    out = layer((1.3 * point).sin())
    (gradient,) = torch.autograd.grad((out.cos() * out).sum(), point, create_graph=True)
    return gradient.detach(), torch.autograd.grad(gradient, point, v)[0], type(out.grad_fn).__name__


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_autograds_second_derivatives(name, layout) -> None:
    x, v = X.contiguous(memory_format=layout), numbers(*X.shape, seed=3)
    expected = hessian_product(LAYERS[name], x, v)
    with SecondOrder():
        ours = hessian_product(LAYERS[name], x, v)
    torch.testing.assert_close(ours[:2], expected[:2], **CLOSE)
    by_autograd = ours[2] == expected[2]
    assert by_autograd == (name == "a word for the padding")


@pytest.mark.parametrize("frozen", [True, False])
def test_an_energys_products_are_autograds(frozen, monkeypatch) -> None:
    network = tiny_unet(3, multipliers=[1, 2], attention=[1]).double().eval()
    denoiser = energy_denoiser(network.requires_grad_(not frozen))
    x, v = numbers(2, 3, 28, 28), numbers(3, 2, 3, 28, 28, seed=1)
    assert jacobians.chunk_size(x) == 1
    at = linearised(denoiser, x, NoiseLevel(sigma=0.5))
    found = at.mean, at.pull(v)
    monkeypatch.setattr(jacobians, "SecondOrder", torch.enable_grad)
    plain = linearised(denoiser, x, NoiseLevel(sigma=0.5))
    torch.testing.assert_close(found, (plain.mean, plain.pull(v)), **CLOSE)


def test_weights_that_are_trained_are_left_to_autograd() -> None:
    layer = nn.Conv2d(4, 2, 3, dtype=torch.float64, device="meta").to_empty(device="cpu")
    nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
    x = X.clone().requires_grad_(True)
    with SecondOrder():
        out = layer(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), layer.weight)[0].abs().max() > 0
