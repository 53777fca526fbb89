"""The experiment on measurements of mixtures: its measures against closed forms, its records, its
tables.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_experiments import performed

from experiments import Context, Workspace, inverse, inverse_networks, rivals
from experiments.inverse import EXACT, FULL_ROW, InverseSettings, energy_distance, judged

TINY = InverseSettings(images=4, draws=4, levels=3, seeds=2, samples=6)


def test_the_gap_leaves_out_what_few_draws_add() -> None:
    """Truth N(0, 1), draws N(b, 1) with the optimal mean 0: the gap is 10 log10(1 + b^2) with any
    number of draws.
    """
    generator = torch.Generator().manual_seed(0)
    truth, noise = (
        torch.randn(40_000, 1, generator=generator),
        torch.randn(3, 40_000, 1, generator=generator),
    )
    for bias in (0.0, 1.0):
        found = judged(noise + bias, truth, torch.zeros_like(truth))
        assert found["gap"] == pytest.approx(10 * math.log10(1 + bias**2), abs=0.1)


def test_the_energy_distance_of_normals() -> None:
    """Of N(0, 1) and N(b, 1) with b large it is 2 b - 4 / sqrt(pi); of equal laws it is 0, whatever
    the numbers.
    """
    x, y = torch.randn(2, 1_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert energy_distance(x, y + 20) == pytest.approx(40 - 4 / math.sqrt(math.pi), abs=0.3)
    assert abs(energy_distance(x[:20], y)) < 0.1


def test_draws_that_are_not_finite_have_no_numbers() -> None:
    truth = torch.zeros(2, 3)
    assert all(map(math.isnan, judged(torch.full((4, 2, 3), math.nan), truth, truth).values()))


@pytest.mark.slow
def test_it_writes_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "installed", lambda *name: False)
    monkeypatch.setattr(inverse, "FIT_IMAGES", 50)
    context = Context(Workspace(tmp_path / "out"), torch.device("cpu"), settings=TINY)
    records, report = performed("inverse", context)
    found = {(one["row"], one["task"]): one for one in records["mixtures"]}
    assert {row for row, _ in found} == {EXACT, *inverse.ROWS, *inverse.OTHER_CHAINS}
    assert {task for _, task in found} == set(inverse.TASKS)
    assert all(len(one["gap"]) == TINY.seeds for one in found.values())
    assert found["spectral", "box"]["evaluations"] == TINY.levels
    # A draw's root, the mean's system and the draw's, each of 8 products at the most.
    assert (
        TINY.levels
        < found["Krylov, 8 steps", "box"]["evaluations"]
        <= TINY.levels * (1 + 2 * 3 * 8)
    )
    assert found[EXACT, "box"]["evaluations"] == 0
    full, isotropic = (sum(found[row, "imputation"]["gap"]) for row in (FULL_ROW, "isotropic"))
    assert full < isotropic
    assert found["full, mirrored", "box"]["evaluations"] == found[FULL_ROW, "box"]["evaluations"]
    other, same = ("low rank, 2 products, from 10", "low rank, 2 products")
    assert found[other, "box"]["evaluations"] == found[same, "box"]["evaluations"]
    assert found[other, "box"]["gap"] != found[same, "box"]["gap"]
    assert len(report.sections[0].tables) == 4
    free = {one["row"]: one for one in records["samples"]}
    assert set(free) == set(inverse.SAMPLED)
    # The last of three levels takes a mean alone.
    assert free["low rank, 1 product"]["evaluations"] == 3 + 2 * 2
    assert (
        free["Krylov, 2 steps"]["evaluations"]
        == free["low rank, 2 products"]["evaluations"]
        == 3 + 2 * 4
    )


def test_azulas_solvers_are_rows_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is on a seed that is not scored; a step costs what its setting does."""
    pytest.importorskip("azula", reason="azula is not installed: pip install mmdgs[azula]")
    rows = {"MMPS (azula), 10 steps": ("MMPS", 10), "DPS (azula), 300 steps": ("DPS", 12)}
    monkeypatch.setattr(rivals, "TRIED", {"MMPS": (1, 10), "DPS": (1.0, 3.0)})
    searched = []
    tuned = inverse._tuned
    monkeypatch.setattr(
        inverse, "_tuned", lambda *given: searched.append(given[-1]) or tuned(*given)
    )
    monkeypatch.setattr(inverse, "RIVALS", rows)
    settings, workspace = replace(TINY, rivals=tuple(rows)), Workspace(tmp_path / "out")
    context = Context(workspace, torch.device("cpu"), settings=settings, only=(EXACT, *rows))
    records, _ = performed("inverse", context)
    found = {(one["row"], one["task"]): one for one in records["mixtures"]}
    assert {row for row, _ in found} == {EXACT, *rows}
    assert set(searched) == {TINY.seeds}
    for task in inverse.TASKS:
        mmps, dps = (found[row, task] for row in rows)
        assert mmps["setting"] in (1, 10)
        assert mmps["at_edge"] is (mmps["setting"] == 10)  # there is nothing below one iteration
        assert mmps["evaluations"] == 10 * (1 + 2 * (mmps["setting"] + 1))
        assert dps["evaluations"] == 12 * 3
        assert all(math.isfinite(value) for one in (mmps, dps) for value in one["gap"])


def test_the_psnr_of_endlessly_many_draws_is_that_of_their_mean() -> None:
    m, v = 0.01, 0.03
    one, eight = (-10 * math.log10(m + v / n) for n in (1, 8))
    assert inverse_networks.of_many(one, eight, 8) == pytest.approx(-10 * math.log10(m))


def test_rivals_are_tuned_by_crps_and_not_by_single_draws() -> None:
    """Truth N(0, 1), draws N(0, w^2): CRPS is least at w = 1, the error of draws at the least w."""
    generator = torch.Generator().manual_seed(0)
    noise, truth = (
        torch.randn(4, 20_000, generator=generator),
        torch.randn(20_000, generator=generator),
    )

    def score(width: float) -> tuple[torch.Tensor, torch.Tensor]:
        return (noise * width if width < 30 else noise * math.nan), truth

    assert rivals.tuned("DPS", score) == {"setting": 1.0, "at_edge": False}
    assert rivals.tuned("DPS", score, (0.1, 0.3)) == {"setting": 0.3, "at_edge": True}
    assert rivals.tuned("PiGDM", score) == {"setting": 1.0, "at_edge": False}
