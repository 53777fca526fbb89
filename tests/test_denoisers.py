"""Denoisers: every adapter against the exact mixture, the energy's sign, and how networks are
called.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from oracles import NETWORK_KINDS, SCALED, exact_networks, numbers, points
from torch import Tensor, nn

import mmdgs
from mmdgs.denoisers import score, takes_level
from mmdgs.errors import UsageError
from mmdgs.interop.rows import by_level
from mmdgs.jacobians import blind_sigma
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.targets import GaussianMixture

TIGHT = {"rtol": 1e-11, "atol": 1e-11}
CONSTRUCTORS = {
    "energy": mmdgs.energy_denoiser,
    "score": mmdgs.score_denoiser,
    "noise": mmdgs.noise_denoiser,
    "clean": mmdgs.clean_denoiser,
    "velocity": mmdgs.velocity_denoiser,
}


@pytest.mark.parametrize("outputs", [(), (1,), (2,), (3, 2)], ids=str)
def test_energy_sign_by_a_closed_form(outputs: tuple[int, ...], level: NoiseLevel) -> None:
    # Target N(m, s^2): x_t has variance v = alpha^2 s^2 + sigma^2 and energy |x_t - alpha m|^2 /
    # 2v, shared out here over `outputs` unequal parts; the posterior mean pulls from x_t towards m,
    # not away from it.
    m, s = 1.5, 0.4
    v = level.alpha**2 * s**2 + level.sigma**2
    parts = torch.arange(1.0, 1 + max(1, torch.Size(outputs).numel()), dtype=torch.float64)
    parts = (parts / parts.sum()).reshape(outputs)

    def energy(x_t: Tensor) -> Tensor:
        whole = (x_t - level.alpha * m).square().sum(1) / (2 * v)
        return whole.reshape(-1, *(1 for _ in outputs)) * parts

    x_t = torch.tensor([[3.0, -1.0], [0.0, 2.0]], dtype=torch.float64)
    expected = m + level.alpha * s**2 / v * (x_t - level.alpha * m)
    torch.testing.assert_close(mmdgs.energy_denoiser(energy)(x_t, level), expected, **TIGHT)


@pytest.mark.parametrize("kind", NETWORK_KINDS)
def test_adapters_give_the_exact_mean(
    kind: str, target: tuple[GaussianMixture, tuple[int, ...]], level: NoiseLevel
) -> None:
    mixture, event = target
    denoiser = exact_networks(mixture)[kind]
    x_t = points(mixture, event, level, rows=7)
    exact = mixture.posterior(x_t, level).mean
    torch.testing.assert_close(denoiser(x_t, level), exact, **TIGHT)
    with torch.no_grad():
        without = denoiser(x_t, level)
    assert not without.requires_grad
    torch.testing.assert_close(without, exact, **TIGHT)
    expected = mixture.noised(level).score(x_t)
    torch.testing.assert_close(score(denoiser, x_t, level), expected, rtol=1e-9, atol=1e-9)


def test_energy_denoisers_can_be_trained() -> None:
    # dD/dw of the energy w |x|^2 / 2 is -sigma^2 x / alpha: the graph must reach through the inner
    # gradient.
    level = NoiseLevel(alpha=0.8, sigma=0.5)
    w = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    x_t = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    mean = mmdgs.energy_denoiser(lambda x: w * x.square().sum(1) / 2)(x_t, level)
    (slope,) = torch.autograd.grad(mean.sum(), w)
    assert slope.item() == pytest.approx(-(0.5**2) * 3.0 / 0.8, rel=1e-12)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class WithLevel(nn.Module):
    def forward(self, x: Tensor, level: NoiseLevel) -> Tensor:
        return x * level.sigma


def keyword_only(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


CALLS = {
    "function of x": (lambda x: x, False),
    "function of x and level": (lambda x, level: x * level.sigma, True),
    "function with any second name": (lambda x, t: x * t.sigma, True),
    "level with a default": (lambda x, level=None: x * level.sigma, True),
    "another option with a default": (lambda x, scale=1.0: x * scale, False),
    "keyword-only option": (keyword_only, False),
    "variable arguments": (lambda *inputs: inputs[0], False),
    "partial": (functools.partial(lambda scale, x: x * scale, 1.0), False),
    "partial with level": (functools.partial(lambda scale, x, level: x * level.sigma, 1.0), True),
    "module": (Plain(), False),
    "module with level": (WithLevel(), True),
    "sequential": (nn.Sequential(Plain()), False),
    "builtin": (torch.neg, False),
}


@pytest.mark.parametrize(("network", "with_level"), CALLS.values(), ids=CALLS.keys())
def test_networks_are_called_with_or_without_the_level(network, with_level: bool) -> None:
    assert takes_level(network) is with_level
    level, x_t = NoiseLevel(sigma=0.5), torch.ones(2, 3)
    factor = 0.5 if with_level else -1.0 if network is torch.neg else 1.0
    for kind, construct in CONSTRUCTORS.items():
        if kind == "clean":
            assert torch.equal(construct(network)(x_t, level), factor * x_t)
        else:
            assert construct(network).with_level is with_level


@pytest.mark.parametrize("kind", [kind for kind in CONSTRUCTORS if kind != "energy"])
def test_wrong_output_shapes_are_refused(kind: str) -> None:
    denoiser = CONSTRUCTORS[kind](lambda x: x[:, :2])
    with pytest.raises(ValueError, match=r"\(4, 3\), got \(4, 2\)"):
        denoiser(torch.zeros(4, 3), NoiseLevel(sigma=1.0))


@pytest.mark.parametrize(
    ("energy", "message"),
    [
        (lambda x: x.square().sum(), r"\(\)"),
        (lambda x: x.square().sum(0), r"\(3,\)"),
        (lambda x: x.detach().square().sum(1), "autograd"),
    ],
    ids=["summed over the batch", "summed over the wrong dimension", "detached"],
)
def test_wrong_energies_are_refused(energy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmdgs.energy_denoiser(energy)(torch.zeros(4, 3), NoiseLevel(sigma=1.0))


def test_a_blind_denoiser_is_told_the_level_in_its_covariance_alone() -> None:
    """Of data N(0, s^2): a network of clean numbers that knows the ratio of its level by itself."""
    s, level = 0.8, SCALED
    gain = s**2 / (s**2 + level.ratio**2)
    denoiser = mmdgs.blind_denoiser(lambda x: gain * x)
    x_t = numbers(4, 3)
    q = mmdgs.DiagonalMoments(denoiser, None)(x_t, level)
    torch.testing.assert_close(q.mean, gain * x_t / level.alpha, **TIGHT)
    variance = torch.full_like(x_t, level.ratio**2 * gain)
    torch.testing.assert_close(q.cov.diagonal(), variance, **TIGHT)


def test_a_blind_denoiser_tells_the_noise() -> None:
    """Each row by itself: of data N(0, S) with the exact mean, to the spread of so many numbers."""
    d, sigma = 20_000, torch.tensor([0.1, 0.6], dtype=torch.float64)
    spread = torch.linspace(0.01, 1.0, d, dtype=torch.float64)
    noise = sigma[:, None]
    clean, gain = spread * numbers(2, d), spread**2 / (spread**2 + noise**2)
    denoiser = mmdgs.blind_denoiser(lambda x: gain * x)
    x_t = clean + noise * numbers(2, d, seed=1)
    told = blind_sigma(denoiser, x_t, generator=Streams(0, 2))
    torch.testing.assert_close(told, sigma, rtol=4 / math.sqrt(2 * d), atol=0.0)
    identity = mmdgs.blind_denoiser(lambda x: 1.0 * x)
    with pytest.raises(UsageError, match="give sigma as a number"):
        blind_sigma(identity, x_t, generator=Streams(0, 2))


def test_the_posterior_of_an_image_takes_the_noise_from_a_blind_denoiser() -> None:
    """Flat grey images: all but the noise is known, and no patch need be looked at."""
    network = mmdgs.blind_denoiser(lambda x: x.mean((2, 3), keepdim=True).expand_as(x))
    noisy = 0.5 + 0.2 * numbers(1, 40, 40).float()
    settings = mmdgs.PosteriorSettings(components=0, draws=0)
    seen = mmdgs.image_posterior(network, noisy, settings)
    wide = mmdgs.image_posterior(network, noisy, settings, interval=(-1.0, 1.0))
    assert seen.sigma == pytest.approx(0.2, rel=0.06)
    assert wide.sigma == pytest.approx(seen.sigma, rel=1e-4)


def test_rows_of_several_levels_come_back_in_their_order() -> None:
    x, sigma = numbers(5, 2), torch.tensor([0.3, 0.1, 0.3, 0.2, 0.1], dtype=torch.float64)
    told = by_level(lambda rows, level: rows * level.sigma, x, 1.0, sigma)
    torch.testing.assert_close(told, x * sigma[:, None], **TIGHT)
