"""The one runner: takes chains along a plan, with progress, a callback, kept states, its cost."""

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
from mmdgs.memory import keep_freed_memory
from mmdgs.moments import Moments, require_batch
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.runtime import progress_bar, stop_if_asked, threads
from mmdgs.samplers.kernel import Info, Kernel, State
from mmdgs.samplers.plans import Plan, single_level_plan

logger = logging.getLogger("mmdgs")

SMALL_STATE = 256
"""A state of at most so many numbers runs on one CPU thread: sharing it out costs more."""

USUAL_REPAIRS = 0.4
"""A common share of variances at the floor: 0.2 to 0.37 in chains on MNIST and CIFAR-10. More
probes do not lower it: 0.37 of the exact diagonal of the MNIST energy is negative."""

Callback = Callable[[int, State, Info], None]
"""(step, state, info), called after each step; steps are counted from 0."""


@dataclass(frozen=True)
class Run:
    """Kept samples, the last state, averages of the info, the random streams, the cost.

    An average, one number a chain, is over the steps that report it.
    """

    samples: Float[Tensor, "kept chains ..."]
    state: State
    info: dict[str, Float[Tensor, " chains"]]
    streams: Streams
    seconds: float
    cost: Cost

    @property
    def x(self) -> Float[Tensor, "chains ..."]:
        """The chains after the last step."""
        return self.state.x

    @property
    def repaired(self) -> float:
        """The fraction of eigenvalues (or variances) repaired, over steps and chains."""
        return self.info["repaired"].mean().item() if "repaired" in self.info else 0.0


def run(
    plan: Plan,
    x0: Float[Tensor, "chains ..."],
    *,
    seed: int | Sequence[int] | Streams = 0,
    first_chain: int = 0,
    keep: Sequence[int] | None = None,
    callback: Callback | None = None,
    progress: str | None = "sampling",
) -> Run:
    """Run a plan from x0, which may be noise at its first level (`plan.noise`).

    `keep` names the steps after which states are kept, in this order (0: the start); None keeps the
    last alone. Chain c draws from its own stream of purpose "steps": (seed, first_chain + c), or
    (seed[c], 0) where a seed is given for each chain; the `streams` of an earlier run go on where
    it ended. `progress` names the bar, which stays quiet off a terminal; None switches it off.
    """
    require_batch(x0)
    if not torch.isfinite(x0).all():
        raise ValueError("x0 holds values that are not finite")
    places = {step: place for place, step in enumerate(kept_steps(keep, len(plan.steps)))}
    if isinstance(seed, Streams):
        streams = seed
    else:
        streams = Streams(seed, len(x0), first_chain, purpose="steps")
    state, samples = State(x0.detach()), x0.new_empty(len(places), *x0.shape)
    totals: dict[str, tuple[Tensor, int]] = {}  # of the info, and how many steps reported it
    if 0 in places:
        samples[places[0]] = state.x
    keep_freed_memory()
    started = time.perf_counter()
    bar = progress_bar(len(plan.steps), progress)
    small = x0.device.type == "cpu" and x0.numel() <= SMALL_STATE
    with bar, torch.no_grad(), threads(1 if small else None), counting() as cost:
        for number, (kernel, level, following) in enumerate(plan.steps):
            stop_if_asked()
            try:
                state, info = kernel.step(state, level, following, generator=streams)
            except NonFiniteError as error:
                chains = [first_chain + c for c in error.chains]
                raise NonFiniteError(error.what, chains, number, error.advice) from error
            for name, value in info.items():
                total, steps = totals.get(name, (0, 0))
                totals[name] = (total + value, steps + 1)
            if number + 1 in places:
                samples[places[number + 1]] = state.x
            if callback is not None:
                callback(number, state, info)
            bar.update()
    averages = {name: total / steps for name, (total, steps) in totals.items()}
    return Run(samples, state, averages, streams, time.perf_counter() - started, cost)


def repair_note(fraction: float) -> str:
    """What a person should know where a fraction of the variances was raised to the floor."""
    note = (
        f"{100 * fraction:.3g}% of the variances were estimated as negative or nearly zero and "
        "were raised to the floor, so draws follow the mean there. "
    )
    if fraction > USUAL_REPAIRS:
        usual = f"This is more than usual (up to {100 * USUAL_REPAIRS:.0f}%)"
        return f"{note}{usual}: try a covariance fitted on data (spectral or isotropic)"
    return note + (
        "This is usual for the Jacobian of a network, and the samples can be used; "
        "mmdgs.calibrate(moments, data, levels) fits them as uncertainties"
    )


def kept_steps(keep: Sequence[int] | None, steps: int) -> Sequence[int]:
    """The numbers of the steps after which states are kept, checked; None: the last."""
    if keep is None:
        return (steps,)
    if len(set(keep)) != len(keep) or any(not 0 <= step <= steps for step in keep):
        raise ValueError(f"keep must hold different steps between 0 and {steps}, got {tuple(keep)}")
    return keep


def gibbs_chain(
    post: Moments | Kernel,
    x0: Float[Tensor, "chains ..."],
    level: NoiseLevel,
    *,
    steps: int,
    seed: int | Sequence[int] = 0,
    burn_in: int = 0,
    thin: int = 1,
    callback: Callback | None = None,
    progress: str | None = "sampling",
) -> Float[Tensor, "steps chains ..."]:
    """Single-level pseudo-Gibbs chains from x0 (chains, ...): samples (steps, chains, ...).

    Keeps every `thin`-th state after the first `burn_in` steps. A kernel such as
    `ExactGibbs(mixture)` may stand in place of the estimator. The "mmdgs" log says what fraction of
    the covariance had to be repaired, if any; `run` returns that number too.
    """
    plan = single_level_plan(post, level, steps=steps)
    if burn_in < 0 or thin < 1 or burn_in + thin > steps:
        got = f"{burn_in=}, {thin=}, {steps=}"
        raise ValueError(f"need burn_in >= 0, thin >= 1 and burn_in + thin <= steps, got {got}")
    kept = range(burn_in + thin, steps + 1, thin)
    result = run(plan, x0, seed=seed, keep=kept, callback=callback, progress=progress)
    if result.repaired > 0:
        logger.warning("%d chains, %d steps: %s", len(x0), steps, repair_note(result.repaired))
    return result.samples
