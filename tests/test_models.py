"""Models as folders: what is saved is what is loaded, and what is damaged or foreign is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
from nets import tiny_model, tiny_unet
from safetensors.torch import load_file, save_file

import mmdgs
from mmdgs.denoisers import takes_level
from mmdgs.errors import UsageError
from mmdgs.files import write_atomically
from mmdgs.models import DENOISERS, Model, ModelConfig
from mmdgs.models.config import SquaredErrorEnergy
from mmdgs.networks import PRESETS, build_network, preset
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import seeded

WEIGHTS = "model.safetensors"
OPTIONS = {"width": 8, "multipliers": [1, 2], "blocks": 1, "attention": []}
X = torch.randn(2, 1, 8, 8, generator=seeded(3))


def refused(*parts: object):
    """UsageError with these parts in its message, in this order."""
    return pytest.raises(UsageError, match="(?s)" + ".*".join(re.escape(str(p)) for p in parts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a tiny energy model."""
    return mmdgs.save(
        tiny_model(isotropic_variance=0.0625, trained_on="digits"), tmp_path / "model"
    )


def edit(folder: Path, **changes: object) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# --- what is saved is what is loaded


def test_a_model_comes_back_as_it_was(folder: Path) -> None:
    model, loaded = tiny_model(isotropic_variance=0.0625, trained_on="digits"), mmdgs.load(folder)
    assert (loaded.config, loaded.digest) == (model.config, model.digest)
    assert loaded.level == NoiseLevel(sigma=0.5)
    assert torch.equal(loaded(X, loaded.level), model(X, model.level).detach())
    assert not loaded.network.training
    assert not any(p.requires_grad for p in loaded.network.parameters())
    q = loaded.posterior("isotropic")(X, loaded.level)
    torch.testing.assert_close(q.cov.diagonal(), torch.full_like(X, 0.0625))


def test_the_folder_is_in_the_hubs_format(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", WEIGHTS}
    assert load_file(folder / WEIGHTS).keys() == tiny_model().network.state_dict().keys()
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: mmdgs\n")
    assert "sigma 0.5" in card


def test_saving_again_keeps_a_card_of_ones_own(folder: Path) -> None:
    (folder / "README.md").write_text("mine")
    mmdgs.save(tiny_model(), folder)
    assert (folder / "README.md").read_text() == "mine"
    mmdgs.save(tiny_model(), folder, card="yours")
    assert (folder / "README.md").read_text() == "yours"


# --- parametrisations


@pytest.mark.parametrize("param", [*DENOISERS, "mean-std"])
def test_every_denoiser_builds(param: str, tmp_path: Path) -> None:
    for conditional in (False, True):
        options = preset("unet-tiny")[1] | {"conditional": conditional}
        model = mmdgs.load(mmdgs.save(tiny_model(param, options=options), tmp_path))
        q = model.posterior()(X, model.level, generator=seeded(1))
        assert q.cov.diagonal().shape == X.shape
        assert (q.mean - X).abs().max() > 1e-4
        torch.testing.assert_close(model(X, model.level), q.mean)


def test_a_classifier_is_no_denoiser(tmp_path: Path) -> None:
    options = {"width": 4, "features": 4}
    config = ModelConfig("classifier", "classes", (1, 12, 12), options, classes=("cat", "dog"))
    model = Model.build(config, seed=4)
    loaded = mmdgs.load(model.save_pretrained(tmp_path / "a" / "b"))
    assert (loaded.config, loaded.digest) == (config, model.digest)
    x = torch.rand(2, 1, 12, 12, generator=seeded(0))
    assert torch.equal(loaded.network(x), model.network.eval()(x))
    for use in (model.posterior, lambda: model(x, NoiseLevel(sigma=0.5))):
        with refused("'classes' is no denoiser"):
            use()
    with refused("no noise level"):
        _ = model.level


def test_heads_come_back(tmp_path: Path) -> None:
    options = preset("unet-tiny")[1] | {"conditional": True}
    scale = {"ratios": [0.5], "means": [0.2], "spreads": [1.0], "data_std": 0.3}
    head = {"denoiser": "abc", "scale": scale}
    saved = tiny_model("variance-ratio", options=options, head=head)
    model = mmdgs.load(mmdgs.save(saved, tmp_path / "ratios"))
    ratio = model.head_of(model.network)(X, 0.5 * X, model.level)
    assert (ratio > 0).all()
    with refused("'variance-ratio' is no denoiser", "load_head"):
        model.posterior()
    keys = {
        "network": "spectrum-head",
        "options": {**options, "size": [8, 8], "ends": [0.5, 0.5], "knots": 1},
    }
    saved = tiny_model("covariance", **keys, head={"denoiser": "abc", "data_std": 0.3})
    model = mmdgs.load(mmdgs.save(saved, tmp_path / "covariance"))
    diagonals = [
        head.head_of(head.network)(X, 0.5 * X, model.level).diagonal() for head in (saved, model)
    ]
    torch.testing.assert_close(*diagonals)
    for wrong in ({"denoiser": "abc"}, {"denoiser": "abc", "data_std": 0}):
        with refused("data_std"):
            tiny_model("covariance", **keys, head=wrong)


@pytest.mark.parametrize("conditional", [False, True])
def test_the_squared_error_energy_is_its_formula(conditional: bool) -> None:
    level = NoiseLevel(alpha=0.8, sigma=0.5)
    network = tiny_unet(conditional=conditional).double()
    x = X.double().requires_grad_(True)
    energy = SquaredErrorEnergy(network)(x, level)
    reconstruction = network(x, level)
    expected = 0.5 * (x - reconstruction).square().sum(dim=(1, 2, 3))
    torch.testing.assert_close(energy, expected)
    # grad = (I - J)' (x - net(x)), with J' v by autograd.
    residual = (x - reconstruction).detach()
    (pulled,) = torch.autograd.grad(reconstruction, x, residual)
    denoised = DENOISERS["energy-squared"](network)(x.detach(), level)
    torch.testing.assert_close(denoised, (x - 0.25 * (residual - pulled)).detach() / 0.8)


@pytest.mark.parametrize("name", sorted({*PRESETS} - {"unet-paper", "ncsnv2"}))
def test_every_preset_builds(name: str) -> None:
    network, options = preset(name)
    inputs = 2 if network in ("mlp", "spectrum-head") else 1
    shape = {"mlp": (2,), "spectrum-head": (2, 32, 32)}.get(network, (1, 28, 28))
    built = build_network(network, inputs, inputs, options).eval()
    level = [NoiseLevel(sigma=0.5)] * takes_level(built)
    assert len(built(torch.zeros(2, *shape), *level)) == 2


# --- what is damaged or foreign

MISTAKES = {
    "another architecture": ({"options": {**OPTIONS, "width": 16}}, WEIGHTS),
    "a deeper one": ({"options": {**OPTIONS, "blocks": 2}}, "such as down."),
    "levels the wrong way": ({"sigma": None, "sigmas": [0.5, 1.0]}, "to the cleanest"),
    "negative sigma": ({"sigma": -1.0}, "-1.0"),
    "unknown option": ({"options": {"widht": 8}}, "did you mean 'width'?"),
    "inflation as a number": ({"inflation": 1.5}, "dict, got 1.5"),
    "inflation by nothing": ({"inflation": {"spectral": 0.0}}, "got {'spectral': 0.0}"),
    "of the future": ({"mmdgs_format": 99}, "mmdgs_format"),
}


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES.keys())
def test_configurations_that_do_not_fit(case, folder: Path) -> None:
    changes, part = case
    edit(folder, **changes)
    with refused(part):
        mmdgs.load(folder)


