"""Denoisers of azula and ours, both ways.

    to_azula(model)          a model or denoiser of ours for azula's samplers and its guidance
    from_azula(denoiser)     a denoiser of azula for every estimator and sampler here

azula has a schedule t in [0, 1] -> (alpha_t, sigma_t), here a level is the pair itself. Either
denoiser depends on the ratio sigma / alpha alone, up to a factor of x_t, so a time is found by its
ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser as OwnDenoiser, checked
from mmdgs.errors import UsageError
from mmdgs.interop.rows import by_level
from mmdgs.lazy import optional
from mmdgs.models import Model
from mmdgs.moments import Moments
from mmdgs.noise import SAME_LEVEL, NoiseLevel

optional("azula")

from azula.denoise import Denoiser, DiracPosterior, GaussianPosterior, Posterior  # noqa: E402
from azula.noise import Schedule, VPSchedule  # noqa: E402

HALVINGS = 60
"""Of the interval in which a time is sought: to the last digit of float64."""


class GuestDenoiser(Denoiser):  # type: ignore[misc]
    """A denoiser of ours as azula's; made by `to_azula`.

    With u = (x - centre) / scale for our x, its u_t = alpha u + sigma e is our x_t = scale u_t +
    alpha centre at (alpha, scale sigma).
    """

    def __init__(
        self, denoiser: OwnDenoiser, schedule: Schedule, moments: Moments | None, centre: float,
        scale: float,
    ) -> None:  # fmt: skip
        super().__init__()
        # Not registered: azula would look for its parameters, and a model of ours is no module.
        object.__setattr__(self, "denoiser", denoiser)
        self.schedule, self.moments, self.centre, self.scale = schedule, moments, centre, scale

    def forward(self, x_t: Tensor, t: Tensor, **unused: Any) -> Posterior:
        """The posterior of u | u_t: u_t (B, ...), t () or (B,)."""
        alpha, sigma = self.schedule(t)
        if self.moments is None:
            return DiracPosterior(by_level(self._mean, x_t, alpha, sigma))
        moments = by_level(self._mean_and_variance, x_t, alpha, sigma)
        return GaussianPosterior(*moments.unbind(1))

    def _mean(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        return (self.denoiser(*self._own(x_t, level)) - self.centre) / self.scale

    def _mean_and_variance(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        assert self.moments is not None
        q = self.moments(*self._own(x_t, level), generator=torch.default_generator)
        mean, variance = (q.mean - self.centre) / self.scale, q.cov.diagonal() / self.scale**2
        return torch.stack([mean, variance], 1)

    def _own(self, x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, NoiseLevel]:
        own = self.scale * x_t + level.alpha * self.centre
        return own, NoiseLevel(alpha=level.alpha, sigma=self.scale * level.sigma)


def to_azula(
    denoiser: Model | OwnDenoiser,
    schedule: Schedule | None = None,
    *,
    moments: Moments | None = None,
) -> Any:
    """A model or denoiser of ours as azula's Denoiser; `schedule` is by default its VPSchedule.

    A model's values go from its interval to [-1, 1], as azula's networks have them, and the
    schedule ends at its noisiest level; those of another denoiser stay as they are. It returns a
    DiracPosterior, and with `moments` (in the units of our denoiser) a GaussianPosterior with their
    variances.
    """
    centre, scale, noisiest = 0.0, 1.0, math.inf
    if isinstance(denoiser, Model):
        low, high = denoiser.interval
        centre, scale = (low + high) / 2, (high - low) / 2
        noisiest = max(level.ratio for level in denoiser.levels) / scale
        denoiser = denoiser.require_denoiser()
    elif not callable(denoiser):
        got = type(denoiser).__name__
        raise UsageError(f"a denoiser is called with x_t and a level, got {got}")
    return GuestDenoiser(denoiser, schedule or default_schedule(noisiest), moments, centre, scale)


def default_schedule(noisiest: float = math.inf) -> Schedule:
    """azula's VPSchedule with its own ends, or one that ends at a smaller ratio sigma / alpha."""
    usual = VPSchedule()
    ends = math.sqrt((1 + usual.sigma_min**2) / (1 + noisiest**2))
    return VPSchedule(alpha_min=max(usual.alpha_min, ends), sigma_min=usual.sigma_min)


@dataclass(frozen=True)
class FromAzula:
    """A denoiser of azula as ours; made by `from_azula`."""

    denoiser: Any
    _times: dict[NoiseLevel, float] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        t = torch.tensor(self.time(level), dtype=x_t.dtype, device=x_t.device)
        alpha, _ = self.denoiser.schedule(t)
        return checked(self.denoiser((alpha / level.alpha) * x_t, t).mean.to(x_t.dtype), x_t)

    def time(self, level: NoiseLevel) -> float:
        """The time whose sigma_t / alpha_t is the level's."""
        if level not in self._times:
            self._times[level] = _time_of(self.denoiser.schedule, level)
        return self._times[level]


def from_azula(denoiser: Denoiser) -> FromAzula:
    """A denoiser of azula as ours: the mean of its posterior, in the units of its data.

    It answers at every level between the ends of its schedule, with any alpha.
    """
    schedule = getattr(denoiser, "schedule", None)
    if not isinstance(denoiser, Denoiser) or not isinstance(schedule, Schedule):
        got = type(denoiser).__name__
        raise UsageError(f"from_azula takes a Denoiser of azula with a schedule, got {got}")
    return FromAzula(denoiser)


def _time_of(schedule: Callable[[Tensor], tuple[Tensor, Tensor]], level: NoiseLevel) -> float:
    """Bisection: the ratio of a schedule rises with the time."""

    def place(t: float) -> float:
        alpha, sigma = schedule(torch.tensor(t, dtype=torch.float64))
        return math.log(sigma.item() / alpha.item())

    sought, low, high = math.log(level.ratio), 0.0, 1.0
    least, most = place(low), place(high)
    if not least - SAME_LEVEL <= sought <= most + SAME_LEVEL:
        ends = f"{math.exp(least):.4g} to {math.exp(most):.4g}"
        raise UsageError(
            f"the schedule of azula's denoiser goes from sigma / alpha {ends}, and {level} has "
            f"{level.ratio:.4g}; use levels within it"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if place(middle) < sought else (low, middle)
    return (low + high) / 2
