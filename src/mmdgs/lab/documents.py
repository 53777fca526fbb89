"""Tables of the README and the docs, written from their records by `mmdgs reproduce tables`.

A page marks where a table stands, and which one it is:

    <!-- table: table1 single -->
    ...
    <!-- end of table -->

`table1` is docs/records/table1.json, and `single` one of its "tables": columns, and rows of cells. A cell is a text, a
number, a pair (value, half its 95% interval), nothing, {"at": path}: where in the record its number stands, or
{"all": [path, ...]}: several numbers side by side, or {"range": [path, ...]}: the least and the largest. A path's step
is a key, or {"row": "full"}: the first entry of a list with these values. A table with "cells" is made of all cells of
its record (record_cells.py), and has its "rows", if any, below them.

`mmdgs reproduce tables --from table1=runs/table1` first takes the cells of a run into a record: those that it has are
replaced, new ones added. So every table of a network is refreshed by one command. With --anew, as for a new network,
rows that the run has lose what a table of cells shows of them at other places.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdgs.errors import UsageError
from mmdgs.files import write_atomically
from mmdgs.lab.grid import Number
from mmdgs.lab.record_cells import number, shortened, spread

RECORDS, RUN_RECORDS = Path("docs", "records"), "records.json"
MARK = re.compile(r"^<!-- table: (\S+) (\S+) -->\n(.*?)^<!-- end of table -->$", re.MULTILINE | re.DOTALL)
OPENED = "<!-- table:"
IDENTITY = (
    "model", "row", "case", "data", "task", "steps", "levels", "levels or steps", "Gibbs steps", "sigma / alpha",
    "first images", "x_t",
)  # fmt: skip
"""Keys that say which cell of an experiment an entry is."""
LINES = 3
"""Depth down to which a record has a line for every key."""
ARROWS = {"less": " ↓", "more": " ↑", "zero": " (→ 0)", "one": " (→ 1)", None: ""}
"""What is better, behind a column's title."""


@dataclass(frozen=True)
class Column:
    """How the numbers of a column are shown; `better`: less, more, zero or one. The best is bold where `bold` is."""

    title: str
    digits: int | None = None  # None: as the record has them
    better: str | None = None
    bold: bool = True
    sign: str = ""  # "+": positive numbers have one too
    unit: str = ""  # behind every number, such as x or %

    def text(self, cell: Number | str) -> str:
        if isinstance(cell, str):
            return cell
        if self.digits is not None:
            return cell.text(self.digits, self.sign) + self.unit
        value, half = cell
        return f"{value:{self.sign},}" + ("" if math.isnan(half) else f" ± {half:,}") + self.unit

    def best(self, cells: Mapping[int, Number]) -> set[int]:
        """The key of the best number; none where its interval and theirs do not tell it from all others."""
        if self.better is None or not self.bold or not cells:
            return set()
        bad = {key: self._badness(one.value) for key, one in cells.items()}
        first = min(bad, key=bad.__getitem__)
        halves = {key: math.hypot(cells[first].half, one.half) for key, one in cells.items()}
        # Where there is no interval any difference counts: a comparison with NaN is false.
        alike = (bad[key] == bad[first] or bad[key] - bad[first] <= halves[key] for key in bad if key != first)
        return set() if any(alike) else {first}

    def _badness(self, value: float) -> float:
        return {"more": -value, "zero": abs(value), "one": abs(value - 1)}.get(self.better or "", value)


def pages(root: Path) -> list[Path]:
    """The README and the docs of a source tree."""
    return [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.is_file()]


def write_tables(root: Path) -> list[Path]:
    """Write every marked table of the pages below `root` from its record; returns the pages that changed."""
    new = {page: rewritten(page.read_text(encoding="utf-8"), page, root) for page in pages(root)}
    if not any(OPENED in text for text in new.values()):
        raise UsageError(f"no page below {root.resolve()} has a table's mark; run this where README.md and docs/ are")
    changed = [page for page, text in new.items() if text != page.read_text(encoding="utf-8")]
    for page in changed:
        write_atomically(page, new[page].encode())
    return changed


def take(root: Path, name: str, run: Path, *, anew: bool = False) -> int:
    """Take the cells of a run's records into docs/records/NAME.json; returns how many.

    With `anew`, of a row in a table of cells nothing is kept besides.
    """
    path, found = root / RECORDS / f"{name}.json", run / RUN_RECORDS
    for file, what in ((path, "a record of the docs"), (found, "the records of a finished run")):
        if not file.is_file():
            raise UsageError(f"there is no {file}, {what}; say --from NAME=RUN, such as --from table2=runs/table2")
    record, made = (json.loads(file.read_text(encoding="utf-8")) for file in (path, found))
    shared = [key for key, cells in made.items() if are_cells(cells) and are_cells(record.get(key))]
    if not shared:
        have = ", ".join(key for key, cells in record.items() if are_cells(cells)) or "none"
        raise UsageError(f"{found} has no cells for {path}: that has {have}")
    spread_out = [table["cells"]["of"] for table in record.get("tables", {}).values() if "cells" in table]
    for key in shared:
        cells = {_identity(cell): cell for cell in record[key]}
        taken = [shortened(cell) for cell in made[key]]
        if "model" in record[key][0]:
            named = made.get("settings", {}).get("model") or ""
            taken = [{"model": Path(named).name, **cell} for cell in taken]
        if anew and key in spread_out:
            rows = [(cell.get("model"), cell["row"]) for cell in taken]
            cells = {place: cell for place, cell in cells.items() if (cell.get("model"), cell["row"]) not in rows}
        record[key] = list((cells | {_identity(cell): cell for cell in taken}).values())
    record.setdefault("source", {})["environment"] = made.get("environment", {})
    write_atomically(path, (dumped(record) + "\n").encode())
    return sum(len(made[key]) for key in shared)


