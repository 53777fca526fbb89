"""The U-Net, dropout that belongs to the example, and both through torch.compile."""

from __future__ import annotations

import math

import pytest
import torch
from nets import lively, tiny_unet
from torch import Tensor, nn

import mmdgs
from mmdgs import losses
from mmdgs.denoisers import Compiled, Denoiser
from mmdgs.derivatives import load_forward_mode
from mmdgs.jacobians import linearised, mean_and_diagonal, mean_and_jacobian
from mmdgs.networks import ConvClassifier, RowDropout, UNet, dropout_keys
from mmdgs.networks.residual_unet import ResidualUNet
from mmdgs.networks.unet import Attention
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.randomness import Streams, seeded
from mmdgs.training.objective import CompiledEnergy

LEVEL = NoiseLevel(sigma=0.5)
EXACT = {"rtol": 1e-9, "atol": 1e-10}  # in float64


def images(
    n: int = 2, channels: int = 1, size: int = 8, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.randn(n, channels, size, size, generator=seeded(5), dtype=dtype)


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


# --- sizes and shapes


def test_the_default_is_the_papers_network() -> None:
    # Ho et al.'s 35.7 million parameters; without the time embedding the authors' 32.9 million.
    assert count(UNet(3)) == 32_856_707
    assert round(count(UNet(3, conditional=True)) / 1e6, 1) == 35.7


def test_a_fresh_network_puts_out_zeros_and_every_weight_can_learn() -> None:
    network = UNet(1, width=8, multipliers=(1, 2), blocks=1, attention=(1,), dropout=0.0)
    assert torch.equal(network(images()), torch.zeros(2, 1, 8, 8))
    network = lively(network)
    network(images()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in network.parameters())


def test_rows_do_not_see_each_other() -> None:
    network, x = tiny_unet(attention=[0, 1]).double(), images(3, dtype=torch.float64)
    torch.testing.assert_close(network(x)[1:2], network(x[1:2]), **EXACT)


# --- the noise level


def test_a_conditional_network_looks_at_the_ratio_of_the_level() -> None:
    network, x = tiny_unet(conditional=True), images()
    at = {sigma: network(x, NoiseLevel(sigma=sigma)) for sigma in (0.1, 0.11, 10.0)}
    assert (at[0.1] - at[0.11]).abs().max() > 1e-3
    assert (at[0.1] - at[10.0]).abs().max() > 1e-3
    torch.testing.assert_close(network(x, NoiseLevel(alpha=0.5, sigma=0.05)), at[0.1])
    denoised = mmdgs.score_denoiser(network)(x, LEVEL)
    torch.testing.assert_close(denoised, x + 0.25 * network(x, LEVEL))
    with pytest.raises(ValueError, match="conditional"):
        network(x)
    network = tiny_unet()
    assert torch.equal(network(x), network(x, NoiseLevel(sigma=0.1)))


# --- seeds and mistakes


@pytest.mark.parametrize("make", [UNet, ConvClassifier])
def test_the_seed_decides_the_weights(make) -> None:
    one, same, other = (make(1, 4, width=8, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[key], same[key]) for key in one)
    drawn = [key for key in one if one[key].std() > 0]
    assert len(drawn) > 5
    assert all(torch.isfinite(value).all() for value in one.values())
    weights = [key for key in drawn if "norm" not in key]
    assert not any(torch.equal(one[key], other[key]) for key in weights)


def test_weights_start_within_one_over_the_root_of_the_fan_in() -> None:
    weight = UNet(2, width=32).first.weight  # 2 channels and 3x3 pixels come in
    bound = 1 / math.sqrt(18)
    assert weight.abs().max() <= bound
    # U(-b, b) has variance b^2 / 3 and fourth moment b^4 / 5.
    error = 5 * bound**2 * math.sqrt((1 / 5 - 1 / 9) / weight.numel())
    assert abs(weight.square().mean().item() - bound**2 / 3) < error


@pytest.mark.parametrize(
    ("name", "value"), [("multipliers", []), ("attention", [2]), ("dropout", 1.0)]
)
def test_options_of_a_wrong_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        tiny_unet(**{name: value})


# --- derivatives


def test_an_energys_jacobian_is_symmetric_and_has_its_diagonal() -> None:
    network = tiny_unet(attention=[1]).double()
    denoiser, x = mmdgs.energy_denoiser(network), images(2, size=5, dtype=torch.float64)
    _, jacobian = mean_and_jacobian(denoiser, x, LEVEL)
    torch.testing.assert_close(jacobian, jacobian.mT, **EXACT)
    assert (jacobian - torch.eye(25, dtype=torch.float64)).abs().max() > 1e-3
    # By differences along a line: the derivative of D, which is itself a gradient.
    v, h = torch.randn(x.shape, generator=seeded(1), dtype=torch.float64), 1e-5
    slope = (denoiser(x + h * v, LEVEL) - denoiser(x - h * v, LEVEL)) / (2 * h)
    product = (jacobian @ v.flatten(1)[:, :, None])[..., 0]
    torch.testing.assert_close(product, slope.flatten(1), rtol=1e-5, atol=1e-7)
    _, diagonal = mean_and_diagonal(denoiser, x, LEVEL)
    torch.testing.assert_close(diagonal.flatten(1), jacobian.diagonal(dim1=1, dim2=2), **EXACT)


def test_training_gradients_of_an_energy_are_those_of_differences() -> None:
    # The loss holds a gradient in x; its gradient in the weights is a second derivative.
    network, x = tiny_unet(attention=[1]).double(), images(2, size=6, dtype=torch.float64)
    denoiser = mmdgs.energy_denoiser(network)

    def loss() -> Tensor:
        return losses.dsm(denoiser, x, LEVEL, generator=seeded(2)).sum()

    # All but one that moves no gradient.
    parameters = [p for name, p in network.named_parameters() if name != "last.2.bias"]
    gradients = torch.autograd.grad(loss(), parameters)
    shapes = enumerate(p.shape for p in parameters)
    directions = [torch.randn(n, generator=seeded(i), dtype=torch.float64) for i, n in shapes]
    expected = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    h, moved = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2, 1):
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=sign * h)
            moved.append(loss())
    torch.testing.assert_close((moved[0] - moved[1]) / (2 * h), expected, rtol=1e-5, atol=0)


