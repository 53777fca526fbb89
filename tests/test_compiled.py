"""The fast path gives the plain path's numbers: traced programs, one for all levels, kept with the
network.

Without a GPU a program runs as it was traced; compiling and recording change no formula.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from nets import lively, tiny_unet
from torch import Tensor, nn
from toy_models import many_level_model

import mmdgs
from mmdgs import compiled
from mmdgs.compiled import Pure, fast_path
from mmdgs.cost import counting
from mmdgs.denoisers import (
    Denoiser,
    denoise,
    edm_denoiser,
    energy_denoiser,
    noise_denoiser,
    score_denoiser,
    velocity_denoiser,
)
from mmdgs.derivatives import group_norm, load_forward_mode
from mmdgs.jacobians import linearised
from mmdgs.models import load
from mmdgs.networks import NCSNv2
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.randomness import randn, seeded, signs

SHAPE = (1, 6, 6)
LEVELS = (NoiseLevel(sigma=0.4), NoiseLevel(alpha=0.8, sigma=0.6))
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64, sums in another order


def net(**options: object) -> nn.Module:
    network = tiny_unet(**{"multipliers": [1], "blocks": 1, "attention": [0], **options})
    return network.double().eval().requires_grad_(False)


class Small(nn.Module):
    """A convolutional network that is traced in no time."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # torch's layers start from the global generator
            first, last = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Conv2d(4, 1, 3, padding=1)
            dilated = nn.Conv2d(4, 4, 3, padding=(1, 2), dilation=(1, 2), groups=2)
            inside = nn.GroupNorm(2, 4), nn.SiLU(), dilated, nn.Upsample(scale_factor=2)
            self.layers = nn.Sequential(first, *inside, last)
        lively(self, seed).double().eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Edm(Small):
    """Called as EDM's networks are."""

    img_channels, img_resolution = 1, 6

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return x / (1 + sigma**2) + sigma * self.layers(x)


def pretrained_model() -> Denoiser:
    model = many_level_model(SHAPE)
    model.network.double().requires_grad_(False)
    return model


DENOISERS: dict[str, Callable[[], Denoiser]] = {
    "energy": lambda: energy_denoiser(Small()),
    "energy of a U-Net": lambda: energy_denoiser(net()),
    "noise": lambda: noise_denoiser(Small()),
    "velocity": lambda: velocity_denoiser(Small()),
    "edm, conditional": lambda: edm_denoiser(net(conditional=True)),
    "ncsnv2": lambda: score_denoiser(
        lively(NCSNv2(1, width=4)).double().requires_grad_(False).eval()
    ),
    "model of many levels": pretrained_model,
    "edm network": lambda: load(Edm()),
}


LONG = ("energy of a U-Net", "ncsnv2", "edm, conditional", "model of many levels")
"""Traced in a quarter of a minute or more, and so by `make test-all`."""


def batch(rows: int = 3, seed: int = 0) -> Tensor:
    return randn((rows, *SHAPE), torch.empty(0, dtype=torch.float64), seeded(seed))


def probes(count: int, like: Tensor) -> Tensor:
    return signs((len(like), count, *like.shape[1:]), like, seeded(7)).transpose(0, 1)


