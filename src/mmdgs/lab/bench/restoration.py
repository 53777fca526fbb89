"""`mmdgs bench restore`: `mmdgs.restore` against deepinv's moment matching, with one network and one problem."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmdgs.generation import Method, generate, restore
from mmdgs.generation.restored import simulated
from mmdgs.lab import rivals
from mmdgs.lab.bench.timing import Row, timed
from mmdgs.metrics import psnr
from mmdgs.models import load
from mmdgs.operators.named import parse_operator

PLAIN = "deepinv moment matching"
STEPS = 25
"""Those of `mmdgs.restore`."""
WARM_UP = 3


def restoration(
    device: torch.device,
    *,
    model: str = "cifar10",
    operator: str = "sr:4",
    noise: float = 0.05,
    images: int = 2,
    quick: bool = False,
) -> list[Row]:
    """Seconds of one draw an image by each, one run after a warm-up of three steps, and the PSNR of the draws.

    Both have their library's own settings and numbers of steps. The truth are samples of the network itself (Heun),
    so that its prior is right and no data are needed.
    """
    from mmdgs.interop.deepinv import require_deepinv

    require_deepinv()
    network = load(model).to(device)
    found = parse_operator(operator, network.shape)
    truth = generate(network, Method(sampler="heun", steps=6 if quick else None), images, progress="drawing truth").x
    assert truth is not None  # not written to files
    y = simulated(truth.clamp(0, 1).to(device), found, noise, seed=0)
    theirs_steps, our_steps = (3, 3) if quick else (rivals.STEPS[PLAIN], STEPS)
    cost = {}

    def theirs(steps: int) -> Tensor:
        draws, cost["theirs"] = rivals.restore(PLAIN, network, y, found, noise, steps, batch_size=images)
        return draws

    def ours(steps: int) -> Tensor:
        made = restore(network, y, found, noise=noise, steps=steps, draws=1, batch_size=images, progress=None)
        cost["ours"] = made.cost.evaluations
        return made.draws

    def measured(call: Callable[[int], Tensor], steps: int) -> tuple[float, int | None, float]:
        call(WARM_UP)
        kept: list[Tensor] = []
        seconds, memory = timed(lambda: kept.append(call(steps)), device)
        return seconds / images, memory, psnr(kept[0].cpu().clamp(0, 1), truth.cpu()).mean().item()

    plain, plain_memory, plain_psnr = measured(theirs, theirs_steps)
    own, memory, own_psnr = measured(ours, our_steps)
    name = (
        f"{model}, {operator}, noise {noise:g}, {images} images: deepinv's moment matching, {theirs_steps} steps, "
        f"{cost['theirs']:g} evaluations, against restore, {our_steps} steps, {cost['ours']:g} evaluations"
    )
    return [
        Row(name, "s/draw", plain, own, plain_memory=plain_memory, memory=memory, plain_psnr=plain_psnr, psnr=own_psnr)
    ]
