"""Sets of images by name or by path."""

from __future__ import annotations

import difflib
from pathlib import Path

from mmdgs.data.celeba import load_celeba
from mmdgs.data.cifar import load_cifar10
from mmdgs.data.decoding import Fit
from mmdgs.data.folders import load_folder
from mmdgs.data.gallery import Reading
from mmdgs.data.idx import load_mnist
from mmdgs.data.imageset import ImageSet
from mmdgs.data.transforms import recoloured, resized
from mmdgs.errors import UsageError

STORED = {"mnist": load_mnist, "cifar10": load_cifar10}
"""Sets that come as arrays, which can be downloaded."""
NAMES = (*STORED, "celeba")


def load_images(
    data: str | Path,
    split: str = "train",
    *,
    data_dir: Path | str | None = None,
    size: int | None = None,
    channels: int | None = None,
    unreadable: str = "refuse",
    download: bool = True,
    limit: int | None = None,
) -> ImageSet:
    """A set of images: "mnist", "cifar10", "celeba", or the path of a folder or .zip of images.

    The named sets are looked for in `data_dir`, else in the folder that the environment variable MMDGS_DATA names,
    else in the user's cache folder; MNIST and CIFAR-10 are downloaded there where they are absent, unless
    download=False. In a folder or zip of images the parts for training and testing are subfolders, or else every
    20th image is held out for the test (see `mmdgs.data.folders`).

    With a `size` images are cropped to the largest centred square and resized to size x size (CelebA: its central
    140 x 140 pixels, to 64 x 64 without a size); without one they stay as they are and must be of one size.
    `channels` is 1 (grey) or 3 (RGB); the default is what is stored, for files what the first image has. Files that
    cannot be read are refused, or left out with unreadable="skip". `limit` keeps the first so many images.
    """
    _check(size, channels, unreadable, limit)
    if data in STORED:
        found = STORED[str(data)](split, data_dir, download=download).take(slice(limit))
        images = found.images if size is None else resized(found.images, size)
        images = images if channels is None else recoloured(images, channels)
        return ImageSet(found.name, found.split, images, found.labels, found.classes)
    reading = Reading(Fit(size, channels), unreadable, limit)
    if data == "celeba":
        return load_celeba(split, data_dir, reading)
    return load_folder(_path(data), split, reading)


def _check(size: int | None, channels: int | None, unreadable: str, limit: int | None) -> None:
    for name, value in (("size", size), ("limit", limit)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} must be a positive whole number, got {value!r}")
    if channels not in (None, 1, 3):
        raise UsageError(f"channels must be 1 (grey) or 3 (RGB), got {channels!r}")
    if unreadable not in ("refuse", "skip"):
        raise UsageError(f"unreadable must be 'refuse' or 'skip', got {unreadable!r}")


def _path(data: str | Path) -> Path:
    """The folder or zip that data names."""
    path = Path(data).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".zip"):
        return path
    if path.exists():
        raise UsageError(f"{path} is a file; expected a folder of images or a .zip of them")
    near = difflib.get_close_matches(str(data).lower(), NAMES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"unknown data {str(data)!r}: {hint}choose one of {', '.join(NAMES)}, or the path of a folder or .zip of images"
    )
