"""Mirrored sampling: draw clean data, and go to the next level with the noise that was there, turned round.

    x ~ q(x | x_t),      x_s = alpha_s x - (sigma_s / sigma_t) (x_t - alpha_t x)

Given x the noise e of x_t = alpha_t x + sigma_t e is Gaussian, and -e is as likely as e. So x_s has the law of level s
wherever x_t had that of level t and q is exact, as with the bridge (ancestral.py), which keeps sigma_s / sigma_t of the
noise and draws the rest. They differ where q is not exact. What q takes for noise by mistake is a part of x, such as
the component of a mixture that x_t speaks for. The bridge carries it on to the next level; here it changes its sign.

This is for few levels and a covariance that is near the true one: each step is a whole draw of q, so that more levels
do not make up for a poor one, as they do with the bridge.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmdgs.moments import Moments
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.randomness import Generator
from mmdgs.samplers.kernel import Info, State, finite


@dataclass(frozen=True)
class Mirrored:
    """A draw of q(x | x_t), and the noise of x_t turned round; to clean data it gives the draw."""

    moments: Moments

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        x, info = self.moments(state.x, level, generator=generator).sample_with_info(generator=generator)
        if following != CLEAN:
            x = following.alpha * x - (following.sigma / level.sigma) * (state.x - level.alpha * x)
        return State(finite(x)), info
