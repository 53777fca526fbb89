"""Models in fewer bytes and in several files: written, read back everywhere, and refused where a
file is missing.
"""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from nets import tiny_model
from safetensors.torch import load_file
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.models.conversion import export_model

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
    torch.testing.assert_close(dict(network.state_dict()), expected, rtol=0, atol=0)


def test_shards_are_in_the_hubs_convention(sharded: Path, model: Model) -> None:
    files = shards(sharded)
    assert len(files) > 2
    assert [path.name for path in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    assert not (sharded / "model.safetensors").exists()
    index = json.loads((sharded / INDEX).read_text())
    assert index["weight_map"] == {key: path.name for path in files for key in load_file(path)}
    assert index["metadata"]["total_size"] == sum(
        2 * value.numel() for value in rounded(model).values()
    )
    for path in files:
        assert sum(value.nbytes for value in load_file(path).values()) <= SHARD_MB * 1e6
        assert {value.dtype for value in load_file(path).values()} == {torch.bfloat16}
    # Their own loader reads it too.
    fresh = tiny_model("score").network
    huggingface_hub.load_torch_model(fresh, sharded, strict=True)
    assert_weights(fresh, rounded(model))


def test_shards_are_read_wherever_a_model_is(sharded: Path, model: Model, monkeypatch) -> None:
    expected = rounded(model)
    assert_weights(mmdgs.load(sharded).network, expected)
    # From the hub, file by file as asked for.
    asked: list[str] = []

    def download(name: str, **options: object) -> str:
        asked.extend(options["allow_patterns"])
        return str(sharded)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_weights(mmdgs.load("someone/digits").network, expected)
    for name in (shards(sharded)[0].name, INDEX, "config.json"):
        assert any(Path(name).match(pattern) for pattern in asked), (name, asked)


def test_the_card_goes_along_and_says_how_it_is_stored(folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text("# Mine\n\nwords\n")
    export_model(folder, tmp_path / "a", shard_mb=SHARD_MB)
    card = (tmp_path / "a" / "README.md").read_text()
    count = len(shards(tmp_path / "a"))
    assert card.startswith("# Mine\n\nwords\n")
    assert f"Weights in bf16, in {count} files" in card
    export_model(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "README.md").read_text() == card.replace(f"{count} files", "one file")
    export_model(folder, tmp_path / "c", dtype="float32")
    weights = mmdgs.load(folder).network.state_dict()
    assert_weights(mmdgs.load(tmp_path / "c").network, weights)


def test_weights_written_again_leave_none_of_the_old(model: Model, tmp_path: Path) -> None:
    small, large = {"shard_mb": 2 * SHARD_MB}, {"shard_mb": 4 * SHARD_MB}
    for options in (small, {}, large, small):
        model.save_pretrained(tmp_path, **options)
        named = {path.name for path in tmp_path.glob("*safetensors*")}
        if options:
            index = json.loads((tmp_path / INDEX).read_text())
            assert named == {INDEX, *index["weight_map"].values()}
        else:
            assert named == {"model.safetensors"}
        assert_weights(mmdgs.load(tmp_path).network, model.network.state_dict())


# --- what is refused


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shards(sharded)[1].unlink()
    count = len(shards(sharded)) + 1
    with pytest.raises(UsageError, match=rf"model-00002-of-{count:05}\.safetensors"):
        mmdgs.load(sharded)


def test_shards_of_two_models_are_refused(sharded: Path) -> None:
    first, second, *_ = shards(sharded)
    missing = min(load_file(first).keys() ^ load_file(second).keys())
    first.write_bytes(second.read_bytes())
    with pytest.raises(UsageError, match=f"{first.name} (holds|lacks) the tensor {missing}"):
        mmdgs.load(sharded)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "pickle.bin"])
def test_an_index_does_not_lead_out_of_its_folder(name: object, sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"first.weight": name}}))
    with pytest.raises(UsageError, match="same folder"):
        mmdgs.load(sharded)


def test_misuse_of_export_is_status_2(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(message: str, *more: str) -> None:
        result = run(cli.app, ["export", str(folder), "--out", str(out), *more])
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())

    refused("did you mean 'bf16'?", "--dtype", "bf61")
    refused("give larger shards", "--shard-mb", "0.0001")
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    words = ["export", str(folder), "--out", str(out)]
    assert run(cli.app, [*words, "--shard-mb", str(SHARD_MB)]).exit_code == 0
    refused("is not empty; use --overwrite")
    (out / "isotropic.safetensors").write_text("{}")  # variances of the old weights go with them
    result = run(cli.app, [*words, "--overwrite"])
    assert result.exit_code == 0, result.output
    assert not shards(out)
    assert not (out / "isotropic.safetensors").exists()
    (out / "checkpoints").mkdir()  # as a training run has them
    refused("such as checkpoints", "--overwrite")
