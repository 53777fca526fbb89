"""The tensors of a TorchScript file, read without running it.

A TorchScript file is a zip: NAME/code holds programs, NAME/data.pkl the tree of modules with their attributes, and
NAME/data/KEY the numbers of each tensor. torch.jit.load compiles and runs those programs, which can write files. Here
the code is not opened. The tree is a pickle, and its unpickler answers every name with an inert stand-in.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class NotReadable(Exception):  # noqa: N818  a finding, which the caller turns into an error with its advice
    """A file that is not TorchScript of plain tensors; the text says why."""


class _Module:
    """A module of the tree: keeps its attributes and has no methods of its own."""

    attributes: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        # Without this method a pickle could set any attribute of the object.
        self.attributes = state if isinstance(state, dict) else {}


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    if not isinstance(storage, Tensor):
        raise NotReadable("a tensor without a storage")
    return storage.as_strided(size, stride, offset)  # torch refuses what reaches beyond the storage


def _first(values: Any, *_: Any) -> Any:
    return values


def _empty(*_: Any) -> dict[Any, Any]:
    return {}


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, name: str) -> None:
        super().__init__(io.BytesIO(_stored(archive, f"{name}/data.pkl")))
        self.archive, self.folder = archive, f"{name}/data"
        self.storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "__torch__":
            return _Module
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module == "torch.jit._pickle":  # typed lists, such as build_intlist
            return _first
        known = {("torch._utils", "_rebuild_tensor_v2"): _tensor, ("collections", "OrderedDict"): _empty}
        if (module, name) not in known:
            raise NotReadable(f"it asks for {module}.{name}, which is refused; nothing in it was run")
        return known[module, name]

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, key = pid[:3]
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise NotReadable(f"it refers to {kind!r}, expected the storage of a tensor")
        if key not in self.storages:
            content = bytearray(_stored(self.archive, f"{self.folder}/{key}"))
            self.storages[key] = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return self.storages[key]


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member of the zip. TorchScript does not compress, so none can be larger than the file."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise NotReadable(f"{name} is compressed, which TorchScript files are not")
    return archive.read(name)


def is_torchscript(path: Path) -> bool:
    """Whether a file is TorchScript. State dicts are zips too, but only TorchScript has code and constants."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in name or name.endswith("/constants.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def script_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a TorchScript file by their dotted names, in the order of the modules' attributes."""
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl"))
            root = _Unpickler(archive, pickled.removesuffix("/data.pkl")).load()
        return dict(_walked(root, "", set()))
    except NotReadable:
        raise
    except Exception as error:  # damaged zips and pickles raise nearly anything
        raise NotReadable(str(error) or type(error).__name__) from error


def _walked(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, _Module) and id(value) not in seen:  # shared modules count once, which also ends circles
        seen.add(id(value))
        for key, attribute in value.attributes.items():
            yield from _walked(attribute, f"{name}.{key}" if name else str(key), seen)
