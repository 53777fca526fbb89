"""The benchmark's plain implementations must be right, or its ratios mean nothing."""

import json
from dataclasses import replace

import pytest
import torch
from nets import random_images, tiny_model
from torch import nn
from typer.testing import CliRunner

from mmdgs import cli
from mmdgs.denoisers import score_denoiser
from mmdgs.errors import UsageError
from mmdgs.lab import bench
from mmdgs.lab.bench import comparisons, plain, timing
from mmdgs.models import save
from mmdgs.moments import FLOOR, DiagonalMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.networks import build_network, preset
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, seeded
from mmdgs.samplers import gibbs_plan, run
from mmdgs.schedules import geometric
from mmdgs.training import new_model
from mmdgs.training.recipe import Recipe

CPU = torch.device("cpu")


class Gaussian(nn.Module):
    """The energy x^2 / (2 v) of N(0, v), and its score."""

    def __init__(self, variance: float, *, score: bool = False) -> None:
        super().__init__()
        self.variance, self.score = variance, score

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x / self.variance if self.score else x.square() / (2 * self.variance)


# --- the plain way --------------------------------------------------------------------------------------------------


def test_the_plain_chain_samples_the_clean_gaussian():
    # The noisy density N(0, 1.25) at sigma = 0.5 has the clean model N(0, 1). A step keeps 1 / 1.25 of the state, so
    # the squares of a chain of n steps are worth n (1 - 0.64) / (1 + 0.64) draws of variance 2.
    steps, d = 400, 12
    chain = plain.plain_chain(Gaussian(1.25), torch.randn(d, generator=seeded(1)), steps, 0.5, seeded(0))
    worth = d * steps * (1 - 0.64) / (1 + 0.64)
    assert abs(chain.square().mean().item() - 1) < 5 * (2 / worth) ** 0.5


def test_the_batched_chains_sample_the_clean_gaussian():
    x = plain.batched_chain(Gaussian(1.25), 3 * torch.ones(2_000, 3), 40, 0.5, seeded(0))
    assert abs(x.square().mean().item() - 1) < 5 * (2 / x.numel()) ** 0.5


def test_the_plain_moments_are_exact_where_the_jacobian_is_diagonal():
    denoiser, x_t = score_denoiser(Gaussian(2.0, score=True)), torch.ones(3, 1, 4, 4)
    mean, variances = plain.plain_moments(denoiser, x_t, NoiseLevel(sigma=0.5), 2, seeded(0))
    torch.testing.assert_close(mean, torch.full((3, 1, 4, 4), 1 - 0.25 / 2))
    torch.testing.assert_close(variances, torch.full((3, 1, 4, 4), 0.25 - 0.0625 / 2))


@pytest.mark.parametrize("level", [NoiseLevel(sigma=0.4), NoiseLevel(alpha=0.7, sigma=0.6)])
def test_the_plain_moments_are_our_estimator_on_the_same_probes(level):
    # The same sum of the same products in float64, in another order; some variances are lifted to the floor.
    network = comparisons.small_convnet(channels=2, width=8, depth=1).double()
    denoiser = score_denoiser(lambda x: 30 * network(x))
    x_t = torch.randn(3, 2, 6, 6, generator=seeded(1), dtype=torch.float64)
    mean, variances = plain.plain_moments(denoiser, x_t, level, 5, Streams(4, 3))
    q = DiagonalMoments(denoiser, probes=5, floor=FLOOR, design=Rademacher())(x_t, level, generator=Streams(4, 3))
    torch.testing.assert_close(q.mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.cov.diagonal(), variances, rtol=1e-10, atol=1e-12)
    assert 0 < q.repaired.sum() < 3


