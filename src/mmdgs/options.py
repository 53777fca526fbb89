"""Fields of dataclasses that say what they are for; `cli/options.py` makes the options of commands from them."""

from __future__ import annotations

import dataclasses
from typing import Any


def key(default: Any, help: str) -> Any:
    """A dataclass field with its help."""
    return dataclasses.field(default=default, metadata={"help": help})


def option(default: Any, help: str, **typed: Any) -> Any:
    """A field that commands have an option for; `typed` are arguments of `typer.Option`, such as min or envvar.

    `flag` is its name (or names) where that is not the field's, such as "--clip/--no-clip"; `kind` is the type that the
    command line reads where the field's own is another.
    """
    return dataclasses.field(default=default, metadata={"help": help, "option": typed})


def option_names(*kinds: type) -> set[str]:
    """The names of the fields that commands have options for."""
    return {field.name for kind in kinds for field in dataclasses.fields(kind) if "option" in field.metadata}
