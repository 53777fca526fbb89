"""MNIST and CIFAR-10 from their files: real bytes, every layout, and every way to be wrong."""

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
    not (SHARED_MNIST / "train-images-idx3-ubyte.gz").exists(), reason=f"the MNIST files are not in {SHARED_MNIST}"
)


def load(name: str, folder: Path, split: str = "train", **options) -> ImageSet:
    return load_images(name, split, data_dir=folder, download=False, **options)


def refused(*parts: object):
    """A UsageError whose message holds all these parts, in order."""
    return pytest.raises(UsageError, match=".*".join(re.escape(str(part)) for part in parts))


# --- MNIST ------------------------------------------------------------------------------------------------------


@real_mnist
def test_mnist_is_mnist() -> None:
    train = load("mnist", SHARED_MNIST)
    assert (len(train), train.shape) == (60_000, (1, 28, 28))
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert train.images.double().mean().item() == pytest.approx(33.318, abs=5e-4)
    assert train.classes == tuple("0123456789")
    assert (train.name, train.split) == ("mnist", "train")


@real_mnist
def test_gzipped_and_plain_files_are_the_same(tmp_path: Path) -> None:
    for kind in ("images-idx3", "labels-idx1"):
        content = gzip.decompress((SHARED_MNIST / f"t10k-{kind}-ubyte.gz").read_bytes())
        (tmp_path / f"t10k-{kind.replace('-idx', '.idx')}-ubyte").write_bytes(content)
    plain, zipped = load("mnist", tmp_path, "test"), load("mnist", SHARED_MNIST, "test")
    assert len(plain) == 10_000
    assert torch.equal(plain.images, zipped.images)
    assert torch.equal(plain.labels, zipped.labels)


@real_mnist
def test_mnist_in_another_size_and_in_colour() -> None:
    small = load("mnist", SHARED_MNIST, "test", limit=100)
    large = load("mnist", SHARED_MNIST, "test", limit=100, size=32, channels=3)
    assert len(large) == 100
    assert large.shape == (3, 32, 32)
    assert torch.equal(large.labels, small.labels)
    # The mean brightness hardly changes with the size, and the three channels are one.
    assert large.images.double().mean().item() == pytest.approx(small.images.double().mean().item(), rel=0.02)
    assert torch.equal(large.images[:, 0], large.images[:, 2])


IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
LABELS = np.array([7, 0, 9], dtype=np.uint8)


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", magic or 2048 + array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, images: bytes = idx(IMAGES), labels: bytes = idx(LABELS), end: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"train-images-idx3-ubyte{end}").write_bytes(images)
    (folder / f"train-labels-idx1-ubyte{end}").write_bytes(labels)


