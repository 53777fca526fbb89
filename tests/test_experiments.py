"""The lab: grids, claims and workspaces; and the 2-D experiments end to end at a tiny size."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from sizes import TINY

from mmdgs.errors import UsageError
from mmdgs.files import LOCK, write_atomically
from mmdgs.lab import DEMO, EXPERIMENTS, Context, Experiment, Outcome, TimeIsUp, Workspace, demo, toys
from mmdgs.lab.drawing import style
from mmdgs.lab.grid import Cell, Grid, Measure, Number, Results
from mmdgs.lab.mathematics import typeset
from mmdgs.lab.report import Claim, Section
from mmdgs.lab.workspace import Part, axis, described
from mmdgs.tables import plain

FID = Measure("fid", "FID", 2, "less")


def context_in(folder, **options):
    return Context(Workspace(folder, resume=True), torch.device("cpu"), quick=True, **options)


def perform(chosen, folder, **options):
    """Run an experiment: its records, its report, and the page."""
    path, report = chosen.perform(context_in(folder, **options))
    return json.loads((folder / "records.json").read_text()), report, path.read_text()


# --- grids --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    images: int = 3
    steps: tuple[int, ...] = axis((10, 25))


DEFAULT = Settings()


def grid_of(calls, settings=DEFAULT, rows=("DDIM", "Heun"), **options):
    """A grid whose cells hold known numbers and note that they were measured."""

    def measure(cell: Cell) -> Part:
        calls.append(cell.name)
        return Part({"fid": [cell.what + 10 / cell.column + seed for seed in cell.seeds]}, {"x": torch.ones(2)})

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
    assert measured(settings=Settings(steps=(25, 50))) == ["DDIM, 50", "Heun, 50"]  # `steps` only says which cells
    assert measured(settings=Settings(images=4)) == first
    assert measured(settings=Settings(images=4), seeds=2) == first
    assert measured(settings=Settings(images=4), seeds=2, more_seeds={("Heun", 10): 3}) == ["Heun, 10"]
    assert measured(settings=Settings(images=4), rows=("Heun", "DDIM"), seeds=2) == ["Heun, 10", "Heun, 25", *first[:2]]
    assert len(measured(seed=7)) == 4


def test_rows_can_be_chosen_and_an_unknown_one_is_refused(tmp_path):
    calls = []
    found = grid_of(calls).run(context_in(tmp_path, only=("Heun",)))
    assert found.rows == ["Heun"]
    assert calls == ["Heun, 10", "Heun, 25"]
    with pytest.raises(UsageError, match=r"--only must be a row of the table \(DDIM; Heun\), got 'nut'"):
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
    assert "Heun, 10; Heun, 25" in found.unfinished()[0]
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
    # Leaving out each of two groups gives 1 and 3: error sqrt(1) * 1, t quantile 12.7062 at 1 degree of freedom.
    whole = {"fid": 2.2, "fid_left_out": [1.0, 3.0]}
    assert FID.of(whole) == pytest.approx((2.2, 12.7062), rel=1e-5)
    assert FID.of(whole, {"fid": 1.2, "fid_left_out": [0.5, 2.5]}) == pytest.approx((1.0, 0.0))
    assert math.isnan(FID.of({"fid": 3.0}).half)
    assert FID.of({"fid": [1.0, math.inf]}).value == math.inf  # chains that diverged


def test_bold_is_the_best_where_intervals_tell_it_from_all_others():
    found = {"a": Number(1.0, 0.3), "b": Number(1.5, 0.3), "c": Number(1.6, 0.3), "d": Number(math.nan)}
    assert FID.best(found) == {"a"}
    assert replace(FID, better="more").best(found) == set()  # b and c are alike
    assert FID.best(found | {"e": Number(1.3, 0.3)}) == set()
    assert replace(FID, better="zero").best({"a": Number(-0.1), "b": Number(0.2)}) == {"a"}
    assert FID.best({"a": Number(1.0), "b": Number(1.004)}) == set()  # both are shown as 1.00
    assert FID.best({"a": Number(1.0), "b": Number(1.01)}) == {"a"}
    assert replace(FID, better=None).best(found) == set()
    # The interval decides where the table shows the standard deviation: t = 4.3 / sqrt(3) of these makes 2.5 of 1.
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
    table = found.table("t", [FID, Measure("repaired", "repaired", 0, percent=True)], head="sampler")
    assert list(table.header) == [
        "sampler",
        "FID, 10 steps",
        "repaired, 10 steps",
        "FID, 25 steps",
        "repaired, 25 steps",
    ]
    assert [row[2] for row in table.rows] == ["50%", ""]
    assert table.rows[1][3] == ""
    assert table.rows[0][1].startswith("1.10 ± ")
    assert table.best == {(0, 3)}  # two seeds tell nothing at 10 steps
    assert list(found.table("t", [FID, Measure("is", "IS")]).header) == ["", "FID, 10 steps", "FID, 25 steps"]
    assert list(found.listing("t", [Measure("is", "IS"), FID]).header) == ["", "steps", "FID"]
    against = found.table("t", [FID], against="DDIM", rows={"Heun": "Heun", "DDIM": "DDIM"}, columns={10: "ten"})
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
    assert found.below("DDIM", "Heun", FID, [10]).text == "DDIM has a better FID than Heun (steps: 10)"
    assert found.below("DDIM", "nut", FID).holds is None
    assert "1.10 against 2.10 at 10, -1.00 ± 0.00" in found.below("DDIM", "Heun", FID).numbers


def test_every_curve_has_its_name_beside_it_inside_the_panel_and_clear_of_the_others(tmp_path):
    rows = ("DDIM", "Heun", "Langevin", "ancestral, isotropic", "ancestral, spectral")
    canvas = grid_of([], rows=rows).run(context_in(tmp_path)).curves("c", "", FID).canvas
    (panel,) = canvas.axes
    assert panel.get_legend() is None
    boxes = {text.get_text(): text.get_window_extent() for text in panel.texts}
    assert boxes.keys() == set(rows)
    frame = panel.get_window_extent()
    for name, box in boxes.items():
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1
        assert not any(box.overlaps(other) for one, other in boxes.items() if one != name)
    colours = {text.get_text(): text.get_color() for text in panel.texts}
    assert colours["Langevin"] == style("Langevin").colour
    assert colours["ancestral, isotropic"] == style("ancestral, isotropic").colour


def test_curves_have_the_look_of_their_row(tmp_path):
    found = grid_of([]).run(context_in(tmp_path))
    lines = found.curves("c", "", FID).canvas.axes[0].get_lines()
    assert {line.get_color() for line in lines} == {"#2f8f5b"}  # both rows are green, one dashed
    assert {line.get_linestyle() for line in lines} >= {"-", "--"}


def test_a_curve_with_a_shorter_title_keeps_its_look(tmp_path):
    found = grid_of([]).run(context_in(tmp_path))
    (panel,) = found.curves("c", "", FID, rows={"DDIM": "DDIM", "Heun": "H"}).canvas.axes
    assert {text.get_text(): text.get_color() for text in panel.texts} == {"DDIM": "#2f8f5b", "H": "#2f8f5b"}


def test_claims_are_in_the_page_the_terminal_and_the_records(tmp_path, monkeypatch):
    claims = [Claim("a < b", True, "1 and 2"), Claim("c < d", False), Claim("e < f", None)]
    outcome = Outcome({"n": 1}, [Section("s", claims=claims)])
    monkeypatch.setattr(Experiment, "run", lambda self, context: outcome)
    records, report, page = perform(EXPERIMENTS["fig1"], tmp_path)
    assert records["claims"][0] == {"text": "a < b", "holds": True, "numbers": "1 and 2"}
    assert "a &lt; b" in page
    assert [row[2] for row in report.tables()[0].rows] == ["holds", "does not hold", "not decided"]


# --- the 2-D experiments ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("name", "figures", "rows"),
    [
        ("fig1", ["fig1_mixture.png", "fig1_posteriors.png"], {"posteriors": 5 * 4}),
        ("fig2", ["fig2.png"], {"single_chains": 5 * 3}),
    ],
)
def test_an_experiment_writes_records_figures_and_a_self_contained_report(tmp_path, name, figures, rows):
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
    # Chains started in the mode (1, 1) are still there after four steps; those from the density are in all four.
    assert min(many["start"]["exact"]["mode_2"]) > 0.9
    assert max(many["density"]["exact"]["mode_2"]) < 0.7
    # The methods of one group share its start: the row of independent draws does not.
    assert many["density"]["data"]["mmd"] != many["start"]["exact"]["mmd"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_records_and_another_seed_does_not(tmp_path):
    def records(folder, seed):
        context = context_in(tmp_path / folder, seed=seed)
        sets = toys.fit(context, TINY, ["rings"])
        return toys.single_chains(context, sets, TINY, ["full"]).records()

    first, again, other = records("a", 0), records("b", 0), records("c", 1)
    assert first == again
    assert first[0]["mmd"] != other[0]["mmd"]


@pytest.mark.usefixtures("tiny", "unpainted")
def test_the_demo_is_one_page_that_leads_with_its_takeaway_and_pictures_and_ends_with_a_command(tmp_path):
    records, report, page = perform(DEMO, tmp_path)
    assert page.count("data:image/png;base64,") == 4
    assert records.keys() >= {"fig1", "table1", "fig2", "digits"}
    assert "nats less likely than data" in report.takeaway
    order = [report.takeaway, "<figure>", "<table", "What to try next", f"mmdgs {report.following[0].command}"]
    places = [page.index(one) for one in order]
    assert places == sorted(places)
    table = report.tables()[0]
    paper = {row[0]: row[-1] for row in table.rows}
    assert paper["learned diagonal"] == "0.364 ± 0.044"  # the paper's Table 1, beside ours
    assert paper["analytic full"] == "0.005 ± 0.001"
    assert all(any(row[j] for row in table.rows) for j in range(len(table.header)))


def many_of(deficits: dict[str, list[float]]) -> Results:
    grid = Grid("many", {}, lambda _: Part(), across="data")
    return Results(grid, {(row, demo.DATASET): Part({"deficit": values}) for row, values in deficits.items()})


def test_the_demo_says_that_the_full_covariance_is_nearest_only_where_intervals_say_so():
    clear = {"full": [1.8, 1.9], "isotropic": [3.0, 3.1], "learned": [4.0, 4.1], "exact": [0.0, 0.01]}
    assert demo.takeaway(many_of(clear)).startswith("The full covariance")
    open_ = clear | {"isotropic": [1.7, 3.0]}
    assert "do not show that the full covariance is nearest" in demo.takeaway(many_of(open_))


def test_mathematics_is_set_in_the_page_and_spelt_out_elsewhere():
    text = r"a < $\sigma^2\, \partial D / \partial x_t$ of $p(x \mid x_t)$ & more"
    page = str(typeset(text))
    assert page.startswith('a &lt; <img class="formula" alt="sigma^2 dD / dx_t"')
    assert page.endswith("&amp; more")
    assert page.count("data:image/svg+xml;base64,") == 2
    assert plain(text) == "a < sigma^2 dD / dx_t of p(x | x_t) & more"
    assert plain("$5") == str(typeset("$5")) == "$5"


@pytest.mark.usefixtures("tiny", "unpainted")
def test_a_stopped_run_keeps_its_parts_and_a_resumed_one_redoes_only_the_rest(tmp_path, monkeypatch):
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
    monkeypatch.setattr(toys, "train", None)  # a second training would fail: the networks must come from the folder
    assert perform(EXPERIMENTS["fig2"], tmp_path / "cut", data=("rings",))[1].tables()[0].rows == whole


# --- workspaces ---------------------------------------------------------------------------------------------------


def test_what_a_part_depends_on_is_described_by_its_fields():
    @dataclass
    class Model:
        digest: str = "abc"

    found = described({"settings": Settings(), "model": Model(), 3: (torch.float64, None)})
    assert found == {"settings": {"kind": "Settings", "images": 3}, "model": "abc", "3": ["torch.float64", None]}
    with pytest.raises(TypeError, match="cannot depend on a Tensor"):
        described([torch.ones(1)])


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


def test_another_process_does_not_resume_beside_the_first(tmp_path):
    first = Workspace(tmp_path / "a")
    code = f"""
