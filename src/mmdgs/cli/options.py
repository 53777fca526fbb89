"""Options of commands from the dataclasses they fill."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Container
from inspect import Parameter
from typing import Annotated, Any

import typer

from mmdgs.cli.app import set_parameters
from mmdgs.options import option_name

Command = Callable[..., None]


def options_of(
    *kinds: type,
    extended: Callable[[str, str], str] | None = None,
    only: Container[str] | None = None,
) -> Callable[[Command], Command]:
    """Give a command an option for each field of some dataclasses that has one (`options.option`).

    `extended(name, help)` may extend an option's help; `only` names the options to take. A field of
    several texts is an option that may be repeated. The command takes them as keyword arguments,
    and only those that the user gave. In its help they stand before the command's own options:

        @app.command()
        @options_of(Recipe)
        def train(out: Path, *, debug: bool = False, **options: Any) -> None: ...
    """
    options = {
        option_name(field): _parameter(kind, field, extended)
        for kind in kinds
        for field in dataclasses.fields(kind)
        if "option" in field.metadata and (only is None or option_name(field) in only)
    }

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        first = [
            parameter for parameter in own if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        ]
        last = [parameter for parameter in own if parameter.kind is Parameter.KEYWORD_ONLY]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            left_out = {name for name in options if values[name] in (None, [])}
            command(**{name: value for name, value in values.items() if name not in left_out})

        set_parameters(wrapped, [*first, *options.values(), *last])
        return wrapped

    return decorate


def _parameter(
    kind: type, field: dataclasses.Field[Any], extended: Callable[[str, str], str] | None
) -> Parameter:
    """The parameter of a command for a field; None, its default, says that it was not given."""
    name, text, typed = option_name(field), field.metadata["help"], dict(field.metadata["option"])
    if field.default is not None:
        typed.setdefault("show_default", f"{field.default}")
    flags, read = typed.pop("flag", ()), typed.pop("kind", None) or _type_of(kind, field)
    read = list[str] if read == tuple[str, ...] | None else read
    text = extended(name, text) if extended else text
    option = typer.Option(*([flags] if isinstance(flags, str) else flags), help=text, **typed)
    annotation: Any = Annotated[read | None, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _type_of(kind: type, field: dataclasses.Field[Any]) -> Any:
    """The type of one field; those of others may name what is imported for type checkers alone."""
    alone = types.SimpleNamespace(__annotations__={field.name: field.type})
    return typing.get_type_hints(alone, vars(sys.modules[kind.__module__]))[field.name]
