"""The training loop: steps, and on the way losses, validations, looks at samples and checkpoints.

Data order, noise and dropout masks are functions of the seed alone: a row of the global batch has
its own random stream. So the losses are the same whatever number of processes shares the batch and
however it is cut to fit in memory, and a run that was killed resumes as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mmdgs.errors import NonFiniteError
from mmdgs.randomness import Streams, child_seed
from mmdgs.reading import reading
from mmdgs.runtime import Stopped, matmul_precision, progress_bar, stop_if_asked
from mmdgs.training.checkpoint import CHECKPOINTS, Checkpoint, RunFolder
from mmdgs.training.examples import Examples, Shares, TensorExamples, batch_order
from mmdgs.training.objective import PerExampleLoss
from mmdgs.training.recipe import TrainingSettings
from mmdgs.training.step import Stepper
from mmdgs.training.stopping import Interrupted, stop_requests

if TYPE_CHECKING:
    from accelerate import Accelerator

FLUSH_EVERY, FLUSH_SECONDS = 50, 1.0
"""Steps, or seconds where steps are slow, between two looks at the losses: a look waits."""
FIRST_SAVE = 55.0
"""Seconds after which the first checkpoint is due, at the next look: within the first minute."""
ADVICE = "try a smaller learning rate, --set clip=1, --set warmup=1000, or float32 in place of bf16"


@dataclass(frozen=True)
class Validation:
    """A held-out set and the loss to measure on it."""

    examples: Examples
    loss: PerExampleLoss


@runtime_checkable
class Watcher(Protocol):
    """Looks at the model with its averaged weights; it draws no number that training would."""

    @property
    def judged_by(self) -> str | None:
        """The name of the number that is lowest for the best model, if it gives one."""

    def look(self, step: int, /) -> Mapping[str, float]:
        """Numbers for the metrics."""


Keep = Callable[[str, float, int, float], None]
"""(what it is judged by, its value, the step, seconds): keeps the model as it is now as the best.

