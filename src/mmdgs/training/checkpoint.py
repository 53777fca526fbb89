"""The folder of a training run: checkpoints that are whole or absent, and metrics as JSON lines.

checkpoints/last/     network, average and optimiser (safetensors), state.json: all to resume
best/                 the model of the lowest FID where samples are watched, else validation loss
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
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from mmdgs import files, folders
from mmdgs.errors import UsageError, shown
from mmdgs.models import CARD, CONFIG, remove_weights
from mmdgs.models.weights import check_finite
from mmdgs.reading import FREE, reading

METRICS, RECIPE_FILE, STATE = "metrics.jsonl", "recipe.yaml", "state.json"
CHECKPOINTS, LAST, BEST, WATCH, TENSORBOARD = "checkpoints", "last", "best", "watch", "tensorboard"
IMAGES = "images"
"""The setting that is a digest of the images a run is trained and validated on."""


@dataclass(frozen=True)
class Checkpoint:
    """All that a run resumes from: numbers, and tensors by group (network, average, optimiser)."""

    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class RunFolder:
    """Where a run writes; it resumes with the same `settings`, and checkpoints keep `notes`."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.notes: dict[str, Any] = {}

    def begin(self, *, resume: bool, overwrite: bool) -> bool:
        """Whether to resume from a checkpoint of the same settings (`mmdgs.folders`)."""
        begun = _last(self.path) is not None
        resumed = folders.begin(self.path, begun=begun, resume=resume, overwrite=overwrite)
        return resumed and self.state() is not None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint in place of the last one; if that fails, the last one is kept."""
        (self.path / CHECKPOINTS).mkdir(exist_ok=True)
        groups = list(checkpoint.tensors)
        heading = {"settings": self.settings, "notes": self.notes, "groups": groups}
        try:
            with files.folder_written_atomically(self.path / CHECKPOINTS / LAST) as temporary:
                for group, tensors in checkpoint.tensors.items():
                    content = files.tensors_to_bytes(tensors)
                    files.write_atomically(temporary / f"{group}.safetensors", content)
                files.write_atomically(temporary / STATE, files.to_json(heading | checkpoint.state))
        except OSError as error:
            raise OSError(
                f"the checkpoint at step {checkpoint.state.get('step')} could not be written into "
                f"{self.path} ({error.strerror or error}); the one before it is untouched. "
                "Free some room and use --resume"
            ) from error

    def state(self) -> dict[str, Any] | None:
        """The numbers of the last checkpoint, if any; UsageError where its settings differ."""
        folder = _last(self.path)
        if folder is None:
            return None
        state = _state(folder)
        before = state.pop("settings", {})
        if IMAGES not in self.settings and isinstance(before, dict):
            before.pop(IMAGES, None)  # they are not read yet
        folders.require_same(self.path, before, self.settings)
        return state

    def load(self) -> Checkpoint | None:
        """The last checkpoint whole, or None where there is none."""
        state = self.state()
        if state is None:
            return None
        folder = self.path / CHECKPOINTS / LAST
        with reading(folder / STATE, "the state of a run"):
            paths = {group: folder / f"{group}.safetensors" for group in state.pop("groups", [])}
            tensors = {group: files.read_tensors(path) for group, path in paths.items()}
            for group, path in paths.items():
                check_finite(tensors[group], path)
            return Checkpoint(state, tensors)

    def clear(self) -> None:
        """Remove what an earlier run left, its model too, and nothing else."""
        for name in (CHECKPOINTS, BEST, WATCH, TENSORBOARD):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in (METRICS, CONFIG, CARD):
            (self.path / name).unlink(missing_ok=True)
        remove_weights(self.path)

    def rewind(self, step: int, *, write: bool) -> list[float]:
        """The losses until a step; if `write`, what was logged after it is forgotten."""
        path = self.path / METRICS
        lines = metrics(self.path) if path.is_file() else []
        kept = [line for line in lines if line["step"] <= step]
        if write:
            content = "".join(json.dumps(line) + "\n" for line in kept).encode()
            files.write_atomically(path, content)
        return [float(line["loss"]) for line in kept if isinstance(line.get("loss"), int | float)]

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to metrics.jsonl, and to TensorBoard where that is installed."""
        with (self.path / METRICS).open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)
        if self._board:
            for line in lines:
                for key in line.keys() - {"step"}:
                    self._board.add_scalar(key, line[key], line["step"])
            self._board.flush()

    @cached_property
    def _board(self) -> Any:
        """TensorBoard's writer; None where it is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return SummaryWriter(str(self.path / TENSORBOARD))

    def close(self) -> None:
        """End the TensorBoard file."""
        board = vars(self).pop("_board", None)
        if board:
            board.close()


def _last(path: Path) -> Path | None:
    """The folder of a run's last checkpoint; None where there is none."""
    folder = path / CHECKPOINTS / LAST
    files.put_back(folder)
    return folder if folder.is_dir() else None


def last_step(path: Path) -> int | None:
    """The step of a run's last checkpoint; None where there is none."""
    folder = _last(path)
    return None if folder is None else _state(folder)["step"]


def _state(folder: Path) -> dict[str, Any]:
    """The numbers of a checkpoint, with a valid step."""
    state = files.read_json(folder / STATE)
    step = state.get("step")
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise UsageError(f"{folder / STATE} is no state of a run: its step is {shown(step)}")
    return state


def metrics(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a last line cut short by a kill is left out."""
    entries = []
    for line in files.read_file(Path(path) / METRICS, FREE).decode(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            break
        entries.append(entry)
    return entries
