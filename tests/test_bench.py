"""The benchmark's plain implementations must be right, or its ratios mean nothing."""

import pytest
import torch
from torch import nn

from mmdgs import bench
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
