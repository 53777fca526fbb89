"""Experiments end to end at a tiny size: what they write, that they resume, and that they stop cleanly."""

import json

import pytest
import torch
from sizes import TINY

from mmdgs.errors import UsageError
from mmdgs.files import write_atomically
from mmdgs.lab import DEMO, EXPERIMENTS, Context, Workspace, conclude, toys
from mmdgs.lab.workspace import Part
from mmdgs.metrics import interval


def context_in(folder, **options):
    return Context(Workspace(folder, resume=True), torch.device("cpu"), quick=True, **options)


def perform(chosen, folder, **options):
    context = context_in(folder, **options)
    return conclude(context, chosen.title, chosen.summary, chosen.run(context))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("fig1", ["fig1_mixture.png", "fig1_posteriors.png"]),
        ("table1", ["table1_single.png", "table1_many.png"]),
        ("fig2", ["fig2.png"]),
    ],
)
def test_an_experiment_writes_records_figures_and_a_self_contained_report(tmp_path, name, figures):
    path, report = perform(EXPERIMENTS[name], tmp_path)
    page = path.read_text()
    for figure in figures:
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    assert page.count("data:image/png;base64,") == len(figures)
    assert 'src="http' not in page
    assert "href=" not in page
    for table in report.tables():
        assert table.title.replace("'", "&#39;") in page
    records = json.loads((tmp_path / "records.json").read_text())
    assert records["environment"]["torch"] == torch.__version__
    assert records["environment"]["seed"] == 0
    assert records["settings"]["training"]["steps"] == TINY.training.steps
    assert "repaired" in page.lower()
    assert records["figures"] == figures


@pytest.mark.usefixtures("tiny")
def test_table1_records_hold_every_run_of_every_method(tmp_path):
    perform(EXPERIMENTS["table1"], tmp_path, datasets=("mog",), seeds=3)
    mog = json.loads((tmp_path / "records.json").read_text())["sets"]["mog"]
    for method in toys.METHODS:
        single = mog["single"][method]
        assert len(single["mmd"]) == len(single["ess"]) == len(single["mode_switches"]) == 3
        assert 0 <= single["repaired"] <= 1
        for start in ("data", "start"):
            assert len(mog["many"][start][method]["mmd"]) == 3
            assert all(abs(sum(weights) - 1) < 1e-9 for weights in mog["many"][start][method]["mode_weights"])
    # Chains started in the mode (1, 1) are still there after four steps; those from the density are in all four.
    assert all(weights[2] > 0.9 for weights in mog["many"]["start"]["exact"]["mode_weights"])
    assert all(max(weights) < 0.7 for weights in mog["many"]["data"]["exact"]["mode_weights"])


@pytest.mark.usefixtures("tiny")
def test_the_same_seed_gives_the_same_records_and_another_seed_does_not(tmp_path):
    found = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        perform(EXPERIMENTS["fig1"], tmp_path / folder, seed=seed)
        found.append(json.loads((tmp_path / folder / "records.json").read_text())["kl_true_to_approximation"])
    assert found[0] == found[1]
    assert found[0]["full"] != found[2]["full"]


@pytest.mark.usefixtures("tiny")
def test_the_demo_is_one_page_with_all_four(tmp_path):
    path, _ = perform(DEMO, tmp_path)
    assert path.read_text().count("data:image/png;base64,") == 6
    assert set(json.loads((tmp_path / "records.json").read_text())) >= {"fig1", "table1", "fig2"}


@pytest.mark.usefixtures("tiny")
def test_a_stopped_run_keeps_its_parts_and_a_resumed_one_redoes_only_the_rest(tmp_path, monkeypatch):
    whole = perform(EXPERIMENTS["table1"], tmp_path / "whole", datasets=("rings",))[1].tables()[0].rows
    real, done = toys.run, []

    def stop_at_the_third(*args, **kwargs):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(toys, "run", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        perform(EXPERIMENTS["table1"], tmp_path / "cut", datasets=("rings",))
    assert not (tmp_path / "cut" / "records.json").exists()
    assert {p.stem for p in (tmp_path / "cut" / "parts").glob("*.json")} == {
        "rings-energy",
        "rings-learned",
        "rings-many-data-learned",
        "rings-many-start-learned",
    }
    monkeypatch.setattr(toys, "run", real)
    monkeypatch.setattr(toys, "train", None)  # a second training would fail: the networks must come from the folder
    assert perform(EXPERIMENTS["table1"], tmp_path / "cut", datasets=("rings",))[1].tables()[0].rows == whole


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


@pytest.mark.usefixtures("tiny")
def test_overwriting_removes_what_we_made_and_nothing_else(tmp_path):
    perform(EXPERIMENTS["fig1"], tmp_path)
    for foreign in ("notes.txt", "picture.png", "parts/mine.txt", "parts/mine.json"):
        (tmp_path / foreign).write_text("{}")
    Workspace(tmp_path, overwrite=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
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


def test_the_interval_is_students():
    # Three values 1, 2, 3: mean 2, standard error 1/sqrt(3), t quantile 4.302653 at 2 degrees of freedom.
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.302653 / 3**0.5), rel=1e-6)
