"""The NCSNv2 network: its parts against plain formulas, its derivatives, and as a model of mmdgs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nets import lively
from torch import Tensor
from torch.nn import functional

import mmdgs
from mmdgs import losses
from mmdgs.jacobians import linearised, mean_and_jacobian
from mmdgs.models import Model, ModelConfig
from mmdgs.networks import NCSNv2
from mmdgs.networks.ncsnv2 import ConvMeanPool, DilatedBlock, InstanceNormPlus
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.randomness import seeded

LEVEL = NoiseLevel(sigma=0.5)
EXACT = {"rtol": 1e-9, "atol": 1e-10}  # in float64
SIGMAS = (2.0, 0.5, 0.1)


@pytest.fixture
def forked(_no_global_randomness: None) -> Iterator[None]:
    """torch's own layers, and gradcheck, draw from the global generator."""
    with torch.random.fork_rng():
        yield


def tiny(channels: int = 1, width: int = 2) -> NCSNv2:
    return lively(NCSNv2(channels, width=width)).double()


def images(n: int = 2, channels: int = 1, size: int = 6) -> Tensor:
    return torch.randn(n, channels, size, size, generator=seeded(5), dtype=torch.float64)


def tiny_score_model(channels: int = 1, size: int = 6) -> Model:
    config = ModelConfig("ncsnv2", "score", (channels, size, size), {"width": 4}, sigmas=SIGMAS)
    model = Model.build(config)
    lively(model.network)
    return model


# --- its parts --------------------------------------------------------------------------------------------------


def test_the_norm_is_instance_norm_and_the_standardised_means() -> None:
    norm, x = lively(InstanceNormPlus(5)).double(), torch.randn(3, 5, 4, 6, generator=seeded(0), dtype=torch.float64)
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
    found = pool(images(1, size=5))
    assert found.shape == (1, 1, 3, 3)
    torch.testing.assert_close(found[..., 2, 2], h[..., 4, 4], **EXACT)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("down", "dilation", "kernels", "side"),
    [(False, 1, (3, 3, 1), 8), (True, 1, (3, 3, 1), 4), (True, 2, (3, 3, 3), 8), (False, 4, (3, 3, 3), 8)],
)
def test_residual_blocks(down: bool, dilation: int, kernels: tuple[int, ...], side: int) -> None:
    block = DilatedBlock(4, 6, down=down, dilation=dilation)
    assert block(torch.zeros(1, 4, 8, 8)).shape == (1, 6, side, side)
    convs = [getattr(conv, "conv", conv) for conv in (block.conv1, block.conv2, block.shortcut)]
    assert tuple(conv.kernel_size[0] for conv in convs) == kernels
    assert block.conv1.out_channels == (4 if down else 6)
    assert DilatedBlock(4, 4, dilation=dilation).shortcut is None


def test_it_has_the_public_size() -> None:
    network = NCSNv2(3)
    assert sum(p.numel() for p in network.parameters()) == 29_694_083
    assert len(network.state_dict()) == 153
    assert network.refine4.output_convs["3_2_conv"].bias is None


# --- as a function ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [2, 7, 28, 32, 64])
def test_any_size_and_channels(size: int, channels: int) -> None:
    out = tiny(channels)(images(1, channels, size), LEVEL)
    assert out.shape == (1, channels, size, size)
    assert out.abs().max() > 1e-3


def test_images_need_not_be_square_and_rows_do_not_see_each_other() -> None:
    network, x = tiny(), torch.randn(3, 1, 5, 8, generator=seeded(0), dtype=torch.float64)
    torch.testing.assert_close(network(x, LEVEL)[1:2], network(x[1:2], LEVEL), **EXACT)


def test_the_level_only_divides_and_another_alpha_rescales() -> None:
    network, x = tiny(), images()
    at_half = network(x, LEVEL)
    torch.testing.assert_close(at_half, network.body(2 * x - 1) / 0.5, **EXACT)
    # x_t' = a x_t has the score s(x_t) / a at (a, a sigma).
    torch.testing.assert_close(network(0.3 * x, NoiseLevel(alpha=0.3, sigma=0.15)), at_half / 0.3, **EXACT)


