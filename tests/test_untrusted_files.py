"""Files from elsewhere: what they declare is not believed, and whatever is wrong is our own error with the name."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import signal
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import tiny_model, tiny_pipeline
from PIL import Image

import mmdgs
from mmdgs import schedules
from mmdgs.data import folders, load_images, load_samples
from mmdgs.data.decoding import Fit
from mmdgs.data.idx import IMAGES, LABELS, read_idx
from mmdgs.data.pickles import read_inert
from mmdgs.data.single import named_images
from mmdgs.diagnostics import read_draws
from mmdgs.errors import UsageError, shown
from mmdgs.evaluation import read_evaluations
from mmdgs.evaluation.record import Evaluation, Images
from mmdgs.files import read_json, read_tensors
from mmdgs.metrics.inception_file import load_inception
from mmdgs.models.catalogue import licence_of
from mmdgs.models.conversion import convert_checkpoint
from mmdgs.networks import MLP
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


def refused(*parts: object) -> Any:
    return pytest.raises(UsageError, match="(?s)" + ".*".join(re.escape(str(part)) for part in parts))


# --- the rule at the edge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [OSError("bad marker"), MemoryError(), RecursionError("deep"), KeyError("x"), EOFError()]
)
def test_what_a_reader_meets_is_our_error_with_the_files_name(error: Exception) -> None:
    with refused("some.file is not a picture, or a damaged one"), reading("some.file", "a picture"):
        raise error


def test_the_systems_reason_is_told_and_our_own_error_stays() -> None:
    with refused("cannot read a: No such file"), reading("a", "b"):
        Path("/nowhere/at/all").read_bytes()
    with pytest.raises(UsageError, match=r"^as a was$"), reading("a", "b"):
        raise UsageError("as a was")
    with pytest.raises(UsageError, match=r"^some.file: no width$"), reading("some.file", "b"):
        raise UsageError("no width")


def test_an_interrupt_passes() -> None:
    with pytest.raises(KeyboardInterrupt), reading("a", "b"):
        raise KeyboardInterrupt


def test_values_are_shown_in_bounded_time() -> None:
    nested: Any = ["lol"]
    for _ in range(60):
        nested = [nested] * 9
    assert len(shown(nested)) < 20_000
    assert shown([1.5, "a", None]) == "[1.5, 'a', None]"
    assert shown(10**5000) == "a whole number of 16,610 bits"


# --- sizes that files declare -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model().save_pretrained(tmp_path_factory.mktemp("models") / "unet")


def edited(source: Path, target: Path, file: str = "config.json", **changes: object) -> Path:
    """A copy of a folder with other values in one of its JSON files."""
    import shutil

    shutil.copytree(source, target)
    content = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(content | changes))
    return target


SIZES: dict[str, dict[str, object]] = {
    "blocks": {"options": {"width": 8, "multipliers": [1, 2], "blocks": 1_000_000, "attention": []}},
    "width": {"options": {"width": 100_000, "multipliers": [1, 2], "blocks": 1, "attention": []}},
    "multipliers": {"options": {"width": 8, "multipliers": [1, 10**9], "blocks": 1, "attention": []}},
    "depth": {"network": "mlp", "options": {"depth": 10**12, "width": 1}},
    "layers": {"network": "mlp", "options": {"depth": 3, "width": 100_000}},
    "channels": {"shape": [10**7, 4, 4]},
}


@pytest.mark.parametrize("changes", SIZES.values(), ids=SIZES)
def test_a_network_far_larger_than_its_weights_is_not_built(changes, model_folder: Path, tmp_path: Path) -> None:
    with refused("config.json") as caught:
        mmdgs.load(edited(model_folder, tmp_path / "m", **changes))
    assert "too large" in str(caught.value)


def test_an_example_has_a_largest_size(model_folder: Path, tmp_path: Path) -> None:
    with refused("config.json", "shape", "more numbers than the limit"):
        mmdgs.load(edited(model_folder, tmp_path / "m", shape=[1, 10**6, 10**6]))


def test_a_network_without_weights_is_bounded_too() -> None:
    from mmdgs.networks.registry import build_network

    with refused("'mlp' cannot be built", "too large", "Linear"):
        build_network("mlp", 2, 2, {"depth": 10**12, "width": 2})
    assert isinstance(build_network("mlp", 2, 2, {"depth": 500, "width": 2}), MLP)


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


def test_a_checkpoint_is_not_unpacked(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1_000_000)}, tmp_path / "plain.pth")
    assert read_checkpoint(tmp_path / "plain.pth")["a"].shape == (1_000_000,)
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as source,
        zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with refused("packed.pth", "compressed checkpoints are not read"):
        read_checkpoint(tmp_path / "packed.pth")


def test_tied_and_sliced_tensors_are_plain(tmp_path: Path) -> None:
    x = torch.arange(100.0)
    torch.save({"a": x, "b": x, "c": x[10:20], "d": x.view(10, 10).T}, tmp_path / "a.pth")
    assert torch.equal(read_checkpoint(tmp_path / "a.pth")["d"], x.view(10, 10).T)
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
    "timesteps": (SCHEDULE, {"num_train_timesteps": 10**9}, "num_train_timesteps must be at most 100,000"),
    "timesteps in words": (SCHEDULE, {"num_train_timesteps": "many"}, "not a scheduler that diffusers can make"),
    "a class that is none": (SCHEDULE, {"_class_name": ["DDPMScheduler"]}, "which is no scheduler"),
    "layers": (UNET, {"layers_per_block": 100_000}, "too large"),
    "channels": (UNET, {"block_out_channels": [8_000_000, 16_000_000]}, "too large"),
    "size": (UNET, {"sample_size": "big"}, "sample_size"),
    "sizes": (UNET, {"sample_size": [8, 10**9]}, "sample_size"),
    "no groups": (UNET, {"norm_num_groups": 0}, "cannot load"),
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


# --- bombs in text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["geometric:1000000000:50:0.01", "linear:100000000", "cosine:100000000", "edm:9999999999"]
)
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
    "a circle": ("network: &a {b: *a}", "alias"),
    "a date": ("steps: 2001-99-99", "not YAML"),
    "a bool": ("decay: !!bool x", "not YAML"),
    "deep": ("network: " + "[" * 10_000, "nested too deeply"),
    "long": ("# " + "x" * 300_000, "more than the limit"),
    "a large number": ("steps: 0x" + "f" * 10_000, ""),
    "python": ("network: !!python/object/apply:os.system [exit]", "not YAML"),
}


@pytest.mark.parametrize("case", RECIPES.values(), ids=RECIPES)
def test_bombs_in_recipes(case, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(case[0])
    with refused("a.yaml", case[1]):
        read_recipe(tmp_path / "a.yaml")


def test_an_alias_of_a_word_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("sigma: &s 0.5\nalpha: *s\n")
    assert read_recipe(tmp_path / "a.yaml").alpha == 0.5


def test_deep_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with refused("a.json", "nested too deeply"):
        read_json(tmp_path / "a.json")


# --- what is no regular file ---------------------------------------------------------------------------------------


def _weights(path: Path) -> object:
    tiny_model().save_pretrained(path.parent / "model")
    (path.parent / "model" / "model.safetensors").unlink()
    path.rename(path.parent / "model" / "model.safetensors")
    return mmdgs.load(path.parent / "model")


SPECIAL: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a recipe": ("a.yaml", read_recipe),
    "a TOML recipe": ("a.toml", read_recipe),
    "a mask": ("a.png", lambda path: parse_operator(str(path), (1, 8, 8))),
    "an Inception file": ("a.pth", load_inception),
    "JSON": ("a.json", read_json),
    "evaluations": ("a.json", read_evaluations),
    "an image": ("a.png", lambda path: named_images([str(path)])),
    "an image in a folder": ("a.png", lambda path: named_images([str(path.parent)])),
    "a .npy": ("a.npy", lambda path: named_images([str(path)])),
    "an .npz": ("a.npz", load_samples),
    "a .zip": ("a.zip", load_samples),
    "an idx file": ("a.idx", lambda path: read_idx(path, IMAGES)),
    "a checkpoint": ("a.pth", mmdgs.load),
    "weights": ("a.safetensors", _weights),
    "tensors": ("a.safetensors", read_tensors),
    "draws": ("a.npz", read_draws),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
@pytest.mark.parametrize("name", SPECIAL)
def test_only_regular_files_are_read_and_not_more_than_is_there(name: str, kind: str, tmp_path: Path) -> None:
    """A pipe hung every reader, /dev/zero took all memory, and 3 GB of zeros that are on no disk were read."""
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
    with pytest.raises(UsageError) as found:
        read(path)
    assert "\n" not in str(found.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_an_array_is_checked_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    head = np.lib.format.header_data_from_array_1_0(np.zeros((2, 2), np.float32))
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, head | {"shape": (30_000, 30_000)})
    os.truncate(path, 30_000**2 * 4 + 128)
    with refused(path, "900,000,000 numbers (30000, 30000), more than the limit"):
        named_images([str(path)])
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, head | {"shape": (300, 300)})
    with refused(path, "damaged", "360,000 bytes, it has 0"):
        named_images([str(path)])
    np.savez(tmp_path / "b.npz", x=np.zeros((1, 2, 2)))
    (tmp_path / "b.npz").rename(path)
    with refused(path, "is an .npz, whatever its name"):
        named_images([str(path)])


def test_a_model_has_not_a_million_levels(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for sigmas in ([1e6 - i / 2 for i in range(1_000_000)], ["a"] * 1_000_000):
        (tmp_path / "config.json").write_text(json.dumps({**config, "sigma": None, "sigmas": sigmas}))
        with refused("config.json", "sigmas has 1,000,000 entries, more than the limit of 10,000"):
            mmdgs.load(tmp_path)


@pytest.mark.parametrize("depth", [100, 5_000, 100_000])
def test_a_dotted_key_of_toml_is_refused(depth: int, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('data = "mog"\nnetwork' + ".a" * depth + " = 1\n")
    with refused("a.toml"):
        read_recipe(tmp_path / "a.toml")


@pytest.mark.parametrize("text", ["blur:1e9", "blur:1e300", "blur:20", "motion:1e9", "motion:20001", "motion:33"])
def test_operators_are_bounded_by_the_image(text: str) -> None:
    with refused(text, "must be at most"):
        parse_operator(text, (3, 32, 32))


@pytest.mark.parametrize("text", ["blur:16", "motion:32"])
def test_operators_as_large_as_the_image(text: str) -> None:
    x = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert parse_operator(text, (3, 32, 32))(x).isfinite().all()


# --- bombs in data ----------------------------------------------------------------------------------------------


def test_large_members_of_a_zip_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "BLOCK_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(20):
            archive.writestr(f"{i}.png", bytes(3 << 20))

    def read() -> None:
        with refused("holds no readable image"):
            load_images(tmp_path / "a.zip", "train", size=8, channels=1, unreadable="skip")

    read()  # what a first call imports is not counted
    tracemalloc.start()
    try:
        read()
        assert tracemalloc.get_traced_memory()[1] < 20 << 20  # of 60 MiB
    finally:
        tracemalloc.stop()


def test_small_members_are_still_read_in_blocks(tmp_path: Path) -> None:
    sizes = {"a": 10, "b": 60 << 20, "c": 5 << 20, "d": 300 << 20, "e": 1}
    gallery = folders.Gallery(tmp_path, tuple(sizes), sizes.__getitem__, lambda name: b"")
    assert [folders._end_of_block(gallery, [*sizes], start, 5) for start in range(5)] == [2, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "content", [b"Nr\xff\xff\xff\x7f.", b"\x80\x04N\x94p4000000000\n.", b"\x80\x03]r\x00\x00\x00\x20."]
)
def test_a_pickle_that_declares_a_huge_memo(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"memo|opcode|digit|expected"):
        read_inert(content, lambda name: False)


def test_pickles_of_lists_in_lists_take_no_time(tmp_path: Path) -> None:
    from mmdgs.data.cifar import _python_names

    nested: Any = []
    for _ in range(200):
        nested = [nested, nested]
    assert len(_python_names(pickle.dumps({"label_names": nested}), "batches.meta")) == 2


def test_arrays_that_unpack_to_far_more_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdgs.reading.FREE", 1 << 20)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((300, 3, 64, 64), np.float32))
    with refused("a.npz", "decompression bomb"):
        load_samples(tmp_path / "a.npz")
    monkeypatch.setattr("mmdgs.reading.FREE", FREE)
    assert len(load_samples(tmp_path / "a.npz")) == 300


# --- kinds of error ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2**32 - 1,) * 3, (2**31, 2**31, 1), (2**32 - 1, 1, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_huge_dimensions_of_an_idx_file(shape: tuple[int, ...], packed: bool, tmp_path: Path) -> None:
    import gzip

    content = struct.pack(">4I", 2051, *shape) + bytes(784)
    (tmp_path / "a").write_bytes(gzip.compress(content) if packed else content)
    with refused("is damaged: its header says", "holds only 784"):
        read_idx(tmp_path / "a", IMAGES)
    (tmp_path / "b").write_bytes(struct.pack(">2I", 2049, 2**32 - 1))
    with refused("b is damaged"):
        read_idx(tmp_path / "b", LABELS)


def npz(array: np.ndarray | bytes, header: bytes | None = None, method: int = zipfile.ZIP_STORED) -> bytes:
    """An .npz with one array, and another header in its place if given."""
    content = io.BytesIO()
    if isinstance(array, bytes):
        content.write(array)
    else:
        np.save(content, array)
    raw = content.getvalue()
    if header is not None:
        raw = raw[:8] + struct.pack("<H", len(header)) + header
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("x.npy", raw)
    return file.getvalue()


def damaged_deflate() -> bytes:
    content = bytearray(
        npz(np.arange(3072, dtype=np.float32).reshape(1, 3, 32, 32) / 3072, method=zipfile.ZIP_DEFLATED)
    )
    content[80:120] = b"\xff" * 40
    return bytes(content)


def unknown_method() -> bytes:
    content = npz(np.zeros((1, 3, 8, 8), np.uint8))
    return content.replace(b"\x14\x00\x00\x00\x00\x00", b"\x14\x00\x00\x00\x63\x00")


X = np.zeros((1, 3, 8, 8), np.float32)
ARRAYS: dict[str, Callable[[], bytes]] = {
    "a header that is no Python": lambda: npz(X, b"{'descr': '<f4', (((\n"),
    "a header of another kind": lambda: npz(X, b"[1, 2]\n"),
    "a huge shape": lambda: npz(X, b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 3, 8, 8)}\n"),
    "damaged deflate": damaged_deflate,
    "unknown method": unknown_method,
    "texts": lambda: npz(np.array([[[["a"]]]])),
    "complex numbers": lambda: npz(X.astype(np.complex64)),
    "an array that is none": lambda: npz(b"hello"),
    "a .npy": lambda: b"\x93NUMPY\x01\x00" + b"\x00" * 40,
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
def test_arrays_that_are_none(make: Callable[[], bytes], tmp_path: Path) -> None:
    (tmp_path / "samples.npz").write_bytes(make())
    with refused("samples"):
        load_samples(tmp_path / "samples.npz")


def test_big_endian_arrays_are_read(tmp_path: Path) -> None:
    x = np.linspace(0, 1, 192, dtype=np.float32).reshape(1, 3, 8, 8)
    (tmp_path / "a.npz").write_bytes(npz(x.astype(">f4")))
    (tmp_path / "b.npz").write_bytes(npz(x))
    found, expected = (load_samples(tmp_path / name).images for name in ("a.npz", "b.npz"))
    assert torch.equal(found, expected)


CONFIGS: dict[str, dict[str, object]] = {
    "a text in an interval": {"interval": [0, "b"]},
    "a list in an interval": {"interval": [[], 1]},
    "texts for sigmas": {"sigma": None, "sigmas": ["1", "0.5"]},
    "an infinite sigma": {"sigma": None, "sigmas": [float("inf"), 1]},
    "a huge sigma": {"sigma": 10**400},
    "a truth for a side": {"shape": [True, 4, 4]},
    "a text for a width": {"options": {"width": "8"}},
    "a negative width": {"options": {"width": -8, "multipliers": [1]}},
    "no multipliers": {"options": {"width": 8, "multipliers": []}},
    "an infinite variance": {"isotropic_variance": float("inf")},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_configurations_with_values_of_another_kind(changes, model_folder: Path, tmp_path: Path) -> None:
    with refused("config.json"):
        mmdgs.load(edited(model_folder, tmp_path / "m", **changes))


def test_a_card_that_is_no_text(model_folder: Path, tmp_path: Path) -> None:
    folder = edited(model_folder, tmp_path / "m")
    (folder / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    for read in (mmdgs.load, licence_of):
        with refused("README.md is not a text in UTF-8"):
            read(folder)
    (folder / "README.md").write_text(f"---\n{BOMB}---\n")
    with refused("README.md", "alias"):
        licence_of(folder)


def test_inception_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "inception.pth"
    whole = io.BytesIO()
    torch.save({"a": torch.zeros(3), 5: torch.zeros(2)}, whole)
    for content in (b"", b"PK\x03\x04" + bytes(100), b"\x80\x02}q\x00.", whole.getvalue()[:-30], whole.getvalue()):
        file.write_bytes(content)
        with refused("inception.pth"):
            load_inception(file)
    with refused("inception.pth"):
        load_inception(tmp_path / "none" / "inception.pth")


def test_a_moving_average_that_is_a_tensor(tmp_path: Path) -> None:
    from mmdgs.networks import NCSNv2

    state = NCSNv2(1, width=2).state_dict() | {"sigmas": torch.tensor([1.0, 0.1])}
    for average, said in ((torch.zeros(3), "expected a dictionary of tensors, got Tensor"), ({}, "no moving average")):
        torch.save([state, {}, 0, 0, average], tmp_path / "a.pth")
        with refused("a.pth", said):
            mmdgs.load(tmp_path / "a.pth")


def test_masks_that_are_no_images(tmp_path: Path) -> None:
    file = tmp_path / "mask.png"
    for content in (b"", b"\x89PNG\r\n\x1a\n" + bytes(40), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        file.write_bytes(content)
        with refused("the mask", "mask.png is not an image"):
            parse_operator(str(file), (1, 8, 8))
    Image.new("L", (5_000, 5_000)).save(file)
    with refused("5000 x 5000 pixels"):
        parse_operator(str(file), (1, 8, 8))


def test_large_images_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from mmdgs.data import decoding

    running, most = [0], [0]
    fitted = decoding._fitted

    def counted(image: Image.Image, fit: Fit) -> Image.Image:
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            return fitted(image, fit)
        finally:
            running[0] -= 1

    monkeypatch.setattr(decoding, "_fitted", counted)
    monkeypatch.setattr(decoding, "LARGE", 100)
    content = io.BytesIO()
    Image.new("L", (400, 400)).save(content, "PNG")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: decoding.decode(content.getvalue(), Fit(8)), range(40)))
    assert most[0] == 1


# --- values of another kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_eps", "1e-05"), ("freq_shift", "0"), ("norm_num_groups", -1), ("downsample_padding", None)],
)
def test_texts_in_the_place_of_numbers_in_a_configuration_of_diffusers(key: str, value: Any, tmp_path: Path) -> None:
    """The network was made, and failed when it ran."""
    pytest.importorskip("diffusers")
    tiny_pipeline().save_pretrained(tmp_path / "tiny")
    file = tmp_path / "tiny" / "unet" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with refused(file, f"{key} must be a number between 0 and", f"got {value!r}"):
        mmdgs.load(tmp_path / "tiny")


RECORDS = {
    "a text": {"values": {"fid": "3"}},
    "a number for a table": {"values": {"kid": 3.0}},
    "a table that lacks a number": {"values": {"precision-recall": {"precision": 0.5}}},
    "left out of nothing": {"values": {}, "left_out": {"fid": [1.0, 2.0]}},
    "texts left out": {"left_out": {"fid": ["1", "2"]}},
    "no text as a reason": {"open": {"fid": 3}},
}


@pytest.mark.parametrize("change", RECORDS.values(), ids=RECORDS)
def test_evaluations_of_another_shape(change: dict[str, Any], tmp_path: Path) -> None:
    images = Images("a", "samples", 10, 20, "0" * 64)
    record = Evaluation(images, images, {"fid": 3.0, "kid": {"mean": 0.1, "std": 0.1}}).to_json()
    (tmp_path / "a.json").write_text(json.dumps({"evaluations": [record]}))
    assert len(read_evaluations(tmp_path / "a.json")) == 1
    (tmp_path / "a.json").write_text(json.dumps({"evaluations": [{**record, **change}]}))
    with refused("a.json", "is not an evaluation of mmdgs"):
        read_evaluations(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", -1), ("step", "2"), ("step", True), ("origin", {"head": {"denoiser": "x"}}), ("origin", {"images": "3"})],
)
def test_a_state_of_training_of_another_shape(key: str, value: Any, tmp_path: Path) -> None:
    recipe = read_recipe(overrides={"data": "mog", "model": "mlp", "sigma": 0.5, "steps": 1, "limit": 16})
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
