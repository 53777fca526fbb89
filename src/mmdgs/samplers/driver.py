"""The one driver: runs kernels along pairs of levels, with progress, burn-in, thinning, a callback, and the cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import Cost, counting
from mmdgs.errors import NonFiniteError
from mmdgs.moments import Moments, require_batch
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.progress import progress_bar
from mmdgs.randomness import Streams
from mmdgs.samplers.gibbs import Gibbs
from mmdgs.samplers.kernel import Info, Kernel, State
from mmdgs.samplers.plans import Plan, Step
from mmdgs.threads import stop_if_asked, threads

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
) -> Run:
    """Run a kernel from x0 along a path; keep every `thin`-th state after the first `burn_in` steps.

    Chain c draws from its own stream: (seed, first_chain + c), or (seed[c], 0) where a seed is given for
    each chain; the `streams` of an earlier run go on where it ended. `callback(step, state, info)` is called
    after each step, steps counted from 0. `progress` names the bar, which stays quiet off a terminal; None
    switches it off.
    """
    steps = [Step(kernel, level, following) for level, following in path]
    return _walk(steps, x0, seed, first_chain, burn_in, thin, callback, progress)


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
    totals: dict[str, tuple[Tensor, int]] = {}
    state = State(x0.detach())
    started = time.perf_counter()
    bar = progress_bar(len(steps), progress)
    small = x0.device.type == "cpu" and x0.numel() <= SMALL_STATE
    with bar, torch.no_grad(), threads(1 if small else None), counting() as cost:
        for number, (kernel, level, following) in enumerate(steps):
            stop_if_asked()
            try:
                state, info = kernel.step(state, level, following, generator=streams)
            except NonFiniteError as error:
                raise NonFiniteError(error.what, [first_chain + c for c in error.chains], number) from error
            for name, value in info.items():
                total, count = totals.get(name, (torch.zeros_like(value), 0))
                totals[name] = (total + value, count + 1)
            kept, rest = divmod(number + 1 - burn_in, thin)
            if kept > 0 and rest == 0:
                samples[kept - 1] = state.x
            if callback is not None:
                callback(number, state, info)
            bar.update()
    averages = {name: total / count for name, (total, count) in totals.items()}
    return Run(samples, state, averages, streams, time.perf_counter() - started, cost)


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
