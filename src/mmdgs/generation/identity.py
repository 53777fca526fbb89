"""What a run is made from as a record: every number its results depend on, as a value or as a digest of many.

A run that goes on compares it with the record it began with: a plan, its estimator with all tables, the model, an
operator and its measurements, a start.

Numbers, names and short tuples stay as they are and dataclasses are written by their fields, so that a comparison of
two records can name what differs. Of all else a record has the start of a SHA-256:

    tensors                     type, shape and bytes
    networks                    names and values of parameters and buffers, kinds and plain attributes of their layers
    models                      weights, denoiser, levels, shape and interval
    mappings, long sequences    their items
    functions                   the qualified name, defaults, and what they close over
    other objects               the type and the public attributes

and of functions, methods and classes that no library has the code too, with the values of the globals it names.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from mmdgs.models import Model
from mmdgs.samplers import Plan

SHORT, DIGITS = 8, 16
"""Items of a sequence that is written out, and hexadecimal digits of a digest."""
VALUES = (bool, int, float, str, tuple, list, dict, Tensor, numpy.ndarray, nn.Module, FunctionType, Model)
"""Globals of others' functions that are described by their values, others by their type alone."""


def plan_record(plan: Plan) -> dict[str, Any]:
    """What tells plans apart, for JSON: the kernels by name with their settings, and a digest of order and levels."""
    describe = _Describer()
    kernels: dict[str, int] = {}
    walk = []
    for kernel, level, following in plan.steps:
        number = kernels.setdefault(json.dumps(describe(kernel)), len(kernels))
        walk.append([number, describe(level), describe(following)])
    found: dict[str, Any] = {"levels": _digest([describe(plan.start), walk])}
    for text in kernels:
        content = json.loads(text)
        name = content["kind"].rsplit(".", 1)[-1]
        same = sum(key.split(" ")[0] == name for key in found)
        found[f"{name} {same + 1}" if same else name] = content
    return found


def input_record(**inputs: Any) -> dict[str, Any]:
    """The record of what a run is made from, by name: tensors, operators, models, estimators, functions."""
    describe = _Describer()
    return json.loads(json.dumps({name: describe(value) for name, value in inputs.items()}))  # as it is read back


def digest_of(*values: Any) -> str:
    """One digest of all that some values say."""
    return _digest([_Describer()(value) for value in values])


def _digest(content: object) -> str:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def _name(one: Any) -> str:
    return f"{one.__module__}.{one.__qualname__}"


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether code of a module is known by its name and version: mmdgs, Python's own, and what was installed."""
    root = (module or "").partition(".")[0]
    folders = Path(getattr(sys.modules.get(root), "__file__", None) or "").parts
    return root in ("mmdgs", *sys.stdlib_module_names) or "site-packages" in folders or "dist-packages" in folders


def _plain(layer: nn.Module) -> dict[str, Any]:
    """The numbers and names among the attributes of a layer: its kernel's size, whether it is training."""
    return {
        name: value
        for name, value in vars(layer).items()
        if not name.startswith("_") and isinstance(value, bool | int | float | str | tuple)
    }


def _instructions(code: CodeType) -> list[Any]:
    """A function's instructions and constants, those of functions inside it too; not where it stands in its file."""
    constants = [_instructions(one) if isinstance(one, CodeType) else one for one in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames)]


def _names(code: CodeType) -> list[str]:
    """What a function names, and functions inside it."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one)]
    return [*code.co_names, *inner]


class _Describer:
    """Values as JSON. An object that occurs several times is described once; one inside itself is cut short."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[object, Any]] = {}  # the objects too, so that no other takes the id of one

    def __call__(self, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.dtype | torch.device):  # where numbers are does not change them
            return str(value) if isinstance(value, torch.dtype) else "device"
        if id(value) not in self.seen:
            self.seen[id(value)] = value, "itself"
            self.seen[id(value)] = value, self._described(value)
        return self.seen[id(value)][1]

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return _digest(f"{value.dtype} {tuple(value.shape)} ".encode() + content)
        if isinstance(value, numpy.ndarray | numpy.generic):
            return _digest(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
        if isinstance(value, nn.Module):
            tensors = dict(value.named_parameters()) | dict(value.named_buffers())
            modules = list(value.named_modules())
            layers = [[name, _name(type(layer)), self(_plain(layer))] for name, layer in modules]
            code = [self._methods(kind) for kind in dict.fromkeys(type(layer) for _, layer in modules)]
            return _digest([layers, code, [[name, self(tensors[name])] for name in sorted(tensors)]])
        if isinstance(value, Mapping):
            return _digest(sorted(json.dumps([self(key), self(item)]) for key, item in value.items()))
        if isinstance(value, Set):
            return _digest(sorted(json.dumps(self(item)) for item in value))
        if isinstance(value, Sequence):
            items = [self(item) for item in value]
            short = len(items) <= SHORT and not any(isinstance(item, dict | list) for item in items)
            return items if short else _digest(items)
        return self._function(value) or self._object(value)

    def _function(self, value: Any) -> str | None:
        """The digest of a function, a method, a partial or a class; None of other things."""
        if isinstance(value, functools.partial):
            return _digest([self(value.func), self(value.args), self(value.keywords)])
        if isinstance(value, MethodType):
            return _digest([self(value.__func__), self(value.__self__)])
        if isinstance(value, FunctionType):
            cells = [self(cell.cell_contents) for cell in value.__closure__ or ()]
            return _digest(
                [_name(value), self(value.__defaults__), self(value.__kwdefaults__), cells, self._code(value)]
            )
        return _digest(_name(value)) if hasattr(value, "__qualname__") else None

    def _code(self, function: FunctionType) -> Any:
        """What a function computes, as far as it can be known: its code, and of the globals it names those with values.

        A library's functions are known by their names.
        """
        if _is_library(function.__module__):
            return None
        names = sorted(set(_names(function.__code__)) & function.__globals__.keys())
        values = [function.__globals__[name] for name in names]
        known = [self(value) if isinstance(value, VALUES) else type(value).__name__ for value in values]
        return [self(_instructions(function.__code__)), names, known]

    def _methods(self, kind: type) -> list[Any]:
        """The methods of a class; those of libraries are known by its name."""
        own = [vars(one).items() for one in kind.__mro__ if not _is_library(one.__module__)]
        return [[name, self(method)] for items in own for name, method in items if isinstance(method, FunctionType)]

    def _object(self, value: Any) -> Any:
        kind = _name(type(value))
        if isinstance(value, Model):
            parts = (value.digest, value.levels, value.shape, value.interval, value._denoiser)
            return _digest([kind, *map(self, parts)])
        if is_dataclass(value):
            names = [field.name for field in fields(value) if field.compare]
        else:
            public = [name for name in getattr(value, "__dict__", {}) if not name.startswith("_")]
            # What is computed when first asked for is no setting.
            names = [n for n in public if not isinstance(getattr(type(value), n, None), functools.cached_property)]
        code = {} if _is_library(type(value).__module__) else {"code": _digest(self._methods(type(value)))}
        return {"kind": kind, **code} | {name: self(getattr(value, name)) for name in names}
