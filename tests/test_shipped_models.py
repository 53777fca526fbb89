"""What ships, by its files: `mmdgs models`, names with a slip in them, licences."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli, data, schedules
from mmdgs.errors import UsageError, nearest, unknown_name
from mmdgs.evaluation.checks import check_metrics
from mmdgs.generation import Method
from mmdgs.lab import Context, Workspace, experiment
from mmdgs.lab.held_out import held_out_images
from mmdgs.models.catalogue import licence_of, shipped_models
from mmdgs.models.shipped import shipped_names

ROOT = Path(__file__).parents[1]
SHIPPED = {name: one for one in shipped_models() for name in one.names}


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(words))
    return result.exit_code, result.output


# --- the list ---------------------------------------------------------------------------------------------------


def test_all_folders_of_weights_are_listed() -> None:
    folders = {path for path in (ROOT / "weights").iterdir() if path.is_dir()}
    assert {one.folder for one in SHIPPED.values()} == folders
    assert sorted(SHIPPED) == shipped_names()
    assert SHIPPED["mnist"].names == ("mnist", "mnist-energy")


@pytest.mark.parametrize("name", SHIPPED)
def test_what_the_list_says_is_what_is_loaded(name: str) -> None:
    said, model = SHIPPED[name], mmdgs.load(name)
    assert said.parameters == sum(p.numel() for p in model.network.parameters())
    assert said.config.levels == model.levels
    for covariance in said.fitted:
        x_t = torch.zeros(1, *model.shape)
        assert model.posterior(covariance)(x_t, model.levels[-1]).mean.shape == x_t.shape
    for covariance in {"isotropic", "spectral"} - set(said.fitted) if model.levels else ():
        with pytest.raises(UsageError, match=f"no {covariance} variances are kept"):
            model.posterior(covariance)


def test_the_command_shows_it() -> None:
    status, said = run("models")
    assert status == 0, said
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in said.splitlines() if line.startswith("│")}
    cells = [cell.strip() for cell in rows["celeba"]]
    assert cells == ["edm", "celeba:test", "500: 90 to 0.01", "isotropic", "non-commercial-research", "25.0"]
    assert [cell.strip() for cell in rows["mnist, mnist-energy"]][1:5] == [
        "mnist",
        "1: 0.5",
        "isotropic",
        "MIT",
    ]
    assert "celeba is not under the MIT licence but non-commercial-research: see" in said
    status, said = run("models", "--json")
    assert status == 0
    found = {one["names"][0]: one for one in json.loads(said)}
    assert found["cifar10"]["levels"] == "232 levels, sigma 50 to 0.01"
    assert found["cifar10-score"]["fitted_covariances"] == ["isotropic", "spectral"]
    assert found["mnist"]["megabytes"] == pytest.approx(5.26374)


def test_the_list_follows_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = tmp_path / "weights"
    shutil.copytree(ROOT / "weights" / "mnist-kl", root / "mnist-kl")
    card = (root / "mnist-kl" / "README.md").read_text()
    (root / "mnist-kl" / "README.md").write_text(card.replace("license: mit", "license: other\nlicense_name: mine"))
    monkeypatch.setattr("mmdgs.models.catalogue.shipped_roots", lambda: [root])
    monkeypatch.setattr("mmdgs.models.shipped.shipped_roots", lambda: [root])
    (one,) = shipped_models()
    assert (one.names, one.licence) == (("mnist-kl",), "mine")
    (root / "mnist-kl" / "README.md").write_text("# no front matter")
    assert licence_of(root / "mnist-kl") == "not said"


# --- one line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("celeba", "Model('celeba', edm, 3x64x64, 500 levels, sigma 90 to 0.01, 12.48 million parameters)"),
        ("mnist", "Model('mnist', energy, 1x28x28, sigma 0.5, 1.31 million parameters)"),
        ("mnist-kl", "Model('mnist-kl', mean-std, 1x28x28, sigma 0.5, 1.31 million parameters)"),
        ("mnist-classifier", "Model('mnist-classifier', classes, 1x28x28, 10 classes, 0.13 million parameters)"),
    ],
)
def test_a_model_is_shown_in_one_line(name: str, line: str) -> None:
    model = mmdgs.load(name)
    assert repr(model) == line
    if model.levels:
        assert len(repr(model.posterior())) < 300


# --- names with a slip in them ------------------------------------------------------------------------------------

SLIPS = {
    "sampler": lambda: Method("heunn"),
    "covariance": lambda: mmdgs.load("mnist").posterior("diagnal"),
    "levels": lambda: schedules.parse_levels("geometrc:3:1:0.1"),
    "data set": lambda: data.load_images("cifar-10"),
    "samples": lambda: data.load_samples("mnits"),
    "split": lambda: data.load_images("mnist", "tets"),
    "2-D data set": lambda: data.toy("ring"),
    "metric": lambda: check_metrics(["fidd"], None),
    "experiment": lambda: experiment("tabel1"),
    "model": lambda: mmdgs.load("mnsit"),
}
MEANT = ("heun", "diagonal", "geometric", "cifar10", "mnist", "test", "rings", "fid", "table1", "mnist")


@pytest.mark.parametrize(("kind", "meant"), [*zip(SLIPS, MEANT, strict=True)], ids=SLIPS.keys())
def test_a_slip_gets_the_name_that_was_meant(kind: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"\(did you mean '{meant}'\?\)"):
        SLIPS[kind]()


def test_what_is_like_nothing_gets_no_suggestion() -> None:
    assert nearest("xyz", ["heun", "ddim"]) == ""
    assert nearest("HEUN", ["heun", "ddim"]) == " (did you mean 'heun'?)"
    assert str(unknown_name("sampler", "xyz", ["heun", "ddim"])) == "unknown sampler 'xyz'; choose one of heun, ddim"


def test_a_model_that_is_none_gets_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, said = run("sample", "mnsit")
    assert status == 2
    assert "no model 'mnsit' (did you mean 'mnist'?): there is no folder of this name here." in said
    assert f"These models ship: {', '.join(shipped_names())}." in said
    assert not list(tmp_path.iterdir())


# --- licences -----------------------------------------------------------------------------------------------------


def test_the_package_says_that_some_weights_are_not_free() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    licenses = pytest.importorskip("packaging.licenses")  # of packaging 24.2 on
    assert licenses.canonicalize_license_expression(project["license"]) == project["license"]
    restricted = {one.folder.name for one in SHIPPED.values() if one.licence != "mit"}
    assert restricted == {"celeba"}
    assert "LicenseRef-CelebA-Non-Commercial-Research" in project["license"]
    assert "weights/LICENSE" in project["license-files"]
    text = (ROOT / "weights" / "LICENSE").read_text()
    free, limited = text.split("MIT License\n")
    for one in SHIPPED.values():
        place = limited if one.folder.name in restricted else free
        assert one.folder.name in place, one.folder.name


def test_faces_that_celeba_was_trained_on_are_not_taken_for_held_out_ones(tmp_path: Path) -> None:
    model = mmdgs.load("celeba")
    assert model.trained_on("celeba:test")
    assert not model.trained_on("celeba:train")
    assert mmdgs.load("cifar10").trained_on("cifar10:train")
    context = Context(Workspace(tmp_path / "out"), torch.device("cpu"), data_dir=str(tmp_path))
    with pytest.raises(UsageError, match=r"celeba was trained on celeba:test, so these images are not held out"):
        held_out_images(context, model, "test", 2)
