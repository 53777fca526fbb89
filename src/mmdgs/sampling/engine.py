"""Many samples of a plan, in batches that fit in memory, on one process or several, returned or
written as they come.

Sample c depends on (seed, c) alone: not on its batch, nor on the process or the run that made it.
(Arithmetic in another batch rounds differently; a run that goes on keeps its batches, and with them
every byte.)
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

from mmdgs import runtime
from mmdgs.compiled import fast_path
from mmdgs.cost import Cost
from mmdgs.errors import UsageError
from mmdgs.identity import input_record, plan_record
from mmdgs.memory import Batches, evenly, memory_of
from mmdgs.models import FitData, Model
from mmdgs.randomness import Streams, checked_seed, uniforms
from mmdgs.reading import reading
from mmdgs.samplers import Info, Plan, Run, State, run
from mmdgs.sampling.named import prepare
from mmdgs.sampling.settings import SamplerSettings
from mmdgs.sampling.writers import Destination, destination

if TYPE_CHECKING:
    from accelerate import Accelerator

NUMBERS, NUMBERS_A_GIBIBYTE = 1 << 16, 1 << 15
"""Numbers in the states of the chains that run at once: on a CPU, and for each GiB of a GPU's
memory. 83 digits, and 41 for each GiB: large batches keep a large GPU busy, and a small one has no
room for them."""
ADVICE = (
    "use a covariance with fewer products (--probes 1), --precision bf16, or the CPU (--device cpu)"
)
"""Where not even one sample fits in memory."""
FAST_STEPS = 20_000
"""A run of fewer steps, over all samples, is over before a network would be compiled for it."""

Start = Callable[[int, int], Tensor]
"""Where chains start: (how many, the number of the first) -> (chains, ...)."""
Watch = Callable[[int, State, Info, int], None]
"""(step, state, info, the number of the first chain in the state), after each step of a batch."""
Tick = Callable[[int], object]
"""Told of every step, by the number of chains in it."""


@dataclass(frozen=True)
class Generated:
    """What a run leaves: the samples, where they were not written, and what each of them cost.

    Values of the data's interval are mapped to [0, 1], in `states` too: the states after the steps
    to keep.
    """

    x: Float[Tensor, "samples ..."] | None
    count: int
    cost: Cost  # of one sample
    seconds: float  # of all samples, over all processes
    repaired: float
    path: Path | None = None
    states: Float[Tensor, "kept samples ..."] | None = None


class _Alone:
    """A run of one process, in place of an accelerator."""

    num_processes, process_index, is_main_process = 1, 0, True

    def wait_for_everyone(self) -> None: ...

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclass
class _Engine:
    """Runs a plan for any range of samples, as many at a time as fit in memory."""

    model: Model
    plan: Plan
    seed: int
    start: Start
    keep: Sequence[int] | None
    callback: Watch | None
    precision: str
    fast: str | None
    size: int
    processes: Accelerator | _Alone

    def __post_init__(self) -> None:
        self.batches = Batches(self.size, "samples", ADVICE)

    def batch(self, first: int, stop: int, tick: Tick) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Samples first to stop in [0, 1] units, their kept states, and what they cost."""
        low, high = self.model.interval
        started, repaired, cost = time.perf_counter(), 0.0, Cost()
        xs, kept = [], []
        for result in self.batches.over(
            stop, lambda start, last: self._run(start, last - start, tick), first
        ):
            xs.append(result.x.cpu())
            kept.append(result.samples.cpu())
            repaired += len(result.x) * result.repaired
            cost = result.cost
        x, states = (
            (values - low) / (high - low) for values in (torch.cat(xs), torch.cat(kept, 1))
        )
        note = {
            "first": first,
            "samples": len(x),
            "seconds": time.perf_counter() - started,
            "forwards": cost.forwards,
            "products": cost.products,
            "repaired": repaired / len(x),
        }
        return x, states, note

    def _run(self, first: int, rows: int, tick: Tick) -> Run:
        """The chains of some samples; where it fails its ticks are taken back."""
        device = self.model.device
        x0 = self.start(rows, first).to(device)
        path = contextlib.nullcontext() if self.fast is None else fast_path(self.fast)
        with (
            runtime.ticks_of(tick) as ticked,
            runtime.matmul_precision(self.precision),
            runtime.autocast(self.precision, device),
            path,
        ):

            def note(step: int, state: State, info: Info) -> None:
                if self.callback is not None:
                    self.callback(step, state, info, first)
                ticked(rows)

            return run(
                self.plan,
                x0,
                seed=self.seed,
                first_chain=first,
                keep=self.keep,
                callback=note,
                progress=None,
            )

    def returned(self, first: int, count: int, progress: str | None) -> Generated:
        stop = first + count
        with runtime.progress_bar(count * len(self.plan.steps), progress, unit="chain-step") as bar:
            batches = [
                self.batch(at, min(at + self.size, stop), bar.update)
                for at in range(first, stop, self.size)
            ]
        x, states = torch.cat([x for x, _, _ in batches]), None
        if self.keep is not None:
            states = torch.cat([states for _, states, _ in batches], 1)
        return _summed([note for _, _, note in batches], count, x=x, states=states)

    def written(
        self,
        place: Destination,
        count: int,
        settings: Mapping[str, Any],
        progress: str | None,
        **how: bool,
    ) -> Generated:
        """Draw the samples that are missing at a place, and write them."""
        is_main, wait = self.processes.is_main_process, self.processes.wait_for_everyone
        with place.held() if is_main else contextlib.nullcontext():
            if is_main:
                place.begin(settings, **how)
            wait()
            if (done := place.finished()) is not None:
                with reading(place.record, "a record of samples"):
                    return _summed([done["cost"]], count, path=place.path)
            self._write_share(place, count, progress if is_main else None)
            with reading(place.work, "a folder of notes"):
                generated = _summed(place.notes(), count, path=place.path)
            wait()  # all have read the notes before they go
            if is_main:
                place.finish(count, self._record(generated, settings))
            wait()
        return generated

    def _write_share(self, place: Destination, count: int, progress: str | None) -> None:
        """Make and write this process's share of the batches that have samples missing.

        A batch is made whole even where some of it is there, so that it is the same as before.
        """
        present = place.present(count)
        batches = [
            range(first, min(first + self.size, count)) for first in range(0, count, self.size)
        ]
        pending = [batch for batch in batches if not present.issuperset(batch)]
        self.processes.wait_for_everyone()  # all have looked before the first of them writes
        share = pending[self.processes.process_index :: self.processes.num_processes]
        steps = sum(map(len, share)) * len(self.plan.steps)
        with runtime.progress_bar(steps, progress, unit="chain-step") as bar:
            for numbers in share:
                x, _, note = self.batch(numbers.start, numbers.stop, bar.update)
                place.write(numbers.start, x, set(numbers) - present, note)
        self.processes.wait_for_everyone()

    def settings(self, count: int, others: Mapping[str, Any]) -> dict[str, Any]:
        """What samples depend on: a run goes on only where all of it agrees."""
        known = {
            "model": self.model.digest,
            "count": count,
            "seed": self.seed,
            "plan": plan_record(self.plan),
            "inputs": input_record(model=self.model),
        }
        return json.loads(json.dumps({**known, **others}))  # as it will be read back

    def _record(self, generated: Generated, settings: Mapping[str, Any]) -> dict[str, Any]:
        here, cost = runtime.environment(self.model.device), generated.cost
        return {
            "source": self.model.source,
            "settings": settings,
            "cost": {
                "samples": generated.count,
                "forwards": cost.forwards,
                "products": cost.products,
                "evaluations": cost.evaluations,
                "seconds": generated.seconds,
                "seconds_a_sample": generated.seconds / generated.count,
                "repaired": generated.repaired,
            },
            "device": here["device"],
            "processes": self.processes.num_processes,
            "versions": {name: here[name] for name in ("mmdgs", "torch")},
        }


