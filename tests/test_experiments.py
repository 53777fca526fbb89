"""Experiments: grids, claims and workspaces; the 2-D ones and the demo end to end, and misuse."""

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from sizes import TINY
from typer.testing import CliRunner

from experiments import EXPERIMENTS, Context, Experiment, Outcome, TimeIsUp, Workspace
from experiments.__main__ import app
from experiments.experiment import QUICK_NOTE
from experiments.grid import Cell, Grid, Measure, Number, Results, axis
from mmdgs import cli
from mmdgs.demo import photograph, toys
from mmdgs.errors import NonFiniteError, UsageError
from mmdgs.files import LOCK
from mmdgs.report.mathematics import typeset
from mmdgs.report.page import Claim, Section
from mmdgs.tables import plain
from mmdgs.targets import GaussianMixture
from mmdgs.workspace import Part

FID = Measure("fid", "FID", 2, "less")


def context_in(folder, quick=True, **options):
    return Context(Workspace(folder, resume=True), torch.device("cpu"), quick=quick, **options)


def perform(chosen, folder, **options):
    """Run an experiment: its records, its report, and the page."""
    path, report = chosen.perform(context_in(folder, **options))
    return json.loads((folder / "records.json").read_text()), report, path.read_text()


# --- grids


@dataclass(frozen=True)
class Settings:
    images: int = 3
    steps: tuple[int, ...] = axis((10, 25))


DEFAULT = Settings()


def grid_of(calls, settings=DEFAULT, rows=("DDIM", "Heun"), **options):
    """A grid whose cells hold known numbers and note that they were measured."""

    def measure(cell: Cell) -> Part:
        calls.append(cell.name)
        return Part(
            {"fid": [cell.what + 10 / cell.column + seed for seed in cell.seeds]},
            {"x": torch.ones(2)},
        )

    cells = {(row, steps): float(i) for i, row in enumerate(rows) for steps in settings.steps}
    return Grid("g", cells, measure, depends=settings, across="steps", **options)


def test_a_cell_is_measured_again_only_where_something_it_depends_on_changed(tmp_path):
    def measured(seed=0, **options):
        calls = []
        context = context_in(tmp_path, seed=seed)
        grid_of(calls, **options).run(context)
        context.workspace.close()
        return calls

    first = ["DDIM, 10", "DDIM, 25", "Heun, 10", "Heun, 25"]
    assert measured() == first
    assert measured() == []
    # `steps` only says which cells
    assert measured(settings=Settings(steps=(25, 50))) == ["DDIM, 50", "Heun, 50"]
    assert measured(settings=Settings(images=4)) == first
    assert measured(settings=Settings(images=4), seeds=2) == first
    assert measured(settings=Settings(images=4), seeds=2, more_seeds={("Heun", 10): 3}) == [
        "Heun, 10"
    ]
    swapped = measured(settings=Settings(images=4), rows=("Heun", "DDIM"), seeds=2)
    assert swapped == ["Heun, 10", "Heun, 25", *first[:2]]
    assert len(measured(seed=7)) == 4


def test_rows_can_be_chosen_and_an_unknown_one_is_refused(tmp_path):
    calls = []
    found = grid_of(calls).run(context_in(tmp_path, only=("Heun",)))
    assert found.rows == ["Heun"]
    assert calls == ["Heun, 10", "Heun, 25"]
    with pytest.raises(UsageError, match="'nut'"):
        grid_of(calls).run(context_in(tmp_path / "other", only=("nut",)))


def test_a_grid_stops_when_its_time_is_up_and_the_rest_is_named(tmp_path):
    context = context_in(tmp_path, minutes=1.0)
    grid = grid_of([])

    def slow(cell: Cell) -> Part:
        if cell.row == "Heun":
            raise TimeIsUp
        return Part({"fid": 1.0})

    found = replace(grid, measure=slow).run(context)
    assert found.rows == ["DDIM"]
    assert found.left == [("Heun", 10), ("Heun", 25)]
    assert found.open() == ["Heun, 10", "Heun, 25"]
    late = replace(context, minutes=0.0, started=context.started - 1)
    with pytest.raises(UsageError, match="over before the first cell"):
        replace(grid, name="other").run(late)


def results(cells: dict) -> Results:
    return Results(grid_of([]), {key: Part(values) for key, values in cells.items()})


