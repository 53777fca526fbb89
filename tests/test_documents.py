"""Tables of the README and the docs: written from their records, and nothing else in them."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmdgs.cli import app
from mmdgs.errors import UsageError
from mmdgs.lab.documents import MARK, dumped, markdown, pages, rewritten, take, write_tables

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
MEASURED = re.compile(r"\| *\**[-+]?[\d,]*\.\d+( ± [\d.,]+)?\** *(?=\|)")
"""A cell that is a number with decimals."""


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: page.name)
def test_text_and_records_agree(page: Path):
    assert rewritten(page.read_text(), page, ROOT) == page.read_text()


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: page.name)
def test_every_table_of_numbers_has_a_record(page: Path):
    assert [table for table in TABLE.findall(MARK.sub("", page.read_text())) if MEASURED.search(table)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "records").glob("*.json")), ids=lambda path: path.stem)
def test_a_record_has_a_line_for_every_cell(path: Path):
    assert path.read_text() == dumped(json.loads(path.read_text())) + "\n"


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "records").glob("*.json")), ids=lambda path: path.stem)
def test_a_record_says_where_its_numbers_come_from_and_every_table_of_it_is_shown(path: Path):
    record = json.loads(path.read_text())
    assert record["source"].keys() >= {"title", "command", "machine", "version", "note"}
    text = "".join(page.read_text() for page in pages(ROOT))
    assert [name for name in record["tables"] if f"<!-- table: {path.stem} {name} -->" not in text] == []


def shown(columns, rows, **record):
    return markdown({"columns": columns, "rows": rows, "record": record}, Path("r.json")).splitlines()


def test_cells_are_texts_numbers_intervals_or_places_in_the_record():
    columns = [{"title": "row"}, {"title": "MMD", "digits": 3}, {"title": "ratio", "unit": "x", "sign": "+"}]
    cells = {"mmd": [1.0, 2.0, 3.0], "fid": 2.2, "fid_left_out": [1.0, 3.0]}
    rows = [
        ["a", 1, 2.5],
        ["b", [1, 0.5], None],
        ["c", {"at": ["single", {"row": "full"}, "mmd"]}, {"at": ["single", {"row": "full"}, "fid"]}],
    ]
    lines = shown(columns, rows, single=[{"row": "iso", "mmd": [9.0]}, {"row": "full", **cells}])
    assert lines[:2] == ["| row | MMD | ratio |", "| --- | --- | --- |"]
    assert lines[2:4] == ["| a | 1.000 | +2.5x |", "| b | 1.000 ± 0.500 | |"]
    # Student's t with two degrees of freedom: 4.302653 / sqrt(3). The jackknife of two groups: 12.7062.
    assert lines[4].startswith("| c | 2.000 ± 2.484 | +2.2 ± 12.70")


def test_bold_is_the_best_where_intervals_tell_it_from_all_others():
    less = {"title": "FID", "better": "less"}
    lines = shown([{"title": ""}, less], [["a", 2], ["b", 2.1], ["*paper*", 1], ["c", 3]])
    assert lines[0] == "| | FID ↓ |"
    assert lines[2:] == ["| a | **2** |", "| b | 2.1 |", "| *paper* | 1 |", "| c | 3 |"]
    assert "**" not in "".join(shown([{"title": ""}, less], [["a", 2], ["b", 2], ["c", 3]]))
    apart, close = [["a", [2, 0.5]], ["c", [2.8, 0.5]]], [["a", [2, 0.5]], ["b", [2.6, 0.5]], ["c", [2.8, 0.5]]]
    assert [line.count("**") for line in shown([{"title": ""}, less], apart)[2:]] == [2, 0]
    assert "**" not in "".join(shown([{"title": ""}, less], close))
    assert "**" not in "".join(shown([{"title": ""}, {**less, "bold": False}], apart))
    one = {"title": "diversity", "better": "one"}
    assert [line.count("**") for line in shown([{"title": ""}, one], [["a", 0.9], ["b", 1.05]])[2:]] == [0, 2]


def tree(folder: Path) -> Path:
    """A source tree with one page and one record."""
    (folder / "docs" / "records").mkdir(parents=True)
    table = {"columns": [{"title": "a"}, {"title": "b"}], "rows": [["x", 1.5]]}
    (folder / "docs" / "records" / "r.json").write_text(json.dumps({"tables": {"t": table}}))
    (folder / "docs" / "page.md").write_text("before\n\n<!-- table: r t -->\nold\n<!-- end of table -->\n\nafter\n")
    return folder


def test_the_command_writes_what_changed_and_then_nothing(tmp_path: Path):
    page = tree(tmp_path) / "docs" / "page.md"
    first = CliRunner().invoke(app, ["reproduce", "tables", "--out", str(tmp_path)])
    assert first.exit_code == 0
    assert "page.md" in first.stdout
    assert page.read_text() == (
        "before\n\n<!-- table: r t -->\n| a | b |\n| --- | --- |\n| x | 1.5 |\n<!-- end of table -->\n\nafter\n"
    )
    assert write_tables(tmp_path) == []
    assert "every table is as its record says" in CliRunner().invoke(
        app, ["reproduce", "tables", "--out", str(tmp_path)]
    ).stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [
        ("r t", "q t", r"no record 'q' in .*; there are r"),
        ("r t", "r u", r"has no table 'u'; it has t"),
        ("end of table", "end", r"a table's mark has no end; write <!-- end of table -->"),
        ("table:", "tab:", r"no page below .* has a table's mark"),
    ],
)
def test_marks_that_lead_nowhere_are_refused_and_no_page_is_written(tmp_path: Path, written, instead, message):
    page = tree(tmp_path) / "docs" / "page.md"
    shutil.copy(page, tmp_path / "README.md")  # comes first, and is right
    page.write_text(page.read_text().replace(written, instead))
    if instead == "tab:":
        (tmp_path / "README.md").unlink()
    before = [one.read_text() for one in pages(tmp_path)]
    with pytest.raises(UsageError, match=message):
        write_tables(tmp_path)
    assert [one.read_text() for one in pages(tmp_path)] == before


def test_several_numbers_stand_side_by_side():
    paths = [["cells", {"row": "full"}, key] for key in ("nats", "z", "share")]
    lines = shown(
        [{"title": "a"}], [[{"all": paths}]], cells=[{"row": "full", "nats": 0.951, "z": 1817.6, "share": 0.9}]
    )
    assert lines[2] == "| +0.95 / 1,818 / 0.90 |"


@pytest.mark.parametrize(("evaluations", "text"), [((325, 225, 325), "225 to 325"), ((1325.0, 1325), "1,325")])
def test_numbers_that_differ_between_tasks_are_a_range(evaluations: tuple[float, ...], text: str):
    cells = [{"row": "full", "task": i, "cost": cost} for i, cost in enumerate(evaluations)]
    paths = [["cells", {"task": i}, "cost"] for i in range(len(evaluations))]
    assert shown([{"title": "a"}], [[{"range": paths}]], cells=cells)[2] == f"| {text} |"


def test_cells_of_a_run_are_taken_into_a_record(tmp_path: Path):
    page = tree(tmp_path) / "docs" / "page.md"
    path = tmp_path / "docs" / "records" / "r.json"
    record = json.loads(path.read_text())
    record["cells"] = [{"row": "x", "steps": 5, "fid": 9.0}, {"row": "x", "steps": 9, "fid": 8.0}]
    record["tables"]["t"]["rows"] = [["x", {"at": ["cells", {"row": "x", "steps": 9}, "fid"]}]]
    path.write_text(json.dumps(record))
    run = tmp_path / "run"
    run.mkdir()
    made = {"cells": [{"row": "x", "steps": 9, "fid": 2.5}, {"row": "y", "steps": 9, "fid": 7.0}], "claims": [1]}
    (run / "records.json").write_text(json.dumps(made | {"environment": {"device": "cuda"}}))

    def command(*given: str) -> str:
        return " ".join(CliRunner().invoke(app, ["reproduce", "tables", "--out", str(tmp_path), *given]).output.split())

    assert "2 cells of" in command("--from", f"r={run}")
    assert "| x | 2.5 |" in page.read_text()
    after = json.loads(path.read_text())
    assert [one["fid"] for one in after["cells"]] == [9.0, 2.5, 7.0]
    assert after["source"]["environment"] == {"device": "cuda"}
    assert path.read_text().count('\n  {"row": ') == 3  # a line each
    before = path.read_bytes()
    assert "--from must be NAME=RUN, such as table2=runs/table2, got 'r'" in command("--from", "r")
    assert "a record of the docs; say --from NAME=RUN" in command("--from", f"q={run}")
    (run / "records.json").write_text(json.dumps({"other": [{"row": "x"}]}))
    assert "has no cells for" in command("--from", f"r={run}")
    assert path.read_bytes() == before


EACH = {"title": "{:,}", "each": "fid", "digits": 2, "better": "less"}


def cell(row, images, fid, *left_out, **more):
    return {"row": row, "first images": images, "fid": fid, "fid_left_out": list(left_out), "evaluations": 35, **more}


def of_cells(columns, cells, *fixed, **wanted):
    table = {"columns": columns, "rows": fixed, "cells": {"of": "found", **wanted}, "record": {"found": cells}}
    return markdown(table, Path("r.json")).splitlines()


def test_a_table_of_cells_has_a_column_for_every_place_and_leaves_out_rows_without_cells():
    cells = [
        cell("Gibbs", 10_000, 4.5, 4.0, 5.0), cell("Langevin", 10_000, 4.0, 3.5, 4.5, evaluations=9),
        cell("Langevin", 5_000, 9.0, 8.0, 10.0), cell("other", 7_000, 1.0, 1.0, 1.0),
    ]  # fmt: skip
    columns = [{"title": "FID of"}, EACH, {"title": "evaluations", "key": "evaluations", "digits": 0}]
    rows = {"Heun": "Heun", "Langevin": "Langevin's", "Gibbs": "Gibbs"}
    known = {"across": "first images", "rows": rows, "differences": {"difference": ["Gibbs", "Langevin"]}}
    lines = of_cells(columns, cells, ["*paper*", 1, None, None], **known)
    # Two groups: Student's t with one degree of freedom, 12.7062, times half of what leaving out either changes.
    assert lines == [
        "| FID of | 5,000 ↓ | 10,000 ↓ | evaluations |",
        "| --- | --- | --- | --- |",
        "| Langevin's | **9.00 ± 12.71** | 4.00 ± 6.35 | 35 / 9 |",
        "| Gibbs | | 4.50 ± 6.35 | 35 |",
        "| difference | | +0.50 ± 0.00 | |",
        "| *paper* | 1.00 | | |",
    ]
    turned = of_cells(columns, cells, **known, descending=True, only=[10_000, 20_000])
    assert turned[0] == "| FID of | 10,000 ↓ | evaluations |"
    assert of_cells(columns, cells, across="first images", rows={"Heun": "Heun"})[2:] == []


def test_the_row_that_others_are_shown_above_is_zero_with_its_number_in_brackets():
    cells = [
        {"row": "isotropic", "sigma / alpha": 0.2973, "nats": [1.0, 3.0], "gain": [0.0, 0.0]},
        {"row": "spectral", "sigma / alpha": 0.2973, "gain": 1.07, "gain_half": 0.12},
        {"row": "Krylov", "sigma / alpha": 0.2973, "gain": None},
    ]
    columns = [{"title": "at"}, {"title": "{:.2g}", "each": "gain", "digits": 2, "sign": "+", "better": "more"}]
    rows = dict.fromkeys(("isotropic", "spectral", "Krylov"), "row")
    lines = of_cells(columns, cells, across="sigma / alpha", rows=rows, reference={"row": "isotropic", "key": "nats"})
    assert lines[0] == "| at | 0.3 ↑ |"
    assert lines[2:] == ["| row | 0 (2.00 ± 12.71) |", "| row | **+1.07 ± 0.12** |", "| row | |"]


def test_without_places_every_cell_is_a_line():
    cells = [{"row": "b", "steps": 9, "fid": 1.5}, {"row": "a", "steps": 25}, {"row": "a", "steps": 4, "fid": 2.5}]
    columns = [{"title": "sampler"}, {"title": "steps", "key": "steps", "digits": 0}, {"title": "FID", "key": "fid"}]
    lines = of_cells(columns, cells, across="steps", rows={"a": "first", "b": "second"})
    assert lines[2:] == ["| first | 4 | 2.5 |", "| | 25 | |", "| second | 9 | 1.5 |"]
    assert of_cells(columns[1:], cells, across="steps", rows={"b": "second"})[2:] == ["| 9 | 1.5 |"]


def test_cells_are_told_apart_by_where_they_stand_and_long_lists_are_taken_by_their_mean(tmp_path: Path):
    path = tree(tmp_path) / "docs" / "records" / "r.json"
    record = json.loads(path.read_text())
    record["levels"] = [{"model": "small", "row": "x", "sigma / alpha": 1.0, "gain": 5.0, "gain_half": 1.0}]
    path.write_text(json.dumps(record))
    long = [float(i) for i in range(101)]
    made = [{"row": "x", "sigma / alpha": one, "gain": long, "fid_left_out": long} for one in (1.0, 2.0)]
    (tmp_path / "run").mkdir()
    records = {"levels": made, "settings": {"model": "runs/small"}, "environment": {}}
    (tmp_path / "run" / "records.json").write_text(json.dumps(records))
    assert take(tmp_path, "r", tmp_path / "run") == 2
    first, second = json.loads(path.read_text())["levels"]
    assert (first["model"], first["sigma / alpha"], second["sigma / alpha"]) == ("small", 1.0, 2.0)
    assert first["fid_left_out"] == long
    # The variance of 0 to 100 is 858.5; t with 100 degrees of freedom is 1.98397.
    record["tables"] = {"t": {"columns": [], "cells": {"of": "levels", "across": "sigma / alpha", "rows": {"x": "x"}}}}
    record["levels"] += [
        {"model": other, "row": row, "sigma / alpha": 7.0}
        for other, row in (("small", "x"), ("small", "y"), ("large", "x"))
    ]
    path.write_text(json.dumps(record))
    take(tmp_path, "r", tmp_path / "run", anew=True)
    kept = [(one["model"], one["row"], one["sigma / alpha"]) for one in json.loads(path.read_text())["levels"]]
    assert kept == [("small", "y", 7.0), ("large", "x", 7.0), ("small", "x", 1.0), ("small", "x", 2.0)]
    assert (first["gain"], first["gain_half"]) == (50.0, pytest.approx(1.98397 * (858.5 / 101) ** 0.5, rel=1e-5))


def test_a_cell_that_is_not_in_the_record_is_named():
    with pytest.raises(UsageError, match=r"nothing at 'fid' of \['single', 'fid'\]"):
        shown([{"title": "a"}], [[{"at": ["single", "fid"]}]], single={})
    with pytest.raises(UsageError, match=r"nothing at \{'row': 'full'\}"):
        shown([{"title": "a"}], [[{"at": ["single", {"row": "full"}, "fid"]}]], single=[])
    with pytest.raises(UsageError, match="a row has 2 cells, and there are 1 columns"):
        shown([{"title": "a"}], [["x", 1]])
