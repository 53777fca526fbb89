"""Files from elsewhere: what they declare is not believed; what is wrong is our error, with the
name.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import tiny_model, tiny_pipeline
from PIL import Image
from test_models import refused

import mmdgs
from mmdgs import schedules
from mmdgs.data import load_samples
from mmdgs.data.idx import IMAGES, LABELS, read_idx
from mmdgs.data.pickles import read_inert
from mmdgs.data.single import named_images
from mmdgs.errors import UsageError
from mmdgs.evaluation import read_evaluations
from mmdgs.evaluation.record import Evaluation, Images
from mmdgs.files import read_file, read_json
from mmdgs.metrics.inception_file import load_inception
from mmdgs.models.conversion import convert_checkpoint
from mmdgs.models.shipped import licence_of
from mmdgs.networks import MLP, build_network
from mmdgs.operators.named import parse_operator
from mmdgs.pickled import read_checkpoint
from mmdgs.reading import FREE, reading
from mmdgs.training import read_recipe, train_model

SECONDS = 60


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """What hangs fails."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- the rule at the edge


@pytest.mark.parametrize("error", [OSError("bad marker"), MemoryError(), RecursionError("deep")])
def test_what_a_reader_meets_is_our_error_with_the_files_name(error: Exception) -> None:
    with refused("some.file is not a picture, or a damaged one"), reading("some.file", "a picture"):
        raise error


# --- sizes that files declare


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model().save_pretrained(tmp_path_factory.mktemp("models") / "unet")


def edited(source: Path, target: Path, file: str = "config.json", **changes: object) -> Path:
    """A copy of a folder with other values in one of its JSON files."""
    shutil.copytree(source, target)
    content = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(content | changes))
    return target


SIZES: dict[str, dict[str, object]] = {
    "blocks": {"options": {"width": 8, "multipliers": [1, 2], "blocks": 1_000_000}},
    "depth": {"network": "mlp", "options": {"depth": 10**12, "width": 1}},
    "channels": {"shape": [10**7, 4, 4]},
}


@pytest.mark.parametrize("changes", SIZES.values(), ids=SIZES)
def test_a_network_far_larger_than_its_weights_is_not_built(
    changes, model_folder: Path, tmp_path: Path
) -> None:
    with refused("config.json", "too large"):
        mmdgs.load(edited(model_folder, tmp_path / "m", **changes))


def test_a_network_without_weights_is_bounded_too() -> None:
    with refused("'mlp' cannot be built", "too large", "Linear"):
        build_network("mlp", 2, 2, {"depth": 10**12, "width": 2})
    assert isinstance(build_network("mlp", 2, 2, {"depth": 50, "width": 2}), MLP)


def stride_zero(*shape: int) -> torch.Tensor:
    return torch.zeros(1).expand(*shape)


@pytest.mark.parametrize("old", [False, True])
def test_tensors_of_a_checkpoint_hold_what_is_stored(old: bool, tmp_path: Path) -> None:
    file = tmp_path / "bomb.pth"
    state = {"begin_conv.weight": stride_zero(30_000, 30_000), "sigmas": torch.tensor([1.0, 0.1])}
    torch.save([state, None, 0, 0, state], file, _use_new_zipfile_serialization=not old)
    for read in (mmdgs.load, read_checkpoint, load_inception):
        with refused("bomb.pth", "30000, 30000", "a stride of 0"):
            read(file)
    torch.save({"a": stride_zero(10, 10)}, tmp_path / "small.pth")  # less than the file itself
    with refused("small.pth", "10, 10", "a stride of 0"):
        read_checkpoint(tmp_path / "small.pth")


def test_a_checkpoint_is_not_unpacked(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1_000_000)}, tmp_path / "plain.pth")
    assert read_checkpoint(tmp_path / "plain.pth")["a"].shape == (1_000_000,)
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as source,
        zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with refused("packed.pth", "compressed"):
        read_checkpoint(tmp_path / "packed.pth")
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "b.pth")
    with refused("b.pth", "sparse"):
        read_checkpoint(tmp_path / "b.pth")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusers") / "tiny"
    with torch.random.fork_rng():
        tiny_pipeline().save_pretrained(folder)
    return folder


UNET, SCHEDULE = "unet/config.json", "scheduler/scheduler_config.json"
DIFFUSERS: dict[str, tuple[str, dict[str, object], str]] = {
    "timesteps": (SCHEDULE, {"num_train_timesteps": 10**9}, "num_train_timesteps"),
    "a class that is none": (SCHEDULE, {"_class_name": ["DDPMScheduler"]}, "no scheduler"),
    "layers": (UNET, {"layers_per_block": 100_000}, "too large"),
    "sizes": (UNET, {"sample_size": [8, 10**9]}, "sample_size"),
}


