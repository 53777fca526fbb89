"""Judging draws: the tests by exchange against closed forms, the suite against its exact
posteriors, the command.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import normals
from torch import Tensor
from typer.testing import CliRunner

from mmdgs.cli import app
from mmdgs.metrics import (
    Judgement,
    calibration_ratio,
    coverage_of,
    crps,
    judge,
    ranks,
    score_ksd,
    suite,
)
from mmdgs.metrics.judgement import _below, _exchanged, _share_above, _test, bins_for
from mmdgs.metrics.suite import Case, Levy, case_16


def correlated(*shape: int, seed: int = 0) -> Tensor:
    """Vectors whose numbers have a correlation of 0.8."""
    common = normals(*shape[:-1], 1, seed=seed + 100)
    return math.sqrt(0.8) * common + math.sqrt(0.2) * normals(*shape, seed=seed)


@pytest.mark.parametrize("count", [4, 9, 32])
def test_the_statistics_are_those_of_metrics(count: int) -> None:
    draws, truth = normals(count, 40, 3), 1.5 * normals(40, 3, seed=1)
    judgement = judge(draws, truth)
    assert judgement.calibration.value == pytest.approx(calibration_ratio(draws, truth), rel=1e-9)
    assert judgement.coverage.value == pytest.approx(coverage_of(draws, truth), rel=1e-9)
    assert judgement.crps == pytest.approx(crps(draws, truth).mean().item(), rel=1e-9)
    rank = ranks(draws, truth).double().mean().item() / count
    assert judgement.bias.value == pytest.approx(rank - 0.5)
    assert sum(judgement.histogram) == pytest.approx(1)


@pytest.mark.parametrize(
    ("ranks", "bins"), [(5, 5), (20, 20), (31, 31), (51, 17), (100, 20), (101, 20)]
)
def test_bins_hold_equally_many_ranks_where_they_can(ranks: int, bins: int) -> None:
    assert bins_for(ranks) == bins


def test_each_vector_as_the_truth_is_as_if_it_were() -> None:
    vectors = normals(6, 12, 2).round(decimals=1)  # with ties
    parts, (below, ties) = _exchanged(vectors, 6), _below(vectors)
    for j in range(6):
        others = torch.cat([vectors[:j], vectors[j + 1 :]])
        assert torch.equal(below[j] + ties[j] // 2, ranks(others, vectors[j]))
        ratio, covered = parts.statistics(torch.full((12,), j))[:2].tolist()
        assert ratio == pytest.approx(calibration_ratio(others, vectors[j]), rel=1e-9)
        assert covered == pytest.approx(coverage_of(others, vectors[j]), rel=1e-9)


def test_every_vector_may_play_the_truth_where_draws_are_right() -> None:
    """Draws in ascending order: the expected histogram is flat only if the last plays it too."""
    draws = normals(19, 200, 1).sort(0).values
    seen = judge(draws, normals(200, 1, seed=1))
    assert seen.expected == pytest.approx([1 / 20] * 20, rel=0.03)  # 2,000 exchanges or more


def test_a_statistic_is_tested_on_both_sides() -> None:
    null = torch.linspace(-1, 1, 999, dtype=torch.float64)
    assert _test(0.0, null).p == 1.0
    for value in (-2.0, 2.0):
        assert _test(value, null).p == pytest.approx(2 / 1000)
    assert _share_above(torch.tensor(2.0), null) == pytest.approx(1 / 1000)


def test_right_draws_are_rarely_called_wrong_though_their_numbers_depend_on_each_other() -> None:
    """At most 1% false alarms: of 30 sets more than 2 would have a chance of 0.4%."""
    pairs = ((correlated(9, 20, 30, seed=s), correlated(20, 30, seed=s + 1000)) for s in range(30))
    assert sum(bool(judge(*pair).problems) for pair in pairs) <= 2


@pytest.mark.parametrize(
    ("draws", "word"),
    [
        (lambda x: 0.5 * x, "too sure"),
        (lambda x: 2 * x, "too wide"),
        (lambda x: x + 0.7, "too high"),
        (lambda x: x - 0.7, "too low"),
    ],
)
def test_wrong_draws_are_called_by_name(draws, word: str) -> None:
    verdict = judge(draws(normals(30, 100, 4)), normals(100, 4, seed=1)).verdict
    assert word in verdict
    assert verdict.startswith("wrong: ")


def test_the_wrong_shape_alone_is_seen_in_the_ranks() -> None:
    """Two points at -1 and 1 have the mean and variance of a standard normal."""
    draws = torch.sign(normals(19, 400, 1)) + 0.01 * normals(19, 400, 1, seed=2)
    judgement = judge(draws, normals(400, 1, seed=1))
    assert judgement.ranks < 0.01
    assert judgement.calibration.p > 0.0125


def test_the_expected_crps_is_that_of_right_draws() -> None:
    judgement = judge(normals(49, 1000), normals(1000, seed=1))
    assert judgement.crps_expected == pytest.approx(1 / math.sqrt(math.pi), rel=0.02)
    assert judgement.crps == pytest.approx(judgement.crps_expected, rel=0.05)


def test_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="got 5"):
        judge(normals(9, 5, 2), normals(5, 2))
    with pytest.raises(ValueError, match="got 3"):
        judge(normals(3, 20, 2), normals(20, 2))


# --- the suite


@pytest.fixture(autouse=True)
def _short_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gibbs' chains of the suite that are long enough for tests."""
    for name, count in {"BURN_IN": 60, "SWEEPS": 200, "APART": 6, "MANY": 4_000}.items():
        monkeypatch.setattr(suite, name, count)


