"""A table of words and numbers, for the terminal and for reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Group

MATHEMATICS = r"\$[^$]+\$"
"""TeX between dollar signs."""
SIGNS = {
    r"\mathrm": "", r"\mid": "|", r"\|": "||", r"\partial ": "d", r"\,": "", r"\tilde{p}": "p~",
    r"\tilde{q}": "q~", r"\nabla^2": "hess",
}  # fmt: skip
"""TeX that is not read as its letters."""


def plain(text: str) -> str:
    r"""A text with its mathematics in letters, for a terminal: $\sigma^2$ becomes sigma^2."""

    def letters(match: re.Match[str]) -> str:
        tex = match.group()
        for command, sign in SIGNS.items():
            tex = tex.replace(command, sign)
        return re.sub(r"[$\\{}]", "", tex)

    return re.sub(MATHEMATICS, letters, text)


@dataclass(frozen=True)
class Table:
    """Cells as text, which may hold mathematics; `best` are the (row, column) cells in bold."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    left: int = 1  # how many leading columns hold words
    best: frozenset[tuple[int, int]] = frozenset()

    def to_rich(self) -> Group:
        """The table for the terminal, its title above and its note below."""
        import rich.table
        from rich.console import Group
        from rich.text import Text

        table = rich.table.Table()
        for i, name in enumerate(self.header):
            justify: Literal["left", "right"] = "left" if i < self.left else "right"
            table.add_column(plain(name), justify=justify, overflow="fold")
        for i, row in enumerate(self.rows):
            styles = ["bold" if (i, j) in self.best else "" for j in range(len(row))]
            table.add_row(*(Text(plain(c), style=s) for c, s in zip(row, styles, strict=True)))
        note = [Text(plain(self.note), style="dim")] if self.note else []
        return Group(Text(plain(self.title), style="bold"), table, *note)
