"""Table 2 as an experiment: what rows cost, how Langevin is tuned, its claims, and going on after a stop."""

from __future__ import annotations

import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from image_experiments import performed, picture_folder, pictures_of, resumed, use_fake_inception
from nets import tiny_model
from toy_models import many_level_model
from typer.testing import CliRunner

from mmdgs import cli, save
from mmdgs.errors import UsageError
from mmdgs.generation import Method, engine
from mmdgs.lab import Context, TimeIsUp, Workspace, sampler_cells, table2, table2_rows
from mmdgs.lab.grid import Cell, Grid, Results
from mmdgs.lab.sampler_cells import Judge, References, Sampling
from mmdgs.lab.table2_papers import count_figure
from mmdgs.lab.workspace import Part
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, randn
from mmdgs.samplers import State
from mmdgs.samplers.langevin import Langevin
from mmdgs.samplers.langevin_rates import suggested_rate, variance_factor
from mmdgs.schedules import geometric

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
TINY = replace(
    table2.QUICK, images=10, seeds=2, levels=4, langevin_steps=2, tuning_images=2, fit_images=4,
    reference_limit=None, metrics=("fid", "is", "precision-recall", "diversity"), rate_factors=(0.5, 1.0), probes=1,
    krylov=(2,), steps=(2, 3), probed_steps=(2,), heun=(2,),
)  # fmt: skip
SHAPE = (3, 8, 8)


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table2, "DATA", str(folder / "images"))
    monkeypatch.setattr(table2, "FULL", TINY)
    use_fake_inception(folder, monkeypatch)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A tiny network of five levels with a guide, a folder of images in the place of CIFAR-10, and a fake Inception."""
    model = many_level_model(SHAPE)
    save(model, tmp_path / "model")
    with torch.no_grad():
        next(model.network.parameters()).mul_(1.1)
    save(model, tmp_path / "model" / "guide")
    picture_folder(tmp_path / "images")
    prepare(tmp_path, monkeypatch)
    return Context(Workspace(tmp_path / "out"), torch.device("cpu"), model=str(tmp_path / "model"))


def test_it_measures_every_row_and_resumes_without_work(prepared: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = replace(prepared, most_images=15)
    records, report = performed("table2", prepared)
    by = {(r["row"], r["levels or steps"]): r for r in records["samplers"]}
    assert {row for row, _ in by} == set(table2_rows.ROWS)
    for one in by.values():
        assert len(set(one["fid_left_out"])) == 2
        assert one["images"] == 10
        assert "is" in one["open"]  # the fake has no head
    more = {(r["row"], r["first images"]): r for r in records["papers"]}
    with_more = ("Heun", table2_rows.GUIDED, *table2.PAPER)
    assert set(more) == {(row, n) for row in with_more for n in (10, 15)}
    costs = [one["evaluations"] * one["images"] for one in more.values()]
    assert costs == sorted(costs)  # the cheapest first
    for row in with_more:
        assert more[row, 10]["evaluations"] == table2_rows.evaluations(TINY)[row]
    # Features are kept in 16 bits.
    for row, n in (("Heun", 2), (table2_rows.GUIDED, 2), (table2_rows.LANGEVIN, 4), (table2_rows.GIBBS, 4)):
        assert more[row, 10]["fid"] == pytest.approx(by[row, n]["fid"], rel=3e-3)
        assert more[row, 15]["fid_left_out"][-1] == pytest.approx(more[row, 10]["fid"], rel=1e-9)
        assert len(more[row, 15]["fid_left_out"]) == 3
        assert more[row, 15]["fid"] != more[row, 10]["fid"]
        assert more[row, 15]["evaluations"] == by[row, n]["evaluations"]
    equal = table2_rows.equal_cost_levels(TINY)
    for row, count in ((table2_rows.GIBBS, equal), (table2_rows.GIBBS, 4), (table2_rows.DOWN, equal)):
        assert by[row, count]["evaluations"] == table2_rows.gibbs_evaluations(count, TINY)
    assert by[table2_rows.ISOTROPIC, equal]["evaluations"] == TINY.sweeps * (equal - 1) + 1
    assert by[table2_rows.LANGEVIN, 4]["evaluations"] == table2_rows.langevin_evaluations(4, TINY)
    assert by["Heun", 2]["evaluations"] == 3
    assert by[table2_rows.GUIDED, 2]["evaluations"] == 6
    assert ("DDIM", 3) in by
    assert pictures_of(prepared) == {"table2", "table2_images", "table2_more"}
    assert not list((prepared.workspace.out / "parts").glob("*.npz"))
    claims = report.sections[0].claims
    assert "15 images" in claims[0].numbers  # the paper's rows, by all their seeds
    assert f"at {table2_rows.gibbs_evaluations(equal, TINY):,.0f} evaluations" in claims[2].numbers
    table = report.sections[0].tables[0]
    assert ["paper: Gibbs (paper), NCSNv2, 50,000 images", "232", "4,852", "10.75"] in [row[:4] for row in table.rows]
    monkeypatch.setattr(sampler_cells, "generate", None)  # nothing is sampled again
    assert table2.run(resumed(prepared)).records["samplers"] == records["samplers"]


def test_fids_that_end_early_are_extrapolated_in_the_picture_of_more_images() -> None:
    # FIDs 3 + 20 / n of n images; one of two groups left out has half of them.
    few, many = ({"fid": 3 + 20 / n, "fid_left_out": [3 + 40 / n, 3 + 40 / n]} for n in (10, 40))
    parts = {("Langevin", 10): Part(few), ("Heun", 10): Part(few), ("Heun", 40): Part(many)}
    (axis,) = count_figure(Results(Grid("papers", {}, lambda cell: Part({})), parts), 40).axes
    (dotted,) = (line for line in axis.lines if line.get_linestyle() == ":")  # Heun's is measured to the end
    assert dotted.get_xydata()[[0, -1]] == pytest.approx(numpy.array([[10, 5], [40, 3.5]]))


def test_a_model_without_a_guide_has_no_guided_row(prepared: Context, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "model" / "guide")
    records, _ = performed("table2", replace(prepared, only=("Heun",)))
    assert {r["row"] for r in records["samplers"]} == {"Heun"}
    with pytest.raises(UsageError, match=r"--only must be a row of the table .*got 'Heun, guided'"):
        table2.run(resumed(prepared, only=(table2_rows.GUIDED,)))


def test_only_the_rows_that_are_asked_for_are_run(prepared: Context) -> None:
    records, report = performed("table2", replace(prepared, only=("Heun", "DDIM")))
    assert {r["row"] for r in records["samplers"]} == {"Heun", "DDIM"}
    assert records["tuning"] is None  # there is no Langevin to tune
    assert {r["row"] for r in records["papers"]} == {"Heun"}
    assert [section.title for section in report.sections] == ["The table", "More seeds"]
    assert "papers" not in table2.run(resumed(prepared, only=("DDIM",))).records
    both = table2.run(resumed(prepared, only=("Heun", "Langevin"))).records
    assert {r["row"] for r in both["samplers"]} == {"Heun", "Langevin"}
    assert all(one["rate"] > 0 for one in both["tuning"])
    with pytest.raises(UsageError, match=r"--only must be a row of the table .*got 'heun'"):
        table2.run(resumed(prepared, only=("heun",)))


def test_no_seed_is_begun_after_its_minutes_and_finished_rows_are_shown(
    prepared: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(prepared, only=("Heun", "DDIM"))
    with pytest.raises(UsageError, match=r"0.* minutes were over before the first cell"):
        table2.run(replace(few, minutes=0.0))
    checks = []

    def after_five(self: Context) -> None:  # a check before each of two cells, and before their second seeds
        checks.append(self)
        if len(checks) >= 4:
            raise TimeIsUp

    monkeypatch.setattr(Context, "check_time", after_five)
    records, report = performed("table2", resumed(few))
    assert [(r["row"], r["levels or steps"]) for r in records["samplers"]] == [("Heun", 2)]
    assert "Not finished yet, which --resume does: DDIM, 2; DDIM, 3." in report.sections[0].text
    (begun,) = (tmp_path / "out" / "parts").glob("*.npz")  # the first of its two seeds is done, and kept
    written = begun.stat().st_mtime_ns
    monkeypatch.undo()
    prepare(tmp_path, monkeypatch)
    generate, seen = sampler_cells.generate, []

    def watched(*args: object, out: Path, **rest: object) -> object:
        found = generate(*args, out=out, **rest)
        seen.append((out.name, out.stat().st_mtime_ns))
        return found

    monkeypatch.setattr(sampler_cells, "generate", watched)
    whole, report = performed("table2", resumed(few))
    assert seen[0] == (begun.name, written)  # which is not made again
    assert [name.split(",")[0] for name, _ in seen] == ["DDIM"] * 4 + ["Heun"] * 2  # its third and fourth seed
    assert whole["samplers"][:1] == records["samplers"]
    assert {r["row"] for r in whole["samplers"]} == {"Heun", "DDIM"}
    assert not any("Not finished" in text for text in report.sections[0].text)


def sampling(context: Context, batch_size: int, images: int, **judge: object) -> Sampling:
    settings = replace(TINY, images=images, seeds=1, batch_size=batch_size, shown=100, metrics=("diversity",))
    references = References(table2.DATA, None, 8)
    return Sampling(context, many_level_model(SHAPE), Judge(("diversity",), references, context.device),
                    settings)  # fmt: skip


def test_the_images_are_those_of_each_seed_alone(prepared: Context) -> None:
    def images(*seeds: int) -> torch.Tensor:
        x, cost = sampling(prepared, 3, 5).images(Cell("a cell", 1, Method("ddim"), seeds))
        assert cost["images"] == len(x) == 5 * len(seeds)
        return x

    assert torch.equal(images(3, 8), torch.cat([images(3), images(8)]))


def test_a_cell_that_was_stopped_goes_on(prepared: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("a cell", 1, Method("ddim"), (0,))
    whole = sampling(prepared, 2, 5)(cell)
    batch, asked = engine._Engine.batch, []

    def failing(self, first, stop, tick):  # type: ignore[no-untyped-def]
        asked.append((first, stop))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return batch(self, first, stop, tick)

    monkeypatch.setattr(engine._Engine, "batch", failing)
    with pytest.raises(KeyboardInterrupt):
        sampling(resumed(prepared), 2, 5)(cell)
    found = sampling(resumed(prepared), 2, 5)(cell)
    assert asked == [(0, 2), (2, 4), (2, 4), (4, 5)]
    assert torch.equal(found.tensors["shown"], whole.tensors["shown"])
    assert found.values["diversity"] == whole.values["diversity"]
    assert found.values["evaluations"] == whole.values["evaluations"] == 5


# --- the rows -------------------------------------------------------------------------------------------------------


def test_gibbs_costs_what_langevin_costs_within_half_a_level() -> None:
    settings = table2_rows.Table2Settings()
    levels = table2_rows.equal_cost_levels(settings)
    langevin = table2_rows.langevin_evaluations(settings.levels, settings)
    assert langevin == 1_161
    assert table2_rows.gibbs_evaluations(settings.levels, settings) == 4_852
    one = table2_rows.gibbs_evaluations(levels + 1, settings) - table2_rows.gibbs_evaluations(levels, settings)
    assert abs(table2_rows.gibbs_evaluations(levels, settings) - langevin) <= one / 2
    assert one == 21


def test_cells_come_cheapest_first() -> None:
    cells = table2.table2_cells(many_level_model(SHAPE), 1.0, table2_rows.Table2Settings())
    last = list(cells)[-4:]
    assert last == [("Langevin", 232), ("Gibbs (paper)", 232), ("Gibbs, spectral", 232), ("Gibbs, down first", 56)]
    assert [len(cells[key].levels or ()) for key in last] == [232, 232, 232, 56]
    assert {steps for row, steps in cells if row == "DDIM"} == {5}  # no more than the model has


# --- Langevin's step size -------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("minimum", "largest", "tried", "inside"),
    [
        (1.0, 100.0, [0.5, 1.0, 2.0], True),
        (0.2, 100.0, [0.125, 0.25, 0.5, 1.0, 2.0], True),
        (7.0, 100.0, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0], True),
        (7.0, 3.0, [0.5, 1.0, 2.0, 4.0], False),  # no rate is larger than this one, which is cut to the largest
        (1e-9, 100.0, [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0], False),  # some more, and no end of it
    ],
)
def test_tuning_goes_on_while_the_last_is_best(
    minimum: float, largest: float, tried: list[float], inside: bool
) -> None:
    def results(factors: list[float]) -> Results:
        cells = {(table2_rows.LANGEVIN, f): Part({"badness": abs(math.log(f / minimum))}) for f in factors}
        return Results(Grid("t", {}, Part), cells)

    found = table2.searched(results, (0.5, 1.0, 2.0), largest)
    best, within = table2.best_rate(found)
    assert sorted(found.columns) == tried
    assert within == inside
    assert best == min(tried, key=lambda f: abs(math.log(f / minimum)))


# --- what the report says -------------------------------------------------------------------------------------------


def fid(value: float, *left_out: float) -> dict[str, Any]:
    return {"fid": value, "fid_left_out": list(left_out), "evaluations": 100, "images": 20}


def test_gibbs_is_judged_by_the_same_seed_left_out_of_both() -> None:
    def holds(*both: dict[str, Any]) -> bool | None:
        return table2.no_worse("t", *both).holds

    assert holds(fid(3.1, 3.0, 3.2), fid(1.1, 1.0, 1.2)) is False  # what varies, varies alike
    assert holds(fid(4.1, 4.0, 4.2), fid(3.1, 3.2, 3.0)) is True  # a difference of 1, with a larger interval
    assert holds(fid(1.1, 1.0, 1.2), fid(3.1, 3.0, 3.2)) is True
    assert holds(fid(4.1), fid(3.1)) is None  # one seed has no interval
    claim = table2.no_worse("t", *(fid(value, value - 0.1, value + 0.1) for value in (3.0, 2.0)))
    assert claim.holds is False
    # The interval of two groups: Student's t of one degree of freedom, 12.7, times half the difference.
    assert claim.numbers == (
        "3.00 ± 1.27 at 100 evaluations against 2.00 ± 1.27 at 100; difference +1.00 ± 0.00; 20 images"
    )


# --- bad input ------------------------------------------------------------------------------------------------------


def test_images_that_seeds_cannot_share_are_refused(prepared: Context) -> None:
    with pytest.raises(
        UsageError, match=r"images must be a multiple of the number of seeds.* got 10 images of 3 seeds"
    ):
        table2.run(replace(prepared, seeds=3))


def test_a_model_of_one_level_is_refused(tmp_path: Path) -> None:
    save(tiny_model("score", SHAPE, sigma=0.3), tmp_path / "one")
    words = ["reproduce", "table2", "--model", str(tmp_path / "one"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "must be a model of many noise levels" in said
    assert "sigma=0.3" in said


def test_without_a_model_it_takes_the_one_that_ships_or_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(Workspace(tmp_path / "out"), torch.device("cpu"))
    found = table2.many_level_model(context)
    assert found.shape == (3, 32, 32)
    assert len(found.levels) == 232
    monkeypatch.setattr(table2, "MODEL", "no-such-model")
    with pytest.raises(UsageError, match=r"no-such-model.* or train one with .* and name it with --model") as error:
        table2.run(context)
    assert shlex.split(str(error.value).split("`")[1])[:2] == ["mmdgs", "train"]