def test_numbers_have_students_interval_or_the_jackknifes_and_differences_are_paired():
    a, b = {"fid": [1.0, 2.0, 3.0]}, {"fid": [0.5, 1.5, 2.5]}
    assert FID.of(a) == pytest.approx((2.0, 4.302653 / 3**0.5), rel=1e-6)
    assert FID.of(a, b) == pytest.approx((0.5, 0.0))
    assert replace(FID, deviation=True).of(a) == pytest.approx((2.0, 1.0))
    # Leaving out each of two groups gives 1 and 3: error sqrt(1) * 1, t quantile 12.7062 at 1
    # degree of freedom.
    whole = {"fid": 2.2, "fid_left_out": [1.0, 3.0]}
    assert FID.of(whole) == pytest.approx((2.2, 12.7062), rel=1e-5)
    assert FID.of(whole, {"fid": 1.2, "fid_left_out": [0.5, 2.5]}) == pytest.approx((1.0, 0.0))
    assert math.isnan(FID.of({"fid": 3.0}).half)
    assert FID.of({"fid": [1.0, math.inf]}).value == math.inf  # chains that diverged


def test_bold_is_the_best_where_intervals_tell_it_from_all_others():
    found = {row: Number(value, 0.3) for row, value in (("a", 1.0), ("b", 1.5), ("c", 1.6))}
    found["d"] = Number(math.nan)
    assert FID.best(found) == {"a"}
    assert replace(FID, better="more").best(found) == set()  # b and c are alike
    assert FID.best(found | {"e": Number(1.3, 0.3)}) == set()
    assert replace(FID, better="zero").best({"a": Number(-0.1), "b": Number(0.2)}) == {"a"}
    assert FID.best({"a": Number(1.0), "b": Number(1.004)}) == set()  # both are shown as 1.00
    assert FID.best({"a": Number(1.0), "b": Number(1.01)}) == {"a"}
    assert replace(FID, better=None).best(found) == set()
    # The interval decides where the table shows the standard deviation: t = 4.3 / sqrt(3) of these
    # makes 2.5 of 1.
    far = results({("DDIM", 10): {"fid": [1.0, 2.0, 3.0]}, ("Heun", 10): {"fid": [4.0, 5.0, 6.0]}})
    assert far.table("t", [replace(FID, deviation=True)]).best == set()
    assert far.listing("t", [replace(FID, deviation=True)]).best == set()
    near = results({("DDIM", 10): {"fid": [1.0, 2.0, 3.0]}, ("Heun", 10): {"fid": [6.0, 7.0, 8.0]}})
    assert near.table("t", [replace(FID, deviation=True)]).best == {(0, 1)}
    assert near.table("t", [replace(FID, deviation=True)]).rows[0][1] == "2.00 ± 1.00"


def test_tables_show_every_cell_once():
    found = results(
        {
            ("DDIM", 10): {"fid": [1.0, 1.2], "repaired": 0.5},
            ("DDIM", 25): {"fid": [0.5, 0.7], "repaired": 0.25},
            ("Heun", 10): {"fid": [2.0, 2.2]},
        }
    )
    table = found.table(
        "t", [FID, Measure("repaired", "repaired", 0, percent=True)], head="sampler"
    )
    both = [f"{name}, {steps} steps" for steps in (10, 25) for name in ("FID", "repaired")]
    assert list(table.header) == ["sampler", *both]
    assert [row[2] for row in table.rows] == ["50%", ""]
    assert table.rows[1][3] == ""
    assert table.rows[0][1].startswith("1.10 ± ")
    assert table.best == {(0, 3)}  # two seeds tell nothing at 10 steps
    fids = found.table("t", [FID, Measure("is", "IS")])  # no cell has an IS
    assert list(fids.header) == ["", *both[::2]]
    assert list(found.listing("t", [Measure("is", "IS"), FID]).header) == ["", "steps", "FID"]
    against = found.table(
        "t", [FID], against="DDIM", rows={"Heun": "Heun", "DDIM": "DDIM"}, columns={10: "ten"}
    )
    assert [row[1] for row in against.rows] == ["+1.00 ± 0.00", table.rows[0][1]]
    assert against.best == {(1, 1)}
    lines = found.listing("t", [FID], rows=["Heun", "DDIM"])
    assert [row[:2] for row in lines.rows] == [["Heun", "10"], ["DDIM", "10"], ["DDIM", "25"]]
    assert found.records()[2] == {"row": "Heun", "steps": 10, "fid": [2.0, 2.2]}


