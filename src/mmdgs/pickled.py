"""Checkpoints as torch.save writes them: read for their tensors, and nothing in them is run."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.files import opened
from mmdgs.reading import reading


def read_checkpoint(path: Path) -> Any:
    """What torch.save wrote, on the CPU: containers, numbers, text and tensors, of any version.

    Tensors hold no more numbers than are stored: strides of 0 would make bytes stand for gigabytes.
    """
    with (
        opened(path) as stream,
        reading(path, "a checkpoint of torch"),
        warnings.catch_warnings(),  # of unusual protocols, which are read or refused
    ):
        warnings.simplefilter("ignore")
        size = path.stat().st_size
        if stream.read(2) == b"PK":
            with zipfile.ZipFile(stream) as archive:
                total = sum(member.file_size for member in archive.infolist())
            if total > size:  # torch does not compress
                raise UsageError(f"{path} is compressed, which is not read: {total:,} of {size:,}")
        stream.seek(0)
        try:
            content = torch.load(stream, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            lines = (line for line in str(error).splitlines() if "nsupported" in line)
            reason = next(lines, "it is no plain pickle").strip()
            raise UsageError(
                f"{path} is refused, and nothing in it was run: it holds more than plain tensors, "
                f"or is damaged ({reason})"
            ) from error
        _check_stored(content, size, path)
    return content


def named_tensors(content: Any, path: Path) -> dict[str, Tensor]:
    """A state of tensors by name, checked."""
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} is no dictionary of tensors, but a {type(content).__name__}")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise UsageError(f"{path} is no dictionary of tensors: {key!r} is {kind}")
    return dict(content)


def _check_stored(content: Any, size: int, path: Path) -> None:
    """UsageError for tensors that are not plain, or larger than the file."""
    total, held = 0, 0
    storages: set[int] = set()
    for tensor in _tensors_in(content):
        odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested
        if odd or tensor.device.type != "cpu":
            raise UsageError(f"{path} holds a sparse, quantised or empty tensor; use plain ones")
        stored = tensor.untyped_storage()
        held += 0 if stored.data_ptr() in storages else stored.nbytes()
        storages.add(stored.data_ptr())
        declared = tensor.numel() * tensor.element_size()
        total += declared
        if declared > stored.nbytes() or total > 4 * size or held > size:
            raise UsageError(
                f"{path} declares a tensor {tuple(tensor.shape)} of {declared:,} bytes, and the "
                f"file has {size:,} for all: repeated numbers (a stride of 0) are not read"
            )


def _tensors_in(content: Any) -> Iterator[Tensor]:
    """The tensors in nested containers; what occurs several times is visited once."""
    waiting: list[Any] = [content]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            waiting += item
