"""`mmdgs judge`: are draws from a posterior right?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmdgs.cli.app import Debug, Overwrite, Seed, app, needs_lab, plain_errors
from mmdgs.cli.reproduce import write_page
from mmdgs.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

MOST_TASKS = 24


@app.command()
def judge(
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

    The N cases must be independent. An optional array `task` (N,) of numbers, such as noise levels, beside `draws` or
    `truth` judges each task by itself.
    """
    with plain_errors(debug):
        from mmdgs.files import holds_nothing
        from mmdgs.metrics import judge as judged

        if (draws is None) == (suite is None) or (suite is not None and truth is not None):
            raise UsageError("give DRAWS.npz (with --truth), or --suite SAMPLER.py")
        holds_nothing(out, overwrite)
        exact = None
        if suite is not None:
            with needs_lab():
                from mmdgs.lab.judge_suite import judged_suite, load_sampler

            both = judged_suite(load_sampler(suite), cases, count, seed)
            found, exact = ({name: pair[k] for name, pair in both.items()} for k in (0, 1))
        elif draws is not None:
            tasks = _read(draws, truth)
            found = {name: judged(*pair, seed=seed) for name, pair in tasks.items()}
        with needs_lab():
            from mmdgs.lab.judge import outcome

            made = outcome(found, exact)
            title = f"Draws of {(suite or draws or out).name}"
            write_page(title, "Are the draws right?", out, made, overwrite=overwrite, seed=seed)


def _read(draws: Path, truth: Path | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Draws and truth by task."""
    from mmdgs.diagnostics import read_arrays
    from mmdgs.metrics.judgement import LEAST_CASES, LEAST_DRAWS

    found = read_arrays(draws, ("draws",) if truth is not None else ("draws", "truth"), ("task",))
    if truth is not None:
        found |= read_arrays(truth, ("truth",), ("task",))
    made, right, task = found["draws"], found["truth"], found.get("task")
    if right.ndim < 1 or made.shape[1:] != right.shape or 0 in made.shape:
        raise UsageError(
            f"draws must be (S, N, ...) and truth (N, ...), got {tuple(made.shape)} and {tuple(right.shape)}"
        )
    if len(made) < LEAST_DRAWS:
        raise UsageError(f"{draws}: at least {LEAST_DRAWS} draws of each case are needed, got {len(made)}")
    if task is not None and task.shape != right.shape[:1]:
        raise UsageError(f"task must be ({len(right)},), a number for each case, got {tuple(task.shape)}")
    names = [None] if task is None else task.unique().tolist()
    if len(names) > MOST_TASKS:
        raise UsageError(f"task may hold {MOST_TASKS} different numbers at the most, got {len(names)}")
    parts = {}
    for name in names:
        rows = slice(None) if task is None or name is None else task == name
        part = made[:, rows], right[rows]
        if len(part[1]) < LEAST_CASES:
            where = "" if name is None else f" of task {name:g}"
            raise UsageError(f"at least {LEAST_CASES} independent cases{where} are needed, got {len(part[1])}")
        parts["all" if name is None else f"task {name:g}"] = part
    return parts
