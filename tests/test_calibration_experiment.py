"""Which covariance and uncertainty to trust: against exact likelihoods, its records, going on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_experiments import performed, picture_folder, pictures_of, resumed
from sizes import unpaint
from toy_models import many_level_model

from experiments import Context, Workspace, calibration, covariances, held_out
from experiments.grid import Cell
from mmdgs import metrics, save
from mmdgs.errors import UsageError
from mmdgs.moments import (
    FLOOR,
    CalibratedMoments,
    DiagonalMoments,
    FullMoments,
    IsotropicMoments,
    KrylovMoments,
)
from mmdgs.moments.calibrated import with_floor
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings

SHAPE = (3, 8, 8)
TINY = calibration.CalibrationSettings(
    images=4, points=16, expensive=3, krylov_steps=4, training=TrainingSettings(steps=5)
)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    images = str(picture_folder(tmp_path / "images", shape=SHAPE))
    monkeypatch.setattr(held_out, "DATA", {SHAPE: images})
    save(many_level_model(SHAPE), tmp_path / "many")
    unpaint(monkeypatch)
    return Context(Workspace(tmp_path / "out"), torch.device("cpu"), quick=True, settings=TINY)


def test_every_estimator_is_measured_three_times(
    prepared: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = replace(prepared, quick=False, case=("exact", "digits"))
    records, report = performed("calibration", chosen)
    by = {(cell["row"], cell["case"]): cell for cell in records["cells"]}
    assert {case for _, case in by} == {"exact mixture", "digits MLP"}
    rows = {row for row, case in by if case == "digits MLP"}
    assert rows == set(calibration.ROWS) - {calibration.HEAD}
    control = by["full", "exact mixture"]
    assert control["above_isotropic, default"] == control["above_isotropic, floor 1e-6"]
    assert control["repaired, default"] == 0
    assert pictures_of(prepared) == {"calibration"}
    assert len(report.sections[0].claims) == 3
    monkeypatch.setattr(calibration, "measured", None)  # nothing is run again
    assert calibration.run(resumed(chosen)).records["cells"] == records["cells"]
    with pytest.raises(UsageError, match="'faces'"):
        calibration.run(replace(chosen, case=("faces",)))


@pytest.mark.parametrize(
    "row", [calibration.PROBED, calibration.EXACT, calibration.FULL_ROW, calibration.KRYLOV]
)
def test_one_pass_is_as_good_as_three(prepared: Context, row: str) -> None:
    """Values lifted afterwards give the reports of estimators that lift them themselves."""
    settings = replace(TINY, krylov_steps=10)
    case = calibration.cases(prepared, settings)["digits MLP"]()
    cell = Cell(row, "digits MLP", row, (0,))
    values = calibration.measured(cell, case, settings, prepared).values
    moments = calibration.estimator(row, case, settings, prepared)
    table = LevelTable.of({case.level: [values["floor"], values["scale"], *values["reach"]]})
    stages = {
        calibration.BEFORE: with_floor(moments, FLOOR),
        calibration.DEFAULT: moments,
        calibration.AFTER: CalibratedMoments(moments, table),
    }
    for stage, staged in stages.items():
        report = metrics.calibration_report(staged, case.judge, case.level)
        for key in calibration.KEYS:
            expected = pytest.approx(getattr(report, key), rel=1e-3, abs=1e-4)
            assert values[f"{key}, {stage}"] == expected, (key, stage)


def test_what_judges_has_noise_of_its_own() -> None:
    """Row i of both parts is the same image: with the same noise the means would be the same."""
    level, x = NoiseLevel(sigma=0.5), torch.zeros(4, 5)
    case = calibration.Case(lambda x_t, level: x_t, level, x, x)
    parts = calibration.pairs_of(FullMoments(case.denoiser), case, None, seed=0)
    (_, fit), (_, judge) = (pairs[0] for pairs in parts)
    assert not torch.isclose(fit.mean, judge.mean).any()


def test_models_are_columns_and_data_may_be_absent(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None
) -> None:
    many = str(tmp_path / "many")
    context = replace(prepared, model=many, only=("isotropic",), case=(many,))
    records, _ = performed("calibration", context)
    assert [cell["case"] for cell in records["cells"]] == [f"{many} {s:g}" for s in (0.1, 0.3, 1)]
    beside = resumed(prepared, quick=False, case=("diffusers",), many=many)
    cells = calibration.run(beside).records["cells"]
    assert {cell["case"] for cell in cells} == {"diffusers 0.3"}
    # What takes thousands of products with a network is left out, whatever its size.
    assert not {cell["row"] for cell in cells} & {calibration.EXACT, calibration.FULL_ROW}
    assert "mnist" in calibration.cases(replace(prepared, model="mnist"), TINY)  # at its own level
    monkeypatch.setattr(held_out, "DATA", {SHAPE: str(tmp_path / "nowhere")})
    outcome = calibration.run(replace(beside, case=("diffusers", "exact")))
    assert list(outcome.records["absent"]) == ["diffusers 0.3"]


def test_few_images_are_of_all_classes(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that are stored in order come shuffled, the same for every level."""
    count, many = 16 * calibration.MORE, str(tmp_path / "many")
    stored = torch.arange(count).float().div(count).reshape(-1, 1, 1, 1).expand(-1, *SHAPE)
    monkeypatch.setattr(calibration, "held_out_images", lambda *asked: stored[: asked[-1]])
    cases = calibration.cases(replace(prepared, model=many), replace(TINY, images=16))
    first, other = (cases[f"{many} {sigma}"]().judge for sigma in (0.1, 1))
    assert torch.equal(first, other)
    assert first[:16].amax() > 0.7
    assert torch.equal(first[:, 0, 0, 0].sort().values, stored[:, 0, 0, 0])


