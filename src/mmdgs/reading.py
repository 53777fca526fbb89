"""Rules for files from elsewhere: one kind of error, bounds on declared sizes, no bombs.

A reader trusts nothing that a file declares before it is compared with the bytes that are there,
and whatever goes wrong in it becomes one UsageError with the file's name (`reading`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from mmdgs.errors import UsageError

MOST_TEXT = 1 << 18
"""Bytes of a text, such as a card."""
MOST_PARSED = 1 << 14
"""Characters of YAML or TOML, whose parsers take time and memory as the square."""
MOST_JSON = 1 << 26
"""Bytes of JSON: the largest that are written have some million."""
MOST_SAID = 400
"""Characters of another library's error in a message."""
FREE, PACKED = 1 << 28, 100
"""Bytes that compressed data may always unpack to, and how many times its size beyond that."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The only decoders that are tried: for some formats Pillow would start other programs."""


@contextlib.contextmanager
def reading(path: object, expected: str) -> Iterator[None]:
    """Turn any error of a reader's body into a UsageError with the file's name."""
    try:
        yield
    except UsageError as error:
        if type(error) is not UsageError or str(path) in str(error):
            raise
        raise UsageError(f"{path}: {error}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, no decoder
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
        reasons = {RecursionError: "it is nested too deeply", MemoryError: "it is too large"}
        plain = " ".join(str(error).split()) or type(error).__name__
        reason = reasons.get(type(error), plain)[:MOST_SAID]
        raise UsageError(f"{path} is not {expected}, or a damaged one: {reason}") from error


def check_unpacked(path: object, declared: int, stored: int) -> None:
    """UsageError for data that would unpack to far more than they are stored in."""
    if declared > most_unpacked(stored):
        size = f"{declared:,} bytes from {stored:,}, more than {PACKED} times"
        raise UsageError(f"{path} would unpack to {size}: a decompression bomb? Store it plainly")


def most_unpacked(stored: int) -> int:
    """Bytes that so many compressed ones may unpack to."""
    return max(FREE, PACKED * stored)


def parse_json(text: bytes | str, where: object) -> Any:
    """The value of a JSON text."""
    _check_length(text, where, "JSON", MOST_JSON)
    with reading(where, "JSON"):
        return json.loads(text)


def parse_yaml(text: str, where: object) -> Any:
    """The value of a YAML text; an alias may stand for a word, and for no list or table."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        def compose_node(self, parent: Any, index: Any) -> Any:
            alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if alias and not isinstance(node, yaml.ScalarNode):  # ten lines make a billion values
                raise yaml.YAMLError("an alias of a list or table is refused: write it out")
            return node

    _check_length(text, where, "YAML", MOST_PARSED)
    with reading(where, "YAML"):
        return yaml.load(text, Loader)


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """The table of a TOML text."""
    import tomllib

    _check_length(text, where, "TOML", MOST_PARSED)
    with reading(where, "TOML"):
        return tomllib.loads(text)


def _check_length(text: bytes | str, where: object, kind: str, most: int) -> None:
    if len(text) > most:
        size = f"{len(text):,} characters, more than the limit of {most:,}"
        raise UsageError(f"{where} has {size} for {kind}")
