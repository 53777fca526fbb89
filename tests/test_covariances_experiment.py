"""Which covariance, as an experiment: likelihoods against exact ones, what it records and draws, and going on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from image_experiments import performed, picture_folder, pictures_of, resumed
from nets import tiny_model
from toy_models import many_level_model
from typer.testing import CliRunner

from mmdgs import cli, save
from mmdgs.errors import UsageError
from mmdgs.lab import Context, Workspace, covariances, held_out
from mmdgs.lab.grid import Cell
from mmdgs.moments import DiagonalMoments, FullMoments, IsotropicMoments, KrylovMoments
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.targets import GaussianMixture

SHAPE = (3, 8, 8)
LEVEL = NoiseLevel(sigma=0.8)


def test_likelihoods_are_those_of_the_exact_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Gaussian with covariance A the posterior's is C = (A^-1 + I / s^2)^-1, and x has -log(2 pi e C) / 2 nats."""
    monkeypatch.setattr(covariances, "AT_ONCE", {"cpu": 20_000})
    covariance = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    target = GaussianMixture(torch.ones(1, dtype=torch.float64), torch.zeros(1, 2).double(), covariance[None])
    x = target.sample((20_000,), generator=torch.Generator().manual_seed(0))
    denoiser = target.denoiser()
    posterior = torch.linalg.inv(torch.linalg.inv(covariance) + torch.eye(2) / LEVEL.sigma**2)
    variances = posterior.diagonal()
    wanted = [
        (FullMoments(denoiser), posterior.det()),
        (KrylovMoments(denoiser, steps=2), posterior.det()),
        (DiagonalMoments(denoiser), variances.prod()),
        (IsotropicMoments(denoiser, {LEVEL: variances.mean().item()}), variances.mean().square()),
    ]
    for moments, determinant in wanted:
        expected = -0.5 * (math.log(2 * math.pi) + 1) - 0.25 * math.log(determinant.item())
        found = covariances.likelihoods(moments, x, LEVEL, seed=1)
        assert found.shape == (len(x),)
        assert found.mean().item() == pytest.approx(expected, abs=5 * found.std().item() / math.sqrt(len(x)))


def test_they_do_not_depend_on_the_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_level_model(SHAPE)
    moments = DiagonalMoments(model, probes=2, floor=0.01)
    x = torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(0))
    whole = covariances.likelihoods(moments, x, model.levels[1], seed=3)
    monkeypatch.setattr(covariances, "AT_ONCE", {"cpu": 2})
    cut = covariances.likelihoods(moments, x, model.levels[1], seed=3)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-4)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None) -> Context:
    """A tiny model of five levels, one of one level, and a folder in the place of their data."""
    save(many_level_model(SHAPE), tmp_path / "many")
    save(tiny_model("score", SHAPE, sigma=0.3), tmp_path / "one")
    monkeypatch.setattr(held_out, "DATA", {SHAPE: str(picture_folder(tmp_path / "images", shape=SHAPE))})
    monkeypatch.setattr(covariances, "FULL", {"cpu": covariances.QUICK})
    return Context(Workspace(tmp_path / "out"), torch.device("cpu"), model=str(tmp_path / "many"))


def test_it_measures_every_covariance_at_every_level(prepared: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    records, report = performed("covariances", prepared)
    by = {(one["row"], one["sigma / alpha"]): one for one in records["levels"]}
    ratios = [many_level_model(SHAPE).levels[i].sigma for i in (0, -1)]
    rows = [row for row in covariances.ROWS if row != covariances.MODULATED]  # the model has no head
    assert list(by) == [(row, ratio) for ratio in ratios for row in rows]
    for ratio in ratios:
        own = {row: by[row, ratio] for row in rows}
        assert own["isotropic"]["gain"] == [0.0] * 4
        for row in ("diagonal", "spectral"):
            gains = [a - b for a, b in zip(own[row]["nats"], own["isotropic"]["nats"], strict=True)]
            assert own[row]["gain"] == pytest.approx(gains)
        assert [one["evaluations"] for one in own.values()] == [1, 7, 1, 13]
        assert len(own["Krylov"]["nats"]) == 2
    assert pictures_of(prepared) == {"covariances"}
    section = report.sections[0]
    first, krylov = section.tables[0].rows[0], section.tables[0].rows[-1]
    assert first[1].startswith(f"{mean(by['isotropic', ratios[0]]['nats']):,.2f} ± ")
    assert krylov[1].startswith(f"{mean(by['Krylov', ratios[0]]['gain']):+,.2f} ± ")
    assert len(section.claims) == 3
    monkeypatch.setattr(covariances, "likelihoods", None)  # nothing is run again
    assert covariances.run(resumed(prepared)).records["levels"] == records["levels"]


def test_the_modulated_row_is_judged_beside_the_spectral_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that doubles every standard deviation: z^2 is a quarter, and the likelihood changes in closed form."""
    model, x = many_level_model(SHAPE), torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    own = covariances.Estimators(model, model.levels[1], covariances.QUICK, 0, lambda split: x)
    wide = replace(
        own.spectral, variances=LevelTable.of({model.levels[1]: 4 * own.spectral.variances[model.levels[1]]})
    )
    monkeypatch.setattr(covariances.Estimators, "moments", lambda self, row: wide)
    own.isotropic = torch.zeros(4).double()
    found = own.measure(Cell(covariances.MODULATED, 1.0, None, (0,))).values
    pairs = list(covariances.judged(own.spectral, x, model.levels[1], seed=0))
    squares = torch.cat([q.cov.mahalanobis(clean - q.mean) for clean, q in pairs]) / x[0].numel()
    assert found["above_spectral"] == pytest.approx((3 / 8 * squares - math.log(2)).tolist(), abs=1e-4)
    z = torch.cat([(clean - q.mean).square() / q.cov.diagonal() for clean, q in pairs])
    assert found["z_variance"] == pytest.approx(z.mean().item() / 4, rel=1e-4)
    assert found["interval_coverage"] == pytest.approx((z < 4 * 1.6448536**2).float().mean().item(), abs=1e-6)


def test_a_model_of_one_level_has_bars(prepared: Context, tmp_path: Path) -> None:
    records, _ = performed("covariances", replace(prepared, model=str(tmp_path / "one")))
    assert [one["sigma / alpha"] for one in records["levels"]] == [pytest.approx(0.3)] * 4


def test_levels_are_spread_over_their_logarithm() -> None:
    levels = many_level_model(SHAPE).levels  # geometric, from 4 to 0.1
    assert list(held_out.chosen_levels(levels, 3).values()) == [levels[0], levels[2], levels[4]]
    assert list(held_out.chosen_levels(levels, 9).values()) == list(levels)


def test_bad_input(prepared: Context, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--images must be at least 2, for an interval; got 1"):
        covariances.run(replace(prepared, images=1))
    save(tiny_model("score", (1, 12, 12), sigma=0.3), tmp_path / "small")
    words = ["reproduce", "covariances", "--model", str(tmp_path / "small"), "--out", str(tmp_path / "x")]
    result = CliRunner().invoke(cli.app, [*words, "--device", "cpu"])
    assert result.exit_code == 2
    assert "no images are known for a model of (1, 12, 12)" in " ".join(result.output.split())
