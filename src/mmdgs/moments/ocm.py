"""An amortised diagonal covariance by optimal covariance matching: a head that replaces probes.

For a denoiser D that stays as it is, with J = dD/dx_t, the posterior's variances are a ratio of the
noise's,

    r = Var[x | x_t] / (sigma / alpha)^2 = alpha diag(J),    y = alpha v * (v' J),   E[y | x_t] = r,

v being probes. A head that is regressed on y by squared error learns r itself, whatever the noise
of y (Ou et al., 2024). Sampling then takes no products with a Jacobian. The head is

    r = b softplus(F(inputs, level) + c),  softplus(c) = 1,   inputs (x_t - alpha D) / sigma, D / d,

where b is the mean of r at a level and d the data's standard deviation: what F sees and says is of
size 1 at every level, and F = 0 is the isotropic posterior.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.cost import spend
from mmdgs.denoisers import Denoiser, Network, require_denoiser, takes_level
from mmdgs.errors import require_shape
from mmdgs.jacobians import linearised
from mmdgs.linalg.operators import Diagonal, raise_non_finite
from mmdgs.linalg.repair import lifted
from mmdgs.moments.contract import FLOOR, Floor, floor_at, mean_of, require_batch, require_input
from mmdgs.moments.heads import head_inputs
from mmdgs.moments.probes import Lattice, ProbeDesign, Rademacher, probed_diagonal
from mmdgs.noise import AnyLevel, LevelTable, NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, Streams

START = math.log(math.e - 1)  # c, for which softplus(c) = 1
FITTED_LEVELS = 24  # at which the scale of the ratios is measured; interpolated between them
FIT_ROWS = 16  # of data at a time: with their graph they fit in memory for any network that does


@runtime_checkable
class Head(Protocol):
    """The variances of p(x | x_t) as a ratio of the noise's: (x_t, D(x_t), level) -> r (B, ...)."""

    def __call__(self, x_t: Tensor, mean: Tensor, level: AnyLevel, /) -> Tensor: ...


def unbiased_design(x: Tensor) -> ProbeDesign:
    """Probes for targets: sublattices without their filter for images, else signs."""
    return Lattice(smooth=False) if x.ndim == 4 else Rademacher()


def ratio_target(
    denoiser: Denoiser,
    x_t: Tensor,
    level: AnyLevel,
    *,
    generator: Generator,
    probes: int = 1,
    design: ProbeDesign | None = None,
) -> tuple[Tensor, Tensor]:
    """D(x_t), and an unbiased y of r, the mean of alpha v * (v' J) over probes, (B, ...) each.

    In float32 whatever the precision around it: r is 1 minus nearly 1 where a network predicts
    strong noise.
    """
    design = unbiased_design(x_t) if design is None else design
    with torch.autocast(x_t.device.type, enabled=False):
        at = linearised(denoiser, x_t, level)
        # The products may make the mean on their way.
        diagonal, _ = probed_diagonal(at, design, probes, x_t, generator)
        return at.mean, level.alpha * diagonal


def spread_places(count: int, most: int) -> set[int]:
    """At most so many of `count` places in a row, evenly spread, both ends among them."""
    return {round(i * (count - 1) / (most - 1)) for i in range(most)}


