"""Fields of dataclasses that say what they are for; `cli/options.py` makes options of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from mmdgs.errors import UsageError


def key(default: Any, help: str) -> Any:
    """A dataclass field with its help."""
    return dataclasses.field(default=default, metadata={"help": help})


def option(default: Any, help: str, *, name: str | None = None, **typed: Any) -> Any:
    """A field that commands have an option for; `typed` are arguments of `typer.Option`.

    `name` is that of the command's parameter where it is not the field's, `flag` the option's name
    (or names) where that is not the parameter's, such as "--clip/--no-clip"; `kind` is the type
    that the command line reads where the field's own is another.
    """
    metadata = {"help": help, "option": typed, "name": name}
    return dataclasses.field(default=default, metadata=metadata)


def option_name(field: dataclasses.Field[Any]) -> str:
    """The name of the parameter of commands for a field."""
    return field.metadata.get("name") or field.name


def option_names(*kinds: type) -> set[str]:
    """The names of the parameters that commands have for some dataclasses."""
    known = [field for kind in kinds for field in dataclasses.fields(kind)]
    return {option_name(field) for field in known if "option" in field.metadata}


def check_counts(settings: Any) -> None:
    """UsageError for a number that is not whole, or less than its option takes."""
    for field in dataclasses.fields(settings):
        value, least = getattr(settings, field.name), field.metadata.get("option", {}).get("min")
        if not isinstance(least, int) or value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            name = field.name
            raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
