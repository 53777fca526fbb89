"""`mmdgs bench sampler`: multi-level Gibbs with probes, the paper's Algorithm 2, against a plain loop.

The plain loop shares nothing: a sweep at the pair (t, s) is a draw of noise, one forward pass for the mean, one forward
and one backward pass for each probe, and the draw of x_s, with alpha = 1:

    x_t = x_s + b e,   b^2 = sigma_t^2 - sigma_s^2,   g = b^2 / sigma_t^2
    x_s = g D(x_t) + (1 - g) x_t + sqrt(g^2 C + sigma_s^2 g) e
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError
from mmdgs.generation.methods import exploding_levels
from mmdgs.lab.bench.diagonals import awake, plain_moments
from mmdgs.lab.bench.timing import REPEATS, Row, Work, compiled_at_once, measure, row
from mmdgs.models import Model, from_pretrained
from mmdgs.moments import DiagonalMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, randn_like, seeded
from mmdgs.runtime import autocast, check_precision, matmul_precision
from mmdgs.samplers import gibbs_plan, run
from mmdgs.training import Recipe, new_model

DEFAULTS = {"cuda": ("unet-paper", (3, 32, 32), 100), "cpu": ("unet-tiny", (1, 16, 16), 4)}
"""Where no model is named: a preset with random weights, the shape of its images, and the batch."""

LEVELS = "geometric:100:50:0.01"


def plain_gibbs(
    denoiser: Denoiser, x: Tensor, levels: Sequence[NoiseLevel], sweeps: int, probes: int, generator: Generator
) -> Tensor:
    """Algorithm 2 as one writes it down first, at levels with alpha = 1."""
    for level, following in pairwise(levels):
        b = (level.sigma**2 - following.sigma**2) ** 0.5
        gain = b**2 / level.sigma**2
        for _ in range(sweeps):
            x_t = x + b * randn_like(x, generator)
            mean, variances = plain_moments(denoiser, x_t, level, probes, generator)
            spread = (gain**2 * variances + following.sigma**2 * gain).sqrt()
            x = gain * mean + (1 - gain) * x_t + spread * randn_like(x, generator)
    with torch.no_grad():
        return denoiser(x, levels[-1])


def random_model(preset: str, shape: tuple[int, int, int]) -> Model:
    """A network of many levels with random weights."""
    model = new_model(Recipe(model=preset, param="edm", levels=LEVELS), shape)
    awake(model.network).eval()
    return from_pretrained(model)


def sampler(
    device: torch.device,
    *,
    model: str | None = None,
    levels_count: int = 4,
    sweeps: int = 3,
    probes: int = 3,
    batch: int | None = None,
    precision: str = "float32",
    quick: bool = False,
) -> list[Row]:
    """Seconds of an image's step, over a few levels of a model: a preset with random weights, or a pretrained one."""
    check_precision(precision)
    for name, value, least in (("levels-count", levels_count, 2), ("sweeps", sweeps, 1), ("probes", probes, 1)):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}")
    preset, shape, usual = DEFAULTS.get(device.type, DEFAULTS["cpu"])
    pretrained = (random_model(preset, shape) if model is None else from_pretrained(model)).to(device)
    if len(pretrained.levels) < 2:
        raise UsageError(f"{model!r} was trained at one noise level; multi-level Gibbs needs a model of many")
    batch = batch or usual
    levels = exploding_levels(pretrained, 2 if quick else levels_count)
    plan = gibbs_plan(DiagonalMoments(pretrained, probes=probes, design=Rademacher()), levels, sweeps=sweeps)
    x0 = plan.noise(pretrained.shape, batch, generator=seeded(1)).to(device)
    generator = seeded(0, device=device)

    def ours() -> None:
        with matmul_precision(precision), autocast(precision, device), compiled_at_once(device):
            run(plan, x0, progress=None)

    steps = batch * sweeps * (len(levels) - 1)
    base, found = measure(
        [
            Work(lambda: plain_gibbs(pretrained, x0, levels, sweeps, probes, generator), steps),
            Work(ours, steps),
        ],
        device,
        repeats=1 if quick else REPEATS,
    )
    what = f"{preset}, random" if model is None else model
    name = f"Gibbs, {what}, {'x'.join(map(str, pretrained.shape))}, batch {batch}, {len(levels)} levels, "
    return [row(name + f"{sweeps} sweeps, {probes} probes", "s/image-step", base, found, precision=precision)]
