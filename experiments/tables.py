"""Tables of the README and the docs, written from docs/records by `python -m experiments.tables`.

A page marks a table with `<!-- table: table1 single -->` above and `<!-- end of table -->` below:
"single" of the "tables" of docs/records/table1.json, with columns and rows of cells. A cell is a
text, a number, a pair (value, half its 95% interval), nothing, or where in the record it stands:

    {"at": path}              a number, of a list the mean with its interval
    {"zero": path}            the row that others are shown above: 0, with its number in brackets
    {"minus": [path, path]}   a difference, by leaving out the same seed of both
    {"list": [path, ...]}, {"all": [path, ...]}, {"range": [path, ...]}   several numbers

A path's step is a key, or {"row": "full"}: the first entry of a list with these values.

`--from table1=runs/table1` first takes the cells of a run into a record: those that it has are
replaced, new ones added.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from experiments.grid import Measure, Number
from mmdgs.cli.app import App, output
from mmdgs.errors import UsageError
from mmdgs.files import write_atomically
from mmdgs.metrics import interval

app = App()
RECORDS, RUN_RECORDS = Path("docs", "records"), "records.json"
OPENED, CLOSED = "<!-- table:", "<!-- end of table -->"
MARK = re.compile(rf"^{OPENED} (\S+) (\S+) -->\n(.*?)^{CLOSED}$", re.MULTILINE | re.DOTALL)
IDENTITY = (
    *("model", "row", "case", "data", "task", "steps", "levels", "levels or steps", "Gibbs steps"),
    *("sigma / alpha", "first images", "x_t", "sigma", "problem", "particles or sweeps"),
)
"""Keys that say which cell of an experiment an entry is."""
LINES = 3  # depth down to which a record has a line for every key
LONGEST, HALF = 50, "_half"
"""Of longer lists a record keeps the mean and, with this behind its key, half its 95% interval."""
ARROWS = {"less": " ↓", "more": " ↑", "zero": " (→ 0)", "one": " (→ 1)", None: ""}


@dataclass(frozen=True)
class Column:
    """How the numbers of a column are shown; the best is bold where `bold` is."""

    title: str
    digits: int | None = None  # None: as the record has them
    better: str | None = None  # less, more, zero or one
    bold: bool = True
    interval: bool = True  # beside the mean of a list
    sign: str = ""  # "+": positive numbers have one too
    unit: str = ""  # behind every number, such as x or %

    def text(self, cell: Number | str) -> str:
        if isinstance(cell, str):
            return cell
        if self.digits is not None:
            return cell.text(self.digits, self.sign) + self.unit
        half = "" if math.isnan(cell.half) else f" ± {cell.half:,}"
        return f"{cell.value:{self.sign},}{half}{self.unit}"

    def best(self, cells: Mapping[int, Number]) -> set[int]:
        """The key of the best number; none where intervals do not tell it from all others."""
        return Measure("", "", self.digits, self.better).best(cells) if self.bold else set()


def pages(root: Path) -> list[Path]:
    """The README and the docs of a source tree."""
    every = (root / "README.md", *sorted((root / "docs").rglob("*.md")))
    return [path for path in every if path.is_file()]


def write_tables(root: Path) -> list[Path]:
    """Write every marked table below `root` from its record; returns the pages that changed."""
    old = {page: page.read_text(encoding="utf-8") for page in pages(root)}
    if not any(OPENED in text for text in old.values()):
        raise UsageError(f"no page below {root.resolve()} has a table's mark; is it the source?")
    new = {page: rewritten(text, page, root) for page, text in old.items()}
    changed = [page for page in new if new[page] != old[page]]
    for page in changed:
        write_atomically(page, new[page].encode())
    return changed


def rewritten(text: str, page: Path, root: Path) -> str:
    """The text of a page with its tables as their records say."""
    if text.count(OPENED) != len(MARK.findall(text)):
        raise UsageError(f"{page}: a table's mark has no end; write {CLOSED} below the table")

    def replaced(mark: re.Match[str]) -> str:
        path, name = root / RECORDS / f"{mark[1]}.json", mark[2]
        if not path.is_file():
            have = ", ".join(sorted(other.stem for other in path.parent.glob("*.json"))) or "none"
            raise UsageError(f"{page}: no record {mark[1]!r} in {path.parent}; there are {have}")
        record = json.loads(path.read_text(encoding="utf-8"))
        tables = record.get("tables", {})
        if name not in tables:
            raise UsageError(f"{page}: {path} has no table {name!r}; it has {', '.join(tables)}")
        return f"{OPENED} {mark[1]} {name} -->\n{markdown(tables[name], record, path)}{CLOSED}"

    return MARK.sub(replaced, text)


def markdown(table: Mapping[str, Any], record: Mapping[str, Any], path: Path) -> str:
    """A table as Markdown. Bold: the best of a column; rows in italics are not compared."""
    columns = [Column(**column) for column in table["columns"]]
    if odd := [row for row in table["rows"] if len(row) != len(columns)]:
        raise UsageError(f"{path}: {len(odd[0])} cells for {len(columns)} columns: {odd[0]}")
    paired = [list(zip(columns, row, strict=True)) for row in table["rows"]]
    rows = [[_cell(cell, column, record, path) for column, cell in row] for row in paired]
    lines = [[column.text(cell) for column, cell in zip(columns, row, strict=True)] for row in rows]
    compared = [i for i, row in enumerate(rows) if not re.match(r"\*[^*]", str(row[0]))]
    for j, column in enumerate(columns):
        own = ((i, rows[i][j]) for i in compared)
        for i in column.best({i: cell for i, cell in own if isinstance(cell, Number)}):
            lines[i][j] = f"**{lines[i][j]}**"
    head = [column.title + ARROWS[column.better] for column in columns]
    every = (head, ["---"] * len(head), *lines)
    return "".join("|" + "".join(f" {c} |" if c else " |" for c in line) + "\n" for line in every)


def _cell(cell: Any, column: Column, record: Any, path: Path) -> Number | str:
    if cell is None or isinstance(cell, str):
        return cell or ""
    if not isinstance(cell, Mapping):
        return Number(*cell) if isinstance(cell, Sequence) else Number(cell)
    ((kind, places),) = cell.items()
    entries = [_entry(at, record, path) for at in ([places] if kind in ("at", "zero") else places)]
    if kind == "minus":
        (first, key), (second, _) = entries
        return Measure(key, key).of(first, second).text(column.digits, "+")
    numbers = [_number(*entry) for entry in entries]
    numbers = numbers if column.interval else [Number(number.value) for number in numbers]
    if kind == "at":
        return numbers[0]
    if kind == "zero":
        return f"0 ({numbers[0].text(column.digits)})"
    if kind == "list":
        return " / ".join(number.text(column.digits) for number in numbers)
    values = [number.value for number in numbers]
    if kind == "all":
        return " / ".join(_short(value, "" if i else "+") for i, value in enumerate(values))
    form = ",g" if column.digits is None else f",.{column.digits}f"
    return " to ".join(dict.fromkeys(f"{end(values):{form}}" for end in (min, max)))


def _short(value: float, sign: str) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 and not sign else 0
    return f"{value:{sign},.{digits}f}"


def _entry(steps: Sequence[Any], record: Any, path: Path) -> tuple[Mapping[str, Any], str]:
    """The entry of a record that a path leads to, and the last key of the path."""
    place = record
    for step in steps:
        entry = place
        if isinstance(step, Mapping):
            place = next((item for item in entry if step.items() <= item.items()), None)
        else:
            place = entry.get(step)
        if place is None:
            raise UsageError(f"{path}: nothing at {step!r} of {steps}")
    return entry, steps[-1]


def _number(entry: Mapping[str, Any], key: str) -> Number:
    if f"{key}{HALF}" in entry:
        return Number(entry[key], entry[f"{key}{HALF}"])
    shown = Measure(key, key).of(entry)
    return shown if math.isfinite(shown.value) else Number(shown.value)


def take(root: Path, name: str, run: Path) -> int:
    """Take the cells of a run's records into docs/records/NAME.json; returns how many."""
    path, source = root / RECORDS / f"{name}.json", run / RUN_RECORDS
    for file in (path, source):
        if not file.is_file():
            raise UsageError(f"there is no {file}; say --from NAME=RUN, as in table2=runs/table2")
    record, content = (json.loads(file.read_text(encoding="utf-8")) for file in (path, source))
    shared = [
        key for key, cells in content.items() if are_cells(cells) and are_cells(record.get(key))
    ]
    if not shared:
        have = ", ".join(key for key, cells in record.items() if are_cells(cells)) or "none"
        raise UsageError(f"{source} has no cells for {path}: that has {have}")
    for key in shared:
        model = {"model": Path(content.get("settings", {}).get("model") or "").name}
        taken = [(model if "model" in record[key][0] else {}) | _shortened(c) for c in content[key]]
        by = {_identity(cell): cell for cell in record[key]}
        if len(by) < len(record[key]):
            raise UsageError(f"{path}: IDENTITY does not tell the cells of {key!r} apart")
        record[key] = list((by | {_identity(cell): cell for cell in taken}).values())
    record.setdefault("source", {})["environment"] = content.get("environment", {})
    write_atomically(path, (dumped(record) + "\n").encode())
    return sum(len(content[key]) for key in shared)


