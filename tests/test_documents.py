"""Tables of the README and the docs: written from their records, and nothing else in them."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmdgs.cli import app
from mmdgs.errors import UsageError
from mmdgs.lab.documents import MARK, dumped, markdown, pages, rewritten, write_tables

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


def test_a_cell_that_is_not_in_the_record_is_named():
    with pytest.raises(UsageError, match=r"nothing at 'fid' of \['single', 'fid'\]"):
        shown([{"title": "a"}], [[{"at": ["single", "fid"]}]], single={})
    with pytest.raises(UsageError, match=r"nothing at \{'row': 'full'\}"):
        shown([{"title": "a"}], [[{"at": ["single", {"row": "full"}, "fid"]}]], single=[])
    with pytest.raises(UsageError, match="a row has 2 cells, and there are 1 columns"):
        shown([{"title": "a"}], [["x", 1]])
