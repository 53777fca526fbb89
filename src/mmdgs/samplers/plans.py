"""Plans: which kernel at which pair of levels, from noise to clean data; `run` follows them.

    Plan.down(DDIM(denoiser, eta=0.5), levels)      one kernel, a step a level
    gibbs_plan(moments, levels, sweeps=3)           several steps a level

`levels` go from the noisiest to the cleanest (mmdgs.schedules). A plan's chains start from noise at
its first level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser
from mmdgs.moments import Moments
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.randomness import Generator, randn
from mmdgs.samplers.ancestral import Ancestral
from mmdgs.samplers.deterministic import Denoise
from mmdgs.samplers.gibbs import Gibbs, GibbsFromAbove, GibbsMean
from mmdgs.samplers.kernel import Kernel
from mmdgs.samplers.langevin import Langevin, suggested_rate


class Step(NamedTuple):
    """A kernel and the pair of levels it is run at."""

    kernel: Kernel
    level: NoiseLevel
    following: NoiseLevel


@dataclass(frozen=True)
class Plan:
    """The steps of a sampler, in order, and the level its chains start at."""

    start: NoiseLevel
    steps: tuple[Step, ...]

    @classmethod
    def along(cls, kernel: Kernel, path: Sequence[tuple[NoiseLevel, NoiseLevel]]) -> Plan:
        """One kernel along (level, following) pairs; chains start at the first level."""
        if not path:
            raise ValueError("a plan needs at least one pair of levels, got none")
        return cls(path[0][0], tuple(Step(kernel, *pair) for pair in path))

    @classmethod
    def down(cls, kernel: Kernel, levels: Sequence[NoiseLevel]) -> Plan:
        """One step of a kernel for each pair of neighbouring levels, and one to clean data."""
        return cls.along(kernel, list(pairwise([*_ordered(levels), CLEAN])))

    def noise(
        self, shape: Sequence[int], chains: int, *, generator: Generator, centre: float = 0.0
    ) -> Tensor:
        """Where chains start: noise of the first level around the data's centre."""
        noise = randn((chains, *shape), torch.empty(0), generator)
        return self.start.alpha * centre + self.start.sigma * noise


def _ordered(levels: Sequence[NoiseLevel], least: int = 1) -> list[NoiseLevel]:
    if len(levels) < least:
        raise ValueError(f"need at least {least} noise levels, got {len(levels)}")
    for noisier, cleaner in pairwise(levels):
        if noisier.ratio <= cleaner.ratio:
            raise ValueError(
                f"levels are in the wrong order: {noisier} comes before {cleaner}; give the "
                "noisiest first (largest sigma / alpha), and none twice"
            )
    return list(levels)


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def gibbs_plan(
    moments: Moments, levels: Sequence[NoiseLevel], *, sweeps: int = 3, noise_first: bool = True
) -> Plan:
    """Multi-level pseudo-Gibbs, Algorithm 2: `sweeps` up and down at each pair of levels, then D.

    As printed it needs a level above the first and leaves out the last pair; here every pair of
    neighbours is visited. As the paper has it every sweep begins with noise, though the state comes
    from the noisier level already: the variance of a Gaussian comes out too large by one part in 2
    sweeps - 1, however many levels there are, where the starting noise is much larger than the data
    (docs/results/samplers.md). With `noise_first=False` the first sweep of a pair only goes down,
    as in ancestral sampling, and the law converges.
    """
    levels = _ordered(levels, 2)
    _positive("sweeps", sweeps)
    first: Kernel = GibbsFromAbove(moments) if noise_first else Ancestral(moments)
    kernels = [first, *[Gibbs(moments)] * (sweeps - 1)]
    steps = [Step(kernel, *pair) for pair in pairwise(levels) for kernel in kernels]
    return Plan(levels[0], (*steps, Step(Denoise(moments.denoiser), levels[-1], CLEAN)))


def single_level_plan(
    post: Moments | Kernel, level: NoiseLevel, *, steps: int, mean: bool = False
) -> Plan:
    """Single-level pseudo-Gibbs: sweeps between a level and clean data, by estimator or kernel.

    With `mean` the last sweep ends in the posterior's mean: no noise stays in the sample.
    """
    _positive("steps", steps)
    plan = Plan.along(post if isinstance(post, Kernel) else Gibbs(post), [(level, CLEAN)] * steps)
    if not mean:
        return plan
    if isinstance(post, Kernel):
        raise ValueError(f"mean=True needs a moments estimator, got {type(post).__name__}")
    return Plan(level, (*plan.steps[:-1], Step(GibbsMean(post.denoiser), level, CLEAN)))


def langevin_plan(
    denoiser: Denoiser,
    levels: Sequence[NoiseLevel],
    *,
    steps: int = 5,
    rate: float | None = None,
    final: bool = True,
) -> Plan:
    """Annealed Langevin dynamics, Algorithm 1: `steps` at each level, then (where `final`) D.

    As printed it takes no steps at the last level; here it does, as NCSNv2's code. The default rate
    is the one that NCSNv2's analysis suggests for the levels and steps (`suggested_rate`).
    """
    levels = _ordered(levels)
    _positive("steps", steps)
    kernel = Langevin(denoiser, suggested_rate(levels, steps) if rate is None else rate)
    walk = []
    for level, following in pairwise([*levels, levels[-1]]):
        walk += [Step(kernel, level, level)] * (steps - 1) + [Step(kernel, level, following)]
    return Plan(levels[0], (*walk, *[Step(Denoise(denoiser), levels[-1], CLEAN)] * final))


def ancestral_plan(
    moments: Moments,
    levels: Sequence[NoiseLevel],
    *,
    last_noise: float | None = None,
    mean_last: bool = True,
) -> Plan:
    """Ancestral sampling with an estimator's covariance.

    `last_noise` bounds the mean absolute value of what is drawn on the way into the cleanest level
    (ancestral.py). With `mean_last=False` the last step draws clean data in place of their mean.
    """
    plan = Plan.down(Ancestral(moments, mean_last=mean_last), levels)
    if last_noise is None or len(plan.steps) < 2:
        return plan
    *above, into, out = plan.steps
    return Plan(plan.start, (*above, into._replace(kernel=Ancestral(moments, last_noise)), out))
