"""The tensors of a TorchScript file, read without running it.

A TorchScript file is a zip: NAME/code holds programs, NAME/data.pkl the tree of modules with their
attributes, and NAME/data/KEY the numbers of each tensor. torch.jit.load runs those programs, which
can write files. Here the tree alone, a pickle, is read, with inert stand-ins for all objects.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdgs.data.pickles import Inert, read_inert
from mmdgs.files import opened
from mmdgs.reading import reading

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


def is_torchscript(path: Path) -> bool:
    """Whether a file is TorchScript: state dicts are zips too, without code and constants."""
    try:
        with opened(path) as stream, zipfile.ZipFile(stream) as archive:
            names = archive.namelist()
            return any("/code/" in name or name.endswith("/constants.pkl") for name in names)
    except Exception:  # a damaged zip raises nearly anything
        return False


def script_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a TorchScript file by their dotted names, in the modules' order."""
    with (
        reading(path, "TorchScript of plain tensors"),
        opened(path) as stream,
        zipfile.ZipFile(stream) as archive,
    ):

        @cache
        def stored(name: str) -> bytearray:
            # TorchScript does not compress, so no member can be larger than the file.
            if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is compressed, which TorchScript files are not")
            return bytearray(archive.read(name))

        trees = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        (tree,) = (name for name in trees if name.count("/") == 1)
        folder = tree.removesuffix(".pkl")
        root = read_inert(bytes(stored(tree)), _admits)
        tensors = _walked(root, "", set())
        return {name: _tensor(stored, folder, *value.args) for name, value in tensors}


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
    stored: Callable[[str], bytearray],
    folder: str,
    storage: Inert,
    offset: int,
    size: Any,
    stride: Any,
    *_: Any,
) -> Tensor:
    kind, storage_type, key = storage.args[0][:3]
    if kind != "storage":
        raise ValueError(f"it refers to {kind!r}, expected the storage of a tensor")
    dtype, content = STORAGES[storage_type.name], stored(f"{folder}/{key}")
    numbers = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    if math.prod(size) > numbers.numel():
        sizes = f"{math.prod(size):,} numbers from {numbers.numel():,}"
        raise ValueError(f"a tensor of {sizes} (a stride of 0?)")
    return numbers.as_strided(size, stride, offset)  # torch refuses what reaches beyond the storage