def dumped(found: Any, depth: int = 0) -> str:
    """JSON with a line for every cell and every row of a table, so that a change of one is a change of a line."""
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(found, dict) and found and depth < LINES:
        lines = (f"{json.dumps(key, ensure_ascii=False)}: {dumped(one, depth + 1)}" for key, one in found.items())
        return "{" + inner + f",{inner}".join(lines) + outer + "}"
    if isinstance(found, list) and any(isinstance(one, dict | list) for one in found):
        return "[" + inner + f",{inner}".join(json.dumps(one, ensure_ascii=False) for one in found) + outer + "]"
    return json.dumps(found, ensure_ascii=False)


def are_cells(found: Any) -> bool:
    """Whether a value of a record is a list of cells."""
    return isinstance(found, list) and bool(found) and all(isinstance(one, dict) and "row" in one for one in found)


def _identity(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell.get(key) for key in IDENTITY)


def rewritten(text: str, page: Path, root: Path) -> str:
    """The text of a page with its tables as their records say."""
    if text.count(OPENED) != len(MARK.findall(text)):
        raise UsageError(f"{page}: a table's mark has no end; write <!-- end of table --> in a line below the table")

    def replaced(mark: re.Match[str]) -> str:
        record, name, _ = mark.groups()
        found = markdown(_table(root / RECORDS / f"{record}.json", name, page), root / RECORDS / f"{record}.json")
        return f"<!-- table: {record} {name} -->\n{found}<!-- end of table -->"

    return MARK.sub(replaced, text)


def _table(path: Path, name: str, page: Path) -> dict[str, Any]:
    if not path.is_file():
        have = ", ".join(sorted(one.stem for one in path.parent.glob("*.json"))) or "none"
        raise UsageError(f"{page}: no record {path.stem!r} in {path.parent}; there are {have}")
    record = json.loads(path.read_text(encoding="utf-8"))
    tables = record.get("tables", {})
    if name not in tables:
        raise UsageError(f"{page}: {path} has no table {name!r}; it has {', '.join(tables) or 'none'}")
    return {**tables[name], "record": record}


def markdown(table: Mapping[str, Any], path: Path) -> str:
    """A table as Markdown. Bold: the best of a column, where intervals tell it; rows in italics are not compared."""
    shown, rows = spread(table, table["record"]) if "cells" in table else (table["columns"], [])
    columns = [Column(**column) for column in shown]
    rows += [[_cell(cell, table["record"], path) for cell in row] for row in table.get("rows", ())]
    if odd := [row for row in rows if len(row) != len(columns)]:
        raise UsageError(f"{path}: a row has {len(odd[0])} cells, and there are {len(columns)} columns: {odd[0]}")
    lines = [[column.text(cell) for column, cell in zip(columns, row, strict=True)] for row in rows]
    for j, column in enumerate(columns):
        compared = {i: row[j] for i, row in enumerate(rows) if not _set_apart(row[0])}
        for i in column.best({i: cell for i, cell in compared.items() if isinstance(cell, Number)}):
            lines[i][j] = f"**{lines[i][j]}**"
    head = [column.title + ARROWS[column.better] for column in columns]
    return "".join(_line(line) for line in (head, ["---"] * len(head), *lines))


def _line(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n"


def _set_apart(first: Number | str) -> bool:
    return isinstance(first, str) and first.startswith("*") and not first.startswith("**")


def _cell(cell: Any, record: Mapping[str, Any], path: Path) -> Number | str:
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, Mapping) and "all" in cell:
        values = [_looked_up(one, record, path).value for one in cell["all"]]
        return " / ".join(_short(value, "+" if i == 0 else "") for i, value in enumerate(values))
    if isinstance(cell, Mapping) and "range" in cell:
        low, high = (pick(_looked_up(one, record, path).value for one in cell["range"]) for pick in (min, max))
        return f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"
    if isinstance(cell, Mapping):
        return _looked_up(cell["at"], record, path)
    return Number(*cell) if isinstance(cell, Sequence) else Number(cell)


def _short(value: float, sign: str) -> str:
    """A number among several in a cell: the first of them has a sign."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 and not sign else 0
    return f"{value:{sign},.{digits}f}"


def _looked_up(steps: Sequence[Any], record: Any, path: Path) -> Number:
    """The number at a path (see record_cells.number)."""
    *way, key = steps
    place = record
    for step in way:
        try:
            place = place[step] if isinstance(step, str) else next(one for one in place if step.items() <= one.items())
        except (KeyError, StopIteration):
            raise UsageError(f"{path}: nothing at {step!r} of {steps}") from None
    if key not in place:
        raise UsageError(f"{path}: nothing at {key!r} of {steps}")
    return number(place, key)
