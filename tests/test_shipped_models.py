"""What ships: `mmdgs models`, the distribution mmdgs-models, names with a slip, licences."""

from __future__ import annotations

import json
import shutil
import tomllib
import zlib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli, data, schedules
from mmdgs.derivatives import load_forward_mode
from mmdgs.errors import UsageError
from mmdgs.evaluation.checks import check_metrics
from mmdgs.models.shipped import PACKAGED, SHIPPED, licence_of, shipped_folders, shipped_models
from mmdgs.randomness import seeded

ROOT = Path(__file__).parents[1]
WEIGHTS = ROOT / "weights"
MODELS = {name: model for model in shipped_models() for name in model.names}


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(words))
    return result.exit_code, " ".join(result.output.split())


# --- the list


def test_all_folders_of_weights_are_listed() -> None:
    folders = {path for path in WEIGHTS.iterdir() if path.is_dir()}
    assert {model.folder for model in MODELS.values()} == folders
    assert sorted(MODELS) == sorted(SHIPPED)
    assert MODELS["mnist"].names == ("mnist", "mnist-energy")


@pytest.mark.parametrize("name", sorted({*SHIPPED} - {"mnist-energy", "cifar10-classifier"}))
def test_what_the_list_says_is_what_is_loaded(name: str) -> None:
    entry, model = MODELS[name], mmdgs.load(name)
    assert entry.parameters == sum(p.numel() for p in model.network.parameters())
    assert entry.config.levels == model.levels
    if name == "celeba":
        assert model.trained_on("celeba:test")
        assert not model.trained_on("celeba:train")
    for covariance in entry.fitted:
        x_t = torch.zeros(1, *(side or 24 for side in model.shape))
        assert model.posterior(covariance)(x_t, model.levels[-1]).mean.shape == x_t.shape
    for covariance in {"isotropic", "spectral"} - set(entry.fitted) if model.levels else ():
        with pytest.raises(UsageError, match=covariance):
            model.posterior(covariance)


def test_the_command_shows_it() -> None:
    status, text = run("models")
    assert status == 0, text
    assert "500: 90 to 0.01" in text
    assert "celeba is not under the MIT licence but non-commercial-research" in text
    status, text = run("models", "--json")
    assert status == 0
    entries = {entry["names"][0]: entry for entry in json.loads(text)}
    assert entries["cifar10"]["levels"] == "232 levels, sigma 50 to 0.01"
    assert entries["cifar10-score"]["fitted_covariances"] == ["isotropic", "spectral"]
    assert entries["mnist"]["megabytes"] == pytest.approx(5.26374)


def test_a_model_is_shown_in_one_line() -> None:
    model = mmdgs.load("mnist")
    assert repr(model) == "Model('mnist', energy, 1x28x28, sigma 0.5, 1.31 million parameters)"
    assert len(repr(model.posterior())) < 300
    assert "10 classes" in repr(mmdgs.load("mnist-classifier"))


# --- the distributions


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation outside of the source tree, in which nothing else is."""
    file = tmp_path / "site" / "mmdgs" / "models" / "shipped.py"
    monkeypatch.setattr("mmdgs.models.shipped.__file__", str(file))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_models_are_found_where_they_are_installed(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shipped_folders() == {}
    package = elsewhere / "packages" / "mmdgs_models"
    shutil.copytree(WEIGHTS / "mnist-energy", package / "mnist-energy")
    monkeypatch.syspath_prepend(package.parent)
    assert mmdgs.load("mnist").folder == package / "mnist-energy"
    (entry,) = shipped_models()
    assert (entry.names, entry.licence) == (("mnist", "mnist-energy"), "mit")
    card = package / "mnist-energy" / "README.md"
    card.write_text(card.read_text().replace("license: mit", "license: other\nlicense_name: mine"))
    assert licence_of(card.parent) == "mine"
    card.write_text("# no front matter")
    assert licence_of(card.parent) == "not said"


def test_models_that_are_absent_say_the_command_that_brings_them(elsewhere: Path) -> None:
    status, text = run("sample", "celeba")
    assert status == 2
    assert "the weights of 'celeba' are not installed: pip install mmdgs-models" in text
    with pytest.raises(UsageError, match="clone"):
        mmdgs.load("mnist-kl")


def packed_size(path: Path, start: int = 1 << 18) -> float:
    """The bytes of a file in a wheel, as its start is compressed."""
    content = path.read_bytes()
    return len(zlib.compress(content[:start], 1)) * max(1.0, len(content) / start)


def test_the_distributions_are_small_enough_for_a_package_index() -> None:
    code = tomllib.loads((ROOT / "pyproject.toml").read_text())
    models = tomllib.loads((WEIGHTS / "pyproject.toml").read_text())
    wheel = models["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"only-include": list(PACKAGED), "sources": {"": "mmdgs_models"}}
    files = [file for name in PACKAGED for file in (WEIGHTS / name).rglob("*") if file.is_file()]
    assert sum(map(packed_size, files)) < 95e6
    package = code["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert package == {"packages": ["src/mmdgs"]}
    files = [file for file in (ROOT / "src" / "mmdgs").rglob("*") if file.is_file()]
    assert sum(packed_size(file) for file in files if file.suffix != ".pyc") < 2e6
    assert code["project"]["license"] == "MIT"
    assert "LicenseRef-CelebA-Non-Commercial-Research" in models["project"]["license"]


def test_the_licence_of_every_model_is_told() -> None:
    restricted = {model.folder.name for model in MODELS.values() if model.licence != "mit"}
    assert restricted == {"celeba", "photo"}
    free, limited = (WEIGHTS / "LICENSE").read_text().split("MIT License\n")
    for model in MODELS.values():
        assert model.folder.name in (limited if model.folder.name in restricted else free)


# --- names with a slip in them

SLIPS = {
    "geometric": lambda: schedules.parse_levels("geometrc:3:1:0.1"),
    "test": lambda: data.load_images("mnist", "tets"),
    "rings": lambda: data.toy("ring"),
    "fid": lambda: check_metrics(["fidd"], None),
    "celeba": lambda: mmdgs.load("cleeba"),
}


@pytest.mark.parametrize("meant", SLIPS)
def test_a_slip_gets_the_name_that_was_meant(meant: str) -> None:
    with pytest.raises(UsageError, match=rf"\(did you mean '{meant}'\?\)"):
        SLIPS[meant]()


def test_a_model_that_is_none_gets_the_list(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = run("sample", "mnsit")
    assert status == 2
    assert ", ".join(sorted(SHIPPED)) in text
    assert not list(tmp_path.iterdir())


# --- how they lie in memory


@pytest.mark.parametrize("name", ["celeba", "photo"])
def test_every_derivative_is_there_in_either_layout(name: str) -> None:
    load_forward_mode()
    model = mmdgs.load(name)
    first = model.network.get_parameter("first.weight")
    assert first.is_contiguous(memory_format=torch.channels_last) == (name == "photo")
    level, (x, u, v) = (
        mmdgs.NoiseLevel(0.3),
        torch.rand(3, 1, 3, 16, 16, generator=seeded(0)).unbind(),
    )
    mean, pushed = torch.func.jvp(lambda at: model.network(at, level), (x,), (u,))
    pulled = torch.func.vjp(lambda at: model.network(at, level), x)[1](v)[0]
    assert (v * pushed).sum().item() == pytest.approx((u * pulled).sum().item(), rel=1e-3)
    model.network.to(memory_format=torch.contiguous_format)
    assert model.digest == mmdgs.load(name).digest
    torch.testing.assert_close(model.network(x, level), mean, rtol=1e-4, atol=1e-4)