def test_a_row_is_below_another_where_the_paired_interval_says_so():
    found = results(
        {
            ("DDIM", 10): {"fid": [1.0, 1.2]},
            ("Heun", 10): {"fid": [2.0, 2.2]},
            ("DDIM", 25): {"fid": [1.0, 3.0]},
            ("Heun", 25): {"fid": [2.0, 2.2]},
        }
    )
    assert found.below("DDIM", "Heun", FID, [10]).holds is True
    assert found.below("Heun", "DDIM", FID, [10]).holds is False
    assert found.below("DDIM", "Heun", FID).holds is None  # at 25 steps the seeds do not agree
    assert found.below("Heun", "DDIM", FID).holds is False  # as at 10 steps
    assert (
        found.below("DDIM", "Heun", FID, [10]).text == "DDIM has a better FID than Heun (steps: 10)"
    )
    assert found.below("DDIM", "nut", FID).holds is None
    assert "1.10 against 2.10, -1.00 ± 0.00 at 10" in found.below("DDIM", "Heun", FID).numbers


def test_claims_are_in_the_page_the_terminal_and_the_records(tmp_path, monkeypatch):
    claims = [Claim("a < b", True, "1 and 2"), Claim("c < d", False), Claim("e < f", None)]
    outcome = Outcome({"n": 1}, [Section("s", claims=claims)])
    monkeypatch.setattr(Experiment, "run", lambda self, context: outcome)
    records, report, page = perform(EXPERIMENTS["fig1"], tmp_path, quick=False)
    assert records["claims"][0] == {"text": "a < b", "holds": True, "numbers": "1 and 2"}
    assert "a &lt; b" in page
    assert [row[2] for row in report.tables()[0].rows] == ["holds", "does not hold", "not decided"]
    records, report, page = perform(EXPERIMENTS["fig1"], tmp_path)
    assert records["claims"] == report.tables() == []
    assert QUICK_NOTE in page


# --- the 2-D experiments


@pytest.mark.usefixtures("tiny", "unpainted")
@pytest.mark.parametrize(
    ("name", "figures", "rows"),
    [
        ("fig1", ["fig1_mixture.png", "fig1_posteriors.png"], {"posteriors": 5 * 4}),
        ("fig2", ["fig2.png"], {"single_chains": 5 * 3}),
    ],
)
def test_an_experiment_writes_records_figures_and_a_self_contained_report(
    tmp_path, name, figures, rows
):
    records, report, page = perform(EXPERIMENTS[name], tmp_path)
    for figure in figures:
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    assert page.count("data:image/png;base64,") == len(figures)
    assert 'src="http' not in page
    assert "href=" not in page
    for table in report.tables():
        assert table.title.replace("'", "&#39;") in page
    assert records["environment"]["torch"] == torch.__version__
    assert records["environment"]["seed"] == 0
    assert records["settings"]["training"]["steps"] == TINY.training.steps
    assert records["figures"] == figures
    assert {key: len(records[key]) for key in rows} == rows


@pytest.mark.usefixtures("tiny", "unpainted")
def test_table1_holds_every_run_of_every_method(tmp_path):
    records, _, _ = perform(EXPERIMENTS["table1"], tmp_path, data=("mog",), seeds=3)
    single = {one["row"]: one for one in records["single"]}
    assert single.keys() == toys.METHODS.keys()
    for one in single.values():
        assert len(one["mmd"]) == len(one["ess"]) == len(one["switches"]) == 3
        assert 0 <= one["repaired"] <= 1
    many = {start: {one["row"]: one for one in found} for start, found in records["many"].items()}
    for found in many.values():
        assert found.keys() == {*toys.METHODS, toys.FLOOR}
        for one in found.values():
            assert len(one["mmd"]) == len(one["deficit"]) == 3
            assert sum(sum(one[f"mode_{k}"]) for k in range(4)) == pytest.approx(3)
    # Chains started in the mode (1, 1) are still there after four steps; those from the density are
    # in all four.
    assert min(many["start"]["exact"]["mode_2"]) > 0.9
    assert max(many["density"]["exact"]["mode_2"]) < 0.7
    # The methods of one group share its start: the row of independent draws does not.
    assert many["density"]["data"]["mmd"] != many["start"]["exact"]["mmd"]


