"""The comparison of probes: its Jacobians, its errors by known matrices, and runs with and without a model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from nets import tiny_model, tiny_pipeline
from toy_models import many_level_model

import mmdgs
from mmdgs.errors import UsageError
from mmdgs.jacobians import mean_and_jacobian
from mmdgs.lab import Context, Workspace, conclude, probe_errors, probes
from mmdgs.lab.probe_errors import YARDSTICK, ProbeSettings, errors, jacobian, needed
from mmdgs.moments.probes import Rademacher
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import seeded

TINY = ProbeSettings(counts=(1, 2, 10), draws=3, digits=2, ratios=(0.7, 3.0), sampling_steps=2)
LEVEL = NoiseLevel(sigma=0.7)


def context_in(folder: Path, *, resume: bool = False, **options: object) -> Context:
    return Context(Workspace(folder, resume=resume), torch.device("cpu"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [8, 7])
def test_the_jacobian_is_the_denoisers_whole_or_its_middle(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_errors, "ROWS_AT_ONCE", {"cpu": rows, "cuda": rows})  # 7: the last rows are fewer
    model = many_level_model((2, 8, 8))
    x_t = torch.randn(1, 2, 8, 8, generator=seeded(0))
    exact = mean_and_jacobian(model, x_t, LEVEL)[1][0]
    found = jacobian(model, x_t, LEVEL, None, "")
    assert torch.allclose(found, exact, atol=1e-6)
    assert not torch.allclose(found, exact.mT, atol=1e-3)
    window = exact.reshape(2, 8, 8, 2, 8, 8)[:, 2:6, 2:6, :, 2:6, 2:6].reshape(32, 32)
    assert torch.allclose(jacobian(model, x_t, LEVEL, 4, ""), window, atol=1e-6)


def test_errors_are_those_of_the_estimator() -> None:
    """None for a diagonal matrix; for signs at every number the mean square is |J - diag J|_F^2 / S (Bekas et al.)."""
    settings = ProbeSettings(counts=(2, 8), draws=400)
    flat = errors(torch.diag(torch.arange(1.0, 17.0)), (1, 4, 4), settings, 0)
    # The filter finds no noise, and rounds.
    assert all(value < 1e-6 for own in flat.values() for value in own)
    matrix = torch.randn(16, 16, generator=seeded(0)) + 3 * torch.eye(16)
    off = matrix - torch.diag(matrix.diagonal())
    for count, value in zip(settings.counts, errors(matrix, (1, 4, 4), settings, 0)[YARDSTICK], strict=True):
        # The mean of a norm lies a little below the root of the mean square.
        expected = (off.norm() / matrix.diagonal().norm()).item() / math.sqrt(count)
        assert 0.85 * expected < value < 1.02 * expected
    assert isinstance(probe_errors.DESIGNS[YARDSTICK][2], Rademacher)


def test_products_needed_lie_on_the_power_law_between_counts() -> None:
    counts = (1, 2, 10, 50)
    curve = [3 / math.sqrt(count) for count in counts]
    assert needed(counts, curve, 3 / math.sqrt(5)) == pytest.approx(5)
    assert needed(counts, curve, 3 / math.sqrt(10)) == pytest.approx(10)
    assert needed(counts, curve, 4.0) == 1
    assert needed(counts, curve, 0.1) == math.inf


def test_it_measures_both_models_and_tries_new_designs_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers")
    tiny_pipeline(in_channels=3, out_channels=3, sample_size=8).save_pretrained(tmp_path / "model")
    mmdgs.save(tiny_model(), tmp_path / "digits")
    monkeypatch.setattr(probes, "FULL", TINY)
    monkeypatch.setattr(probes, "DIGITS", str(tmp_path / "digits"))
    context = context_in(tmp_path / "out", model=str(tmp_path / "model"))
    page, report = conclude(context, "t", "s", probes.run(context))
    records = json.loads((tmp_path / "out" / "records.json").read_text())
    found = [(r["model"], r["ratio"], r["image"], r["products_of_the_exact_diagonal"]) for r in records["probes"]]
    assert found == [("mnist", 0.5, 0, 64), ("mnist", 0.5, 1, 64), ("diffusion", 0.7, 0, 192), ("diffusion", 3, 0, 192)]
    assert all(r["error"].keys() == probe_errors.DESIGNS.keys() for r in records["probes"])
    assert (tmp_path / "out" / "probes.png").read_bytes().startswith(b"\x89PNG")
    products, by_count = report.tables()
    assert [row[1:] for row in products.rows if row[0] == YARDSTICK] == [["10"] * 3]
    assert len(by_count.rows) == 3 * len(probe_errors.DESIGNS)
    assert "MNIST only" not in page.read_text()

    monkeypatch.setattr(probe_errors, "jacobian", None)  # the network is not asked again
    monkeypatch.setattr(probe_errors, "generate", None)
    again = context_in(tmp_path / "out", resume=True, model=context.model)
    assert probes.run(again).records["probes"] == records["probes"]
    monkeypatch.setattr(probe_errors, "DESIGNS", {YARDSTICK: probe_errors.DESIGNS[YARDSTICK]})
    monkeypatch.setattr(probes, "DESIGNS", probe_errors.DESIGNS)
    fewer = probes.run(again).records["probes"]
    assert [r["error"] for r in fewer] == [{YARDSTICK: r["error"][YARDSTICK]} for r in records["probes"]]


@pytest.mark.parametrize("quick", [True, False])
def test_without_a_diffusion_model_mnist_is_measured_and_the_page_says_why(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mmdgs.save(tiny_model(), tmp_path / "digits")
    monkeypatch.setattr(probes, "FULL", TINY)
    monkeypatch.setattr(probes, "DIGITS", str(tmp_path / "digits"))
    monkeypatch.setattr(probes, "MODEL", str(tmp_path / "nowhere.pth"))
    context = context_in(tmp_path / "out", quick=quick)
    page, report = conclude(context, "t", "s", probes.run(context))
    text = " ".join(page.read_text().split())
    assert ("where --model names one" if quick else "there is no checkpoint") in text
    assert "MNIST only" in text
    assert len(report.tables()[0].header) == 2


def test_a_model_of_one_level_is_refused_by_name(tmp_path: Path) -> None:
    mmdgs.save(tiny_model(), tmp_path / "single")
    with pytest.raises(UsageError, match=r"--model must be a model of many noise levels, and .*single was trained at"):
        probes.run(context_in(tmp_path / "out", quick=True, model=str(tmp_path / "single")))
