"""Files: written whole or not at all, folders locked against a second run, JSON and safetensors read with care."""

from __future__ import annotations

import contextlib
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
    ".bmp", ".csv", ".gif", ".htm", ".html", ".jpeg", ".jpg", ".json", ".npy", ".npz", ".pdf", ".png", ".pt", ".pth",
    ".safetensors", ".tif", ".tiff", ".webp", ".yaml", ".zip",
)  # fmt: skip
"""Endings that no new folder has."""
REPLACED = ".mmdgs-old"
"""How a folder ends while another takes its place."""


def half_written(path: Path) -> Path:
    """Where `path` is written until it is whole; a killed run leaves it, and the next that writes `path` takes it."""
    return path.with_name(f".{path.name}{TEMPORARY}")


@contextlib.contextmanager
def file_written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path` to write into; it gets its name when the block ends, or vanishes if it fails."""
    if path.is_dir() and not path.is_symlink():
        raise UsageError(f"{path} is a folder, in the place of a file that is to be written; remove it")
    handle, temporary = _temporary_file(path)
    try:
        with os.fdopen(handle, "wb") as stream:
            try:
                yield stream
            except OSError as error:
                if error.errno is None:  # numpy says how much it has written, not why it stopped there
                    _write_more(stream)
                raise
            stream.flush()
            os.fsync(stream.fileno())
            if fcntl is not None:  # the lock is held until the file has its name
                temporary.replace(path)
        if fcntl is None:
            temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error  # such as a full disk
        raise


def _write_more(stream: BinaryIO) -> None:
    """Write to a file that could not be written: the system then says why, such as a full disk."""
    stream.write(bytes(1 << 16))
    stream.flush()
    os.fsync(stream.fileno())


def _temporary_file(path: Path) -> tuple[int, Path]:
    """An empty file to write `path` in, and its name; what a killed run left of it is used again."""
    temporary = half_written(path)
    if fcntl is not None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, handle)
            if _taken(handle, temporary) and os.fstat(handle).st_nlink == 1:
                os.ftruncate(handle, 0)
                os.fchmod(handle, 0o644)
                stack.pop_all()
                return handle, temporary
    # Another process writes the same file just now, or files cannot be locked here.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
    Path(name).chmod(0o644)  # mkstemp makes files that others cannot read
    return handle, Path(name)


def _taken(handle: int, path: Path) -> bool:
    """Lock an open file or folder for this process; False where another has it, or has given it another name."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with file_written_atomically(path) as stream:
        stream.write(content)


@contextlib.contextmanager
def folder_written_atomically(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` to write into; it gets its name when the block ends, or vanishes if it fails."""
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
    """An empty folder to write `path` in, gone at the end; what a killed run left in it is removed."""
    temporary = half_written(path)
    with contextlib.ExitStack() as stack:
        try:
            _hold(temporary, stack)
            for left in temporary.iterdir():
                remove(left)
        except OSError:  # another process writes the same folder just now, or folders cannot be locked here
            temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY))
            temporary.chmod(0o755)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _hold(folder: Path, stack: contextlib.ExitStack) -> None:
    """Make a folder if need be, and hold it for this process until the stack ends; OSError where that cannot be."""
    if fcntl is None:
        raise OSError("folders cannot be locked here")
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    stack.callback(os.close, handle)
    if not _taken(handle, folder):
        raise FileExistsError(folder)


def put_back(path: Path) -> None:
    """Undo a replacement of a folder that a kill cut short between its two renames, or remove what it left."""
    old = path.with_name(f".{path.name}{REPLACED}")
    if old.is_dir() and not path.exists():
        old.rename(path)
    elif old.is_dir():
        with contextlib.suppress(OSError):
            remove(old)


@contextlib.contextmanager
def files_written_together(folder: Path, *, last: str) -> Iterator[Path]:
    """A temporary folder whose files go into `folder` when the block ends, or vanish if it fails.

    A new folder gets its name with all files in it. Into one that is there they are moved one after the other, `last`
    at the end, when all are written: a full disk changes nothing.
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


