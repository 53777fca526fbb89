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


def options_of(
    *kinds: type, told: Callable[[str, str], str] | None = None, only: Container[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of some dataclasses that was made with `mmdgs.options.option`.

    `told(name, help)` may say more in an option's help, and `only` names the fields that are wanted. A field of several
    texts is an option that may be repeated.

    The command takes them as keyword arguments (**given), and only those that the user gave. In its help they stand
    before the command's own keyword-only options:

        @app.command()
        @options_of(Recipe)
        def train(out: Path, *, debug: bool = False, **given: Any) -> None: ...
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        made = [one for kind in kinds for one in _options(kind, told or (lambda name, text: text))]
        made = [one for one in made if only is None or one.name in only]
        names = {one.name for one in made}
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        first = [one for one in own if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
        last = [one for one in own if one.kind is Parameter.KEYWORD_ONLY]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            command(**{name: value for name, value in values.items() if value not in (None, []) or name not in names})

        # Typer reads both; keyword-only, so that their order is free whatever has a default.
        parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*first, *made, *last)]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapped

    return decorate


def _options(kind: type, told: Callable[[str, str], str]) -> list[Parameter]:
    """A parameter of a command for each field that has an option; None, its default, says that it was not given."""
    made = []
    for field in dataclasses.fields(kind):
        if "option" not in field.metadata:
            continue
        typed = dict(field.metadata["option"])
        flags, read = typed.pop("flag", ()), typed.pop("kind", None) or _type_of(kind, field)
        read = list[str] if read == tuple[str, ...] | None else read
        text = told(field.name, field.metadata["help"])
        chosen = typer.Option(*([flags] if isinstance(flags, str) else flags), help=text, **typed)
        annotation: Any = Annotated[read | None, chosen]
        made.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return made


def _type_of(kind: type, field: dataclasses.Field) -> Any:
    """The type of one field; those of others may name what is imported for type checkers alone."""
    alone = types.SimpleNamespace(__annotations__={field.name: field.type})
    return typing.get_type_hints(alone, vars(sys.modules[kind.__module__]))[field.name]
