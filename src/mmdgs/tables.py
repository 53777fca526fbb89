"""A table of words and numbers, for the terminal and for reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Table:
    """Cells as text; `best` holds the (row, column) cells to print in bold."""

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
            table.add_column(name, justify="left" if i < self.left else "right", overflow="fold")
        for i, row in enumerate(self.rows):
            table.add_row(*(Text(cell, style="bold" if (i, j) in self.best else "") for j, cell in enumerate(row)))
        note = [Text(self.note, style="dim")] if self.note else []
        return Group(Text(self.title, style="bold"), table, *note)
