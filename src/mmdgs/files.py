"""Files: written whole or not at all, folders locked against a second run, JSON and safetensors read with care."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor

from mmdgs.errors import UsageError

LOCK = ".lock"


@contextlib.contextmanager
def file_written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path` to write into; it gets its name when the block ends, or vanishes if it fails."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)  # noqa: PTH101  mkstemp makes files that others cannot read
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with file_written_atomically(path) as stream:
        stream.write(content)


@contextlib.contextmanager
def folder_written_atomically(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` to write into; it gets its name when the block ends, or vanishes if it fails."""
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.chmod(0o755)
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def to_json(content: Mapping[str, Any]) -> bytes:
    """JSON for people to read too."""
    return (json.dumps(content, indent=1, allow_nan=True) + "\n").encode()


def read_file(path: Path) -> bytes:
    """The bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    text = read_file(path)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    content = read_file(path)
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise UsageError(f"{path} is not a whole safetensors file: {error}") from error


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
    try:
        held = FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout as error:
        raise UsageError(f"another run is writing into {folder}; wait for it, or choose another folder") from error
    with held:
        yield


@contextlib.contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """A folder to write into, made if need be and locked; one that was made here and is left empty is removed."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"the output {folder} is a file; give a folder")
    new = not folder.exists()
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
        except OSError as error:
            raise UsageError(f"cannot write in the output folder {folder}: {error.strerror or error}") from error
        try:
            yield
        finally:
            if new:
                remove_if_empty(folder)


def holds_nothing(folder: Path, overwrite: bool) -> bool:
    """Whether an output folder is absent or empty; a file in its place, and what must stay, are refused."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"the output {folder} is a file; give a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return True
    if not overwrite:
        raise UsageError(f"the output folder {folder} is not empty; use --overwrite, or another folder")
    return False


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that holds nothing, or a lock alone."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK}:
        shutil.rmtree(folder)
