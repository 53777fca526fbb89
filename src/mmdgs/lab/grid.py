"""Tables as data: cells by row and column, each measured once and kept, shown as a table or as curves.

    cells = {(row, steps): method for row, method in ROWS.items() for steps in (10, 25)}
    found = Grid("samplers", cells, measure, depends=(settings, model), across="steps").run(context)
    found.table("Few-step sampling", [FID, EVALUATIONS])
    found.curves("few_steps", "FID against steps.", FID)

A measure takes a Cell and returns a Part: numbers by name, and tensors. A number may be a list, with one entry for each
seed, group or image; it is then shown as the mean with its 95% interval (Student's t). A number `fid` beside a list
`fid_left_out` (its values with each seed left out) gets the jackknife interval.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes

from mmdgs.lab.drawing import labelled, line_style, new_figure, plain_logs, style
from mmdgs.lab.experiment import Context, TimeIsUp
from mmdgs.lab.labels import label_curves
from mmdgs.lab.report import Claim, Figure
from mmdgs.lab.workspace import Part
from mmdgs.metrics import interval, jackknife_interval
from mmdgs.runtime import side_by_side
from mmdgs.tables import Table

FEW = 8
"""At most so many columns that are whole numbers are the ticks of a figure."""
Column = Hashable
Key = tuple[str, Any]
"""(row, column)"""


class Number(NamedTuple):
    """A value, and half the width of its 95% interval; NaN where there is none."""

    value: float
    half: float = math.nan

    def text(self, digits: int | None = None, sign: str = "") -> str:
        """With its interval, to so many digits; None: three, or four where the value is small."""
        if not math.isfinite(self.value):
            return str(self.value)
        digits = (4 if abs(self.value) < 0.1 else 3) if digits is None else digits
        value = f"{self.value:{sign},.{digits}f}"
        return value if math.isnan(self.half) else f"{value} ± {self.half:,.{digits}f}"


@dataclass(frozen=True)
class Measure:
    """How a number of the cells is shown: its key, its title, digits, and which is best (less, more, zero)."""

    key: str
    title: str
    digits: int | None = None
    better: str | None = None
    percent: bool = False
    deviation: bool = False  # show the standard deviation over runs in place of the interval

    def of(self, values: Mapping[str, Any], against: Mapping[str, Any] | None = None) -> Number:
        """The number in the values of a cell; with `against`, its difference from another cell's, pair by pair."""
        own, left_out = values[self.key], values.get(f"{self.key}_left_out", ())
        if against is not None:
            other = against[self.key]
            own = [a - b for a, b in zip(own, other, strict=False)] if isinstance(own, Sequence) else own - other
            left_out = [a - b for a, b in zip(left_out, against.get(f"{self.key}_left_out", ()), strict=False)]
        if not isinstance(own, Sequence):
            return Number(own, jackknife_interval(left_out))
        if not all(map(math.isfinite, own)):  # chains that diverged: no mean, and no interval
            return Number(sum(own))
        if self.deviation and len(own) > 1:
            return Number(statistics.mean(own), statistics.stdev(own))
        return Number(*interval(own))

    def text(self, shown: Number, sign: str = "") -> str:
        """The number for a table."""
        if self.percent:
            return Number(100 * shown.value, 100 * shown.half).text(self.digits, sign) + "%"
        return shown.text(self.digits, sign)

    def badness(self, value: float) -> float:
        """Less is better."""
        return {"more": -value, "zero": abs(value)}.get(self.better or "less", value)

    def best(self, found: Mapping[Any, Number]) -> set[Any]:
        """The best of some numbers; none where its interval and theirs do not tell it from all others."""
        finite = {key: one for key, one in found.items() if math.isfinite(one.value)}
        if self.better is None or not finite:
            return set()
        first = min(finite, key=lambda key: self.badness(finite[key].value))
        value, half = finite[first]
        # Where there is no interval, any difference that is shown counts: a comparison with NaN is false.
        alike = (
            self.badness(one.value) - self.badness(value) <= math.hypot(half, one.half)
            or self.text(Number(one.value)) == self.text(Number(value))
            for key, one in finite.items()
            if key != first
        )
        return set() if any(alike) else {first}


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
    """Run jobs side by side: one for each CPU thread that torch may use, one at a time on an accelerator."""
    workers = torch.get_num_threads() if context.device.type == "cpu" else 1
    side_by_side(jobs, workers=workers, progress=label)


