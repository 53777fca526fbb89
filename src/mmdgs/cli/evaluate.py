"""`mmdgs evaluate`: samples against data, in numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from typer import Argument, Context, Option

from mmdgs.cli import app as cli
from mmdgs.cli.app import DataDir, Device, Quiet, Seed, app
from mmdgs.errors import UsageError
from mmdgs.evaluation.names import METRICS, OF_FEATURES
from mmdgs.tables import Table

if TYPE_CHECKING:
    from mmdgs.data import ImageSet
    from mmdgs.evaluation import Evaluation


@app.command("evaluate")
def evaluate_command(
    context: Context,
    samples: list[str] = Argument(
        help="Images: an .npz, a folder or zip, or a set and its split (cifar10:test)."
    ),
    reference: str = Option(
        ..., "--reference", "-r", help="Data to compare with, such as cifar10:train."
    ),
    metrics: str = Option(
        ",".join(OF_FEATURES), "--metrics", "-m", help=f"Some of {', '.join(METRICS)}."
    ),
    inception: Path | None = Option(
        None,
        help="The Inception network.",
        envvar="MMDGS_INCEPTION",
        show_default="found or downloaded",
    ),
    classifier: str | None = Option(
        None, help="A model of classes, for the metric classes: mnist-classifier, a folder ..."
    ),
    limit: int | None = Option(None, min=1, help="A random subset of so many samples."),
    groups: int = Option(
        1,
        min=1,
        help="Give the FID a 95% interval, by leaving out each of so many groups of samples.",
    ),
    size: int | None = Option(None, min=1, help="Crop and resize image files to this many pixels."),
    data_dir: DataDir = None,
    compare: list[Path] | None = Option(
        None, help="A record of an earlier --out to show beside; may be given again."
    ),
    force: bool = Option(False, "--force", help="Compare what differs in count or reference."),
    out: Path | None = Option(None, "--out", "-o", help="Write the record to this JSON file."),
    as_json: bool = Option(False, "--json", help="Print the record instead of a table."),
    batch_size: int | None = Option(
        None, min=1, help="Images at a time.", show_default="by device"
    ),
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: bool = Option(False, "--overwrite", help="Replace the file of --out."),
    quiet: Quiet = False,
) -> None:
    """Measure samples against data: FID, KID, precision and recall, Inception score, diversity,
    classes.

    Features of the reference are cached (in MMDGS_CACHE, or ~/.cache/mmdgs).
    """
    from mmdgs.data import load_samples
    from mmdgs.evaluation import check_comparable, evaluate, random_subset, read_evaluations
    from mmdgs.evaluation.checks import check_images, check_metrics
    from mmdgs.files import require_parent, to_json, write_atomically
    from mmdgs.metrics.inception_file import load_inception
    from mmdgs.models import load

    names = list(dict.fromkeys(name.strip() for name in metrics.split(",") if name.strip()))
    features = [name for name in names if name in OF_FEATURES]
    arrays = all(Path(source).suffix.lower() == ".npz" for source in (*samples, reference))
    alone = len(samples) == 1 and not compare
    cli.refuse_idle(
        context,
        (not features, ("inception",), f"the metrics {', '.join(OF_FEATURES)}"),
        ("fid" not in names, ("groups",), "the metric fid"),
        (cli.no_sets(*samples, reference), ("data_dir",), "sets such as cifar10:test"),
        (arrays, ("size",), "image files and sets, not for arrays (.npz)"),
        (alone, ("force",), "several sets of samples, or --compare"),
        (out is None, ("overwrite",), "--out"),
    )
    if out is not None and out.exists() and not overwrite:
        raise UsageError(f"{out} exists; use --overwrite, or another name")
    if out is not None:
        require_parent(out)
    earlier = [record for file in compare or [] for record in read_evaluations(file)]
    judge = None if classifier is None else load(classifier)
    check_metrics(names, judge)
    where = cli.device_named(device)
    data = load_samples(reference, data_dir=data_dir, size=size)
    sets = [load_samples(source, data_dir=data_dir, size=size) for source in samples]
    for images in sets:
        check_images(random_subset(images, limit, seed), data, names, judge, groups)
    _check_counts(sets, earlier, limit, force)
    network = load_inception(inception) if features else None
    records = [
        evaluate(
            images,
            data,
            metrics=names,
            inception=network,
            classifier=judge,
            limit=limit,
            seed=seed,
            groups=groups,
            device=where,
            batch_size=batch_size,
            progress=images.name,
        )
        for images in sets
    ]
    check_comparable([*records, *earlier], force=force)
    content = {"evaluations": [record.to_json() for record in records]}
    if out is not None:
        write_atomically(out, to_json(content))
    _show(records, earlier, content if as_json else None)
    if out is not None:
        cli.tell(f"record: [bold]{escape(str(out.resolve()))}[/bold]")


def _check_counts(
    sets: list[ImageSet], earlier: list[Evaluation], limit: int | None, force: bool
) -> None:
    """Refuse different counts before the work, not after it."""
    from mmdgs.evaluation import check_equal

    counts = [(images.name, min(len(images), limit or len(images))) for images in sets]
    counts += [(record.samples.name, record.samples.count) for record in earlier]
    for other in counts[1:]:
        check_equal("numbers of samples", counts[0], other, force=force)


def _show(
    records: list[Evaluation], earlier: list[Evaluation], content: dict[str, Any] | None
) -> None:
    if content is not None:
        print(json.dumps(content, indent=1))
    else:
        cli.output.print(_table([*records, *earlier]).to_rich())
    notes = [f"{record.samples.name}: {text}" for record in records for text in record.warnings]
    notes += [
        f"{record.samples.name}: the metric {name!r} is left open: {why}"
        for record in records
        for name, why in record.open.items()
    ]
    for line in dict.fromkeys(notes):
        cli.tell(f"[yellow]note:[/yellow] {escape(line)}")


ROWS: dict[str, list[tuple[str, Callable[[Any], str]]]] = {
    "fid": [("FID", lambda v: f"{max(v, 0):.3f}")],
    "kid": [("KID x 1000", lambda v: f"{1000 * v['mean']:.3f} ± {1000 * v['std']:.3f}")],
    "precision-recall": [
        ("precision", lambda v: f"{v['precision']:.3f}"),
        ("recall", lambda v: f"{v['recall']:.3f}"),
    ],
    "is": [("Inception score", lambda v: f"{v['mean']:.2f} ± {v['std']:.2f}")],
    "diversity": [
        (
            "diversity (1: as the data)",
            lambda v: "-" if v["ratio"] is None else f"{v['ratio']:.3f}",
        ),
        ("duplicates", lambda v: f"{100 * v['samples']['duplicates']:.1f}%"),
    ],
    "classes": [
        ("distance of class shares", lambda v: f"{v['distance']:.3f}"),
        (
            "entropy of classes (data)",
            lambda v: f"{v['entropy']:.3f} ({v['reference_entropy']:.3f})",
        ),
    ],
}
"""The rows of the table: for each metric their names, and how its value is written."""
USUAL = 50_000
"""Samples of a FID in publications."""


def _table(records: list[Evaluation]) -> Table:
    """One column for each set of samples; a metric that could not be computed is open."""
    rows = [["samples", *(f"{record.samples.count:,}" for record in records)]]
    for name, lines in ROWS.items():
        if any(name in record.values or name in record.open for record in records):
            for label, write in lines:
                rows.append([label, *(_cell(record, name, write) for record in records)])
        if name == "fid" and any(more := [_of_more(record) for record in records]):
            rows.append([f"FID of {USUAL:,}, extrapolated", *more])
    reference = records[0].reference
    return Table(
        f"against {reference.name}:{reference.split} ({reference.count:,} images)",
        ["", *(escape(f"{record.samples.name}:{record.samples.split}") for record in records)],
        rows,
    )


def _of_more(record: Evaluation) -> str:
    """The FID extrapolated to the usual number of samples; empty without groups."""
    from mmdgs.metrics import extrapolated, jackknife_interval

    left_out, count = record.left_out.get("fid", ()), record.samples.count
    if len(left_out) < 2 or count >= USUAL:
        return ""
    value = extrapolated(record.values["fid"], left_out, USUAL / count)
    return f"{value:.1f} ± {jackknife_interval(left_out):.1f}"


def _cell(record: Evaluation, name: str, write: Callable[[Any], str]) -> str:
    from mmdgs.metrics import jackknife_interval

    if name in record.values:
        half = jackknife_interval(record.left_out.get(name, ()))
        return write(record.values[name]) + ("" if math.isnan(half) else f" ± {half:.3f}")
    return "open" if name in record.open else ""
