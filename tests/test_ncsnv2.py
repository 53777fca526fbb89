"""The NCSNv2 network: its parts against plain formulas, its derivatives, and as a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from nets import lively
from torch import Tensor
from torch.nn import functional

import mmdgs
from mmdgs.jacobians import linearised
from mmdgs.networks import NCSNv2
from mmdgs.networks.ncsnv2 import ConvMeanPool, InstanceNormPlus
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.randomness import seeded

LEVEL = NoiseLevel(sigma=0.5)
EXACT = {"rtol": 1e-9, "atol": 1e-10}  # in float64


@pytest.fixture
def forked(_no_global_randomness: None) -> Iterator[None]:
    """torch's own layers, and gradcheck, draw from the global generator."""
    with torch.random.fork_rng():
        yield


def tiny(channels: int = 1, width: int = 2) -> NCSNv2:
    return lively(NCSNv2(channels, width=width)).double()


def images(n: int = 2, channels: int = 1, size: int = 6) -> Tensor:
    return torch.randn(n, channels, size, size, generator=seeded(5), dtype=torch.float64)


# --- its parts


def test_the_norm_is_instance_norm_and_the_standardised_means() -> None:
    norm = lively(InstanceNormPlus(5)).double()
    x = torch.randn(3, 5, 4, 6, generator=seeded(0), dtype=torch.float64)
    means = x.mean((2, 3))
    m = (means - means.mean(1, keepdim=True)) / (means.var(1, keepdim=True) + 1e-5).sqrt()
    alpha, gamma, beta = (p[None, :, None, None] for p in (norm.alpha, norm.gamma, norm.beta))
    expected = gamma * (functional.instance_norm(x, eps=1e-5) + alpha * m[:, :, None, None]) + beta
    torch.testing.assert_close(norm(x), expected, **EXACT)


@pytest.mark.usefixtures("forked")
def test_pooling_takes_the_mean_of_four_pixels_and_of_what_is_there_at_an_edge() -> None:
    pool = lively(ConvMeanPool(1, 1)).double()
    h = pool.conv(images(1, size=6))
    four = (h[..., ::2, ::2] + h[..., 1::2, ::2] + h[..., ::2, 1::2] + h[..., 1::2, 1::2]) / 4
    torch.testing.assert_close(pool(images(1, size=6)), four, **EXACT)
    h = pool.conv(images(1, size=5))
    pooled = pool(images(1, size=5))
    assert pooled.shape == (1, 1, 3, 3)
    torch.testing.assert_close(pooled[..., 2, 2], h[..., 4, 4], **EXACT)


def test_it_has_the_public_size() -> None:
    network = NCSNv2(3)
    assert sum(p.numel() for p in network.parameters()) == 29_694_083
    assert len(network.state_dict()) == 153
    assert network.refine4.output_convs["3_2_conv"].bias is None


# --- as a function


def test_any_size() -> None:
    network = tiny()
    x = torch.randn(2, 1, 7, 12, generator=seeded(5), dtype=torch.float64)
    out = network(x, LEVEL)
    assert out.shape == x.shape
    assert out.abs().max() > 1e-3
    torch.testing.assert_close(out[1:], network(x[1:], LEVEL), **EXACT)


def test_the_level_only_divides_and_another_alpha_rescales() -> None:
    network, x = tiny(), images()
    at_half = network(x, LEVEL)
    torch.testing.assert_close(at_half, network.body(2 * x - 1) / 0.5, **EXACT)
    # x_t' = a x_t has the score s(x_t) / a at (a, a sigma).
    torch.testing.assert_close(
        network(0.3 * x, NoiseLevel(alpha=0.3, sigma=0.15)), at_half / 0.3, **EXACT
    )


def test_a_level_for_each_row() -> None:
    network, x = tiny(), images(3)
    levels = [NoiseLevel(sigma=2.0), LEVEL, NoiseLevel(alpha=0.6, sigma=0.8)]
    expected = torch.cat([network(x[i : i + 1], level) for i, level in enumerate(levels)])
    torch.testing.assert_close(network(x, NoiseLevels.of(levels, x)), expected, **EXACT)


# --- derivatives


def test_products_with_the_jacobian_in_a_batch_are_those_one_by_one() -> None:
    denoiser, x = mmdgs.score_denoiser(tiny()), images(2)
    x.requires_grad_(True)
    mean = denoiser(x, LEVEL)
    v = torch.randn(3, *x.shape, generator=seeded(1), dtype=torch.float64)
    (batched,) = torch.autograd.grad(mean, x, v, is_grads_batched=True, retain_graph=True)
    each = torch.stack([torch.autograd.grad(mean, x, row, retain_graph=True)[0] for row in v])
    torch.testing.assert_close(batched, each, **EXACT)
    torch.testing.assert_close(linearised(denoiser, x, LEVEL).pull(v), each, **EXACT)


@pytest.mark.usefixtures("forked")
def test_it_can_be_differentiated_twice() -> None:
    network = tiny().requires_grad_(False)

    def function(x: Tensor) -> Tensor:
        return network(x, LEVEL).square().sum((1, 2, 3))

    x = images(1, size=4).requires_grad_(True)
    assert torch.autograd.gradcheck(function, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, x, fast_mode=True)


# --- as a model
