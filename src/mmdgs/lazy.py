"""Imports when something is first used: `mmdgs --help` needs no torch, and extras are optional.

A stub (`__init__.pyi`) beside the package's `__init__.py` is the one list of its names, for type
checkers and at run time, as in SPEC 1 of Scientific Python.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from mmdgs.errors import UsageError, first_line


def lazy_names(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    Rooms that the stub names are found too, but `dir` lists what is in `__all__`: no modules.
    """
    homes = {
        alias.name: node.module
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    names = sorted(name for name, home in homes.items() if home != package)
    return get, lambda: names, names


def optional(library: str) -> Any:
    """A library that an extra of mmdgs installs; UsageError says how if it is absent."""
    try:
        return import_module(library)
    except ImportError as error:
        missing = f"this needs {library}, which is not installed: pip install mmdgs[{library}]"
        raise UsageError(missing) from error
    except RuntimeError as error:  # torchvision's, where it was built for another torch
        reason = f"({first_line(error)}): install the torchvision that fits your torch"
        raise UsageError(f"{library} cannot be imported {reason}") from error