def test_written_out_norms_let_products_be_batched(monkeypatch, caplog) -> None:
    # What a GPU does with fixed weights: all products with an energy's Jacobian in one pass.
    denoiser = mmdgs.energy_denoiser(tiny_unet().requires_grad_(False).eval())
    x_t = torch.rand(2, 1, 8, 8, generator=seeded(0))
    v = torch.randn(3, *x_t.shape, generator=seeded(1))
    one_by_one = torch.cat([linearised(denoiser, x_t, LEVEL).pull(row[None]) for row in v])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with caplog.at_level("INFO", logger="mmdgs"):
        batched = linearised(denoiser, x_t, LEVEL).pull(v)
    assert not caplog.records  # a line is logged where products fall back to one by one
    torch.testing.assert_close(batched, one_by_one, rtol=1e-4, atol=1e-5)


def test_attention_is_torchs_in_one_head() -> None:
    layer = next(m for m in tiny_unet().modules() if isinstance(m, Attention)).double()
    channels = layer.out.in_channels
    x = torch.randn(2, channels, 3, 5, generator=seeded(0), dtype=torch.float64)
    parts = layer.qkv(layer.norm(x)).flatten(2).chunk(3, dim=1)
    q, k, v = (part.mT for part in parts)  # (B, pixels, C)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v).mT.reshape(x.shape)
    torch.testing.assert_close(layer(x, None), x + layer.out(mixed), **EXACT)


# --- the network for photographs


