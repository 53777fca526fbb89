"""The tensors of a TorchScript file, read without running it.

A TorchScript file is a zip: NAME/code holds programs, NAME/data.pkl the tree of modules with their attributes, and
NAME/data/KEY the numbers of each tensor. torch.jit.load compiles and runs those programs, which can write files. Here
the code is not opened, and the tree, a pickle, is read with inert stand-ins for all objects.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdgs.data.pickles import Inert, read_inert
from mmdgs.files import opened

TENSOR = "torch._utils._rebuild_tensor_v2"
STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


class NotReadable(Exception):  # noqa: N818  a finding, which the caller turns into an error with its advice
    """A file that is not TorchScript of plain tensors; the text says why."""


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member of the zip. TorchScript does not compress, so none can be larger than the file."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise NotReadable(f"{name} is compressed, which TorchScript files are not")
    return archive.read(name)


def is_torchscript(path: Path) -> bool:
    """Whether a file is TorchScript. State dicts are zips too, but only TorchScript has code and constants."""
    try:
        with opened(path) as stream, zipfile.ZipFile(stream) as archive:
            return any("/code/" in name or name.endswith("/constants.pkl") for name in archive.namelist())
    except Exception:  # a damaged zip raises nearly anything
        return False


def script_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a TorchScript file by their dotted names, in the order of the modules' attributes."""
    try:
        with opened(path) as stream, zipfile.ZipFile(stream) as archive:
            (tree,) = (name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl"))
            root = read_inert(_stored(archive, tree), _admits)
            read = cache(lambda key: bytearray(_stored(archive, f"{tree.removesuffix('.pkl')}/{key}")))
            return {name: _tensor(read, *value.args) for name, value in _walked(root, "", set())}
    except NotReadable:
        raise
    except Exception as error:  # damaged zips and pickles raise nearly anything
        raise NotReadable(str(error) or type(error).__name__) from error


def _admits(name: str) -> bool:
    """Modules of the script, tensors and their storages, and the containers that torch writes."""
    known = (TENSOR, "collections.OrderedDict", *STORAGES)
    return name in known or name.startswith(("__torch__.", "torch.jit._pickle."))


def _walked(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Inert]]:
    """Names and stand-ins of tensors. Shared modules count once, which also ends circles."""
    if not isinstance(value, Inert) or id(value) in seen:
        return
    if value.name == TENSOR:
        yield name, value
    elif value.name.startswith("__torch__.") and isinstance(value.state, dict):
        seen.add(id(value))
        for key, attribute in value.state.items():
            if isinstance(key, str):
                yield from _walked(attribute, f"{name}.{key}" if name else key, seen)


def _tensor(
    read: Callable[[str], bytearray], storage: Inert, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any
) -> Tensor:
    kind, storage_type, key = storage.args[0][:3]
    if kind != "storage":
        raise NotReadable(f"it refers to {kind!r}, expected the storage of a tensor")
    dtype = STORAGES[storage_type.name]
    numbers = torch.frombuffer(read(key), dtype=dtype) if read(key) else torch.empty(0, dtype=dtype)
    if math.prod(size) > numbers.numel():
        raise NotReadable(f"a tensor of {math.prod(size):,} numbers from {numbers.numel():,} (a stride of 0?)")
    return numbers.as_strided(size, stride, offset)  # torch refuses what reaches beyond the storage
