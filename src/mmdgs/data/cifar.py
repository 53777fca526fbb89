"""CIFAR-10 in both public layouts, unpacked or straight from the public archive (https://www.cs.toronto.edu/~kriz/cifar.html)."""

from __future__ import annotations

import math
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from mmdgs.data.imageset import ImageSet
from mmdgs.data.pickles import Inert, read_inert
from mmdgs.data.sources import Source, check_split, data_folder, obtain
from mmdgs.errors import UsageError, shown
from mmdgs.files import opened, read_file
from mmdgs.reading import FREE, check_unpacked, reading

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS  # the binary layout: a label, then the red, the green and the blue plane
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = {"train": tuple(f"data_batch_{k}" for k in range(1, 6)), "test": ("test_batch",)}
FOLDERS = ("cifar10", "cifar-10", "")
ARCHIVE = Source(
    "cifar-10-python.tar.gz",
    "c58f30108f718f92721af3b95e74349a",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
)

ADMITTED = {
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
}
"""The names in the public pickles: arrays, and bytes that an old protocol holds as text."""

Batch = tuple[np.ndarray, np.ndarray]
"""Pixels (n, 3072) and labels (n,)."""


def _read_binary(content: bytes, file: str) -> Batch:
    if not content or len(content) % RECORD:
        raise UsageError(
            f"{file} is not a CIFAR-10 batch, or a truncated one: it holds {len(content):,} bytes, "
            f"expected a multiple of {RECORD:,}"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD)
    return records[:, 1:], records[:, 0]


def _read_python(content: bytes, file: str) -> Batch:
    batch = _pickled(content, file)
    for key in ("data", "labels"):
        if key not in batch:
            raise UsageError(f"{file} is not a CIFAR-10 batch: it has no {key!r}, only {shown(list(batch))}")
    data, labels = batch["data"], batch["labels"]
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS or len(data) == 0:
        got = data.shape if isinstance(data, np.ndarray) else type(data).__name__
        raise UsageError(f"{file}: 'data' must be an array of bytes (n, {PIXELS}), got {got}")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise UsageError(f"{file}: 'labels' must be a list of whole numbers")
    if len(labels) != len(data):
        raise UsageError(f"{file} holds {len(data):,} images but {len(labels):,} labels")
    return data, np.array(labels)


def _pickled(content: bytes, file: str) -> dict[str, Any]:
    """The dictionary in a pickle, keys as text, arrays as numpy's; nothing in it is run."""
    with reading(file, "a CIFAR-10 batch"):
        found = read_inert(content, ADMITTED.__contains__)
        if not isinstance(found, dict):
            raise UsageError(f"{file} is not a CIFAR-10 batch: expected a dictionary, got {type(found).__name__}")
        return {_value(key): _value(value) for key, value in found.items()}


def _value(value: Any) -> Any:
    if isinstance(value, list):  # of numbers or texts; in lists of lists a list may stand for many
        return [_bytes(item).decode("latin1") if isinstance(item, bytes | Inert) else item for item in value]
    if isinstance(value, Inert) and value.name.endswith("._reconstruct"):
        return _array(value)
    return _bytes(value).decode("latin1") if isinstance(value, bytes | Inert) else value


def _bytes(value: Any) -> bytes:
    if isinstance(value, Inert):
        value, encoding = value.args
        if encoding != "latin1":
            raise ValueError(f"text in {encoding!r}; expected latin1")
    return value if isinstance(value, bytes) else value.encode("latin1")


def _array(array: Inert) -> np.ndarray:
    """The array of unsigned bytes that a stand-in describes, with numpy's own state of an array."""
    version, shape, dtype, fortran, raw = array.state
    if version != 1 or dtype.name != "numpy.dtype" or _value(dtype.args[0]) not in ("u1", "|u1", "uint8"):
        raise ValueError("an array that is not of unsigned bytes")
    content = _bytes(raw)
    if any(not isinstance(n, int) or n < 0 for n in shape) or math.prod(shape) != len(content):
        raise ValueError(f"an array of shape {shown(shape)} with {len(content)} bytes")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def _binary_names(content: bytes, file: str) -> list[str]:
    return content.decode("latin1").split()


