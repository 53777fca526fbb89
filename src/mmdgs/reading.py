"""Rules for files from elsewhere: one kind of error, bounds on declared sizes, JSON and YAML without bombs.

A reader believes nothing that a file declares before it is compared with the bytes that are there, and whatever goes
wrong in it becomes one UsageError with the file's name (`reading`).
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
"""Characters of YAML or TOML: recipes have some hundred, and their parsers take time and memory as the square."""
MOST_JSON = 1 << 26
"""Bytes of JSON: the largest that are written, indices of weights and records, have some million."""
MOST_SAID = 400
"""Characters of another library's error in a message."""
FREE = 1 << 28
"""Bytes that compressed data may always unpack to."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The only decoders that are tried: Pillow would start other programs for some formats, whatever the file's name."""
PACKED = 100
"""How many times its own size compressed data may unpack to beyond that: images shrink to a third or a tenth."""


@contextlib.contextmanager
def reading(path: object, expected: str) -> Iterator[None]:
    """Turn whatever a reader meets into a UsageError with the file's name; `expected` says what it should be.

    For the body of a reader alone: elsewhere such errors are bugs, which must show.
    """
    try:
        yield
    except UsageError as error:
        if type(error) is not UsageError or str(path) in str(error):
            raise
        raise UsageError(f"{path}: {error}") from error
    except OSError as error:
        if error.errno is None:  # of a decoder, not of the system
            raise _damaged(path, expected, error) from error
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:
        raise _damaged(path, expected, error) from error


def _damaged(path: object, expected: str, error: Exception) -> UsageError:
    said = (
        {
            RecursionError: "it is nested too deeply",
            MemoryError: "it asks for more memory than there is",
        }.get(type(error))
        or " ".join(str(error).split())
        or type(error).__name__
    )
    return UsageError(f"{path} is not {expected}, or a damaged one: {said[:MOST_SAID]}")


def check_unpacked(path: object, declared: int, stored: int) -> None:
    """Refuse data that would unpack to far more than they are stored in (a decompression bomb)."""
    if declared > most_unpacked(stored):
        raise UsageError(
            f"{path} would unpack to {declared:,} bytes from {stored:,}, more than {PACKED} times: it is refused as a "
            "decompression bomb; store it without compression if it is none"
        )


def most_unpacked(stored: int) -> int:
    """Bytes that so many compressed ones may unpack to."""
    return max(FREE, PACKED * stored)


def parse_json(text: bytes | str, where: object) -> Any:
    """The value of a JSON text."""
    if len(text) > MOST_JSON:
        raise UsageError(f"{where} has {len(text):,} bytes, more than the limit of {MOST_JSON:,} for JSON")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UsageError(f"{where} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error


def parse_yaml(text: str, where: object) -> Any:
    """The value of a YAML text: plain values, lists and tables, each written out (an alias may stand for a word)."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        """Refuses aliases of lists and tables: ten lines of them stand for a billion values."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if alias and not isinstance(node, yaml.ScalarNode):
                raise yaml.composer.ComposerError(
                    None, None, "an alias of a list or table, which is refused: write it out", node.start_mark
                )
            return node

    _check_length(text, where, "YAML")
    with reading(where, "YAML"):
        return yaml.load(text, Loader)


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """The table of a TOML text."""
    import tomllib

    _check_length(text, where, "TOML")
    with reading(where, "TOML"):
        return tomllib.loads(text)


def _check_length(text: str, where: object, kind: str) -> None:
    if len(text) > MOST_PARSED:
        raise UsageError(f"{where} has {len(text):,} characters, more than the limit of {MOST_PARSED:,} for {kind}")