@dataclass(frozen=True)
class RatioScale:
    """How large ratios and their targets are at each level: brings outputs and losses to size 1.

    `floors` are what a finished head's ratios are lifted to: the likeliest for the errors of its
    denoiser, which a Jacobian does not know, and a head has no negative values that would tell.
    """

    ratios: tuple[float, ...]  # sigma / alpha, rising
    means: tuple[float, ...]  # of r there
    spreads: tuple[float, ...]  # root mean squares of the targets y
    data_std: float = 1.0
    floors: tuple[float, ...] = ()  # of r there; none: not fitted

    def __post_init__(self) -> None:
        count = len(self.ratios)
        for name in ("ratios", "means", "spreads", "floors"):
            values = tuple(float(value) for value in getattr(self, name))
            object.__setattr__(self, name, values)
            absent = name == "floors" and not values
            if not absent and (len(values) != count or not all(0 < v < math.inf for v in values)):
                raise ValueError(f"{name} must be positive, one for each of {count} levels")
        self._tables  # noqa: B018  made to be checked: ratios must rise
        if not 0 < self.data_std < math.inf:
            raise ValueError(f"data_std must be positive and finite, got {self.data_std}")

    @classmethod
    def fit(
        cls,
        denoiser: Denoiser,
        x: Tensor,
        levels: Sequence[NoiseLevel],
        *,
        seed: int,
        probes: int = 1,
        design: ProbeDesign | None = None,
    ) -> RatioScale:
        """Measured on clean data x (N, ...) at some of the levels (the noisiest first)."""
        require_batch(x)
        places = sorted(spread_places(len(levels), FITTED_LEVELS), reverse=True)
        means, spreads = [], []
        for place in places:
            level, targets = levels[place], []
            for first in range(0, len(x), FIT_ROWS):
                part = x[first : first + FIT_ROWS]
                streams = Streams(seed, len(part), first_row=place * len(x) + first)
                x_t = add_noise(part, level, generator=streams)
                options: Any = {"generator": streams, "probes": probes, "design": design}
                targets.append(ratio_target(denoiser, x_t, level, **options)[1])
            y = torch.cat(targets).double()
            raise_non_finite(f"variance ratios at {level}", y)
            means.append(max(y.mean().item(), FLOOR))
            spreads.append(max(y.square().mean().sqrt().item(), FLOOR))
        ratios = tuple(levels[place].sigma / levels[place].alpha for place in places)
        return cls(ratios, tuple(means), tuple(spreads), max(x.double().std().item(), FLOOR))

    def to_json(self) -> dict[str, Any]:
        """The arguments of this scale, as JSON has them."""
        fields = asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    def mean(self, level: AnyLevel) -> float | Tensor:
        """b, the mean of r at a level."""
        return self._tables["means"][level]

    def floor(self, level: NoiseLevel) -> float | None:
        """The floor of r at a level, where one was fitted."""
        return self._tables["floors"][level] if self.floors else None

    def weight(self, level: AnyLevel) -> float | Tensor:
        """One over the mean square of a target: levels count alike in a loss."""
        return self._tables["spreads"][level] ** -2

    @cached_property
    def _tables(self) -> dict[str, LevelTable]:
        names = ("means", "spreads", "floors") if self.floors else ("means", "spreads")
        return {name: LevelTable(self.ratios, getattr(self, name)) for name in names}


@dataclass(frozen=True)
class RatioHead:
    """A head by a network F with twice the data's channels in and as many out, and its scale."""

    network: Network
    scale: RatioScale
    with_level: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "with_level", takes_level(self.network))

    def __call__(self, x_t: Tensor, mean: Tensor, level: AnyLevel, /) -> Tensor:
        inputs = head_inputs(x_t, mean, level, self.scale.data_std)
        out = self.network(inputs, level) if self.with_level else self.network(inputs)
        require_shape("the output of the head's network", out.shape, x_t.shape)
        return self.scale.mean(level) * functional.softplus(out.to(x_t.dtype) + START)


@dataclass(frozen=True)
class OcmMoments:
    """The diagonal by a head: a pass of the denoiser and one of the head, which counts as much.

    Variances below floor (sigma / alpha)^2 are lifted to it, as in DiagonalMoments. None takes the
    floor that was fitted when the head was trained (`RatioScale.floors`), or the rule of
    linalg/repair.py where there is none.
    """

    denoiser: Denoiser
    head: Head
    floor: Floor = None

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        mean = mean_of(self.denoiser, x_t, level)
        spend(forwards=1)
        with torch.no_grad():
            ratio = self.head(x_t, mean, level)
        require_shape("the head's output", ratio.shape, x_t.shape)
        raise_non_finite("denoising covariance", ratio)
        values, repaired = lifted(level.variance * ratio, *floor_at(level, self.own_floor(level)))
        return Gaussian(mean, Diagonal(values), repaired)

    def own_floor(self, level: NoiseLevel) -> Floor:
        """The floor at a level: the estimator's, or the head's."""
        if self.floor is None and isinstance(self.head, RatioHead):
            return self.head.scale.floor(level)
        return self.floor
