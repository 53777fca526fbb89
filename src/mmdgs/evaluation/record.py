"""Records of evaluations: what was compared, how, and what came out; and which of them may stand side by side."""

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
    """Which images: their name and split, how many were used of how many, and the checksum of their pixels."""

    name: str
    split: str
    count: int
    available: int
    sha256: str


@dataclass(frozen=True)
class Evaluation:
    """The record of an evaluation: what was compared, how, and what came out.

    `values` has an entry for each measure; `open` says why where one could not be made; `left_out` has the FIDs with
    each group of the samples left out, where groups were asked for. All is JSON-ready.
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
            known = {"left_out": {}, **content}  # which records of earlier versions do not have
            values = {f.name: known[f.name] for f in dataclasses.fields(cls)}
            images = {key: Images(**values[key]) for key in ("samples", "reference")}
            for one in images.values():
                for name, kind in {"name": str, "split": str, "count": int, "available": int, "sha256": str}.items():
                    if type(getattr(one, name)) is not kind:
                        raise TypeError(f"{name} must be {kind.__name__}")
            for name in ("values", "open", "left_out"):
                if not isinstance(values[name], dict):
                    raise TypeError(f"{name} must be a table")
            for name, shape in VALUES.items():
                if name in values["values"]:
                    _check_value(values["values"][name], shape, name)
            for name, one in values["left_out"].items():
                for value in [*one, values["values"][name]]:
                    _check_value(value, NUMBER, f"left_out of {name}")
            if not all(isinstance(text, str) for text in [*values["warnings"], *values["open"].values()]):
                raise TypeError("warnings and open must hold texts")
            return cls(**values | images | {"warnings": tuple(values["warnings"])})


NUMBER = (int, float)
VALUES: dict[str, Any] = {
    "fid": NUMBER,
    "kid": {"mean": NUMBER, "std": NUMBER},
    "precision-recall": {"precision": NUMBER, "recall": NUMBER},
    "is": {"mean": NUMBER, "std": NUMBER},
    "diversity": {"ratio": (*NUMBER, NoneType), "samples": {"duplicates": NUMBER}},
    "classes": {"distance": NUMBER, "entropy": NUMBER, "reference_entropy": NUMBER},
}
"""The kinds of a record's values that are shown; there may be others."""


def _check_value(value: Any, shape: Any, name: str) -> None:
    """Refuse a value of another kind: a number, or a table of them."""
    if isinstance(shape, dict):
        for key, inner in shape.items():
            _check_value(value[key], inner, f"{name}, {key}")
    elif type(value) not in shape:
        raise TypeError(f"{name} must be a number, got {shown(value)}")


def read_evaluations(file: Path | str) -> list[Evaluation]:
    """The records in a file that `mmdgs evaluate --out` wrote."""
    content = read_json(Path(file)).get("evaluations")
    if not isinstance(content, list) or not content:
        raise UsageError(f"{file} holds no evaluations; expected a file of `mmdgs evaluate --out`")
    return [Evaluation.from_json(entry, file) for entry in content]


def check_comparable(evaluations: Sequence[Evaluation], *, force: bool = False) -> None:
    """Refuse to put evaluations side by side whose numbers cannot be compared, unless forced to."""
    first = evaluations[0]
    for other in evaluations[1:]:
        for what, mine, theirs in (
            ("numbers of samples", first.samples.count, other.samples.count),
            ("numbers of reference images", first.reference.count, other.reference.count),
            ("reference images", first.reference.sha256[:12], other.reference.sha256[:12]),
            ("ways to resize", first.resize, other.resize),
        ):
            # A record without features was resized in no way.
            if mine != theirs and None not in (mine, theirs):
                check_equal(what, (first.samples.name, mine), (other.samples.name, theirs), force=force)


def check_equal(what: str, first: tuple[str, object], other: tuple[str, object], *, force: bool) -> None:
    """Refuse two different values of something that numbers depend on, unless forced to; each with its owner's name."""
    if first[1] != other[1] and not force:
        shown = [
            f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in (first, other)
        ]
        raise UsageError(
            f"evaluations of different {what} cannot be compared ({'; '.join(shown)}); make them equal, as --limit "
            "does for the number of samples, or use --force"
        )
