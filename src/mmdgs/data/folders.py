"""Image files in a folder or a zip: how they are read, its splits, labels from its subfolders.

A folder may have a subfolder `train` and one of `test`, `valid` or `val`; what lies elsewhere is
then left alone. Otherwise every 20th image in the order of the names, beginning with the first, is
held out for "test" (or "valid", which is the same), and the others are for "train".

Where each image lies in exactly one subfolder (of its split, or of all), the subfolders are its
classes. A folder that holds all the rest is looked through, as zips have them.
"""

from __future__ import annotations

import logging
import os
import threading
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mmdgs.data.decoding import Decoded, Fit, Unreadable, announced, decode
from mmdgs.data.imageset import SAMPLES, ImageSet
from mmdgs.data.sources import check_split
from mmdgs.errors import UsageError
from mmdgs.files import opened, read_file
from mmdgs.reading import reading as reading_file
from mmdgs.runtime import progress_bar

logger = logging.getLogger("mmdgs")

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
LARGEST = 1 << 28
"""Most bytes of an image file: a member of a zip may unpack to any size."""
BLOCK, WORKERS = 32, min(8, os.cpu_count() or 1)
"""Files decoded side by side: Pillow lets other threads run."""
SAID = {"reduced", "several", "transparent"}
"""The remarks on the images of a set that are logged (`Decoded.remarks`)."""
HELD_OUT = 20
PARTS = {"train": ("train",), "test": ("test", "valid", "val"), "valid": ("valid", "val", "test")}
"""The subfolders that stand for a split; the first that is there counts."""


@dataclass(frozen=True)
class Gallery:
    """The image files of a folder or zip: their names below it, sorted, and how one is read."""

    path: Path
    names: tuple[str, ...]
    content: Callable[[str], bytes]

    def read(self, name: str) -> bytes:
        """The bytes of a file; `Unreadable` says why there are none."""
        try:
            return self.content(name)
        except KeyError:
            raise Unreadable("there is no such file in the archive") from None
        except Exception as error:  # zipfile raises many kinds for damaged members
            raise Unreadable(str(error) or type(error).__name__) from error


@dataclass(frozen=True)
class Reading:
    """How to read: what images are brought to, "refuse" or "skip" unreadable ones, how many."""

    fit: Fit
    unreadable: str = "refuse"
    limit: int | None = None


@contextmanager
def open_gallery(path: Path, suffixes: tuple[str, ...] = SUFFIXES) -> Iterator[Gallery]:
    """The images of a folder or of a zip, with all its subfolders: files that end so."""
    if path.is_dir():
        files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        yield Gallery(
            path, _images(path, files, suffixes), lambda name: read_file(path / name, LARGEST)
        )
        return
    with opened(path) as stream:
        with reading_file(path, "a zip archive"):
            archive = zipfile.ZipFile(stream)
        one_at_a_time = threading.Lock()

        def member(name: str) -> bytes:
            size = archive.getinfo(name).file_size
            if size > LARGEST:
                raise Unreadable(f"it has {size:,} bytes, more than the limit of {LARGEST:,}")
            with one_at_a_time:
                return archive.read(name)

        yield Gallery(path, _images(path, archive.namelist(), suffixes), member)


def is_gallery(path: Path) -> bool:
    """Whether a path is a folder, or a file that ends in .zip."""
    return path.is_dir() or (path.is_file() and path.suffix.lower() == ".zip")


def _images(path: Path, names: Iterable[str], suffixes: tuple[str, ...]) -> tuple[str, ...]:
    def hidden(name: str) -> bool:  # macOS leaves a "._" twin of every file
        return any(part.startswith((".", "__MACOSX")) for part in name.split("/"))

    images = [name for name in names if name.lower().endswith(suffixes) and not hidden(name)]
    if not images:
        raise UsageError(f"{path} holds no images: expected files with {', '.join(suffixes)}")
    return tuple(sorted(images, key=lambda name: name.split("/")))


def read_images(gallery: Gallery, names: Sequence[str], reading: Reading) -> ImageSet:
    """These images of a gallery, brought to one shape; with a limit the first readable ones."""
    path, total = gallery.path, min(reading.limit or len(names), len(names))
    pixels: np.ndarray | None = None
    kept: list[str] = []
    skipped: list[str] = []
    remarks: dict[str, list[tuple[str, str]]] = {}
    readable = _readable(gallery, names, reading, total, skipped)
    with closing(readable), progress_bar(total, f"reading {path.name}", unit="image") as bar:
        for name, picture in readable:
            image = picture.pixels
            if pixels is None:
                pixels = np.empty((total, *image.shape), dtype=np.uint8)
            elif image.shape != pixels.shape[1:]:
                pairs = ((kept[0], pixels[0]), (name, image))
                sizes = ", ".join(f"{which} is {x.shape[2]} x {x.shape[1]}" for which, x in pairs)
                advice = "give the size to bring them to, --size 64 (size=64)"
                raise UsageError(f"the images in {path} differ ({sizes}); {advice}")
            pixels[len(kept)] = image
            _note(remarks, f"{path}/{name}", picture)
            kept.append(name)
            bar.update()
    if pixels is None:
        raise UsageError(f"{path} holds no readable image of {len(names):,}")
    announced(remarks)
    title = path.resolve().stem if path.is_file() else path.resolve().name
    images = torch.from_numpy(pixels[: len(kept)])
    return ImageSet(title, SAMPLES, images, skipped=tuple(skipped), names=tuple(kept))


