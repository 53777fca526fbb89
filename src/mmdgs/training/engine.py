"""The training loop: Adam on a per-example loss, over shuffled data held in memory.

The data order and the noise come from the seed alone, so the same seed gives the same losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmdgs.errors import NonFiniteError
from mmdgs.progress import progress_bar
from mmdgs.randomness import seeded
from mmdgs.threads import stop_if_asked

PerExampleLoss = Callable[[Tensor, torch.Generator], Tensor]
"""(batch of clean x, generator) -> one loss per example."""


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; the defaults are the authors' for the 2-D networks (10,000 steps of 100, Adam 1e-4)."""

    steps: int = 10_000
    batch_size: int = 100
    learning_rate: float = 1e-4
    decay: bool = False  # cosine decay of the learning rate to zero
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")


def train(
    network: nn.Module,
    loss: PerExampleLoss,
    data: Tensor,
    settings: TrainingSettings,
    *,
    progress: str | None = "training",
) -> Tensor:
    """Train `network` in place on data (n, ...); returns the mean loss of every step, (steps,)."""
    if len(data) == 0 or not data.is_floating_point() or not torch.isfinite(data).all():
        raise ValueError(f"data must be non-empty, floating point and finite, got {data.dtype} {tuple(data.shape)}")
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=settings.learning_rate, fused=data.device.type in ("cpu", "cuda"))
    order, noise = seeded(settings.seed), seeded(settings.seed + 1, _generator_device(data))
    batch_size = min(settings.batch_size, len(data))
    losses = torch.empty(settings.steps, device=data.device)
    bar = progress_bar(settings.steps, progress)
    network.train()
    permutation, at = torch.randperm(len(data), generator=order), 0
    with bar:
        for step in range(settings.steps):
            stop_if_asked()
            if settings.decay:
                for group in optimiser.param_groups:
                    group["lr"] = settings.learning_rate * _cosine(step / settings.steps)
            if at + batch_size > len(data):
                permutation, at = torch.randperm(len(data), generator=order), 0
            batch = data[permutation[at : at + batch_size].to(data.device)]
            at += batch_size
            value = loss(batch, noise).mean()
            optimiser.zero_grad(set_to_none=True)
            value.backward()
            optimiser.step()
            losses[step] = value.detach()
            if step % 100 == 99 or step == settings.steps - 1:
                first = max(0, step - 99)
                recent = losses[first : step + 1]
                _require_finite(recent, first)
                bar.set_postfix(loss=f"{recent.mean().item():.4g}", refresh=False)
            bar.update()
    network.eval()
    return losses.cpu()


def _generator_device(data: Tensor) -> torch.device:
    # MPS generators exist, but a CPU one gives the same numbers everywhere; CUDA draws on the device for speed.
    return data.device if data.device.type == "cuda" else torch.device("cpu")


def _cosine(fraction: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * fraction))


def _require_finite(losses: Tensor, first: int) -> None:
    """Stop where one of the losses, counted from step `first`, is not finite."""
    bad = (~torch.isfinite(losses)).nonzero().flatten()
    if len(bad):
        raise NonFiniteError("training loss", [], first + int(bad[0]), advice="try a smaller learning rate")
