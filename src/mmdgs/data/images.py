"""Sets of images by name or by path, and images that are to be judged: arrays, a folder or zip, a part of a set."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmdgs.data.imageset import ImageSet
from mmdgs.data.transforms import recoloured, resized, to_uint8
from mmdgs.errors import UsageError, nearest, unknown_name
from mmdgs.files import npz_opened
from mmdgs.reading import reading

logger = logging.getLogger("mmdgs")

NAMES = ("mnist", "cifar10", "celeba")
SAMPLES = "samples"
"""The split of images that are no part of a data set."""
ARRAYS = ("x", "arr_0")
"""Names of the array in an .npz: that of `mmdgs sample --float`, and that of public sample files and `mmdgs sample`."""
SLACK, STRAYS = 0.25, 0.01
"""Samples of a Gaussian stray out of [0, 1]. More than 1% further out than 0.25, and it is another range."""


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
    from mmdgs.data import celeba, cifar, decoding, folders, idx  # here: readers of files would slow down every start

    _check(size, channels, unreadable, limit)
    if data in ("mnist", "cifar10"):
        stored = idx.load_mnist if data == "mnist" else cifar.load_cifar10
        found = stored(split, data_dir, download=download).take(slice(limit))
        images = found.images if size is None else resized(found.images, size)
        images = images if channels is None else recoloured(images, channels)
        return ImageSet(found.name, found.split, images, found.labels, found.classes)
    reading = folders.Reading(decoding.Fit(size, channels), unreadable, limit)
    if data == "celeba":
        return celeba.load_celeba(split, data_dir, reading)
    return folders.load_folder(_path(data), split, reading)


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
    from mmdgs.data.folders import is_gallery

    path = Path(data).expanduser()
    if is_gallery(path):
        return path
    if path.exists():
        raise UsageError(f"{path} is a file; expected a folder of images or a .zip of them")
    others = "or give the path of a folder or .zip of images"
    raise UsageError(f"{unknown_name('data', str(data), NAMES)}, {others}")


def load_samples(source: str | Path, *, data_dir: Path | str | None = None, size: int | None = None) -> ImageSet:
    """Images to be judged: a .npz, all of a folder or zip of images, or "NAME:SPLIT" of a set of `load_images`.

    A .npz holds floating-point images (n, channels, height, width) in [0, 1] as `x`, or 8-bit ones, channels first or
    last, as `x`, `arr_0` or its only array of four dimensions. `size` resizes images that are no array.
    """
    from mmdgs.data.decoding import Fit
    from mmdgs.data.folders import PARTS, Reading, is_gallery, open_gallery, read_images, title

    name, _, split = str(source).rpartition(":")
    if split in PARTS and name:
        return load_images(name, split, data_dir=data_dir, size=size)
    path = Path(source).expanduser()
    if path.suffix.lower() == ".npz" and path.is_file():
        with reading(path, "an .npz of images"):
            return image_set(read_array(path), path.stem)
    if is_gallery(path):
        with open_gallery(path) as gallery:
            found = read_images(gallery, gallery.names, Reading(Fit(size)))
            names = tuple(gallery.names[index] for index in found.indices)
        return ImageSet(title(path), SAMPLES, found.images, names=names)
    if str(source) in NAMES:
        raise UsageError(f"{source} has several parts; name one, such as {source}:train or {source}:test")
    like = nearest(name or str(source), NAMES)
    raise UsageError(
        f"there are no images at {str(source)!r}{like}; expected an .npz, a folder or .zip of images, or a set and its "
        f"split such as {NAMES[1]}:test ({', '.join(NAMES)}, or a folder of one's own)"
    )


def image_set(images: np.ndarray | Tensor, name: str) -> ImageSet:
    """An array of images as a set: 8-bit ones as they are, floating-point ones in [0, 1] as the levels they lie in."""
    x = image_array(images, name)
    return ImageSet(name, SAMPLES, x if x.dtype == torch.uint8 else _levels(x, name))


def image_array(images: np.ndarray | Tensor, name: str) -> Tensor:
    """An array of images, uint8 or floating point, as a tensor (n, channels, height, width)."""
    if isinstance(images, np.ndarray) and images.dtype.kind not in "fu":
        raise UsageError(f"{name} must hold images, uint8 or floating point, got an array of {images.dtype}")
    x = torch.as_tensor(images)
    if x.ndim != 4 or len(x) == 0 or not (x.dtype == torch.uint8 or x.is_floating_point()):
        raise UsageError(
            f"{name} must hold images (n, channels, height, width), uint8 or floating point, "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    if x.shape[1] not in (1, 3):
        if x.shape[3] not in (1, 3):
            raise UsageError(f"{name} must hold images of 1 or 3 channels, first or last, got {tuple(x.shape)}")
        x = x.permute(0, 3, 1, 2).contiguous()
    return x


def _levels(x: Tensor, name: str) -> Tensor:
    """Levels 0..255 of floating-point images; refused where they hold NaNs or are not in [0, 1]."""
    if not torch.isfinite(x).all():
        bad = (~torch.isfinite(x)).flatten(1).any(1).nonzero().flatten()
        raise UsageError(f"{name} holds values that are not finite, in {len(bad)} images (the first: {int(bad[0])})")
    strays = ((x < -SLACK) | (x > 1 + SLACK)).double().mean().item()
    if strays > STRAYS:
        raise UsageError(
            f"{name} holds values from {x.min().item():.3g} to {x.max().item():.3g}; floating-point images must lie in "
            "[0, 1]: rescale them, or give 8-bit images"
        )
    outside = ((x < 0) | (x > 1)).double().mean().item()
    if outside > 0:
        logger.info("%.2g%% of the values of %s lie outside [0, 1] and were clamped", 100 * outside, name)
    return to_uint8(x)


def read_array(path: Path) -> np.ndarray:
    """The array of images in an .npz."""
    with npz_opened(path) as archive:
        names = [name for name in ARRAYS if name in archive.files]
        if not names:
            shapes = {name: archive[name].ndim for name in archive.files}
            names = [name for name, dimensions in shapes.items() if dimensions == 4]
        if not names or (len(names) > 1 and names[0] not in ARRAYS):
            raise UsageError(f"{path} must hold images as the array x or arr_0, got {', '.join(archive.files)}")
        found = archive[names[0]]
        return found.astype(found.dtype.newbyteorder("="), copy=False)
