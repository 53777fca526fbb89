"""Which covariance, as an experiment: likelihoods against exact ones, what it records and draws, and going on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_experiments import concluded, picture_folder
from nets import tiny_model
from toy_models import many_level_model
from typer.testing import CliRunner

from mmdgs import cli, save
from mmdgs.errors import UsageError
from mmdgs.lab import Context, Workspace, covariances, held_out
from mmdgs.moments import DiagonalMoments, FullMoments, IsotropicMoments, KrylovMoments
from mmdgs.noise import NoiseLevel
from mmdgs.targets import GaussianMixture

SHAPE = (3, 8, 8)
LEVEL = NoiseLevel(sigma=0.8)


def test_likelihoods_are_those_of_the_exact_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Gaussian with covariance A the posterior's is C = (A^-1 + I / s^2)^-1, and x has -log(2 pi e C) / 2 nats."""
    monkeypatch.setattr(covariances, "ROWS", {"cpu": 20_000})
    covariance = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    target = GaussianMixture(torch.ones(1, dtype=torch.float64), torch.zeros(1, 2).double(), covariance[None])
    x = target.sample((20_000,), generator=torch.Generator().manual_seed(0))
    denoiser = target.denoiser()
    posterior = torch.linalg.inv(torch.linalg.inv(covariance) + torch.eye(2) / LEVEL.sigma**2)

    def nats(determinant: float) -> float:
        return -0.5 * (math.log(2 * math.pi) + 1) - 0.25 * math.log(determinant)

    variances = posterior.diagonal()
    wanted = [
        (FullMoments(denoiser), posterior.det()),
        (KrylovMoments(denoiser, steps=2), posterior.det()),
        (DiagonalMoments(denoiser), variances.prod()),
        (IsotropicMoments(denoiser, {LEVEL: variances.mean().item()}), variances.mean().square()),
    ]
    for moments, determinant in wanted:
        expected = nats(determinant.item())
        found = covariances.likelihoods(moments, x, LEVEL, seed=1)
        assert found.shape == (len(x),)
        assert found.mean().item() == pytest.approx(expected, abs=5 * found.std().item() / math.sqrt(len(x)))


def test_they_do_not_depend_on_the_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_level_model(SHAPE)
    moments = DiagonalMoments(model, probes=2, floor=0.01)
    x = torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(0))
    whole = covariances.likelihoods(moments, x, model.levels[1], seed=3)
    monkeypatch.setattr(covariances, "ROWS", {"cpu": 2})
    torch.testing.assert_close(
        covariances.likelihoods(moments, x, model.levels[1], seed=3), whole, rtol=1e-4, atol=1e-4
    )


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A tiny model of five levels, one of one level, and a folder in the place of their data."""
    save(many_level_model(SHAPE), tmp_path / "many")
    save(tiny_model("score", SHAPE, sigma=0.3), tmp_path / "one")
    monkeypatch.setattr(held_out, "DATA", {SHAPE: str(picture_folder(tmp_path / "images", shape=SHAPE))})
    return Context(Workspace(tmp_path / "out"), torch.device("cpu"), quick=True, model=str(tmp_path / "many"))


def test_it_measures_every_covariance_at_every_level(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, text = concluded(covariances, prepared)
    assert [level["sigma"] for level in records["levels"]] == [many_level_model(SHAPE).levels[i].sigma for i in (0, -1)]
    for level in records["levels"]:
        own = level["covariances"]
        assert list(own) == ["isotropic", "diagonal", "spectral", "Krylov"]
        assert own["isotropic"]["gain"] == 0
        assert own["spectral"]["gain"] == pytest.approx(own["spectral"]["nats"] - own["isotropic"]["nats"])
        assert [own[name]["evaluations"] for name in own] == [1, 7, 1, 13]
        assert own["Krylov"]["images"] == 2
    assert (tmp_path / "out" / "covariances.png").is_file()
    assert "quick version" in text
    first = records["levels"][0]["covariances"]
    assert f"{first['isotropic']['nats']:.2f} ± {first['isotropic']['interval']:.2f}" in text
    assert f"{first['Krylov']['gain']:+.2f} ± {first['Krylov']['gain_interval']:.2f}" in text
    monkeypatch.setattr(covariances, "likelihoods", None)  # nothing is run again
    again = replace(prepared, workspace=Workspace(tmp_path / "out", resume=True))
    assert covariances.run(again).records["levels"] == records["levels"]


def test_a_model_of_one_level_has_bars(prepared: Context, tmp_path: Path) -> None:
    records, _ = concluded(covariances, replace(prepared, model=str(tmp_path / "one")))
    assert [level["ratio"] for level in records["levels"]] == [pytest.approx(0.3)]


def level(**gains: tuple[float, float]) -> dict[str, object]:
    found = {name: {"gain": gain, "gain_interval": interval} for name, (gain, interval) in gains.items()}
    return {"covariances": {"isotropic": {"gain": 0.0, "gain_interval": 0.0}, **found}}


def test_the_verdict_counts_levels() -> None:
    said = covariances.verdict(
        [
            level(diagonal=(0.05, 0.1), spectral=(1.0, 0.1), Krylov=(0.7, 0.1)),
            level(diagonal=(0.2, 0.1), spectral=(0.5, 0.1), Krylov=(0.7, 0.1)),
            level(diagonal=(-0.3, 0.1), spectral=(1.5, 0.1), Krylov=(0.7, 0.1)),
        ]
    )
    assert "diagonal is likelier than isotropic at 1 of 3 levels (from -0.30 to +0.20 nats a number)" in said
    assert "spectral is likelier than isotropic at 3 of 3 levels (from +0.50 to +1.50" in said
    assert "The likeliest is spectral, at 2 of 3 levels." in said


def test_bad_input(prepared: Context, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--images must be at least 2, for an interval; got 1"):
        covariances.run(replace(prepared, images=1))
    save(tiny_model("score", (1, 12, 12), sigma=0.3), tmp_path / "small")
    words = ["reproduce", "covariances", "--model", str(tmp_path / "small"), "--out", str(tmp_path / "x")]
    result = CliRunner().invoke(cli.app, [*words, "--device", "cpu"])
    assert result.exit_code == 2
    assert "no images are known for a model of (1, 12, 12)" in " ".join(result.output.split())
