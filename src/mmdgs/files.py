"""Files: written whole or not at all, folders locked against a second run, JSON and safetensors read with care."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.reading import MOST_JSON, MOST_TEXT, check_unpacked, parse_json, reading

LOCK = ".lock"
TEMPORARY = ".tmp"
"""How files end that are not whole yet."""


@contextlib.contextmanager
def file_written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path` to write into; it gets its name when the block ends, or vanishes if it fails."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
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


def read_file(path: Path, most: int | None = None) -> bytes:
    """The bytes of a file; with `most`, one that has more is refused before it is read."""
    with reading(path, "a file that can be read"):
        if most is not None and path.stat().st_size > most:
            raise UsageError(f"{path} has {path.stat().st_size:,} bytes, more than the limit of {most:,}")
        return path.read_bytes()


@contextlib.contextmanager
def npz_opened(path: Path) -> Iterator[Any]:
    """The arrays of an .npz by name (`numpy.lib.npyio.NpzFile`), none larger than its bytes allow; nothing is run."""
    import numpy

    # Not numpy.load: it reads a .npy and a pickle too, whatever their names.
    with (
        reading(path, "an .npz of arrays"),
        path.open("rb") as stream,
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


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    content = read_file(path)
    with reading(path, "a whole safetensors file"):
        return load_tensors(content)


def read_checkpoint(path: Path) -> Any:
    """What torch.save wrote, on the CPU: containers, numbers, text and tensors; a pickle that asks for more is refused.

    Nothing in it is run. Old files (before torch 1.6) and new ones alike. Tensors hold no more numbers than are stored:
    a stride of 0 would make some bytes stand for gigabytes.
    """
    content = read_file(path)
    expected = "a checkpoint of torch"
    with reading(path, expected), warnings.catch_warnings():  # of unusual protocols, which are read or refused
        warnings.simplefilter("ignore")
        _check_members(content, path)
        try:
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = next((line for line in str(error).splitlines() if "nsupported" in line), "it is no plain pickle")
            raise UsageError(
                f"{path} is refused, and nothing in it was run: it holds more than tensors, or is damaged "
                f"({reason.strip()}); only a checkpoint of plain tensors is read"
            ) from error
        _check_stored(found, len(content), path)
    return found


def _check_members(content: bytes, path: Path) -> None:
    """torch does not compress, so that no member of its zip is larger than the file."""
    if not content.startswith(b"PK"):
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        total = sum(member.file_size for member in archive.infolist())
    if total > len(content):
        raise UsageError(
            f"{path} declares {total:,} bytes and has {len(content):,}: compressed checkpoints are not read"
        )


def _check_stored(content: Any, size: int, path: Path) -> None:
    """Refuse tensors that are not plain, or that have more numbers than the file has room for."""
    total, held = 0, 0
    storages: set[int] = set()
    for tensor in _tensors_in(content):
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            raise UsageError(f"{path} holds a tensor that is sparse, quantised or without values; plain ones are read")
        stored = tensor.untyped_storage()
        held += 0 if stored.data_ptr() in storages else stored.nbytes()
        storages.add(stored.data_ptr())
        declared = tensor.numel() * tensor.element_size()
        total += declared
        if declared > stored.nbytes() or total > 4 * size or held > size:
            raise UsageError(
                f"{path} declares a tensor {tuple(tensor.shape)} of {declared:,} bytes, and the file has {size:,} for "
                "all: numbers that are repeated (a stride of 0) are not read"
            )


def _tensors_in(content: Any) -> Iterator[Tensor]:
    """The tensors in nested containers; what occurs several times is visited once."""
    waiting: list[Any] = [content]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            waiting += one


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
    """Refuse a file in the place of an output folder."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"the output {folder} is a file; give a folder")


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
        for file in [*folder.glob(f".*{TEMPORARY}"), *folder.glob(f"*/.*{TEMPORARY}")]:
            file.unlink(missing_ok=True)  # of a run that was killed: nobody else writes here now
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
