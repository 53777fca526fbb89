"""Many samples of a plan, in batches that fit in memory, on one process or several, returned or written as they come.

Sample c depends on (seed, c) alone: not on its batch, nor on the process or the run that made it. (Arithmetic in
another batch rounds differently; a run that goes on keeps its batches, and with them every byte.)
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.compiled import fast_path
from mmdgs.cost import Cost
from mmdgs.errors import UsageError
from mmdgs.generation.identity import input_record, plan_record
from mmdgs.generation.methods import make_plan, settings_of
from mmdgs.generation.settings import Method
from mmdgs.generation.writers import Destination, destination
from mmdgs.memory import Batches, evenly
from mmdgs.models import Model
from mmdgs.randomness import Streams, checked_seed, uniforms
from mmdgs.reading import reading
from mmdgs.runtime import autocast, check_precision, environment, matmul_precision, progress_bar, ticks_of
from mmdgs.samplers import Info, Plan, Run, State, run
from mmdgs.samplers.driver import kept_steps

if TYPE_CHECKING:
    from accelerate import Accelerator

NUMBERS, NUMBERS_A_GIBIBYTE = 1 << 16, 1 << 15
"""Numbers in the states of the chains that run at once: on a CPU, and for each GiB of a GPU's memory. 83 digits, and 41
for each GiB: large batches keep a large GPU busy, and a small one has no room for them."""

ADVICE = "use a covariance with fewer products (--probes 1), --precision bf16, or the CPU (--device cpu)"
"""Where not even one sample fits in memory."""

FAST_STEPS = 20_000
"""A run of fewer steps, over all samples, is over before a network would be compiled for it."""

Start = Callable[[int, int], Tensor]
"""Where chains start: (how many, the number of the first) -> (chains, ...)."""

Watch = Callable[[int, State, Info, int], None]
"""(step, state, info, the number of the first chain in the state), called after each step of a batch."""


@dataclass(frozen=True)
class Generated:
    """What a run leaves: the samples, where they were not written, and what each of them cost.

    Values of the data's interval are mapped to [0, 1], in `states` too: the states after the steps to keep.
    """

    x: Float[Tensor, "samples ..."] | None
    count: int
    cost: Cost  # of one sample
    seconds: float  # of all samples, over all processes
    repaired: float
    path: Path | None = None
    states: Float[Tensor, "kept samples ..."] | None = None


@dataclass(frozen=True)
class _Batch:
    """Samples numbered from `first` on, with what they cost."""

    first: int
    x: Tensor
    states: Tensor | None
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


@dataclass
class _Engine:
    """Runs a plan for any range of samples, as many at a time as fit in memory."""

    model: Model
    plan: Plan
    seed: int
    start: Start | None
    keep: Sequence[int] | None
    callback: Watch | None
    precision: str
    fast: str | None
    batches: Batches

    def batch(self, first: int, stop: int, tick: Callable[[int], object]) -> _Batch:
        """Samples first to stop; `tick` is told of every step, by the number of chains in it."""
        started = time.perf_counter()
        found: list[Tensor] = []
        states: list[Tensor] = []
        repaired, cost = 0.0, Cost()
        for result in self.batches.over(stop, lambda start, last: self._run(start, last - start, tick), first):
            found.append(result.x.cpu())
            states.append(result.samples.cpu())
            repaired += len(result.x) * result.repaired
            cost = result.cost
        kept = None if self.keep is None else self._to_unit(torch.cat(states, 1))
        x = self._to_unit(torch.cat(found))
        return _Batch(first, x, kept, cost, time.perf_counter() - started, repaired / len(x))

    def _to_unit(self, x: Tensor) -> Tensor:
        """Values of the data's interval as [0, 1]."""
        low, high = self.model.interval
        return (x - low) / (high - low)

    def _noise(self, chains: int, first: int) -> Tensor:
        """Where chains start: uniform noise for images at one level, else the plan's around the interval's middle."""
        streams = Streams(self.seed, chains, first, purpose="start")
        shape = tuple(self.model.shape)
        if len(self.model.levels) == 1 and len(shape) == 3:
            return self.model.scaled(uniforms((chains, *shape), torch.empty(0), streams))
        return self.plan.noise(shape, chains, generator=streams, centre=sum(self.model.interval) / 2)

    def _run(self, first: int, rows: int, tick: Callable[[int], object]) -> Run:
        """The chains of some samples; where it fails its ticks are taken back."""
        device = self.model.device
        x0 = (self.start or self._noise)(rows, first).to(device)
        path = contextlib.nullcontext() if self.fast is None else fast_path(self.fast)
        with ticks_of(tick) as ticked, matmul_precision(self.precision), autocast(self.precision, device), path:

            def note(step: int, state: State, info: Info) -> None:
                if self.callback is not None:
                    self.callback(step, state, info, first)
                ticked(rows)

            return run(self.plan, x0, seed=self.seed, first_chain=first, keep=self.keep, callback=note, progress=None)