@cache
def cases_with_draws(seed: int) -> list[tuple[Case, Tensor, Tensor]]:
    """Cells of A and B with exact draws, and others to judge them by."""
    cells = [case_16("A1", 0.5, seed), case_16("A2", 0.2, seed)]
    cells += [Levy("Laplace", "imputation").case(12, seed)]
    return [
        (
            case,
            *(
                case.exact(19 * case.groups, torch.Generator().manual_seed(at + seed))
                for at in (0, 1000)
            ),
        )
        for case in cells
    ]


def judged_suite_of(
    seed: int, wrong: Callable[[Tensor, int], Tensor] = lambda x, seed: x
) -> list[Judgement]:
    """What the suite says of exact draws, changed by a function."""
    cases = cases_with_draws(seed)
    return [
        case.judged(wrong(draws, seed), others, tasks=len(cases), seed=seed)
        for case, draws, others in cases
    ]


def test_the_suite_rarely_calls_exact_draws_wrong() -> None:
    """At most 1% of runs, all problems and tests together: of 3 none or one."""
    wrong = [any(judgement.problems for judgement in judged_suite_of(seed)) for seed in range(3)]
    assert sum(wrong) <= 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x, seed: x.mean(0).expand_as(x), ("too sure", "90% intervals hold 0.")),
        (lambda x, seed: x.mean(0) + 0.5 * (x - x.mean(0)), ("too sure", "90% intervals")),
        (lambda x, seed: x.mean(0) + 2 * (x - x.mean(0)), ("too wide",)),
        (lambda x, seed: x + x.std(0), ("too high", "the means are not those of p(x | y)")),
    ],
)
def test_the_suite_calls_wrong_draws_by_name(
    wrong: Callable[[Tensor, int], Tensor], words: Sequence[str]
) -> None:
    for judgement in judged_suite_of(0, wrong):
        assert judgement.verdict.startswith("wrong: ")
        assert all(word in judgement.verdict for word in words), judgement.verdict


def test_numbers_of_exact_draws_and_of_a_mode_that_is_missed() -> None:
    """Score-KSD hardly sees the mode, its weight and the coverage of exact draws do."""
    case = case_16("A1", 0.2, 0)
    draws = case.exact(400, torch.Generator().manual_seed(5))
    right = {name: sum(values) / len(values) for name, values in case.numbers(draws).items()}
    assert right["ksd_ratio"] == pytest.approx(1, abs=0.1)
    assert right["mode"] == pytest.approx(0.19, abs=0.03)
    assert right["coverage"] == pytest.approx(0.9, abs=0.02)
    near = torch.where(suite.in_mode_16(draws)[..., None], draws.roll(1, 0), draws)
    missed = case.numbers(torch.where(suite.in_mode_16(near)[..., None], draws.roll(2, 0), near))
    assert sum(missed["ksd_ratio"]) / 5 < 1.3
    assert sum(missed["mode"]) / 5 < 0.05