@pytest.mark.parametrize("sweeps", [1, 3])
def test_the_plain_gibbs_loop_is_algorithm_2(sweeps):
    # Our plan on the same streams, in float64; rounding is carried through 2 pairs of levels.
    model = comparisons.random_model("unet-tiny", (1, 8, 8))
    model.network.double()
    levels = geometric(3, 2.0, 0.1)
    x = torch.randn(2, 1, 8, 8, generator=seeded(1), dtype=torch.float64)
    plan = gibbs_plan(DiagonalMoments(model, probes=2, design=Rademacher()), levels, sweeps=sweeps)
    found = plain.plain_gibbs(model, x, levels, sweeps, 2, Streams(3, 2, purpose="steps"))
    torch.testing.assert_close(found, run(plan, x, seed=3, progress=None).x, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("param", ["score", "energy"])
def test_the_plain_training_step_is_its_formula(param):
    # One step by hand: Adam's first step moves every weight by the learning rate against its gradient's sign.
    images, sigma = random_images(4), 0.5
    model, same = tiny_model(param), tiny_model(param)
    found = plain.plain_steps(model, images, 4, 1)
    generator = seeded(0)
    x = (images + torch.rand(images.shape, generator=generator)) / 256
    e = torch.randn(x.shape, generator=generator)
    x_t = (x + sigma * e).requires_grad_(True)
    out = same.network(x_t)
    score = -torch.autograd.grad(out.sum(), x_t, create_graph=True)[0] if param == "energy" else out
    expected = (0.5 * (score + e / sigma) ** 2).sum() / 4
    assert found == pytest.approx(expected.item(), rel=1e-5)
    parameters = list(same.network.parameters())
    gradients = torch.autograd.grad(expected, parameters, allow_unused=True)
    large = 0
    for before, after, gradient in zip(parameters, model.network.parameters(), gradients, strict=True):
        if gradient is None:
            assert torch.equal(before, after)
            continue
        clear = gradient.abs() > 1e-3  # far from Adam's epsilon and from rounding
        large += clear.sum().item()
        torch.testing.assert_close((after - before)[clear], -1e-4 * gradient.sign()[clear], rtol=0, atol=2e-6)
    assert large > 1000


def test_the_plain_training_takes_the_images_in_turn():
    def losses(changed):
        images = random_images(5)
        images[changed] = 0
        return [plain.plain_steps(tiny_model("score"), images, 2, steps) for steps in (1, 2)]

    first, second, last = losses(0), losses(2), losses(4)
    assert first[0] != second[0] == last[0]  # batches of two, and no third one
    assert second[1] != last[1]


# --- what is measured -----------------------------------------------------------------------------------------------


def test_random_weights_leave_no_layer_at_zero():
    kind, options = preset("unet-tiny")
    network = build_network(kind, 1, 1, options)
    assert any(not weight.any() for weight in network.parameters() if weight.ndim > 1)
    before = {name: weight.clone() for name, weight in network.named_parameters() if weight.any()}
    comparisons.awake(network)
    assert all(weight.any() for weight in network.parameters() if weight.ndim > 1)
    x = torch.ones(1, 1, 8, 8, requires_grad=True)
    assert torch.autograd.grad(network(x).sum(), x)[0].abs().min() > 0
    after = dict(network.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items()), "what was not zero is as it was"


def test_the_chain_benchmark_measures_every_row(monkeypatch):
    monkeypatch.setattr(comparisons, "CHAIN_STEPS", {"cpu": {1: 20, 5: 20, 1000: 10}})
    rows = bench.chain(CPU, quick=True)
    assert [row.unit for row in rows] == ["chain-steps/s"] * 4
    assert all(row.plain > 0 and row.ours > 0 and row.first_call > 0 for row in rows)
    assert len({row.plain for row in rows[:3]}) == 1  # the plain way runs one chain at a time, whatever their number
    assert rows[3].plain > 3 * rows[0].plain  # batching alone is worth that much, and more
    assert rows[3].ours == rows[2].ours
    assert rows[2].name == "2-D full covariance, 1,000 chains, 2 steps"


def test_the_moments_benchmark_compares_like_with_like():
    rows = bench.moments(CPU, bench.Sizes(1, 2, 16), quick=True)
    assert [row.name for row in rows] == [
        "mnist energy, 1x16x16, batch 1, 2 probes",
        "small convnet, 3x16x16, batch 1, 2 probes",
    ]
    assert all(row.plain > 0 and row.ours > 0 and row.precision == "float32" for row in rows)
    assert all(row.error < 1e-4 and row.memory is None for row in rows)  # the same probes, in float32


def test_the_error_shows_short_numbers():
    # bfloat16 keeps 8 bits: a relative error of 2^-9 a number, and some of that is left in the diagonal.
    case = replace(comparisons.cases(CPU)[-1], precisions=("float32", "bf16"))
    exact, short = comparisons.case_rows(case, CPU, 1, 2, 16, 1)
    assert exact.error < 1e-5
    assert 1e-5 < short.error < 1e-1
    assert (exact.precision, short.precision) == ("float32", "bf16")


def test_the_sweep_varies_one_thing_at_a_time(monkeypatch):
    monkeypatch.setattr(comparisons, "SWEPT_BATCHES", {"cpu": (1, 2)})
    monkeypatch.setattr(comparisons, "SWEPT_SIZES", (8, 16))
    points = bench.sweep(CPU, bench.Sizes(1, 1, 8), quick=True)
    assert [(one.batch, one.probes, one.size) for one in points] == [(1, 1, 8), (1, 1, 16), (1, 3, 8), (2, 1, 8)]
    for one in points:
        assert one.floor == pytest.approx((1 + one.probes) * one.forward)
        assert one.ratio == pytest.approx(one.seconds / one.floor)
        assert one.seconds > 0


@pytest.mark.parametrize("named", [False, True])
def test_the_sampler_benchmark_says_seconds_a_step(named, monkeypatch, tmp_path):
    monkeypatch.setattr(comparisons, "SAMPLED", {"cpu": ("unet-tiny", (1, 8, 8), 2)})
    model, what = None, "unet-tiny, random"
    if named:
        model = what = str(tmp_path / "model")
        save(new_model(Recipe(model="unet-tiny", param="noise", levels="linear:20"), (1, 8, 8)), model)
    (row,) = bench.sampler(CPU, model=model, levels_count=3, sweeps=2, probes=1, quick=True)
    assert row.unit == "s/image-step"
    assert row.ratio == pytest.approx(row.plain / row.ours)
    assert row.name == f"Gibbs, {what}, 1x8x8, batch 2, 2 levels, 2 sweeps, 1 probes"


def test_the_training_benchmark_measures_both_forms(monkeypatch):
    monkeypatch.setattr(comparisons, "TRAINED", {"cpu": ("unet-tiny", (1, 8, 8), 4, 1, "float32")})
    monkeypatch.setattr(comparisons, "IMAGES", 8)
    rows = bench.train(CPU, quick=True)
    assert [row.name.split(", ")[1] for row in rows] == ["score", "energy"]
    assert all(row.unit == "images/s" and row.plain > 0 and row.ours > 0 for row in rows)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bench.moments(CPU, bench.Sizes(size=12)), "size must be a multiple of 8, got 12"),
        (lambda: bench.sampler(CPU, model="mnist"), "'mnist' was trained at one noise level"),
        (lambda: bench.sampler(CPU, precision="half"), "precision must be one of float32, tf32, bf16, got 'half'"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_the_first_call_is_timed_apart_and_the_best_counts(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def work(name, *seconds):
        left = list(seconds)

        def call():
            order.append(name)
            clock[0] += left.pop(0)

        return call, 6

    # A first call that compiles, a warm-up that is faster than all that counts, and two that count.
    a, b = timing.measure([work("a", 50.0, 1.0, 3.0, 4.0), work("b", 5.0, 9.0, 8.0, 7.0)], CPU, repeats=2)
    assert a == (3.0 / 6, 50.0, None)
    assert b == (7.0 / 6, 5.0, None)
    assert order == ["a", "b"] * 4, "they take turns"
    rate, time = (bench.Row.of("w", unit, a, b) for unit in ("images/s", "s/image"))
    assert (rate.plain, rate.ours, rate.first_call) == (pytest.approx(2), pytest.approx(6 / 7), 5.0)
    assert (time.plain, time.ours) == (0.5, pytest.approx(7 / 6))
    assert rate.ratio == pytest.approx(time.ratio)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_shows_what_is_known_of_a_row(monkeypatch):
    known = {"first_call": 12.5, "plain_memory": 3 << 30, "memory": 1 << 29, "error": 0.0125}
    point = bench.Point("unet", "bf16", 10, 3, 32, 0.5, 0.1, None)
    asked = []

    def moments(device, sizes, *, quick):
        asked.append((sizes, quick))
        return [bench.Row("unet", "images/s", 20.0, 1234.0, "bf16", **known)]

    monkeypatch.setattr(bench, "moments", moments)
    monkeypatch.setattr(bench, "sweep", lambda device, sizes, quick: [point])
    words = ["bench", "moments", "--device", "cpu", "--batch", "3", "--probes", "2", "--size", "16"]
    shown = CliRunner().invoke(cli.app, words).output
    assert asked == [((3, 2, 16), False)]
    for text in ("bf16", "1,234", "61.7x", "12.5", "0.0125", "3", "0.5", "plain GiB", "first call s"):
        assert text in shown
    assert "The cost of one call" not in shown
    swept = CliRunner().invoke(cli.app, [*words, "--sweep"]).output
    assert "The cost of one call" in swept
    assert "1.25" in swept  # 0.5 s against 4 forward passes of 0.1
    found = json.loads(CliRunner().invoke(cli.app, [*words, "--sweep", "--json"]).output)
    assert found.keys() >= {"mmdgs", "torch", "device", "device_name", "threads", "rows"}
    assert found["rows"][0]["memory"] == 1 << 29
    assert found["rows"][0]["ratio"] == pytest.approx(61.7)
    assert found["sweep"][0]["floor"] == pytest.approx(0.4)


@pytest.mark.parametrize("name", ["sampler", "train"])
def test_empty_columns_are_left_out(name, monkeypatch):
    monkeypatch.setattr(bench, name, lambda device, **_: [bench.Row("Gibbs", "s/image-step", 0.5, 0.125)])
    shown = CliRunner().invoke(cli.app, ["bench", name, "--device", "cpu"]).output
    assert "4.0x" in shown
    assert "GiB" not in shown
    assert "error" not in shown


def test_the_psnr_of_both_is_beside_the_ratio(monkeypatch):
    row = bench.Row("sr:4", "s/draw", 30.0, 2.0, plain_psnr=21.25, psnr=23.5)
    asked = []
    monkeypatch.setattr(bench, "restoration", lambda device, **given: asked.append(given) or [row])
    words = ["bench", "restore", "--device", "cpu", "--operator", "box:8", "--images", "3"]
    shown = CliRunner().invoke(cli.app, words).output
    assert asked == [{"model": "cifar10", "operator": "box:8", "noise": 0.05, "images": 3, "quick": False}]
    for text in ("15.0x", "21.2", "23.5", "plain PSNR"):
        assert text in shown