def test_the_deficit_is_how_much_less_likely_samples_are_than_data():
    """Of the standard normal in the plane it is |x|^2 / 2 - 1 at x."""
    density = GaussianMixture([1.0], [[0.0, 0.0]], 1.0)
    groups = [torch.zeros(3, 2), torch.tensor([[2.0, 0.0], [0.0, -4.0]])]
    groups.append(torch.tensor([[math.inf, 0.0], [0.0, 0.0]]))
    found = toys.against_truth(density, groups, groups, -math.log(2 * math.pi) - 1)
    assert found["deficit"] == pytest.approx([-1.0, 4.0, math.inf], abs=1e-5)
    assert found["mmd"][2] == math.inf


def test_both_photographs_of_the_demo_have_one_middle():
    large, small = (photograph.clean_photograph(side) for side in (256, 128))
    assert torch.equal(large[:, 64:192, 64:192], small)


@pytest.mark.usefixtures("tiny", "unpainted")
def test_the_demo_is_one_page_that_leads_with_its_takeaway_and_ends_with_a_command(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    words = ["demo", "--out", str(tmp_path), "--device", "cpu", "--resume"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    *_, report, following = result.output.strip().splitlines()
    assert report == f"report: {tmp_path / 'report.html'}"
    assert following.startswith("next: mmdgs sample mnist ")
    assert "0.364 ± 0.044" in result.output  # the paper's Table 1, beside ours
    text = (tmp_path / "report.html").read_text()
    assert text.count("data:image/png;base64,") == 6
    order = ["nats less likely than data", "<figure>", "<table", "What to try next", "mmdgs sample"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    records = json.loads((tmp_path / "records.json").read_text())
    assert len(records["posteriors"]) == 5 * 4
    assert len(records["many"]) == len(toys.METHODS) + 1
    assert all(0.7 < row["covered"] <= 1 for row in records["photograph"])
    assert min(row["psnr"] for row in records["photograph"]) > 20


def test_mathematics_is_set_in_the_page_and_spelt_out_elsewhere():
    text = r"a < $\sigma^2\, \partial D / \partial x_t$ of $p(x \mid x_t)$ & more"
    page = str(typeset(text))
    assert page.startswith('a &lt; <img class="formula" alt="sigma^2 dD / dx_t"')
    assert page.endswith("&amp; more")
    assert page.count("data:image/svg+xml;base64,") == 2
    assert plain(text) == "a < sigma^2 dD / dx_t of p(x | x_t) & more"
    assert plain("$5") == str(typeset("$5")) == "$5"


@pytest.mark.usefixtures("tiny", "unpainted")
def test_a_stopped_run_keeps_its_parts_and_a_resumed_one_redoes_only_the_rest(
    tmp_path, monkeypatch
):
    whole = perform(EXPERIMENTS["fig2"], tmp_path / "whole", data=("rings",))[1].tables()[0].rows
    real, done = toys.run, []

    def stop_at_the_third(*args, **kwargs):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(toys, "run", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        perform(EXPERIMENTS["fig2"], tmp_path / "cut", data=("rings",))
    assert not (tmp_path / "cut" / "records.json").exists()
    kept = {"rings-energy-0", "rings-learned-0", "single-learned-rings", "single-isotropic-rings"}
    assert {p.stem for p in (tmp_path / "cut" / "parts").glob("*.json")} == kept
    monkeypatch.setattr(toys, "run", real)
    monkeypatch.setattr(
        toys, "train", None
    )  # a second training would fail: the networks must come from the folder
    assert (
        perform(EXPERIMENTS["fig2"], tmp_path / "cut", data=("rings",))[1].tables()[0].rows == whole
    )


# --- workspaces


@pytest.mark.parametrize(
    "content",
    [
        b'{"environment": null}',
        b'{"environment": {"mmdgs": 1}, "figures": 3}',
        b'{"environment": {"mmdgs": 1}, "figures": [1, null, "..", "a/../../b"]}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_damaged_records_are_no_hindrance_to_starting_anew(content, tmp_path):
    (tmp_path / "out" / "parts").mkdir(parents=True)
    (tmp_path / "b").write_text("somebody's")
    for name in ("records.json", "parts/a.json"):
        (tmp_path / "out" / name).write_bytes(content)
    Workspace(tmp_path / "out", overwrite=True).close()
    assert (tmp_path / "b").exists()


def test_two_runs_do_not_write_in_one_folder(tmp_path):
    first = Workspace(tmp_path / "a")
    with pytest.raises(UsageError, match="another run is writing into"):
        Workspace(tmp_path / "a", resume=True)
    first.close()
    Workspace(tmp_path / "a").close()  # the lock's file does not count as content


def test_a_part_is_reused_for_the_same_settings_only_and_made_again_where_damaged(tmp_path):
    workspace = Workspace(tmp_path)
    calls = []

    def compute():
        calls.append(1)
        return Part({"value": len(calls)}, {"x": torch.arange(3.0)})

    assert workspace.part("p", {"n": 1}, compute).values == {"value": 1}
    again = workspace.part("p", {"n": 1}, compute)
    assert again.values == {"value": 1}
    torch.testing.assert_close(again.tensors["x"], torch.arange(3.0))
    assert workspace.part("p", {"n": 2}, compute).values == {"value": 2}
    (tmp_path / "parts" / "p.safetensors").write_bytes(b"cut short")
    assert workspace.part("p", {"n": 2}, compute).values == {"value": 3}


@pytest.mark.usefixtures("tiny", "unpainted")
def test_overwriting_removes_what_we_made_and_nothing_else(tmp_path):
    perform(EXPERIMENTS["fig1"], tmp_path)
    for foreign in ("notes.txt", "picture.png", "parts/mine.txt", "parts/mine.json"):
        (tmp_path / foreign).write_text("{}")
    Workspace(tmp_path, overwrite=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} - {
        LOCK
    }
    assert left == {"notes.txt", "picture.png", "parts/mine.txt", "parts/mine.json"}


def test_a_part_whose_files_do_not_belong_together_is_made_again(tmp_path):
    workspace = Workspace(tmp_path)
    for name in ("a", "b"):
        workspace.part(name, {}, lambda name=name: Part({"value": name}, {"x": torch.ones(1)}))
    (tmp_path / "parts" / "a.json").write_text('{"depends": "", "values": {}, "sha256": ""}')
    assert workspace.part("a", {}, lambda: Part({"value": "new"})).values == {"value": "new"}
    (tmp_path / "parts" / "b.safetensors").write_bytes(
        (tmp_path / "parts" / "a.safetensors").read_bytes()
    )
    assert workspace.part("b", {}, lambda: Part({"value": "new"})).values == {"value": "new"}


def test_records_are_valid_json_where_a_number_is_not_finite(tmp_path):
    path = Workspace(tmp_path).write_json(
        "records.json", {"a": [float("nan"), 1.0], "b": {"c": float("inf")}}
    )
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "a": [None, 1.0],
        "b": {"c": None},
    }


# --- the command


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig9"], "unknown experiment 'fig9' (did you mean 'fig2'?)"),
        (["fig1", "--data", "mog"], "--data is for table1, fig2, not for fig1"),
        (["table2", "--many", "x"], "--many is for calibration, cifar10, not for table2"),
        (["table2", "--only", "nut"], "--only must be a row of the table (Langevin;"),
        (["fig1", "--seed", "-1"], "--seed"),
        (["fig1", "--overwrite", "--resume"], "choose one of"),
    ],
)
def test_misuse_is_status_2_and_one_line(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split()).replace("│ ", "").replace(" │", "")
    assert "Traceback" not in result.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.usefixtures("tiny", "unpainted")
def test_a_folder_that_is_not_empty_needs_overwrite_and_odd_paths_are_shown_as_they_are(tmp_path):
    out = tmp_path / "a[red]b"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    words = ["fig2", "--quick", "--data", "rings", "--data", "rings", "--out", str(out)]
    assert CliRunner().invoke(app, [*words, "--device", "cpu"]).exit_code == 2
    result = CliRunner().invoke(app, [*words, "--device", "cpu", "--overwrite"])
    assert result.exit_code == 0, result.output
    assert result.output.strip().splitlines()[-1] == f"report: {out / 'report.html'}"
    records = json.loads((out / "records.json").read_text())
    assert [one["data"] for one in records["single_chains"]] == ["rings"] * 5


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (NonFiniteError("denoising mean", [3], 7), 1, "the denoising mean is not finite at step 7"),
        (KeyboardInterrupt(), 130, "--resume"),
    ],
)
def test_a_run_that_ends_early_keeps_its_parts_and_says_why(
    tmp_path, monkeypatch, error, status, message
):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(toys, "run", broken)
    words = ["table1", "--quick", "--data", "mog", "--out", str(tmp_path), "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == status
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert (tmp_path / "parts" / "mog-energy-0.json").exists()
    assert not (tmp_path / "records.json").exists()