def test_the_level_is_a_scale_and_a_shift_inside_a_block() -> None:
    """With convolutions that change nothing it is h + silu((1 + scale) h + shift)."""
    block = ResidualUNet(3, widths=(3,), blocks=(1,), conditional=True).lowest[0]
    for convolution in (block.conv1, block.conv2):
        nn.init.dirac_(convolution.weight)
        nn.init.zeros_(convolution.bias)
    nn.init.zeros_(block.level.weight)
    scale, shift = torch.tensor([0.5, 0.0, -0.3]), torch.tensor([-1.0, 2.0, 0.1])
    block.level.bias.data.copy_(torch.cat([scale, shift]))
    h = images(channels=3)
    inner = (1 + scale[:, None, None]) * h + shift[:, None, None]
    torch.testing.assert_close(
        block(h, torch.ones(2, block.level.in_features)), h + nn.functional.silu(inner)
    )


def test_one_level_for_all_rows_is_that_level_for_each() -> None:
    """One level goes into the convolutions' weights, several into what comes out of them."""
    network = lively(ResidualUNet(3, widths=(4, 6), blocks=(2, 1), conditional=True))
    x, level = images(channels=3, size=16), NoiseLevel(0.3)
    each = NoiseLevels.of([level] * len(x), x)
    torch.testing.assert_close(network(x, level), network(x, each))
    torch.testing.assert_close(network(x[:1], level), network(x, each)[:1])


@pytest.mark.parametrize("sides", [(16, 20), (19, 24), (21, 17)])
def test_sides_that_cannot_be_halved_are_reflected(sides: tuple[int, int]) -> None:
    network = lively(ResidualUNet(1, widths=(4, 6, 8), blocks=(1, 1, 1)))
    x = images(size=24)[..., : sides[0], : sides[1]]
    margins = (0, -sides[1] % 4, 0, -sides[0] % 4)
    whole = network(nn.functional.pad(x, margins, mode="reflect"))
    assert network(x).shape == x.shape
    torch.testing.assert_close(network(x), whole[..., : sides[0], : sides[1]])