def chains_at_once(model: Model) -> int:
    """How many chains run together at most, where no batch size is given."""
    numbers = NUMBERS
    if model.device.type == "cuda":
        numbers = NUMBERS_A_GIBIBYTE * (memory_of(model.device) >> 30)
    return max(1, numbers // math.prod(model.shape))


def generate(
    model: Model,
    plan: Plan | SamplerSettings,
    count: int,
    *,
    out: Path | str | None = None,
    data: FitData | None = None,
    seed: int = 0,
    first: int = 0,
    batch_size: int | None = None,
    start: Start | Tensor | None = None,
    keep: Sequence[int] | Callable[[int], Sequence[int]] | None = None,
    callback: Watch | None = None,
    precision: str = "float32",
    fast: bool | None = None,
    floating: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    accelerator: Accelerator | None = None,
    progress: str | None = "sampling",
) -> Generated:
    """Draw `count` samples by a plan, or by a sampler; its covariance may be fitted on `data`.

    Chains start from noise at the plan's first level around the middle of the data's interval;
    images of a model of one level from uniform noise in that interval. `start` stands in place of
    it: a tensor (count, ...), or `start(chains, first)`. Starts and steps draw from streams of
    their own (purposes "start" and "steps").

    The samples are returned, or written to `out` as they come: a folder of PNG files with
    samples.json, an .npz with NAME.samples.json, or one picture, a .png with NAME.png.samples.json.
    An .npz of images holds `arr_0`, uint8 (count, height, width, channels). With floating=True, and
    for what is no image, it holds `x`, float32 (count, ...), not clipped, the data's interval
    mapped to [0, 1]. With resume=True a run goes on only with the same model, plan and settings.
    With an accelerator every process takes its share of the batches.

    `keep` names steps after which states are returned too (0: the start), or does so from the
    number of steps; `first` is the number of the first sample, and `callback(step, state, info,
    first_chain)` is called after each step of a batch: these are for samples that are returned.
    `precision` (float32, tf32, bf16) is the network's; states stay in float32. `fast` says whether
    the network is compiled on a GPU, which takes a minute or two the first time: None does so where
    the run is long enough to gain by it.
    """
    runtime.check_precision(precision)
    if None in model.shape:
        raise UsageError(
            f"{model.source} takes images of any size: say which, such as --size 64 (size=64). It "
            "is for restoration; a network without a scene to fill draws textures"
        )
    _check(model, count, batch_size, out, floating)
    processes = accelerator or _Alone()
    if out is None and processes.num_processes > 1:
        raise UsageError("several processes write their samples: give an --out to write into")
    if out is not None and (keep is not None or first or callback is not None):
        raise UsageError("keep, first and callback cannot be combined with out")
    others: dict[str, Any] = {} if precision == "float32" else {"precision": precision}
    others |= {"floating": True} if floating else {}
    others |= {} if start is None or out is None else input_record(start=start)
    if isinstance(plan, SamplerSettings):
        with processes.main_process_first():  # one fits variances, the others find them
            plan, record = prepare(plan, model, data=data)
        others |= record
    engine = _Engine(
        model,
        plan,
        checked_seed(seed),
        _starting(start, model, plan, seed, (count, first)),
        keep(len(plan.steps)) if callable(keep) else keep,
        callback,
        precision,
        _path(fast, count * len(plan.steps), model.device),
        batch_size or evenly(count, chains_at_once(model), processes.num_processes),
        processes,
    )
    if out is None:
        return engine.returned(first, count, progress)
    place = destination(Path(out), model.shape, pixels=_are_images(model) and not floating)
    known = engine.settings(count, others)
    return engine.written(place, count, known, progress, resume=resume, overwrite=overwrite)


def _starting(
    start: Start | Tensor | None, model: Model, plan: Plan, seed: int, numbers: tuple[int, int]
) -> Start:
    """Where chains start, by their numbers: uniform noise for images at one level, else the plan's
    around the interval's middle, where nothing is given.
    """
    count, first = numbers
    if isinstance(start, Tensor):
        if start.shape != (shape := (count, *model.shape)):
            raise UsageError(f"start must have shape {shape}, got {tuple(start.shape)}")
        return lambda chains, at: start[at - first : at - first + chains]

    def noise(chains: int, at: int) -> Tensor:
        streams = Streams(seed, chains, at, purpose="start")
        if len(model.levels) == 1 and len(model.shape) == 3:
            return model.scaled(uniforms((chains, *model.shape), torch.empty(0), streams))
        return plan.noise(model.shape, chains, generator=streams, centre=sum(model.interval) / 2)

    return start or noise


def _path(fast: bool | None, steps: int, device: torch.device) -> str | None:
    """The mode of the fast path for a run of so many steps; None leaves it as it is."""
    if not (steps >= FAST_STEPS if fast is None else fast):
        return "never"
    return "now" if device.type == "cuda" else None


def _are_images(model: Model) -> bool:
    """Whether samples can be written as pictures: grey, or of three colours."""
    return len(model.shape) == 3 and model.shape[0] in (1, 3)


def _check(
    model: Model, count: int, batch_size: int | None, out: Path | str | None, floating: bool
) -> None:
    for name, value in (("count", count), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    array = out is not None and Path(out).suffix.lower() == ".npz"
    if floating and not array:
        got = out or "no file"
        raise UsageError(f"floating-point samples (--float) go into an .npz, got {got}")
    if out is not None and not array and not _are_images(model):
        points = f"points of shape {model.shape}, not images"
        raise UsageError(f"the model gives {points}: use an --out ending in .npz, got {out}")


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
    most = {key: max((note[key] for note in notes), default=0) for key in ("forwards", "products")}
    seconds = sum(note["seconds"] for note in notes)
    return Generated(x, count, Cost(**most), seconds, repaired, path, states)
