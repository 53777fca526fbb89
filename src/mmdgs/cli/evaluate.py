"""`mmdgs evaluate`: samples against data, in numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from mmdgs.cli.app import (
    Debug,
    Device,
    Quiet,
    Seed,
    app,
    device_named,
    messages,
    no_sets,
    output,
    plain_errors,
    refuse_idle,
)
from mmdgs.errors import UsageError
from mmdgs.evaluation.names import METRICS, OF_FEATURES
from mmdgs.tables import Table

if TYPE_CHECKING:
    from mmdgs.data import ImageSet
    from mmdgs.evaluation import Evaluation

OPEN = "open"


@app.command("evaluate")
def evaluate_command(
    context: typer.Context,
    samples: Annotated[
        list[str], typer.Argument(help="Images: an .npz, a folder or zip, or a set and its split (cifar10:test).")
    ],
    reference: Annotated[str, typer.Option("--reference", "-r", help="Data to compare with, such as cifar10:train.")],
    metrics: Annotated[str, typer.Option("--metrics", "-m", help=f"Some of {', '.join(METRICS)}.")] = ",".join(
        OF_FEATURES
    ),
    inception: Annotated[
        Path | None,
        typer.Option(help="The Inception network.", envvar="MMDGS_INCEPTION", show_default="found or downloaded"),
    ] = None,
    classifier: Annotated[
        str | None, typer.Option(help="A model of classes, for the metric classes: mnist-classifier, a folder ...")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="A random subset of so many samples.")] = None,
    groups: Annotated[
        int, typer.Option(min=1, help="Give the FID a 95% interval, by leaving out each of so many groups of samples.")
    ] = 1,
    size: Annotated[int | None, typer.Option(min=1, help="Crop and resize image files to this many pixels.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data files are.", envvar="MMDGS_DATA")] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="A record of an earlier --out to show beside; may be given again.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare what differs in count or reference.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the record to this JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record instead of a table.")] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images at a time.", show_default="by device")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --out.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure samples against data: FID, KID, precision and recall, Inception score, diversity, classes.

    Features of the reference are cached (in MMDGS_CACHE, or ~/.cache/mmdgs).
    """
    with plain_errors(debug):
        from mmdgs.data import load_samples
        from mmdgs.evaluation import check_comparable, evaluate, random_subset, read_evaluations
        from mmdgs.evaluation.checks import check_groups, check_images, check_metrics
        from mmdgs.files import to_json, write_atomically
        from mmdgs.metrics.inception_file import load_inception
        from mmdgs.models import load

        chosen = list(dict.fromkeys(name.strip() for name in metrics.split(",") if name.strip()))
        refuse_idle(
            context,
            (not set(chosen) & set(OF_FEATURES), ("inception",), f"the metrics {', '.join(OF_FEATURES)}"),
            ("fid" not in chosen, ("groups",), "the metric fid"),
            (no_sets(*samples, reference), ("data_dir",), "sets such as cifar10:test"),
            (
                all(Path(source).suffix.lower() == ".npz" for source in (*samples, reference)),
                ("size",),
                "image files and sets, not for arrays (.npz)",
            ),
            (len(samples) == 1 and not compare, ("force",), "several sets of samples, or --compare"),
            (out is None, ("overwrite",), "--out"),
        )
        _check_out(out, overwrite)
        earlier = [record for file in compare or [] for record in read_evaluations(file)]
        judge = None if classifier is None else load(classifier)
        check_metrics(chosen, judge)
        where = device_named(device)
        data = load_samples(reference, data_dir=data_dir, size=size)
        sets = [load_samples(one, data_dir=data_dir, size=size) for one in samples]
        for one in sets:
            check_images(random_subset(one, limit, seed), data, chosen, judge)
            check_groups(groups, min(len(one), limit or len(one)))
        _check_counts(sets, earlier, limit, force)
        network = load_inception(inception) if any(name in OF_FEATURES for name in chosen) else None
        found = [
            evaluate(
                one,
                data,
                metrics=chosen,
                inception=network,
                classifier=judge,
                limit=limit,
                seed=seed,
                groups=groups,
                device=where,
                batch_size=batch_size,
                progress=one.name,
            )
            for one in sets
        ]
        check_comparable([*found, *earlier], force=force)
        content = {"evaluations": [record.to_json() for record in found]}
        if out is not None:
            write_atomically(out, to_json(content))
        _show(found, earlier, content if as_json else None)
        if out is not None:
            messages.print(f"record: [bold]{escape(str(out.resolve()))}[/bold]", soft_wrap=True)


