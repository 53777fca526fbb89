"""Tables of the README and the docs: written from their records, and nothing else in them."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.tables import MARK, app, dumped, markdown, pages, rewritten, take, write_tables
from mmdgs.errors import UsageError

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
MEASURED = re.compile(r"\| *\**[-+]?[\d,]*\.\d+( ± [\d.,]+)?\** *(?=\|)")
"""A cell that is a number with decimals."""


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: page.name)
def test_tables_of_numbers_are_those_of_the_records(page: Path):
    text = page.read_text()
    assert rewritten(text, page, ROOT) == text
    assert [table for table in TABLE.findall(MARK.sub("", text)) if MEASURED.search(table)] == []


def test_records_say_where_their_numbers_come_from_and_all_their_tables_are_shown():
    text = "".join(page.read_text() for page in pages(ROOT))
    for path in (ROOT / "docs" / "records").glob("*.json"):
        record = json.loads(path.read_text())
        assert path.read_text() == dumped(record) + "\n"  # a line for every cell
        assert record["source"].keys() >= {"title", "command", "machine", "version", "note"}
        for name in record["tables"]:
            assert f"<!-- table: {path.stem} {name} -->" in text


def shown(columns, rows, **record):
    return markdown({"columns": columns, "rows": rows}, record, Path("r.json")).splitlines()


def test_cells_are_texts_numbers_intervals_or_places_in_the_record():
    columns = [
        {"title": "row"},
        {"title": "MMD", "digits": 3},
        {"title": "ratio", "unit": "x", "sign": "+"},
    ]
    cells = {"mmd": [1.0, 2.0, 3.0], "fid": 2.2, "fid_left_out": [1.0, 3.0]}
    at = ["single", {"row": "full"}]
    rows = [["a", 1, 2.5], ["b", [1, 0.5], None], ["c", {"at": [*at, "mmd"]}, {"at": [*at, "fid"]}]]
    lines = shown(columns, rows, single=[{"row": "iso", "mmd": [9.0]}, {"row": "full", **cells}])
    assert lines[:2] == ["| row | MMD | ratio |", "| --- | --- | --- |"]
    assert lines[2:4] == ["| a | 1.000 | +2.5x |", "| b | 1.000 ± 0.500 | |"]
    # Student's t with two degrees of freedom: 4.302653 / sqrt(3); the jackknife of two: 12.7062.
    assert lines[4].startswith("| c | 2.000 ± 2.484 | +2.2 ± 12.70")


def test_bold_is_the_best_where_intervals_tell_it_from_all_others():
    less, first = {"title": "FID", "better": "less"}, {"title": ""}
    lines = shown([first, less], [["a", 2], ["b", 2.1], ["*paper*", 1], ["c", 3]])
    assert lines[0] == "| | FID ↓ |"
    assert lines[2:] == ["| a | **2** |", "| b | 2.1 |", "| *paper* | 1 |", "| c | 3 |"]
    assert "**" not in "".join(shown([first, less], [["a", 2], ["b", 2], ["c", 3]]))
    apart = [["a", [2, 0.5]], ["c", [2.8, 0.5]]]
    assert [line.count("**") for line in shown([first, less], apart)[2:]] == [2, 0]
    assert "**" not in "".join(shown([first, less], [*apart, ["b", [2.6, 0.5]]]))
    assert "**" not in "".join(shown([first, {**less, "bold": False}], apart))
    one = {"title": "diversity", "better": "one"}
    lines = shown([first, one], [["a", 0.9], ["b", 1.05]])
    assert [line.count("**") for line in lines[2:]] == [0, 2]


def test_several_numbers_of_the_record_in_one_cell():
    cells = [
        {"row": "full", "nats": 0.951, "z": 1817.6, "share": 0.9, "fid": 4.5, "cost": 1325.0},
        {"row": "iso", "nats": [1.0, 3.0], "z": 1, "share": 0.5, "fid": 4.0, "cost": 225},
    ]
    for cell, left_out in zip(cells, ([4.0, 5.0], [3.5, 4.5]), strict=True):
        cell["fid_left_out"] = left_out

    def paths(*keys, rows=("full",)):
        return [["cells", {"row": row}, key] for row in rows for key in keys]

    both = ("full", "iso")
    row = [
        {"all": paths("nats", "z", "share")},
        {"range": paths("cost", rows=both)},
        {"range": paths("cost", "cost")},
        {"zero": paths("nats", rows=["iso"])[0]},
        {"list": paths("cost", rows=both)},
        {"minus": paths("fid", rows=both)},
    ]
    (line,) = shown([{"title": "", "digits": 2}] * len(row), [row], cells=cells)[2:]
    assert line == (
        "| +0.95 / 1,818 / 0.90 | 225 to 1,325 | 1,325 | 0 (2.00 ± 12.71) | 1,325.00 / 225.00 "
        "| +0.50 ± 0.00 |"
    )


def tree(folder: Path) -> Path:
    """A source tree with one page and one record."""
    (folder / "docs" / "records").mkdir(parents=True)
    rows = [["x", {"at": ["cells", {"row": "x", "steps": 9}, "fid"]}]]
    table = {"columns": [{"title": "a"}, {"title": "b"}], "rows": rows}
    cells = [{"row": "x", "steps": 5, "fid": 9.0}, {"row": "x", "steps": 9, "fid": 1.5}]
    record = json.dumps({"cells": cells, "tables": {"t": table}})
    (folder / "docs" / "records" / "r.json").write_text(record)
    mark = "before\n\n<!-- table: r t -->\nold\n<!-- end of table -->\n\nafter\n"
    (folder / "docs" / "page.md").write_text(mark)
    return folder


def test_the_command_writes_tables_and_takes_the_cells_of_a_run(tmp_path: Path):
    docs, run = tree(tmp_path) / "docs", tmp_path / "run"
    page, path = docs / "page.md", docs / "records" / "r.json"

    def command(*options: str) -> str:
        words = ["--out", str(tmp_path), *options]
        return " ".join(CliRunner().invoke(app, words).output.split())

    assert "page.md" in command()
    body = "| a | b |\n| --- | --- |\n| x | 1.5 |\n"
    before = f"before\n\n<!-- table: r t -->\n{body}<!-- end of table -->\n\nafter\n"
    assert page.read_text() == before
    assert "every table is as" in command()
    run.mkdir()
    cells = [{"row": "x", "steps": 9, "fid": 2.5}, {"row": "y", "steps": 9, "fid": 7.0}]
    made = {"cells": cells, "claims": [1], "environment": {"device": "cuda"}}
    (run / "records.json").write_text(json.dumps(made))
    assert "2 cells of" in command("--from", f"r={run}")
    assert "| x | 2.5 |" in page.read_text()
    after = json.loads(path.read_text())
    assert [cell["fid"] for cell in after["cells"]] == [9.0, 2.5, 7.0]
    assert after["source"]["environment"] == {"device": "cuda"}
    kept = path.read_bytes()
    assert "NAME=RUN" in command("--from", "r")
    assert "q.json" in command("--from", f"q={run}")
    (run / "records.json").write_text(json.dumps({"other": [{"row": "x"}]}))
    assert "no cells for" in command("--from", f"r={run}")
    assert path.read_bytes() == kept


def test_long_lists_are_taken_by_their_mean_and_cells_get_the_name_of_their_model(tmp_path: Path):
    path, run = tree(tmp_path) / "docs" / "records" / "r.json", tmp_path / "run"
    old = {"model": "small", "row": "x", "sigma / alpha": 1.0, "gain": 5.0, "gain_half": 1.0}
    path.write_text(json.dumps({"levels": [old], "tables": {}}))
    long = [float(i) for i in range(101)]
    cell = {"row": "x", "gain": long, "fid_left_out": long}
    made = [cell | {"sigma / alpha": ratio} for ratio in (1.0, 2.0)]
    run.mkdir()
    (run / "records.json").write_text(
        json.dumps({"levels": made, "settings": {"model": "a/small"}})
    )
    assert take(tmp_path, "r", run) == 2
    first, second = json.loads(path.read_text())["levels"]
    assert (first["model"], first["sigma / alpha"], second["sigma / alpha"]) == ("small", 1.0, 2.0)
    assert first["fid_left_out"] == long
    # The variance of 0 to 100 is 858.5; t with 100 degrees of freedom is 1.98397.
    half = pytest.approx(1.98397 * (858.5 / 101) ** 0.5, rel=1e-5)
    assert (first["gain"], first["gain_half"]) == (50.0, half)


@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [("r t", "q t", "'q'"), ("r t", "r u", "'u'"), ("end of table", "end", "no end")],
)
def test_marks_that_lead_nowhere_are_refused_and_no_page_is_written(
    tmp_path: Path, written, instead, message
):
    page = tree(tmp_path) / "docs" / "page.md"
    shutil.copy(page, tmp_path / "README.md")  # comes first, and is right
    page.write_text(page.read_text().replace(written, instead))
    before = [path.read_text() for path in pages(tmp_path)]
    with pytest.raises(UsageError, match=message):
        write_tables(tmp_path)
    assert [path.read_text() for path in pages(tmp_path)] == before


def test_a_cell_that_is_not_in_the_record_is_named():
    with pytest.raises(UsageError, match="'fid'"):
        shown([{"title": "a"}], [[{"at": ["single", "fid"]}]], single={"mmd": 1})
    with pytest.raises(UsageError, match="'full'"):
        shown([{"title": "a"}], [[{"at": ["single", {"row": "full"}, "fid"]}]], single=[])
    with pytest.raises(UsageError, match="2 cells"):
        shown([{"title": "a"}], [["x", 1]])