def chains_at_once(model: Model) -> int:
    """How many chains run together at most, where no batch size is given."""
    numbers = NUMBERS
    if model.device.type == "cuda":
        numbers = NUMBERS_A_GIBIBYTE * (torch.cuda.get_device_properties(model.device).total_memory >> 30)
    return max(1, numbers // math.prod(model.shape))


def generate(
    model: Model,
    plan: Plan | Method,
    count: int,
    *,
    out: Path | str | None = None,
    seed: int = 0,
    first: int = 0,
    batch_size: int | None = None,
    start: Start | Tensor | None = None,
    keep: Sequence[int] | None = None,
    callback: Watch | None = None,
    precision: str = "float32",
    fast: bool | None = None,
    settings: Mapping[str, Any] | None = None,
    floating: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    accelerator: Accelerator | None = None,
    progress: str | None = "sampling",
) -> Generated:
    """Draw `count` samples by a plan, or by the plan of a `Method`.

    Chains start from noise at the plan's first level around the middle of the data's interval; images of a model of
    one level from uniform noise in that interval. `start` stands in place of it: a tensor (count, ...), or
    `start(chains, first)`. Starts and steps draw from streams of their own (purposes "start" and "steps").

    The samples are returned, or written to `out` as they come: a folder of PNG files with samples.json, an .npz with
    NAME.samples.json, or one picture, a .png with NAME.png.samples.json. An .npz of images holds `arr_0`, uint8 (count,
    height, width, channels). With floating=True, and for what is no image, it holds `x`, float32 (count, ...), not
    clipped, the data's interval mapped to [0, 1]. `settings` go into the record, and with resume=True a run goes on
    only with the same settings, model and plan. With an accelerator every process takes its share of the batches.

    `keep` names steps after which states are returned too (0: the start), `first` is the number of the first sample,
    and `callback(step, state, info, first_chain)` is called after each step of a batch: these are for samples that are
    returned. `precision` (float32, tf32, bf16) is the network's; states stay in float32. `fast` says whether the
    network is compiled on a GPU, which takes a minute or two the first time: None does so where the run is long enough
    to gain by it.
    """
    check_precision(precision)
    if isinstance(plan, Method):
        settings = {**settings_of(plan, model), **(settings or {})}
        plan = make_plan(plan, model)
    _check(model, count, batch_size, out, floating, accelerator)
    if out is not None and (keep is not None or first or callback is not None):
        raise UsageError("keep, first and callback are for samples that are returned: leave out away")
    if keep is not None:
        kept_steps(keep, len(plan.steps))
    device = model.device
    processes = accelerator.num_processes if accelerator else 1
    size = batch_size or evenly(count, chains_at_once(model), processes)
    begin = _starting(start, (count, *model.shape), first)
    path = _path(fast, count * len(plan.steps), device)
    batches = Batches(size, "samples", ADVICE)
    engine = _Engine(model, plan, checked_seed(seed), begin, keep, callback, precision, path, batches)
    if out is not None:
        chosen: dict[str, Any] = {} if precision == "float32" else {"precision": precision}
        chosen |= {"floating": True} if floating else {}
        chosen |= {} if start is None else input_record(start=start)
        wanted = _settings(engine, count, {**chosen, **(settings or {})})
        place = destination(Path(out), model.shape, pixels=_are_images(model) and not floating)
        return _written(engine, place, count, size, wanted, resume, overwrite, accelerator, progress)
    stop = first + count
    with progress_bar(count * len(plan.steps), progress, unit="chain-step") as bar:
        made = [engine.batch(at, min(at + size, stop), bar.update) for at in range(first, stop, size)]
    kept = [batch.states for batch in made if batch.states is not None]
    x, states = torch.cat([batch.x for batch in made]), torch.cat(kept, 1) if kept else None
    return _summed([batch.note() for batch in made], count, x=x, states=states)


def _starting(start: Start | Tensor | None, shape: tuple[int, ...], first: int) -> Start | None:
    """A start by the numbers of chains."""
    if not isinstance(start, Tensor):
        return start
    if start.shape != shape:
        raise UsageError(f"start must have shape {shape}, got {tuple(start.shape)}")
    return lambda chains, at: start[at - first : at - first + chains]


def _written(
    engine: _Engine,
    place: Destination,
    count: int,
    size: int,
    wanted: Mapping[str, Any],
    resume: bool,
    overwrite: bool,
    accelerator: Accelerator | None,
    progress: str | None,
) -> Generated:
    """Draw the samples that are missing at a place, and write them."""
    main = accelerator is None or accelerator.is_main_process
    with place.held() if main else contextlib.nullcontext():
        if main:
            place.begin(wanted, resume=resume, overwrite=overwrite)
        _wait(accelerator)
        if (done := place.finished()) is not None:
            with reading(place.record, "a record of samples"):
                return _summed([done["cost"]], count, path=place.path)
        _write_share(engine, place, count, size, accelerator, progress if main else None)
        with reading(place.work, "a folder of notes"):
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


def _are_images(model: Model) -> bool:
    """Whether samples can be written as pictures: grey, or of three colours."""
    return len(model.shape) == 3 and model.shape[0] in (1, 3)


def _check(
    model: Model,
    count: int,
    batch_size: int | None,
    out: Path | str | None,
    floating: bool,
    accelerator: Accelerator | None,
) -> None:
    for name, value in (("count", count), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    if out is None and accelerator is not None and accelerator.num_processes > 1:
        raise UsageError("several processes write their samples: give a folder, an .npz or a .png to write into")
    array = out is not None and Path(out).suffix.lower() == ".npz"
    if floating and not array:
        raise UsageError(f"floating-point samples (--float) go into an .npz, got {out or 'no file to write'}")
    if out is not None and not array and not _are_images(model):
        raise UsageError(
            f"the model gives points of shape {model.shape}, not images: use an --out ending in .npz, got {out}"
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
    notes: Sequence[Mapping[str, Any]],
    count: int,
    *,
    x: Tensor | None = None,
    states: Tensor | None = None,
    path: Path | None = None,
) -> Generated:
    """What all batches cost: by the sample where it is the same for each, else over all of them."""
    samples = sum(note["samples"] for note in notes)
    repaired = sum(note["samples"] * note["repaired"] for note in notes) / max(1, samples)
    cost = Cost(*(max((note[key] for note in notes), default=0) for key in ("forwards", "products")))
    return Generated(x, count, cost, sum(note["seconds"] for note in notes), repaired, path, states)


def _settings(engine: _Engine, count: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What samples depend on: a run goes on only where all of it agrees."""
    found = {"model": engine.model.digest, "count": count, "seed": engine.seed, "plan": plan_record(engine.plan)}
    found |= {"inputs": input_record(model=engine.model), **settings}
    return json.loads(json.dumps(found))  # as it will be read back


def _record(
    found: Generated, settings: Mapping[str, Any], engine: _Engine, accelerator: Accelerator | None
) -> dict[str, Any]:
    made = environment(engine.model.device)
    return {
        "source": engine.model.source,
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
