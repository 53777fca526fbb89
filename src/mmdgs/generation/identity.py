"""A plan as a record: every number its samples depend on, as a value or as a digest of many.

Numbers, names and short tuples stay as they are and dataclasses are written by their fields, so that a comparison of
two records can name what differs. Of all else a record has the start of a SHA-256:

    tensors                     type, shape and bytes
    networks                    names and values of their parameters and buffers
    models                      their own digest, levels and interval
    mappings, long sequences    their items
    functions                   the qualified name, defaults, and what they close over
    other objects               the type and the public attributes
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from mmdgs.samplers import Plan

SHORT, DIGITS = 8, 16
"""Items of a sequence that is written out, and hexadecimal digits of a digest."""


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


def _digest(content: object) -> str:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def _name(one: Any) -> str:
    return f"{one.__module__}.{one.__qualname__}"


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
            return _digest([_name(type(value)), [[name, self(tensors[name])] for name in sorted(tensors)]])
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
            return _digest([_name(value), self(value.__defaults__), self(value.__kwdefaults__), cells])
        return _digest(_name(value)) if hasattr(value, "__qualname__") else None

    def _object(self, value: Any) -> Any:
        kind = _name(type(value))
        if isinstance(getattr(value, "digest", None), str):
            return _digest([kind, value.digest, self(value.levels), self(value.interval)])
        if is_dataclass(value):
            names = [field.name for field in fields(value) if field.compare]
        else:
            public = [name for name in getattr(value, "__dict__", {}) if not name.startswith("_")]
            # What is computed when first asked for is no setting.
            names = [n for n in public if not isinstance(getattr(type(value), n, None), functools.cached_property)]
        return {"kind": kind} | {name: self(getattr(value, name)) for name in names}
