"""Principal components as an experiment: what it measures and records, and going on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from image_experiments import performed, picture_folder, resumed
from oracles import linear_denoiser
from toy_models import Weights, many_level_model

from experiments import Context, Workspace, components, held_out
from mmdgs import save
from mmdgs.models import Model
from mmdgs.noise import NoiseLevel

SHAPE = (3, 8, 8)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A tiny model of five levels, and a folder in the place of its data."""
    save(many_level_model(SHAPE), tmp_path / "many")
    monkeypatch.setattr(
        held_out, "DATA", {SHAPE: str(picture_folder(tmp_path / "images", shape=SHAPE))}
    )
    model, settings = str(tmp_path / "many"), components.QUICK
    workspace = Workspace(tmp_path / "out")
    return Context(workspace, torch.device("cpu"), settings=settings, model=model)


def test_it_measures_cost_and_explained_error(
    prepared: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, _ = performed("components", prepared)
    by = {one["row"]: one for one in records["levels"]}
    assert list(by) == list(components.ROWS)
    assert max(by["block Lanczos"]["residual"]) <= 0.01
    assert by["subspace iteration"]["products"] == [6, 6]
    assert all(0 <= share <= 1 for one in by.values() for share in one["explained"])
    assert "products" not in by["random"]
    monkeypatch.setattr(components, "_measured", None)  # nothing is run again
    assert components.run(resumed(prepared)).records["levels"] == records["levels"]


def test_subspace_iteration_finds_the_largest_eigenvalues() -> None:
    d = 48
    basis = torch.linalg.qr(
        torch.randn(d, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )[0]
    matrix = basis @ torch.diag(0.5 ** torch.arange(d, dtype=torch.float64)) @ basis.T
    model = Model(linear_denoiser(matrix), Weights(), [NoiseLevel(1.0)], (3, 4, 4), source="linear")
    x_t = torch.zeros(1, 3, 4, 4, dtype=torch.float64)
    found, residual = components.subspace_iteration(model, x_t, NoiseLevel(1.0), 3, 40)
    assert residual < 1e-9
    torch.testing.assert_close(found.T @ found, basis[:, :3] @ basis[:, :3].T, rtol=0, atol=1e-8)