def test_a_level_for_each_row() -> None:
    network, x = tiny(), images(3)
    levels = [NoiseLevel(sigma=2.0), LEVEL, NoiseLevel(alpha=0.6, sigma=0.8)]
    expected = torch.cat([network(x[i : i + 1], level) for i, level in enumerate(levels)])
    torch.testing.assert_close(network(x, NoiseLevels.of(levels, x)), expected, **EXACT)


@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (2, 36), (1, 6, 6)])
def test_what_is_no_batch_of_its_images_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images \(B, 1, H, W\)"):
        tiny()(torch.zeros(shape, dtype=torch.float64), LEVEL)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="the width 2, got channels=1, outputs=1, width=1"):
        NCSNv2(1, width=1)


# --- derivatives ------------------------------------------------------------------------------------------------


def test_products_with_the_jacobian_in_a_batch_are_those_one_by_one() -> None:
    denoiser, x = mmdgs.score_denoiser(tiny()), images(2)
    x.requires_grad_(True)
    mean = denoiser(x, LEVEL)
    v = torch.randn(3, *x.shape, generator=seeded(1), dtype=torch.float64)
    (batched,) = torch.autograd.grad(mean, x, v, is_grads_batched=True, retain_graph=True)
    each = torch.stack([torch.autograd.grad(mean, x, one, retain_graph=True)[0] for one in v])
    torch.testing.assert_close(batched, each, **EXACT)
    torch.testing.assert_close(linearised(denoiser, x, LEVEL).pull(v), each, **EXACT)


@pytest.mark.usefixtures("forked")
def test_it_can_be_differentiated_twice() -> None:
    network = tiny().requires_grad_(False)

    def function(x: Tensor) -> Tensor:
        return network(x, LEVEL).square().sum((1, 2, 3))

    x = images(1, size=4).requires_grad_(True)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_moments_on_it() -> None:
    denoiser, x = mmdgs.score_denoiser(tiny().requires_grad_(False)), images(2, size=4)
    jacobian = torch.stack(
        [torch.autograd.functional.jacobian(lambda row: denoiser(row, LEVEL), x[i : i + 1]) for i in range(2)]
    ).reshape(2, 16, 16)
    torch.testing.assert_close(mean_and_jacobian(denoiser, x, LEVEL)[1], jacobian, **EXACT)
    variances = 0.25 * jacobian.diagonal(dim1=1, dim2=2).reshape(x.shape)
    exact = mmdgs.DiagonalMoments(denoiser, probes=None)(x, LEVEL)
    torch.testing.assert_close(exact.cov.diagonal(), variances.clamp(min=0.25e-6), **EXACT)
    # A probe's diagonal errs by the off-diagonal part: independent errors over 400 probes.
    probed = mmdgs.DiagonalMoments(denoiser, probes=400)(x, LEVEL, generator=seeded(2))
    symmetric = (jacobian + jacobian.mT) / 2
    spread = 0.25 * (2 * symmetric.square().sum(2)).sqrt().max() / 20
    torch.testing.assert_close(probed.cov.diagonal(), exact.cov.diagonal(), rtol=0, atol=5 * spread.item())


# --- as a model -------------------------------------------------------------------------------------------------


def test_it_trains_at_many_levels() -> None:
    model = tiny_score_model()
    x = images(3).float()
    levels = NoiseLevels.of(model.levels, x)
    losses.dsm(model.denoiser_of(model.network), x, levels, generator=seeded(0)).sum().backward()
    # A bias before the plain mean over channels may have a small gradient, none has none.
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.network.parameters())
    assert sum(p.grad.abs().max() > 0 for p in model.network.parameters()) > 0.95 * 153


def test_it_is_saved_and_loaded_with_its_levels(tmp_path: Path) -> None:
    model = tiny_score_model()
    found = mmdgs.load(model.save_pretrained(tmp_path))
    assert found.levels == model.levels == tuple(NoiseLevel(sigma=sigma) for sigma in SIGMAS)
    x = images().float()
    assert torch.equal(found(x, found.levels[1]), model(x, model.levels[1]).detach())
    card = (tmp_path / "README.md").read_text()
    assert "3, sigma 2 to 0.1, alpha 1" in card
    assert "model.levels[0]" in card


def test_a_seed_gives_the_same_network() -> None:
    one, same, other = (NCSNv2(1, width=2, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["begin_conv.weight"], other["begin_conv.weight"])
    assert torch.equal(one["normalizer.gamma"], torch.ones(2))
