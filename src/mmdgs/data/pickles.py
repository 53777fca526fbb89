"""The one kind of pickle that is read, CIFAR-10's: dictionaries of lists, text and arrays of bytes.

A pickle is a program, and a plain unpickler runs whatever it names. This one knows four names, the ones that
arrays in CIFAR-10's files are made with, and answers each with an inert stand-in that only keeps what it is
given; numpy itself is not called before the result has been checked. Every other name is refused.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np

from mmdgs.errors import UsageError


class _StandIn:
    """Keeps what a pickle says of an object; nothing is executed."""

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        # Defined for every stand-in, so that a pickle cannot set attributes, not even on the class.
        self.state = state


class _Dtype(_StandIn):
    __slots__ = ()


class _Array(_StandIn):
    __slots__ = ()


class _Encoded(_StandIn):
    """Bytes that a pickle of an old protocol holds as text."""

    __slots__ = ()


ADMITTED: dict[tuple[str, str], type[_StandIn]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Encoded,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, file: str) -> None:
        # Python 2 wrote the public files: its strings are bytes, which latin1 keeps one to one.
        super().__init__(io.BytesIO(content), encoding="latin1")
        self.file = file

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise UsageError(
                f"{self.file} is not a CIFAR-10 batch: the pickle asks for {module}.{name}, which is refused; "
                "nothing in it was run"
            )
        return ADMITTED[module, name]


def read_pickle(content: bytes, file: str) -> dict[str, Any]:
    """The dictionary in a pickle, keys as text, arrays as numpy's; `file` names it in messages."""
    try:
        found = _Unpickler(content, file).load()
        if not isinstance(found, dict):
            raise UsageError(f"{file} is not a CIFAR-10 batch: expected a dictionary, got {type(found).__name__}")
        return {_text(key): _value(value) for key, value in found.items()}
    except UsageError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        raise UsageError(f"{file} is not a pickle, or a damaged one: {error or type(error).__name__}") from error


def _value(value: Any) -> Any:
    if isinstance(value, _Array):
        return _array(value)
    if isinstance(value, list):
        return [_value(item) for item in value]
    return _text(value) if isinstance(value, bytes | _Encoded) else value


def _text(value: Any) -> Any:
    if isinstance(value, _Encoded):
        value = _bytes(value)
    return value.decode("latin1") if isinstance(value, bytes) else value


def _bytes(value: Any) -> bytes:
    if isinstance(value, _Encoded):
        value, encoding = value.args
        if encoding != "latin1":
            raise ValueError(f"text in {encoding!r}; expected latin1")
    return value if isinstance(value, bytes) else value.encode("latin1")


def _array(array: _Array) -> np.ndarray:
    """The array of unsigned bytes that a stand-in describes, with numpy's own state of an array."""
    version, shape, dtype, fortran, raw = array.state
    if version != 1 or not isinstance(dtype, _Dtype) or _text(dtype.args[0]) not in ("u1", "|u1", "uint8"):
        raise ValueError("an array that is not of unsigned bytes")
    content = _bytes(raw)
    if any(not isinstance(n, int) or n < 0 for n in shape) or math.prod(shape) != len(content):
        raise ValueError(f"an array of shape {shape} with {len(content)} bytes")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