@pytest.mark.parametrize(("matrix", "noise"), suite.CELLS_16)
def test_the_discrepancy_is_by_the_score_of_the_exact_posterior(matrix: str, noise: float) -> None:
    case = case_16(matrix, noise, 0)
    draws = case.exact(50, torch.Generator().manual_seed(5))
    a = case.problem.matrix
    posterior = suite.prior_16().given(case.problem.y, a, noise)
    scale = 1 / (torch.linalg.svdvals(a).median().item() + 1)
    expected = [
        score_ksd(x, posterior.mixture(i).score(x), scale) for i, x in enumerate(draws.unbind(1))
    ]
    assert case.numbers(draws)["ksd"] == pytest.approx(expected)


def test_the_noise_of_levy_processes_is_25_decibels_below_the_median_power() -> None:
    case = Levy("Gauss", "deconvolution").case(1_000, 0)
    problem, clean = case.problem, case.truth @ case.problem.matrix.mT
    assert (problem.y - clean).std().item() == pytest.approx(problem.noise, rel=0.02)
    ratio = clean.square().mean(1).median().item() / problem.noise**2
    assert 10 * math.log10(ratio) == pytest.approx(25, abs=1)


def test_the_tasks_of_levy_processes_are_those_of_their_authors() -> None:
    """33 places, 19 frequencies of which the ends have no imaginary part; rows orthonormal."""
    d, sizes = 64, {name: len(make(64)) for name, make in suite.TASKS.items()}
    assert sizes == {"identity": d, "deconvolution": d, "imputation": 33, "Fourier": 36}
    rows = suite.TASKS["Fourier"](d)
    assert (rows @ rows.mT - torch.eye(36)).abs().max() < 1e-12
    x = normals(1, d)
    spectrum = torch.fft.rfft(x, norm="ortho")[0]
    assert (x @ rows.mT)[0, :5].tolist() == pytest.approx(
        [spectrum.real[0].item(), *(math.sqrt(2) * spectrum.real[1:5]).tolist()]
    )
    blurred = suite.TASKS["deconvolution"](d) @ torch.eye(d).double()[0]
    assert blurred[1:7].tolist() == pytest.approx(blurred[-6:].flip(0).tolist())
    assert (blurred[2] / blurred[0]).item() == pytest.approx(math.exp(-0.5))
    assert (blurred > 0).sum() == 13
    assert blurred.sum() == pytest.approx(1)


def test_draws_beside_exact_ones_in_closed_form() -> None:
    """y ~ N(0, 1), x | y ~ N(y, 1): the means follow y; draws of the prior N(0, 2) have means that
    do not.
    """
    y = normals(400, 1, seed=5)
    truth, exact = y + normals(400, 1, seed=6), y + normals(30, 400, 1, seed=7)
    right = judge(y + normals(30, 400, 1, seed=8), truth, exact=exact)
    assert right.problems == []
    assert right.beside is not None
    assert right.beside.distance == pytest.approx(1, abs=0.3)
    assert right.beside.correlation == pytest.approx(30 / 31, abs=0.01)
    assert right.beside.crps == pytest.approx(1 / math.sqrt(math.pi), rel=0.1)
    prior = judge(math.sqrt(2) * normals(30, 400, 1, seed=9), truth, exact=exact)
    assert prior.beside is not None
    assert abs(prior.beside.correlation) < 0.2
    assert prior.crps == pytest.approx(math.sqrt(2 / math.pi), rel=0.1)
    # The truth alone sees nothing.
    assert min(prior.calibration.p, prior.coverage.p, prior.bias.p, prior.ranks) > 0.0025
    assert ["CRPS" in prior.problems[0], "the means are not" in prior.problems[1]] == [True, True]
    with pytest.raises(ValueError, match=r"\(29, 400, 1\)"):
        judge(exact, truth, exact=exact[1:])


# --- the command


def command(folder: Path, *words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["judge", *map(str, words), "--out", str(folder / "out")])
    return result.exit_code, " ".join(result.output.split())


