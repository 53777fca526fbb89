"""Files from elsewhere: what they declare is not believed, and whatever is wrong is our own error with the name."""

from __future__ import annotations

import io
import json
import pickle
import re
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
from mmdgs.errors import UsageError, shown
from mmdgs.files import read_json
from mmdgs.metrics.inception_file import load_inception
from mmdgs.models.catalogue import licence_of
from mmdgs.models.conversion import convert_checkpoint
from mmdgs.networks import MLP
from mmdgs.operators.named import parse_operator
from mmdgs.pickled import read_checkpoint
from mmdgs.reading import FREE, reading
from mmdgs.training import read_recipe

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
    "layers": (UNET, {"layers_per_block": 1_000_000}, "too large"),
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
    "deep": ("network: " + "[" * 100_000, "nested too deeply"),
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
