"""Pages that commands write, and how they are shown in the terminal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from mmdgs.cli.app import output, show, show_path
from mmdgs.tables import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mmdgs.report.page import Outcome
    from mmdgs.workspace import Workspace


def write_page(
    title: str,
    summary: str,
    out: Path,
    make: Callable[[Workspace], Outcome],
    *,
    device: torch.device | None = None,
    seed: int = 0,
    overwrite: bool = False,
    resume: bool = False,
) -> None:
    """Write what a command found as report.html and records.json, and print it."""
    import torch

    from mmdgs.workspace import Workspace

    started, device = time.perf_counter(), device or torch.device("cpu")
    with contextlib.closing(Workspace(out, overwrite=overwrite, resume=resume)) as workspace:
        outcome = make(workspace)
        path = outcome.write(workspace, title, summary, device, {"seed": seed}, started)
        show_report(path, outcome)


def show_report(path: Path, report: Outcome) -> None:
    """Print the tables and the takeaway of a report, its path, and what to try next."""
    for table in report.tables():
        output.print(table.to_rich())
        output.print()
    if report.takeaway:
        output.print(f"{escape(plain(report.takeaway))}\n")
    show_path("report", path)
    if report.following:
        step = report.following[0]
        command = escape(re.sub("^mmdgs", called(), step.command))
        show(f"next: [bold]{command}[/bold]  ({step.purpose})")


def called() -> str:
    """How to call mmdgs from the user's shell: its path where the environment is not active."""
    script = Path(sys.executable).with_name("mmdgs")
    if shutil.which("mmdgs") or not script.exists():
        return "mmdgs"
    return os.path.relpath(script)
