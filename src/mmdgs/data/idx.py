"""MNIST from its idx files, plain or gzipped.

An idx file is a header of big-endian 32-bit words and unsigned bytes after it: 2051, count, rows,
columns for images, 2049, count for labels (http://yann.lecun.com/exdb/mnist).
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
DIMENSIONS = {IMAGES: 3, LABELS: 1}
MAGIC = 2048  # plus the number of dimensions
CLASSES = tuple(map(str, range(10)))
PREFIX = {"train": "train", "test": "t10k"}
FOLDERS = ("mnist", "", "MNIST/raw", "raw")
"""The last two are torchvision's layout, below its root and from inside it."""
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
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
    stems = [f"{PREFIX[split]}-{kind}-idx{n}-ubyte" for kind, n in DIMENSIONS.items()]
    for folder in FOLDERS:
        paths = [path for stem in stems if (path := _file(root / folder, stem))]
        if len(paths) == len(stems):
            break
    else:
        names = [stem + ".gz" for stem in stems]
        sources = [Source(name, MD5[name], tuple(url + name for url in MIRRORS)) for name in names]
        place = obtain("mnist", sources, root, download=download)
        paths = [place / name for name in names]
    images, labels = map(read_idx, paths, DIMENSIONS)
    if len(images) != len(labels) or labels.max() >= len(CLASSES):
        got = f"{len(labels):,} labels, the largest {int(labels.max())}"
        raise UsageError(f"{paths[1]} must hold {len(images):,} labels from 0 to 9, got {got}")
    return ImageSet("mnist", split, images[:, None], labels.long(), CLASSES)


def _file(folder: Path, stem: str) -> Path | None:
    # Some tools unpack "train-images-idx3-ubyte" as "train-images.idx3-ubyte".
    names = (name + end for name in (stem, stem.replace("-idx", ".idx")) for end in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_idx(path: Path, kind: str) -> Tensor:
    """The uint8 tensor of an idx file: (n, rows, columns) images or (n,) labels."""
    content, dimensions = read_file(path, FREE), DIMENSIONS[kind]
    with reading(path, "a whole idx file, plain or gzipped"):
        if content.startswith(b"\x1f\x8b"):  # browsers unpack files and keep the ".gz"
            with gzip.open(io.BytesIO(content)) as stream:
                content = stream.read(most_unpacked(len(content)))
        if content[:4] != struct.pack(">I", MAGIC + dimensions):
            expected = f"expected the magic number {MAGIC + dimensions}"
            raise UsageError(f"no idx file of {kind}: it begins with {content[:12]!r}, {expected}")
        _, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        levels = np.frombuffer(content, dtype=np.uint8, offset=4 * (1 + dimensions))
        if len(levels) == 0 or math.prod(shape) != len(levels):
            declared = " x ".join(map(str, shape))
            held = f"its header says {declared} bytes, it holds {len(levels):,}"
            raise UsageError(f"{path} is damaged: {held}")
        return torch.from_numpy(levels.reshape(shape).copy())
