"""Options of commands that come from dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from mmdgs.cli.options import options_of
from mmdgs.options import key, option, option_names


@dataclass(frozen=True)
class Settings:
    steps: int = option(5, "How many.", min=1)
    rate: float | None = option(None, "How far.", show_default="auto")
    clip: bool | None = option(None, "Keep it inside.", flag="--clip/--no-clip")
    inner: str = key("a", "No option.")


def called(*words: str) -> tuple[dict[str, Any], str]:
    app, seen = typer.Typer(), {}

    @app.command()
    @options_of(Settings)
    def act(
        out: Annotated[Path, typer.Option("--out")],
        *,
        debug: Annotated[bool, typer.Option("--debug")] = False,
        **given,
    ) -> None:
        """What it does."""
        seen.update(given, out=out, debug=debug)

    result = CliRunner().invoke(app, list(words))
    return seen, result.output


def test_only_what_was_given_arrives_with_the_commands_own_options() -> None:
    assert called("--out", "x")[0] == {"out": Path("x"), "debug": False}
    seen, _ = called("--out", "x", "--rate", "2", "--no-clip", "--debug")
    assert seen == {"out": Path("x"), "debug": True, "rate": 2.0, "clip": False}
    assert option_names(Settings) == {"steps", "rate", "clip"}
    assert Settings().steps == 5


@pytest.mark.parametrize("words", [["--steps", "0"], ["--steps", "many"], ["--inner", "b"], []])
def test_what_the_fields_refuse(words: list[str]) -> None:
    assert called(*(["--out", "x"] if words else []), *words)[0] == {}


def test_help_has_the_fields_between_the_commands_own_options() -> None:
    _, told = called("--help")
    places = [
        told.index(word)
        for word in ("What it does", "--out", "--steps", "--rate", "--clip", "--debug")
    ]
    assert places == sorted(places)
    for words in ("How many.", "How far.", "auto", "--no-clip", "Keep it inside."):
        assert words in told
