"""CIFAR-10 from its pickled batches, unpacked or straight from the public archive
(https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from __future__ import annotations

import math
import tarfile
from collections.abc import Sequence
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

PIXELS = 3 * 32 * 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = {"train": tuple(f"data_batch_{k}" for k in range(1, 6)), "test": ("test_batch",)}
FOLDERS, INNER = ("cifar10", "cifar-10", ""), ("cifar-10-batches-py", "")
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
}
"""The names in the public pickles."""


def load_cifar10(split: str, data_dir: Path | str | None, *, download: bool) -> ImageSet:
    """The training (50,000) or test (10,000) part of CIFAR-10."""
    check_split("cifar10", split, tuple(BATCHES))
    root, names = data_folder(data_dir), BATCHES[split]
    folders = (root / outer / inner for outer in FOLDERS for inner in INNER)
    whole = (place for place in folders if all((place / name).is_file() for name in names))
    archives = (root / outer / ARCHIVE.file for outer in FOLDERS)
    place = next(whole, None) or next((place for place in archives if place.is_file()), None)
    if place is None:
        place = obtain("cifar10", [ARCHIVE], root, download=download) / ARCHIVE.file
    if place.is_dir():
        contents = {name: read_file(place / name, FREE) for name in names}
    else:
        contents = _members(place, names)
    batches = [_batch(contents.pop(name), str(place / name)) for name in names]
    images = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, 32, 32)
    labels = torch.tensor([label for _, labels in batches for label in labels])
    return ImageSet("cifar10", split, torch.from_numpy(images), labels, CLASSES)


def _members(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files of a tar.gz by the last part of their names; nothing is unpacked to disk."""
    contents: dict[str, bytes] = {}
    with (
        reading(archive, "a tar.gz archive"),
        opened(archive) as file,
        tarfile.open(fileobj=file, mode="r:gz") as tar,
    ):
        for member in tar:
            check_unpacked(archive, member.offset_data + member.size, archive.stat().st_size)
            name = PurePosixPath(member.name).name
            stream = tar.extractfile(member) if name in names and member.isfile() else None
            if stream is not None:
                contents[name] = stream.read()
            if len(contents) == len(names):
                return contents
    missing = ", ".join(name for name in names if name not in contents)
    raise UsageError(f"{archive} holds no {missing}; expected CIFAR-10's {ARCHIVE.file}")


def _batch(content: bytes, file: str) -> tuple[np.ndarray, list[int]]:
    """Pixels (n, 3072) and labels of a pickled batch; nothing in it is run."""
    with reading(file, "a CIFAR-10 batch"):
        batch = read_inert(content, ADMITTED.__contains__)
        batch = {key.decode() if isinstance(key, bytes) else key: batch[key] for key in batch}
        for key in ("data", "labels"):
            if key not in batch:
                raise UsageError(f"it has no {key!r}, only {shown(list(batch))}")
        pixels, labels = _array(batch["data"]), batch["labels"]
        if len(pixels) == 0 or pixels.shape[1:] != (PIXELS,):
            raise UsageError(f"'data' must be bytes (n, {PIXELS}), got shape {pixels.shape}")
        known = range(len(CLASSES))
        if len(labels) != len(pixels) or not all(type(n) is int and n in known for n in labels):
            expected = f"{len(pixels):,} whole numbers from 0 to 9"
            raise UsageError(f"'labels' must be {expected}, got {shown(labels)}")
        return pixels, labels


def _array(array: Any) -> np.ndarray:
    """The array of unsigned bytes that a stand-in describes, with numpy's own state of an array."""
    if not isinstance(array, Inert) or not array.name.endswith("._reconstruct"):
        raise UsageError(f"'data' must be an array, got {shown(array)}")
    version, shape, dtype, fortran, raw = array.state
    if version != 1 or dtype.name != "numpy.dtype" or dtype.args[0] not in ("u1", "|u1", "uint8"):
        raise UsageError("'data' must be an array of unsigned bytes")
    content = raw if isinstance(raw, bytes) else raw.encode("latin1")  # Python 2 has them as text
    if any(not isinstance(n, int) or n < 0 for n in shape) or math.prod(shape) != len(content):
        raise UsageError(f"'data' of shape {shown(shape)} has {len(content):,} bytes")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
