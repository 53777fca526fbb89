"""Gibbs kernels: noise up, then sample the denoising posterior down.

A step at the pair (t, s) draws x_t ~ p(x_t | x_s) by the forward kernel and x_s ~ q(x_s | x_t) by
the posterior's bridge. With s = clean this is single-level Gibbs; along a path of levels it is
Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmdgs.denoisers import Denoiser
from mmdgs.linalg.operators import looks_finite, raise_non_finite
from mmdgs.moments import Moments
from mmdgs.noise import CLEAN, NoiseLevel, add_noise, transition
from mmdgs.randomness import Generator
from mmdgs.samplers.deterministic import Denoise
from mmdgs.samplers.kernel import Info, State, finite
from mmdgs.targets import GaussianMixture


@dataclass(frozen=True)
class Gibbs:
    """Pseudo-Gibbs with a Gaussian approximation of p(x | x_t), from any moments estimator."""

    moments: Moments

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        x_t = add_noise(state.x, level, generator=generator, start=following)
        q = self.moments(x_t, level, generator=generator)
        x, info = q.bridge(x_t, level, following).sample_with_info(generator=generator)
        if not looks_finite(x):
            raise_non_finite("denoising mean", q.mean)
            raise_non_finite("denoising covariance", q.cov.diagonal())
            raise_non_finite("sampled state", x)
        return State(x), info


@dataclass(frozen=True)
class GibbsFromAbove:
    """The first sweep at a pair (t, s) in Algorithm 2: the state at t is taken for one at s."""

    moments: Moments

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        taken = State(state.x * (following.alpha / level.alpha))
        return Gibbs(self.moments).step(taken, level, following, generator=generator)


@dataclass(frozen=True)
class GibbsMean:
    """Noise up, and the posterior's mean: a last step that leaves no noise in the sample."""

    denoiser: Denoiser

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        if following != CLEAN:
            raise ValueError(f"the mean is that of clean data; got a step to {following}")
        noisy = State(add_noise(state.x, level, generator=generator))
        return Denoise(self.denoiser).step(noisy, level, CLEAN, generator=generator)


@dataclass(frozen=True)
class ExactGibbs:
    """Gibbs with the true p(x_s | x_t) of a mixture, which it leaves invariant at level s."""

    mixture: GaussianMixture

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        x_t = add_noise(state.x, level, generator=generator, start=following)
        mixture = self.mixture
        if following != CLEAN:
            # Seen from level s, x_s is a mixture itself (the noised one), and x_t = a x_s + b e.
            a, b = transition(following, level)
            mixture, level = mixture.noised(following), NoiseLevel(alpha=a, sigma=b)
        x = mixture.posterior(x_t, level).sample(generator=generator)
        return State(finite(x)), {}
