"""Blocks of equal steps, taken without a look at any number: on a GPU one CUDA graph, replayed.

A step of a small model is some hundred tiny kernels, and launching one takes longer than running it. So a block

    x, totals of the info, random numbers  ->  the states after each step, running totals, whether all was finite

is a function of tensors alone: its numbers come from a `Tape` that was filled beforehand, and its checks are put off to
the end. Such a function can be recorded once and replayed. The numbers are those of the plain loop, drawn from the same
streams in the same order, so a chain is the same with and without blocks. If anything was not finite, the driver takes
the block's steps again one by one from its start, and they raise the error that they always raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmdgs.cost import counting, spend
from mmdgs.denoisers import (
    CleanDenoiser,
    EdmDenoiser,
    EnergyDenoiser,
    NoiseDenoiser,
    ScoreDenoiser,
    VelocityDenoiser,
)
from mmdgs.errors import first_line
from mmdgs.linalg.operators import checks_deferred, closed_form
from mmdgs.moments import DiagonalMoments, FullMoments, IsotropicMoments, LearnedMoments
from mmdgs.randomness import Tape
from mmdgs.recording import Recorded
from mmdgs.samplers.gibbs import Gibbs
from mmdgs.samplers.kernel import State
from mmdgs.samplers.plans import Step

logger = logging.getLogger("mmdgs")

LARGEST_STATE = 1 << 14
"""Numbers in a state up to which steps go in blocks: beyond, kernels take longer than their launches."""

LARGEST_ROW = 64
"""Numbers in a row up to which they do: points and tables. An image's network would make a very large graph."""

ON_CPU = 32
"""Steps of a block on a CPU."""

SHORT, LONG, FOR_LONG = 16, 64, 1024
"""Steps of a block on a GPU: LONG in runs of FOR_LONG steps and more, else SHORT. To record a block takes about as long
as to run it plainly, so it must be a small part of the run."""

LEAST_ON_GPU = 4 * SHORT
Numbers = Mapping[str, Tensor]
"""Random numbers by kind, (chains, count)."""


@dataclass(frozen=True)
class Outcome:
    """States (steps, chains, ...), totals of the info after each step (steps, chains), and whether all was finite."""

    states: Tensor
    totals: Mapping[str, Tensor]
    finite: Tensor


Block = Callable[[Tensor, Mapping[str, Tensor], Numbers, int], Outcome]
"""(x, totals, numbers, steps) -> Outcome. What comes back may be overwritten by the next call."""


def block_of(step: Step) -> Block:
    """Some equal steps as a function of tensors alone: no number is looked at, and none is drawn that is not given."""
    kernel, level, following = step

    def block(x: Tensor, totals: Mapping[str, Tensor], numbers: Numbers, steps: int) -> Outcome:
        tape = Tape(numbers, len(x))
        states: list[Tensor] = []
        running: dict[str, list[Tensor]] = {name: [] for name in totals}
        last = dict(totals)
        with checks_deferred() as unseen:
            for _ in range(steps):
                state, info = kernel.step(State(x), level, following, generator=tape)
                if info.keys() != last.keys():
                    raise ValueError(f"steps must report the same info, got {list(info)} after {list(last)}")
                x = state.x
                states.append(x)
                for name, value in info.items():
                    last[name] = last[name] + value
                    running[name].append(last[name])
        if not tape.used_up:
            raise ValueError("steps must draw the same number of random numbers each")
        finite = torch.isfinite(torch.cat([tensor.flatten() for tensor in unseen])).all()
        return Outcome(torch.stack(states), {name: torch.stack(one) for name, one in running.items()}, finite)

    return block


class CapturedBlock:
    """A block of a fixed number of steps as a CUDA graph with buffers of its own; fewer steps are a part of it."""

    def __init__(
        self, block: Block, x: Tensor, totals: Mapping[str, Tensor], draws: Mapping[str, int], steps: int
    ) -> None:
        self.steps, self.draws = steps, draws
        self.x = x.clone()
        self.totals = {name: total.clone() for name, total in totals.items()}
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.numbers = {
            kind: torch.zeros(len(x), count * steps, dtype=dtype, device=x.device)
            for kind, count in draws.items()
            if count > 0
        }
        one = {kind: numbers[:, : draws[kind]] for kind, numbers in self.numbers.items()}

        def recorded() -> Outcome:
            with counting(apart=True) as self.cost:
                return block(self.x, self.totals, self.numbers, self.steps)

        def warm_up() -> None:
            with counting(apart=True):
                block(self.x, self.totals, one, 1)

        self.recording = Recorded(recorded, x.device, warm_up=warm_up, family="blocks")
        self.outcome = self.recording.result

    def __call__(self, x: Tensor, totals: Mapping[str, Tensor], numbers: Numbers, steps: int) -> Outcome:
        self.x.copy_(x)
        for name, total in totals.items():
            self.totals[name].copy_(total)
        for kind, given in numbers.items():
            self.numbers[kind][:, : given.shape[1]] = given  # the steps beyond run with old numbers, and are dropped
        self.recording.replay()
        spend(forwards=self.cost.forwards // self.steps * steps, products=self.cost.products // self.steps * steps)
        totals = {name: running[:steps] for name, running in self.outcome.totals.items()}
        return Outcome(self.outcome.states[:steps], totals, self.outcome.finite)


def prepared(
    step: Step, x: Tensor, totals: Mapping[str, Tensor], draws: Mapping[str, int], steps: int
) -> tuple[Block, int] | None:
    """The block for a run of `steps` equal steps, and its number of steps; None where they are to go one by one.

    `draws` says how many numbers of each kind a step draws of every chain.
    """
    block = block_of(step)
    if x.device.type != "cuda":
        return block, ON_CPU
    length = LONG if steps >= FOR_LONG else SHORT
    try:
        with torch.cuda.device(x.device):
            return CapturedBlock(block, x, totals, draws, length), length
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        reason = first_line(error)
        logger.warning("steps cannot be recorded as a CUDA graph (%s); taking them one by one", reason)
        return None


def suited(step: Step, x: Tensor, steps: int) -> bool:
    """Whether a run of equal steps is worth taking in blocks, and known to be a function of tensors alone."""
    if x.ndim != 2 or x.shape[1] > LARGEST_ROW or x.numel() > LARGEST_STATE or not _known(step.kernel):
        return False
    if x.device.type == "cpu":
        return steps > 2
    if x.device.type != "cuda" or steps < LEAST_ON_GPU or torch.cuda.is_current_stream_capturing():
        return False
    if torch.is_autocast_enabled("cuda"):  # it keeps cast weights, which must not be a recording's own
        return False
    assert isinstance(step.kernel, Gibbs)
    return not isinstance(step.kernel.moments, FullMoments) or closed_form(x.shape[1])


DENOISERS = (EnergyDenoiser, ScoreDenoiser, NoiseDenoiser, CleanDenoiser, VelocityDenoiser, EdmDenoiser)


def _known(kernel: object) -> bool:
    """Gibbs with an estimator of ours and a module without hooks: others' code may count its calls."""
    moments = kernel.moments if type(kernel) is Gibbs else None
    if type(moments) is LearnedMoments:
        network: object = moments.network
    elif isinstance(moments, FullMoments | DiagonalMoments | IsotropicMoments) and type(moments.denoiser) in DENOISERS:
        network = moments.denoiser.network  # type: ignore[attr-defined]
    else:
        return False
    return isinstance(network, nn.Module) and not any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks for module in network.modules()
    )
