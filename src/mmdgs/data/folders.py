"""Image files in a folder or a zip: how they are read, its parts for training and testing, labels from its subfolders.

A folder may say itself what is for what, with a subfolder `train` and one of `test`, `valid` or `val`; what lies
elsewhere is then left alone. Otherwise every 20th image in the order of the names, beginning with the first, is
held out for "test" (or "valid", which is the same), and the others are for "train".

Where each image lies in exactly one subfolder (of its part, or of all), the subfolders are its classes. A folder
that holds all the rest is looked through, as zips have them.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmdgs.data.decoding import Decoded, Fit, Unreadable, announced, decode
from mmdgs.data.imageset import ImageSet
from mmdgs.data.sources import check_split
from mmdgs.errors import UsageError
from mmdgs.files import opened, read_file
from mmdgs.reading import reading as reading_file
from mmdgs.runtime import progress_bar

logger = logging.getLogger("mmdgs")

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
LARGEST = 1 << 28
"""Bytes of a file above which it is no image for a set: a member of a zip may unpack to any size."""
BLOCK = 32
"""Files that are decoded side by side: Pillow's decoders let other threads run."""
BLOCK_BYTES = 1 << 26
"""Bytes of files that are in memory at a time, unless one alone has more."""
WORKERS = min(8, os.cpu_count() or 1)
SAID = {"reduced", "transparent"}
"""What is said of the images of a set (`Decoded.remarks`)."""
HELD_OUT = 20
PARTS = {"train": ("train",), "test": ("test", "valid", "val"), "valid": ("valid", "val", "test")}
"""The subfolders that stand for a split; the first that is there counts."""


@dataclass(frozen=True)
class Gallery:
    """The image files of a folder or zip: their names below it, sorted, and how one is read."""

    path: Path
    names: tuple[str, ...]
    size: Callable[[str], int]
    read: Callable[[str], bytes]


@dataclass(frozen=True)
class Reading:
    """How to read: what images are brought to, "refuse" or "skip" unreadable ones, and how many are wanted."""

    fit: Fit
    unreadable: str = "refuse"
    limit: int | None = None


@dataclass(frozen=True)
class Pictures:
    """What was read: `images` uint8 (n, channels, height, width), their indices in the names, and what was left out."""

    images: Tensor
    indices: list[int]
    skipped: tuple[str, ...]


@contextmanager
def open_gallery(path: Path) -> Iterator[Gallery]:
    """The images of a folder or of a zip, with all its subfolders."""
    if path.is_dir():
        files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        yield Gallery(path, _images(path, files), lambda n: (path / n).stat().st_size, lambda n: read_file(path / n))
        return
    with opened(path) as stream:
        with reading_file(path, "a zip archive"):
            archive = zipfile.ZipFile(stream)
        yield Gallery(path, _images(path, archive.namelist()), lambda n: archive.getinfo(n).file_size, archive.read)


def is_gallery(path: Path) -> bool:
    """Whether a path is a folder, or a file that ends in .zip."""
    return path.is_dir() or (path.is_file() and path.suffix.lower() == ".zip")


def title(path: Path) -> str:
    """The name of a set of images: its folder's or its zip's."""
    return path.resolve().stem if path.is_file() else path.resolve().name


def _images(path: Path, names: Iterable[str]) -> tuple[str, ...]:
    found = [name for name in names if name.lower().endswith(SUFFIXES) and not _hidden(name)]
    if not found:
        raise UsageError(f"{path} holds no images: expected files that end in {', '.join(SUFFIXES)}")
    return tuple(sorted(found, key=lambda name: name.split("/")))


def _hidden(name: str) -> bool:
    # macOS leaves a "._" twin of every file, in zips in a folder of their own.
    return any(part.startswith((".", "__MACOSX")) for part in name.split("/"))


def read_images(gallery: Gallery, names: Sequence[str], reading: Reading) -> Pictures:
    """These images of a gallery, brought to one shape; with a limit the first so many that can be read."""
    total = min(reading.limit or len(names), len(names))
    pixels: np.ndarray | None = None
    kept: list[int] = []
    skipped: list[str] = []
    remarks: dict[str, list[tuple[str, str]]] = {}
    decoded = _decoded(gallery, names, reading.fit, total)
    with closing(decoded), progress_bar(total, f"reading {gallery.path.name}", unit="image") as bar:
        for index, picture in decoded:
            if isinstance(picture, Unreadable):
                skipped.append(_left_out(gallery, names[index], picture, reading.unreadable))
                continue
            image = picture.pixels
            if pixels is None:
                pixels = np.empty((total, *image.shape), dtype=np.uint8)
            elif image.shape != pixels.shape[1:]:
                raise _differ(gallery, (names[kept[0]], pixels[0]), (names[index], image))
            pixels[len(kept)] = image
            for kind in picture.remarks.keys() & SAID:
                remarks.setdefault(kind, []).append((f"{gallery.path}/{names[index]}", picture.remarks[kind]))
            kept.append(index)
            bar.update()
            if len(kept) == total:
                break
    if pixels is None:
        raise UsageError(f"{gallery.path} holds no readable image: all {len(names):,} were left out")
    announced(remarks)
    return Pictures(torch.from_numpy(pixels[: len(kept)]), kept, tuple(skipped))