def test_with_channels_last_it_is_mapped_and_has_every_derivative() -> None:
    network = lively(ResidualUNet(1, widths=(4, 6), blocks=(1, 1)))
    weight = network.lowest[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    x, u, v = images(size=16)[:1], images(size=16)[1:2], images(size=16)[1:2].flip(2)
    load_forward_mode()
    mean, pushed = torch.func.jvp(network, (x,), (u,))
    pulled = torch.func.vjp(network, x)[1](v)[0]
    assert (v * pushed).sum().item() == pytest.approx((u * pulled).sum().item(), rel=1e-5)
    mapped = torch.func.vmap(lambda one: network(one[None])[0])(torch.cat([x, u]))
    torch.testing.assert_close(mapped, torch.cat([mean, network(u)]))


# --- dropout


def masks(layer: RowDropout, keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    with dropout_keys(layer, keys):
        return layer(torch.ones(len(keys), *shape))


def test_a_mask_depends_on_the_examples_key_only() -> None:
    layer, keys = RowDropout(0.4, layer=2), torch.tensor([5, 9, 1 << 23, 0])
    together = masks(layer, keys, (3, 4, 4))
    for i in (2, 0):
        assert torch.equal(masks(layer, keys[i : i + 1], (3, 4, 4))[0], together[i])
    assert torch.equal(masks(layer, keys.flip(0), (3, 4, 4)), together.flip(0))
    assert not torch.equal(together[0], together[1])


def test_dropout_keeps_the_right_share_and_the_mean() -> None:
    asked, n = 0.1, 64 * 4096
    out = masks(RowDropout(asked, layer=0), torch.arange(64) * 1000, (4, 32, 32))
    kept = out != 0
    p = round(256 * asked) / 256  # a byte of a hash decides
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    # No pixel and no row is favoured: counts spread as binomial ones do (chi-squared).
    for counts, trials in ((kept.flatten(1).sum(1), 4096), (kept.flatten(1).sum(0), 64)):
        statistic = ((counts - trials * (1 - p)) ** 2).sum().item() / (trials * p * (1 - p))
        spread = math.sqrt(2 * len(counts) * max(1.0, 1 / (2 * trials * p * (1 - p))))
        assert abs(statistic - len(counts)) < 5 * spread


def test_masks_of_layers_rows_and_neighbours_are_independent() -> None:
    keys = torch.arange(32) * 77
    one, two = (masks(RowDropout(0.5, layer), keys, (4096,)) - 1 for layer in (0, 1))  # +1 and -1
    pairs = {
        "layers": one * two,
        "rows": one[1:] * one[:-1],
        "neighbours": one[:, 1:] * one[:, :-1],
        "lines": one[:, 28:] * one[:, :-28],
    }
    for name, product in pairs.items():
        assert abs(product.mean().item()) < 5 / math.sqrt(product.numel()), name


# --- torch.compile


def value_and_gradients(
    denoiser: Denoiser, network: nn.Module, keys: Tensor
) -> tuple[Tensor, list[Tensor]]:
    x = images(len(keys), size=7)
    parameters = list(network.parameters())
    with dropout_keys(network, keys):
        loss = losses.dsm(denoiser, x, LEVEL, generator=Streams(1, len(x)))
    gradients = torch.autograd.grad(
        loss.sum(), parameters, allow_unused=True, materialize_grads=True
    )
    return loss.detach(), list(gradients)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What mmdgs logged."""
    return [record.getMessage() for record in caplog.records if record.name == "mmdgs"]


def check_the_same(plain: Denoiser, compiled: Denoiser, network: nn.Module) -> None:
    keys = torch.tensor([7, 8, 9])
    value, gradients = value_and_gradients(plain, network, keys)
    compiled_value, compiled_gradients = value_and_gradients(compiled, network, keys)
    torch.testing.assert_close(compiled_value, value, rtol=1e-4, atol=1e-4)
    scale = max(g.abs().max().item() for g in gradients)
    for a, b in zip(compiled_gradients, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * scale)
    # Other keys drop others: the compiled function must not have kept the first ones.
    other, _ = value_and_gradients(plain, network, keys + 1)
    compiled_other, _ = value_and_gradients(compiled, network, keys + 1)
    assert (other - value).abs().max() > 1e-3
    torch.testing.assert_close(compiled_other, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_compiled_energy_or_score_is_the_same_function_with_the_same_gradients(caplog) -> None:
    network = tiny_unet(multipliers=[1], dropout=0.2)
    energy = mmdgs.energy_denoiser(network)
    check_the_same(energy, CompiledEnergy(energy, network, backend="aot_eager"), network)
    network = tiny_unet(multipliers=[1], dropout=0.2, conditional=True)
    score = mmdgs.score_denoiser(network)
    check_the_same(score, Compiled(score, backend="aot_eager"), network)
    assert not said(caplog), "it was not compiled"


def broken(*_: object) -> None:
    raise RuntimeError("no compiler here")


@pytest.mark.slow
def test_what_cannot_be_compiled_runs_as_it_is_and_the_log_says_so(caplog) -> None:
    network = tiny_unet(multipliers=[1], dropout=0.2)
    score, energy = mmdgs.score_denoiser(network), mmdgs.energy_denoiser(network)
    check_the_same(score, Compiled(score, backend=broken), network)
    assert len(said(caplog)) == 1
    check_the_same(energy, CompiledEnergy(energy, network, backend=broken), network)
    assert len(said(caplog)) == 3  # once for the value, once for the gradients
    assert all("torch.compile failed" in line for line in said(caplog))


def test_enlarging_is_written_out_where_it_is_compiled(monkeypatch) -> None:
    network = tiny_unet(multipliers=[1, 1, 2])
    x = torch.randn(2, 1, 7, 12, generator=seeded(0))
    plain = network(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(network(x), plain, rtol=1e-5, atol=1e-5)
