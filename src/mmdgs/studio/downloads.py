"""Files for download: each in a folder of its own under the studio's, which is emptied of what is old."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from mmdgs.data import to_uint8
from mmdgs.data.pictures import png

AGE, EVERY = 1800.0, 60.0
"""Seconds after which files are deleted, and between two looks."""
MOST = 1_000_000_000
"""Bytes that the folder may hold; beyond them the oldest files are deleted at the next look."""


def npz(arrays: Mapping[str, Any]) -> bytes:
    """Arrays by name as the bytes of an .npz."""
    content = io.BytesIO()
    numpy.savez_compressed(content, **{name: numpy.asarray(value) for name, value in arrays.items()})  # type: ignore[arg-type]
    return content.getvalue()


def npy(array: Any) -> bytes:
    """An array as the bytes of an .npy."""
    content = io.BytesIO()
    numpy.save(content, numpy.asarray(array))
    return content.getvalue()


def stored_png(stored: numpy.ndarray) -> bytes:
    """A stored image (C, H, W) as a PNG; one in 8 bits decodes to the same."""
    if stored.dtype != numpy.uint8:
        stored = to_uint8(torch.from_numpy(stored)).numpy()
    return png(numpy.ascontiguousarray(stored[0] if len(stored) == 1 else stored.transpose(1, 2, 0)))


def bundle(name: str, files: Mapping[str, bytes]) -> bytes:
    """Files by name as one zip, in a folder of this name."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, held in files.items():
            archive.writestr(zipfile.ZipInfo(f"{name}/{file}", (2020, 1, 1, 0, 0, 0)), held)
    return content.getvalue()


class Folder:
    """The studio's own folder: everything that is served lies in it, and it goes when the studio ends.

    A visitor sees and names their own files in it, and those that every page begins with.
    """

    def __init__(self) -> None:
        self._held = tempfile.TemporaryDirectory(prefix="mmdgs-studio-")
        self.path = Path(self._held.name).resolve()
        self._end = threading.Event()
        self._stays: set[Path] = set()
        self._pages: set[str] = set()
        self._owned: set[tuple[str, str]] = set()

    def put(self, name: str, content: bytes) -> str:
        """Write a file, and return its path."""
        place = Path(tempfile.mkdtemp(dir=self.path)) / name
        place.write_bytes(content)
        return str(place)

    def keep(self) -> None:
        """What is there now stays, for every visitor: pictures that every page begins with."""
        self._stays = set(self.path.iterdir())
        self._pages = {str(file) for file in self.path.rglob("*")}

    def give(self, visitor: str, path: str) -> None:
        """A file becomes a visitor's: they uploaded it, or it was made for them."""
        self._owned.add((visitor, path))

    def holds(self, visitor: str, path: str) -> bool:
        """Whether a path is a file of this visitor. Nothing is asked of the disk."""
        return path in self._pages or (visitor, path) in self._owned

    def empty(self, age: float = AGE, most: int = MOST) -> None:
        """Delete what was last written so many seconds ago, and the oldest where there are more bytes than allowed."""
        before, total = time.time() - age, 0
        for written, size, entry in sorted(self._written(), reverse=True):
            total += size
            if written < before or total > most:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
        self._owned -= {(visitor, path) for visitor, path in list(self._owned) if not Path(path).exists()}

    def _written(self) -> Iterator[tuple[float, int, Path]]:
        """When each entry was last written, and its bytes."""
        for entry in set(self.path.iterdir()) - self._stays:
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                parts = [part.stat() for part in (entry, *entry.rglob("*"))]
                yield max(part.st_mtime for part in parts), sum(part.st_size for part in parts), entry

    def watch(self) -> None:
        """Empty it again and again, in a thread, until it is closed."""

        def work() -> None:
            while not self._end.wait(EVERY):
                self.empty()

        threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self._end.set()
        self._held.cleanup()
