"""The output folder of a report or an experiment, which keeps finished parts of long work.

A part has a name and what it depends on: its numbers go to `parts/NAME.json`, its tensors to
`parts/NAME.safetensors`. A run that was stopped leaves its finished parts; `--resume` picks them
up where what they depend on is the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.files import (
    read_json,
    read_tensor_bytes,
    sha256_of,
    tensors_to_bytes,
    to_json,
    write_atomically,
)
from mmdgs.folders import begin, in_use, output_folder
from mmdgs.identity import digest_of

PARTS = "parts"


@dataclass(frozen=True)
class Part:
    """What a piece of work leaves: JSON-ready values and tensors."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Workspace:
    """An output folder that is ours to write in; `resumed`: begun work goes on."""

    def __init__(self, out: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.out = out
        self.resumed = resume
        self._held = contextlib.ExitStack()
        self._held.enter_context(output_folder(out))
        begun = in_use(out)  # any file may be of a run: parts say themselves what they are of
        try:
            begin(out, begun=begun, resume=resume, overwrite=overwrite)
        except UsageError:
            self.close()
            raise
        if overwrite:
            self._clear()

    def close(self) -> None:
        """Let another run write in the folder; the end of the process does, too."""
        self._held.close()

    def part(self, name: str, depends: Any, compute: Callable[[], Part]) -> Part:
        """The part of this name that depends on the same (`mmdgs.identity`), else a new one."""
        digest = digest_of(depends)
        kept = self._load(name, digest)
        if kept is not None:
            return kept
        part = compute()
        content = tensors_to_bytes(part.tensors)
        (self.out / PARTS).mkdir(exist_ok=True)
        # The JSON comes last: a part is finished once both files are there, and belong together.
        write_atomically(self._file(name, "safetensors"), content)
        check = sha256_of(part.values, content)
        record = {"depends": digest, "values": part.values, "sha256": check}
        write_atomically(self._file(name, "json"), to_json(record))
        return Part(part.values, load_tensors(content))

    def write_json(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write a JSON file into the folder; numbers that are not finite become null."""
        return self.write(name, to_json(_finite(content)))

    def write(self, name: str, content: bytes) -> Path:
        """Write any file into the folder."""
        write_atomically(self.out / name, content)
        return self.out / name

    def _clear(self) -> None:
        """Remove what an earlier run of ours left, and nothing else."""
        for path in (self.out / PARTS).glob("*.json"):
            if _read(path).keys() >= {"depends", "values"}:
                path.unlink()
                path.with_suffix(".safetensors").unlink(missing_ok=True)
        records = _read(self.out / "records.json")
        if not isinstance(environment := records.get("environment"), dict):
            return
        if "mmdgs" in environment:
            figures = records.get("figures")
            drawn = filter(_is_figure, figures) if isinstance(figures, list) else ()
            for name in ("records.json", "report.html", *drawn):
                if (self.out / name).is_file():
                    (self.out / name).unlink()

    def _file(self, name: str, kind: str) -> Path:
        return self.out / PARTS / f"{name.replace(' ', '_').replace('/', '_')}.{kind}"

    def _load(self, name: str, digest: str) -> Part | None:
        try:
            record = read_json(self._file(name, "json"))
            content = read_tensor_bytes(self._file(name, "safetensors"))
            values = record["values"]
            if record["depends"] == digest and record["sha256"] == sha256_of(values, content):
                return Part(values, load_tensors(content))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            pass  # absent or damaged
        return None


def _is_figure(name: object) -> bool:
    """Whether a name in a record is one that a figure gets: a PNG file of the folder itself."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".png")


def _read(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty where there is none."""
    try:
        return read_json(path)
    except UsageError:
        return {}


def _finite(content: Any) -> Any:
    """JSON knows no NaN and no infinity: None in their place."""
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