@pytest.mark.parametrize("case", DIFFUSERS.values(), ids=DIFFUSERS)
def test_configurations_of_diffusers(case, pipeline: Path, tmp_path: Path) -> None:
    file, changes, said = case
    with refused(said) as caught:
        mmdgs.load(edited(pipeline, tmp_path / "tiny", file, **changes))
    assert str(tmp_path / "tiny") in str(caught.value)


def test_a_pickle_to_convert_holds_what_is_stored(pipeline: Path, tmp_path: Path) -> None:
    source = edited(pipeline, tmp_path / "source", UNET)
    weights = source / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save({"conv_in.weight": stride_zero(60_000, 60_000)}, weights.with_suffix(".bin"))
    weights.unlink()
    with refused("diffusion_pytorch_model.bin", "a stride of 0"):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- bombs in text


@pytest.mark.parametrize("text", ["geometric:1000000000:50:0.01", "linear:100000000"])
def test_schedules_have_a_most(text: str, tmp_path: Path) -> None:
    with refused(text, "count must be at most 100,000"):
        schedules.parse_levels(text)
    (tmp_path / "a.yaml").write_text(f"levels: {text}\n")
    with refused("count must be at most 100,000"):
        read_recipe(tmp_path / "a.yaml")


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPES = {
    "aliases": (BOMB, "an alias of a list or table"),
    "deep": ("network: " + "[" * 10_000, "nested too deeply"),
    "long": ("# " + "x" * 300_000, "more than the limit"),
    "python": ("network: !!python/object/apply:os.system [exit]", "not YAML"),
}


@pytest.mark.parametrize("case", RECIPES.values(), ids=RECIPES)
def test_bombs_in_recipes(case, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(case[0])
    with refused("a.yaml", case[1]):
        read_recipe(tmp_path / "a.yaml")


def test_deep_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with refused("a.json", "nested too deeply"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.toml").write_text("network" + ".a" * 100_000 + " = 1\n")
    with refused("a.toml"):
        read_recipe(tmp_path / "a.toml")


def test_a_card_may_be_a_bomb_too(model_folder: Path, tmp_path: Path) -> None:
    folder = edited(model_folder, tmp_path / "m")
    (folder / "README.md").write_text(f"---\n{BOMB}---\n")
    with refused("README.md", "alias"):
        licence_of(folder)


# --- what is no regular file


def _weights(path: Path) -> object:
    tiny_model().save_pretrained(path.parent / "model")
    (path.parent / "model" / "model.safetensors").unlink()
    path.rename(path.parent / "model" / "model.safetensors")
    return mmdgs.load(path.parent / "model")


SPECIAL: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a recipe": ("a.yaml", read_recipe),
    "a mask": ("a.png", lambda path: parse_operator(str(path), (1, 8, 8))),
    "an Inception file": ("a.pth", load_inception),
    "JSON": ("a.json", read_json),
    "an image": ("a.png", lambda path: named_images([str(path)])),
    "a .npy": ("a.npy", lambda path: named_images([str(path)])),
    "an .npz": ("a.npz", load_samples),
    "a .zip": ("a.zip", load_samples),
    "an idx file": ("a.idx", lambda path: read_idx(path, IMAGES)),
    "a checkpoint": ("a.pth", mmdgs.load),
    "weights": ("a.safetensors", _weights),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "pipe") for name in SPECIAL), ("a mask", "device"), ("an .npz", "device"),
     ("JSON", "sparse"), ("weights", "sparse"), ("a checkpoint", "sparse"), ("an image", "sparse")],
)  # fmt: skip
def test_only_regular_files_are_read_and_not_more_than_is_there(
    name: str, kind: str, tmp_path: Path
) -> None:
    """A pipe would hang, /dev/zero take all memory, and 3 GB of zeros on no disk be read."""
    file, read = SPECIAL[name]
    path = tmp_path / "in" / file
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 3 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_a_file_has_at_most_the_bytes_that_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"four")
    assert read_file(path, 4) == read_file(path) == b"four"
    with refused(path, "has 4 bytes, more than the limit of 3"):
        read_file(path, 3)


def test_an_array_is_checked_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    head = np.lib.format.header_data_from_array_1_0(np.zeros((2, 2), np.float32))
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, head | {"shape": (30_000, 30_000)})
    os.truncate(path, 30_000**2 * 4 + 128)
    with refused(path, "900,000,000 numbers (30000, 30000), more than"):
        named_images([str(path)])
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, head | {"shape": (300, 300)})
    with refused(path, "damaged", "360,000 bytes, it has 0"):
        named_images([str(path)])
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, head)
        stream.write(bytes(20))
    with refused(path, "damaged", "16 bytes, it has 20"):
        named_images([str(path)])
    np.savez(tmp_path / "b.npz", x=np.zeros((1, 2, 2)))
    (tmp_path / "b.npz").rename(path)
    with refused(path, "is an .npz, whatever its name"):
        named_images([str(path)])


