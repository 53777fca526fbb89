"""`mmdgs judge` and `mmdgs diagnose`: draws and chains of any program, judged on a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Argument, Context, Option

from mmdgs.cli.app import Overwrite, Seed, app, needs, output, refuse_idle
from mmdgs.cli.reports import write_page
from mmdgs.errors import UsageError

Page = Annotated[Path, Option("--out", "-o", help="Folder for report.html and records.json.")]


@app.command()
def judge(
    context: Context,
    draws: Path | None = Argument(
        None,
        metavar="[DRAWS.npz]",
        help="Draws of any program: an array `draws` (S, N, ...).",
        show_default=False,
    ),
    out: Page = Path("judged"),
    truth: Path | None = Option(
        None,
        help="An .npz with `truth` (N, ...); it may be in DRAWS.npz too.",
        show_default="DRAWS.npz",
    ),
    suite: Path | None = Option(
        None,
        metavar="SAMPLER.py",
        help="Judge a sampler on two published benchmarks with known posteriors. The file is code "
        "and is run: name only one you trust. It defines sample(problem, draws, generator) and "
        "returns draws (draws, N, d).",
    ),
    count: int = Option(
        50, "--draws", min=4, help="With --suite: draws of each signal; of benchmark A ten times."
    ),
    cases: int = Option(20, min=10, help="With --suite: signals of each Levy process."),
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Judge draws by the truth: calibration, coverage, CRPS and ranks with their bands; one
    verdict, one figure.

    The verdict calls right draws wrong with a probability of at most 1%, in all tests of all tasks
    together. The N cases must be independent. An optional array `task` (N,) of numbers, such as
    noise levels, beside `draws` or `truth` judges each task by itself.
    """
    from mmdgs.diagnostics import read_draws
    from mmdgs.files import holds_nothing
    from mmdgs.metrics import judge as judged
    from mmdgs.metrics.suite import judged_suite, load_sampler, row_of

    if (draws is None) == (suite is None) or (suite is not None and truth is not None):
        raise UsageError("give DRAWS.npz (with --truth), or --suite SAMPLER.py")
    refuse_idle(context, (suite is None, ("count", "cases"), "--suite SAMPLER.py"))
    holds_nothing(out, overwrite)
    judged_problems = {}
    if draws is None:
        assert suite is not None
        judged_problems = judged_suite(load_sampler(suite), cases, count, seed)
        judgements = {name: each.judgement for name, each in judged_problems.items()}
    else:
        tasks = read_draws(draws, truth)
        judgements = {
            name: judged(*pair, tasks=len(tasks), seed=seed) for name, pair in tasks.items()
        }
    with needs("report"):
        from mmdgs.report.draws import outcome

        page = outcome(judgements, judged_problems)
        title, question = f"Draws of {(suite or draws or out).name}", "Are the draws right?"
        write_page(title, question, out, lambda _: page, seed=seed, overwrite=overwrite)
    if suite is not None:
        output.print("The row for docs/results/benchmarks.md:")
        output.print(escape(row_of(suite.stem, judged_problems)), soft_wrap=True)


@app.command()
def diagnose(
    out: Page,
    chain: Path = Argument(
        metavar="CHAIN.npz", help="Chains: an array `samples` (steps, chains, ...)."
    ),
    modes: Path | None = Option(
        None,
        help="An .npz with the centres that chains must visit, `modes` (K, ...), if known with "
        "`weights` (K,); they may be in CHAIN.npz too.",
    ),
    burn_in: int = Option(0, min=0, help="Leave out so many steps at the start."),
    overwrite: Overwrite = False,
) -> None:
    """Judge chains of any program: R-hat, effective sample size, traces, autocorrelation, modes;
    one HTML page.

    `mmdgs.diagnostics.save_chain(FILE, samples)` writes the chains that `gibbs_chain` or `run(...,
    keep=...)` returns.
    """
    from mmdgs.diagnostics import diagnose as diagnosed, read_chain
    from mmdgs.files import holds_nothing

    holds_nothing(out, overwrite)
    arrays = read_chain(chain, modes, burn_in)
    judged = diagnosed(arrays["samples"], arrays.get("modes"), arrays.get("weights"))
    with needs("report"):
        from mmdgs.report.chains import outcome

        page = outcome(arrays["samples"], judged)
        title, question = f"Chains of {chain.name}", "Have the chains converged?"
        write_page(title, question, out, lambda _: page, overwrite=overwrite)
