"""A network that predicts mean and variance itself: the KL-trained baseline."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import spend
from mmdgs.denoisers import Network, takes_level
from mmdgs.linalg.operators import Diagonal
from mmdgs.moments.checks import check_denoiser
from mmdgs.moments.contract import require_input
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator


@dataclass(frozen=True)
class LearnedMean:
    """The mean of a network that predicts (mean, log_std): a denoiser."""

    network: Network = field(repr=False)
    with_level: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "with_level", takes_level(self.network))

    def __call__(self, x_t: Tensor, level: NoiseLevel | NoiseLevels, /) -> Tensor:
        return self.both(x_t, level)[0]

    def both(self, x_t: Tensor, level: NoiseLevel | NoiseLevels) -> tuple[Tensor, Tensor]:
        """The network's mean and log standard deviation."""
        out = self.network(x_t, level) if self.with_level else self.network(x_t)
        pair = out.chunk(2, dim=1) if isinstance(out, Tensor) and out.ndim > 1 else tuple(out)
        if len(pair) != 2 or any(part.shape != x_t.shape for part in pair):
            got = tuple(out.shape) if isinstance(out, Tensor) else [tuple(part.shape) for part in pair]
            raise ValueError(
                f"the network must return (mean, log_std), each of shape {tuple(x_t.shape)}, "
                f"or both along dimension 1; got {got}"
            )
        return pair[0], pair[1]


@dataclass(frozen=True)
class LearnedMoments:
    """A network that predicts the mean and the log standard deviation (Bengio et al., 2013; losses.kl).

    The network returns the pair (mean, log_std), or one tensor with both along dimension 1.
    """

    network: Network = field(repr=False)
    denoiser: LearnedMean = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "denoiser", LearnedMean(self.network))

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel | NoiseLevels, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level)
        spend(forwards=1)
        mean, log_std = self.denoiser.both(x_t, level)
        check_denoiser(self.denoiser, x_t, level, mean)
        return Gaussian(mean, Diagonal((2 * log_std).exp()))
