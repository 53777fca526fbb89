"""The few-step experiment: its rows at equal cost, its numbers by a known network, resumed without
work.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_experiments import performed, picture_folder, pictures_of, resumed, use_fake_inception
from nets import tiny_pipeline

from experiments import Context, Workspace, few_steps, sampler_cells
from mmdgs.models import VARIANCE_RATIO
from mmdgs.training import Recipe, TrainingSettings, train_model

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
TINY = few_steps.FewStepSettings(steps=(3, 5), images=6, fit_images=4, precision="float32")


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A tiny pipeline, a folder of images in the place of CIFAR-10, and a fake Inception."""
    tiny_pipeline(in_channels=3, out_channels=3, sample_size=8).save_pretrained(tmp_path / "model")
    picture_folder(tmp_path / "images")
    use_fake_inception(tmp_path, monkeypatch)
    monkeypatch.setattr(few_steps, "DATA", str(tmp_path / "images"))
    model, workspace = str(tmp_path / "model"), Workspace(tmp_path / "out")
    return Context(workspace, torch.device("cpu"), settings=TINY, model=model)


@pytest.mark.slow
def test_every_row_is_measured_and_a_head_adds_its_own_to_a_finished_run(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, _ = performed("few-steps", prepared)
    by = {(r["row"], r["steps"]): r for r in records["samplers"]}
    assert {row for row, _ in by} == set(few_steps.ROWS) - {few_steps.LEARNED, few_steps.MODULATED}
    assert ("Krylov", 3) in by
    assert ("Krylov", 5) not in by
    assert all(r["fid"] > 0 for r in by.values())
    for design in ("Rademacher", "lattice"):
        assert by[f"diagonal, {design}", 5]["products"] == 4 * 3  # none for the last mean
    assert by["diagonal, Rademacher", 5]["fid"] != by["diagonal, lattice", 5]["fid"]
    assert (
        by["isotropic", 5]["evaluations"]
        == by["DDIM", 5]["evaluations"]
        == by["Heun", 5]["evaluations"]
        == 5
    )
    assert pictures_of(prepared) == {"few_steps", "few_steps_images"}
    short = TrainingSettings(steps=2, batch_size=4, checkpoint_every=None, validate_every=None)
    recipe = Recipe(
        data=str(tmp_path / "images"), size=8, model="unet-tiny", param=VARIANCE_RATIO,
        denoiser=prepared.model, training=short,
    )  # fmt: skip
    train_model(recipe, tmp_path / "head", progress=None)
    generate, made = sampler_cells.generate, []

    def noting(*args, progress, **rest):  # type: ignore[no-untyped-def]
        made.append(progress)
        return generate(*args, progress=None, **rest)

    monkeypatch.setattr(sampler_cells, "generate", noting)
    again = resumed(prepared, head=str(tmp_path / "head"))
    more = few_steps.run(again).records["samplers"]
    assert made == [f"{few_steps.LEARNED}, 3", f"{few_steps.LEARNED}, 5"]
    assert [r for r in more if r["row"] != few_steps.LEARNED] == records["samplers"]
    assert [r["products"] for r in more if r["row"] == few_steps.LEARNED] == [0, 0]


def test_single_cells_can_be_asked_for(prepared: Context) -> None:
    chosen = replace(prepared, only=("DDIM", "low rank, one-sided, below 2"), case=("5",), images=4)
    found = few_steps.run(chosen).records["samplers"]
    assert [(one["row"], one["steps"]) for one in found] == [
        ("low rank, one-sided, below 2", 5),
        ("DDIM", 5),
    ]
    assert found[1]["evaluations"] == 5 < found[0]["evaluations"] < 5 + 2 * 4