def _check_out(out: Path | None, overwrite: bool) -> None:
    from mmdgs.files import require_parent

    if out is None:
        return
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists; use --overwrite, or another name")
    require_parent(out)


def _check_counts(sets: list[ImageSet], earlier: list[Evaluation], limit: int | None, force: bool) -> None:
    """Refuse different counts before the work, not after it."""
    from mmdgs.evaluation import check_equal

    counts = [(one.name, min(len(one), limit or len(one))) for one in sets]
    counts += [(record.samples.name, record.samples.count) for record in earlier]
    for other in counts[1:]:
        check_equal("numbers of samples", counts[0], other, force=force)


def _show(found: list[Evaluation], earlier: list[Evaluation], content: dict[str, Any] | None) -> None:
    if content is not None:
        print(json.dumps(content, indent=1))
    else:
        output.print(_table([*found, *earlier]).to_rich())
    said = [f"{record.samples.name}: {warning}" for record in found for warning in record.warnings]
    said += [
        f"{record.samples.name}: the metric {name!r} is left open: {why}"
        for record in found
        for name, why in record.open.items()
    ]
    for line in dict.fromkeys(said):
        messages.print(f"[yellow]note:[/yellow] {escape(line)}", soft_wrap=True)


ROWS: dict[str, list[tuple[str, Callable[[Any], str]]]] = {
    "fid": [("FID", lambda value: f"{max(value, 0):.3f}")],
    "kid": [("KID x 1000", lambda value: f"{1000 * value['mean']:.3f} ± {1000 * value['std']:.3f}")],
    "precision-recall": [
        ("precision", lambda value: f"{value['precision']:.3f}"),
        ("recall", lambda value: f"{value['recall']:.3f}"),
    ],
    "is": [("Inception score", lambda value: f"{value['mean']:.2f} ± {value['std']:.2f}")],
    "diversity": [
        ("diversity (1: as the data)", lambda value: "-" if value["ratio"] is None else f"{value['ratio']:.3f}"),
        ("duplicates", lambda value: f"{100 * value['samples']['duplicates']:.1f}%"),
    ],
    "classes": [
        ("distance of class shares", lambda value: f"{value['distance']:.3f}"),
        ("entropy of classes (data)", lambda value: f"{value['entropy']:.3f} ({value['reference_entropy']:.3f})"),
    ],
}
"""The rows of the table: for each metric their names, and how its value is written."""
USUAL = 50_000
"""Samples of a FID in publications."""


def _table(records: list[Evaluation]) -> Table:
    """One column for each set of samples; a cell that could not be filled is open, one not asked for is empty."""
    rows = [["samples", *(f"{record.samples.count:,}" for record in records)]]
    for name, lines in ROWS.items():
        if any(name in record.values or name in record.open for record in records):
            rows += [[label, *(_cell(record, name, write) for record in records)] for label, write in lines]
        if name == "fid" and any(more := [_of_more(record) for record in records]):
            rows.append([f"FID of {USUAL:,}, extrapolated", *more])
    reference = records[0].reference
    return Table(
        f"against {reference.name}:{reference.split} ({reference.count:,} images)",
        ["", *(escape(f"{record.samples.name}:{record.samples.split}") for record in records)],
        rows,
    )


def _of_more(record: Evaluation) -> str:
    """The FID of as many samples as publications take; empty without groups, and where there are as many."""
    from mmdgs.metrics import extrapolated, jackknife_interval

    left_out, count = record.left_out.get("fid", ()), record.samples.count
    if len(left_out) < 2 or count >= USUAL:
        return ""
    return f"{extrapolated(record.values['fid'], left_out, USUAL / count):.1f} ± {jackknife_interval(left_out):.1f}"


def _cell(record: Evaluation, name: str, write: Callable[[Any], str]) -> str:
    from mmdgs.metrics import jackknife_interval

    if name in record.values:
        half = jackknife_interval(record.left_out.get(name, ()))
        return write(record.values[name]) + ("" if math.isnan(half) else f" ± {half:.3f}")
    return OPEN if name in record.open else ""