@contextmanager
def programs_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of programs that are made inside."""
    kinds: list[str] = []
    make = compiled.make_program

    def counted(kind: str, *rest: object) -> object:
        kinds.append(kind)
        return make(kind, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, fast_path("now"):
        patch.setattr(compiled, "make_program", counted)
        yield kinds


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in DENOISERS]
)
def test_mean_and_products_are_the_plain_ones_and_one_program_serves_all_levels(
    name, monkeypatch, caplog
) -> None:
    denoiser, x = DENOISERS[name](), batch()
    v = probes(2, x)
    with (
        torch.no_grad(),
        caplog.at_level(logging.WARNING, "mmdgs"),
        programs_made(monkeypatch) as kinds,
    ):
        for level in LEVELS:
            with fast_path("never"):
                plain = linearised(denoiser, x, level)
                expected = plain.mean, plain.pull(v), plain.symmetric(v)
            ours = linearised(denoiser, x, level)
            pulled, symmetric = ours.pull(v), ours.symmetric(v)
            torch.testing.assert_close((ours.mean, pulled, symmetric), expected, **CLOSE)
            torch.testing.assert_close(denoise(denoiser, x, level), expected[0], **CLOSE)
    assert kinds == (["push", "mean"] if "energy" in name else ["pull", "symmetric", "mean"])
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    "name", ["noise", pytest.param("edm, conditional", marks=pytest.mark.slow)]
)
def test_rows_may_have_levels_of_their_own(name, monkeypatch) -> None:
    denoiser, x = DENOISERS[name](), batch(2)
    levels = NoiseLevels.of(LEVELS, x)
    with programs_made(monkeypatch) as kinds:
        pulled = linearised(denoiser, x, levels).pull(probes(1, x))
        each = [linearised(denoiser, x, level).pull(probes(1, x)) for level in LEVELS]
    assert kinds == ["pull"]
    expected = torch.stack([products[:, i] for i, products in enumerate(each)], 1)
    torch.testing.assert_close(pulled, expected, **CLOSE)


@pytest.mark.parametrize(
    "estimator",
    [
        lambda d: mmdgs.DiagonalMoments(d, probes=3),
        mmdgs.FullMoments,
        lambda d: mmdgs.KrylovMoments(d, steps=4),
    ],
)
def test_estimators_use_it_by_themselves(estimator, monkeypatch) -> None:
    denoiser, x = score_denoiser(Small()), batch()

    def draw() -> tuple[Tensor, Tensor]:
        generator = seeded(1)
        q = estimator(denoiser)(x, LEVELS[0], generator=generator)
        return q.mean, q.sample(generator=generator)

    with counting() as plain_cost:
        expected = draw()
    with programs_made(monkeypatch) as kinds, counting() as cost:
        ours = draw()
    assert kinds
    assert cost == plain_cost
    # Of roots of small eigenvalues.
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-8)


def test_a_smaller_batch_is_filled_up_and_a_much_smaller_one_gets_a_program_of_its_own(
    monkeypatch,
) -> None:
    denoiser, x = score_denoiser(Small()), batch(8)
    with programs_made(monkeypatch) as kinds:
        for rows, count, expected in ((8, 4, 1), (5, 3, 1), (1, 1, 2), (8, 5, 3)):
            v = probes(count, x[:rows])
            pulled = linearised(denoiser, x[:rows], LEVELS[0]).pull(v)
            with fast_path("never"):
                torch.testing.assert_close(
                    pulled, linearised(denoiser, x[:rows], LEVELS[0]).pull(v), **CLOSE
                )
            assert len(kinds) == expected


def test_weights_that_change_are_seen(monkeypatch) -> None:
    network, x = Small(), batch()
    denoiser = score_denoiser(network)
    with torch.no_grad(), programs_made(monkeypatch) as kinds:
        before = denoise(denoiser, x, LEVELS[0])
        for weight in network.parameters():
            weight.mul_(1.5)
        changed = denoise(denoiser, x, LEVELS[0])
        assert len(kinds) == 1
        network.layers[0].weight = nn.Parameter(
            torch.zeros_like(network.layers[0].weight), requires_grad=False
        )
        replaced = denoise(denoiser, x, LEVELS[0])
        assert len(kinds) == 2
        assert not torch.equal(before, changed)
        with fast_path("never"):
            torch.testing.assert_close(replaced, denoise(denoiser, x, LEVELS[0]), **CLOSE)


class Branching(Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if x.sum() > 0 else self.layers(-x)


class Noisy(Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + torch.rand(1, dtype=x.dtype).item()


@pytest.mark.parametrize("network", [Branching, Noisy])
def test_what_cannot_be_traced_goes_on_plainly_and_the_log_says_so_once(network, caplog) -> None:
    denoiser, x, means = score_denoiser(network()), batch(), []
    caplog.set_level(logging.WARNING)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for mode in ("now", "now", "never"):
            torch.manual_seed(0)
            with fast_path(mode):
                means.append(denoise(denoiser, x, LEVELS[0]))
    torch.testing.assert_close(means[1], means[2], **CLOSE)
    assert ["no fast path" in record.getMessage() for record in caplog.records] == [True]


def test_a_program_that_gives_other_numbers_is_refused(monkeypatch, caplog) -> None:
    denoiser, x = score_denoiser(Small()), batch()
    traced = compiled.traced

    def wrong(kind: str, pure: Pure, *rest: object) -> object:
        twice = replace(pure, function=lambda x, *numbers: 2 * pure.function(x, *numbers))
        return traced(kind, twice, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(compiled, "traced", wrong)
    with fast_path("now"), caplog.at_level(logging.WARNING, "mmdgs"):
        pulled = linearised(denoiser, x, LEVELS[0]).pull(probes(1, x))
    plain = linearised(denoiser, x, LEVELS[0]).pull(probes(1, x))
    torch.testing.assert_close(pulled, plain, **CLOSE)
    assert "differ" in caplog.text


@pytest.mark.parametrize("off", ["training", "gradients", "a CPU", "never"])
def test_where_it_does_not_apply_nothing_is_compiled(off, monkeypatch) -> None:
    network = Small().train(off == "training")
    mode = {"a CPU": "auto", "never": "never"}.get(off, "now")
    grad = torch.set_grad_enabled(off == "gradients")
    with programs_made(monkeypatch) as kinds, fast_path(mode), grad:
        denoise(score_denoiser(network), batch(), LEVELS[0])
    assert not kinds


def test_a_network_with_programs_is_copied_and_saved_as_before(monkeypatch) -> None:
    network, x = Small(), batch()
    with torch.no_grad(), programs_made(monkeypatch) as kinds:
        denoise(score_denoiser(network), x, LEVELS[0])
        expected = denoise(score_denoiser(network), x, LEVELS[0])
        for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            torch.testing.assert_close(
                denoise(score_denoiser(other), x, LEVELS[0]), expected, **CLOSE
            )
    assert len(kinds) == 3
    assert set(network.state_dict()) == set(Small().state_dict())


def test_mixed_precision_has_programs_of_its_own(monkeypatch) -> None:
    network, x = Small().float(), batch().float()
    denoiser = score_denoiser(network)
    with torch.no_grad(), programs_made(monkeypatch) as kinds:
        full = denoise(denoiser, x, LEVELS[0])
        with torch.autocast("cpu", torch.bfloat16):
            low = denoise(denoiser, x, LEVELS[0])
            with fast_path("never"):
                plain = denoise(denoiser, x, LEVELS[0])
    assert kinds == ["mean", "mean"]
    torch.testing.assert_close(low, plain, rtol=2e-2, atol=2e-2)
    assert not torch.equal(low, full)


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 5), (2, 6, 4, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_and_its_derivatives_are_torchs(shape, affine) -> None:
    load_forward_mode()
    x, u, v = (randn(shape, torch.empty(0, dtype=torch.float64), seeded(i)) for i in range(3))
    weight, bias = (randn((6,), x, seeded(i)) if affine else None for i in (3, 4))

    def ours(x: Tensor) -> Tensor:
        return group_norm(x, 3, weight, bias, 1e-3)

    def theirs(x: Tensor) -> Tensor:
        return nn.functional.group_norm(x, 3, weight, bias, 1e-3)

    def slope(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return torch.func.grad(lambda x: (u * f(x).sin()).sum())

    torch.testing.assert_close(ours(x), theirs(x), **CLOSE)
    torch.testing.assert_close(slope(ours)(x), slope(theirs)(x), **CLOSE)
    torch.testing.assert_close(
        torch.func.jvp(slope(ours), (x,), (v,))[1],
        torch.func.vjp(slope(theirs), x)[1](v)[0],
        **CLOSE,
    )


@pytest.mark.parametrize("first_line", [0, 1_000])
def test_group_norm_keeps_its_digits_far_from_zero(first_line: float) -> None:
    x = 1000 + randn((2, 4, 8, 8), torch.empty(0), seeded(0))
    x[:, :, 0] += first_line  # sums are of distances from it
    exact = nn.functional.group_norm(x.double(), 2)
    # float32 holds 1000 to 6e-5; squares would lose all.
    assert (group_norm(x, 2) - exact).abs().max() < 1e-3
