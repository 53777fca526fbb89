"""Many samples of a plan, in batches that fit in memory, on one process or several, written as they come.

Sample c depends on (seed, c) alone: not on its batch, nor on the process or the run that made it. (Arithmetic in
another batch rounds differently; a run that goes on keeps its batches, and with them every byte.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import Cost
from mmdgs.errors import UsageError
from mmdgs.fast import fast_path
from mmdgs.generation.chains import BATCH_NUMBERS
from mmdgs.generation.writers import Destination, destination
from mmdgs.models import Model
from mmdgs.randomness import Streams
from mmdgs.runtime import autocast, check_precision, environment, matmul_precision, progress_bar
from mmdgs.samplers import Info, Plan, Run, State, run_plan

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("mmdgs")

FAST_STEPS = 20_000
"""A run of fewer steps, over all samples, is over before a network would be compiled for it."""

Start = Callable[[int, int], Tensor]
"""Where chains start: (how many, the number of the first) -> (chains, ...)."""


@dataclass(frozen=True)
class Generated:
    """What a run leaves: the samples, where they were not written, and what each of them cost."""

    x: Float[Tensor, "samples ..."] | None  # in [0, 1] where the data's interval is
    count: int
    cost: Cost  # of one sample
    seconds: float  # of all samples, over all processes
    repaired: float
    path: Path | None = None


@dataclass(frozen=True)
class _Batch:
    """Samples numbered from `first` on, with what they cost."""

    first: int
    x: Tensor
    cost: Cost
    seconds: float
    repaired: float

    def note(self) -> dict[str, Any]:
        """For the record: numbers that add up over batches."""
        return {
            "first": self.first,
            "samples": len(self.x),
            "seconds": self.seconds,
            "forwards": self.cost.forwards,
            "products": self.cost.products,
            "repaired": self.repaired,
        }


class _Engine:
    """Runs a plan for any range of samples; a batch that does not fit in memory is halved, and so are those after."""

    def __init__(
        self, pretrained: Model, plan: Plan, seed: int, start: Start | None, precision: str, fast: str | None
    ) -> None:
        self.pretrained, self.plan, self.seed, self.precision = pretrained, plan, seed, precision
        self.fast = fast
        self.device = device_of(pretrained)
        self.start = start or self._noise
        self.rows: int | None = None  # at a time, once memory has set a limit

    def _noise(self, chains: int, first: int) -> Tensor:
        centre = sum(self.pretrained.interval) / 2
        streams = Streams(self.seed, chains, first)
        return self.plan.noise(self.pretrained.shape, chains, generator=streams, centre=centre)

    def batch(self, first: int, stop: int, tick: Callable[[int], object]) -> _Batch:
        """Samples first to stop; `tick` is told of every step, by the number of chains in it."""
        started = time.perf_counter()
        found: list[Tensor] = []
        repaired, cost, done = 0.0, Cost(), first
        while done < stop:
            rows = min(self.rows or stop - first, stop - done)
            result = self._run(done, rows, tick)
            if result is None:
                continue
            found.append(result.state.x.cpu())
            repaired += rows * result.repaired
            cost, done = result.cost, done + rows
        low, high = self.pretrained.interval
        x = (torch.cat(found) - low) / (high - low)
        return _Batch(first, x, cost, time.perf_counter() - started, repaired / len(x))

    def _run(self, first: int, rows: int, tick: Callable[[int], object]) -> Run | None:
        """The chains of some samples; None where they do not fit in memory, and fewer are to be tried."""

        def note(step: int, state: State, info: Info) -> None:
            tick(rows)

        try:
            # The start took the first numbers of the streams of another seed: no number is used twice.
            path = contextlib.nullcontext() if self.fast is None else fast_path(self.fast)
            with matmul_precision(self.precision), autocast(self.precision, self.device), path:
                return run_plan(
                    self.plan,
                    self.start(rows, first).to(self.device),
                    seed=self.seed + 1,
                    first_chain=first,
                    callback=note,
                    progress=None,
                )
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        torch.cuda.empty_cache()
        self.rows = rows // 2
        logger.warning("a batch of %d does not fit in memory; going on with %d at a time", rows, self.rows)
        return None


def generate(
    pretrained: Model,
    plan: Plan,
    count: int,
    *,
    out: Path | str | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    start: Start | None = None,
    precision: str = "float32",
    fast: bool | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    accelerator: Accelerator | None = None,
    progress: str | None = "sampling",
) -> Generated:
    """Draw `count` samples by a plan, from noise at its first level around the middle of the data's interval.

    They are returned, or written to `out` as they come: a folder of PNG files with samples.json, or an .npz (`x`,
    float32; values of the data's interval as [0, 1]) with NAME.samples.json. `settings` go into that record, and
    with resume=True a run goes on only with the same. With an accelerator every process takes its share of the
    batches. `start(chains, first)` stands in place of the noise. `precision` (float32, tf32, bf16) is the network's;
    states stay in float32. `fast` says whether the network is compiled on a GPU (fast.py), which takes a minute or
    two the first time: None does so where the run is long enough to gain by it.
    """
    check_precision(precision)
    _check(pretrained, count, batch_size, None if out is None else Path(out), accelerator)
    device = device_of(pretrained)
    numbers = BATCH_NUMBERS.get(device.type, BATCH_NUMBERS["cpu"])
    size = batch_size or max(1, numbers // math.prod(pretrained.shape))
    engine = _Engine(pretrained, plan, seed, start, precision, _path(fast, count * len(plan.steps), device))
    if out is None:
        with progress_bar(count * len(plan.steps), progress, unit="chain-step") as bar:
            batches = [engine.batch(first, min(first + size, count), bar.update) for first in range(0, count, size)]
        return _summed([batch.note() for batch in batches], count, torch.cat([batch.x for batch in batches]))
    place = destination(Path(out))
    chosen = {} if precision == "float32" else {"precision": precision}
    wanted = _settings(pretrained, plan, count, seed, {**chosen, **(settings or {})})
    main = accelerator is None or accelerator.is_main_process
    with place.held() if main else contextlib.nullcontext():
        if main:
            place.begin(wanted, resume=resume, overwrite=overwrite)
        _wait(accelerator)
        if (done := place.finished()) is not None:
            return _summed([done["cost"]], count, path=place.path)
        _write_share(engine, place, count, size, accelerator, progress if main else None)
        found = _summed(place.notes(), count, path=place.path)
        _wait(accelerator)  # all have read the notes before they go
        if main:
            place.finish(count, _record(found, wanted, engine, accelerator))
        _wait(accelerator)
    return found


def _path(fast: bool | None, steps: int, device: torch.device) -> str | None:
    """The mode of the fast path for a run of so many steps; None leaves it as it is."""
    wanted = steps >= FAST_STEPS if fast is None else fast
    return ("now" if device.type == "cuda" else None) if wanted else "never"


def device_of(pretrained: Model) -> torch.device:
    """Where a model's weights are; one without weights is on the CPU."""
    weights = next(pretrained.network.parameters(), None)
    return torch.device("cpu") if weights is None else weights.device


def _check(
    pretrained: Model, count: int, batch_size: int | None, out: Path | None, accelerator: Accelerator | None
) -> None:
    for name, value in (("count", count), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    if out is None and accelerator is not None and accelerator.num_processes > 1:
        raise UsageError("several processes write their samples: give a folder or an .npz to write into")
    images = len(pretrained.shape) == 3 and pretrained.shape[0] in (1, 3)
    if out is not None and out.suffix.lower() != ".npz" and not images:
        raise UsageError(
            f"the model gives points of shape {pretrained.shape}, not images: use an --out ending in .npz, got {out}"
        )


def _write_share(
    engine: _Engine, place: Destination, count: int, size: int, accelerator: Accelerator | None, progress: str | None
) -> None:
    """Make and write this process's share of the batches that have samples missing; returns when all are done.

    A batch is made whole even where some of it is there, so that it is the same batch as before.
    """
    present = place.present(count)
    batches = [range(first, min(first + size, count)) for first in range(0, count, size)]
    pending = [batch for batch in batches if not present.issuperset(batch)]
    _wait(accelerator)  # all have looked before the first of them writes
    rank, processes = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    mine = pending[rank::processes]
    with progress_bar(sum(map(len, mine)) * len(engine.plan.steps), progress, unit="chain-step") as bar:
        for batch in mine:
            made = engine.batch(batch.start, batch.stop, bar.update)
            place.write(batch.start, made.x, set(batch) - present, made.note())
    _wait(accelerator)


def _wait(accelerator: Accelerator | None) -> None:
    if accelerator is not None:
        accelerator.wait_for_everyone()


def _summed(
    notes: Sequence[Mapping[str, Any]], count: int, x: Tensor | None = None, path: Path | None = None
) -> Generated:
    """What all batches cost: by the sample where it is the same for each, else over all of them."""
    samples = sum(note["samples"] for note in notes)
    repaired = sum(note["samples"] * note["repaired"] for note in notes) / max(1, samples)
    cost = Cost(*(max((note[key] for note in notes), default=0) for key in ("forwards", "products")))
    return Generated(x, count, cost, sum(note["seconds"] for note in notes), repaired, path)


def plan_digest(plan: Plan) -> str:
    """What tells plans apart in a record: SHA-256 of the kinds of their kernels and their levels, in order."""
    lines = [f"{type(step.kernel).__name__} {step.level} {step.following}" for step in plan.steps]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _settings(pretrained: Model, plan: Plan, count: int, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What samples depend on: a run goes on only where all of it agrees."""
    found = {"model": pretrained.digest, "count": count, "seed": seed, "plan": plan_digest(plan), **settings}
    return json.loads(json.dumps(found))  # as it will be read back


def _record(
    found: Generated, settings: Mapping[str, Any], engine: _Engine, accelerator: Accelerator | None
) -> dict[str, Any]:
    made = environment(engine.device)
    return {
        "source": engine.pretrained.source,
        "settings": settings,
        "cost": {
            "samples": found.count,
            "forwards": found.cost.forwards,
            "products": found.cost.products,
            "evaluations": found.cost.evaluations,
            "seconds": found.seconds,
            "seconds_a_sample": found.seconds / found.count,
            "repaired": found.repaired,
        },
        "device": made["device"],
        "processes": accelerator.num_processes if accelerator else 1,
        "versions": {name: made[name] for name in ("mmdgs", "torch")},
    }