def _note(remarks: dict[str, list[tuple[str, str]]], where: str, picture: Decoded) -> None:
    for kind in picture.remarks.keys() & SAID:
        remarks.setdefault(kind, []).append((where, picture.remarks[kind]))


def _readable(
    gallery: Gallery, names: Sequence[str], reading: Reading, total: int, skipped: list[str]
) -> Generator[tuple[str, Decoded], None, None]:
    """The first `total` readable images, decoded in blocks side by side; notes skipped ones."""
    fit, start = reading.fit, 0
    with ThreadPoolExecutor(WORKERS) as pool:
        while start < len(names) and total:
            # One alone until the first decides on grey or colour.
            block = names[start : start + (1 if fit.channels is None else min(BLOCK, total))]
            start += len(block)
            pictures = pool.map(partial(_picture, gallery, fit=fit), block)
            for name, picture in zip(block, pictures, strict=True):
                if isinstance(picture, Decoded):
                    fit, total = replace(fit, channels=len(picture.pixels)), total - 1
                    yield name, picture
                elif reading.unreadable == "refuse":
                    what = f"cannot read the image {name} in {gallery.path}: {picture}"
                    advice = "leave such files out with unreadable='skip' (--unreadable skip)"
                    raise UsageError(f"{what}; remove it, or {advice}")
                else:
                    logger.warning("left out %s in %s: %s", name, gallery.path, picture)
                    skipped.append(name)


def _picture(gallery: Gallery, name: str, fit: Fit) -> Decoded | Unreadable:
    try:
        return decode(gallery.read(name), fit)
    except Unreadable as error:
        return Unreadable(str(error))  # the error itself keeps the file's bytes in its traceback


def load_folder(path: Path, split: str, reading: Reading) -> ImageSet:
    """The part of a folder or zip of images that a split stands for."""
    check_split(str(path), split, tuple(PARTS))
    with open_gallery(path) as gallery:
        names, class_of = choose(gallery.names, split)
        if not names:
            count = f"{path} holds {len(gallery.names)} image; expected at least 2"
            raise UsageError(f"{count}, since one is held out: none is left for {split!r}")
        images = read_images(gallery, names, reading)
    if not class_of:
        return replace(images, split=split)
    classes = tuple(sorted(set(class_of.values())))
    labels = torch.tensor([classes.index(class_of[name]) for name in images.names])
    return replace(images, split=split, labels=labels, classes=classes)


def load_pictures(
    data: str | Path,
    split: str,
    *,
    channels: int | None = None,
    limit: int | None = None,
    least: int = 1,
    unreadable: str = "refuse",
) -> list[torch.Tensor]:
    """The images (C, H, W) of a split of a folder or zip, uint8, each at its own size.

    Both sides have at least `least` pixels.
    """
    path = Path(data).expanduser()
    if not is_gallery(path):
        raise UsageError(f"crops are of a folder or .zip of images, and {str(data)!r} is none")
    check_split(str(path), split, tuple(PARTS))
    reading, skipped = Reading(Fit(channels=channels), unreadable, limit), list[str]()
    with open_gallery(path) as gallery:
        names = choose(gallery.names, split)[0]
        total = min(limit or len(names), len(names))
        images, remarks = [], dict[str, list[tuple[str, str]]]()
        readable = _readable(gallery, names, reading, total, skipped)
        with closing(readable), progress_bar(total, f"reading {path.name}", unit="image") as bar:
            for name, picture in readable:
                if min(picture.pixels.shape[1:]) < least:
                    height, width = picture.pixels.shape[1:]
                    small = f"{path}/{name} is {width} x {height}"
                    raise UsageError(f"{small}, and crops need {least} x {least} pixels")
                _note(remarks, f"{path}/{name}", picture)
                images.append(torch.from_numpy(np.ascontiguousarray(picture.pixels)))
                bar.update()
    if not images:
        raise UsageError(f"{path} holds no readable image for {split!r}")
    announced(remarks)
    return images


def choose(names: Sequence[str], split: str) -> tuple[list[str], dict[str, str]]:
    """The images of a split, and the class of each image of all splits, if they have classes."""
    paths = {name: name.split("/") for name in names}
    while (
        all(len(path) > 1 for path in paths.values())
        and len({path[0] for path in paths.values()}) == 1
    ):
        paths = {name: path[1:] for name, path in paths.items()}
    folders = {path[0] for path in paths.values() if len(path) > 1}
    train, test, own = (
        next((part for part in PARTS[which] if part in folders), None)
        for which in ("train", "test", split)
    )
    if train and test:
        parts = folders & {part for parts in PARTS.values() for part in parts}
        paths = {name: path for name, path in paths.items() if path[0] in parts and len(path) > 1}
        in_split = [name for name, path in paths.items() if path[0] == own]
        paths = {name: path[1:] for name, path in paths.items()}
    else:
        held_out = split != "train"
        in_split = [name for i, name in enumerate(paths) if (i % HELD_OUT == 0) == held_out]
    labelled = all(len(path) == 2 for path in paths.values())
    return in_split, {name: path[0] for name, path in paths.items()} if labelled else {}