@contextlib.contextmanager
def opened(path: Path, most: int | None = None) -> Iterator[BinaryIO]:
    """A file to read bytes from. Every file from elsewhere is opened here: only regular ones, no larger than `most`."""
    with reading(path, "a file that can be read"):
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # of a folder the system says so itself
            raise UsageError(f"{path} is a pipe, a device or a socket; expected a regular file")
        if most is not None and path.stat().st_size > most:
            raise UsageError(f"{path} has {path.stat().st_size:,} bytes, more than the limit of {most:,}")
        stream = path.open("rb")
    with stream:
        yield stream


def read_file(path: Path, most: int | None = None) -> bytes:
    """The bytes of a file; with `most`, one that has more is refused before it is read."""
    with reading(path, "a file that can be read"), opened(path, most) as stream:
        return stream.read()


@contextlib.contextmanager
def npz_opened(path: Path) -> Iterator[Any]:
    """The arrays of an .npz by name (`numpy.lib.npyio.NpzFile`), none larger than its bytes allow; nothing is run."""
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
    """A safetensors file whose tensors are read one by one (`safetensors.safe_open`); its header is checked first."""
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
    """The bytes of a safetensors file, whose header says that there are so many."""
    with tensors_opened(path):
        pass
    return read_file(path)


def read_npy(path: Path, most: int | None = None) -> Any:
    """The array of a .npy file, of as many numbers as the file has bytes for, and at most so many."""
    from numpy.lib import format as npy

    with reading(path, "a .npy array"), opened(path) as stream:
        if stream.read(2) == b"PK":
            raise UsageError(f"{path} is an .npz, whatever its name; rename it to {path.stem}.npz")
        stream.seek(0)
        version = npy.read_magic(stream)
        header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if header is None:
            raise UsageError(f"{path} is of version {version} of the format, which arrays of numbers do not need")
        shape, _, kind = header(stream)
        count, held = math.prod(shape), path.stat().st_size - stream.tell()
        if most is not None and count > most:
            raise UsageError(f"{path} holds {count:,} numbers {shape}, more than the limit of {most:,}")
        if count * kind.itemsize != held:
            raise UsageError(
                f"{path} is damaged: {shape} {kind} takes {count * kind.itemsize:,} bytes, it has {held:,}"
            )
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
    """Hold a folder for this process, until it ends, however it ends: a second run into it is refused."""
    if (folder / LOCK).is_symlink():
        raise UsageError(f"{folder / LOCK} is a link; remove it: the lock of a folder lies in it")
    try:
        held = FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout as error:
        raise UsageError(f"another run is writing into {folder}; wait for it, or choose another folder") from error
    with held:
        yield


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """A folder, made with its parents if need be; of those that were made, the ones left empty are removed."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # it is not empty, or gone
                path.rmdir()


def refuse_file(folder: Path) -> None:
    """Refuse a file in the place of an output folder, and a new folder with the name of a file."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"the output {folder} is a file; give a folder")
    if not folder.exists() and folder.suffix.lower() in FILE_NAMES:
        raise UsageError(f"the output is a folder, and {folder.name} is the name of a file: leave {folder.suffix} out")


def require_parent(path: Path) -> None:
    """Refuse an output file in a folder that is not there."""
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} into")


def _refuse_links(folder: Path) -> None:
    """Refuse links to folders in an output folder: what is written or removed below them lies elsewhere."""
    for path in folder.iterdir():
        if path.is_symlink() and path.is_dir():
            raise UsageError(
                f"{path} is a link to another folder, where nothing is written or removed; remove the link, or choose "
                "another output folder"
            )


@contextlib.contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """A folder to write into, made if need be and locked; one that was made here and is left empty is removed."""
    refuse_file(folder)
    new = not folder.exists()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(made(folder))
            stack.enter_context(locked(folder))
        except OSError as error:
            raise UsageError(f"cannot write in the output folder {folder}: {error.strerror or error}") from error
        _refuse_links(folder)
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
    """Whether an output folder is absent or empty; a file in its place, and what must stay, are refused."""
    refuse_file(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return True
    if not overwrite:
        raise UsageError(f"the output folder {folder} is not empty; use --overwrite, or another folder")
    return False


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that holds nothing, or a lock alone."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK}:
        shutil.rmtree(folder)