It has its averaged weights, and is judged by the watcher's number or else the validation loss.
"""


@dataclass
class Trained:
    """What a run leaves beside the weights: the loss of every step, validations and looks.

    `seconds` are all of them, `watch_seconds` those of looks; the rate is that of the rest.
    """

    losses: Tensor = field(default_factory=lambda: torch.empty(0))  # (steps,)
    validations: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    examples_a_second: float = 0.0
    split: int = 1
    ended_by: str = "steps"
    watches: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    watch_seconds: float = 0.0


class Trainer:
    """One run of the loop; `run` does it all.

    The noise of a run is a function of the seed and of the number of runs before it. Only the main
    process has a watcher; the others wait for it.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: PerExampleLoss,
        examples: Examples,
        settings: TrainingSettings,
        *,
        validation: Validation | None = None,
        watcher: Watcher | None = None,
        keep: Keep | None = None,
        folder: RunFolder | None = None,
        accelerator: Accelerator | None = None,
        runs_before: int = 0,
    ) -> None:
        self.network, self.settings = network, settings
        self.validation, self.watcher, self.keep = validation, watcher, keep
        self.folder, self.accelerator = folder, accelerator
        self.main = accelerator is None or accelerator.is_main_process
        self.count, self.batch_size = len(examples), min(settings.batch_size, len(examples))
        self.seed = child_seed(settings.seed, f"run {runs_before}")
        self.shares = Shares(self.batch_size, self.seed, accelerator)
        self.shares.cut(settings.split)
        self.stepper = Stepper(network, loss, examples, settings, self.shares, accelerator)
        self.stepper.average.keep_start = runs_before > 0
        self.step, self.seconds_before, self.started = 0, 0.0, time.perf_counter()
        self.lowest = {"validation": math.inf, "watch": math.inf}
        self.losses: list[float] = []
        self.recent: list[Tensor] = []  # losses since they were last looked at
        self.saved: int | None = None  # the step of the last checkpoint that this run wrote
        self.asked: list[int] = []  # signals that ask it to stop
        self.done = Trained()

    def run(self, progress: str | None = "training") -> Trained:
        """Train to the end, resuming from the folder's checkpoint; leaves the averaged weights.

        With a folder, Ctrl-C and SIGTERM raise `Interrupted` after a checkpoint was written.
        """
        self._resume()
        settings, done = self.settings, self.done
        first, watched_before = self.step, done.watch_seconds
        end = settings.last_step(max(1, self.count // self.batch_size))
        order = islice(batch_order(self.count, self.batch_size, self.seed), first, None)
        self.started = time.perf_counter()
        clock = _Clock(first, self.seconds_before)
        self.network.train()
        bar = progress_bar(end or 0, progress if self.main else None, first=first)
        with (
            bar,
            matmul_precision(settings.precision),
            stop_requests(on=self.folder is not None, announce=self.main) as self.asked,
        ):
            self._make_up_for_what_signals_cut(done=first == end)
            while done.ended_by == "steps" and (end is None or self.step < end):
                self._stop_with_companions()
                fraction = max(clock.fraction, self.step / end if end else 0.0)
                rate = settings.rate(self.step, fraction)
                self.recent.append(self.stepper.step(next(order), self.step, rate))
                self.step += 1
                bar.update()
                looking = self.step in (clock.look_at, end)
                if looking:
                    self._look_at_losses(clock, bar)
                    if clock.fraction >= 1 and self.step != end:
                        done.ended_by = "minutes"
                    if settings.minutes is not None:  # as far as it will get at this rate
                        steps = math.ceil(self.step / min(1.0, max(fraction, clock.fraction)))
                        bar.total = min(end or math.inf, steps)
                last = self.step == end or done.ended_by == "minutes"
                for every, event in self._events():
                    if last or self._due(every):
                        self._flush()
                        event()
                early = self.saved is None and settings.checkpoint_every is not None
                if looking and early and clock.seconds - self.seconds_before >= FIRST_SAVE:
                    self._save()
                if not last or self._lacking:
                    self._end_if_asked(looking)
        done.losses = torch.tensor(self.losses, dtype=torch.float32)
        done.seconds, done.split = self._seconds(), len(self.shares.parts)
        training = done.seconds - self.seconds_before - (done.watch_seconds - watched_before)
        done.examples_a_second = (self.step - first) * self.batch_size / max(training, 1e-9)
        with torch.no_grad():
            self.stepper.average.settle()
        self.network.eval()
        return done

    def _events(self) -> Iterator[tuple[int | None, Callable[[], None]]]:
        """What is done after a step, and every how many steps; a checkpoint holds the others."""
        yield self.settings.validate_every, self._validate
        if self.settings.watch is not None:
            yield self.settings.watch_every, self._look
        yield self.settings.checkpoint_every, self._save

    def _make_up_for_what_signals_cut(self, *, done: bool) -> None:
        """Validate and watch where the checkpoint lacks it; `done`: after the last step."""
        for every, event in self._events() if self.step else ():
            if event != self._save and (done or self._due(every)):
                event()
                if self._lacking:
                    self._end_if_asked()

    def _look_at_losses(self, clock: _Clock, bar: Any) -> None:
        """Show the mean of the recent losses and the last look, and take the time."""
        shown = {"loss": self._flush(), **(self.done.watches[-1][1] if self.done.watches else {})}
        numbers = {name: f"{value:.4g}" for name, value in shown.items()}
        bar.set_postfix(numbers, refresh=False)
        seconds = summed(self._seconds() if self.main else 0, self.accelerator)
        clock.looked(self.step, seconds, self.settings.minutes)

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _end_if_asked(self, looking: bool = False) -> None:
        """Raise `Interrupted` after a checkpoint, where a signal came."""
        if self._stopping(looking):
            self._save()
            raise Interrupted(self.step, *self.asked[:1])

    def _stopping(self, looking: bool = False) -> bool:
        """Whether a signal came; several processes ask each other, at looks, to stop together."""
        if self.accelerator is None or self.accelerator.num_processes == 1:
            return bool(self.asked)
        return looking and summed(len(self.asked), self.accelerator) > 0

    def _stop_with_companions(self) -> None:
        """End a job whose companions failed or were interrupted, with a checkpoint."""
        try:
            stop_if_asked()
        except Stopped:
            if self.recent or self.losses:
                self._save()
            raise

    def _seconds(self) -> float:
        """Time of the run so far, that before its last checkpoint included."""
        return self.seconds_before + time.perf_counter() - self.started

    def _wait(self) -> None:
        if self.accelerator:
            self.accelerator.wait_for_everyone()

    def _log(self, *lines: Mapping[str, Any]) -> None:
        if self.folder and self.main:
            self.folder.log(lines)

    def _flush(self) -> float:
        """Look at the recent losses: stop where one is not finite, log them; returns their mean."""
        if not self.recent:
            return self.losses[-1]
        recent = torch.stack(self.recent)
        self.recent.clear()
        values = (self.accelerator.reduce(recent, "mean") if self.accelerator else recent).tolist()
        first = self.step - len(values)
        good = next((i for i, value in enumerate(values) if not math.isfinite(value)), len(values))
        self.losses += values[:good]
        self._log(*({"step": first + i + 1, "loss": v} for i, v in enumerate(values[:good])))
        if good < len(values):
            kept = self.folder is not None and (self.folder.path / CHECKPOINTS).is_dir()
            advice = ADVICE + ("; the last good checkpoint is kept" if kept else "")
            raise NonFiniteError("training loss", [], first + good, advice=advice)
        return math.fsum(values) / len(values)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Inside this block the network has its averaged weights and is not training."""
        self.network.eval()
        with torch.no_grad(), self.stepper.average.in_place():
            yield
        self.network.train()

    def _validate(self) -> None:
        """The mean loss on the held-out set with the averaged weights, every time the same noise.

        A signal cuts it, unless several processes validate side by side; a resumed run makes up
        for it.
        """
        if self.validation is None or _has(self.done.validations, self.step):
            return
        examples, seed, total = self.validation.examples, self.settings.seed, 0.0
        with self._averaged():
            for rows in torch.arange(len(examples)).split(self.batch_size):
                if self._stopping():
                    return
                streams = Streams(seed, len(rows), first_row=int(rows[0]), purpose="validation")
                batch = examples.take(rows, streams)
                total += self.stepper.loss(self.validation.loss, batch, streams).sum().item()
            value = total / len(examples)
            judges = self.watcher is None or self.watcher.judged_by is None
            self._judge("validation", "validation loss" if judges else None, value)
        self.done.validations.append((self.step, value))
        self._log({"step": self.step, "validation_loss": value})

    @property
    def _lacking(self) -> bool:
        """Whether there is no validation of this step yet, or no look."""
        validated = self.validation is None or _has(self.done.validations, self.step)
        watched = self.settings.watch is None or _has(self.done.watches, self.step)
        return not (validated and watched)

    def _look(self) -> None:
        """Watch the averaged weights; the randomness and the time of a look are its own.

        None is begun after a signal; a resumed run makes up for it.
        """
        if _has(self.done.watches, self.step) or self._stopping():
            return
        started, values = time.perf_counter(), {}
        if self.watcher is not None:
            with self._averaged():
                values = dict(self.watcher.look(self.step))
                name = self.watcher.judged_by or ""
                what = f"{name} of {self.settings.watch:,} samples"
                self._judge("watch", what, values.get(name, math.inf))
        self._wait()
        seconds = time.perf_counter() - started
        self.done.watches.append((self.step, values))
        self.done.watch_seconds += seconds
        self._log({"step": self.step, **values, "watch_seconds": round(seconds, 3)})

    def _judge(self, kind: str, what: str | None, value: float) -> None:
        """Note the lowest value so far; keep its model where models are judged by `what`."""
        if value < self.lowest[kind]:
            self.lowest[kind] = value
            if what is not None and self.keep is not None and self.main:
                self.keep(what, value, self.step, self._seconds())

    def _save(self) -> None:
        """Write a checkpoint, unless there is one of this step, or its weights are not finite."""
        if self.folder is None or self.saved == self.step:
            return
        self._flush()
        if not all(torch.isfinite(p).all() for p in self.stepper.parameters):
            raise NonFiniteError("network's weights", [], self.step, advice=ADVICE)
        if self.main:
            self.shares.remember()
            lowest = [value if math.isfinite(value) else None for value in self.lowest.values()]
            state = {
                "step": self.step,
                "seconds": self._seconds(),
                "best": lowest[0],
                "validations": self.done.validations,
                "best_watch": lowest[1],
                "watches": self.done.watches,
                "watch_seconds": self.done.watch_seconds,
                "positions": self.shares.positions,
                "split": len(self.shares.parts),
            }
            self.folder.save(Checkpoint(state, self.stepper.tensors()))
        self.saved = self.step
        self._wait()

    def _resume(self) -> None:
        """Take over the state of the folder's last checkpoint, if there is one."""
        checkpoint = self.folder.load() if self.folder else None
        if self.folder is None or checkpoint is None:
            return
        state, done = checkpoint.state, self.done
        with reading(self.folder.path, "the folder of a run that this one can go on from"):
            self.stepper.load(checkpoint.tensors)
            self.step, self.seconds_before = int(state["step"]), float(state["seconds"])
            for kind, value in (("validation", state["best"]), ("watch", state["best_watch"])):
                self.lowest[kind] = math.inf if value is None else float(value)
            done.validations = [(int(step), float(value)) for step, value in state["validations"]]
            done.watches = [(int(step), dict(values)) for step, values in state["watches"]]
            done.watch_seconds = float(state["watch_seconds"])
            self.shares.positions = dict(state["positions"])
            self.shares.cut(min(max(int(state["split"]), self.settings.split), self.shares.rows))
        self.losses = self.folder.rewind(self.step, write=self.main)
        self._wait()


def summed(value: float, accelerator: Accelerator | None) -> float:
    """The sum of the processes' values, on all of them."""
    if accelerator is None or accelerator.num_processes == 1:
        return value
    mine = torch.tensor([value], dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(mine, "sum").item()


def _has(entries: list[tuple[int, Any]], step: int) -> bool:
    return any(at == step for at, _ in entries)


class _Clock:
    """When to look at the losses next, and how much of its minutes a run has used."""

    def __init__(self, step: int, seconds: float) -> None:
        self.step, self.seconds = step, seconds
        self.look_at, self.fraction = step + 1, 0.0

    def looked(self, step: int, seconds: float, minutes: float | None) -> None:
        """Note a look at this step, after so many seconds of the run."""
        steps_a_second = (step - self.step) / max(seconds - self.seconds, 1e-9)
        self.step, self.seconds = step, seconds
        self.look_at = step + max(1, min(FLUSH_EVERY, round(FLUSH_SECONDS * steps_a_second)))
        self.fraction = 0.0 if minutes is None else seconds / (60 * minutes)


def train(
    network: nn.Module,
    loss: PerExampleLoss,
    data: Tensor,
    settings: TrainingSettings,
    *,
    progress: str | None = "training",
) -> Tensor:
    """Train `network` in place on data (n, ...); returns the mean loss of every step, (steps,)."""
    return Trainer(network, loss, TensorExamples(data), settings).run(progress).losses
