"""The benchmark's plain implementations must be right, or its ratios mean nothing."""

import json
import math

import pytest
import torch
from nets import random_images, tiny_model
from torch import nn
from typer.testing import CliRunner

from mmdgs import bench, cli
from mmdgs.bench import trainings
from mmdgs.randomness import seeded


class Gaussian(nn.Module):
    """The energy x^2 / (2 v) of N(0, v), and its score."""

    def __init__(self, variance: float, *, score: bool = False) -> None:
        super().__init__()
        self.variance, self.score = variance, score

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x / self.variance if self.score else x.square() / (2 * self.variance)


def test_the_plain_chain_samples_the_clean_gaussian():
    # The noisy density N(0, 1.25) at sigma = 0.5 has the clean model N(0, 1). A step keeps 1 / 1.25 of the state, so
    # the squares of a chain of n steps are worth n (1 - 0.64) / (1 + 0.64) draws of variance 2.
    steps = 4_000
    chain = bench.plain_chain(Gaussian(1.25), torch.zeros(2), steps, 0.5, seeded(0))
    worth = 2 * steps * (1 - 0.64) / (1 + 0.64)
    assert abs(chain.square().mean().item() - 1) < 5 * (2 / worth) ** 0.5


def test_the_plain_diagonal_is_exact_where_the_jacobian_is_diagonal():
    found = bench.plain_diagonal(Gaussian(2.0, score=True), torch.ones(3, 1, 4, 4), 2, 0.5, seeded(0))
    torch.testing.assert_close(found, torch.full((3, 1, 4, 4), 0.25 - 0.0625 / 2))


@pytest.mark.slow
def test_the_benchmark_measures_every_row():
    rows = bench.chain(torch.device("cpu"), quick=True)
    assert [row.unit for row in rows] == ["chain-steps/s"] * 3 + ["images/s"]
    assert all(row.plain > 0 and row.ours > 0 for row in rows)
    assert len({row.plain for row in rows[:3]}) == 1  # the plain way runs one chain at a time, whatever their number


@pytest.mark.parametrize("param", ["score", "energy"])
def test_the_plain_training_step_is_its_formula(param):
    # One step by hand: Adam's first step moves every weight by the learning rate against its gradient's sign.
    images, sigma = random_images(4), 0.5
    model, same = tiny_model(param), tiny_model(param)
    found = bench.plain_steps(model, images, 4, 1)
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
        moved = (after - before)[clear]
        torch.testing.assert_close(moved, -1e-4 * gradient.sign()[clear], rtol=0, atol=2e-6)
    assert large > 1000


def test_the_plain_training_goes_through_the_images_and_lowers_the_loss():
    model = tiny_model("score")
    first = bench.plain_steps(tiny_model("score"), random_images(8), 8, 1)
    assert bench.plain_steps(model, random_images(8), 8, 120) < 0.9 * first
    assert math.isfinite(bench.plain_steps(model, random_images(10), 4, 7))


def test_the_training_benchmark_measures_both_forms(monkeypatch):
    monkeypatch.setattr(trainings, "ON_CPU", trainings.Size("unet-tiny", (1, 8, 8), 4, 1, "float32"))
    monkeypatch.setattr(trainings, "IMAGES", 8)
    rows = bench.train(torch.device("cpu"), quick=True)
    assert [row.name.split(", ")[1] for row in rows] == ["score", "energy"]
    assert all(row.unit == "images/s" and row.plain > 0 and row.ours > 0 for row in rows)


def test_the_command_shows_the_training_benchmark(monkeypatch):
    asked = []

    def train(device, *, quick):
        asked.append((device.type, quick))
        return [bench.Row("DSM", "images/s", 100.0, 350.0)]

    monkeypatch.setattr(bench, "train", train)
    result = CliRunner().invoke(cli.app, ["bench", "train", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "3.5x" in result.output
    found = json.loads(CliRunner().invoke(cli.app, ["bench", "train", "--device", "cpu", "--quick", "--json"]).output)
    assert found["rows"] == [{"name": "DSM", "unit": "images/s", "plain": 100.0, "ours": 350.0, "ratio": 3.5}]
    assert asked == [("cpu", False), ("cpu", True)]
