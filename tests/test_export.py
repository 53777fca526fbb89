"""Models in fewer bytes and in several files: written, read back everywhere, and refused where a file is missing."""

from __future__ import annotations

import json
import tomllib
import zlib
from pathlib import Path

import huggingface_hub
import pytest
import torch
from nets import tiny_model
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.models.conversion import export_model
from mmdgs.models.shipped import RECIPES, SHIPPED

run = CliRunner().invoke
ROOT = Path(__file__).parents[1]
SHARD_MB = 0.02
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model() -> Model:
    return tiny_model("score", trained_on="digits")


@pytest.fixture
def folder(model: Model, tmp_path: Path) -> Path:
    return model.save_pretrained(tmp_path / "model")


@pytest.fixture
def sharded(folder: Path, tmp_path: Path) -> Path:
    export_model(folder, tmp_path / "sharded", shard_mb=SHARD_MB)
    return tmp_path / "sharded"


def rounded(model: Model) -> dict[str, torch.Tensor]:
    return {key: value.bfloat16().float() for key, value in model.network.state_dict().items()}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def assert_weights(network: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = network.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == torch.float32
        assert torch.equal(found[key], value)


def test_shards_are_in_the_hubs_convention(sharded: Path, model: Model) -> None:
    files = shards(sharded)
    assert len(files) > 2
    assert [path.name for path in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    assert not (sharded / "model.safetensors").exists()
    index = json.loads((sharded / INDEX).read_text())
    assert index["weight_map"] == {key: path.name for path in files for key in load_file(path)}
    assert index["metadata"]["total_size"] == sum(2 * value.numel() for value in rounded(model).values())
    for path in files:
        assert sum(value.nbytes for value in load_file(path).values()) <= SHARD_MB * 1e6
        with safe_open(path, "pt") as held:
            assert {held.get_tensor(key).dtype for key in held.keys()} == {torch.bfloat16}  # noqa: SIM118
    # Their own loader reads it too.
    fresh = tiny_model("score").network
    huggingface_hub.load_torch_model(fresh, sharded, strict=True)
    assert_weights(fresh, rounded(model))


def test_shards_are_read_wherever_a_model_is(sharded: Path, model: Model, monkeypatch, tmp_path: Path) -> None:
    expected = rounded(model)
    assert_weights(mmdgs.load(sharded).network, expected)
    result = run(cli.app, ["sample", str(sharded), "-n", "2", "--steps", "1", "--out", str(tmp_path / "x.npz")])
    assert result.exit_code == 0, result.output
    # From the hub, file by file as asked for.
    asked: list[str] = []

    def download(name: str, **options: object) -> str:
        asked.extend(options["allow_patterns"])
        return str(sharded)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for read in (mmdgs.load, mmdgs.from_pretrained):
        asked.clear()
        assert_weights(read("someone/digits").network, expected)
        for name in (shards(sharded)[0].name, INDEX, "config.json"):
            assert any(Path(name).match(pattern) for pattern in asked), (name, asked)


def test_one_file_unless_they_are_asked_for(folder: Path, model: Model, tmp_path: Path) -> None:
    for name, shard_mb in (("a", None), ("b", 100.0)):
        (file,) = export_model(folder, tmp_path / name, shard_mb=shard_mb)
        assert file == tmp_path / name / "model.safetensors"
        assert sorted(path.name for path in file.parent.iterdir()) == ["README.md", "config.json", "model.safetensors"]
        assert_weights(mmdgs.load(file.parent).network, rounded(model))
    export_model(folder, tmp_path / "c", dtype="float32")
    assert_weights(mmdgs.load(tmp_path / "c").network, model.network.state_dict())


def test_the_card_goes_along_and_says_how_it_is_stored(folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text("# Mine\n\nwords\n")
    export_model(folder, tmp_path / "a", shard_mb=SHARD_MB)
    card = (tmp_path / "a" / "README.md").read_text()
    count = len(shards(tmp_path / "a"))
    assert card == f"# Mine\n\nwords\n\n## Storage\n\nWeights in bf16, in {count} files, by `mmdgs export`.\n"
    export_model(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "README.md").read_text() == card.replace(f"{count} files", "one file")


def test_weights_written_again_leave_none_of_the_old(model: Model, tmp_path: Path) -> None:
    small, large = {"shard_mb": 2 * SHARD_MB}, {"shard_mb": 4 * SHARD_MB}
    for options in (small, {}, small, large, small):
        model.save_pretrained(tmp_path, **options)
        named = {path.name for path in tmp_path.glob("*safetensors*")}
        if options:
            index = json.loads((tmp_path / INDEX).read_text())
            assert named == {INDEX, *index["weight_map"].values()}
        else:
            assert named == {"model.safetensors"}
        assert_weights(mmdgs.load(tmp_path).network, model.network.state_dict())


# --- what is refused --------------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shards(sharded)[1].unlink()
    count = len(shards(sharded)) + 1
    message = rf"lacks the shard model-00002-of-{count:05}\.safetensors \(1 of {count} are missing\)"
    for read in (mmdgs.load, mmdgs.from_pretrained):
        with pytest.raises(UsageError, match=message):
            read(sharded)


def test_shards_of_two_models_are_refused(sharded: Path) -> None:
    first, second, *_ = shards(sharded)
    missing = min(load_file(first).keys() ^ load_file(second).keys())
    first.write_bytes(second.read_bytes())
    with pytest.raises(UsageError, match=f"{first.name} (holds|lacks) the tensor {missing}"):
        mmdgs.load(sharded)


def test_a_shard_cut_short_is_named(sharded: Path) -> None:
    path = shards(sharded)[2]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UsageError, match=f"{path.name} is not a whole safetensors file"):
        mmdgs.load(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "pickle.bin",
        3,
        "",
        pytest.param("m" * 300 + ".safetensors", id="too long"),
    ],
)
def test_an_index_does_not_lead_out_of_its_folder(name: object, sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"first.weight": name}}))
    with pytest.raises(UsageError, match="expected a safetensors file of the same folder"):
        mmdgs.load(sharded)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(UsageError, match="has no weight_map from tensors to files"):
        mmdgs.load(sharded)


