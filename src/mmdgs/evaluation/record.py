"""Records of evaluations: what was compared, how, the result, and which records compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from mmdgs.errors import UsageError, shown
from mmdgs.files import read_json
from mmdgs.reading import reading

FORMAT = 1


@dataclass(frozen=True)
class Images:
    """Which images: name, split, how many were used of how many, the checksum of their pixels."""

    name: str
    split: str
    count: int
    available: int
    sha256: str


@dataclass(frozen=True)
class Evaluation:
    """The record of an evaluation, JSON-ready.

    `values` has an entry for each metric; `open` says why where one could not be computed;
    `left_out` has the FIDs with each group of the samples left out, if there are groups.
    """

    samples: Images
    reference: Images
    values: dict[str, Any]
    open: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seed: int = 0
    resize: str | None = None
    inception: dict[str, Any] | None = None
    classifier: dict[str, Any] | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, list[float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"mmdgs_evaluation": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, content: Any, where: object) -> Evaluation:
        """A record that `to_json` made."""
        with reading(where, f"an evaluation of mmdgs, format {FORMAT}"):
            if content["mmdgs_evaluation"] != FORMAT:
                raise KeyError("mmdgs_evaluation")
            values = {f.name: content[f.name] for f in dataclasses.fields(cls)}
            images = {key: Images(**values[key]) for key in ("samples", "reference")}
            for side in ("samples", "reference"):
                _check_kinds(values[side], IMAGES, side)
            for name in ("values", "open", "left_out"):
                _check_kinds(values[name], (dict,), name)
            for name, shape in VALUES.items():
                if name in values["values"]:
                    _check_kinds(values["values"][name], shape, name)
            for name, distances in values["left_out"].items():
                for value in [*distances, values["values"][name]]:
                    _check_kinds(value, NUMBER, f"left_out of {name}")
            for text in [*values["warnings"], *values["open"].values()]:
                _check_kinds(text, (str,), "a warning or an open value")
            return cls(**values | images | {"warnings": tuple(values["warnings"])})


NUMBER = (int, float)
IMAGES = {"name": (str,), "split": (str,), "count": (int,), "available": (int,), "sha256": (str,)}
VALUES: dict[str, Any] = {
    "fid": NUMBER,
    "kid": {"mean": NUMBER, "std": NUMBER},
    "precision-recall": {"precision": NUMBER, "recall": NUMBER},
    "is": {"mean": NUMBER, "std": NUMBER},
    "diversity": {"ratio": (*NUMBER, NoneType), "samples": {"duplicates": NUMBER}},
    "classes": {"distance": NUMBER, "entropy": NUMBER, "reference_entropy": NUMBER},
}
"""The kinds of a record's values that are shown; there may be others."""


def _check_kinds(value: Any, kinds: Any, name: str) -> None:
    """TypeError for a value of none of these kinds, or in a table of them."""
    if isinstance(kinds, dict):
        for key, inner in kinds.items():
            _check_kinds(value[key], inner, f"{name}, {key}")
    elif type(value) not in kinds:
        raise TypeError(f"{name} must be {kinds[0].__name__}, got {shown(value)}")


def read_evaluations(file: Path | str) -> list[Evaluation]:
    """The records in a file that `mmdgs evaluate --out` wrote."""
    content = read_json(Path(file)).get("evaluations")
    if not isinstance(content, list) or not content:
        raise UsageError(f"{file} holds no evaluations; expected a file of `mmdgs evaluate --out`")
    return [Evaluation.from_json(entry, file) for entry in content]


def check_comparable(evaluations: Sequence[Evaluation], *, force: bool = False) -> None:
    """UsageError for evaluations whose numbers cannot be compared, unless forced."""
    first = evaluations[0]
    for other in evaluations[1:]:
        for what, mine, theirs in (
            ("numbers of samples", first.samples.count, other.samples.count),
            ("numbers of reference images", first.reference.count, other.reference.count),
            ("reference images", first.reference.sha256[:12], other.reference.sha256[:12]),
            ("ways to resize", first.resize, other.resize),
        ):
            if None not in (mine, theirs):  # a record without features was not resized
                pair = (first.samples.name, mine), (other.samples.name, theirs)
                check_equal(what, *pair, force=force)


def check_equal(
    what: str, first: tuple[str, object], other: tuple[str, object], *, force: bool
) -> None:
    """UsageError for two (owner, value) pairs of different values, unless forced."""
    if first[1] != other[1] and not force:
        pairs = "; ".join(f"{name}: {value}" for name, value in (first, other))
        advice = "make them equal, as --limit does for the number of samples, or use --force"
        raise UsageError(f"evaluations of different {what} cannot be compared ({pairs}); {advice}")