def test_likelihoods_are_those_of_the_exact_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of N(0, A) the posterior's C is (A^-1 + I / s^2)^-1, and x has -log(2 pi e C) / 2 nats."""
    monkeypatch.setattr(covariances, "AT_ONCE", {"cpu": 5_000})
    covariance = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    target = GaussianMixture([1.0], torch.zeros(1, 2).double(), covariance[None])
    x = target.sample((5_000,), generator=torch.Generator().manual_seed(0))
    denoiser, level = target.denoiser(), NoiseLevel(sigma=0.8)
    posterior = torch.linalg.inv(torch.linalg.inv(covariance) + torch.eye(2) / level.sigma**2)
    variances = posterior.diagonal()
    mean = variances.mean()
    for moments, determinant in [
        (FullMoments(denoiser), posterior.det()),
        (KrylovMoments(denoiser, steps=2), posterior.det()),
        (DiagonalMoments(denoiser), variances.prod()),
        (IsotropicMoments(denoiser, {level: mean.item()}), mean.square()),
    ]:
        expected = -0.5 * (math.log(2 * math.pi) + 1) - 0.25 * math.log(determinant.item())
        nats = covariances.likelihoods(moments, x, level, seed=1)
        error = 5 * nats.std().item() / math.sqrt(len(x))
        assert nats.mean().item() == pytest.approx(expected, abs=error)


def test_every_covariance_is_judged_at_every_level(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None
) -> None:
    keys = {"quick": False, "settings": covariances.QUICK}
    context = replace(prepared, model=str(tmp_path / "many"), **keys)
    records, report = performed("covariances", context)
    by = {(cell["row"], cell["sigma / alpha"]): cell for cell in records["levels"]}
    levels, rows = many_level_model(SHAPE).levels, ["isotropic", "diagonal", "spectral", "Krylov"]
    ratios = [levels[0].sigma, levels[-1].sigma]
    assert list(by) == [(row, ratio) for ratio in ratios for row in rows]  # no head: not modulated
    for ratio in ratios:
        own = {row: by[row, ratio] for row in rows}
        assert own["isotropic"]["gain"] == [0.0] * 4
        pairs = zip(own["spectral"]["nats"], own["isotropic"]["nats"], strict=True)
        assert own["spectral"]["gain"] == pytest.approx([a - b for a, b in pairs])
        assert [cell["evaluations"] for cell in own.values()] == [1, 7, 1, 13]
        assert len(own["Krylov"]["nats"]) == 2
    assert pictures_of(prepared) == {"covariances"}
    assert len(report.sections[0].claims) == 3
    monkeypatch.setattr(covariances, "likelihoods", None)  # nothing is run again
    again = covariances.run(resumed(context)).records["levels"]
    assert again == records["levels"]
    assert list(covariances.chosen_levels(levels, 3).values()) == [levels[i] for i in (0, 2, 4)]


def test_the_modulated_row_is_judged_beside_the_spectral_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that doubles standard deviations: z^2 is a quarter, nats change in closed form."""
    model, level = many_level_model(SHAPE), many_level_model(SHAPE).levels[1]
    x = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    settings = covariances.QUICK
    own = covariances.Estimators(model, level, settings, 0, lambda split: x)
    wide = LevelTable.of({level: 4 * own.spectral.variances[level]})
    doubled = replace(own.spectral, variances=wide)
    monkeypatch.setattr(covariances.Estimators, "moments", lambda self, row: doubled)
    own.isotropic = torch.zeros(4).double()
    values = own.measure(Cell(covariances.MODULATED, 1.0, None, (0,))).values
    pairs = list(covariances.judged(own.spectral, x, level, seed=0))
    squares = torch.cat([q.cov.mahalanobis(clean - q.mean) for clean, q in pairs]) / x[0].numel()
    expected = (3 / 8 * squares - math.log(2)).tolist()
    assert values["above_spectral"] == pytest.approx(expected, abs=1e-4)
    z = torch.cat([(clean - q.mean).square() / q.cov.diagonal() for clean, q in pairs])
    assert values["z_variance"] == pytest.approx(z.mean().item() / 4, rel=1e-4)
