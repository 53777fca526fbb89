"""Tables of the README and the docs: written from their records, and nothing else in them."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.tables import MARK, app, dumped, pages, rewritten, take, write_tables
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


@pytest.mark.parametrize("column", ["sigma", "problem", "particles or sweeps"])
def test_every_cell_of_a_row_is_taken(column: str, tmp_path: Path):
    path, run = tree(tmp_path) / "docs" / "records" / "r.json", tmp_path / "run"
    path.write_text(json.dumps({"cells": [{"row": "x", column: 5, "fid": 1.0}], "tables": {}}))
    made = [{"row": "x", column: at, "fid": float(at)} for at in (5, 25)]
    run.mkdir()
    (run / "records.json").write_text(json.dumps({"cells": made}))
    take(tmp_path, "r", run)
    assert json.loads(path.read_text())["cells"] == made


def test_cells_that_are_not_told_apart_are_not_lost(tmp_path: Path):
    path, run = tree(tmp_path) / "docs" / "records" / "r.json", tmp_path / "run"
    cells = [{"row": "x", "weight of the guide": weight, "fid": 1.0} for weight in (1, 2)]
    path.write_text(json.dumps({"cells": cells, "tables": {}}))
    kept = path.read_bytes()
    run.mkdir()
    (run / "records.json").write_text(json.dumps({"cells": cells[:1]}))
    with pytest.raises(UsageError, match="does not tell the cells of 'cells' apart"):
        take(tmp_path, "r", run)
    assert path.read_bytes() == kept


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
