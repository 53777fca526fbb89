"""The output folder of an experiment: finished parts that a later run can reuse, atomic writes, and a lock.

A part is a piece of work with a name and what it depends on: its numbers go to `parts/NAME.json`, its tensors to
`parts/NAME.safetensors`. A run that was stopped leaves its finished parts; `--resume` picks them up where what they
depend on is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.files import LOCK, output_folder, read_json, read_tensor_bytes, tensors_to_bytes, to_json, write_atomically

PARTS = "parts"


def axis(default: Any) -> Any:
    """A field of settings that says which cells there are, and not what is in one: no part depends on it."""
    return field(default=default, metadata={"axis": True})


def described(what: Any) -> Any:
    """What identifies a value, JSON-ready: a model by its digest, a dataclass by its fields, a function by its name."""
    if what is None or isinstance(what, (bool, int, float, str)):
        return what
    if isinstance(getattr(what, "digest", None), str):
        return what.digest
    if hasattr(what, "to_json"):
        return described(what.to_json())
    if is_dataclass(what) and not isinstance(what, type):
        kept = {one.name: getattr(what, one.name) for one in fields(what) if not one.metadata.get("axis")}
        return {"kind": type(what).__name__, **described(kept)}
    if isinstance(what, Mapping):
        return {str(key): described(value) for key, value in what.items()}
    if isinstance(what, (list, tuple)):
        return [described(value) for value in what]
    if isinstance(what, (Path, torch.device, torch.dtype)):
        return str(what)
    if callable(what):
        return getattr(what, "__qualname__", type(what).__name__)
    raise TypeError(f"a part cannot depend on a {type(what).__name__}: it has no fields and no digest")


@dataclass(frozen=True)
class Part:
    """What a piece of work leaves: JSON-ready values and tensors."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Workspace:
    """An output folder that is ours to write in; `resumed` says whether begun work is to be gone on with."""

    def __init__(self, out: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.out = out
        self.resumed = resume
        if overwrite and resume:
            raise UsageError("choose one of --overwrite (start anew) and --resume (keep finished parts)")
        self._held = contextlib.ExitStack()
        self._held.enter_context(output_folder(out))
        if any(path.name != LOCK for path in out.iterdir()) and not (overwrite or resume):
            self.close()
            raise UsageError(
                f"the output folder {out} is not empty; use --resume to go on from its finished parts, "
                "--overwrite to start anew, or another folder"
            )
        if overwrite:
            self._clear()

    def close(self) -> None:
        """Let another run write in the folder; the end of the process does so, too. One left empty is removed."""
        self._held.close()

    def part(self, name: str, depends: Any, compute: Callable[[], Part]) -> Part:
        """A finished part that depends on the same (`described`), from the folder if there, else computed and kept."""
        wanted = described(depends)
        found = self._load(name, wanted)
        if found is not None:
            return found
        part = compute()
        content = tensors_to_bytes(part.tensors)
        (self.out / PARTS).mkdir(exist_ok=True)
        # The JSON comes last: a part counts as finished only once both files are there, and belong together.
        write_atomically(self._file(name, "safetensors"), content)
        whole = {"settings": wanted, "values": part.values, "sha256": _digest(part.values, content)}
        self._json(self._file(name, "json"), whole)
        return Part(part.values, load_tensors(content))

    def write_json(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write a JSON file into the folder; numbers that are not finite become null."""
        return self._json(self.out / name, _finite(content))

    def write(self, name: str, content: bytes) -> Path:
        """Write any file into the folder."""
        write_atomically(self.out / name, content)
        return self.out / name

    def _clear(self) -> None:
        """Remove what an earlier run of ours left, and nothing else."""
        for path in (self.out / PARTS).glob("*.json"):
            if _read(path).keys() >= {"settings", "values"}:
                path.unlink()
                path.with_suffix(".safetensors").unlink(missing_ok=True)
        records = _read(self.out / "records.json")
        made, figures = records.get("environment"), records.get("figures")
        if isinstance(made, dict) and "mmdgs" in made:
            drawn = [name for name in figures if _is_figure(name)] if isinstance(figures, list) else []
            for name in ("records.json", "report.html", *drawn):
                if (self.out / name).is_file():
                    (self.out / name).unlink()

    def _file(self, name: str, kind: str) -> Path:
        return self.out / PARTS / f"{name.replace(' ', '_').replace('/', '_')}.{kind}"

    def _json(self, path: Path, content: Mapping[str, Any]) -> Path:
        write_atomically(path, to_json(content))
        return path

    def _load(self, name: str, wanted: dict[str, Any]) -> Part | None:
        try:
            stored = read_json(self._file(name, "json"))
            content = read_tensor_bytes(self._file(name, "safetensors"))
            if stored["settings"] != wanted or stored["sha256"] != _digest(stored["values"], content):
                return None
            return Part(stored["values"], load_tensors(content))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None  # absent or damaged: it is made again


def _is_figure(name: object) -> bool:
    """Whether a name in a record is one that a figure gets: a PNG file of the folder itself."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".png")


def _read(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty where there is none."""
    try:
        return read_json(path)
    except UsageError:
        return {}


def _digest(values: Mapping[str, Any], content: bytes) -> str:
    """A checksum over a part's numbers and tensors."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode() + content).hexdigest()


def _finite(content: Any) -> Any:
    """JSON knows no NaN and no infinity: None in their place."""
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