def test_draws_of_a_file(tmp_path: Path) -> None:
    draws, truth = tmp_path / "draws.npz", tmp_path / "truth.npz"
    np.savez(draws, draws=0.5 * normals(20, 60, 2, 3).numpy())
    np.savez(truth, truth=normals(60, 2, 3, seed=1).numpy().astype(np.float32))
    status, said = command(tmp_path, draws, "--truth", truth)
    assert status == 0, said
    assert "wrong: too sure" in said
    records = json.loads((tmp_path / "out" / "records.json").read_text())
    assert records["judgements"]["all"]["calibration"]["value"] == pytest.approx(0.5, abs=0.06)
    assert (tmp_path / "out" / "ranks.png").is_file()
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert page.count("<table>") == 1
    assert page.count("<th") == 4  # more columns than that do not fit the page


def test_tasks_are_judged_by_themselves(tmp_path: Path) -> None:
    width, tasks = torch.tensor([1.0, 3.0]).repeat_interleave(40)[:, None], [0.1] * 40 + [2] * 40
    arrays = {"draws": width * normals(20, 80, 2), "truth": normals(80, 2, seed=1), "task": tasks}
    np.savez(tmp_path / "both.npz", **arrays)
    status, said = command(tmp_path, tmp_path / "both.npz")
    assert status == 0, said
    assert "wrong in 1 of 2 tasks: task 2: too wide" in said


def test_misuse_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("draws.npz", draws=np.zeros((20, 30)))
    np.savez("odd.npz", truth=np.zeros(7))
    np.savez("few.npz", draws=np.zeros((20, 4)), truth=np.zeros(4))
    Path("empty.py").write_text("x = 1\n")
    Path("broken.py").write_text("import nothing_such\n")
    flat = "import torch\ndef sample(p, draws, generator): return torch.zeros(draws, p.dim)\n"
    Path("flat.py").write_text(flat)
    for words, message in [
        ("", "give DRAWS.npz"),
        ("draws.npz", "'truth'"),
        ("few.npz", "got 4"),
        ("--suite empty.py", "sample(problem, draws, generator)"),
        ("--suite broken.py", "No module named 'nothing_such'"),
        ("--suite flat.py", "(500, 5, 16) of A1, 0.2"),
    ]:
        status, said = command(tmp_path, *words.split())
        assert status == 2, said
        assert message in said
    assert not Path("out").exists()


SAMPLER = """
import torch


def sample(problem, draws, generator):
    # Right where increments are normal with variance 1 / 4, wrong for the rest.
    a, d = problem.matrix, problem.dim
    places = torch.arange(1, d + 1).double()
    prior = 0.25 * torch.minimum(places[:, None], places)
    noise = problem.noise**2 * torch.eye(len(a)).double()
    gain = prior @ a.mT @ torch.linalg.inv(a @ prior @ a.mT + noise)
    root = torch.linalg.cholesky(prior - gain @ a @ prior + 1e-12 * torch.eye(d).double())
    noise = torch.randn(draws, problem.cases, d, generator=generator, dtype=torch.float64)
    return (problem.y @ gain.mT + noise @ root.mT).numpy()
"""


def test_the_suite_tells_a_right_posterior_from_wrong_ones(tmp_path: Path, monkeypatch) -> None:
    """On the first two cells of each benchmark."""
    for name in ("CELLS_16", "SUITE_OF_B"):
        monkeypatch.setattr(suite, name, getattr(suite, name)[:2])
    (tmp_path / "mine.py").write_text(SAMPLER)
    words = ("--suite", tmp_path / "mine.py", "--draws", 12, "--cases", 12)
    status, said = command(tmp_path, *words)
    assert status == 0, said
    records = json.loads((tmp_path / "out" / "records.json").read_text())
    judgements, numbers = records["judgements"], records["numbers"]
    assert list(judgements) == list(numbers)
    right = "Gauss, Fourier"
    for name, judgement in judgements.items():
        start = "no sign against the draws" if name == right else "wrong"
        assert judgement["verdict"].startswith(start), (name, judgement["verdict"])
    own, exact = (sum(each["gap"]) / 12 for each in numbers[right])
    assert own == pytest.approx(exact, abs=0.5)
    row = said[said.index("| mine |") :]
    assert row.count("|") == 6
    assert f"{own:.2f} / " in row
    assert "is code and is run" in " ".join(
        command(tmp_path, "--help")[1].replace("│", " ").split()
    )
