"""MNIST and CIFAR-10 from their files: real bytes, every layout, and ways to be wrong."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from mmdgs.data import ImageSet, load_images, pickles
from mmdgs.errors import UsageError

SHARED_MNIST = Path(__file__).resolve().parents[2] / "shared" / "data" / "mnist"
real_mnist = pytest.mark.skipif(
    not (SHARED_MNIST / "train-images-idx3-ubyte.gz").exists(),
    reason=f"the MNIST files are not in {SHARED_MNIST}",
)


def load(name: str, folder: Path, split: str = "train", **options) -> ImageSet:
    return load_images(name, split, data_dir=folder, download=False, **options)


def refused(*parts: object):
    """A UsageError whose message holds all these parts, in order."""
    return pytest.raises(UsageError, match=".*".join(re.escape(str(part)) for part in parts))


# --- MNIST


@real_mnist
def test_mnist_is_mnist() -> None:
    train = load("mnist", SHARED_MNIST)
    assert (len(train), train.shape) == (60_000, (1, 28, 28))
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert train.images.double().mean().item() == pytest.approx(33.318, abs=5e-4)
    assert train.classes == tuple("0123456789")
    assert (train.name, train.split) == ("mnist", "train")


@real_mnist
def test_mnist_in_another_size_and_in_colour() -> None:
    small = load("mnist", SHARED_MNIST, "test", limit=100)
    large = load("mnist", SHARED_MNIST, "test", limit=100, size=32, channels=3)
    assert len(large) == 100
    assert large.shape == (3, 32, 32)
    assert torch.equal(large.labels, small.labels)
    # The mean brightness hardly changes with the size, and the three channels are one.
    means = [images.images.double().mean().item() for images in (large, small)]
    assert means[0] == pytest.approx(means[1], rel=0.02)
    assert torch.equal(large.images[:, 0], large.images[:, 2])


IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
LABELS = np.array([7, 0, 9], dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape)
    return head + array.tobytes()


def write_mnist(
    folder: Path, images: bytes = idx(IMAGES), labels: bytes = idx(LABELS), end: str = ""
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"train-images-idx3-ubyte{end}").write_bytes(images)
    (folder / f"train-labels-idx1-ubyte{end}").write_bytes(labels)


@pytest.mark.parametrize("place", ["mnist", ".", "MNIST/raw"])
def test_places_of_mnist(tmp_path: Path, place: str) -> None:
    write_mnist(tmp_path / place)
    part = load("mnist", tmp_path)
    assert np.array_equal(part.images[:, 0].numpy(), IMAGES)
    assert part.labels.tolist() == [7, 0, 9]
    assert part.labels.dtype == torch.int64


def test_names_of_mnist_as_some_tools_unpack_them(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    for file in list(tmp_path.iterdir()):
        file.rename(file.with_name(file.name.replace("-idx", ".idx")))
    assert load("mnist", tmp_path).labels.tolist() == [7, 0, 9]


def test_the_environment_and_the_cache_name_the_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("MMDGS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with refused(tmp_path / "cache" / "mmdgs" / "data"):
        load_images("mnist", download=False)
    write_mnist(tmp_path / "cache" / "mmdgs" / "data" / "mnist")
    assert len(load_images("mnist", download=False)) == 3
    write_mnist(tmp_path / "named", idx(IMAGES[:2]), idx(LABELS[:2]))
    monkeypatch.setenv("MMDGS_DATA", str(tmp_path / "named"))
    assert len(load_images("mnist", download=False)) == 2
    write_mnist(tmp_path / "given", idx(IMAGES[:1]), idx(LABELS[:1]))
    assert len(load_images("mnist", download=False, data_dir=tmp_path / "given")) == 1


ZIPPED = gzip.compress(idx(IMAGES), mtime=0)
BAD_IMAGES = {
    "truncated gzip": (ZIPPED[:-12], ["gzip"]),
    "truncated": (idx(IMAGES)[:-1], ["3 x 4 x 5", "59"]),
    "a web page": (b"<!DOCTYPE html><html>", ["2051"]),
}


@pytest.mark.parametrize("case", BAD_IMAGES.values(), ids=BAD_IMAGES.keys())
def test_bad_mnist_images(tmp_path: Path, case: tuple[bytes, list[str]]) -> None:
    content, parts = case
    write_mnist(tmp_path, images=content, end=".gz")
    with refused(tmp_path / "train-images-idx3-ubyte.gz", *parts):
        load("mnist", tmp_path)


def test_bad_mnist_labels(tmp_path: Path) -> None:
    for labels, parts in ((LABELS[:2], ["3 labels", "2 labels"]), (LABELS + 1, ["largest 10"])):
        write_mnist(tmp_path, labels=idx(labels))
        with refused("train-labels-idx1-ubyte", *parts):
            load("mnist", tmp_path)


# --- CIFAR-10

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def cifar_batch(k: int, n: int = 3) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(k)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, 10, n).tolist()


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """A batch in the very opcodes of the public files, which Python 2 and numpy 1 wrote."""
    rows, columns = data.shape
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R"
    dtype = (
        b"cnumpy\ndtype\nU\x02u1K\0K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    shape = b"K" + bytes([rows]) + b"M" + struct.pack("<H", columns) + b"\x86"
    pixels = b"\x89T" + struct.pack("<I", data.nbytes) + data.tobytes()
    state = b"(K\x01" + shape + dtype + pixels + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + state + b"U\x06labels" + numbers + b"u."


def modern_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    batch = {b"data": data, b"labels": labels, b"batch_label": b"of a test"}
    return pickle.dumps(batch, protocol=4)


def cifar_files(write=modern_pickle) -> dict[str, bytes]:
    return {name: write(*cifar_batch(k)) for k, name in enumerate(BATCHES)}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        # The public archive is not in order either.
        for name, content in sorted(files.items(), reverse=True):
            member = tarfile.TarInfo(f"{PY}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


PY, ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
CIFAR_LAYOUTS = {
    "python 3": lambda root: write_files(root / PY, cifar_files()),
    "python 2": lambda root: write_files(root / "cifar10" / PY, cifar_files(python2_pickle)),
    "no folder": lambda root: write_files(root, cifar_files()),
    "archive": lambda root: write_archive(root / "cifar10" / ARCHIVE, cifar_files()),
}


@pytest.mark.parametrize("write", CIFAR_LAYOUTS.values(), ids=CIFAR_LAYOUTS.keys())
def test_layouts_of_cifar(tmp_path: Path, write) -> None:
    write(tmp_path)
    for split, which in (("train", range(5)), ("test", [5])):
        part = load("cifar10", tmp_path, split)
        batches = [cifar_batch(k) for k in which]
        expected = np.concatenate([data for data, _ in batches]).reshape(-1, 3, 32, 32)
        assert np.array_equal(part.images.numpy(), expected)
        assert part.labels.tolist() == [label for _, labels in batches for label in labels]
        assert part.classes == tuple(NAMES)
        assert (part.name, part.split) == ("cifar10", split)
        assert part.images.numpy().flags.writeable


def test_an_archive_helps_out_where_a_folder_is_incomplete(tmp_path: Path) -> None:
    files = cifar_files()
    write_files(tmp_path / PY, {"data_batch_1": files["data_batch_1"]})
    with refused("cifar10 was not found", ARCHIVE):
        load("cifar10", tmp_path)
    write_archive(tmp_path / ARCHIVE, files)
    assert len(load("cifar10", tmp_path)) == 15


PIXELS = np.zeros((2, 3072), np.uint8)
LONGER = python2_pickle(PIXELS, [1, 2]).replace(b"K\x02M\x00\x0c", b"K\x03M\x00\x0c")
BAD_BATCHES = {
    "negative label": ({"data": PIXELS, "labels": [9, -1]}, ["0 to 9", "[9, -1]"]),
    "no labels": ({"data": PIXELS, "fine_labels": [1, 2]}, ["no 'labels'"]),
    "other counts": ({"data": PIXELS, "labels": [1]}, ["'labels'", "2 whole numbers"]),
    "no bytes": ({"data": PIXELS.astype(np.float32), "labels": [1, 2]}, ["unsigned bytes"]),
    "other shape": ({"data": PIXELS[:, 1:].copy(), "labels": [1, 2]}, ["(2, 3071)"]),
    "truncated": (modern_pickle(PIXELS, [1, 2])[:3000], ["damaged"]),
    "array too short": (LONGER, ["(3, 3072)"]),
}


@pytest.mark.parametrize("case", BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_bad_cifar_batches(tmp_path: Path, case) -> None:
    content, parts = case
    content = content if isinstance(content, bytes) else pickle.dumps(content, protocol=4)
    (tmp_path / "test_batch").write_bytes(content)
    with refused(tmp_path / "test_batch", *parts):
        load("cifar10", tmp_path, "test")


def test_bad_cifar_archives(tmp_path: Path) -> None:
    archive = tmp_path / ARCHIVE
    write_archive(archive, cifar_files())
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with refused(archive, "damaged"):
        load("cifar10", tmp_path)
    write_archive(archive, {"readme.html": b""})
    with refused(archive, "holds no data_batch_1, data_batch_2"):
        load("cifar10", tmp_path)


# --- pickles with code in them


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *args) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


EVIL = {
    "system": (lambda marker: Calls(os.system, f"touch '{marker}'"), "system"),
    "among the labels": (
        lambda marker: {"data": [], "labels": [1, Calls(os.system, f"touch '{marker}'")]},
        "system",
    ),
    "in the arguments of an admitted call": (
        lambda marker: Calls(np.dtype, Calls(eval, f"open({str(marker)!r}, 'w').close() or 'u1'")),
        "eval",
    ),
}


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize(("bomb", "name"), EVIL.values(), ids=EVIL.keys())
def test_code_in_a_pickle_is_not_run(tmp_path: Path, bomb, name: str, protocol: int) -> None:
    marker = tmp_path / "it ran"
    content = pickle.dumps(bomb(marker), protocol=protocol)
    (tmp_path / "test_batch").write_bytes(content)
    with refused(tmp_path / "test_batch", f".{name}, which is refused"):
        load("cifar10", tmp_path, "test")
    assert not marker.exists()
    # The control: this is a pickle that runs code, for those who let it.
    pickle.loads(content)
    assert marker.exists()


@pytest.mark.parametrize("name", ["numpy ndarray.tofile", "numpy load", "_codecs encode"])
def test_all_other_names_are_refused(tmp_path: Path, name: str) -> None:
    texts = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in name.split())
    (tmp_path / "test_batch").write_bytes(b"\x80\x04" + texts + b"\x93.")
    with refused(tmp_path / "test_batch", name.replace(" ", "."), "refused"):
        load("cifar10", tmp_path, "test")


def test_a_pickle_cannot_change_the_reader(tmp_path: Path) -> None:
    # BUILD with (None, {"args": 1}) sets attributes: here on the class that stands in for an array.
    (tmp_path / "test_batch").write_bytes(b"\x80\x02cnumpy\nndarray\nN}U\x04argsK\x01s\x86b.")
    before = {name: dict(vars(cls)) for name, cls in vars(pickles).items() if isinstance(cls, type)}
    with refused(tmp_path / "test_batch", "damaged"):
        load("cifar10", tmp_path, "test")
    after = {name: dict(vars(cls)) for name, cls in vars(pickles).items() if isinstance(cls, type)}
    assert after == before
