"""Checkpoints of others, as torch.save writes them: read for their tensors, and nothing in them is run."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.files import opened
from mmdgs.reading import reading


def read_checkpoint(path: Path) -> Any:
    """What torch.save wrote, on the CPU: containers, numbers, text and tensors; a pickle that asks for more is refused.

    Nothing in it is run. Old files (before torch 1.6) and new ones alike. Tensors hold no more numbers than are stored:
    a stride of 0 would make some bytes stand for gigabytes.
    """
    with (
        opened(path) as stream,
        reading(path, "a checkpoint of torch"),
        warnings.catch_warnings(),  # of unusual protocols, which are read or refused
    ):
        warnings.simplefilter("ignore")
        size = path.stat().st_size
        _check_members(stream, size, path)
        try:
            found = torch.load(stream, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = next((line for line in str(error).splitlines() if "nsupported" in line), "it is no plain pickle")
            raise UsageError(
                f"{path} is refused, and nothing in it was run: it holds more than tensors, or is damaged "
                f"({reason.strip()}); only a checkpoint of plain tensors is read"
            ) from error
        _check_stored(found, size, path)
    return found


def _check_members(stream: BinaryIO, size: int, path: Path) -> None:
    """torch does not compress, so that no member of its zip is larger than the file."""
    start = stream.read(2)
    stream.seek(0)
    if start != b"PK":
        return
    with zipfile.ZipFile(stream) as archive:
        total = sum(member.file_size for member in archive.infolist())
    if total > size:
        raise UsageError(f"{path} declares {total:,} bytes and has {size:,}: compressed checkpoints are not read")
    stream.seek(0)


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
