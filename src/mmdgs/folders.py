"""The protocol of outputs that can be resumed, the same for samples, training and experiments.

    with output_folder(path):                       one run at a time, in a folder that is whole
        resumed = begin(path, begun=..., resume=resume, overwrite=overwrite)
        require_same(path, settings before, settings now)      where it was resumed

`begun` says whether there is a record of a run. Without --resume or --overwrite an output in use
is refused. With --overwrite the writer removes its own files, by their names, and nothing else.
Files are written atomically (`mmdgs.files`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdgs.errors import UsageError, shown
from mmdgs.files import LOCK, output_folder

__all__ = ["begin", "in_use", "output_folder", "require_same"]

MOST_NAMED = 6
"""Settings that the refusal to resume with others names."""


def begin(
    path: Path, *, begun: bool, resume: bool, overwrite: bool, hidden: Sequence[Path] = ()
) -> bool:
    """Whether to resume; UsageError for an output in use, unless to resume or to start anew.

    An early kill may leave what is `hidden` in a folder: it alone is no use of it.
    """
    if resume and overwrite:
        raise UsageError("choose one of --resume (go on) and --overwrite (start anew)")
    if (begun or in_use(path, hidden)) and not overwrite and not (begun and resume):
        state = "is not empty" if path.is_dir() else "exists"
        state += " and holds no run to go on with" if resume else ""
        ways = "--overwrite to start anew" + (", --resume to go on" if begun else "")
        raise UsageError(f"{path} {state}; use {ways}, or another name")
    return begun and resume


def in_use(path: Path, hidden: Sequence[Path] = ()) -> bool:
    """Whether an output is a file, or a folder of more than a lock and what is hidden."""
    if not path.is_dir():
        return path.exists()
    return any(file not in (path / LOCK, *hidden) for file in path.iterdir())


def require_same(path: Path, before: Any, now: Mapping[str, Any]) -> None:
    """UsageError that names the settings in which a run to be resumed differs from now."""
    if not isinstance(before, Mapping):
        raise UsageError(f"the record in {path} is damaged: its settings are {shown(before)}")
    old, new = _flat(before), _flat(now)
    changed = [
        f"{key} was {shown(old.get(key))}, now {shown(new.get(key))}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
    if changed:
        named = ", ".join(changed[:MOST_NAMED]) + ", ..." * (len(changed) > MOST_NAMED)
        ways = "use the same to resume, or another name"
        raise UsageError(f"{path} was begun with other settings ({named}); {ways}")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings with those inside others by names such as method.sampler."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        inner = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat
