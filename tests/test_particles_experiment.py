"""The experiment on weighted particles: filters are right where answers are known."""

from dataclasses import replace

import pytest
import torch

from experiments.grid import Cell
from experiments.particles import FULL, MCG, PARTICLES, PROBLEMS, SWEEPS, TDS, _drawn, _shares

SMALL = replace(FULL, chains=1_500, levels=30)


@pytest.mark.parametrize("name", [PARTICLES, TDS, MCG])
def test_filters_move_the_weight_of_a_mode_to_what_y_says(name):
    """One particle is far off, eight are near: also of the filters that were written for this."""
    alone, several = (
        _shares(Cell(name, "2-D", (name, count), (0,)), SMALL, {}).values["weight"][0]
        for count in (1, 8)
    )
    assert alone > 0.08
    assert abs(several) < 0.04


def test_sweeps_lower_the_error_of_bridges():
    errors = [
        _shares(Cell(SWEEPS, "2-D", (SWEEPS, sweeps), (0,)), SMALL, {}).values["weight"][0]
        for sweeps in (0, 2)
    ]
    assert errors[1] < 0.7 * errors[0]


def test_strong_measurements_are_met():
    """Draws have the exact posterior's mean; ours its width too, MCG-Diff's steps are narrower."""
    at = PROBLEMS["A2, 0.2"]()
    y = at.y[:1]
    exact = at.mixture.given(y, at.operator, at.noise)
    reference = exact.sample(20_000, generator=torch.Generator().manual_seed(0))[:, 0, :4]
    for name in (PARTICLES, MCG):
        draws = _drawn(name, 4, at, y, 800, SMALL, 0)[0][:, :4]
        torch.testing.assert_close(draws.mean(0), reference.mean(0), atol=0.02, rtol=0)
        if name == PARTICLES:
            torch.testing.assert_close(draws.std(0), reference.std(0), atol=0.01, rtol=0)
