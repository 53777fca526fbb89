"""Which uncertainty to trust, as an experiment: what it measures, records and draws, and going on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_experiments import performed, picture_folder, pictures_of, resumed
from torch import Tensor
from toy_models import many_level_model

from mmdgs import metrics, save
from mmdgs.errors import UsageError
from mmdgs.lab import Context, Workspace, calibration, calibration_cases, held_out
from mmdgs.moments import FLOOR, CalibratedMoments, FullMoments
from mmdgs.moments.calibrated import with_floor
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.training import TrainingSettings

SHAPE = (3, 8, 8)
TINY = calibration.CalibrationSettings(
    images=12, points=32, expensive=8, krylov_steps=4, training=TrainingSettings(steps=20, learning_rate=1e-3)
)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(calibration, "QUICK", TINY)
    monkeypatch.setattr(calibration, "FULL", {"cpu": TINY})
    return Context(Workspace(tmp_path / "out"), torch.device("cpu"), quick=True)


def test_every_estimator_is_measured_three_times(prepared: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    records, report = performed("calibration", prepared)
    by = {(one["row"], one["case"]): one for one in records["cells"]}
    assert {case for _, case in by} == {"exact mixture", "2-D energy", "digits MLP"}
    assert {row for row, case in by if case == "digits MLP"} == set(calibration.ROWS) - {calibration.HEAD}
    control = by["full", "exact mixture"]
    assert control["above_isotropic, default"] == control["above_isotropic, floor 1e-6"]
    assert control["repaired, default"] == 0
    assert pictures_of(prepared) == {"calibration"}
    assert len(report.sections[0].claims) == 3
    monkeypatch.setattr(calibration, "_measured", None)  # nothing is run again
    assert calibration.run(resumed(prepared)).records["cells"] == records["cells"]


@pytest.mark.parametrize("row", [calibration.PROBED, calibration.EXACT, calibration.FULL_ROW, calibration.KRYLOV])
def test_one_pass_is_as_good_as_three(prepared: Context, row: str) -> None:
    """Values lifted afterwards give the reports of estimators that lift them themselves."""
    case = calibration_cases.cases(prepared, 8, 16, TINY.training)["digits MLP"]()
    settings = replace(TINY, krylov_steps=10)
    cell = calibration.Cell(row, "digits MLP", row, (0,))
    found = calibration._measured(cell, case, settings, prepared).values
    post = calibration._estimator(row, case, settings, prepared)
    fitted = CalibratedMoments(post, LevelTable.of({case.level: [found["floor"], found["scale"], *found["reach"]]}))
    stages = {calibration.BEFORE: with_floor(post, FLOOR), calibration.DEFAULT: post, calibration.AFTER: fitted}
    for stage, moments in stages.items():
        report = metrics.calibration_report(moments, case.judge, case.level)
        for key in calibration.SHOWN:
            assert found[f"{key}, {stage}"] == pytest.approx(getattr(report, key), rel=1e-3, abs=1e-4), (key, stage)


def test_what_judges_has_noise_of_its_own() -> None:
    """Row i of both parts is the same image: with the same noise the means would be the same too."""
    case = calibration_cases.Case(lambda x_t, level: x_t, NoiseLevel(sigma=0.5), torch.zeros(4, 5), torch.zeros(4, 5))
    (_, fit), (_, judge) = (one[0] for one in calibration._pairs(FullMoments(case.denoiser), case, None, seed=0))
    assert not torch.isclose(fit.mean, judge.mean).any()


def test_a_model_given_and_data_that_are_absent(prepared: Context, tmp_path: Path, monkeypatch, untrained) -> None:
    save(many_level_model(SHAPE), tmp_path / "many")
    monkeypatch.setattr(held_out, "DATA", {SHAPE: str(picture_folder(tmp_path / "images", shape=SHAPE))})
    records, _ = performed("calibration", replace(prepared, model=str(tmp_path / "many"), only=("isotropic",)))
    assert [one["case"] for one in records["cells"]][3:] == [
        f"{tmp_path / 'many'} {sigma:g}" for sigma in (0.1, 0.3, 1)
    ]
    monkeypatch.setattr(held_out, "DATA", {SHAPE: str(tmp_path / "nowhere")})
    context = resumed(prepared, model=str(tmp_path / "many"), only=("isotropic",))
    found = calibration.run(replace(context, workspace=Workspace(tmp_path / "again")))
    assert len(found.records["absent"]) == 3
    assert any("Left out" in line for line in found.sections[0].text)


def test_columns_are_chosen_by_how_they_begin(prepared: Context) -> None:
    chosen = replace(prepared, case=("digits", "exact"))
    records, _ = performed("calibration", replace(chosen, only=("isotropic",)))
    assert [one["case"] for one in records["cells"]] == ["exact mixture", "digits MLP"]
    with pytest.raises(UsageError, match=r"--case must begin a column's name \(exact mixture; .*got 'faces'"):
        calibration_cases.cases(replace(prepared, case=("faces",)), 8, 16, TINY.training)
    one_level = calibration_cases.cases(replace(prepared, model="mnist"), 8, 16, TINY.training)
    assert [name for name in one_level if name.startswith("mnist")] == ["mnist"]  # its own level, not others


def test_a_diffusers_model_is_a_column_where_it_is_named(
    prepared: Context, tmp_path: Path, monkeypatch, untrained
) -> None:
    full = replace(prepared, quick=False, case=("diffusers",))
    with pytest.raises(UsageError, match="with --many"):
        calibration_cases.cases(full, 8, 16, TINY.training)["diffusers 0.3"]()
    save(many_level_model(SHAPE), tmp_path / "many")
    monkeypatch.setattr(held_out, "DATA", {SHAPE: str(picture_folder(tmp_path / "images", shape=SHAPE))})
    records, _ = performed("calibration", replace(full, many=str(tmp_path / "many")))
    assert {one["case"] for one in records["cells"]} == {"diffusers 0.3"}
    # What takes thousands of products with a network is left out, whatever its size.
    assert not {one["row"] for one in records["cells"]} & {calibration.EXACT, calibration.FULL_ROW}


def test_means_are_computed_once_for_estimators_that_need_no_more(prepared: Context) -> None:
    case = calibration_cases.cases(prepared, 8, 16, TINY.training)["digits MLP"]()
    batches: list[Tensor] = []

    def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
        batches.append(x_t)
        return exact(x_t, level)

    exact, case = case.denoiser, replace(case, denoiser=denoiser)
    calibration._measured(calibration.Cell("isotropic", "digits MLP", None, (0,)), case, TINY, prepared)
    done = len(batches)
    assert done > 0
    calibration._measured(calibration.Cell("spectral", "digits MLP", None, (0,)), case, TINY, prepared)
    assert len(batches) == done


def test_few_images_are_of_all_classes(prepared: Context, tmp_path: Path, monkeypatch) -> None:
    """Images that are stored in order come shuffled, the same for every level."""
    save(many_level_model(SHAPE), tmp_path / "many")
    sorted_images = (
        torch.arange(count := 16 * calibration_cases.MORE).float().div(count).reshape(-1, 1, 1, 1).expand(-1, *SHAPE)
    )
    monkeypatch.setattr(
        calibration_cases, "held_out_images", lambda context, model, split, count: sorted_images[:count]
    )
    made = calibration_cases.cases(replace(prepared, model=str(tmp_path / "many")), 16, 16, TINY.training)
    one, other = (made[f"{tmp_path / 'many'} {sigma}"]() for sigma in (0.1, 1))
    assert torch.equal(one.judge, other.judge)
    assert one.judge[:16].amax() > 0.7
    assert one.judge.flatten(1)[:, 0].sort().values.tolist() == sorted_images[:, 0, 0, 0].tolist()