import pathlib
from mmdgs.lab.workspace import Workspace
Workspace(pathlib.Path({str(tmp_path / "a")!r}), resume=True)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    first.close()
    assert found.returncode == 1
    assert "another run is writing into" in found.stderr


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


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "records.json"
    write_atomically(target, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["records.json"]


def test_output_folders_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file; give a folder"):
        Workspace(tmp_path / "file")
    with pytest.raises(UsageError, match="cannot write in the output folder"):
        Workspace(tmp_path / "file" / "below")
    with pytest.raises(UsageError, match="not empty; use --resume"):
        Workspace(tmp_path)
    with pytest.raises(UsageError, match="choose one of"):
        Workspace(tmp_path / "new", overwrite=True, resume=True)


@pytest.mark.usefixtures("tiny", "unpainted")
def test_overwriting_removes_what_we_made_and_nothing_else(tmp_path):
    perform(EXPERIMENTS["fig1"], tmp_path)
    for foreign in ("notes.txt", "picture.png", "parts/mine.txt", "parts/mine.json"):
        (tmp_path / foreign).write_text("{}")
    Workspace(tmp_path, overwrite=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} - {LOCK}
    assert left == {"notes.txt", "picture.png", "parts/mine.txt", "parts/mine.json"}


def test_a_part_whose_files_do_not_belong_together_is_made_again(tmp_path):
    workspace = Workspace(tmp_path)
    for name in ("a", "b"):
        workspace.part(name, {}, lambda name=name: Part({"value": name}, {"x": torch.ones(1)}))
    (tmp_path / "parts" / "a.json").write_text('{"settings": {}, "values": {}, "sha256": ""}')
    assert workspace.part("a", {}, lambda: Part({"value": "new"})).values == {"value": "new"}
    (tmp_path / "parts" / "b.safetensors").write_bytes((tmp_path / "parts" / "a.safetensors").read_bytes())
    assert workspace.part("b", {}, lambda: Part({"value": "new"})).values == {"value": "new"}


def test_records_are_valid_json_where_a_number_is_not_finite(tmp_path):
    path = Workspace(tmp_path).write_json("records.json", {"a": [float("nan"), 1.0], "b": {"c": float("inf")}})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"a": [None, 1.0], "b": {"c": None}}
