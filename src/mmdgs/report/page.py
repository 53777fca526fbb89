"""Reports: claims, figures and tables, as a self-contained HTML page and PNG files.

Texts may hold mathematics, as TeX between dollar signs (mathematics.py).
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdgs.report.mathematics import typeset
from mmdgs.runtime import environment
from mmdgs.tables import Table, plain
from mmdgs.workspace import Workspace

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Claim:
    """A statement, whether the numbers say that it holds (None: not decided), and the numbers."""

    text: str
    holds: bool | None
    numbers: str = ""

    @classmethod
    def of_all(cls, text: str, verdicts: Sequence[bool | None], said: Sequence[str]) -> Claim:
        """The claim that all hold: not if one does not, and open if one is or there are none."""
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
    """A command to try next, and what it does."""

    command: str
    purpose: str


@dataclass(frozen=True)
class Outcome:
    """JSON-ready numbers, the sections of the page, the takeaway, and commands to try next."""

    records: dict[str, Any]
    sections: list[Section]
    takeaway: str = ""
    following: Sequence[Step] = ()
    left: Sequence[str] = ()  # cells that --resume goes on with

    def tables(self) -> list[Table]:
        """All tables, in order."""
        return [table for section in self.sections for table in section.all_tables()]

    def write(
        self,
        workspace: Workspace,
        title: str,
        summary: str,
        device: torch.device,
        asked: dict[str, object],
        started: float,
    ) -> Path:
        """Write the figures, report.html with them inside, and records.json; the page's path."""
        from jinja2 import Environment

        taken = round(time.perf_counter() - started, 1)
        settings = environment(device) | asked | {"seconds_of_this_run": taken}
        figures = [figure for section in self.sections for figure in section.figures]
        pictures = {figure.name: figure.png() for figure in figures}
        for name, png in pictures.items():
            workspace.write(f"{name}.png", png)
        template = files("mmdgs.report").joinpath("page.html.j2").read_text(encoding="utf-8")
        jinja = Environment(autoescape=True)
        encoded = {name: base64.b64encode(png).decode() for name, png in pictures.items()}
        jinja.filters |= {"typeset": typeset, "plain": plain, "picture": encoded.get}
        page = jinja.from_string(template).render(
            report=self, title=title, summary=summary, settings=settings
        )
        path = workspace.write("report.html", page.encode())
        records = {
            "title": title,
            "environment": settings,
            "figures": [f"{name}.png" for name in pictures],
            "claims": [asdict(claim) for section in self.sections for claim in section.claims],
            **self.records,
        }
        workspace.write_json("records.json", records)
        return path
