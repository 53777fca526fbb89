"""Table 2 as an experiment: what rows cost, how Langevin is tuned, its verdicts, and going on after a stop."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_experiments import concluded, picture_folder, use_fake_inception
from nets import tiny_model
from toy_models import many_level_model
from typer.testing import CliRunner

from mmdgs import cli, save
from mmdgs.errors import UsageError
from mmdgs.generation import Method, generation
from mmdgs.lab import Context, Workspace, sampler_cells, table2, table2_report
from mmdgs.lab.sampler_cells import Cells, Judge, References
from mmdgs.lab.workspace import Part
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, randn
from mmdgs.samplers import State
from mmdgs.samplers.langevin import Langevin
from mmdgs.samplers.langevin_rates import suggested_rate, variance_factor
from mmdgs.schedules import geometric

TINY = replace(
    table2.QUICK, images=20, seeds=2, papers_seeds=3, levels=6, tuning_images=4, fit_images=4, batch_size=10,
    reference_limit=None, metrics=("fid", "is", "precision-recall", "diversity"), rate_factors=(0.5, 1.0, 1.5),
    krylov=(3,), steps=(3, 4),
)  # fmt: skip


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A tiny network of five levels, a folder of images in the place of CIFAR-10, and a fake Inception."""
    save(many_level_model((3, 8, 8)), tmp_path / "model")
    monkeypatch.setattr(table2, "DATA", str(picture_folder(tmp_path / "images")))
    monkeypatch.setattr(table2, "FULL", TINY)  # ten images a seed: the Inception score wants as many
    use_fake_inception(tmp_path, monkeypatch)
    return Context(Workspace(tmp_path / "out"), torch.device("cpu"), model=str(tmp_path / "model"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_it_measures_every_row_and_resumes_without_work(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, text = concluded(table2, prepared)
    by = {(r["row"], r["steps"]): r for r in records["samplers"]}
    assert {row for row, _ in by} == set(table2_report.ROWS)
    papers = [("Langevin", 6), ("Gibbs (paper)", 6)]
    for key, one in by.items():
        assert len(set(one["fid_left_out"])) == 2
        assert one["images"] == (30 if key in papers else 20)
        assert ("all" in one) == (key in papers)
        assert "is" in one["open"]  # the fake has no head
    for key in papers:  # which have more seeds, and their numbers of the table from the first two alone
        assert len(by[key]["all"]["fid_left_out"]) == 3
        assert by[key]["all"]["fid_left_out"][-1] == pytest.approx(by[key]["fid"], rel=1e-6)
        assert by[key]["all"]["fid"] != by[key]["fid"]
    equal = table2.equal_cost_levels(TINY)
    for row, count in (("Gibbs (paper)", equal), ("Gibbs (paper)", 6), ("Gibbs, down first", equal)):
        assert by[row, count]["evaluations"] == table2.gibbs_evaluations(count, TINY)
    assert by["Gibbs, isotropic", equal]["evaluations"] == TINY.sweeps * (equal - 1) + 1
    assert by["Langevin", 6]["evaluations"] == table2.langevin_evaluations(6, TINY)
    assert by["Heun", 4]["evaluations"] == 7
    assert ("DDIM", 3) in by
    assert {f.name for f in (tmp_path / "out").glob("*.png")} == {"table2.png", "table2_images.png"}
    assert not list((tmp_path / "out" / "parts").glob("*.npz"))
    text = " ".join(text.split())
    for words in (
        "At the paper&#39;s settings, 30 images each",
        "At equal cost",
        "paper: NCSNv2, Gibbs, 50,000 images",
        "4,852",
    ):
        assert words in text
    monkeypatch.setattr(sampler_cells, "generate", None)  # nothing is sampled again
    again = replace(prepared, workspace=Workspace(tmp_path / "out", resume=True))
    assert table2.run(again).records["samplers"] == records["samplers"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_only_the_rows_that_are_asked_for_are_run(prepared: Context, tmp_path: Path) -> None:
    records, text = concluded(table2, replace(prepared, only=("Heun", "DDIM")))
    assert {r["row"] for r in records["samplers"]} == {"Heun", "DDIM"}
    assert records["tuning"] is None  # there is no Langevin to tune
    assert "step size of Langevin" not in text
    again = replace(prepared, workspace=Workspace(tmp_path / "out", resume=True), only=("Heun", "Langevin"))
    both = table2.run(again).records
    assert {r["row"] for r in both["samplers"]} == {"Heun", "Langevin"}
    assert both["tuning"]["rate"] > 0
    with pytest.raises(UsageError, match=r"--only must be a row of the table \(Langevin; .*got 'heun'"):
        table2.run(replace(prepared, only=("heun",)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_no_seed_is_begun_after_its_minutes_and_finished_rows_are_shown(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="0 minutes were over before the first row"):
        table2.run(replace(prepared, minutes=0.0))

    def resumed(minutes: float | None) -> tuple[dict, str]:
        context = replace(prepared, workspace=Workspace(tmp_path / "out", resume=True), minutes=minutes)
        records, text = concluded(table2, context)
        return records, " ".join(text.split())

    sampled, made = Cells.sampled, []

    def noting(self: Cells, name: str, *rest: object) -> Part:
        made.append(name)
        return sampled(self, name, *rest)

    def rows() -> list[str]:
        return [name for name in made if not name.startswith("tuning")]

    monkeypatch.setattr(Cells, "sampled", noting)
    monkeypatch.setattr(Context, "time_is_up", property(lambda _: len(rows()) >= 3))
    records, text = resumed(1.0)
    assert len(records["samplers"]) == 2
    assert records["settings"]["left"][0] == rows()[2]  # the first of its two seeds is done, and kept
    (begun,) = (tmp_path / "out" / "parts").glob("*.npz")
    written = begun.stat().st_mtime_ns
    assert "Not finished yet, which --resume does: " in text
    assert "No row of Gibbs has run yet." in text
    monkeypatch.undo()
    monkeypatch.setattr(table2, "DATA", str(tmp_path / "images"))
    monkeypatch.setattr(table2, "FULL", TINY)
    use_fake_inception(tmp_path, monkeypatch)
    seeds_done = []
    generate = sampler_cells.generate

    def watched(*args: object, out: Path, **rest: object) -> object:
        found = generate(*args, out=out, **rest)
        if out == begun:
            seeds_done.append(out.stat().st_mtime_ns)
        return found

    monkeypatch.setattr(sampler_cells, "generate", watched)
    whole, text = resumed(None)
    assert seeds_done == [written]
    assert whole["settings"]["left"] == []
    assert "Not finished yet" not in text
    assert whole["samplers"][: len(records["samplers"])] != []
    assert {r["row"] for r in whole["samplers"]} == set(table2_report.ROWS)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_images_are_those_of_each_seed_alone(prepared: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_level_model((3, 8, 8))
    cells = Cells(prepared, model, table2.DATA, 4, 3, "float32", 100)

    def images(seeds: list[int]) -> torch.Tensor:
        made = cells.sampled("a cell", Method("ddim"), 5, seeds, lambda x, _: {"count": len(x)}, {})
        assert made.values["count"] == made.values["images"] == 5 * len(seeds)
        return made.tensors["shown"]

    assert torch.equal(images([3, 8]), torch.cat([images([3]), images([8])]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_judge_reads_its_reference_once(prepared: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge.of(prepared, ("fid", "precision-recall"), References(table2.DATA))
    x = judge.references.load().images
    read = sampler_cells.cached_features
    calls: list[bool] = []

    def counting(*given, keep, **more):  # type: ignore[no-untyped-def]
        calls.append(keep)
        return read(*given, keep=keep, **more)

    monkeypatch.setattr(sampler_cells, "cached_features", counting)
    first, again = judge(x[:8], "a"), judge(x[:8], "b")
    assert first == again
    assert judge(x, "the reference itself")["fid"] == pytest.approx(0, abs=1e-6)
    assert calls == [True]
    assert replace(judge, metrics=("fid",))(x[:8], "c")["fid"] == first["fid"]
    assert calls == [True, False]


def test_a_stopped_cell_goes_on_with_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_level_model((3, 8, 8))
    references = References(str(picture_folder(tmp_path / "images")))
    device = torch.device("cpu")

    def cell(folder: str, resume: bool = False) -> Part:
        context = Context(Workspace(tmp_path / folder, resume=resume), device)
        cells = Cells(context, model, references.name, 4, 2, "float32", 3)
        return cells.sampled("a cell", Method("ddim"), 5, [0], Judge(("diversity",), references, device), {})

    whole = cell("whole")
    batch = generation._Engine.batch
    made: list[tuple[int, int]] = []

    def noting(self, first, stop, tick):  # type: ignore[no-untyped-def]
        if (first, stop) == (2, 4) and len(made) == 1:
            made.append((-1, -1))
            raise KeyboardInterrupt
        made.append((first, stop))
        return batch(self, first, stop, tick)

    monkeypatch.setattr(generation._Engine, "batch", noting)
    with pytest.raises(KeyboardInterrupt):
        cell("stopped")
    found = cell("stopped", resume=True)
    assert made == [(0, 2), (-1, -1), (2, 4), (4, 5)]
    assert torch.equal(found.tensors["shown"], whole.tensors["shown"])
    assert found.values["diversity"] == whole.values["diversity"]
    assert found.values["evaluations"] == whole.values["evaluations"] == 5


def test_gibbs_costs_what_langevin_costs_within_half_a_level() -> None:
    settings = table2.Table2Settings()
    levels = table2.equal_cost_levels(settings)
    langevin = table2.langevin_evaluations(settings.levels, settings)
    assert langevin == 1_161
    assert table2.gibbs_evaluations(settings.levels, settings) == 4_852
    one = table2.gibbs_evaluations(levels + 1, settings) - table2.gibbs_evaluations(levels, settings)
    assert abs(table2.gibbs_evaluations(levels, settings) - langevin) <= one / 2
    assert one == 21


def test_cells_come_cheapest_first() -> None:
    model = many_level_model((3, 8, 8))
    cells = table2.wanted(model, 1.0, table2.Table2Settings())
    last = [(cell.row, cell.steps) for cell in cells[-4:]]
    assert last == [("Langevin", 232), ("Gibbs (paper)", 232), ("Gibbs, spectral", 232), ("Gibbs, down first", 56)]
    assert [len(cell.method.levels or ()) for cell in cells[-4:]] == [232, 232, 232, 56]
    assert {cell.steps for cell in cells if cell.row == "DDIM"} == {5}  # no more than the model has


# --- Langevin's step size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("levels", "published"), [((232, 50.0, 0.01), 0.062), ((500, 90.0, 0.01), 0.033)])
def test_the_suggested_rates_are_those_of_ncsnv2(levels: tuple[int, float, float], published: float) -> None:
    assert suggested_rate(geometric(*levels), 5) == pytest.approx(published, abs=5e-4)


@pytest.mark.parametrize(("rate", "steps"), [(0.1, 1), (0.3, 5)])
def test_the_variance_after_langevin_steps(rate: float, steps: int) -> None:
    """Where the data are a point at zero the denoiser is zero; chains start with the variance of the level above."""
    gamma, level, chains = 1.5, NoiseLevel(sigma=0.2), 40_000
    streams = Streams(0, chains)
    state = State(gamma * level.sigma * randn((chains, 1), torch.zeros(0, dtype=torch.float64), streams))
    kernel = Langevin(lambda x_t, _: torch.zeros_like(x_t), rate)
    for _ in range(steps):
        state, _ = kernel.step(state, level, level, generator=streams)
    found = state.x.var().item() / level.sigma**2
    assert found == pytest.approx(variance_factor(rate, gamma, steps), rel=5 * (2 / chains) ** 0.5)


def test_a_minimum_at_the_edge_is_told() -> None:
    assert table2.best_rate({0.5: 3.0, 1.0: 2.0, 2.0: 4.0}) == (1.0, True)
    assert table2.best_rate({2.0: 1.0, 1.0: 2.0, 0.5: 4.0}) == (2.0, False)


@pytest.mark.parametrize(
    ("minimum", "largest", "tried"),
    [
        (1.0, 100.0, [0.5, 1.0, 2.0]),
        (0.2, 100.0, [0.125, 0.25, 0.5, 1.0, 2.0]),
        (7.0, 100.0, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]),
        (7.0, 3.0, [0.5, 1.0, 2.0, 4.0]),  # no rate is larger than this one, which is cut to the largest
        (1e-9, 100.0, [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0]),  # some more, and no end of it
    ],
)
def test_tuning_goes_on_while_the_last_is_best(minimum: float, largest: float, tried: list[float]) -> None:
    found = table2.searched(lambda f: abs(math.log(f / minimum)), (0.5, 1.0, 2.0), largest)
    assert sorted(found) == tried


# --- what the report says ---------------------------------------------------------------------------------------


def fid(value: float, *left_out: float, **more: object) -> dict[str, object]:
    return {"fid": value, "fid_left_out": list(left_out), **more}


def test_differences_are_judged_by_seeds() -> None:
    compared = table2_report.compared
    assert compared(fid(1.1, 1.0, 1.2), fid(3.1, 3.0, 3.2)) == "lower by 2.00 ± 0.00"  # what varies, varies alike
    assert compared(fid(4.1, 4.0, 4.2), fid(3.1, 3.2, 3.0)).startswith("not to be told apart: the difference is +1.00")
    assert compared(fid(4.1, 4.0, 4.2, 4.1), fid(3.1, 3.02, 3.18, 3.1)).startswith("higher by 1.00 ± 0.")
    assert "one seed" in compared({"fid": 1.0}, {"fid": 3.0})


def test_verdicts_on_made_up_numbers() -> None:
    def values(value: float, evaluations: float = 100.0, **more: object) -> dict[str, object]:
        return fid(value, value - 0.1, value + 0.1, evaluations=evaluations, **more)

    by = {
        ("Langevin", 232): values(12.05, 1_161, all=values(11.05, images=10_000)),
        ("Gibbs (paper)", 232): values(13.05, 4_852, all=values(11.75, images=10_000)),
        ("Gibbs (paper)", 56): values(14.05, 1_156),
        ("Gibbs, down first", 56): values(8.05, 1_156),
        ("ancestral, isotropic", 25): values(7.05),
        ("ancestral, Krylov", 25): values(6.05),
    }
    said = " ".join(table2_report.verdicts(by, {"levels": 232, "equal_cost_levels": 56, "images": 5_000}))
    # The interval of two groups: Student's t of one degree of freedom, 12.7, times half the difference.
    assert (
        "At the paper's settings, 10,000 images each: Gibbs with 232 levels has FID 11.75 ± 1.27 at 4,852 evaluations, "
        "Langevin 11.05 ± 1.27 at 1,161; Gibbs is higher by 0.70 ± 0.00." in said
    )
    assert "At equal cost: Gibbs with 56 levels has FID 14.05 ± 1.27 at 1,156 evaluations, Langevin 12.05" in said
    assert "The best Gibbs variant is 'Gibbs, down first' with 56 levels, 8.05, below the paper's 10.75 (which" in said
    assert "The lowest of all is 'ancestral, Krylov'" in said
    assert "in 25 steps: Krylov is lowest, 6.05; isotropic 7.05." in said


# --- bad input --------------------------------------------------------------------------------------------------


def test_images_that_seeds_cannot_share_are_refused(prepared: Context) -> None:
    with pytest.raises(
        UsageError, match=r"images must be a multiple of the number of seeds.* got 20 images of 3 seeds"
    ):
        table2.run(replace(prepared, seeds=3))


def test_a_model_of_one_level_is_refused(tmp_path: Path) -> None:
    save(tiny_model("score", (3, 8, 8), sigma=0.3), tmp_path / "one")
    words = ["reproduce", "table2", "--model", str(tmp_path / "one"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "must be a model of many noise levels" in said
    assert "sigma=0.3" in said


def test_without_a_model_it_takes_the_one_that_ships(tmp_path: Path) -> None:
    found = table2.many_level_model(Context(Workspace(tmp_path / "out"), torch.device("cpu")))
    assert found.shape == (3, 32, 32)
    assert len(found.levels) == 232


def test_where_none_came_along_it_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table2, "MODEL", "no-such-model")
    context = Context(Workspace(tmp_path / "out"), torch.device("cpu"))
    with pytest.raises(UsageError, match=r"no-such-model.* or train one with .* and name it with --model") as error:
        table2.run(context)
    command = str(error.value).split("`")[1]
    assert shlex.split(command)[:2] == ["mmdgs", "train"]
