"""Samples of a model: many single-level Gibbs chains from noise, in batches that fit in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.models import Model
from mmdgs.moments import Moments
from mmdgs.noise import CLEAN
from mmdgs.randomness import Streams, randn, uniforms
from mmdgs.runtime import progress_bar
from mmdgs.samplers import Gibbs, State, run
from mmdgs.samplers.kernel import Info

BATCH_NUMBERS = {"cuda": 1 << 19, "cpu": 1 << 16}
"""Numbers in the states of the chains that run at once: 668 digits on a GPU, 83 on a CPU."""


@dataclass(frozen=True)
class Sampled:
    """Chains at the steps asked for, (kept, chains, ...), and the fraction of variances that were repaired."""

    x: Float[Tensor, "kept chains ..."]
    steps: tuple[int, ...]
    repaired: float


def start_from_noise(shape: Sequence[int], chains: int, *, seed: int, first_chain: int = 0) -> Tensor:
    """Where chains start: uniform noise in [0, 1) for images, standard normal for points; one stream a chain."""
    streams = Streams(seed, chains, first_chain)
    draw = uniforms if len(shape) == 3 else randn
    return draw((chains, *shape), torch.empty(0), streams)


def sample(
    model: Model,
    chains: int,
    *,
    steps: int = 20,
    posterior: Moments | None = None,
    keep: Sequence[int] | None = None,
    start: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: str | None = "sampling",
) -> Sampled:
    """Run Gibbs chains of a model at its noise level; keep the states after some steps (0: the start), or the last.

    Chain c depends on (seed, c) alone. `posterior` stands in place of `model.posterior()`.
    """
    if chains < 1 or steps < 1:
        raise ValueError(f"need at least one chain and one step, got {chains=}, {steps=}")
    kept = (steps,) if keep is None else tuple(keep)
    if any(not 0 <= t <= steps for t in kept):
        raise ValueError(f"keep must hold steps between 0 and {steps}, got {kept}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    device = next(model.network.parameters()).device
    shape = model.config.shape
    if start is not None and start.shape != (chains, *shape):
        raise ValueError(f"start must have shape {(chains, *shape)}, got {tuple(start.shape)}")
    size = batch_size or max(1, BATCH_NUMBERS.get(device.type, BATCH_NUMBERS["cpu"]) // math.prod(shape))
    kernel = Gibbs(posterior or model.posterior())
    found = torch.empty(len(kept), chains, *shape)
    repaired = 0.0
    with progress_bar(chains * steps, progress, unit="chain-step") as bar:
        for first in range(0, chains, size):
            count = min(size, chains - first)
            if start is None:
                x0 = start_from_noise(shape, count, seed=seed, first_chain=first)
            else:
                x0 = start[first : first + count]
            rows = slice(first, first + count)

            def note(step: int, state: State, info: Info, rows: slice = rows, count: int = count) -> None:
                for i, t in enumerate(kept):
                    if t == step + 1:
                        found[i, rows] = state.x.cpu()
                bar.update(count)

            for i, t in enumerate(kept):
                if t == 0:
                    found[i, rows] = x0.cpu()
            # The start took the first numbers of each chain's stream of another seed: no number is used twice.
            result = run(
                kernel,
                x0.to(device),
                [(model.level, CLEAN)] * steps,
                seed=seed + 1,
                first_chain=first,
                burn_in=steps - 1,
                callback=note,
                progress=None,
            )
            repaired += result.repaired * count / chains
    return Sampled(found, kept, repaired)
