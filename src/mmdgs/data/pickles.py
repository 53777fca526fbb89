"""Pickles read without running them.

A pickle is a program, and a plain unpickler calls whatever it names. This one answers each admitted
name with an inert stand-in, which keeps its arguments, and refuses every other name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any


class RefusedName(Exception):  # noqa: N818  the callers turn it into errors that name the file
    """A pickle asks for a name that is not admitted."""


class Inert:
    """What a pickle says of an object: the name it asks for, the arguments and the state."""

    __slots__ = ("args", "state")
    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        # Without this method a pickle could set any attribute, even of the class.
        self.state = state


def read_inert(content: bytes, admits: Callable[[str], bool]) -> Any:
    """The tree in a pickle: plain containers, text and numbers, and `Inert` for everything else.

    A persistent id becomes an `Inert` without a name. Damaged pickles raise nearly anything.
    """
    for opcode, argument, _ in pickletools.genops(content):  # reads, and runs nothing
        # The unpickler allocates what an opcode declares; places of its memo are numbered from 0.
        if "PUT" in opcode.name and argument is not None and not 0 <= int(argument) <= len(content):
            raise ValueError(f"a pickle of {len(content):,} bytes with memo place {argument}")
    return _Unpickler(content, admits).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, admits: Callable[[str], bool]) -> None:
        # Strings of Python 2 are bytes, which latin1 keeps one to one.
        super().__init__(io.BytesIO(content), encoding="latin1")
        self.admits = admits

    def find_class(self, module: str, name: str) -> Any:
        dotted = f"{module}.{name}"
        if not self.admits(dotted):
            raise RefusedName(f"the pickle asks for {dotted}, which is refused; nothing was run")
        return type(name, (Inert,), {"__slots__": (), "name": dotted})

    def persistent_load(self, pid: Any) -> Any:
        return Inert(pid)
