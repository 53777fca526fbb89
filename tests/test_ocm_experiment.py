"""The experiment that compares a learned diagonal with probes: what it records, draws and takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from image_experiments import performed, picture_folder, pictures_of, resumed
from nets import tiny_model
from toy_models import many_level_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.lab import Context, Workspace, held_out, ocm, small_models
from mmdgs.training import Recipe, TrainingSettings, train_model

SHAPE = (3, 8, 8)
FAST = TrainingSettings(steps=2, batch_size=4, checkpoint_every=None, validate_every=None)
TINY = ocm.OcmSettings(images=4, fit_images=6, levels=3, reference_probes=2, width=4, training=FAST)


@pytest.fixture(params=["one level", "many levels"])
def prepared(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A tiny model, and a folder in the place of its data."""
    model = tiny_model("score", SHAPE, sigma=0.3) if request.param == "one level" else many_level_model(SHAPE)
    mmdgs.save(model, tmp_path / "denoiser")
    monkeypatch.setitem(held_out.DATA, SHAPE, str(picture_folder(tmp_path / "images", shape=SHAPE)))
    monkeypatch.setattr(ocm, "FULL", {"cpu": TINY})
    return Context(Workspace(tmp_path / "out"), torch.device("cpu"), model=str(tmp_path / "denoiser"))


def test_it_compares_and_resumes_without_work(prepared: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    records, report = performed("ocm", prepared)
    levels = mmdgs.from_pretrained(prepared.model).levels
    ratios = list(held_out.chosen_levels(levels, 3))
    by = {(one["row"], one["sigma / alpha"]): one for one in records["levels"]}
    assert list(by) == [(row, ratio) for ratio in ratios for row in (*ocm.ROWS, ocm.RESOLVED)]
    for ratio in ratios:
        own = {row: by[row, ratio] for row in ocm.ROWS}
        assert [one["evaluations"] for one in own.values()] == [2, 3, 7, 21, 7, 1]
        assert own["3 products"]["error"] != own["3 products, lattice"]["error"]  # the paper's signs, not the default
        assert own[ocm.ISOTROPIC]["above"] == 0
        assert own[ocm.HEAD]["above"] == pytest.approx(own[ocm.HEAD]["fitted"] - own[ocm.ISOTROPIC]["fitted"])
    assert pictures_of(prepared) == {"ocm"}
    section = report.sections[0]
    assert [len(table.rows) for table in section.tables] == [7, 6, 6, 6]
    head, one = (by[row, ratios[0]]["error"] for row in (ocm.HEAD, "1 product"))
    assert f"{head:.3f} against {one:.3f}" in section.claims[0].numbers
    monkeypatch.setattr(small_models, "train_model", None)
    monkeypatch.setattr(ocm, "compare_diagonals", None)
    assert ocm.run(resumed(prepared)).records["levels"] == records["levels"]


@pytest.mark.parametrize("prepared", ["one level"], indirect=True)
def test_it_takes_a_head(prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(
        data=held_out.DATA[SHAPE], model="unet-tiny", param="variance-ratio", denoiser=prepared.model, training=FAST
    )
    train_model(recipe, tmp_path / "head", progress=None)
    monkeypatch.setattr(ocm, "QUICK", TINY)
    monkeypatch.setattr(small_models, "train_model", None)  # none is trained
    words = ["reproduce", "ocm", "--quick", "--device", "cpu", "--model", prepared.model, "--head", tmp_path / "head"]
    result = CliRunner().invoke(cli.app, list(map(str, [*words, "--out", tmp_path / "new"])))
    assert result.exit_code == 0, result.output
    assert "OCM head" in result.output
    result = CliRunner().invoke(cli.app, ["reproduce", "probes", "--head", "x", "--out", str(tmp_path / "no")])
    assert result.exit_code == 2
    assert "--head is for few-steps, ocm and calibration, not for probes" in " ".join(result.output.split())
