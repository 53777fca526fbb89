"""The output folder of an experiment: finished parts that a later run can reuse, and atomic writes.

A part is a piece of work with a name and settings: its numbers go to `parts/NAME.json`, its tensors to
`parts/NAME.safetensors`. A run that was stopped leaves its finished parts; `--resume` picks them up where
the settings are the same.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from mmdgs.errors import UsageError

PARTS = "parts"


@dataclass(frozen=True)
class Part:
    """What a piece of work leaves: JSON-ready values and tensors."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: to a temporary file beside it, then renamed."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, 0o644)  # noqa: PTH101  mkstemp makes files that others cannot read
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Workspace:
    """An output folder that is ours to write in."""

    def __init__(self, out: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.out = out
        if overwrite and resume:
            raise UsageError("choose one of --overwrite (start anew) and --resume (keep finished parts)")
        if out.exists() and not out.is_dir():
            raise UsageError(f"the output {out} is a file; give a folder")
        if out.is_dir() and any(out.iterdir()) and not (overwrite or resume):
            raise UsageError(
                f"the output folder {out} is not empty; use --resume to go on from its finished parts, "
                "--overwrite to start anew, or another folder"
            )
        try:
            (out / PARTS).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                pass
        except OSError as error:
            raise UsageError(f"cannot write in the output folder {out}: {error.strerror or error}") from error
        if overwrite:
            shutil.rmtree(out / PARTS)
            (out / PARTS).mkdir()

    def part(self, name: str, settings: Mapping[str, Any], compute: Callable[[], Part]) -> Part:
        """A finished part with these settings, from the folder if it is there, else computed and kept."""
        wanted = json.loads(json.dumps(settings))
        found = self._load(name, wanted)
        if found is not None:
            return found
        part = compute()
        tensors = {key: value.detach().cpu().contiguous() for key, value in part.tensors.items()}
        # The JSON comes last: a part counts as finished only once both files are there.
        write_atomically(self._file(name, "safetensors"), save_tensors(tensors))
        self._json(self._file(name, "json"), {"settings": wanted, "values": part.values})
        return Part(part.values, tensors)

    def write_json(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write a JSON file into the folder."""
        return self._json(self.out / name, content)

    def write(self, name: str, content: bytes) -> Path:
        """Write any file into the folder."""
        write_atomically(self.out / name, content)
        return self.out / name

    def _file(self, name: str, kind: str) -> Path:
        return self.out / PARTS / f"{name}.{kind}"

    def _json(self, path: Path, content: Mapping[str, Any]) -> Path:
        write_atomically(path, (json.dumps(content, indent=1, allow_nan=True) + "\n").encode())
        return path

    def _load(self, name: str, wanted: dict[str, Any]) -> Part | None:
        try:
            stored = json.loads(self._file(name, "json").read_text())
            if stored["settings"] != wanted:
                return None
            return Part(stored["values"], load_tensors(self._file(name, "safetensors").read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None  # absent or damaged: it is made again
