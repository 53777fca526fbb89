"""An amortised diagonal covariance: a small network that says what probes would (optimal covariance matching).

For a denoiser D that stays as it is, with J = dD/dx_t, the posterior's variances are a ratio of the noise's,

    r = Var[x | x_t] / (sigma / alpha)^2 = alpha diag(J),        y = alpha v * (v' J),   E[y | x_t] = r,

v being probes. A head that is regressed on y by squared error learns r itself, whatever the noise of y (Ou et al.,
2024, "Improving probabilistic diffusion models with optimal diagonal covariance matching"). Sampling then takes one
pass of the denoiser and one of the head, and no products with a Jacobian. The head is

    r = b softplus(F(inputs, level) + c),    softplus(c) = 1,    inputs: (x_t - alpha D) / sigma  and  D / d,

where b is the mean of r at a level and d the data's standard deviation: what F sees and what it says is of size 1 at
every level, and F = 0 is the isotropic posterior. Nothing here depends on alpha but through sigma / alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from mmdgs.cost import spend
from mmdgs.denoisers import Denoiser, Network, require_denoiser, takes_level
from mmdgs.jacobians import linearised
from mmdgs.linalg.operators import Diagonal, raise_non_finite
from mmdgs.linalg.repair import lifted
from mmdgs.moments.contract import FLOOR, Floor, floor_at, mean_of, require_batch, require_input
from mmdgs.moments.probes import Lattice, ProbeDesign, Rademacher, probed_diagonal
from mmdgs.noise import LevelTable, NoiseLevel, NoiseLevels, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, Streams

START = math.log(math.e - 1)
"""c, for which softplus(c) = 1."""
FITTED_LEVELS = 24
"""Levels at which the scale of the ratios is measured; between them it is interpolated."""
FIT_ROWS = 16
"""Rows of data at a time where it is measured: with their graph they fit in memory for any network that does."""


@runtime_checkable
class Head(Protocol):
    """The variances of p(x | x_t) as a ratio of the noise's: (x_t, D(x_t), level) -> r, all (B, ...)."""

    def __call__(self, x_t: Tensor, mean: Tensor, level: NoiseLevel | NoiseLevels, /) -> Tensor: ...


def unbiased_design(x: Tensor) -> ProbeDesign:
    """Probes for targets: sublattices for images, whose filter would bias them and is left out; else signs."""
    return Lattice(smooth=False) if x.ndim == 4 else Rademacher()


def ratio_target(
    denoiser: Denoiser,
    x_t: Float[Tensor, "batch ..."],
    level: NoiseLevel | NoiseLevels,
    *,
    generator: Generator,
    probes: int = 1,
    design: ProbeDesign | None = None,
) -> tuple[Float[Tensor, "batch ..."], Float[Tensor, "batch ..."]]:
    """D(x_t), and an unbiased y of r: the mean of alpha v * (v' J) over probes. No graph is left.

    In float32 whatever the precision around it: r is 1 minus nearly 1 where a network predicts strong noise.
    """
    design = unbiased_design(x_t) if design is None else design
    with torch.autocast(x_t.device.type, enabled=False):
        at = linearised(denoiser, x_t, level)
        diagonal, _ = probed_diagonal(at, design, probes, x_t, generator)  # which may make the mean on its way
        return at.mean, level.alpha * diagonal


def spread_places(count: int, most: int) -> set[int]:
    """At most so many of `count` places in a row, evenly spread, both ends among them."""
    return {round(i * (count - 1) / (most - 1)) for i in range(most)}


