"""`mmdgs diagnose`: have chains converged?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmdgs.cli.app import Debug, Overwrite, app, needs_lab, plain_errors
from mmdgs.cli.reproduce import write_page


@app.command()
def diagnose(
    chain: Annotated[
        Path, typer.Argument(metavar="CHAIN.npz", help="Chains: an array `samples` (steps, chains, ...).")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for report.html and records.json.")],
    modes: Annotated[
        Path | None,
        typer.Option(
            help="An .npz with the centres that chains must visit, `modes` (K, ...), if known with `weights` (K,); "
            "they may be in CHAIN.npz too."
        ),
    ] = None,
    burn_in: Annotated[int, typer.Option(min=0, help="Leave out so many steps at the start.")] = 0,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Judge chains of any program: R-hat, effective sample size, traces, autocorrelation, modes; one HTML page.

    `mmdgs.diagnostics.save_chain(FILE, samples)` writes the chains that `gibbs_chain` or `run(..., keep=...)` returns.
    """
    with plain_errors(debug):
        from mmdgs.diagnostics import diagnose as diagnosed, read_chain
        from mmdgs.files import holds_nothing

        holds_nothing(out, overwrite)
        found = read_chain(chain, modes, burn_in)
        judged = diagnosed(found["samples"], found.get("modes"), found.get("weights"))
        with needs_lab():
            from mmdgs.lab.diagnose import outcome

            made = outcome(found["samples"], judged)
            write_page(f"Chains of {chain.name}", "Have the chains converged?", out, made, overwrite=overwrite)
