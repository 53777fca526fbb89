"""`mmdgs demo`: the paper's first results on one page, in two minutes."""

from __future__ import annotations

from pathlib import Path

from mmdgs.cli import app as cli
from mmdgs.cli.app import Device, Out, Overwrite, Quiet, Resume, Seed, app
from mmdgs.cli.reports import write_page

TITLE = "mmdgs in two minutes"
SUMMARY = (
    "Figures 1 and 2 of the paper, its Table 1 on the rings, and digits, at a small size; and the "
    "posterior of a photograph."
)


@app.command()
def demo(
    out: Out = Path("demo"),
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Figures 1 and 2 of the paper, its Table 1 on the rings, digits and a photograph, in two
    minutes."""
    with cli.resumable(), cli.needs("report"):
        from mmdgs.demo.page import demo as demonstrated

        where = cli.device_named(device)
        cli.tell(f"[bold]{TITLE}[/bold] on {where}")
        write_page(
            TITLE, SUMMARY, out, lambda workspace: demonstrated(workspace, where, seed),
            device=where, seed=seed, overwrite=overwrite, resume=resume,
        )  # fmt: skip