@dataclass(frozen=True)
class Grid:
    """Cells by (row, column), in the order in which they are measured, and what they all depend on.

    A cell is measured again if what it is, its seeds or `depends` (settings, a model, ...) changed since it was kept.
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
        """Measure the cells of the rows asked for (--only), or take them from the folder, until the time is up.

        Raises TimeIsUp where that was before so many cells.
        """
        context.check_only(list(dict.fromkeys(row for row, _ in self.cells)))
        wanted = [key for key in self.cells if context.only is None or key[0] in context.only]
        found: dict[Key, Part] = {}
        if self.beside:
            together(context, [partial(self._measured, context, key, found) for key in wanted], self.name)
        else:
            for key in wanted:
                self._measured(context, key, found)
        if len(found) < least:
            first = "cell" if least == 1 else f"{least} cells"
            raise TimeIsUp(f"the {context.minutes} minutes were over before the first {first}; --resume goes on")
        return Results(self, {key: found[key] for key in wanted if key in found}, [k for k in wanted if k not in found])

    def _measured(self, context: Context, key: Key, found: dict[Key, Part]) -> None:
        first, count = context.seed, self.more_seeds.get(key, self.seeds)
        cell = Cell(*key, self.cells[key], tuple(range(first, first + count)))

        def compute() -> Part:
            context.check_time()
            return self.measure(cell)

        depends = {"cell": cell.what, "seeds": cell.seeds, "on": self.depends}
        with contextlib.suppress(TimeIsUp):
            found[key] = context.workspace.part(f"{self.name}-{cell.row}-{cell.column}", depends, compute)


@dataclass(frozen=True)
class Results:
    """What a grid found: the parts of its cells by (row, column), and the cells left for --resume."""

    grid: Grid
    parts: Mapping[Key, Part]
    left: Sequence[Key] = ()

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(row for row, _ in self.parts))

    @property
    def columns(self) -> list[Any]:
        return list(dict.fromkeys(column for _, column in self.parts))

    def has(self, row: str, column: Column) -> bool:
        return (row, column) in self.parts

    def values(self, row: str, column: Column) -> dict[str, Any]:
        """The numbers of a cell; none where it was not measured."""
        return self.parts[row, column].values if self.has(row, column) else {}

    def number(self, row: str, column: Column, measure: Measure | str, against: str | None = None) -> Number:
        """A number of a cell with its interval; with `against`, above that row's at the same column."""
        shown = Measure(measure, measure) if isinstance(measure, str) else measure
        return shown.of(self.values(row, column), None if against is None else self.values(against, column))

    def records(self) -> list[dict[str, Any]]:
        """The cells for records.json."""
        return [{"row": row, self.grid.across: column, **part.values} for (row, column), part in self.parts.items()]

    def open(self) -> list[str]:
        """The names of the cells left."""
        return [f"{row}, {column}" for row, column in self.left]

    def unfinished(self) -> list[str]:
        """A sentence on the cells left, for a report's text."""
        names = "; ".join(self.open())
        return [f"Not finished yet, which --resume does: {names}."] if names else []

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
        """One line a row, with each measure at each column; `rows` and `columns` pick, order and name them.

        Bold: the best of the rows `compared` (None: of all), where intervals tell it from the others. With `against`,
        every other row is shown by its difference from that one. A measure that no cell has is left out.
        """
        rows = rows or {row: row for row in self.rows}
        columns = columns or {column: f"{column} {self.grid.across}" for column in self.columns}
        header, body, best = [head], [[name] for name in rows.values()], set()
        for column, place in columns.items():
            for measure in measures:
                here = {i: row for i, row in enumerate(rows) if measure.key in self.values(row, column)}
                if not here:
                    continue
                header.append(f"{measure.title}, {place}".removesuffix(", ") if len(measures) > 1 else place)
                other = {row: None if row == against else against for row in rows}
                shown = {i: self.number(row, column, measure, other[row]) for i, row in here.items()}
                for i, (row, line) in enumerate(zip(rows, body, strict=True)):
                    sign = "+" if against is not None and row != against else ""
                    line.append(measure.text(shown[i], sign) if i in shown else "")
                by = replace(measure, deviation=False)  # the interval decides, whichever is shown
                judged = {
                    i: Number(0.0) if row == against else self.number(row, column, by, other[row])
                    for i, row in here.items()
                    if compared is None or row in compared
                }
                best |= {(i, len(header) - 1) for i in measure.best(judged)}
        return Table(title, header, body, note, best=frozenset(best))

    def listing(
        self, title: str, measures: Sequence[Measure], *, note: str = "", head: str = "", rows: Sequence[str] = ()
    ) -> Table:
        """One line a cell: row, column and each measure; these rows (none given: all), their columns ascending.

        A measure that no cell has is left out.
        """
        order = list(rows) or self.rows
        keys = sorted((key for key in self.parts if key[0] in order), key=lambda key: (order.index(key[0]), key[1]))
        lines, best = [[row, f"{column}"] for row, column in keys], set()
        measures = [one for one in measures if any(one.key in self.values(*key) for key in keys)]
        for j, measure in enumerate(measures):
            here = {i: self.values(*key) for i, key in enumerate(keys) if measure.key in self.values(*key)}
            for i, line in enumerate(lines):
                line.append(measure.text(measure.of(here[i])) if i in here else "")
            by = replace(measure, deviation=False)
            best |= {(i, 2 + j) for i in measure.best({i: by.of(values) for i, values in here.items()})}
        header = [head, self.grid.across, *(measure.title for measure in measures)]
        return Table(title, header, lines, note, best=frozenset(best))

    def below(self, row: str, other: str, measure: Measure, columns: Sequence[Any] | None = None) -> Claim:
        """The claim that a row is better than another at every column.

        Not decided where the interval of a difference holds zero and no column contradicts by more than its interval.
        """
        shared = [c for c in columns or self.columns if self.has(row, c) and self.has(other, c)]
        verdicts, said = [], []
        for column in shared:
            own, others = (self.number(one, column, measure) for one in (row, other))
            gap = self.number(row, column, measure.key, other)
            better = measure.badness(own.value) < measure.badness(others.value)
            verdicts.append(None if abs(gap.value) <= gap.half else better)
            values = f"{measure.text(Number(own.value))} against {measure.text(Number(others.value))} at {column}"
            said.append(values if math.isnan(gap.half) else f"{values}, {measure.text(gap, '+')}")
        where = f"({self.grid.across}: {shared[0]})" if len(shared) == 1 else f"for all {self.grid.across}"
        text = f"{row} has a better {measure.title} than {other} {where}"
        return Claim.of_all(text, verdicts, said)

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
        """A curve for each row, which `rows` pick and name: the measure against the column, or another measure."""
        scale = 100 if measure.percent else 1
        for row, title in (rows or {r: r for r in self.rows}).items():
            own = [(c, self.values(row, c)) for c in self.columns if self.has(row, c)]
            points = sorted((c if x is None else x.of(v).value, *measure.of(v)) for c, v in own)
            across, up, halves = zip(*((a, scale * b, scale * c) for a, b, c in points), strict=True)
            errors = (
                None if not intervals or all(map(math.isnan, halves)) else [0.0 if math.isnan(h) else h for h in halves]
            )
            axis.errorbar(across, up, errors, label=title, capsize=2, elinewidth=0.9, **line_style(row))
        axis.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
        what = f"{measure.title}, %" if measure.percent else measure.title
        labelled(axis, "", self.grid.across if x is None else x.title, what, 9)
        plain_logs(axis)
        if x is None and len(self.columns) <= FEW and all(isinstance(column, int) for column in self.columns):
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
        """The figure of `draw`: a panel for each x (None: the column), every curve labelled in each."""
        canvas, axes = new_figure(1, len(x), inches=(7.2 * len(x), 4.6))
        for panel, one in zip(axes[0], x, strict=True):
            panel.margins(x=0.29)  # room for labels
            self.draw(panel, measure, one, log, rows=rows)
        label_curves(canvas)
        return Figure(name, caption, canvas)

    def draw_bars(
        self, axis: Axes, column: Column, measure: Measure, rows: Mapping[str, str] | None = None, *, named: bool = True
    ) -> None:
        """A horizontal bar for each row at one column, with its interval; the first row on top."""
        rows = {row: title for row, title in (rows or {r: r for r in self.rows}).items() if self.has(row, column)}
        shown = [self.number(row, column, measure) for row in rows]
        errors = [0.0 if math.isnan(one.half) else one.half for one in shown]
        colours, thin = [style(row).colour for row in rows], {"elinewidth": 1, "ecolor": "#1c2330"}
        places = range(len(rows))
        axis.barh(places, [one.value for one in shown], xerr=errors, color=colours, height=0.65, error_kw=thin)
        labelled(axis, "", measure.title, "")
        axis.set_yticks(places, list(rows.values()) if named else [""] * len(rows), fontsize=8)
        axis.invert_yaxis()
