"""The training loop: Adam or Muon on a per-example loss, for every loss, size and number of processes.

Data order, noise and dropout masks are functions of the seed alone: a row of the global batch has its own random
stream, so the losses are the same whatever number of processes shares the batch and however it is cut to fit in
memory, and a run that was killed goes on from its last checkpoint as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmdgs.errors import NonFiniteError, UsageError
from mmdgs.networks.dropout import dropout_keys, uses_dropout
from mmdgs.randomness import Generator, Streams, seeded, uniforms
from mmdgs.runtime import autocast, matmul_precision, progress_bar, stop_if_asked
from mmdgs.training.average import Average
from mmdgs.training.contract import PerExampleLoss, Trained, Validation, Watch
from mmdgs.training.examples import Examples, TensorExamples, batch_order
from mmdgs.training.folder import Checkpoint, RunFolder
from mmdgs.training.optimiser import load_optimisers, make_optimisers, optimiser_tensors
from mmdgs.training.settings import FLUSH_EVERY, FLUSH_SECONDS, TrainingSettings
from mmdgs.training.shares import Shares

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("mmdgs")

VALIDATION_SEED = 1_000_000_007
"""Added to the run's seed for the noise of validation, which is the same at every validation."""

RUN_SEED = 1_000_003
"""Added to the seed for every run before this one, so that a run that goes on from a model has noise of its own."""

ADVICE = "try a smaller learning rate, --set clip=1, --set warmup=1000, or float32 in place of bf16"


class _LossModule(nn.Module):
    """The loss as a module's forward pass, which is what data-parallel wrappers want to see."""

    def __init__(self, network: nn.Module, loss: PerExampleLoss) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def forward(self, batch: Any, generator: Generator) -> Tensor:
        return self.loss(batch, generator)


