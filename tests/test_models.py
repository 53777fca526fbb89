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
from huggingface_hub.errors import LocalEntryNotFoundError
from nets import lively, tiny_model, tiny_unet
from safetensors.torch import load_file, save_file

import mmdgs
from mmdgs.denoisers import takes_level
from mmdgs.errors import UsageError
from mmdgs.files import folder_written_atomically, locked, write_atomically
from mmdgs.models import DENOISERS, PARAMS, Model, ModelConfig
from mmdgs.models.config import SquaredErrorEnergy
from mmdgs.networks import PRESETS, build_network, preset
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import seeded

X = torch.randn(2, 1, 8, 8, generator=seeded(3))


def refused(*parts: str):
    """UsageError with these parts in its message, in this order."""
    return pytest.raises(UsageError, match="(?s)" + ".*".join(map(re.escape, parts)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a tiny energy model."""
    return mmdgs.save(tiny_model(isotropic_variance=0.0625, trained_on="digits"), tmp_path / "model")


def edit(folder: Path, **changes: object) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# --- what is saved is what is loaded ----------------------------------------------------------------------------


def test_a_model_comes_back_as_it_was(folder: Path) -> None:
    model, found = tiny_model(isotropic_variance=0.0625, trained_on="digits"), mmdgs.load(folder)
    assert found.config == model.config
    assert found.level == NoiseLevel(sigma=0.5)
    for key, value in model.network.state_dict().items():
        assert torch.equal(found.network.state_dict()[key], value)
    assert torch.equal(found(X, found.level), model(X, model.level).detach())
    assert not found.network.training
    assert not any(p.requires_grad for p in found.network.parameters())
    q = found.posterior("isotropic")(X, found.level)
    torch.testing.assert_close(q.cov.diagonal(), torch.full_like(X, 0.0625))


def test_a_classifier_comes_back_with_its_classes(tmp_path: Path) -> None:
    config = ModelConfig("classifier", "classes", (1, 28, 28), {"width": 8}, classes=("cat", "dog", "owl"))
    model = Model.build(config, seed=4)
    found = mmdgs.load(model.save_pretrained(tmp_path / "a" / "b"))
    assert found.config == config
    x = torch.rand(2, 1, 28, 28, generator=seeded(0))
    assert found.network(x).shape == (2, 3)
    assert torch.equal(found.network(x), model.network.eval()(x))


def test_weights_can_be_stored_in_half_the_room(folder: Path, tmp_path: Path) -> None:
    model = tiny_model()
    small = model.save_pretrained(tmp_path / "small", dtype=torch.bfloat16)
    assert (small / "model.safetensors").stat().st_size < 0.6 * (folder / "model.safetensors").stat().st_size
    found = mmdgs.load(small).network.state_dict()
    for key, value in model.network.state_dict().items():
        assert found[key].dtype == torch.float32
        torch.testing.assert_close(found[key], value, rtol=2**-8, atol=0)  # bfloat16 has 8 significant bits


def test_the_folder_is_in_the_hubs_format(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert load_file(folder / "model.safetensors").keys() == tiny_model().network.state_dict().keys()
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: mmdgs\n")
    for words in ("digits", "1x8x8", "sigma 0.5", "0.0625", 'mmdgs.load("THIS FOLDER")'):
        assert words in card


def test_the_card_says_how_it_was_trained() -> None:
    card = tiny_model().describe({"command": "mmdgs train --data mnist --out OUT", "minutes": 1.23456789})
    assert "```\nmmdgs train --data mnist --out OUT\n```" in card
    assert "| minutes | 1.23457 |" in card


def test_saving_again_keeps_a_card_of_ones_own(folder: Path) -> None:
    (folder / "README.md").write_text("mine")
    mmdgs.save(tiny_model(), folder)
    assert (folder / "README.md").read_text() == "mine"
    mmdgs.save(tiny_model(), folder, card="yours")
    assert (folder / "README.md").read_text() == "yours"


# --- parametrisations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("param", PARAMS)
@pytest.mark.parametrize("conditional", [False, True])
def test_every_parametrisation_builds(param: str, conditional: bool, tmp_path: Path) -> None:
    if param == "classes":
        config = ModelConfig("classifier", param, (1, 12, 12), {"width": 4, "features": 4}, classes=("a", "b"))
        model = Model.build(config)
        assert model.network.eval()(torch.rand(2, 1, 12, 12, generator=seeded(0))).shape == (2, 2)
        with refused("'classes' is no denoiser"):
            model.posterior()
        with refused("'classes' is no denoiser", "model.network"):
            model(torch.zeros(2, 1, 12, 12), NoiseLevel(sigma=0.5))
        with refused("no noise level"):
            _ = model.level
        return
    options = preset("unet-tiny")[1] | {"conditional": conditional}
    if param == "covariance":
        head, sizes = {"denoiser": "abc", "data_std": 0.3}, {"size": [8, 8], "ends": [0.5, 0.5], "knots": 1}
        model = tiny_model(param, network="spectrum-head", options={**options, **sizes}, head=head)
        again = mmdgs.load(mmdgs.save(model, tmp_path))
        x = torch.rand(2, 1, 8, 8, generator=seeded(0))
        covs = [one.head_of(one.network)(x, 0.5 * x, model.level) for one in (model, again)]
        torch.testing.assert_close(covs[0].diagonal(), covs[1].diagonal())
        assert covs[0].diagonal().shape == x.shape
        for wrong in ({"denoiser": "abc"}, {"denoiser": "abc", "data_std": 0}):
            with refused("data_std"):
                tiny_model(param, network="spectrum-head", options={**options, **sizes}, head=wrong)
        return
    if param == "variance-ratio":
        scale = {"ratios": [0.5], "means": [0.2], "spreads": [1.0], "data_std": 0.3}
        head = {"denoiser": "abc", "scale": scale}
        model = mmdgs.load(mmdgs.save(tiny_model(param, options=options, head=head), tmp_path))
        ratio = model.head_of(model.network)(X, 0.5 * X, model.level)
        assert ratio.shape == X.shape
        assert (ratio > 0).all()
        with refused("'variance-ratio' is no denoiser", "load_head"):
            model.posterior()
        return
    model = mmdgs.load(mmdgs.save(tiny_model(param, options=options), tmp_path))
    q = model.posterior()(X, model.level, generator=seeded(1))
    assert q.mean.shape == X.shape
    assert q.cov.diagonal().shape == X.shape
    assert (q.mean - X).abs().max() > 1e-4
    torch.testing.assert_close(model(X, model.level), q.mean)


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


def test_a_denoiser_of_another_network_has_the_same_meaning() -> None:
    model, other = tiny_model("noise"), lively(tiny_unet(), seed=9)
    torch.testing.assert_close(model.denoiser_of(other)(X, model.level), X - 0.5 * other(X))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds(name: str) -> None:
    network, options = preset(name)
    inputs = 2 if network in ("mlp", "spectrum-head") else 1
    shape = {"mlp": (2,), "spectrum-head": (2, 32, 32)}.get(network, (1, 28, 28))
    built = build_network(network, inputs, inputs, options).eval()
    level = [NoiseLevel(sigma=0.5)] * takes_level(built)
    assert len(built(torch.zeros(2, *shape), *level)) == 2


# --- what is damaged or foreign ---------------------------------------------------------------------------------

MISTAKES = {
    "another architecture": ({"options": {"width": 16, "multipliers": [1, 2], "blocks": 1, "attention": []}},
        "model.safetensors is from another architecture", "of another shape", "expected"),
    "a deeper architecture": ({"options": {"width": 8, "multipliers": [1, 2], "blocks": 2, "attention": []}},
        "missing (such as down."),
    "a smaller architecture": ({"options": {"width": 8, "multipliers": [1], "blocks": 1, "attention": []}},
        "unknown (such as down."),
    "unknown key": ({"sigme": 3}, "config.json has an unknown key 'sigme' (did you mean 'sigma'?)"),
    "two kinds of levels": ({"sigmas": [1.0, 0.5]}, "'energy' needs sigma", "or many sigmas"),
    "levels the wrong way": ({"sigma": None, "sigmas": [0.5, 1.0]}, "to the cleanest", "turn the list"),
    "levels that do not match": ({"sigma": None, "sigmas": [1.0, 0.5], "alphas": [1.0]}, "as many alphas as sigmas"),
    "a bad level": ({"sigma": None, "sigmas": [1.0, 0.0]}, "sigma must be positive"),
    "an empty interval": ({"interval": [1.0, 1.0]}, "interval must be two numbers"),
    "no shape": ({"shape": None}, "config.json lacks shape"),
    "no sigma": ({"sigma": None}, "'energy' needs sigma"),
    "negative sigma": ({"sigma": -1.0}, "config.json", "sigma", "-1.0"),
    "sigma as words": ({"sigma": "big"}, "config.json", "sigma", "'big'"),
    "no shape at all": ({"shape": 5}, "config.json", "shape", "5"),
    "half a pixel": ({"shape": [1, 8.5, 8]}, "shape of one example", "8.5"),
    "options as words": ({"options": "wide"}, "config.json", "options", "'wide'"),
    "a network as a number": ({"network": 3}, "config.json", "network", "3"),
    "unknown parametrisation": ({"param": "scores"}, "'scores' (did you mean 'score'?)"),
    "unknown network": ({"network": "unett"}, "'unett' (did you mean 'unet'?)"),
    "unknown option": ({"options": {"widht": 8}}, "no option 'widht' (did you mean 'width'?)"),
    "impossible option": ({"options": {"width": "wide"}}, "cannot be built", "wide"),
    "negative variance": ({"isotropic_variance": -0.1}, "config.json: isotropic_variance must be positive", "-0.1"),
    "not ours": ({"mmdgs_format": None}, "holds no model that is understood"),
    "of the future": ({"mmdgs_format": 99}, "no model of mmdgs"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES.keys())
def test_configurations_that_do_not_fit(case, folder: Path) -> None:
    changes, *parts = case
    edit(folder, **changes)
    with refused(*parts):
        mmdgs.load(folder)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"{", ["config.json is not JSON"]),
        (b"[1]", ["config.json must hold a JSON object, got list"]),
        (b"\xff\xfe", ["config.json is not JSON"]),
        (b"", ["config.json is not JSON"]),
    ],
    ids=["cut", "a list", "bytes", "empty"],
)
def test_configurations_that_are_no_json(content: bytes, parts: list[str], folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    with refused(*parts):
        mmdgs.load(folder)


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with refused("cannot read", "model.safetensors", "No such file"):
        mmdgs.load(folder)
    (folder / "config.json").unlink()
    with refused(str(folder), "holds no model", "config.json"):
        mmdgs.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, 2000, -1], ids=["empty", "half a size", "half a header", "cut", "a byte"])
def test_truncated_weights(keep: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with refused("model.safetensors is not a whole safetensors file"):
        mmdgs.load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["first.weight"][0, 0, 0, 0] = value
    save_file(tensors, folder / "model.safetensors")
    with refused("model.safetensors holds values that are not finite, in first.weight"):
        mmdgs.load(folder)


class Bomb:
    """Unpickling this runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "the bomb must be a real one"
    marker.unlink()
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(marker)))
    with refused("model.safetensors is not a whole safetensors file"):
        mmdgs.load(folder)
    torch.save({"first.weight": Bomb(marker)}, folder / "model.safetensors")
    with refused("model.safetensors is not a whole safetensors file"):
        mmdgs.load(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"sigma": None}, ["needs sigma"]),
        ({"shape": ()}, ["shape of one example"]),
        ({"shape": (1, 0, 8)}, ["shape of one example", "(1, 0, 8)"]),
        ({"param": "classes"}, ["needs the names of its classes"]),
        ({"sigma": float("nan")}, ["sigma", "nan"]),
        ({"alpha": 0.0}, ["alpha", "0.0"]),
        ({"param": "variance-ratio"}, ["head goes with", "'variance-ratio'"]),
        ({"head": {"denoiser": "abc", "scale": {}}}, ["head goes with", "'energy'"]),
        ({"param": "variance-ratio", "head": {"denoiser": "abc"}}, ["digest of its denoiser and its scale"]),
        ({"param": "variance-ratio", "head": {"denoiser": "abc", "scale": {"a": 1}}}, ["the scale of the head"]),
    ],
    ids=[
        "no sigma",
        "no shape",
        "no pixels",
        "no classes",
        "not a number",
        "no signal",
        "no head",
        "a head too many",
        "half a head",
        "no scale",
    ],
)
def test_models_that_cannot_be(changes: dict[str, object], parts: list[str]) -> None:
    with refused(*parts):
        tiny_model(**changes)


