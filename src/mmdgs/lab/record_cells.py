"""Tables of the docs that are made of all cells of a record, so that what a run adds to them appears by itself.

    "columns": [
     {"title": "sampler"}, {"title": "{} steps", "each": "fid", "digits": 2}, {"title": "cost", "key": "evaluations"}
    ],
    "cells": {"of": "samplers", "across": "steps", "rows": {"DDIM": "DDIM", "Heun": "Heun's method"}}

`of` is the record's list of cells, `where` what all of them share, `rows` the rows that are shown, by their titles;
those without a cell are left out. A column with `each` stands for one column at every value of `across` (`only` picks
some, `descending` turns them round); one with `key` has the row's number, or several where they differ. `reference` is
a row and a key: the row that others are shown above, as 0 with that number in brackets. `differences` are further
lines: the first of two rows minus the second, by leaving out the same seed of both. Where no column has `each`, every
cell is a line; a row's title stands in its first, unless the first column has a `key`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmdgs.lab.grid import Measure, Number
from mmdgs.metrics import interval

HALF = "_half"
"""Behind a key: half the 95% interval of its number, where what it was made of is not kept."""
LONGEST = 50
"""Numbers of a list that a record keeps, such as one for each seed; of longer ones the mean and its interval."""
Cell = Mapping[str, Any]
Shown = Number | str


def number(cell: Cell, key: str) -> Number:
    """A number of a cell: of a list the mean with its interval, or with that of what stands beside it (see grid)."""
    if f"{key}{HALF}" in cell:
        return Number(cell[key], cell[f"{key}{HALF}"])
    found = Measure(key, key).of(cell)
    return found if math.isfinite(found.value) else Number(found.value)


def shortened(cell: Cell) -> dict[str, Any]:
    """A cell as a record keeps it: long lists, such as one number for each image, by their mean and its interval."""
    kept: dict[str, Any] = {}
    for key, value in cell.items():
        long = isinstance(value, list) and len(value) > LONGEST and all(isinstance(one, float) for one in value)
        if long and not key.endswith("_left_out"):  # which differences of rows need
            kept[key], kept[f"{key}{HALF}"] = interval(value)
        else:
            kept[key] = value
    return kept


def spread(table: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[list[Shown]]]:
    """The columns of a table that is made of cells, as other tables have them, and its rows."""
    wanted, columns = table["cells"], table["columns"]
    where = wanted.get("where", {}).items()
    every = [one for one in record.get(wanted["of"], ()) if where <= one.items() and one["row"] in wanted["rows"]]
    if not any("each" in column for column in columns):
        return [_plain(column) for column in columns], _lines(wanted, columns, every)
    at = {one[wanted["across"]] for one in every}
    places = sorted(at.intersection(wanted.get("only", at)), reverse=wanted.get("descending", False))
    by = {(one["row"], one[wanted["across"]]): one for one in every}
    rows = [
        [title, *_across(row, columns[1:], [by.get((row, place)) for place in places], wanted)]
        for row, title in wanted["rows"].items()
        if any((row, place) in by for place in places)
    ]
    for title, (first, second) in wanted.get("differences", {}).items():
        pairs = [(by.get((first, place)), by.get((second, place))) for place in places]
        cells = [[_difference(column, *pair) for pair in pairs] if "each" in column else [""] for column in columns[1:]]
        if any(text for some in cells for text in some):
            rows.append([title, *(text for some in cells for text in some)])
    shown = [
        {**_plain(column), "title": column["title"].format(place)}
        for column in columns
        for place in (places if "each" in column else [""])
    ]
    return shown, rows


def _has(cell: Cell, key: str) -> bool:
    """Whether a cell has a number; a run's records have none in the place of one that is not finite."""
    return cell.get(key) is not None


def _plain(column: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in column.items() if name not in ("key", "each")}


def _lines(wanted: Mapping[str, Any], columns: Sequence[Mapping[str, Any]], every: Sequence[Cell]) -> list[list[Shown]]:
    lines: list[list[Shown]] = []
    for row, title in wanted["rows"].items():
        own = sorted((one for one in every if one["row"] == row), key=lambda one: one[wanted["across"]])
        for i, one in enumerate(own):
            keys = [column["key"] for column in columns if "key" in column]
            numbers = [number(one, key) if _has(one, key) else "" for key in keys]
            lines.append(numbers if "key" in columns[0] else ["" if i else title, *numbers])
    return lines


def _across(
    row: str, columns: Sequence[Mapping[str, Any]], cells: Sequence[Cell | None], wanted: Mapping[str, Any]
) -> list[Shown]:
    """A row's numbers at every place, and those of columns that are not of a place."""
    found: list[Shown] = []
    for column in columns:
        if "each" not in column:
            found.append(_several(column, [one for one in cells if one is not None]))
        elif wanted.get("reference", {}).get("row") == row:
            key = wanted["reference"]["key"]
            found += [f"0 ({number(one, key).text(column['digits'])})" if one else "" for one in cells]
        else:
            found += [number(one, column["each"]) if one and _has(one, column["each"]) else "" for one in cells]
    return found


def _several(column: Mapping[str, Any], cells: Sequence[Cell]) -> Shown:
    """One number where all cells have the same, else all of them side by side."""
    values = [number(one, column["key"]) for one in cells if _has(one, column["key"])]
    if len({one.value for one in values}) > 1:
        return " / ".join(one.text(column["digits"]) for one in values)
    return values[0] if values else ""


def _difference(column: Mapping[str, Any], first: Cell | None, second: Cell | None) -> str:
    """Empty where one of the two is missing, or has no values without each seed."""
    key = column["each"]
    if not all(one and f"{key}_left_out" in one for one in (first, second)):
        return ""
    assert first is not None
    return Measure(key, key).of(first, second).text(column["digits"], "+")