class Trainer:
    """One run of the loop; `run` does it all."""

    def __init__(
        self,
        network: nn.Module,
        loss: PerExampleLoss,
        examples: Examples,
        settings: TrainingSettings,
        *,
        generator: Generator | None = None,
        validation: Validation | None = None,
        watch: Watch | None = None,
        folder: RunFolder | None = None,
        accelerator: Accelerator | None = None,
        runs_before: int = 0,
    ) -> None:
        self.network, self.examples, self.settings = network, examples, settings
        self.validation, self.watch, self.folder, self.accelerator = validation, watch, folder, accelerator
        self.device = examples.device
        self.batch_size = min(settings.batch_size, len(examples))
        self.seed = settings.seed + RUN_SEED * runs_before
        self.shares = Shares(self.batch_size, self.seed + 1, accelerator, generator)
        if settings.split > 1:
            self.shares.cut(settings.split)
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.optimisers = make_optimisers(settings.optimiser, self.parameters, settings.learning_rate)
        self.average = Average(network, settings.ema, keep_start=runs_before > 0)
        self.drops = uses_dropout(network)
        module = _LossModule(network, loss)
        self.module: nn.Module = accelerator.prepare_model(module, device_placement=False) if accelerator else module
        self.main = accelerator is None or accelerator.is_main_process
        self.step, self.seconds_before, self.started = 0, 0.0, time.perf_counter()
        self.best = self.best_watch = math.inf
        self.losses: list[float] = []
        self.validations: list[tuple[int, float]] = []
        self.watches: list[tuple[int, dict[str, float]]] = []
        self.watch_seconds = 0.0

    def run(self, progress: str | None = "training") -> Trained:
        """Train to the end, from the folder's checkpoint if it has one; the network is left with its average."""
        self._go_on_from_checkpoint()
        end = self.settings.last_step(max(1, len(self.examples) // self.batch_size))
        bar = progress_bar(end or 0, progress if self.main else None)
        bar.update(self.step)
        order = islice(batch_order(len(self.examples), self.batch_size, self.seed), self.step, None)
        self.started, first, fraction, ended_by = time.perf_counter(), self.step, 0.0, "steps"
        passed, look_at, watched_before = self.seconds_before, self.step + 1, self.watch_seconds
        recent: list[Tensor] = []
        self.network.train()
        with bar, matmul_precision(self.settings.precision):
            while end is None or self.step < end:
                stop_if_asked()
                fraction = max(fraction, self.step / end if end else 0.0)
                rate = self.settings.rate(self.step, fraction)
                for group in (group for optimiser in self.optimisers for group in optimiser.param_groups):
                    group["lr"] = rate
                recent.append(self._step(next(order)))
                self.step += 1
                bar.update()
                if self.step in (look_at, end):
                    count, before = len(recent), passed
                    seen = {name: f"{value:.4g}" for name, value in self.watches[-1][1].items()} if self.watches else {}
                    bar.set_postfix(loss=f"{self._flush(recent):.4g}", **seen, refresh=False)
                    passed = self._agree(self.seconds())
                    slow = FLUSH_SECONDS * max(1, count) / max(passed - before, 1e-9)
                    look_at = self.step + max(1, min(FLUSH_EVERY, round(slow)))
                    if self.settings.minutes is not None:
                        fraction = max(fraction, passed / (60 * self.settings.minutes))
                        ended_by = "minutes" if fraction >= 1 and self.step != end else ended_by
                        # As far as it will get at this rate: the bar then knows the time left.
                        bar.total = min(end or math.inf, math.ceil(self.step / min(1.0, fraction)))
                if self._due(self.settings.validate_every) or self.step == end or ended_by == "minutes":
                    self._flush(recent)
                    self._validate()
                if self._due(self.settings.watch_every) or self.step == end or ended_by == "minutes":
                    self._flush(recent)
                    self._look()
                if self._due(self.settings.checkpoint_every) or self.step == end or ended_by == "minutes":
                    self._flush(recent)
                    self._save()
                if ended_by == "minutes":
                    break
        seconds = self.seconds()
        with torch.no_grad():
            self.average.settle()
        self.network.eval()
        training = seconds - self.seconds_before - (self.watch_seconds - watched_before)
        return Trained(
            losses=torch.tensor(self.losses, dtype=torch.float32),
            validations=self.validations,
            seconds=seconds,
            examples_a_second=(self.step - first) * self.batch_size / max(training, 1e-9),
            split=len(self.shares.parts),
            ended_by=ended_by,
            watches=self.watches,
            watch_seconds=self.watch_seconds,
        )

    def seconds(self) -> float:
        """Time of the run so far, that before its last checkpoint included."""
        return self.seconds_before + time.perf_counter() - self.started

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _step(self, indices: Tensor) -> Tensor:
        """One step of the optimiser on a global batch; returns this process's mean loss."""
        self.shares.remember()
        while True:
            try:
                value = self._gradients(self.shares.of(indices))
                break
            except torch.OutOfMemoryError as error:
                self._split_further(error)
        if self.settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        with torch.no_grad():
            self.average.update(self.step)
        return value

    def _gradients(self, indices: Tensor) -> Tensor:
        """The gradients of the mean loss over these examples, part by part."""
        self.network.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        parts = list(zip(self.shares.parts, self.shares.generators, strict=True))
        for number, (part, generator) in enumerate(parts):
            last = number == len(parts) - 1
            waits = contextlib.nullcontext() if last or not self.accelerator else self.accelerator.no_sync(self.module)
            with waits:
                value = self._loss(self.module, self.examples.take(indices[part], generator), generator)
                value = value.sum() / len(indices)
                value.backward()
            total += value.detach()
        return total

    def _loss(self, function: Callable[[Any, Generator], Tensor], batch: Any, generator: Generator) -> Tensor:
        """The loss of each example, in the precision asked for and with dropout masks of the examples' own."""
        keys = None
        if self.drops and self.network.training:
            rows = len(batch[0]) if isinstance(batch, tuple) else len(batch)
            like = torch.empty((), device=self.device)
            keys = (uniforms((rows, 1), like, generator)[:, 0] * 2.0**24).long()
        with dropout_keys(self.network, keys), autocast(self.settings.precision, self.device):
            return function(batch, generator).float()

    def _split_further(self, error: torch.OutOfMemoryError) -> None:
        """Cut the batch in twice as many parts; the step then begins anew, with the same noise."""
        rows = self.shares.rows
        if len(self.shares.parts) == rows:
            raise UsageError(
                "not even one example fits in memory; choose a smaller network or a smaller image"
            ) from error
        parts = min(rows, 2 * len(self.shares.parts))
        if self.accelerator and self.accelerator.num_processes > 1:
            raise UsageError(
                f"a step does not fit in memory; with several processes say how to cut it: --set split={parts}"
            ) from error
        self.network.zero_grad(set_to_none=True)
        self.shares.cut(parts)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning(
            "a step of %d examples does not fit in memory: taking it in %d parts (the gradients are the same)",
            rows,
            parts,
        )

    def _agree(self, value: float) -> float:
        """The main process's value, on all processes."""
        if self.accelerator is None or self.accelerator.num_processes == 1:
            return value
        mine = torch.tensor([value if self.main else 0.0], dtype=torch.float64, device=self._reducible)
        return self.accelerator.reduce(mine, "sum").item()

    @property
    def _reducible(self) -> torch.device:
        return self.accelerator.device if self.accelerator else self.device

    def _flush(self, recent: list[Tensor]) -> float:
        """Look at the losses since the last look: stop where one is not finite, log them; returns their mean."""
        if not recent:
            return self.losses[-1]
        values = torch.stack(recent)
        recent.clear()
        if self.accelerator:
            values = self.accelerator.reduce(values, "mean")
        found = values.tolist()
        first = self.step - len(found)
        good = next((i for i, value in enumerate(found) if not math.isfinite(value)), len(found))
        self.losses += found[:good]
        if self.folder and self.main:
            self.folder.log([{"step": first + i + 1, "loss": value} for i, value in enumerate(found[:good])])
        if good < len(found):
            kept = self.folder is not None and (self.folder.path / "checkpoints").is_dir()
            advice = ADVICE + ("; the last good checkpoint is kept" if kept else "")
            raise NonFiniteError("training loss", [], first + good, advice=advice)
        return math.fsum(found) / len(found)

    def _validate(self) -> None:
        """The mean loss on the held-out set with the averaged weights and the same noise every time."""
        if self.validation is None:
            return
        examples, loss = self.validation.examples, self.validation.loss
        rows = min(self.batch_size, len(examples))
        total, seen = 0.0, 0
        self.network.eval()
        with torch.no_grad(), self.average.in_place():
            for first in range(0, len(examples), rows):
                indices = torch.arange(first, min(first + rows, len(examples)))
                streams = Streams(self.settings.seed + VALIDATION_SEED, len(indices), first_row=first)
                total += self._loss(loss, examples.take(indices, streams), streams).sum().item()
                seen += len(indices)
            value = total / seen
            self.validations.append((self.step, value))
            if value < self.best and self.main and self.validation.keep_best is not None:
                self.validation.keep_best(value, self.step)
            self.best = min(self.best, value)
        self.network.train()
        if self.folder and self.main:
            self.folder.log([{"step": self.step, "validation_loss": value}])

    def _look(self) -> None:
        """Watch the averaged weights; its randomness is its own, and its time is counted apart."""
        if self.watch is None:
            return
        started = time.perf_counter()
        if self.main:
            self.network.eval()
            with torch.no_grad(), self.average.in_place():
                found = dict(self.watch.look(self.step))
                value = found.get(self.watch.judged_by or "", math.inf)
                if value < self.best_watch and self.watch.keep_best is not None:
                    self.watch.keep_best(value, self.step)
                self.best_watch = min(self.best_watch, value)
            self.network.train()
            self.watches.append((self.step, found))
        if self.accelerator:
            self.accelerator.wait_for_everyone()
        seconds = time.perf_counter() - started
        self.watch_seconds += seconds
        if self.folder and self.main:
            self.folder.log([{"step": self.step, **self.watches[-1][1], "watch_seconds": round(seconds, 3)}])

    def _save(self) -> None:
        """Write a checkpoint, unless its weights are not finite."""
        if self.folder is None:
            return
        if not all(torch.isfinite(p).all() for p in self.parameters):
            raise NonFiniteError("network's weights", [], self.step, advice=ADVICE)
        if self.main:
            self.shares.remember()
            state = {
                "step": self.step,
                "seconds": self.seconds(),
                "best": self.best if math.isfinite(self.best) else None,
                "validations": self.validations,
                "best_watch": self.best_watch if math.isfinite(self.best_watch) else None,
                "watches": self.watches,
                "watch_seconds": self.watch_seconds,
                "positions": self.shares.positions,
                "split": len(self.shares.parts),
            }
            groups = {"network": dict(self.network.state_dict()), "optimiser": optimiser_tensors(self.optimisers)}
            if self.average.decay is not None:
                groups["average"] = self.average.tensors()
            self.folder.save(Checkpoint(state, groups))
        if self.accelerator:
            self.accelerator.wait_for_everyone()

    def _go_on_from_checkpoint(self) -> None:
        found = self.folder.load() if self.folder else None
        if self.folder is None or found is None:
            return
        state, tensors = found.state, found.tensors
        self.network.load_state_dict({k: v.to(self.device) for k, v in tensors["network"].items()})
        with torch.no_grad():
            self.average.load(tensors.get("average", {}))
        load_optimisers(self.optimisers, tensors["optimiser"])
        self.step, self.seconds_before = state["step"], state["seconds"]
        self.best = math.inf if state["best"] is None else state["best"]
        self.validations = [(step, value) for step, value in state["validations"]]
        # Checkpoints of before there was watching have none of these.
        self.best_watch = math.inf if state.get("best_watch") is None else state["best_watch"]
        self.watches = [(step, values) for step, values in state.get("watches", [])]
        self.watch_seconds = state.get("watch_seconds", 0.0)
        self.shares.positions = dict(state["positions"])
        self.shares.cut(min(max(state["split"], self.settings.split), self.shares.rows))
        if self.main:
            self.folder.keep_metrics_until(self.step)
        if self.accelerator:
            self.accelerator.wait_for_everyone()
        self.losses = self.folder.losses()


def train(
    network: nn.Module,
    loss: PerExampleLoss,
    data: Tensor,
    settings: TrainingSettings,
    *,
    progress: str | None = "training",
) -> Tensor:
    """Train `network` in place on data (n, ...) in memory; returns the mean loss of every step, (steps,)."""
    # MPS generators exist, but a CPU one gives the same numbers everywhere; CUDA draws on the device for speed.
    noise = seeded(settings.seed, "noise", data.device if data.device.type == "cuda" else "cpu")
    return Trainer(network, loss, TensorExamples(data), settings, generator=noise).run(progress).losses
