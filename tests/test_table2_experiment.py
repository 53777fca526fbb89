"""Table 2 as an experiment: costs of its rows, Langevin's tuning, its claims, and going on."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_experiments import performed, picture_folder, pictures_of, resumed, use_fake_inception
from nets import tiny_model
from toy_models import many_level_model

from experiments import Context, Workspace, sampler_cells, table2
from experiments.grid import Cell, Grid, Results
from experiments.sampler_cells import Judge, References, Sampling
from mmdgs import save
from mmdgs.errors import UsageError
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, randn
from mmdgs.samplers import State
from mmdgs.samplers.langevin import Langevin, variance_factor
from mmdgs.sampling import SamplerSettings
from mmdgs.workspace import Part

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
TINY = replace(
    table2.QUICK, images=4, seeds=2, levels=3, langevin_steps=2, tuning_images=2, fit_images=4,
    reference_limit=None, metrics=("fid", "diversity"), rate_factors=(0.5, 1.0), probes=1,
    krylov=(2,), krylov_steps=1, steps=(2, 3), probed_steps=(2,), heun=(2,),
)  # fmt: skip
SHAPE = (3, 8, 8)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A tiny network with a guide, images in the place of CIFAR-10, and a fake Inception."""
    model = many_level_model(SHAPE)
    save(model, tmp_path / "model")
    with torch.no_grad():
        next(model.network.parameters()).mul_(1.1)
    save(model, tmp_path / "model" / "guide")
    monkeypatch.setattr(table2, "DATA", str(picture_folder(tmp_path / "images")))
    use_fake_inception(tmp_path, monkeypatch)
    model, workspace = str(tmp_path / "model"), Workspace(tmp_path / "out")
    return Context(workspace, torch.device("cpu"), settings=TINY, model=model)


