"""Faces as an experiment: quick from a zip, its methods, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_experiments import picture_folder
from nets import tiny_model
from typer.testing import CliRunner

from experiments import Context, Workspace, celeba, sampler_cells, small_models
from experiments.__main__ import app
from mmdgs import save
from mmdgs.errors import UsageError

FEW = replace(small_models.QUICK.training, steps=2, batch_size=4)
TINY = replace(small_models.QUICK, size=8, training=FEW)


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    """A zip of random images."""
    folder = picture_folder(tmp_path / "images")
    return Path(shutil.make_archive(str(tmp_path / "faces"), "zip", folder))


def test_quick_from_a_zip_and_resumed_without_work(
    faces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_models, "QUICK", TINY)
    out = tmp_path / "out"
    words = ["celeba", "--quick", "--data-dir", str(faces), "--out", str(out), "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, "--images", "4"])
    assert result.exit_code == 0, result.output
    records = json.loads((out / "records.json").read_text())
    assert records["settings"]["images"] == 4
    costs = {(r["row"], r["levels"]): r["evaluations"] for r in records["samplers"]}
    assert costs == {
        (celeba.SPECTRAL, 6): 2 * 5 + 1,
        (celeba.LANGEVIN, 12): 5 * 12 + 1,
        (celeba.GIBBS, 12): 3 * 11 * 7 + 1,
    }
    assert {f.stem for f in out.glob("*.png")} == {
        "celeba_langevin",
        "celeba_gibbs",
        "celeba_gibbs_spectral",
    }
    monkeypatch.setattr(sampler_cells, "generate", None)
    assert CliRunner().invoke(app, [*words, "--images", "4", "--resume"]).exit_code == 0


def test_bad_input_is_named(faces: Path, tmp_path: Path) -> None:
    context = Context(Workspace(tmp_path / "out"), torch.device("cpu"), data_dir=str(faces))
    save(tiny_model("score", (3, 8, 8), sigma=0.3), tmp_path / "one")
    with pytest.raises(UsageError, match=r"many noise levels.*sigma 0\.3"):
        celeba.run(replace(context, model=str(tmp_path / "one")))
    with pytest.raises(UsageError, match=r"there is no zip of faces .*gone\.zip"):
        celeba.run(replace(context, quick=True, data_dir=str(tmp_path / "gone.zip")))
