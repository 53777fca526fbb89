"""Which noise level each example is trained at: drawn from the example's own random stream.

So the level of an example, like its noise, does not depend on how the batch is cut or shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.randomness import Generator, randn, uniforms

LevelDraw = Callable[[Tensor, Generator], NoiseLevel | NoiseLevels]
"""(batch (B, ...), generator) -> the level of all rows, or one for each."""

LOG_MEAN, LOG_STD = -1.2, 1.2
"""Of log(sigma / alpha) in EDM's training (Karras et al., 2022, table 1)."""


class UniformDraw:
    """One of some levels for each row, each as likely as any other."""

    def __init__(self, levels: Sequence[NoiseLevel]) -> None:
        self.count = len(levels)
        self.table = torch.tensor([[level.alpha, level.sigma] for level in levels], dtype=torch.float64)

    def __call__(self, x: Tensor, generator: Generator) -> NoiseLevels:
        self.table = self.table.to(x)
        drawn = uniforms((len(x), 1), x, generator)[:, 0]
        index = (drawn * self.count).long().clamp(max=self.count - 1)
        rows = self.table[index].reshape(len(x), 2, *[1] * (x.ndim - 1))
        return NoiseLevels(alpha=rows[:, 0], sigma=rows[:, 1])


class LogNormalDraw:
    """log(sigma / alpha) normal for each row, cut off at the ends of some levels (Karras et al., 2022).

    Not one of the levels but any between their ends, with their kind of alpha: 1, or variance preserving.
    """

    def __init__(self, levels: Sequence[NoiseLevel]) -> None:
        self.preserving = all(abs(level.alpha**2 + level.sigma**2 - 1) < 1e-6 for level in levels)
        if not self.preserving and any(level.alpha != 1 for level in levels):
            raise UsageError("the log-normal draw needs levels with alpha = 1 or alpha^2 + sigma^2 = 1; use uniform")
        ratios = [level.sigma / level.alpha for level in levels]
        self.ends = math.log(min(ratios)), math.log(max(ratios))

    def __call__(self, x: Tensor, generator: Generator) -> NoiseLevels:
        normal = randn((len(x), 1), x, generator).reshape(-1, *[1] * (x.ndim - 1))
        ratio = (LOG_MEAN + LOG_STD * normal).clamp(*self.ends).exp()
        alpha = (1 + ratio**2).rsqrt() if self.preserving else torch.ones_like(ratio)
        return NoiseLevels(alpha=alpha, sigma=alpha * ratio)


class MixedDraw:
    """For each row one of the two draws above, each with probability 1/2.

    The log-normal draw has the levels where images take shape, but of 50 and below almost none above 5 (one in a
    hundred), where samplers that visit every level, as Gibbs and Langevin do, need a denoiser too.
    """

    def __init__(self, levels: Sequence[NoiseLevel]) -> None:
        self.uniform, self.lognormal = UniformDraw(levels), LogNormalDraw(levels)

    def __call__(self, x: Tensor, generator: Generator) -> NoiseLevels:
        one, other = self.uniform(x, generator), self.lognormal(x, generator)
        coin = uniforms((len(x), 1), x, generator).reshape(-1, *[1] * (x.ndim - 1)) < 0.5
        return NoiseLevels(
            alpha=torch.where(coin, one.alpha, other.alpha), sigma=torch.where(coin, one.sigma, other.sigma)
        )


DRAWS: dict[str, Callable[[Sequence[NoiseLevel]], LevelDraw]] = {
    "uniform": UniformDraw,
    "lognormal": LogNormalDraw,
    "mixed": MixedDraw,
}
"""The draws by name, for recipes."""


def level_draw(levels: Sequence[NoiseLevel], name: str | None = None) -> LevelDraw:
    """How to draw a level for each row; of one level there is nothing to draw."""
    if len(levels) > 1:
        return DRAWS[name or "uniform"](levels)
    (only,) = levels
    return lambda x, generator: only


def jittered(level: NoiseLevel | NoiseLevels, jitter: float, x: Tensor, generator: Generator) -> NoiseLevels:
    """Levels off by up to a factor e^jitter either way, log-uniformly: what a denoiser is told of its input's noise.

    A network that was told so in training looks for itself, as one that is told nothing does, but in a narrow range:
    it forgives samplers whose states have more or less noise than they say (docs/samplers.md).
    """
    drawn = uniforms((len(x), 1), x, generator).reshape(-1, *[1] * (x.ndim - 1))
    alpha = level.alpha if isinstance(level.alpha, Tensor) else torch.full_like(drawn, level.alpha)
    return NoiseLevels(alpha=alpha, sigma=level.sigma * (jitter * (2 * drawn - 1)).exp())
