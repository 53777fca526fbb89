"""Sets of images by name or by path, and images to be judged: arrays, folders, parts of a set."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmdgs.data.imageset import SAMPLES, ImageSet
from mmdgs.data.transforms import recoloured, resized, to_uint8
from mmdgs.errors import UsageError, nearest, unknown_name
from mmdgs.files import npz_opened
from mmdgs.reading import reading

logger = logging.getLogger("mmdgs")

NAMES = ("mnist", "cifar10", "celeba")
ARRAYS = ("x", "arr_0")
"""Names of the array in an .npz: `mmdgs sample --float` writes x, public sample files arr_0."""
SLACK, STRAYS = 0.25, 0.01
"""Samples may stray out of [0, 1]; more than 1% of values further out than 0.25 may not."""


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

    The named sets are looked for in `data_dir`, else in the folder that MMDGS_DATA names, else in
    the user's cache folder; MNIST and CIFAR-10 are downloaded there unless download=False. For the
    splits of a folder or zip see `mmdgs.data.folders`.

    With a `size` images are cropped to the largest centred square and resized to size x size
    (CelebA: its central 140 x 140 pixels, to 64 x 64 without a size); without one they must be of
    one size. `channels` is 1 (grey) or 3 (RGB); the default is what is stored, for files what the
    first image has. Files that cannot be read are refused, or left out with unreadable="skip".
    `limit` keeps the first so many images.
    """
    # Here: readers of files would slow down every start.
    from mmdgs.data import celeba, cifar, decoding, folders, idx

    for name, value in (("size", size), ("limit", limit)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} must be a positive whole number, got {value!r}")
    if channels not in (None, 1, 3):
        raise UsageError(f"channels must be 1 (grey) or 3 (RGB), got {channels!r}")
    if unreadable not in ("refuse", "skip"):
        raise UsageError(f"unreadable must be 'refuse' or 'skip', got {unreadable!r}")
    if data in ("mnist", "cifar10"):
        load = idx.load_mnist if data == "mnist" else cifar.load_cifar10
        stored = load(split, data_dir, download=download).take(slice(limit))
        images = stored.images if size is None else resized(stored.images, size)
        return replace(stored, images=images if channels is None else recoloured(images, channels))
    reading = folders.Reading(decoding.Fit(size, channels), unreadable, limit)
    if data == "celeba":
        return celeba.load_celeba(split, data_dir, reading)
    path = Path(data).expanduser()
    if folders.is_gallery(path):
        return folders.load_folder(path, split, reading)
    if path.exists():
        raise UsageError(f"{path} is a file; expected a folder of images or a .zip of them")
    others = "or give the path of a folder or .zip of images"
    raise UsageError(f"{unknown_name('data', str(data), NAMES)}, {others}")


def load_samples(
    source: str | Path, *, data_dir: Path | str | None = None, size: int | None = None
) -> ImageSet:
    """Images to be judged: a .npz, a folder or zip of images, or "NAME:SPLIT" of `load_images`.

    A .npz holds floating-point images (n, channels, height, width) in [0, 1] as `x`, or 8-bit ones,
    channels first or last, as `x`, `arr_0` or its only array of four dimensions. `size` resizes
    images that are no array.
    """
    from mmdgs.data.decoding import Fit
    from mmdgs.data.folders import PARTS, Reading, is_gallery, open_gallery, read_images

    name, _, split = str(source).rpartition(":")
    if split in PARTS and name:
        return load_images(name, split, data_dir=data_dir, size=size)
    path = Path(source).expanduser()
    if path.suffix.lower() == ".npz" and path.is_file():
        with reading(path, "an .npz of images"):
            return image_set(read_array(path), path.stem)
    if is_gallery(path):
        with open_gallery(path) as gallery:
            return read_images(gallery, gallery.names, Reading(Fit(size)))
    if str(source) in NAMES:
        raise UsageError(f"{source} has several parts; name one, such as {source}:test")
    like = nearest(name or str(source), NAMES)
    raise UsageError(
        f"there are no images at {str(source)!r}{like}; expected an .npz, a folder or .zip of "
        f"images, or a set and its split such as {NAMES[1]}:test ({', '.join(NAMES)}, or a folder)"
    )


def image_set(images: np.ndarray | Tensor, name: str) -> ImageSet:
    """An array of images as a set: 8-bit ones as they are, others in [0, 1] as their levels."""
    x = image_array(images, name)
    return ImageSet(name, SAMPLES, x if x.dtype == torch.uint8 else _levels(x, name))


def image_array(images: np.ndarray | Tensor, name: str) -> Tensor:
    """An array of images, uint8 or floating point, as a tensor (n, channels, height, width)."""
    if isinstance(images, np.ndarray):
        images = images.astype(images.dtype.newbyteorder("="), copy=False)
        numbers = images.dtype == np.uint8 or images.dtype.kind == "f"
    else:
        numbers = images.dtype == torch.uint8 or images.is_floating_point()
    if not numbers or images.ndim != 4 or 0 in images.shape:
        got = f"{images.dtype} {tuple(images.shape)}"
        kinds = "images (n, channels, height, width), uint8 or floating point"
        raise UsageError(f"{name} must hold {kinds}, got {got}")
    x = torch.as_tensor(images)
    if x.shape[1] in (1, 3):
        return x
    if x.shape[3] not in (1, 3):
        where = f"1 or 3 channels, first or last, got {tuple(x.shape)}"
        raise UsageError(f"{name} must hold images of {where}")
    return x.permute(0, 3, 1, 2).contiguous()


def _levels(x: Tensor, name: str) -> Tensor:
    """Levels 0..255 of floating-point images; UsageError for NaNs and another range."""
    bad = (~torch.isfinite(x)).flatten(1).any(1).nonzero().flatten()
    if len(bad):
        where = f"in {len(bad)} images (the first: {int(bad[0])})"
        raise UsageError(f"{name} holds values that are not finite, {where}")
    strays, outside = (
        ((x < -slack) | (x > 1 + slack)).double().mean().item() for slack in (SLACK, 0)
    )
    if strays > STRAYS:
        span = f"{x.min().item():.3g} to {x.max().item():.3g}"
        advice = "floating-point images must lie in [0, 1]: rescale them, or give 8-bit images"
        raise UsageError(f"{name} holds values from {span}; {advice}")
    if outside > 0:
        message = "%.2g%% of the values of %s lie outside [0, 1] and were clamped"
        logger.info(message, 100 * outside, name)
    return to_uint8(x)


def read_array(path: Path) -> np.ndarray:
    """The array of images in an .npz."""
    with npz_opened(path) as archive:
        names = [name for name in ARRAYS if name in archive.files]
        names = names or [name for name in archive.files if archive[name].ndim == 4]
        if not names or (len(names) > 1 and names[0] not in ARRAYS):
            got = ", ".join(archive.files)
            raise UsageError(f"{path} must hold images as the array x or arr_0, got {got}")
        return archive[names[0]]
