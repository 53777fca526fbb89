"""What a run is made from as a record: every number its results depend on, or a digest of many.

A run that goes on compares it with the record it began with: a plan, its estimator with all tables,
the model, an operator and its measurements, a start.

Numbers, names and short tuples stay as they are and dataclasses are written by their fields, so
that a comparison of two records can name what differs. Of all else a record has the start of a
SHA-256:

    tensors                     type, shape and bytes
    networks                    names and values of parameters and buffers, kinds and plain
                                attributes of their layers
    models                      what their method `identity` returns
    mappings, long sequences    their items
    functions                   the qualified name, defaults, and what they close over
    other objects               the type and the public attributes

and of functions, methods and classes that no library has the code too, with the values of the
globals it names.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

from mmdgs.files import sha256_of

if TYPE_CHECKING:
    from mmdgs.samplers import Plan

SHORT, DIGITS = 8, 16
"""Items of a sequence that is written out, and hexadecimal digits of a digest."""
PLAIN = bool | int | float | str
VALUES = PLAIN | tuple | list | dict | Tensor | numpy.ndarray | nn.Module | FunctionType
"""Globals of others' functions that are described by their values, others by their type alone."""


def plan_record(plan: Plan) -> dict[str, Any]:
    """The kernels of a plan by name with their settings, and a digest of order and levels."""
    describe = _Describer()
    kernels: dict[str, int] = {}
    walk = []
    for kernel, level, following in plan.steps:
        number = kernels.setdefault(json.dumps(describe(kernel)), len(kernels))
        walk.append([number, describe(level), describe(following)])
    record: dict[str, Any] = {"levels": _digest([describe(plan.start), walk])}
    for text in kernels:
        content = json.loads(text)
        name = content["kind"].rsplit(".", 1)[-1]
        same = sum(key.split(" ")[0] == name for key in record)
        record[f"{name} {same + 1}" if same else name] = content
    return record


def input_record(**inputs: Any) -> dict[str, Any]:
    """The record of tensors, operators, models, estimators and functions by name, as read back."""
    describe = _Describer()
    return json.loads(json.dumps({name: describe(value) for name, value in inputs.items()}))


def digest_of(*values: Any) -> str:
    """One digest of all that some values say."""
    return _digest([_Describer()(value) for value in values])


def _digest(content: object) -> str:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return sha256_of(data)[:DIGITS]


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether code is known by its name and version: mmdgs, Python's own, what was installed."""
    root = (module or "").partition(".")[0]
    folders = Path(getattr(sys.modules.get(root), "__file__", None) or "").parts
    installed = {"site-packages", "dist-packages"} & set(folders)
    return root in ("mmdgs", *sys.stdlib_module_names) or bool(installed)


def _instructions(code: CodeType) -> list[Any]:
    """Instructions and constants, those of inner functions too; not where they stand in a file."""
    constants = [_instructions(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames)]


def _names(code: CodeType) -> list[str]:
    """What a function names, and functions inside it."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _names(c)]
    return [*code.co_names, *inner]


class _Describer:
    """Values as JSON. What occurs several times is described once; inside itself it is cut."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[object, Any]] = {}  # the objects too, which keep their ids

    def __call__(self, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if value is None or isinstance(value, PLAIN):
            return value
        if isinstance(value, torch.dtype | Path):
            return str(value)
        if isinstance(value, torch.device):  # where numbers are does not change them
            return "device"
        if id(value) not in self.seen:
            self.seen[id(value)] = value, "itself"
            self.seen[id(value)] = value, self._described(value)
        return self.seen[id(value)][1]

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _digest(f"{value.dtype} {tuple(value.shape)} ".encode() + content.tobytes())
        if isinstance(value, numpy.ndarray | numpy.generic):
            return _digest(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
        if isinstance(value, nn.Module):
            return self._network(value)
        if isinstance(value, Mapping):
            pairs = ([self(key), self(item)] for key, item in value.items())
            return _digest(sorted(map(json.dumps, pairs)))
        if isinstance(value, Set):
            return _digest(sorted(json.dumps(self(item)) for item in value))
        if isinstance(value, Sequence):
            items = [self(item) for item in value]
            short = len(items) <= SHORT and not any(isinstance(item, dict | list) for item in items)
            return items if short else _digest(items)
        return self._function(value) or self._object(value)

    def _network(self, network: nn.Module) -> str:
        tensors = dict(network.named_parameters()) | dict(network.named_buffers())
        layers, kinds = [], {}
        for name, layer in network.named_modules():
            known = {key: item for key, item in vars(layer).items() if not key.startswith("_")}
            plain = {k: item for k, item in known.items() if isinstance(item, PLAIN | tuple)}
            layers.append([name, _name(type(layer)), self(plain)])
            kinds[type(layer)] = self._methods(type(layer))
        weights = [[name, self(tensors[name])] for name in sorted(tensors)]
        return _digest([layers, list(kinds.values()), weights])

    def _function(self, value: Any) -> str | None:
        """The digest of a function, a method, a partial or a class; None of other things."""
        if isinstance(value, functools.partial):
            return _digest([self(value.func), self(value.args), self(value.keywords)])
        if isinstance(value, MethodType):
            return _digest([self(value.__func__), self(value.__self__)])
        if isinstance(value, FunctionType):
            cells = [self(cell.cell_contents) for cell in value.__closure__ or ()]
            defaults = [self(value.__defaults__), self(value.__kwdefaults__)]
            return _digest([_name(value), *defaults, cells, self._code(value)])
        return _digest(_name(value)) if hasattr(value, "__qualname__") else None

    def _code(self, function: FunctionType) -> Any:
        """A function's code and the globals it names; a library's is known by its name."""
        if _is_library(function.__module__):
            return None
        names = sorted(set(_names(function.__code__)) & function.__globals__.keys())
        values = [function.__globals__[name] for name in names]
        known = [
            self(value)
            if isinstance(value, VALUES) or hasattr(type(value), "identity")
            else type(value).__name__
            for value in values
        ]
        return [self(_instructions(function.__code__)), names, known]

    def _methods(self, kind: type) -> list[Any]:
        """The methods of a class; those of libraries are known by its name."""
        own = [vars(base).items() for base in kind.__mro__ if not _is_library(base.__module__)]
        methods = [pair for items in own for pair in items if isinstance(pair[1], FunctionType)]
        return [[name, self(method)] for name, method in methods]

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if hasattr(kind, "identity"):
            return _digest([_name(kind), *map(self, value.identity())])
        if is_dataclass(value):
            names = [field.name for field in fields(value) if field.compare]
        else:
            # What is computed when first asked for is no setting.
            cached = functools.cached_property
            public = [name for name in getattr(value, "__dict__", {}) if not name.startswith("_")]
            names = [name for name in public if not isinstance(getattr(kind, name, None), cached)]
        library = _is_library(kind.__module__)
        code = {} if library else {"code": _digest(self._methods(kind))}
        return {"kind": _name(kind), **code} | {name: self(getattr(value, name)) for name in names}
