"""The one driver: runs kernels along pairs of levels, with progress, burn-in, thinning, a callback, and the cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import Cost, counting, spend
from mmdgs.errors import NonFiniteError
from mmdgs.moments import Moments, require_batch
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.runtime import progress_bar, stop_if_asked, threads
from mmdgs.samplers.blocks import Block, prepared, suited
from mmdgs.samplers.gibbs import Gibbs
from mmdgs.samplers.kernel import Info, Kernel, State
from mmdgs.samplers.plans import Plan, Step

logger = logging.getLogger("mmdgs")

Path = Sequence[tuple[NoiseLevel, NoiseLevel]]
"""What a run walks along: (level, following) pairs. A single-level chain is [(level, CLEAN)] * steps."""

SMALL_STATE = 256
"""A state of at most this many numbers is run on one CPU thread: sharing out such small work costs more."""


@dataclass(frozen=True)
class Run:
    """What a run leaves: kept samples, the last state, per-chain averages of the info, the random streams, the cost.

    An average is over the steps that report it.
    """

    samples: Float[Tensor, "kept chains ..."]
    state: State
    info: dict[str, Float[Tensor, " chains"]]
    streams: Streams
    seconds: float
    cost: Cost

    @property
    def repaired(self) -> float:
        """The fraction of covariance eigenvalues (or variances) that were repaired, over steps and chains."""
        return self.info["repaired"].mean().item() if "repaired" in self.info else 0.0


def run(
    kernel: Kernel,
    x0: Float[Tensor, "chains ..."],
    path: Path,
    *,
    seed: int | Sequence[int] | Streams = 0,
    first_chain: int = 0,
    burn_in: int = 0,
    thin: int = 1,
    callback: Callable[[int, State, Info], None] | None = None,
    progress: str | None = "sampling",
    blocks: bool = True,
) -> Run:
    """Run a kernel from x0 along a path; keep every `thin`-th state after the first `burn_in` steps.

    Chain c draws from its own stream: (seed, first_chain + c), or (seed[c], 0) where a seed is given for
    each chain; the `streams` of an earlier run go on where it ended. `callback(step, state, info)` is called
    after each step, steps counted from 0. `progress` names the bar, which stays quiet off a terminal; None
    switches it off. Equal steps of small models go in blocks, on a GPU as CUDA graphs, where there is no callback
    (blocks.py); the chain is the same, and `blocks=False` takes them one by one.
    """
    steps = [Step(kernel, level, following) for level, following in path]
    return _walk(steps, x0, seed, first_chain, burn_in, thin, callback, progress, blocks)


def run_plan(
    plan: Plan,
    x0: Float[Tensor, "chains ..."],
    *,
    seed: int | Sequence[int] | Streams = 0,
    first_chain: int = 0,
    callback: Callable[[int, State, Info], None] | None = None,
    progress: str | None = "sampling",
) -> Run:
    """Run a plan from x0, which is noise at its first level (`plan.noise`); the last state is the sample."""
    return _walk(plan.steps, x0, seed, first_chain, len(plan.steps) - 1, 1, callback, progress)


def _walk(
    steps: Sequence[Step],
    x0: Tensor,
    seed: int | Sequence[int] | Streams,
    first_chain: int,
    burn_in: int,
    thin: int,
    callback: Callable[[int, State, Info], None] | None,
    progress: str | None,
    blocks: bool = True,
) -> Run:
    require_batch(x0)
    if not torch.isfinite(x0).all():
        raise ValueError("x0 holds values that are not finite")
    if burn_in < 0 or thin < 1 or burn_in + thin > len(steps):
        raise ValueError(
            f"need burn_in >= 0, thin >= 1 and burn_in + thin <= steps, got {burn_in=}, {thin=}, steps={len(steps)}"
        )
    streams = seed if isinstance(seed, Streams) else Streams(seed, len(x0), first_chain)
    samples = x0.new_empty((len(steps) - burn_in) // thin, *x0.shape)
    started = time.perf_counter()
    bar = progress_bar(len(steps), progress)
    small = x0.device.type == "cpu" and x0.numel() <= SMALL_STATE
    walk = _Walk(State(x0.detach()), streams, samples, first_chain, burn_in, thin, callback, bar.update)
    with bar, torch.no_grad(), threads(1 if small else None), counting() as cost:
        for step, count in _equal(steps):
            if blocks and callback is None and suited(step, x0, count):
                walk.in_blocks(step, count)
            else:
                walk.one_by_one(step, count)
    averages = {name: total / count for name, (total, count) in walk.totals.items()}
    return Run(samples, walk.state, averages, streams, time.perf_counter() - started, cost)


def _equal(steps: Sequence[Step]) -> Iterator[tuple[Step, int]]:
    """Runs of equal steps, each with how many they are."""
    last, count = steps[0], 0
    for step in steps:
        if step.kernel is not last.kernel or step[1:] != last[1:]:
            yield last, count
            last, count = step, 0
        count += 1
    yield last, count


@dataclass
class _Walk:
    """Chains on their way: where they are, and what is kept of them."""

    state: State
    streams: Streams
    samples: Tensor
    first_chain: int
    burn_in: int
    thin: int
    callback: Callable[[int, State, Info], None] | None
    advance: Callable[[int], object]  # the progress bar
    number: int = 0  # of the next step
    totals: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # of the info, and how many steps reported it

    def one_by_one(self, step: Step, count: int) -> Info:
        """Take some equal steps; returns what the last reported."""
        info: Info = {}
        kernel, level, following = step
        for _ in range(count):
            stop_if_asked()
            try:
                self.state, info = kernel.step(self.state, level, following, generator=self.streams)
            except NonFiniteError as error:
                chains = [self.first_chain + c for c in error.chains]
                raise NonFiniteError(error.what, chains, self.number) from error
            for name, value in info.items():
                total, steps = self.totals.get(name, (torch.zeros_like(value), 0))
                self.totals[name] = (total + value, steps + 1)
            self._keep(self.state.x[None])
            if self.callback is not None:
                self.callback(self.number - 1, self.state, info)
            self.advance(1)
        return info

    def in_blocks(self, step: Step, count: int) -> None:
        """The same steps, most of them in blocks (blocks.py)."""
        before = self.streams.positions
        names = list(self.one_by_one(step, 1))  # the first shows what a step reports, and what it draws
        draws = {kind: position - before[kind] for kind, position in self.streams.positions.items()}
        left = count - 1
        found = prepared(step, self.state.x, {name: self.totals[name][0] for name in names}, draws, left)
        while found is not None and left > 0:
            block, length = found
            size = min(length, left)
            if not self._take(block, names, {kind: number * size for kind, number in draws.items()}, size):
                break
            left -= size
        self.one_by_one(step, left)

    def _take(self, block: Block, names: Sequence[str], draws: Mapping[str, int], size: int) -> bool:
        """Take a block of steps, unless something in it is not finite or fails: then nothing has happened."""
        stop_if_asked()
        x, start = self.state.x, self.streams.positions
        totals = {name: self.totals[name][0] for name in names}
        try:
            with counting(apart=True) as cost:
                outcome = block(x, totals, self.streams.ahead(draws, x.dtype, x.device), size)
                finite = bool(outcome.finite)
        except Exception:  # the steps one by one will raise it, if it is theirs
            finite = False
        if not finite:
            self.streams.go_to(start)
            return False
        spend(forwards=cost.forwards, products=cost.products)
        self._keep(outcome.states)
        self.state = State(outcome.states[-1].clone())  # the block may write over its own
        for name in names:
            self.totals[name] = (outcome.totals[name][-1].clone(), self.totals[name][1] + size)
        self.advance(size)
        return True

    def _keep(self, states: Tensor) -> None:
        """Note the states after the next steps, (steps, chains, ...), as far as burn-in and thinning let them."""
        done = self.number - self.burn_in
        self.number += len(states)
        kept = (self.number - self.burn_in) // self.thin
        first = max(done, 0) // self.thin  # kept before
        if kept > first:
            self.samples[first:kept] = states[(first + 1) * self.thin - done - 1 :: self.thin]


def gibbs_chain(
    post: Moments | Kernel,
    x0: Float[Tensor, "chains ..."],
    level: NoiseLevel,
    *,
    steps: int,
    seed: int | Sequence[int] = 0,
    burn_in: int = 0,
    thin: int = 1,
    callback: Callable[[int, State, Info], None] | None = None,
    progress: str | None = "sampling",
) -> Float[Tensor, "steps chains ..."]:
    """Single-level pseudo-Gibbs chains from x0 (chains, ...): the clean samples, (steps, chains, ...).

    A kernel such as `ExactGibbs(mixture)` may stand in place of the estimator. Says on the "mmdgs" log what
    fraction of the covariance had to be repaired, if any; `run` returns that number too.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    result = run(
        post if isinstance(post, Kernel) else Gibbs(post),
        x0,
        [(level, CLEAN)] * steps,
        seed=seed,
        burn_in=burn_in,
        thin=thin,
        callback=callback,
        progress=progress,
    )
    if result.repaired > 0:
        logger.warning(
            "%.3g%% of the covariance's eigenvalues or variances lay below the floor and were lifted to it "
            "(%d chains, %d steps)",
            100 * result.repaired,
            len(x0),
            steps,
        )
    return result.samples