def test_misuse_of_export_is_status_2(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(message: str, *more: str) -> None:
        result = run(cli.app, ["export", str(folder), "--out", str(out), *more])
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())

    refused("unknown dtype 'bf61' (did you mean 'bf16'?); choose one of float32, bf16", "--dtype", "bf61")
    refused("more than a shard of 0.0001: give larger shards", "--shard-mb", "0.0001")
    refused("a positive number of megabytes, got 0", "--shard-mb", "0")
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert run(cli.app, ["export", str(folder), "--out", str(out), "--shard-mb", str(SHARD_MB)]).exit_code == 0
    refused("is not empty; use --overwrite")
    (out / "isotropic.safetensors").write_text("{}")  # variances of the old weights go with them
    result = run(cli.app, ["export", str(folder), "--out", str(out), "--overwrite"])
    assert result.exit_code == 0, result.output
    assert not shards(out)
    assert not (out / "isotropic.safetensors").exists()
    (out / "checkpoints").mkdir()  # as a training run has them
    refused("holds more than a model (such as checkpoints)", "--overwrite")


# --- names, and what is packed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_without_weights_says_how_to_get_them(name: str, monkeypatch, tmp_path: Path, sharded: Path) -> None:
    monkeypatch.setattr("mmdgs.models.shipped.__file__", str(tmp_path / "src" / "mmdgs" / "models" / "shipped.py"))
    monkeypatch.chdir(tmp_path)
    message = f"the weights of '{name}' did not come with this installation, or are not trained yet"
    for read in (mmdgs.load, mmdgs.from_pretrained):
        with pytest.raises(UsageError, match=message):
            read(name)
    result = run(cli.app, ["sample", name])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert message in said
    assert f"mmdgs train --config recipes/{name}.yaml" in said
    assert (ROOT / "recipes" / RECIPES[name]).is_file()
    # And with them it is loaded, in shards as they ship.
    (tmp_path / "weights").mkdir()
    sharded.rename(tmp_path / "weights" / name)
    assert mmdgs.load(name).config.trained_on == "digits"
    assert mmdgs.from_pretrained(name).levels == (mmdgs.NoiseLevel(sigma=0.5),)


def packed_size(path: Path, start: int = 1 << 19) -> float:
    """The bytes of a file in a wheel, as its first half a megabyte is compressed."""
    content = path.read_bytes()
    return len(zlib.compress(content[:start], 1)) * max(1.0, len(content) / start)


def test_the_weights_that_ship_fit_in_a_package() -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert packed["wheel"]["force-include"] == {"weights": "mmdgs/weights"}
    assert {"weights", "recipes"} <= set(packed["sdist"]["include"])
    files = [path for path in (ROOT / "weights").rglob("*") if path.is_file()]
    assert sum(packed_size(path) for path in files) < 95e6
    assert {path.name for path in (ROOT / "weights").iterdir() if path.is_dir()} <= set(SHIPPED.values())
