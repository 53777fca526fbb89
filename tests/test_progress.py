"""Progress: a bar on a terminal, lines off it, and nothing where it was switched off."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mmdgs import cli, runtime
from mmdgs.runtime import ProgressLines, progress_bar, show_progress


class Clock:
    """A clock that moves when it is told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(runtime, "time", found)
    monkeypatch.setattr(ProgressLines, "last_line", 0.0)
    return found


@pytest.fixture(autouse=True)
def _shown() -> Iterator[None]:
    """A command with --quiet that ran in this process before hides progress until it is shown
    again.
    """
    show_progress(True)
    yield
    show_progress(True)


def test_off_a_terminal_there_is_a_line_every_half_minute(clock: Clock, capsys) -> None:
    lines = []
    with progress_bar(400, "sampling", unit="chain-step") as bar:
        for _ in range(20):  # 10 seconds each
            clock.now += 10
            bar.update(4)
            lines.append(capsys.readouterr().err)
    assert [number for number, line in enumerate(lines) if line] == [2, 5, 8, 11, 14, 17]
    assert lines[2] == "sampling: 3%, 2.5 s/chain-step, 16:10 left\n"
    assert lines[17] == "sampling: 18%, 2.5 s/chain-step, 13:40 left\n"
    with progress_bar(400, "resumed", first=200) as bar:  # of which none took its time here
        clock.now += 40
        bar.update(20)
        assert "55%, 2 s/" in capsys.readouterr().err
    assert ProgressLines.running == []


def test_loops_inside_each_other_share_the_line(clock: Clock, capsys) -> None:
    with progress_bar(8, "Table 1", unit="part") as outer:
        for part in range(2):
            with progress_bar(10, f"row {part}") as inner:
                for _ in range(10):
                    clock.now += 2
                    inner.update()
            outer.update()
    # After 30 seconds, of which the first part took 20:
    line = "Table 1: 12%, 30 s/part, 03:30 left; row 1: 50%, 2 s/step, 00:10 left\n"
    assert capsys.readouterr().err == line


def test_a_terminal_has_a_bar(monkeypatch) -> None:
    terminal = SimpleNamespace(isatty=lambda: True, text=io.StringIO(), encoding="utf-8")
    terminal.write, terminal.flush = terminal.text.write, terminal.text.flush
    monkeypatch.setattr("sys.stderr", terminal)
    with progress_bar(4, "sampling", delay=0) as bar:
        bar.update(4)
    assert "sampling:   0%|" in terminal.text.getvalue()


@pytest.mark.parametrize("words", [[], ["--quiet"], ["-q"]])
def test_commands_are_quiet_where_asked(words: list[str], monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime, "LINE_EVERY", 0.0)
    train = "train --data mog --model mlp --sigma 0.5 --steps 3 --device cpu"
    kept = ["--set", "checkpoint_every=none", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, [*train.split(), *kept, *words])
    assert result.exit_code == 0, result.output
    assert ("training: 67%, " in result.stderr) == (not words)
    assert "3 steps, loss" in result.stdout
