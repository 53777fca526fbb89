"""The benchmark's plain implementations must be right, or its ratios mean nothing."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from experiments import bench as experiments
from mmdgs import bench, cli
from mmdgs.denoisers import score_denoiser
from mmdgs.errors import UsageError
from mmdgs.models import save
from mmdgs.moments import FLOOR, DiagonalMoments
from mmdgs.moments.probes import Rademacher
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


def test_the_plain_chain_samples_the_clean_gaussian():
    # The noisy density N(0, 1.25) at sigma = 0.5 has the clean model N(0, 1). A step keeps 1 / 1.25
    # of the state, so the squares of a chain of n steps are worth n (1 - 0.64) / (1 + 0.64) draws
    # of variance 2.
    steps, d = 400, 12
    chain = bench.plain_chain(
        Gaussian(1.25), torch.randn(d, generator=seeded(1)), steps, 0.5, seeded(0)
    )
    worth = d * steps * (1 - 0.64) / (1 + 0.64)
    assert abs(chain.square().mean().item() - 1) < 5 * (2 / worth) ** 0.5


def test_the_batched_chains_sample_the_clean_gaussian():
    x = experiments.batched_chain(Gaussian(1.25), 3 * torch.ones(2_000, 3), 40, 0.5, seeded(0))
    assert abs(x.square().mean().item() - 1) < 5 * (2 / x.numel()) ** 0.5


def test_the_plain_moments_are_exact_where_the_jacobian_is_diagonal():
    denoiser, x_t = score_denoiser(Gaussian(2.0, score=True)), torch.ones(3, 1, 4, 4)
    mean, variances = bench.plain_moments(denoiser, x_t, NoiseLevel(sigma=0.5), 2, seeded(0))
    torch.testing.assert_close(mean, torch.full((3, 1, 4, 4), 1 - 0.25 / 2))
    torch.testing.assert_close(variances, torch.full((3, 1, 4, 4), 0.25 - 0.0625 / 2))


@pytest.mark.parametrize("level", [NoiseLevel(sigma=0.4), NoiseLevel(alpha=0.7, sigma=0.6)])
def test_the_plain_moments_are_our_estimator_on_the_same_probes(level):
    # The same sum of the same products in float64, in another order; some variances are lifted to
    # the floor.
    network = bench.small_convnet().double()
    denoiser = score_denoiser(lambda x: 30 * network(x))
    x_t = torch.randn(3, 3, 6, 6, generator=seeded(1), dtype=torch.float64)
    mean, variances = bench.plain_moments(denoiser, x_t, level, 5, Streams(4, 3))
    q = DiagonalMoments(denoiser, probes=5, floor=FLOOR, design=Rademacher())(
        x_t, level, generator=Streams(4, 3)
    )
    torch.testing.assert_close(q.mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.cov.diagonal(), variances, rtol=1e-10, atol=1e-12)
    assert 0 < q.repaired.sum() < 3


@pytest.mark.parametrize("sweeps", [1, 3])
def test_the_plain_gibbs_loop_is_algorithm_2(sweeps):
    # Our plan on the same streams, in float64; rounding is carried through 2 pairs of levels.
    model = experiments.random_model("unet-tiny", (1, 8, 8))
    model.network.double()
    levels = geometric(3, 2.0, 0.1)
    x = torch.randn(2, 1, 8, 8, generator=seeded(1), dtype=torch.float64)
    plan = gibbs_plan(DiagonalMoments(model, probes=2, design=Rademacher()), levels, sweeps=sweeps)
    x_0 = experiments.plain_gibbs(model, x, levels, sweeps, 2, Streams(3, 2, purpose="steps"))
    torch.testing.assert_close(x_0, run(plan, x, seed=3, progress=None).x, rtol=1e-8, atol=1e-8)


def test_the_chain_benchmark_measures_every_row():
    rows = bench.chain(CPU, quick=True)
    assert [row.unit for row in rows] == ["chain-steps/s"] * 3
    assert all(row.plain > 0 and row.ours > 0 and row.first_call > 0 for row in rows)
    assert len({row.plain for row in rows}) == 1  # one chain at a time, whatever their number
    assert rows[2].name == "2-D full covariance, 1,000 chains, 2 steps"


def test_the_moments_benchmark_compares_like_with_like():
    rows = bench.moments(CPU, batch=1, probes=2, size=16, quick=True)
    assert [row.name for row in rows] == [
        "mnist energy, 1x16x16, batch 1, 2 probes",
        "small convnet, 3x16x16, batch 1, 2 probes",
    ]
    assert all(row.plain > 0 and row.ours > 0 and row.floor > 0 for row in rows)
    assert all(row.error < 1e-4 and row.memory is None for row in rows)  # the same probes
    with pytest.raises(UsageError, match="size"):
        bench.moments(CPU, size=12)


def test_the_first_call_is_timed_apart_and_the_best_counts(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def work(name, *seconds):
        left = list(seconds)

        def call():
            order.append(name)
            clock[0] += left.pop(0)

        return bench.Work(call, 6)

    # A first call that compiles, a warm-up that is faster than all that counts, and two that count.
    a, b = bench.measure(
        [work("a", 50.0, 1.0, 3.0, 4.0), work("b", 5.0, 9.0, 8.0, 7.0)], CPU, repeats=2
    )
    assert a == (3.0 / 6, 50.0, None)
    assert b == (7.0 / 6, 5.0, None)
    assert order == ["a", "b"] * 4, "they take turns"
    rate, time = (bench.Row.of("w", unit, a, b) for unit in ("images/s", "s/image"))
    assert (rate.plain, rate.ours, rate.first_call) == (pytest.approx(2), pytest.approx(6 / 7), 5.0)
    assert (time.plain, time.ours) == (0.5, pytest.approx(7 / 6))
    assert rate.ratio == pytest.approx(time.ratio)


def test_the_command_shows_what_is_known_of_a_row(monkeypatch):
    known = {"first_call": 12.5, "memory": 1 << 29, "error": 0.0125}
    asked = []

    def moments(device, **options):
        asked.append(options)
        return [bench.Row("unet", "images/s", 20.0, 1234.0, "bf16", **known)]

    monkeypatch.setattr(bench, "moments", moments)
    words = ["bench", "moments", "--device", "cpu", "--batch", "3", "--probes", "2", "--size", "16"]
    shown = CliRunner().invoke(cli.app, words).output
    assert asked == [{"batch": 3, "probes": 2, "size": 16, "quick": False}]
    for text in ("bf16", "1,234", "61.7x", "12.5", "0.0125", "0.5", "first call s"):
        assert text in shown
    assert "plain GiB" not in shown  # columns that hold nothing are left out
    record = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).output)
    assert record.keys() >= {"mmdgs", "torch", "device", "device_name", "threads", "rows"}
    assert record["rows"][0]["memory"] == 1 << 29
    assert record["rows"][0]["ratio"] == pytest.approx(61.7)


def test_the_experiments_time_whole_methods(tmp_path):
    model = new_model(Recipe(model="unet-tiny", param="noise", levels="linear:20"), (1, 8, 8))
    words = f"sampler --model {save(model, tmp_path / 'm')} --sweeps 2 --probes 1 --batch 2"
    for command, unit in (("chains", "chain-steps/s"), (words, "s/image-step")):
        options = ["--quick", "--json", "--device", "cpu", "-q"]
        result = CliRunner().invoke(experiments.app, [*command.split(), *options])
        (row,) = json.loads(result.stdout)["rows"]
        assert row["unit"] == unit
        assert row["ratio"] > 0
    refused = CliRunner().invoke(
        experiments.app, ["sampler", "--model", "mnist", "--device", "cpu"]
    )
    assert (refused.exit_code, "one noise level" in refused.output) == (2, True)