@dataclass(frozen=True)
class RatioScale:
    """How large ratios and their targets are at each level: what brings a head's outputs and losses to size 1.

    `floors` are what a finished head's ratios are lifted to: the likeliest for the errors of its denoiser. A Jacobian
    does not know those, and a head has no negative values that would tell (linalg/repair.py).
    """

    ratios: tuple[float, ...]  # sigma / alpha, rising
    means: tuple[float, ...]  # of r there
    spreads: tuple[float, ...]  # root mean squares of the targets y
    data_std: float = 1.0
    floors: tuple[float, ...] = ()  # of r there; none: not fitted

    def __post_init__(self) -> None:
        for name in ("ratios", "means", "spreads", "floors"):
            values = tuple(float(value) for value in getattr(self, name))
            object.__setattr__(self, name, values)
            if name == "floors" and not values:
                continue
            if not values or len(values) != len(self.ratios) or not all(0 < v < math.inf for v in values):
                raise ValueError(f"{name} must be positive numbers, one for each of {len(self.ratios)} levels")
        self._means  # noqa: B018  made to be checked: ratios must rise
        if not 0 < self.data_std < math.inf:
            raise ValueError(f"data_std must be positive and finite, got {self.data_std}")

    @classmethod
    def fit(
        cls,
        denoiser: Denoiser,
        x: Float[Tensor, "data ..."],
        levels: Sequence[NoiseLevel],
        *,
        seed: int,
        probes: int = 1,
        design: ProbeDesign | None = None,
    ) -> RatioScale:
        """Measured on clean data x with probes, at some of the levels (the noisiest first)."""
        require_batch(x)
        places = sorted(spread_places(len(levels), FITTED_LEVELS), reverse=True)
        means, spreads = [], []
        for place in places:
            found = []
            for first in range(0, len(x), FIT_ROWS):
                part = x[first : first + FIT_ROWS]
                streams = Streams(seed, len(part), first_row=place * len(x) + first)
                x_t = add_noise(part, levels[place], generator=streams)
                found.append(
                    ratio_target(denoiser, x_t, levels[place], generator=streams, probes=probes, design=design)[1]
                )
            y = torch.cat(found).double()
            raise_non_finite(f"variance ratios at {levels[place]}", y)
            means.append(max(y.mean().item(), FLOOR))
            spreads.append(max(y.square().mean().sqrt().item(), FLOOR))
        ratios = [levels[place].sigma / levels[place].alpha for place in places]
        return cls(tuple(ratios), tuple(means), tuple(spreads), max(x.double().std().item(), FLOOR))

    def to_json(self) -> dict[str, Any]:
        """The arguments of this scale, as JSON has them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def mean(self, level: NoiseLevel | NoiseLevels) -> float | Tensor:
        """b, the mean of r at a level."""
        return self._means[level]

    def floor(self, level: NoiseLevel) -> float | None:
        """The floor of r at a level, where one was fitted."""
        return self._floors[level] if self.floors else None

    def weight(self, level: NoiseLevel | NoiseLevels) -> float | Tensor:
        """One over the mean square of a target: levels count alike in a loss."""
        return self._spreads[level] ** -2

    @cached_property
    def _means(self) -> LevelTable:
        return LevelTable(self.ratios, self.means)

    @cached_property
    def _spreads(self) -> LevelTable:
        return LevelTable(self.ratios, self.spreads)

    @cached_property
    def _floors(self) -> LevelTable:
        return LevelTable(self.ratios, self.floors)


@dataclass(frozen=True)
class RatioHead:
    """A network F with twice the data's channels in and as many out, as a head; `scale` brings both to size 1."""

    network: Network
    scale: RatioScale
    with_level: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "with_level", takes_level(self.network))

    def __call__(self, x_t: Tensor, mean: Tensor, level: NoiseLevel | NoiseLevels, /) -> Tensor:
        noise = (x_t - level.alpha * mean) / level.sigma
        inputs = torch.cat([noise, mean / self.scale.data_std], dim=1)
        out = self.network(inputs, level) if self.with_level else self.network(inputs)
        if out.shape != x_t.shape:
            raise ValueError(
                f"the head's network must return the data's shape {tuple(x_t.shape)}, got {tuple(out.shape)}"
            )
        return self.scale.mean(level) * functional.softplus(out.to(x_t.dtype) + START)


@dataclass(frozen=True)
class OcmMoments:
    """The diagonal of the covariance by a head: one pass of the denoiser and one of the head, which counts as much.

    Variances below floor (sigma / alpha)^2 are lifted to it, as in DiagonalMoments. None takes the floor that was
    fitted when the head was trained (`RatioScale.floors`), or the rule of linalg/repair.py where there is none.
    """

    denoiser: Denoiser
    head: Head
    floor: Floor = None

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        mean = mean_of(self.denoiser, x_t, level)
        spend(forwards=1)
        with torch.no_grad():
            ratio = self.head(x_t, mean, level)
        if ratio.shape != x_t.shape:
            raise ValueError(f"the head must return its input's shape {tuple(x_t.shape)}, got {tuple(ratio.shape)}")
        raise_non_finite("denoising covariance", ratio)
        values, repaired = lifted(level.variance * ratio, *floor_at(level, self.own_floor(level)))
        return Gaussian(mean, Diagonal(values), repaired)

    def own_floor(self, level: NoiseLevel) -> Floor:
        """The floor at a level: the one that was given, or the head's."""
        return self.head.scale.floor(level) if self.floor is None and isinstance(self.head, RatioHead) else self.floor