@pytest.mark.parametrize("place", ["mnist", ".", "MNIST/raw", "raw"])
def test_places_of_mnist(tmp_path: Path, place: str) -> None:
    write_mnist(tmp_path / place)
    found = load("mnist", tmp_path)
    assert np.array_equal(found.images[:, 0].numpy(), IMAGES)
    assert found.labels.tolist() == [7, 0, 9]
    assert found.labels.dtype == torch.int64


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
    monkeypatch.delenv("MMDGS_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with refused(tmp_path / "home" / ".cache" / "mmdgs" / "data"):
        load_images("mnist", download=False)


def test_what_a_file_holds_counts_and_not_its_name(tmp_path: Path) -> None:
    write_mnist(tmp_path, idx(IMAGES), gzip.compress(idx(LABELS)), end=".gz")
    assert load("mnist", tmp_path).labels.tolist() == [7, 0, 9]


def test_a_pair_is_never_put_together_from_two_folders(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", idx(IMAGES + 1))
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").unlink()
    write_mnist(tmp_path)
    assert np.array_equal(load("mnist", tmp_path).images[:, 0].numpy(), IMAGES)


ZIPPED = gzip.compress(idx(IMAGES), mtime=0)
BAD_IMAGES = {
    "truncated gzip": (ZIPPED[:-12], ["not a whole gzip file", "end-of-stream"]),
    "gzip with another sum": (ZIPPED[:-8] + bytes(8), ["not a whole gzip file", "CRC check failed"]),
    "truncated": (idx(IMAGES)[:-1], ["damaged", "3 x 4 x 5 = 60 bytes", "only 59"]),
    "truncated header": (idx(IMAGES)[:10], ["truncated", "10 bytes of a header of 16"]),
    "too long": (idx(IMAGES) + b"\0", ["damaged", "60 bytes", "more"]),
    "labels as images": (idx(LABELS), ["not an idx file of images", "expected the magic number 2051"]),
    "a web page": (b"<!DOCTYPE html><html>", ["not an idx file of images", "b'<!DOCTYPE ht'", "2051"]),
    "gzipped web page": (gzip.compress(b"<html>no such page"), ["not an idx file", "b'<html>no suc'"]),
    "empty file": (b"", ["not an idx file of images", "begins with b''"]),
    "no images": (idx(IMAGES[:0]), ["holds no images", "0 x 4 x 5"]),
}


@pytest.mark.parametrize("case", BAD_IMAGES.values(), ids=BAD_IMAGES.keys())
def test_bad_mnist_images(tmp_path: Path, case: tuple[bytes, list[str]]) -> None:
    content, parts = case
    write_mnist(tmp_path, images=content, end=".gz")
    with refused(tmp_path / "train-images-idx3-ubyte.gz", *parts):
        load("mnist", tmp_path)


def test_bad_mnist_labels(tmp_path: Path) -> None:
    write_mnist(tmp_path, labels=idx(LABELS[:2]))
    with refused("train-images-idx3-ubyte holds 3 images but", "train-labels-idx1-ubyte holds 2 labels"):
        load("mnist", tmp_path)
    write_mnist(tmp_path, labels=idx(LABELS + 1))
    with refused("train-labels-idx1-ubyte holds the label 10; expected 0 to 9"):
        load("mnist", tmp_path)


def test_a_data_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mnist.gz"
    file.touch()
    with refused(f"the data folder {file} is a file; give the folder it is in"):
        load("mnist", file)


# --- CIFAR-10 ---------------------------------------------------------------------------------------------------

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BATCHES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


def cifar_batch(k: int, n: int = 3) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(k)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, 10, n).tolist()


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """A batch in the very opcodes of the public files, which Python 2 and numpy 1 wrote."""
    rows, columns = data.shape
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\0K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    shape = b"K" + bytes([rows]) + b"M" + struct.pack("<H", columns) + b"\x86"
    state = b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<I", data.nbytes) + data.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + state + b"U\x06labels" + numbers + b"u."


def python_files(write=None) -> dict[str, bytes]:
    def modern(data: np.ndarray, labels: list[int]) -> bytes:
        return pickle.dumps({b"data": data, b"labels": labels, b"batch_label": b"of a test"}, protocol=4)

    files = {name: (write or modern)(*cifar_batch(k)) for k, name in enumerate(BATCHES)}
    files["batches.meta"] = pickle.dumps({b"label_names": [name.encode() for name in NAMES]}, protocol=2)
    return files


def binary_files() -> dict[str, bytes]:
    files = {}
    for k, name in enumerate(BATCHES):
        data, labels = cifar_batch(k)
        files[f"{name}.bin"] = np.concatenate([np.array(labels, np.uint8)[:, None], data], axis=1).tobytes()
    files["batches.meta.txt"] = ("\n".join(NAMES) + "\n").encode()
    return files


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_archive(path: Path, folder: str, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in sorted(files.items(), reverse=True):  # the public archives are not in order either
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


PY, BIN = "cifar-10-batches-py", "cifar-10-batches-bin"
CIFAR_LAYOUTS = {
    "python": lambda root: write_files(root / PY, python_files()),
    "python 2": lambda root: write_files(root / PY, python_files(python2_pickle)),
    "protocol 2": lambda root: write_files(
        root, python_files(lambda data, labels: pickle.dumps({b"data": data, b"labels": labels}, protocol=2))
    ),
    "fortran order": lambda root: write_files(
        root, python_files(lambda data, labels: pickle.dumps({"data": np.asfortranarray(data), "labels": labels}, 4))
    ),
    "binary": lambda root: write_files(root / BIN, binary_files()),
    "binary, in a folder of the set": lambda root: write_files(root / "cifar10" / BIN, binary_files()),
    "the folder itself": lambda root: write_files(root, binary_files()),
    "no names": lambda root: write_files(root, {k: v for k, v in binary_files().items() if "meta" not in k}),
    "python archive": lambda root: write_archive(root / "cifar-10-python.tar.gz", PY, python_files()),
    "binary archive": lambda root: write_archive(root / "cifar10" / "cifar-10-binary.tar.gz", BIN, binary_files()),
}


@pytest.mark.parametrize("write", CIFAR_LAYOUTS.values(), ids=CIFAR_LAYOUTS.keys())
def test_layouts_of_cifar(tmp_path: Path, write) -> None:
    write(tmp_path)
    for split, which in (("train", range(5)), ("test", [5])):
        found = load("cifar10", tmp_path, split)
        batches = [cifar_batch(k) for k in which]
        expected = np.concatenate([data for data, _ in batches]).reshape(-1, 3, 32, 32)
        assert np.array_equal(found.images.numpy(), expected)
        assert found.labels.tolist() == [label for _, labels in batches for label in labels]
        assert found.classes == tuple(NAMES)
        assert (found.name, found.split) == ("cifar10", split)
        assert found.images.numpy().flags.writeable


def test_cifar_small_grey_and_few(tmp_path: Path) -> None:
    write_files(tmp_path, binary_files())
    found = load("cifar10", tmp_path, size=16, channels=1, limit=4)
    assert (len(found), found.shape) == (4, (1, 16, 16))


def test_an_archive_helps_out_where_a_folder_is_incomplete(tmp_path: Path) -> None:
    files = python_files()
    write_files(tmp_path / PY, {"data_batch_1": files["data_batch_1"]})
    with refused(tmp_path / PY, "has some CIFAR-10 batches but not data_batch_2, data_batch_3"):
        load("cifar10", tmp_path)
    write_archive(tmp_path / "cifar-10-python.tar.gz", PY, files)
    assert len(load("cifar10", tmp_path)) == 15


def record(label: int, n: int = 1) -> bytes:
    return (bytes([label]) + bytes(3072)) * n


PIXELS = np.zeros((2, 3072), np.uint8)
BAD_BATCHES = {
    "truncated binary": (".bin", record(1)[:-1], ["holds 3,072 bytes, expected a multiple of 3,073"]),
    "empty binary": (".bin", b"", ["holds 0 bytes, expected a multiple of 3,073"]),
    "label in binary": (".bin", record(3) + record(10), ["holds the label 10; expected 0 to 9"]),
    "label in pickle": ("", {"data": PIXELS, "labels": [9, 11]}, ["holds the label 11; expected 0 to 9"]),
    "negative label": ("", {"data": PIXELS, "labels": [9, -1]}, ["holds the label -1; expected 0 to 9"]),
    "no labels": ("", {"data": PIXELS, "fine_labels": [1, 2]}, ["has no 'labels', only ['data', 'fine_labels']"]),
    "no data": ("", {"labels": [1]}, ["has no 'data', only ['labels']"]),
    "other counts": ("", {"data": PIXELS, "labels": [1]}, ["holds 2 images but 1 labels"]),
    "other width": ("", {"data": PIXELS[:, 1:], "labels": [1, 2]}, ["'data' must be", "(n, 3072), got (2, 3071)"]),
    "data that are a list": ("", {"data": [1], "labels": [1]}, ["'data' must be an array of bytes", "got list"]),
    "labels that are text": ("", {"data": PIXELS, "labels": ["a", "b"]}, ["'labels' must be a list of whole numbers"]),
    "floats": ("", {"data": PIXELS.astype(float), "labels": [1, 2]}, ["an array that is not of unsigned bytes"]),
    "a list": ("", [1, 2], ["expected a dictionary, got list"]),
    "a web page": ("", b"<html></html>", ["is not a CIFAR-10 batch, or a damaged one"]),
    "truncated pickle": ("", pickle.dumps({"data": PIXELS, "labels": [1, 2]}, 4)[:3000], ["or a damaged one"]),
    "array too short": (
        "",
        python2_pickle(PIXELS, [1, 2]).replace(b"K\x02M\x00\x0c", b"K\x03M\x00\x0c"),
        ["an array of shape (3, 3072) with 6144 bytes"],
    ),
}


@pytest.mark.parametrize("case", BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_bad_cifar_batches(tmp_path: Path, case) -> None:
    suffix, content, parts = case
    content = content if isinstance(content, bytes) else pickle.dumps(content, protocol=4)
    (tmp_path / f"test_batch{suffix}").write_bytes(content)
    with refused(tmp_path / f"test_batch{suffix}", *parts):
        load("cifar10", tmp_path, "test")


def test_bad_class_names(tmp_path: Path) -> None:
    write_files(tmp_path, {**binary_files(), "batches.meta.txt": b"cat\ndog\n"})
    with refused(tmp_path / "batches.meta.txt", "names 2 classes, expected 10"):
        load("cifar10", tmp_path)


def test_bad_cifar_archives(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-python.tar.gz"
    write_archive(archive, PY, python_files())
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 2], b"<html></html>", b""):
        archive.write_bytes(content)
        with refused(archive, "is not a tar.gz archive, or a damaged one"):
            load("cifar10", tmp_path)
    write_archive(archive, PY, {"readme.html": b""})
    with refused(archive, "holds no data_batch_1, data_batch_2", "expected the archive cifar-10-python.tar.gz"):
        load("cifar10", tmp_path)


# --- pickles with code in them ----------------------------------------------------------------------------------


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *args) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


def evil(kind: str, marker: Path) -> tuple[object, str]:
    """An object whose unpickling makes the marker, and the name that is refused."""
    system, python = f"touch '{marker}'", f"__import__('pathlib').Path({str(marker)!r}).touch()"
    return {
        "system": (Calls(os.system, system), "system"),
        "eval": (Calls(eval, python), "eval"),
        "exec": (Calls(exec, python), "exec"),
        "among the labels": ({"data": [], "labels": [1, Calls(os.system, system)]}, "system"),
        "in the arguments of a call": (Calls(list, (Calls(os.system, system),)), "list"),
        "in the arguments of an admitted call": (
            Calls(np.dtype, Calls(eval, f"{python} or 'u1'")),
            "eval",
        ),
        "as a key": ({Calls(eval, f"{python} or 1"): 1}, "eval"),
    }[kind]


EVIL = ["system", "eval", "exec", "among the labels", "in the arguments of a call"]
EVIL += ["in the arguments of an admitted call", "as a key"]


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("kind", EVIL)
def test_code_in_a_pickle_is_not_run(tmp_path: Path, kind: str, protocol: int) -> None:
    marker = tmp_path / "it ran"
    bomb, name = evil(kind, marker)
    content = pickle.dumps(bomb, protocol=protocol)
    (tmp_path / "test_batch").write_bytes(content)
    with refused(tmp_path / "test_batch", f".{name}, which is refused"):
        load("cifar10", tmp_path, "test")
    assert not marker.exists()
    # The control: this is a pickle that runs code, for those who let it.
    pickle.loads(content)
    assert marker.exists()


@pytest.mark.parametrize(
    "name",
    ["ndarray.tofile", "ndarray.__class__", "load", "memmap", "fromfile"],
)
def test_other_names_of_numpy_are_refused(tmp_path: Path, name: str) -> None:
    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    (tmp_path / "test_batch").write_bytes(b"\x80\x04" + text("numpy") + text(name) + b"\x93.")
    with refused(tmp_path / "test_batch", f"the pickle asks for numpy.{name}, which is refused"):
        load("cifar10", tmp_path, "test")


def test_a_pickle_cannot_change_the_reader(tmp_path: Path) -> None:
    # BUILD with (None, {"args": 1}) sets attributes: here on the class that stands in for an array.
    (tmp_path / "test_batch").write_bytes(b"\x80\x02cnumpy\nndarray\nN}U\x04argsK\x01s\x86b.")
    before = {name: dict(vars(cls)) for name, cls in vars(pickles).items() if isinstance(cls, type)}
    with refused(tmp_path / "test_batch", "is not a CIFAR-10 batch, or a damaged one"):
        load("cifar10", tmp_path, "test")
    assert {name: dict(vars(cls)) for name, cls in vars(pickles).items() if isinstance(cls, type)} == before


def test_text_is_decoded_by_no_other_codec(tmp_path: Path) -> None:
    content = b"\x80\x02}U\x04datac_codecs\nencode\nU\x01aU\x05rot13\x86Rs."
    assert pickle.loads(content) == {"data": "n"}
    (tmp_path / "test_batch").write_bytes(content)
    with refused(tmp_path / "test_batch", "text in 'rot13'; expected latin1"):
        load("cifar10", tmp_path, "test")