def test_it_measures_every_row_and_resumes_without_work(
    prepared: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, report = performed("table2", prepared)
    by = {(cell["row"], cell["levels or steps"]): cell for cell in records["samplers"]}
    assert {row for row, _ in by} == set(table2.ROWS)
    for cell in by.values():
        assert len(set(cell["fid_left_out"])) == 2
        assert cell["images"] == 4
    equal = table2.equal_cost_levels(TINY)
    for row, count in ((table2.GIBBS, equal), (table2.GIBBS, 3), (table2.DOWN, equal)):
        assert by[row, count]["evaluations"] == table2.gibbs_evaluations(count, TINY)
    assert by[table2.ISOTROPIC, equal]["evaluations"] == TINY.sweeps * (equal - 1) + 1
    assert by[table2.LANGEVIN, 3]["evaluations"] == table2.langevin_evaluations(3, TINY)
    assert by["Heun", 2]["evaluations"] == 3
    assert by[table2.GUIDED, 2]["evaluations"] == 6
    assert pictures_of(prepared) == {"table2", "table2_images"}
    assert not list((prepared.workspace.out / "parts").glob("*.npz"))
    table = report.sections[0].tables[0]
    assert any(row[1:4] == ["232", "4,852", "10.75"] for row in table.rows)  # the paper's
    monkeypatch.setattr(sampler_cells, "generate", None)  # nothing is sampled again
    assert table2.run(resumed(prepared)).records["samplers"] == records["samplers"]


def test_only_rows_that_are_asked_for_are_run(prepared: Context, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "model" / "guide")
    records, _ = performed("table2", replace(prepared, only=("Heun", "DDIM")))
    assert {cell["row"] for cell in records["samplers"]} == {"Heun", "DDIM"}
    assert records["tuning"] is None  # there is no Langevin to tune
    for wrong in (table2.GUIDED, "heun"):
        with pytest.raises(UsageError, match=f"{wrong!r}"):
            table2.run(resumed(prepared, only=(wrong,)))


def test_the_images_are_those_of_each_seed_alone(prepared: Context) -> None:
    settings = replace(TINY, images=5, seeds=1, batch_size=3, metrics=("diversity",))
    judge = Judge(("diversity",), References(table2.DATA, None, 8), prepared.device)
    sampling = Sampling(prepared, many_level_model(SHAPE), judge, settings)

    def images(*seeds: int) -> torch.Tensor:
        x, cost = sampling.images(Cell("a cell", 1, SamplerSettings("ddim"), seeds))
        assert cost["images"] == len(x) == 5 * len(seeds)
        return x

    assert torch.equal(images(3, 8), torch.cat([images(3), images(8)]))


def test_gibbs_costs_what_langevin_costs_and_the_cheapest_come_first() -> None:
    settings = table2.Table2Settings()
    levels = table2.equal_cost_levels(settings)
    assert table2.langevin_evaluations(settings.levels, settings) == 1_161
    assert table2.gibbs_evaluations(settings.levels, settings) == 4_852
    assert abs(table2.gibbs_evaluations(levels, settings) - 1_161) <= 21 / 2  # half a level
    cells = table2.table2_cells(many_level_model(SHAPE), 1.0, settings)
    last = [("Langevin", 232), ("Gibbs (paper)", 232), ("Gibbs, spectral", 232)]
    assert list(cells)[-4:] == [*last, ("Gibbs, down first", 56)]
    assert [len(cells[key].levels or ()) for key in last] == [232, 232, 232]
    assert {steps for row, steps in cells if row == "DDIM"} == {5}  # no more than the model has


@pytest.mark.parametrize(("rate", "steps"), [(0.1, 1), (0.3, 5)])
def test_the_variance_after_langevin_steps(rate: float, steps: int) -> None:
    """Data that are a point at zero: the denoiser is zero, chains start from the level above."""
    gamma, level, chains = 1.5, NoiseLevel(sigma=0.2), 40_000
    streams = Streams(0, chains)
    noise = randn((chains, 1), torch.zeros(0, dtype=torch.float64), streams)
    state = State(gamma * level.sigma * noise)
    kernel = Langevin(lambda x_t, _: torch.zeros_like(x_t), rate)
    for _ in range(steps):
        state, _ = kernel.step(state, level, level, generator=streams)
    factor = state.x.var().item() / level.sigma**2
    assert factor == pytest.approx(variance_factor(rate, gamma, steps), rel=5 * (2 / chains) ** 0.5)


@pytest.mark.parametrize(
    ("minimum", "largest", "tried", "inside"),
    [
        (1.0, 100.0, [0.5, 1.0, 2.0], True),
        (0.2, 100.0, [0.125, 0.25, 0.5, 1.0, 2.0], True),
        (7.0, 100.0, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0], True),
        (7.0, 3.0, [0.5, 1.0, 2.0, 4.0], False),  # no rate is larger: it is cut to the largest
        (1e-9, 100.0, [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0], False),  # some more, and no end of it
    ],
)
def test_tuning_goes_on_while_the_last_is_best(
    minimum: float, largest: float, tried: list[float], inside: bool
) -> None:
    def badness(factor: float) -> float:
        return abs(math.log(factor / minimum))

    def results(factors: list[float]) -> Results:
        cells = {(table2.LANGEVIN, f): Part({"badness": badness(f)}) for f in factors}
        return Results(Grid("t", {}, Part), cells)

    found = table2.searched(results, (0.5, 1.0, 2.0), largest)
    assert sorted(found.columns) == tried
    assert table2.best_rate(found) == (min(tried, key=badness), inside)


def test_gibbs_is_judged_by_the_same_seed_left_out_of_both() -> None:
    def fid(value: float, *left_out: float) -> dict[str, Any]:
        return {"fid": value, "fid_left_out": list(left_out), "evaluations": 100, "images": 20}

    def holds(*both: dict[str, Any]) -> bool | None:
        return table2.no_worse("t", *both).holds

    assert holds(fid(3.1, 3.0, 3.2), fid(1.1, 1.0, 1.2)) is False  # what varies, varies alike
    assert holds(fid(4.1, 4.0, 4.2), fid(3.1, 3.2, 3.0)) is True  # 1, with a larger interval
    assert holds(fid(1.1, 1.0, 1.2), fid(3.1, 3.0, 3.2)) is True
    assert holds(fid(4.1), fid(3.1)) is None  # one seed has no interval


def test_bad_input(prepared: Context, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="10 images of 3 seeds"):
        table2.run(replace(prepared, seeds=3, images=10))
    save(tiny_model("score", SHAPE, sigma=0.3), tmp_path / "one")
    with pytest.raises(UsageError, match=r"many noise levels.*sigma 0\.3"):
        table2.run(replace(prepared, model=str(tmp_path / "one")))
