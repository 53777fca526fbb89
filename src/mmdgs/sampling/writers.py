"""Where samples are written as they come: a folder of PNG files, an .npz or a .png, with a record.

What is there is whole: files get their names when they are complete. A hidden folder holds notes of
finished parts (their cost) and, for one file, the parts themselves until all are there. So a run
that was killed goes on.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data import to_uint8
from mmdgs.data.pictures import png, save_grid
from mmdgs.errors import UsageError, first_line
from mmdgs.files import (
    LOCK,
    file_written_atomically,
    half_written,
    read_json,
    refuse_file,
    remove,
    remove_if_empty,
    require_parent,
    to_json,
    write_atomically,
)
from mmdgs.folders import begin, output_folder, require_same
from mmdgs.reading import reading

logger = logging.getLogger("mmdgs")

RECORD = "samples.json"
PARTS = "parts"
KIND = "mmdgs_samples"
FORMAT = 1
MOST_NOTED = 1 << 63
"""No number of a note is as large: images, seconds, evaluations."""
PART = re.compile(r"(\d+)-(\d+)\.npy")
"""A part of an array: its first sample, and how many."""
PICTURE = re.compile(r"(\d{6,})\.png")
DIGITS = 6
"""Digits of an image's number in a file's name, or more where there are more images."""


class Destination(abc.ABC):
    """Where a run's images go: to `path`, with its `record` and the hidden folder `work`."""

    def __init__(self, path: Path, record: Path, work: Path) -> None:
        self.path, self.record, self.work = path, record, work

    @abc.abstractmethod
    def present(self, count: int) -> set[int]:
        """The images that are there, whole."""

    @abc.abstractmethod
    def _write(self, first: int, images: Any, missing: set[int]) -> None:
        """Write those missing of what a run made, numbered from `first` on."""

    @abc.abstractmethod
    def _assemble(self, count: int) -> None:
        """Bring what was written into its final form."""

    @abc.abstractmethod
    def _clear(self) -> None:
        """Remove what an earlier run left, and nothing else."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the destination for this process: a second run into it is refused."""
        with output_folder(self.path if self.work.parent == self.path else self.work):
            try:
                yield
            finally:
                remove_if_empty(self.work)  # refused or finished: nothing of ours is left in it

    def check(self, *, resume: bool, overwrite: bool) -> bool:
        """Whether to resume; what is in use is refused otherwise (`mmdgs.folders`)."""
        if self.work.is_symlink():
            raise UsageError(f"{self.work} is a link; remove it, or use another name")
        begun, hidden = self.record.exists(), (self.work, half_written(self.record))
        return begin(self.path, begun=begun, resume=resume, overwrite=overwrite, hidden=hidden)

    def begin(self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Start, or go on: refused where there is something else, or a run with other settings."""
        resumed = self.check(resume=resume, overwrite=overwrite)
        if resumed:
            record = read_json(self.record)
            if record.get(KIND) != FORMAT:
                raise UsageError(f"{self.record} is no record of samples; use another name")
            require_same(self.path, record.get("settings"), settings)
        elif overwrite:
            self._clear()
        self.work.mkdir(parents=True, exist_ok=True)
        for file in [*self.work.glob(".?*.*"), half_written(self.path), half_written(self.record)]:
            remove(file)
        if not resumed:
            self._sweep()  # without a record nobody knows what a part belongs to
            write_atomically(
                self.record, to_json({KIND: FORMAT, "finished": False, "settings": settings})
            )

    def write(self, first: int, images: Any, missing: set[int], note: Mapping[str, Any]) -> None:
        """Write a batch of images, and first the note that goes with it: what is there has one."""
        try:
            write_atomically(self.work / f"{numbered(first)}.json", to_json(note))
            self._write(first, images, missing)
        except OSError as error:
            raise OSError(
                f"the images from {first} on could not be written into {self.path} "
                f"({error.strerror or error}); those before are whole. Free room and use --resume"
            ) from error

    def notes(self) -> list[dict[str, Any]]:
        """The notes of all batches that were written since the run began."""
        return [_checked_note(file) for file in sorted(self.work.glob("[0-9]*.json"))]

    def finish(self, count: int, record: Mapping[str, Any]) -> None:
        """Everything is there: the final form, the record, and an end to the hidden folder."""
        self._assemble(count)
        write_atomically(self.record, to_json({KIND: FORMAT, "finished": True, **record}))
        self._sweep()

    def finished(self) -> dict[str, Any] | None:
        """The record of a run that is done and still whole; what a kill left of its work goes."""
        record = read_json(self.record) if self.record.exists() else {}
        if record.get("finished") is not True:
            return None
        with reading(self.record, "a record of samples"):
            count = record["settings"]["count"]
            if len(self.present(count)) != count:
                return None
        self._sweep()
        return record

    def _sweep(self) -> None:
        """Empty the hidden folder, which another process may do at the same time."""
        for file in self.work.glob("*") if self.work.is_dir() else ():
            if file.name != LOCK:
                with contextlib.suppress(FileNotFoundError):
                    remove(file)


class FolderDestination(Destination):
    """A folder with its record, and the hidden folder of its parts inside it."""

    def __init__(self, path: Path, record: str) -> None:
        refuse_file(path)
        super().__init__(path, path / record, path / f".{PARTS}")

    @abc.abstractmethod
    def _results(self) -> Iterable[Path]:
        """Files and folders of results that an earlier run left."""

    def _clear(self) -> None:
        for path in [*self._results(), self.record, self.work]:
            remove(path)


class PictureFolder(FolderDestination):
    """PNG files 000000.png, 000001.png ... in a folder, with samples.json."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, RECORD)

    def _files(self) -> dict[int, Path]:
        files = [(PICTURE.fullmatch(file.name), file) for file in self.path.iterdir()]
        return {int(name[1]): file for name, file in files if name}

    def present(self, count: int) -> set[int]:
        return {number for number in self._files() if number < count}

    def _write(self, first: int, images: Tensor, missing: set[int]) -> None:
        for number, image in enumerate(to_uint8(images), first):
            if number in missing:
                write_picture(self.path, numbered(number), image)

    def _assemble(self, count: int) -> None:
        """The files are what was asked for."""

    def _results(self) -> Iterable[Path]:
        return self._files().values()


class ArrayFile(Destination):
    """One .npz with the samples as one array; its record is NAME.samples.json.

    Pixels are `arr_0`, uint8 (n, height, width, channels), as public evaluators read them. Else the
    samples are `x`, float32 (n, ...), not clipped.
    """

    def __init__(self, path: Path, shape: Sequence[int] = (), *, pixels: bool = False) -> None:
        record = path.with_suffix(f".{RECORD}")
        super().__init__(path, record, path.with_name(f".{path.name}.{PARTS}"))
        self.pixels = pixels
        self.name, self.type = ("arr_0", "|u1") if pixels else ("x", "<f4")
        self.shape = (*shape[1:], *shape[:1]) if pixels else tuple(shape)  # of a stored sample

    def _parts(self, count: int) -> Iterator[tuple[int, numpy.ndarray]]:
        """(the first number, the samples) of each part that was written whole, in order."""
        files = [(PART.fullmatch(file.name), file) for file in self.work.glob("*.npy")]
        numbers = sorted((int(name[1]), int(name[2]), file) for name, file in files if name)
        for first, samples, file in numbers:
            if 0 < samples <= count - first:
                part = read_part(file, (samples, *self.shape), self.type)
                if part is not None:
                    yield first, part

    def _in_order(self, count: int) -> Iterator[numpy.ndarray]:
        """All samples, part by part; parts of another batch size may overlap."""
        done = 0
        for first, part in self._parts(count):
            if first <= done < first + len(part):
                yield part[done - first :]
                done = first + len(part)
        if done < count:
            raise UsageError(f"the samples from {done} on in {self.work} are damaged; use --resume")

    def present(self, count: int) -> set[int]:
        if self.path.exists():
            return set(range(count))
        parts = [range(first, first + len(part)) for first, part in self._parts(count)]
        return {number for part in parts for number in part}

    def _write(self, first: int, images: Tensor, missing: set[int]) -> None:
        stored = to_uint8(images).permute(0, 2, 3, 1) if self.pixels else images.float()
        name = f"{numbered(first)}-{numbered(len(images))}.npy"
        with file_written_atomically(self.work / name) as stream:
            numpy.save(stream, stored.numpy())

    def _assemble(self, count: int) -> None:
        if self.path.exists():  # its record alone was lost
            return
        with (
            file_written_atomically(self.path) as stream,
            zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            # Without a time, so that the same samples are the same bytes.
            entry = zipfile.ZipInfo(f"{self.name}.npy")
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as array:
                head = {"descr": self.type, "fortran_order": False, "shape": (count, *self.shape)}
                numpy.lib.format.write_array_header_1_0(array, head)
                for part in self._in_order(count):
                    array.write(part.tobytes())

    def _clear(self) -> None:
        for file in (self.path, self.record):
            file.unlink(missing_ok=True)
        self._sweep()


class PictureFile(ArrayFile):
    """One PNG picture of all images, as a grid; its record is NAME.png.samples.json."""

    def __init__(self, path: Path, shape: Sequence[int] = ()) -> None:
        super().__init__(path, shape, pixels=True)
        self.record = path.with_name(f"{path.name}.{RECORD}")

    def _assemble(self, count: int) -> None:
        if not self.path.exists():
            pixels = torch.from_numpy(numpy.concatenate(list(self._in_order(count))))
            save_grid(self.path, pixels.permute(0, 3, 1, 2) / 255)


def destination(path: Path, shape: Sequence[int] = (), *, pixels: bool = False) -> Destination:
    """An .npz of samples of a shape, of 8-bit pixels or else of floats; a .png of all; a folder."""
    if path.suffix.lower() == ".png" and not path.is_dir():
        require_parent(path)
        return PictureFile(path, shape)
    if path.suffix.lower() == ".npz":
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give a file, or a folder not named .npz")
        require_parent(path)
        return ArrayFile(path, shape, pixels=pixels)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; give a folder, or a name that ends in .npz or .png")
    return PictureFolder(path)


def numbered(number: int) -> str:
    return f"{number:0{DIGITS}}"


def read_part(file: Path, shape: Sequence[int], dtype: Any) -> numpy.ndarray | None:
    """A part of a run as it was written, an array of finite numbers of a shape and type.

    None where there is none, or a damaged one, which is then made again. No more is read than the
    shape says.
    """
    if not file.is_file():
        return None
    try:
        part = numpy.load(file, mmap_mode="r")
        expected = tuple(shape), numpy.dtype(dtype)
        if not isinstance(part, numpy.ndarray) or (part.shape, part.dtype) != expected:
            raise ValueError("it holds something else")
        if not numpy.isfinite(part).all():
            raise ValueError("it holds numbers that are not finite")
        return numpy.array(part)
    except Exception as error:  # numpy has one of another kind for each kind of damage
        logger.warning("%s is damaged (%s); what it held is made again", file, first_line(error))
        return None


def _checked_note(file: Path) -> dict[str, Any]:
    """The note of a finished part: numbers by name."""
    note = read_json(file)
    numbers = [value for value in note.values() if type(value) in (int, float)]
    if len(numbers) != len(note) or not note or not all(abs(n) < MOST_NOTED for n in numbers):
        raise UsageError(f"{file} is a damaged note of a run; start anew with --overwrite")
    return note


def write_picture(folder: Path, name: str, image: Tensor) -> None:
    """Write an 8-bit image (C, H, W) as NAME.png."""
    picture = image[0] if len(image) == 1 else image.permute(1, 2, 0)
    write_atomically(folder / f"{name}.png", png(picture.numpy()))