def _python_names(content: bytes, file: str) -> list[str]:
    names = _pickled(content, file).get("label_names")
    return names if isinstance(names, list) else []


@dataclass(frozen=True)
class Layout:
    """One of the two public layouts: its folder, its archive, and how its files are named and read."""

    folder: str
    archive: str
    suffix: str
    meta: str
    read: Callable[[bytes, str], Batch]
    class_names: Callable[[bytes, str], list[str]]

    def files(self, split: str) -> list[str]:
        return [name + self.suffix for name in BATCHES[split]]


PYTHON = Layout("cifar-10-batches-py", ARCHIVE.file, "", "batches.meta", _read_python, _python_names)
BINARY = Layout(
    "cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", "batches.meta.txt", _read_binary, _binary_names
)


def load_cifar10(split: str, data_dir: Path | str | None, *, download: bool) -> ImageSet:
    """The training (50,000) or test (10,000) part of CIFAR-10."""
    check_split("cifar10", split, tuple(BATCHES))
    root = data_folder(data_dir)
    found = _find(root, split)
    if found is None:
        found = PYTHON, obtain("cifar10", [ARCHIVE], root, download=download) / ARCHIVE.file
    layout, place = found
    contents = _contents(place, layout, split)
    batches = [
        _checked(layout.read(contents.pop(name), f"{place / name}"), place / name) for name in layout.files(split)
    ]
    classes: tuple[str, ...] = CLASSES
    if layout.meta in contents:
        classes = tuple(layout.class_names(contents[layout.meta], f"{place / layout.meta}"))
        if len(classes) != len(CLASSES):
            raise UsageError(f"{place / layout.meta} names {len(classes)} classes, expected {len(CLASSES)}")
    images = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, *SHAPE)
    labels = np.concatenate([labels for _, labels in batches]).astype(np.int64)
    return ImageSet("cifar10", split, torch.from_numpy(images), torch.from_numpy(labels), classes)


def _checked(batch: Batch, file: Path) -> Batch:
    labels = batch[1]
    wrong = labels[(labels < 0) | (labels >= len(CLASSES))]
    if wrong.size:
        raise UsageError(f"{file} holds the label {wrong[0]}; expected 0 to {len(CLASSES) - 1}")
    return batch


def _find(root: Path, split: str) -> tuple[Layout, Path] | None:
    """A layout and the folder or archive that has it: a whole folder first, then an archive."""
    incomplete = []
    candidates = [(root / name, layout) for name in FOLDERS for layout in (PYTHON, BINARY)]
    for folder, layout in candidates:
        for place in (folder / layout.folder, folder):
            missing = [file for file in layout.files(split) if not (place / file).is_file()]
            if not missing:
                return layout, place
            if len(missing) < len(layout.files(split)):
                incomplete.append(f"{place} has some CIFAR-10 batches but not {', '.join(missing)}")
    for folder, layout in candidates:
        if (folder / layout.archive).is_file():
            return layout, folder / layout.archive
    if incomplete:
        raise UsageError("; ".join(incomplete))
    return None


def _contents(place: Path, layout: Layout, split: str) -> dict[str, bytes]:
    """The bytes of the batches, and of the file with the class names where there is one."""
    names = [*layout.files(split), layout.meta]
    if place.is_dir():
        return {name: read_file(place / name, FREE) for name in names if (place / name).is_file()}
    with reading(place, "a tar.gz archive"):
        contents = _members(place, names)
    missing = [name for name in layout.files(split) if name not in contents]
    if missing:
        raise UsageError(f"{place} holds no {', '.join(missing)}; expected the archive {layout.archive} of CIFAR-10")
    return contents


def _members(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files of a tar.gz by the last part of their names, read without unpacking anything to disk."""
    contents: dict[str, bytes] = {}
    with opened(archive) as file, tarfile.open(fileobj=file, mode="r:gz") as tar:
        for member in tar:
            check_unpacked(archive, member.offset_data + member.size, archive.stat().st_size)
            name = PurePosixPath(member.name).name
            stream = tar.extractfile(member) if name in names and member.isfile() else None
            if stream is not None:
                contents[name] = stream.read()
            if len(contents) == len(names):
                break
    return contents
