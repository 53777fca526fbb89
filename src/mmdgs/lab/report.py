"""Reports: tables and figures, as a self-contained HTML page, as PNG files and in the terminal."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import rich.console
import rich.table
import rich.text
from jinja2 import Environment
from matplotlib.figure import Figure as Canvas

from mmdgs.lab.workspace import Workspace


@dataclass(frozen=True)
class Table:
    """Cells as text; `best` holds the (row, column) cells to print in bold."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    left: int = 1  # how many leading columns hold words
    best: frozenset[tuple[int, int]] = frozenset()

    def to_rich(self) -> rich.console.Group:
        """The table for the terminal, its title above and its note below."""
        table = rich.table.Table()
        for i, name in enumerate(self.header):
            table.add_column(name, justify="left" if i < self.left else "right", overflow="fold")
        for i, row in enumerate(self.rows):
            table.add_row(*(f"[bold]{cell}[/bold]" if (i, j) in self.best else cell for j, cell in enumerate(row)))
        note = [rich.text.Text(self.note, style="dim")] if self.note else []
        return rich.console.Group(rich.text.Text(self.title, style="bold"), table, *note)


@dataclass(frozen=True)
class Figure:
    """A drawing, the name of its PNG file without ending, and its caption."""

    name: str
    caption: str
    canvas: Canvas


@dataclass(frozen=True)
class Section:
    """A heading with text, tables and figures under it."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class Report:
    """A page: sections under a title, and the settings it was made with."""

    title: str
    summary: str
    sections: Sequence[Section]
    settings: dict[str, object] = field(default_factory=dict)

    def write(self, workspace: Workspace) -> None:
        """Write every figure as PNG and the page as report.html, figures inside."""
        pictures = {}
        for section in self.sections:
            for figure in section.figures:
                png = io.BytesIO()
                figure.canvas.savefig(png, format="png", dpi=150, bbox_inches="tight", facecolor="white")
                workspace.write(f"{figure.name}.png", png.getvalue())
                pictures[figure.name] = base64.b64encode(png.getvalue()).decode()
        template = files("mmdgs.lab").joinpath("report.html.j2").read_text(encoding="utf-8")
        page = Environment(autoescape=True).from_string(template).render(report=self, pictures=pictures)
        workspace.write("report.html", page.encode())

    def tables(self) -> list[Table]:
        """All tables, in order."""
        return [table for section in self.sections for table in section.tables]
