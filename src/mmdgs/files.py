"""Files written whole or not at all, folders locked against a second run, safe readers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.reading import MOST_JSON, MOST_TEXT, check_unpacked, parse_json, reading

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be renamed or removed
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
TEMPORARY = ".mmdgs-tmp"
"""How files and folders end that are not whole yet."""
FILE_NAMES = (
    ".bmp", ".csv", ".gif", ".htm", ".html", ".jpeg", ".jpg", ".json", ".npy", ".npz", ".pdf",
    ".png", ".pt", ".pth", ".safetensors", ".tif", ".tiff", ".webp", ".yaml", ".zip",
)  # fmt: skip
"""Endings that no new folder has."""
REPLACED = ".mmdgs-old"
"""How a folder ends while another takes its place."""


def half_written(path: Path) -> Path:
    """Where `path` is written until it is whole; what a killed run left there is used again."""
    return path.with_name(f".{path.name}{TEMPORARY}")


@contextlib.contextmanager
def file_written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A temporary file, which takes the place of `path` when the block ends without error."""
    if path.is_dir() and not path.is_symlink():
        raise UsageError(f"{path} is a folder in the place of a file to be written; remove it")
    try:
        with _temporary_folder(path) as folder:
            temporary = folder / path.name
            with temporary.open("wb") as stream:
                try:
                    yield stream
                except OSError as error:
                    if error.errno is None:  # of numpy: another write makes the system say why
                        stream.write(bytes(1 << 16))
                    stream.flush()
                    raise
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # such as a full disk
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with file_written_atomically(path) as stream:
        stream.write(content)


@contextlib.contextmanager
def folder_written_atomically(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, which gets its name when the block ends without error."""
    put_back(path)
    with _temporary_folder(path) as temporary:
        yield temporary
        try:
            if path.exists():
                path.rename(path.with_name(f".{path.name}{REPLACED}"))
            temporary.rename(path)
        finally:
            put_back(path)


@contextlib.contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` to write it in, gone at the end."""
    temporary = half_written(path)
    with contextlib.ExitStack() as stack:
        try:
            if fcntl is None:
                raise OSError("folders cannot be locked here")
            temporary.mkdir(exist_ok=True)
            stack.callback(os.close, handle := os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), temporary.lstat()):  # renamed meanwhile
                raise FileExistsError(temporary)
            for left in temporary.iterdir():
                remove(left)
        except OSError:  # another process writes it just now, or folders cannot be locked here
            name = tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
            temporary = Path(name)
            temporary.chmod(0o755)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def put_back(path: Path) -> None:
    """Undo, or clean up after, a replacement of a folder that a kill cut short."""
    old = path.with_name(f".{path.name}{REPLACED}")
    if old.is_dir() and not path.exists():
        old.rename(path)
    elif old.is_dir():
        with contextlib.suppress(OSError):
            remove(old)


@contextlib.contextmanager
def files_written_together(folder: Path, *, last: str) -> Iterator[Path]:
    """A temporary folder whose files go into `folder` when the block ends without error.

    A new folder gets its name with all files in it. Into one that is there they are moved when all
    are written, `last` at the end.
    """
    if not folder.exists():
        with folder_written_atomically(folder) as temporary:
            yield temporary
        return
    with _temporary_folder(folder / "files") as temporary:
        yield temporary
        for file in sorted(temporary.iterdir(), key=lambda file: (file.name == last, file.name)):
            file.replace(folder / file.name)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def to_json(content: Mapping[str, Any]) -> bytes:
    """JSON for people to read too."""
    return (json.dumps(content, indent=1, allow_nan=True) + "\n").encode()


def sha256_of(*parts: Any) -> str:
    """SHA-256 in hexadecimal digits of bytes one after the other; other parts as sorted JSON."""
    digest = hashlib.sha256()
    for part in parts:
        plain = isinstance(part, bytes | memoryview)
        digest.update(part if plain else json.dumps(part, sort_keys=True).encode())
    return digest.hexdigest()


@contextlib.contextmanager
def opened(path: Path, most: int | None = None) -> Iterator[BinaryIO]:
    """A file to read, of at most `most` bytes: all files from elsewhere are opened here."""
    with reading(path, "a file that can be read"):
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise UsageError(f"{path} is a pipe, a device or a socket; expected a regular file")
        if most is not None and status.st_size > most:
            raise UsageError(
                f"{path} has {status.st_size:,} bytes, more than the limit of {most:,}"
            )
        stream = path.open("rb")
    with stream:
        yield stream


def read_file(path: Path, most: int | None = None) -> bytes:
    """The bytes of a file of at most `most` bytes."""
    with reading(path, "a file that can be read"), opened(path, most) as stream:
        return stream.read()


