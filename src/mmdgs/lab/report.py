"""Reports: claims, figures and tables, as a self-contained HTML page, as PNG files and in the terminal.

Texts may hold mathematics, as TeX between dollar signs (mathematics.py).
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from mmdgs.lab.mathematics import typeset
from mmdgs.lab.workspace import Workspace
from mmdgs.tables import Table, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Claim:
    """A statement that the numbers can contradict, whether it holds (None: not decided), and the numbers."""

    text: str
    holds: bool | None
    numbers: str = ""

    @classmethod
    def of_all(cls, text: str, verdicts: Sequence[bool | None], said: Sequence[str]) -> Claim:
        """The claim that all hold: one that does not decides it; else it is open where one is, or there are none."""
        holds = False if False in verdicts else None if None in verdicts or not verdicts else True
        return cls(text, holds, "; ".join(said))

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


@dataclass(frozen=True)
class Figure:
    """A drawing, the name of its PNG file without ending, and its caption."""

    name: str
    caption: str
    canvas: Canvas

    def png(self) -> bytes:
        """The drawing as a PNG file."""
        file = io.BytesIO()
        self.canvas.savefig(file, format="png", dpi=150, bbox_inches="tight", facecolor="white")
        return file.getvalue()


@dataclass(frozen=True)
class Section:
    """A heading with text, figures, tables and claims under it."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    claims: Sequence[Claim] = ()

    def all_tables(self) -> list[Table]:
        """The tables, and the claims as one more."""
        if not self.claims:
            return list(self.tables)
        rows = [[claim.text, claim.numbers, claim.verdict] for claim in self.claims]
        return [*self.tables, Table("Claims", ["claim", "numbers", "verdict"], rows, left=3)]


@dataclass(frozen=True)
class Step:
    """A command to try next, its arguments after `mmdgs`, and what it does."""

    command: str
    purpose: str


@dataclass(frozen=True)
class Report:
    """A page: the takeaway and sections under a title, commands to try next, and the settings it was made with."""

    title: str
    summary: str
    sections: Sequence[Section]
    settings: dict[str, object] = field(default_factory=dict)
    takeaway: str = ""
    following: Sequence[Step] = ()

    def write(self, workspace: Workspace) -> Path:
        """Write every figure as PNG and the page as report.html, figures inside; returns the page's path."""
        from jinja2 import Environment

        pictures = {}
        for section in self.sections:
            for figure in section.figures:
                png = figure.png()
                workspace.write(f"{figure.name}.png", png)
                pictures[figure.name] = base64.b64encode(png).decode()
        template = files("mmdgs.lab").joinpath("report.html.j2").read_text(encoding="utf-8")
        environment = Environment(autoescape=True)
        environment.filters |= {"typeset": typeset, "plain": plain}
        page = environment.from_string(template).render(report=self, pictures=pictures)
        return workspace.write("report.html", page.encode())

    def tables(self) -> list[Table]:
        """All tables, in order."""
        return [table for section in self.sections for table in section.all_tables()]