def _shortened(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell as a record keeps it: of long lists the mean and its interval."""
    kept: dict[str, Any] = {}
    for key, value in cell.items():
        floats = isinstance(value, list) and all(isinstance(item, float) for item in value)
        if floats and len(value) > LONGEST and not key.endswith("_left_out"):
            kept[key], kept[f"{key}{HALF}"] = interval(value)
        else:
            kept[key] = value
    return kept


def dumped(content: Any, depth: int = 0) -> str:
    """JSON with a line for every cell and every row of a table, so that changes show by line."""
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(content, dict) and content and depth < LINES:
        pairs = ((json.dumps(key), dumped(value, depth + 1)) for key, value in content.items())
        return "{" + inner + f",{inner}".join(map(": ".join, pairs)) + outer + "}"
    if isinstance(content, list) and any(isinstance(item, dict | list) for item in content):
        items = (json.dumps(item, ensure_ascii=False) for item in content)
        return "[" + inner + f",{inner}".join(items) + outer + "]"
    return json.dumps(content, ensure_ascii=False)


def _identity(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell.get(key) for key in IDENTITY)


def are_cells(content: Any) -> bool:
    """Whether a value of a record is a list of cells."""
    listed = isinstance(content, list) and bool(content)
    return listed and all(isinstance(cell, dict) and "row" in cell for cell in content)


@app.command()
def main(
    root: Annotated[Path, typer.Option("--out", "-o", help="The source tree.")] = Path(),
    runs: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="NAME=RUN", help="First take a run's cells into a record."),
    ] = None,
) -> None:
    """Write the tables of README.md and docs/ from docs/records."""
    for text in runs or []:
        record, _, run = text.partition("=")
        if not run:
            raise UsageError(f"--from must be NAME=RUN, as in table2=runs/table2, got {text!r}")
        cells = take(root, record, Path(run))
        output.print(f"{cells:,} cells of {escape(run)} into {escape(record)}")
    written = [f"written: {escape(str(page))}" for page in write_tables(root)]
    output.print("\n".join(written) or "every table is as its record says")


if __name__ == "__main__":
    app()