@contextlib.contextmanager
def npz_opened(path: Path) -> Iterator[Any]:
    """The arrays of an .npz by name, none larger than its bytes allow; nothing is run."""
    import numpy

    # Not numpy.load: it reads a .npy and a pickle too, whatever their names.
    with (
        reading(path, "an .npz of arrays"),
        opened(path) as stream,
        numpy.lib.npyio.NpzFile(stream, allow_pickle=False) as archive,
    ):
        for member in archive.zip.infolist() if archive.zip else ():
            check_unpacked(f"{path}, {member.filename}", member.file_size, member.compress_size)
        yield archive


def read_text(path: Path) -> str:
    """The UTF-8 text of a small file: a card, a recipe."""
    with reading(path, "a text in UTF-8"):
        return read_file(path, MOST_TEXT).decode()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    content = parse_json(read_file(path, MOST_JSON), path)
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


@contextlib.contextmanager
def tensors_opened(path: Path) -> Iterator[Any]:
    """A safetensors file with a checked header (`safetensors.safe_open`)."""
    with reading(path, "a whole safetensors file"):
        with opened(path):  # refused where it is no regular file
            pass
        with safe_open(path, "pt") as stored:
            yield stored


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    content = read_tensor_bytes(path)
    with reading(path, "a whole safetensors file"):
        return load_tensors(content)


def read_tensor_bytes(path: Path) -> bytes:
    """The bytes of a safetensors file with a checked header."""
    with tensors_opened(path):
        return read_file(path)


def read_npy(path: Path, most: int | None = None) -> Any:
    """The array of a .npy file, of at most `most` numbers, all of which the file has."""
    from numpy.lib import format as npy

    with reading(path, "a .npy array"), opened(path) as stream:
        if stream.read(2) == b"PK":
            raise UsageError(f"{path} is an .npz, whatever its name; rename it to {path.stem}.npz")
        stream.seek(0)
        version = npy.read_magic(stream)
        header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if header is None:
            raise UsageError(f"{path} has version {version} of the format; expected 1.0 or 2.0")
        shape, _, kind = header(stream)
        count, held = math.prod(shape), path.stat().st_size - stream.tell()
        if most is not None and count > most:
            raise UsageError(f"{path} holds {count:,} numbers {shape}, more than {most:,}")
        if count * kind.itemsize != held:
            takes = f"{shape} {kind} takes {count * kind.itemsize:,} bytes"
            raise UsageError(f"{path} is damaged: {takes}, it has {held:,}")
        stream.seek(0)
        return npy.read_array(stream, allow_pickle=False)


def tensors_to_bytes(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> bytes:
    """Tensors as a safetensors file; floating-point ones in `dtype` if given."""
    prepared = {
        key: value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous()
        for key, value in tensors.items()
    }
    return save_tensors(prepared)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process: UsageError where another run has it."""
    if (folder / LOCK).is_symlink():
        raise UsageError(f"{folder / LOCK} is a link; remove it: the lock of a folder lies in it")
    try:
        held = FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout as error:
        busy = f"another run is writing into {folder}; wait for it, or choose another folder"
        raise UsageError(busy) from error
    with held:
        yield


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """A folder, made with its parents; of those made here, the ones left empty are removed."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # it is not empty, or gone
                path.rmdir()


def refuse_file(folder: Path) -> None:
    """UsageError for a file in place of an output folder, and a new folder named like a file."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"the output {folder} is a file; give a folder")
    if not folder.exists() and folder.suffix.lower() in FILE_NAMES:
        name = f"{folder.name} is the name of a file: leave {folder.suffix} out"
        raise UsageError(f"the output is a folder, and {name}")


def require_parent(path: Path) -> None:
    """UsageError for an output file in a folder that is not there."""
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} into")


@contextlib.contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """A folder to write into, made and locked; one made here and left empty is removed."""
    refuse_file(folder)
    new = not folder.exists()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(new_folder(folder))
            stack.enter_context(locked(folder))
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"cannot write in the output folder {folder}: {reason}") from error
        for path in folder.iterdir():  # nothing is written or removed elsewhere
            if path.is_symlink() and path.is_dir():
                raise UsageError(f"{path} is a link to another folder; remove the link")
        for old in [*folder.glob(f".*{REPLACED}"), *folder.glob(f"*/.*{REPLACED}")]:
            put_back(old.with_name(old.name.removesuffix(REPLACED)[1:]))
        for left in [*folder.glob(f".*{TEMPORARY}"), *folder.glob(f"*/.*{TEMPORARY}")]:
            remove(left)  # of a run that was killed: nobody else writes here now
        try:
            yield
        finally:
            if new:
                remove_if_empty(folder)


def holds_nothing(folder: Path, overwrite: bool) -> bool:
    """Whether an output folder is absent or empty; UsageError for what must stay."""
    refuse_file(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return True
    if not overwrite:
        used = f"the output folder {folder} is not empty"
        raise UsageError(f"{used}; use --overwrite, or another folder")
    return False


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that holds nothing, or a lock alone."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK}:
        shutil.rmtree(folder)