def test_no_isotropic_variance() -> None:
    with refused("no isotropic variances are kept", "give the data"):
        tiny_model().posterior("isotropic")


# --- the hub ----------------------------------------------------------------------------------------------------


def test_a_model_of_the_hub(folder: Path, monkeypatch) -> None:
    asked = []

    def download(name: str, **options: object) -> str:
        asked.append((name, options["revision"], sorted(options["allow_patterns"])))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert mmdgs.load("someone/digits").config.trained_on == "digits"
    mmdgs.load("someone/digits", revision="v1")
    tensors = [f"{name}.safetensors" for name in ("calibration-*", "isotropic", "model-*-of-*", "model", "spectral")]
    files = (["*.json"], ["README.md", *tensors])
    assert asked == [("someone/digits", revision, some) for revision in (None, "v1") for some in files]


@pytest.mark.parametrize(
    "error",
    [LocalEntryNotFoundError("no network\nand more lines"), OSError("no network"), ConnectionError("no network")],
    ids=lambda error: type(error).__name__,
)
def test_a_hub_that_cannot_be_reached(error: Exception, monkeypatch) -> None:
    def download(name: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with refused("'someone/digits' is neither a model folder here nor", "(no network)"):
        mmdgs.load("someone/digits")


@pytest.mark.parametrize("name", ["digits", "./some/where", "/some/where", "a/b/c", "~/x", "runs/mnist/last"])
def test_names_that_are_no_folder_never_go_to_the_hub(name: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with refused(f"no model '{name}'", "there is no folder of this name here"):
        mmdgs.load(name)


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with refused("model is no checkpoint that can be read", "or a folder"):
        mmdgs.load(tmp_path / "model")


def test_pushing_uploads_the_files(monkeypatch) -> None:
    calls = []

    class Api:
        def __init__(self, token: str | None = None) -> None:
            calls.append(("token", token))

        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
            calls.append(("create", name, private, exist_ok))
            return f"https://hub/{name}"

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
            found = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
            calls.append(("upload", repo_id, sorted(found)))
            assert json.loads(found["config.json"])["param"] == "energy"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert tiny_model().push_to_hub("me/digits", private=True, token="secret") == "https://hub/me/digits"
    files = ["README.md", "config.json", "model.safetensors"]
    assert calls == [("token", "secret"), ("create", "me/digits", True, True), ("upload", "me/digits", files)]


def test_a_model_that_ships_needs_its_weights(monkeypatch, tmp_path: Path, folder: Path) -> None:
    monkeypatch.setattr("mmdgs.models.shipped.__file__", str(tmp_path / "src" / "mmdgs" / "models" / "shipped.py"))
    with refused("the weights of 'mnist' did not come with this installation"):
        mmdgs.load("mnist")
    (tmp_path / "weights").mkdir()
    folder.rename(tmp_path / "weights" / "mnist-energy")
    assert mmdgs.load("mnist").config.trained_on == "digits"


# --- files ------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_folder_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    def write(text: str, fail: bool) -> None:
        with folder_written_atomically(tmp_path / "f") as temporary:
            (temporary / "a").write_text(text)
            assert fail is False, "fails half way"

    write("one", False)
    write("two", False)
    with pytest.raises(AssertionError):
        write("three", True)
    assert (tmp_path / "f" / "a").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_folder_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), refused("another run is writing into", str(tmp_path)), locked(tmp_path):
        pytest.fail("both hold it")
    with locked(tmp_path):
        pass
