"""`mmdgs judge`: are draws from a posterior right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmdgs.cli.app import Debug, Overwrite, Seed, app, needs_lab, plain_errors, refuse_idle
from mmdgs.cli.reproduce import write_page
from mmdgs.errors import UsageError


@app.command()
def judge(
    context: typer.Context,
    draws: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DRAWS.npz]", help="Draws of any program: an array `draws` (S, N, ...).", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for report.html and records.json.")] = Path("judged"),
    truth: Annotated[
        Path | None,
        typer.Option(help="An .npz with `truth` (N, ...); it may be in DRAWS.npz too.", show_default="DRAWS.npz"),
    ] = None,
    suite: Annotated[
        Path | None,
        typer.Option(
            metavar="SAMPLER.py",
            help="Judge a sampler on problems with known posteriors. This runs the file: name only one you trust. It "
            "defines sample(problem, draws, seed) and returns draws (draws, N, d).",
        ),
    ] = None,
    count: Annotated[int, typer.Option("--draws", min=4, help="With --suite: draws of each measurement.")] = 50,
    cases: Annotated[int, typer.Option(min=10, help="With --suite: measurements of each problem.")] = 100,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Judge draws by the truth: calibration, coverage, CRPS and ranks with their bands; one verdict, one figure.

    The verdict calls right draws wrong with a probability of at most 1%, in all tests of all tasks together.
    The N cases must be independent. An optional array `task` (N,) of numbers, such as noise levels, beside `draws` or
    `truth` judges each task by itself.
    """
    with plain_errors(debug):
        from mmdgs.diagnostics import read_draws
        from mmdgs.files import holds_nothing
        from mmdgs.metrics import judge as judged

        if (draws is None) == (suite is None) or (suite is not None and truth is not None):
            raise UsageError("give DRAWS.npz (with --truth), or --suite SAMPLER.py")
        refuse_idle(context, (suite is None, ("count", "cases"), "--suite SAMPLER.py"))
        holds_nothing(out, overwrite)
        if suite is not None:
            with needs_lab():
                from mmdgs.lab.judge_suite import judged_suite, load_sampler

            judgements = judged_suite(load_sampler(suite), cases, count, seed)
        elif draws is not None:
            tasks = read_draws(draws, truth)
            judgements = {name: judged(*pair, tasks=len(tasks), seed=seed) for name, pair in tasks.items()}
        with needs_lab():
            from mmdgs.lab.judge import outcome

            made = outcome(judgements)
            title = f"Draws of {(suite or draws or out).name}"
            write_page(title, "Are the draws right?", out, made, overwrite=overwrite, seed=seed)
