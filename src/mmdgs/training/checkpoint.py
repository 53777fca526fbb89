"""The folder of a training run: checkpoints that are whole or absent, metrics as JSON lines, one run at a time.

checkpoints/last/     network, average and optimiser (safetensors), state.json: everything to go on from
best/                 the model with the lowest FID of its samples where they are watched, else with the lowest
                      validation loss; in hub format
metrics.jsonl         one line a step, validation or look
watch/                a picture of samples for each look
recipe.yaml           what is trained on what
config.json, model.safetensors, README.md    the model itself, in hub format, when training ends
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mmdgs.errors import UsageError, shown
from mmdgs.files import (
    folder_written_atomically,
    put_back,
    read_file,
    read_json,
    read_tensors,
    tensors_to_bytes,
    to_json,
    write_atomically,
)
from mmdgs.models import CARD, CONFIG, remove_weights
from mmdgs.models.weights import check_finite
from mmdgs.reading import FREE, reading

METRICS, RECIPE_FILE, STATE = "metrics.jsonl", "recipe.yaml", "state.json"
CHECKPOINTS, LAST, BEST, WATCH, TENSORBOARD = "checkpoints", "last", "best", "watch", "tensorboard"

IMAGES = "images"
"""The setting that is a digest of the images a run is trained and validated on."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on: numbers (JSON) and tensors by group (network, average, optimiser)."""

    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class RunFolder:
    """Where a run writes; `settings` must be the same when it is resumed, and `notes` are kept in every checkpoint."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.notes: dict[str, Any] = {}
        self._board: Any = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint in place of the last one; if that fails, the last one is still there."""
        (self.path / CHECKPOINTS).mkdir(exist_ok=True)
        heading = {"settings": self.settings, "notes": self.notes, "groups": list(checkpoint.tensors)}
        try:
            with folder_written_atomically(self.path / CHECKPOINTS / LAST) as temporary:
                for group, tensors in checkpoint.tensors.items():
                    write_atomically(temporary / f"{group}.safetensors", tensors_to_bytes(tensors))
                write_atomically(temporary / STATE, to_json(heading | checkpoint.state))
        except OSError as error:
            raise OSError(
                f"the checkpoint at step {checkpoint.state.get('step')} could not be written into {self.path} "
                f"({error.strerror or error}); the one before it is untouched. Free some room and use --resume"
            ) from error

    def state(self) -> dict[str, Any] | None:
        """The numbers of the last checkpoint, or None where there is none; refused where its settings were others."""
        folder = _last(self.path)
        if folder is None:
            return None
        state = _state(folder)
        before = state.pop("settings", {})
        if not isinstance(before, dict):
            raise UsageError(f"{folder / STATE} is no state of a run: its settings are no table")
        known = {**before, **self.settings}.keys() - ({IMAGES} - self.settings.keys())  # the images may not be read yet
        changed = [key for key in known if before.get(key) != self.settings.get(key)]
        if changed:
            said = ", ".join(f"{k} was {before.get(k)!r}, now {self.settings.get(k)!r}" for k in sorted(changed))
            raise UsageError(
                f"the run in {self.path} was started with other settings ({said}); give the same, or another --out"
            )
        return state

    def load(self) -> Checkpoint | None:
        """The last checkpoint whole, or None where there is none."""
        state = self.state()
        if state is None:
            return None
        folder = self.path / CHECKPOINTS / LAST
        with reading(folder / STATE, "the state of a run"):
            groups = state.pop("groups", [])
            found = {group: read_tensors(folder / f"{group}.safetensors") for group in groups}
            for group, tensors in found.items():
                check_finite(tensors, folder / f"{group}.safetensors")
            return Checkpoint(state, found)

    def clear(self, *, everything: bool) -> None:
        """Remove what an earlier run left: everything, its model too, or the checkpoints a kill left half written."""
        for path in (self.path / CHECKPOINTS).glob(f".{LAST}.*"):
            shutil.rmtree(path, ignore_errors=True)
        if everything:
            for name in (CHECKPOINTS, BEST, WATCH, TENSORBOARD):
                shutil.rmtree(self.path / name, ignore_errors=True)
            for name in (METRICS, CONFIG, CARD):
                (self.path / name).unlink(missing_ok=True)
            remove_weights(self.path)

    def rewind(self, step: int, *, write: bool) -> list[float]:
        """The losses until a step; if `write`, what was logged after it is forgotten: a resumed run logs it again."""
        path = self.path / METRICS
        kept = [line for line in metrics(self.path) if line["step"] <= step] if path.is_file() else []
        if write:
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        return [float(line["loss"]) for line in kept if isinstance(line.get("loss"), int | float)]

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to metrics.jsonl, and to TensorBoard where that is installed."""
        with (self.path / METRICS).open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._board = False
            else:
                self._board = SummaryWriter(str(self.path / TENSORBOARD))
        if self._board:
            for line in lines:
                for key in line.keys() - {"step"}:
                    self._board.add_scalar(key, line[key], line["step"])
            self._board.flush()

    def close(self) -> None:
        """End the TensorBoard file."""
        if self._board:
            self._board.close()
        self._board = None


def _last(path: Path) -> Path | None:
    """The folder of a run's last checkpoint; None where there is none."""
    folder = path / CHECKPOINTS / LAST
    put_back(folder)
    return folder if folder.is_dir() else None


def last_step(path: Path) -> int | None:
    """The step of a run's last checkpoint; None where there is none."""
    folder = _last(path)
    if folder is None:
        return None
    return int(_state(folder)["step"])


def _state(folder: Path) -> dict[str, Any]:
    """The numbers of a checkpoint; its step is checked."""
    state = read_json(folder / STATE)
    if type(state.get("step")) is not int or not 0 <= state["step"] < 1 << 63:
        raise UsageError(f"{folder / STATE} is no state of a run: its step is {shown(state.get('step'))}")
    return state


def metrics(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a last line cut short by a kill is left out."""
    found = []
    for line in read_file(Path(path) / METRICS, FREE).decode(errors="replace").splitlines():
        try:
            one = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(one, dict) or not isinstance(one.get("step"), int):
            break
        found.append(one)
    return found
