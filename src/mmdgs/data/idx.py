"""MNIST from its idx files, plain or gzipped.

An idx file is a header of big-endian 32-bit words and unsigned bytes after it: 2051, count, rows, columns for
images, 2049, count for labels (http://yann.lecun.com/exdb/mnist).
"""

from __future__ import annotations

import gzip
import io
import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmdgs.data.imageset import ImageSet
from mmdgs.data.sources import Source, check_split, data_folder, obtain
from mmdgs.errors import UsageError
from mmdgs.files import read_file
from mmdgs.reading import FREE, most_unpacked, reading

IMAGES, LABELS = "images", "labels"
MAGIC = {IMAGES: 2051, LABELS: 2049}
DIMENSIONS = {IMAGES: 3, LABELS: 1}
GZIP = b"\x1f\x8b"
CLASSES = tuple(map(str, range(10)))
PREFIX = {"train": "train", "test": "t10k"}
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def load_mnist(split: str, data_dir: Path | str | None, *, download: bool) -> ImageSet:
    """The training (60,000) or test (10,000) part of MNIST, or of a set stored like it."""
    check_split("mnist", split, tuple(PREFIX))
    root = data_folder(data_dir)
    pair = _find(root, split)
    if pair is None:
        stems = [_stem(split, kind) + ".gz" for kind in (IMAGES, LABELS)]
        sources = [Source(stem, MD5[stem], tuple(mirror + stem for mirror in MIRRORS)) for stem in stems]
        folder = obtain("mnist", sources, root, download=download)
        pair = folder / stems[0], folder / stems[1]
    images, labels = read_idx(pair[0], IMAGES), read_idx(pair[1], LABELS)
    if len(images) != len(labels):
        raise UsageError(f"{pair[0]} holds {len(images):,} images but {pair[1]} holds {len(labels):,} labels")
    if labels.max() >= len(CLASSES):
        raise UsageError(f"{pair[1]} holds the label {int(labels.max())}; expected 0 to {len(CLASSES) - 1}")
    return ImageSet("mnist", split, images[:, None], labels.long(), CLASSES)


def _stem(split: str, kind: str) -> str:
    return f"{PREFIX[split]}-{kind}-idx{DIMENSIONS[kind]}-ubyte"


def _find(root: Path, split: str) -> tuple[Path, Path] | None:
    """The image and the label file of a split, from the first folder that has both."""
    # The last two are torchvision's layout, below its root and from inside it.
    for folder in (root / "mnist", root, root / "MNIST" / "raw", root / "raw"):
        found = [_file(folder, _stem(split, kind)) for kind in (IMAGES, LABELS)]
        if found[0] and found[1]:
            return found[0], found[1]
    return None


def _file(folder: Path, stem: str) -> Path | None:
    # Some tools unpack "train-images-idx3-ubyte" as "train-images.idx3-ubyte".
    names = (name + end for name in (stem, stem.replace("-idx", ".idx")) for end in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_idx(path: Path, kind: str) -> Tensor:
    """The uint8 tensor of an idx file: (n, rows, columns) images or (n,) labels."""
    content = read_file(path, FREE)
    # What a file holds tells more than its name: browsers unpack files and keep the ".gz".
    plain = io.BytesIO(content)
    stream = gzip.GzipFile(fileobj=plain) if content.startswith(GZIP) else plain
    packed = isinstance(stream, gzip.GzipFile)
    with reading(path, "a whole gzip file" if packed else "an idx file"), stream:
        return _parse(stream, path, kind, most_unpacked(len(content)) if packed else len(content))


def _parse(stream: io.BufferedIOBase, path: Path, kind: str, most: int) -> Tensor:
    """The tensor after its header, of at most so many bytes: a header may say anything."""
    words = 1 + DIMENSIONS[kind]
    head = stream.read(4 * words)
    magic = struct.pack(">I", MAGIC[kind])
    if head[:4] != magic:
        raise UsageError(
            f"{path} is not an idx file of {kind}: it begins with {head[:12]!r}, "
            f"expected the magic number {MAGIC[kind]}, {magic!r}"
        )
    if len(head) < 4 * words:
        raise UsageError(f"{path} is truncated: it holds {len(head)} bytes of a header of {4 * words}")
    shape = struct.unpack(f">{words - 1}I", head[4:])
    size = math.prod(shape)
    if size == 0:
        raise UsageError(f"{path} holds no {kind}: its header says {' x '.join(map(str, shape))}")
    body = stream.read(
        min(size, most) + 1
    )  # one more than there should be: it finds a longer file, and checks gzip's sum
    if len(body) != size:
        found = f"only {len(body):,}" if len(body) < size else "more"
        raise UsageError(
            f"{path} is damaged: its header says {' x '.join(map(str, shape))} = {size:,} bytes after the header, "
            f"but it holds {found}"
        )
    return torch.from_numpy(np.frombuffer(body, dtype=np.uint8).reshape(shape).copy())