def _decoded(
    gallery: Gallery, names: Sequence[str], fit: Fit, wanted: int
) -> Generator[tuple[int, Decoded | Unreadable], None, None]:
    """Index and picture of each name in turn, decoded in blocks side by side."""
    start = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        while start < len(names):
            # One alone until the first image has decided on grey or colour, and where others only replace skipped ones.
            alone = fit.channels is None or start >= wanted
            end = start + 1 if alone else _end_of_block(gallery, names, start, min(start + BLOCK, wanted))
            contents = [_content(gallery, name) for name in names[start:end]]  # here: a zip is not for many threads
            for index, picture in enumerate(pool.map(partial(_attempt, fit=fit), contents), start=start):
                if fit.channels is None and isinstance(picture, Decoded):
                    fit = replace(fit, channels=len(picture.pixels))
                yield index, picture
            start = end


def _end_of_block(gallery: Gallery, names: Sequence[str], start: int, end: int) -> int:
    """Where a block ends so that its files have BLOCK_BYTES or fewer, or are one."""
    total = 0
    for index in range(start, end):
        try:
            total += min(gallery.size(names[index]), LARGEST)
        except (OSError, KeyError):
            continue  # found again, and told, when it is read
        if total > BLOCK_BYTES:
            return max(index, start + 1)
    return end


def _content(gallery: Gallery, name: str) -> bytes | Unreadable:
    try:
        size = gallery.size(name)
        if size > LARGEST:
            return Unreadable(f"it has {size:,} bytes, more than the limit of {LARGEST:,}")
        return gallery.read(name)
    except KeyError:
        return Unreadable("there is no such file in the archive")
    except OSError as error:
        return Unreadable(error.strerror or str(error))
    except Exception as error:  # zipfile has an error of another kind for each way a member can be damaged
        return Unreadable(str(error) or type(error).__name__)


def _attempt(content: bytes | Unreadable, fit: Fit) -> Decoded | Unreadable:
    if isinstance(content, Unreadable):
        return content
    try:
        return decode(content, fit)
    except Unreadable as error:
        return Unreadable(str(error))  # the error itself would keep the file's bytes, in its traceback


def _left_out(gallery: Gallery, name: str, why: Unreadable, unreadable: str) -> str:
    if unreadable == "refuse":
        raise UsageError(
            f"cannot read the image {name} in {gallery.path}: {why}; "
            "take it away, or leave such files out (unreadable='skip', mmdgs train --unreadable skip)"
        ) from why
    logger.warning("left out the image %s in %s: %s", name, gallery.path, why)
    return name


def _differ(gallery: Gallery, first: tuple[str, np.ndarray], other: tuple[str, np.ndarray]) -> UsageError:
    sizes = [f"{name} is {picture.shape[2]} x {picture.shape[1]}" for name, picture in (first, other)]
    return UsageError(
        f"the images in {gallery.path} differ in size ({', '.join(sizes)}); give the size to bring them to, "
        "--size 64 (size=64)"
    )


@dataclass(frozen=True)
class Member:
    """An image of a folder: its name, and the parts of its path that carry meaning."""

    name: str
    parts: tuple[str, ...]


def load_folder(path: Path, split: str, reading: Reading) -> ImageSet:
    """The part of a folder or zip of images that a split stands for."""
    check_split(str(path), split, tuple(PARTS))
    with open_gallery(path) as gallery:
        members, classes = choose(gallery.names, split)
        if not members:
            raise UsageError(
                f"{path} holds {len(gallery.names)} image and none is left for the split {split!r}; "
                "expected at least 2, since one is held out"
            )
        pictures = read_images(gallery, [member.name for member in members], reading)
    labels = None
    if classes:
        labels = torch.tensor([classes.index(members[i].parts[0]) for i in pictures.indices])
    names = tuple(members[i].name for i in pictures.indices)
    return ImageSet(title(path), split, pictures.images, labels, classes, pictures.skipped, names)


def choose(names: Sequence[str], split: str) -> tuple[list[Member], tuple[str, ...]]:
    """The images of a split, and the classes of all splits together, so that a label means the same in each."""
    members = _looked_through([Member(name, tuple(name.split("/"))) for name in names])
    folders = {member.parts[0] for member in members if len(member.parts) > 1}
    train, test = (_part(folders, which) for which in ("train", "test"))
    if train and test:
        chosen = _part(folders, split)
        used = folders & {part for parts in PARTS.values() for part in parts}
        inside = [member for member in members if len(member.parts) > 1 and member.parts[0] in used]
        below = [Member(member.name, member.parts[1:]) for member in inside]
        mine = [member for member, whole in zip(below, inside, strict=True) if whole.parts[0] == chosen]
        return mine, _classes(below)
    mine = [member for i, member in enumerate(members) if (i % HELD_OUT == 0) == (split != "train")]
    return mine, _classes(members)


def _part(folders: set[str], split: str) -> str | None:
    return next((part for part in PARTS[split] if part in folders), None)


def _looked_through(members: list[Member]) -> list[Member]:
    """Without the folders that hold all the rest."""
    while all(len(member.parts) > 1 for member in members) and len({member.parts[0] for member in members}) == 1:
        members = [Member(member.name, member.parts[1:]) for member in members]
    return members


def _classes(members: Sequence[Member]) -> tuple[str, ...]:
    if any(len(member.parts) != 2 for member in members):
        return ()
    return tuple(sorted({member.parts[0] for member in members}))
