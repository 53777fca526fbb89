"""All experiments of one network: each in its folder, stopped by one clock, gone on with, and taken into the docs."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_experiments import performed, picture_folder, resumed, use_fake_inception
from toy_models import stand_in_model
from typer.testing import CliRunner

from mmdgs import cli
from mmdgs.lab import (
    Context,
    Workspace,
    calibration,
    covariances,
    few_steps,
    held_out,
    inverse_networks,
    network,
    rivals,
    table2,
)
from mmdgs.lab.grid import Grid

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
SHAPE = (3, 8, 8)
ROOT = Path(__file__).parents[1]
TABLES = {"covariances": "cifar10", "calibration": "default", "few-steps": "cifar10", "table2": "main"}
"""A table of each record."""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A tiny network with the name of the one that ships, a folder in the place of its data, a fake Inception."""
    stand_in_model(tmp_path / "cifar10", SHAPE)
    images = str(picture_folder(tmp_path / "images", 40))
    use_fake_inception(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(held_out, "DATA", {SHAPE: images})
    monkeypatch.setattr(covariances, "FULL", {"cpu": covariances.QUICK})
    few = calibration.CalibrationSettings(images=4, points=8, expensive=2, krylov_steps=3)
    monkeypatch.setattr(calibration, "FULL", {"cpu": few})
    monkeypatch.setattr(few_steps, "DATA", images)
    rows = ("Heun", few_steps.MODULATED, few_steps.LEARNED)  # the last two need a head
    few_images = few_steps.FewStepSettings(steps=(18, 25), images=4, fit_images=4, precision="float32")
    monkeypatch.setattr(few_steps, "FULL", few_images)
    monkeypatch.setattr(few_steps, "ROWS", {row: few_steps.ROWS[row] for row in rows})
    one_row = replace(inverse_networks.QUICK, rows=("spectral, 25 steps",), tasks=("box", "blur"))
    monkeypatch.setattr(inverse_networks, "FULL", one_row)
    monkeypatch.setattr(rivals, "installed", lambda: False)
    tiny = replace(
        table2.QUICK, images=4, seeds=2, levels=3, langevin_steps=1, tuning_images=2, fit_images=4, probes=1,
        heun=(2,), steps=(2,), probed_steps=(2,), krylov=(2,), krylov_steps=1, rate_factors=(1.0, 2.0),
        metrics=("fid", "diversity"), reference_limit=None,
    )  # fmt: skip
    monkeypatch.setattr(table2, "DATA", images)
    monkeypatch.setattr(table2, "FULL", tiny)
    monkeypatch.setattr(network, "MOST_IMAGES", 6)
    workspace = Workspace(tmp_path / "out")
    return Context(workspace, torch.device("cpu"), model="cifar10")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cells that are measured, in their order."""
    run, cells = Grid.run, []

    def watched(self: Grid, *given: Any, **named: Any) -> Any:
        def measure(cell: Any) -> Any:
            found = self.measure(cell)
            cells.append(f"{self.name}: {cell.name}")
            return found

        return run(replace(self, measure=measure), *given, **named)

    monkeypatch.setattr(Grid, "run", watched)
    return cells


@pytest.mark.slow
def test_a_run_in_parts_measures_every_cell_once_and_the_docs_take_all_of_it(
    prepared: Context, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    every = [one.record for one in network.JOBS if not one.accelerator]
    with monkeypatch.context() as patch:

        def stopped(self: Context) -> None:  # in the midst of the third experiment
            if any(one.startswith("few-steps") for one in measured):
                raise network.TimeIsUp

        patch.setattr(Context, "check_time", stopped)
        records, report = performed("network", prepared)
    found = {one["row"]: one for one in records["experiments"]}
    assert list(found) == every == ["covariances", "calibration", "few-steps", "inverse", "table2"]
    assert [found[name]["cells"] > 0 for name in every] == [True, True, True, False, False]
    assert (found["covariances"]["open"], found["calibration"]["open"]) == ([], [])
    assert found["few-steps"]["open"] == ["Heun, 25"]
    assert found["inverse"]["open"] == found["table2"]["open"] == ["all of it"]
    assert report.takeaway == "Open, for --resume: few-steps, inverse, table2."
    assert "--from few-steps=" in report.following[0].command
    assert "inverse" not in report.following[0].command

    records, report = performed("network", resumed(prepared))
    assert report.takeaway == "Every experiment is finished."
    assert [row[2] for row in report.sections[0].tables[0].rows] == ["nothing"] * 5
    assert network._few(["a", "b", "c", "d", "e"]) == "a; b; c and 2 more"
    assert all(one["open"] == [] and one["cells"] > 0 for one in records["experiments"])
    assert len(measured) == len(set(measured))  # none of them twice
    cases = json.loads((tmp_path / "out" / "calibration" / "records.json").read_text())["cells"]
    assert {one["case"] for one in cases} == {"cifar10 0.1", "cifar10 0.3", "cifar10 1"}
    before = list(measured)
    performed("network", resumed(prepared))
    assert measured == before

    docs = tmp_path / "tree" / "docs"
    shutil.copytree(ROOT / "docs" / "records", docs / "records")
    marks = (f"<!-- table: {record} {name} -->\n<!-- end of table -->\n" for record, name in TABLES.items())
    (docs / "page.md").write_text("".join(marks))
    words = shlex.split(report.following[0].command)
    words[words.index(".")] = str(docs.parent)
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    shown = (docs / "page.md").read_text()
    heun = json.loads((tmp_path / "out" / "few-steps" / "records.json").read_text())["samplers"]
    (row,) = (line for line in shown.splitlines() if line.startswith("| Heun (5, 9, 13, 18 and 25 steps) |"))
    numbers = [cell for cell in map(str.strip, row.strip("|").split("|")[1:]) if cell]
    assert numbers == [*(f"{one['fid']:.2f}" for one in heun), "17 / 25"]  # nothing of the network before
    assert "| ancestral, full (5 Krylov steps) | 2 | " in shown
    cell = next(one for one in cases if one["row"] == "spectral" and one["case"] == "cifar10 1")
    assert f"{cell['above_isotropic, default']:+.2f} / " in shown
    taken = json.loads((docs / "records" / "inverse.json").read_text())["networks"]
    own = json.loads((tmp_path / "out" / "inverse" / "records.json").read_text())["networks"]
    assert len(own) == 2
    assert all({"model": "cifar10", **one} in taken for one in own)
