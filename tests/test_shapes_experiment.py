"""The phantom and the stack: what is drawn is what is said, and every cell is measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from image_experiments import performed
from sizes import unpaint
from toy_models import any_size_model

from experiments import Context, Workspace, shapes
from mmdgs import save
from mmdgs.models.fits import FitStore
from mmdgs.noise import LevelTable


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    unpaint(monkeypatch)
    save(any_size_model(), tmp_path / "model")
    model = any_size_model()
    table = LevelTable.of({level: torch.full((3, 8, 8), 0.05) for level in model.levels})
    FitStore(model, "spectral").write(
        tmp_path / "model" / "spectral.safetensors", {"images": 2}, table
    )
    return Context(
        Workspace(tmp_path / "out"), torch.device("cpu"), quick=True, model=str(tmp_path / "model")
    )


def test_the_phantom_is_that_of_shepp_and_logan() -> None:
    """A bright skull, 0.2 inside it, ventricles of nothing, and the sum of the ellipses' areas."""
    x = shapes.shepp_logan(256)[0, 0]
    assert x[128, 128] == pytest.approx(0.2)
    assert x[int(128 * (1 - 0.9)), 128] == pytest.approx(1.0)
    assert x[128, int(128 * 1.22)] == pytest.approx(0.0, abs=1e-6)
    area = sum(v * math.pi * a * b for v, _, _, a, b, _ in shapes.SHEPP_LOGAN)
    assert 4 * x.mean().item() == pytest.approx(area, rel=0.02)


def test_means_over_slices_their_correlation_and_ellipsoids() -> None:
    x = torch.arange(16.0).reshape(1, 1, 16, 1, 1).expand(1, 1, 16, 3, 3)
    assert shapes._pooled(x, (8, 1, 1))[0, 0, :, 1, 2].tolist() == [3.5, 11.5]
    assert shapes._pooled(x, (6, 2, 3)).flatten().tolist() == [2.5, 8.5]
    white = torch.randn(2, 1, 50, 60, 60, generator=torch.Generator().manual_seed(0))
    assert shapes._next(white) == pytest.approx(0, abs=0.01)
    assert shapes._next(white[:, :, 1:] + white[:, :, :-1]) == pytest.approx(0.5, abs=0.01)
    bodies = shapes.ellipsoids(3, 16, 3, 0)
    assert bodies.shape == (3, 1, 16, 16, 16)
    assert (bodies[0] - bodies[1]).abs().max() > 0.1
    assert torch.equal(bodies[:2], shapes.ellipsoids(2, 16, 3, 0))


def test_every_cell_is_measured(prepared: Context) -> None:
    records, report = performed("shapes", prepared)
    rows = {(cell["data"], cell["row"]) for cell in records["kspace"]}
    assert rows == {(kind, row) for kind in ("real", "complex") for row in shapes._Work.images}
    for cell in records["kspace"]:
        assert math.isfinite(cell["psnr"])
        if "photo" in cell["row"]:
            assert cell["evaluations"] >= 3
    assert [cell["row"] for cell in records["stack"]] == ["slice by slice", "three ways"]
    assert all(cell["depth"] > 0 for cell in records["stack"])
    assert [figure.name for figure in report.sections[0].figures] == ["kspace", "stack"]