def test_a_model_has_not_a_million_levels(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    sigmas = [1e6 - i / 2 for i in range(1_000_000)]
    (tmp_path / "config.json").write_text(json.dumps({**config, "sigma": None, "sigmas": sigmas}))
    with refused("config.json", "1,000,000 entries"):
        mmdgs.load(tmp_path)


@pytest.mark.parametrize("text", ["blur:1e300", "blur:20", "motion:1e9", "motion:33"])
def test_operators_are_bounded_by_the_image(text: str) -> None:
    with refused(text, "the image's"):
        parse_operator(text, (3, 32, 32))


# --- bombs in data


@pytest.mark.parametrize(
    "content",
    [b"Nr\xff\xff\xff\x7f.", b"\x80\x04N\x94p4000000000\n.", b"\x80\x03]r\x00\x00\x00\x20."],
)
def test_a_pickle_that_declares_a_huge_memo(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"memo|opcode|digit|expected"):
        read_inert(content, lambda name: False)


def test_arrays_that_unpack_to_far_more_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmdgs.reading.FREE", 1 << 20)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((300, 3, 64, 64), np.float32))
    with refused("a.npz", "decompression bomb"):
        load_samples(tmp_path / "a.npz")
    monkeypatch.setattr("mmdgs.reading.FREE", FREE)
    assert len(load_samples(tmp_path / "a.npz")) == 300


# --- kinds of error


@pytest.mark.parametrize("shape", [(2**32 - 1,) * 3, (2**31, 2**31, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_huge_dimensions_of_an_idx_file(
    shape: tuple[int, ...], packed: bool, tmp_path: Path
) -> None:
    import gzip

    content = struct.pack(">4I", 2051, *shape) + bytes(784)
    (tmp_path / "a").write_bytes(gzip.compress(content) if packed else content)
    with refused("is damaged: its header says", "holds 784"):
        read_idx(tmp_path / "a", IMAGES)
    (tmp_path / "b").write_bytes(struct.pack(">2I", 2049, 2**32 - 1))
    with refused("b is damaged"):
        read_idx(tmp_path / "b", LABELS)


CONFIGS: dict[str, dict[str, object]] = {
    "a text in an interval": {"interval": [0, "b"]},
    "an infinite sigma": {"sigma": None, "sigmas": [float("inf"), 1]},
    "a negative width": {"options": {"width": -8, "multipliers": [1]}},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_configurations_with_values_of_another_kind(
    changes, model_folder: Path, tmp_path: Path
) -> None:
    with refused("config.json"):
        mmdgs.load(edited(model_folder, tmp_path / "m", **changes))


def test_masks_that_are_no_images(tmp_path: Path) -> None:
    file = tmp_path / "mask.png"
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with refused("mask.png is not an image"):
        parse_operator(str(file), (1, 8, 8))
    Image.new("L", (5_000, 5_000)).save(file)
    with refused("5000 x 5000 pixels"):
        parse_operator(str(file), (1, 8, 8))


@pytest.mark.parametrize("change", [{"values": {"fid": "3"}}, {"left_out": {"kid": [1.0]}}])
def test_evaluations_of_another_shape(change: dict[str, Any], tmp_path: Path) -> None:
    images = Images("a", "samples", 10, 20, "0" * 64)
    record = Evaluation(images, images, {"fid": 3.0}).to_json() | change
    (tmp_path / "a.json").write_text(json.dumps({"evaluations": [record]}))
    with refused("a.json"):
        read_evaluations(tmp_path / "a.json")


@pytest.mark.parametrize(("key", "value"), [("step", -1), ("origin", {"images": "3"})])
def test_a_state_of_training_of_another_shape(key: str, value: Any, tmp_path: Path) -> None:
    recipe = read_recipe(
        overrides={"data": "mog", "model": "mlp", "sigma": 0.5, "steps": 1, "limit": 16}
    )
    train_model(recipe, tmp_path / "run", progress=None)
    file = tmp_path / "run" / "checkpoints" / "last" / "state.json"
    state = json.loads(file.read_text())
    if key == "origin":
        state["notes"]["origin"] |= value
    else:
        state[key] = value
    file.write_text(json.dumps(state))
    with refused(tmp_path / "run"):
        train_model(recipe, tmp_path / "run", progress=None, resume=True)
