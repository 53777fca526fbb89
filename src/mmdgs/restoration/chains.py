"""The chains of restoration: kernels with means or draws of p(x | x_t, y), down the levels.

multistep   samplers/deterministic.py: its means, by the SDE with fresh noise at every level; at
            the last a draw
bridge      samplers/ancestral.py: draws of it, level by level
mirrored    samplers/ancestral.py: draws nearer to the truth, which spread too little
particles   samplers/particles.py: bridges with weights, and the evidence of y
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mmdgs import samplers
from mmdgs.moments import GivenMoments
from mmdgs.moments.given import GivenDenoiser
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator
from mmdgs.restoration.settings import MIRRORED, MULTISTEP, RESAMPLED_BELOW
from mmdgs.samplers import Info, Plan, State


def restoration_plan(
    given: GivenMoments,
    levels: Sequence[NoiseLevel],
    chains: str,
    particles: int = 1,
    resample: float = RESAMPLED_BELOW,
    inflation: float | None = None,
) -> Plan:
    """Chains of one of `CHAINS` down the levels, to draws of p(x | y)."""
    if particles > 1:
        return Plan.down(samplers.TwistedParticles(given, particles, resample), levels)
    bridge = samplers.ancestral_plan(given, levels, mean_last=False)
    if chains == MULTISTEP:
        *above, last = bridge.steps
        kernel = _ByMeans(given.denoiser, inflation or 1.0)
        return replace(bridge, steps=(*(step._replace(kernel=kernel) for step in above), last))
    return Plan.down(samplers.Mirrored(given), levels) if chains == MIRRORED else bridge


@dataclass(frozen=True)
class _ByMeans:
    """`Multistep` with noise along conditioned means, with new probes; tells of systems solved."""

    denoiser: GivenDenoiser
    inflation: float

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        solved: dict[str, Tensor] = {}

        def mean(x_t: Tensor, level: NoiseLevel) -> Tensor:
            x, info = self.denoiser.with_info(x_t, level, generator=generator)
            solved.update(info)
            return x

        kernel = samplers.Multistep(mean, eta=1.0, midpoint=True, inflation=self.inflation)
        return kernel.step(state, level, following, generator=generator)[0], solved
