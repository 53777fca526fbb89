"""Tables as data: cells by row and column, each measured once and kept, shown as a table or as
curves.

    cells = {(row, steps): method for row, method in ROWS.items() for steps in (10, 25)}
    results = Grid("samplers", cells, measure, depends=model, across="steps").run(context)
    results.table("Few-step sampling", [FID, EVALUATIONS])
    results.curves("few_steps", "FID against steps.", FID)

A measure takes a Cell and returns a Part: numbers by name (mmdgs.report.numbers), and tensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes

from experiments.drawing import legend, line_style, plain_logs
from experiments.experiment import Context, TimeIsUp
from mmdgs.report.drawing import labelled, new_figure
from mmdgs.report.numbers import Measure as Measure, Number as Number
from mmdgs.report.page import Claim, Figure
from mmdgs.runtime import side_by_side
from mmdgs.tables import Table
from mmdgs.workspace import Part

FEW = 8
"""At most so many columns that are whole numbers are the ticks of a figure."""
Column = Hashable
Key = tuple[str, Any]
"""(row, column)"""


def axis(default: Any) -> Any:
    """A field of settings that says which cells there are: no part depends on it."""
    return field(default=default, compare=False)


@dataclass(frozen=True)
class Cell:
    """A cell to be measured: its row and column, what it is, and its seeds."""

    row: str
    column: Any
    what: Any
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.row}, {self.column}"

    @property
    def seed(self) -> int:
        """The first seed."""
        return self.seeds[0]


def together(context: Context, jobs: Sequence[Callable[[], object]], label: str) -> None:
    """Run jobs side by side: one for each CPU thread, one at a time on an accelerator."""
    workers = torch.get_num_threads() if context.device.type == "cpu" else 1
    side_by_side(jobs, workers=workers, progress=label)


@dataclass(frozen=True)
class Grid:
    """Cells by (row, column), in the order in which they are measured, and what they all depend on.

    A cell is measured again if what it is, its seeds or `depends` (settings, a model, ...) changed
    since it was kept.
    """

    name: str
    cells: Mapping[Key, Any]
    measure: Callable[[Cell], Part]
    depends: Any = None
    across: str = "column"
    seeds: int = 1
    more_seeds: Mapping[Key, int] = field(default_factory=dict)  # of single cells
    beside: bool = False  # several cells at a time, on a CPU

    def run(self, context: Context, least: int = 1) -> Results:
        """Measure the cells of the rows asked for (--only), or take them from the folder, until the
        time is up; raises TimeIsUp where that was before `least` cells.
        """
        context.check_only(list(dict.fromkeys(row for row, _ in self.cells)))
        keys = [key for key in self.cells if context.only is None or key[0] in context.only]
        parts: dict[Key, Part] = {}
        jobs = [partial(self._measured, context, key, parts) for key in keys]
        if self.beside:
            together(context, jobs, self.name)
        else:
            for job in jobs:
                job()
        if len(parts) < least:
            cells = "cell" if least == 1 else f"{least} cells"
            over = f"the {context.minutes} minutes were over before the first {cells}"
            raise TimeIsUp(f"{over}; --resume goes on")
        left = [key for key in keys if key not in parts]
        return Results(self, {key: parts[key] for key in keys if key in parts}, left)

    def _measured(self, context: Context, key: Key, parts: dict[Key, Part]) -> None:
        first, count = context.seed, self.more_seeds.get(key, self.seeds)
        cell = Cell(*key, self.cells[key], tuple(range(first, first + count)))

        def compute() -> Part:
            context.check_time()
            return self.measure(cell)

        depends = {"cell": cell.what, "seeds": cell.seeds, "on": self.depends}
        name = f"{self.name}-{cell.row}-{cell.column}"
        with contextlib.suppress(TimeIsUp):
            parts[key] = context.workspace.part(name, depends, compute)


@dataclass(frozen=True)
class Results:
    """The parts of a grid's cells by (row, column), and the cells left for --resume."""

    grid: Grid
    parts: Mapping[Key, Part]
    left: Sequence[Key] = ()

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(row for row, _ in self.parts))

    @property
    def columns(self) -> list[Any]:
        return list(dict.fromkeys(column for _, column in self.parts))

    @property
    def cells(self) -> dict[Key, dict[str, Any]]:
        """The numbers of all cells."""
        return {key: part.values for key, part in self.parts.items()}

    def has(self, row: str, column: Column) -> bool:
        return (row, column) in self.parts

    def values(self, row: str, column: Column) -> dict[str, Any]:
        """The numbers of a cell; none where it was not measured."""
        return self.parts[row, column].values if self.has(row, column) else {}

    def number(
        self, row: str, column: Column, measure: Measure | str, against: str | None = None
    ) -> Number:
        """A number of a cell with its interval; with `against`, above that row's at the column."""
        shown = Measure(measure, measure) if isinstance(measure, str) else measure
        other = None if against is None else self.values(against, column)
        return shown.of(self.values(row, column), other)

    def records(self) -> list[dict[str, Any]]:
        """The cells for records.json."""
        across = self.grid.across
        return [
            {"row": row, across: column, **self.values(row, column)} for row, column in self.parts
        ]

    def open(self) -> list[str]:
        """The names of the cells left."""
        return [f"{row}, {column}" for row, column in self.left]

    def table(
        self,
        title: str,
        measures: Sequence[Measure],
        *,
        note: str = "",
        head: str = "",
        rows: Mapping[str, str] | None = None,
        columns: Mapping[Any, str] | None = None,
        compared: Sequence[str] | None = None,
        against: str | None = None,
    ) -> Table:
        """One line a row, with each measure at each column; `rows` and `columns` pick, order and
        name them.

        Bold: the best of the rows `compared` (None: of all), where intervals tell it from the
        others. With `against`, every other row is shown by its difference from that one. A measure
        that no cell has is left out.
        """
        rows = rows or {row: row for row in self.rows}
        columns = columns or {column: self._named(column) for column in self.columns}
        header, body, best = [head], [[name] for name in rows.values()], set()
        others = {row: None if row == against else against for row in rows}
        for column, place in columns.items():
            for measure in measures:
                here = {row for row in rows if measure.key in self.values(row, column)}
                if not here:
                    continue
                several = len(measures) > 1
                header.append(f"{measure.title}, {place}".removesuffix(", ") if several else place)
                by = replace(measure, deviation=False)  # the interval decides, whichever is shown
                numbers = {}
                for i, (row, line) in enumerate(zip(rows, body, strict=True)):
                    if row not in here:
                        line.append("")
                        continue
                    number = self.number(row, column, measure, others[row])
                    line.append(measure.text(number, "+" if others[row] else ""))
                    if compared is None or row in compared:
                        at_zero = row == against
                        gap = self.number(row, column, by, others[row])
                        numbers[i] = Number(0.0) if at_zero else gap
                best |= {(i, len(header) - 1) for i in measure.best(numbers)}
        return Table(title, header, body, note, best=frozenset(best))

    def _named(self, column: Column) -> str:
        return column if isinstance(column, str) else f"{column} {self.grid.across}"

    def tables(self, measures: Sequence[Measure], prefix: str = "", **shown: Any) -> list[Table]:
        """A table for each measure, by the measure's title."""
        titles = {measure: f"{prefix}{measure.title}" for measure in measures}
        return [
            self.table(title[0].upper() + title[1:], [measure], **shown)
            for measure, title in titles.items()
        ]

    def listing(
        self,
        title: str,
        measures: Sequence[Measure],
        *,
        note: str = "",
        head: str = "",
        rows: Sequence[str] = (),
    ) -> Table:
        """One line a cell: row, column and each measure; these rows (none given: all), their
        columns ascending. A measure that no cell has is left out.
        """
        order = list(rows) or self.rows
        keys = [key for key in self.parts if key[0] in order]
        keys.sort(key=lambda key: (order.index(key[0]), key[1]))
        measures = [m for m in measures if any(m.key in self.values(*key) for key in keys)]
        lines, best = [[row, f"{column}"] for row, column in keys], set()
        for j, measure in enumerate(measures, 2):
            here = {i: self.values(*key) for i, key in enumerate(keys)}
            here = {i: values for i, values in here.items() if measure.key in values}
            for i, line in enumerate(lines):
                line.append(measure.text(measure.of(here[i])) if i in here else "")
            by = replace(measure, deviation=False)
            best |= {(i, j) for i in measure.best({i: by.of(here[i]) for i in here})}
        header = [head, self.grid.across, *(measure.title for measure in measures)]
        return Table(title, header, lines, note, best=frozenset(best))

    def below(
        self, row: str, other: str, measure: Measure, columns: Sequence[Any] | None = None
    ) -> Claim:
        """The claim that a row is better than another at every column.

        Not decided where the interval of a difference holds zero and no column contradicts by more
        than its interval.
        """
        shared = [c for c in columns or self.columns if self.has(row, c) and self.has(other, c)]
        pairs = [measure.compared(self.values(row, c), self.values(other, c)) for c in shared]
        across = self.grid.across
        where = f"({across}: {shared[0]})" if len(shared) == 1 else f"for all {across}"
        text = f"{row} has a better {measure.title} than {other} {where}"
        said = [f"{numbers} at {c}" for c, (_, numbers) in zip(shared, pairs, strict=True)]
        return Claim.of_all(text, [verdict for verdict, _ in pairs], said)

    def draw(
        self,
        axis: Axes,
        measure: Measure,
        x: Measure | None = None,
        log: str = "xy",
        *,
        intervals: bool = True,
        rows: Mapping[str, str] | None = None,
    ) -> None:
        """A curve for each row, which `rows` pick and name: the measure against the column, or
        another measure.
        """
        scale = 100 if measure.percent else 1
        for row, title in (rows or {r: r for r in self.rows}).items():
            own = [(c, self.values(row, c)) for c in self.columns if self.has(row, c)]
            points = sorted((c if x is None else x.of(v).value, *measure.of(v)) for c, v in own)
            across, up, halves = zip(*points, strict=True)
            bars = [0.0 if math.isnan(half) else scale * half for half in halves]
            errors = bars if intervals and any(bars) else None
            heights = [scale * value for value in up]
            look = {"capsize": 2, "elinewidth": 0.9, **line_style(row)}
            axis.errorbar(across, heights, errors, label=title, **look)
        axis.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
        what = f"{measure.title}, %" if measure.percent else measure.title
        labelled(axis, "", self.grid.across if x is None else x.title, what, 9)
        plain_logs(axis)
        whole = all(isinstance(column, int) for column in self.columns)
        if x is None and whole and len(self.columns) <= FEW:
            axis.set_xticks(self.columns, [f"{column:,}" for column in self.columns])

    def curves(
        self,
        name: str,
        caption: str,
        measure: Measure,
        *,
        x: Sequence[Measure | None] = (None,),
        log: str = "xy",
        rows: Mapping[str, str] | None = None,
    ) -> Figure:
        """The figure of `draw`: a panel for each x (None: the column), and one legend."""
        canvas, axes = new_figure(1, len(x), inches=(5.6 * len(x) + 1.8, 4.4))
        for panel, against in zip(axes[0], x, strict=True):
            self.draw(panel, measure, against, log, rows=rows)
        legend(canvas)
        return Figure(name, caption, canvas)
