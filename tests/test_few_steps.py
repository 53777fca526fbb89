"""The few-step experiment: its rows at equal cost, its numbers by a known network, resumed without work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_experiments import concluded, picture_folder, use_fake_inception
from nets import tiny_pipeline

from mmdgs import cli
from mmdgs.generation import make_plan
from mmdgs.lab import Context, Workspace, few_steps, sampler_cells
from mmdgs.models import VARIANCE_RATIO, from_pretrained
from mmdgs.samplers import run
from mmdgs.training import Recipe, TrainingSettings, train_model

pytest.importorskip("diffusers")
TINY = few_steps.FewStepSettings(steps=(3, 5), images=6, fit_images=4, precision="float32")


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A tiny pipeline, a folder of images in the place of CIFAR-10, and a fake Inception."""
    tiny_pipeline(in_channels=3, out_channels=3, sample_size=8).save_pretrained(tmp_path / "model")
    picture_folder(tmp_path / "images")
    use_fake_inception(tmp_path, monkeypatch)
    monkeypatch.setattr(few_steps, "DATA", str(tmp_path / "images"))
    monkeypatch.setattr(few_steps, "FULL", TINY)
    return Context(Workspace(tmp_path / "out"), torch.device("cpu"), model=str(tmp_path / "model"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_it_measures_every_row_and_resumes_without_work(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, text = concluded(few_steps, prepared)
    by = {(r["row"], r["steps"]): r for r in records["samplers"]}
    assert {row for row, _ in by} == set(few_steps.ROWS) - {few_steps.LEARNED}
    assert ("Krylov", 3) in by
    assert ("Krylov", 5) not in by
    assert all(r["value"] > 0 for r in by.values())
    for design in ("Rademacher", "lattice"):
        assert by[f"diagonal, {design}", 5]["products"] == 4 * 3  # none for the last mean
    assert by["diagonal, Rademacher", 5]["value"] != by["diagonal, lattice", 5]["value"]
    assert by["isotropic", 5]["evaluations"] == by["DDIM", 5]["evaluations"] == by["Heun", 5]["evaluations"] == 5
    assert (tmp_path / "cache" / "isotropic").is_dir() or (tmp_path / "model" / "isotropic.safetensors").is_file()
    assert "Isotropic is below small variance" in text
    assert "Diagonal, Rademacher is below isotropic" in text
    assert "Diagonal, lattice is below diagonal, Rademacher" in text
    monkeypatch.setattr(sampler_cells, "generate", None)  # nothing is sampled again
    again = Context(Workspace(tmp_path / "out", resume=True), torch.device("cpu"), model=prepared.model)
    assert few_steps.run(again).records["samplers"] == records["samplers"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_head_adds_its_row_to_a_run_that_was_made_without(prepared: Context, tmp_path: Path) -> None:
    first = few_steps.run(prepared).records["samplers"]
    recipe = Recipe(
        data=str(tmp_path / "images"), size=8, model="unet-tiny", param=VARIANCE_RATIO,
        denoiser=prepared.model,
        training=TrainingSettings(steps=2, batch_size=4, checkpoint_every=None, validate_every=None),
    )  # fmt: skip
    train_model(recipe, tmp_path / "head", progress=None)
    resumed = replace(prepared, workspace=Workspace(tmp_path / "out", resume=True), head=str(tmp_path / "head"))
    found, text = concluded(few_steps, resumed)
    records = found["samplers"]
    learned = [r for r in records if r["row"] == few_steps.LEARNED]
    assert [r for r in records if r["row"] != few_steps.LEARNED] == first
    assert [(r["steps"], r["products"]) for r in learned] == [(3, 0), (5, 0)]
    assert "Diagonal, learned is below isotropic" in text


@pytest.mark.parametrize("steps", [3, 4, 5, 10])
def test_heun_has_as_many_evaluations_as_the_others_or_one_less(steps: int, prepared: Context) -> None:
    model = from_pretrained(prepared.model)
    costs = []
    for row in ("DDIM", "Heun"):
        plan = make_plan(few_steps.method_of(row, steps), model)
        costs.append(run(plan, torch.zeros(1, 3, 8, 8), progress=None).cost.forwards)
    assert costs[0] == steps
    assert steps - 1 <= costs[1] <= steps


def test_a_model_is_refused_where_it_would_be_ignored(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(cli.app, ["reproduce", "fig1", "--model", "mnist", "--out", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert "--model is for few-steps, probes, ocm, covariances, cifar10, table2 and celeba, not for fig1" in " ".join(
        result.output.split()
    )
