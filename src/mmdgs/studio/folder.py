"""Files for download, each in a folder of its own under the studio's; old ones are deleted."""

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


def encoded(name: str, content: Any) -> bytes:
    """A file's bytes: of a uint8 picture, an array (.npy), arrays by name (.npz), or of bytes."""
    stream = io.BytesIO()
    if isinstance(content, bytes):
        return content
    if name.endswith(".png"):
        return png(content)
    if name.endswith(".npy"):
        numpy.save(stream, content)
    else:
        numpy.savez_compressed(stream, **content)
    return stream.getvalue()


def stored_picture(stored: numpy.ndarray) -> numpy.ndarray:
    """A stored image (C, H, W) as a picture; of one in 8 bits the same numbers."""
    if stored.dtype != numpy.uint8:
        stored = to_uint8(torch.from_numpy(stored)).numpy()
    return numpy.ascontiguousarray(stored[0] if len(stored) == 1 else stored.transpose(1, 2, 0))


def bundle(name: str, files: Mapping[str, Any], lines: tuple[str, str] | None = None) -> bytes:
    """Files as a zip with a folder of this name, and the lines of Python and shell to make them."""
    again = dict(zip(("again.py", "again.txt"), lines or (), strict=False))
    files = {**files, **{file: f"{text}\n".encode() for file, text in again.items()}}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in files.items():
            info = zipfile.ZipInfo(f"{name}/{file}", (2020, 1, 1, 0, 0, 0))
            archive.writestr(info, encoded(file, content))
    return stream.getvalue()


class Folder:
    """The studio's own folder: all that is served lies in it, and it goes when the studio ends.

    A visitor sees and names their own files in it, and those that every page begins with.
    """

    def __init__(self) -> None:
        self._held = tempfile.TemporaryDirectory(prefix="mmdgs-studio-")
        self.path = Path(self._held.name).resolve()
        self._end = threading.Event()
        self._stays: set[Path] = set()
        self._owned: set[tuple[str, str]] = set()

    def put(self, name: str, content: bytes) -> str:
        """Write a file, and return its path."""
        path = Path(tempfile.mkdtemp(dir=self.path)) / name
        path.write_bytes(content)
        return str(path)

    def keep(self) -> None:
        """What is there now stays, for every visitor: pictures that every page begins with."""
        self._stays = set(self.path.rglob("*"))

    def give(self, visitor: str, path: str) -> None:
        """A file becomes a visitor's: they uploaded it, or it was made for them."""
        self._owned.add((visitor, path))

    def holds(self, visitor: str, path: str) -> bool:
        """Whether a path is a file of this visitor. Nothing is asked of the disk."""
        return (visitor, path) in self._owned or path in map(str, self._stays)

    def empty(self, age: float = AGE, most: int = MOST) -> None:
        """Delete what was last written `age` seconds ago, and the oldest beyond `most` bytes."""
        before, total = time.time() - age, 0
        for written, size, entry in sorted(self._written(), reverse=True):
            total += size
            if written < before or total > most:
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
        self._owned -= {pair for pair in list(self._owned) if not Path(pair[1]).exists()}

    def _written(self) -> Iterator[tuple[float, int, Path]]:
        """When each entry was last written, and its bytes."""
        for entry in set(self.path.iterdir()) - self._stays:
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                parts = [part.stat() for part in (entry, *entry.rglob("*"))]
                size = sum(part.st_size for part in parts)
                yield max(part.st_mtime for part in parts), size, entry

    def watch(self) -> None:
        """Empty it again and again, in a thread, until it is closed."""

        def work() -> None:
            while not self._end.wait(EVERY):
                self.empty()

        threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self._end.set()
        self._held.cleanup()