def test_files_that_are_damaged_or_missing(folder: Path) -> None:
    config, weights = folder / "config.json", folder / WEIGHTS
    before = {file: file.read_bytes() for file in (config, weights)}
    for file, contents in ((config, (b"{", b"\xff\xfe")), (weights, (b"", before[weights][:-1]))):
        for content in contents:
            file.write_bytes(content)
            with refused(file.name):
                mmdgs.load(folder)
        file.write_bytes(before[file])
    for file in (weights, config):
        file.unlink()
        with refused(file.name):
            mmdgs.load(folder)


def test_weights_that_are_not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["first.weight"][0, 0, 0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with refused("model.safetensors holds values that are not finite, in first.weight"):
        mmdgs.load(folder)


class Bomb:
    """Unpickling this runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def armed(marker: Path) -> Bomb:
    """A bomb that was seen to work."""
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "the bomb must be a real one"
    marker.unlink()
    return Bomb(marker)


def test_a_pickle_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    bomb, weights = armed(tmp_path / "marker"), folder / "model.safetensors"
    weights.write_bytes(pickle.dumps(bomb))
    with refused(WEIGHTS):
        mmdgs.load(folder)
    torch.save({"first.weight": bomb}, weights)
    with refused(WEIGHTS):
        mmdgs.load(folder)
    assert not bomb.marker.exists()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sigma": None}, "needs sigma"),
        ({"param": "classes"}, "names of its classes"),
        ({"head": {"denoiser": "abc", "scale": {}}}, "'energy'"),
        ({"param": "variance-ratio", "head": {"denoiser": "abc"}}, "scale"),
    ],
)
def test_models_that_cannot_be(changes: dict[str, object], part: str) -> None:
    with refused(part):
        tiny_model(**changes)


# --- the hub


def test_a_model_of_the_hub(folder: Path, monkeypatch) -> None:
    asked = set()

    def download(name: str, **options: object) -> str:
        asked.add((name, options["revision"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert mmdgs.load("someone/digits").config.trained_on == "digits"
    mmdgs.load("someone/digits", revision="v1")
    assert asked == {("someone/digits", None), ("someone/digits", "v1")}


def test_a_hub_that_cannot_be_reached(monkeypatch) -> None:
    def download(name: str, **options: object) -> str:
        raise ConnectionError("no network\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with refused("'someone/digits'", "(no network)"):
        mmdgs.load("someone/digits")


@pytest.mark.parametrize("name", ["digits", "/some/where", "a/b/c"])
def test_names_that_are_no_folder_never_go_to_the_hub(name, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def download(*_: object, **__: object) -> None:
        pytest.fail("asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with refused(f"no model '{name}'", "no folder of this name"):
        mmdgs.load(name)


def test_pushing_uploads_the_files(monkeypatch) -> None:
    calls = []

    class Api:
        def __init__(self, token: str | None = None) -> None:
            calls.append(("token", token))

        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
            calls.append(("create", name, private, exist_ok))
            return f"https://hub/{name}"

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
            files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
            calls.append(("upload", repo_id, sorted(files)))
            assert json.loads(files["config.json"])["param"] == "energy"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    address = tiny_model().push_to_hub("me/digits", private=True, token="secret")
    assert address == "https://hub/me/digits"
    files = ["README.md", "config.json", "model.safetensors"]
    upload = ("upload", "me/digits", files)
    assert calls == [("token", "secret"), ("create", "me/digits", True, True), upload]


# --- files


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    assert path.stat().st_mode & 0o777 == 0o644
