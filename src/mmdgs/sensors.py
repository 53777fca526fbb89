"""Noise as sensors have it: photons, read noise, a map of deviations, and values that they clip.

    y = offset + gain Poisson((u - offset) / gain) + read e,    u = A x,    clipped to [low, high]

has no Gaussian likelihood of u, and chains condition Gaussians. So y stands, near a value of u, for
the Gaussian measurement (z, v) whose log-likelihood has there the slope that y's own has:

    counted   z = y + gain c / (c + v), v = gain (u - offset) + read^2
    clipped   y = low says u + tau e <= low: slope and curvature of log Phi((low - u) / tau)

(y - u) / v is Poisson's slope, if read = 0. It is not straight: averaged over p(u | x_t, y), whose
variance is c v / (c + v) if that of p(u | x_t) is c, it is larger by gain c / (c + v) / v.

The value is the mean of u given y, found by a few such steps (`STEPS`) at each level of a chain. As
the levels fall x_t pins u down, and slopes are all that counts: the chain then follows p(x | y).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.operators import Operator
from mmdgs.operators.measurements import MEDIAN_OF_NORMAL, by_frequency, patches_of
from mmdgs.randomness import Generator, randn_like, spawn_seeds

STEPS = 3
"""Gaussian posteriors at a level: each from the mean of the one before."""
FEWEST = 0.25
"""Photons that a variance has at least: without read noise it would vanish in the dark."""
LEAST_CURVATURE = 1e-3
"""Of a clipped value, relative to one that was measured: that the sky is bright says no more."""

SIDE, GROUPS, LEAST_GROUP, SMOOTHEST = 6, 40, 64, 0.1
"""Of the patches of an estimate: their side, the groups by mean, patches of a group, the share of a
group that counts."""
ROUNDS, ROBUST, LEAST_FITTED = 10, 2.0, 0.05
"""Of the line: rounds of weights, after Cauchy; deviations at which a weight is a half; the least
variance of a group, over the median's."""

Level = float | Tensor
Bounds = tuple[Level, Level]
"""Where values are clipped, below and above."""
ESTIMATE_POISSON = "estimate-poisson"
"""In the place of a sensor: gain and read noise are estimated from what was measured."""


@dataclass(frozen=True)
class Sensor:
    """The noise of a sensor, for values in [0, 1]; numbers, or tensors that broadcast with y.

    `gain` is what one photon (electron) adds to y, `read` the standard deviation of the noise that
    does not depend on light, `offset` what y is in the dark. What y has at or below `low`, or at or
    above `high`, was clipped there, and says no more than that.
    """

    gain: Level = 0.0
    read: Level = 0.0
    offset: Level = 0.0
    low: Level = -math.inf
    high: Level = math.inf

    def __post_init__(self) -> None:
        for name in ("gain", "read"):
            value = torch.as_tensor(getattr(self, name))
            if not ((value >= 0) & torch.isfinite(value)).all():
                got = f"{value.min():g} to {value.max():g}" if value.numel() > 1 else f"{value:g}"
                raise UsageError(
                    f"the {name} of a sensor must be finite and not below 0, got {got}"
                )
        if not (torch.as_tensor(self.gain) + torch.as_tensor(self.read) > 0).all():
            raise UsageError("a sensor has a gain or a read noise above 0; both are 0")

    @property
    def clips(self) -> bool:
        return any(bool(torch.isfinite(torch.as_tensor(x)).any()) for x in (self.low, self.high))

    def variances(self, u: Tensor) -> Tensor:
        """Those of y where u is what would be measured without noise."""
        gain, read, offset = (_like(x, u) for x in (self.gain, self.read, self.offset))
        counted = torch.maximum(u - offset, FEWEST * gain)
        return gain * counted + read.square()

    def at(self, y: Tensor, u: Tensor, c: Level = 0.0) -> tuple[Tensor, Tensor]:
        """The Gaussian measurement (z, v) that stands for y near u, of variance c without y."""
        v = self.variances(u)
        seen, y = y, y + _like(self.gain, u) * c / (c + v)
        if not self.clips:
            return y, v
        low, high = _like(self.low, u), _like(self.high, u)
        side = (seen >= high).to(u) - (seen <= low).to(u)
        bound = torch.where(side > 0, high, torch.where(side < 0, low, u))
        a = side * (u - bound) / v.sqrt()  # log Phi(a) is the log-likelihood
        ratio = torch.exp(-0.5 * (a.square() + math.log(2 * math.pi)) - torch.special.log_ndtr(a))
        curvature = (ratio * (ratio + a)).clamp(LEAST_CURVATURE, 1)
        z = u + side * ratio * v.sqrt() / curvature
        return torch.where(side == 0, y, z), torch.where(side == 0, v, v / curvature)

    def rows(self, rows: Tensor, count: int) -> Sensor:
        """The sensor of some rows of y, of `count` in all."""
        own = self._by_row(count).items()
        return replace(self, **{name: value[rows.to(value.device)] for name, value in own})

    def record(self, row: int, count: int) -> dict[str, float]:
        """What it is at a row of y, where that is one number for all of it."""
        values = vars(self) | {name: value[row] for name, value in self._by_row(count).items()}
        numbers = {name: torch.as_tensor(values[name]) for name in ("gain", "read", "offset")}
        return {name: value.item() for name, value in numbers.items() if value.numel() == 1}

    def _by_row(self, count: int) -> dict[str, Tensor]:
        """What differs from row to row: tensors (B, ...), of four dimensions for images."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return {name: x for name, x in tensors.items() if x.ndim > 1 and len(x) == count > 1}

    def scaled(self, width: float, low: Level) -> Sensor:
        """The same for low + width y in place of y."""
        values = {name: low + width * getattr(self, name) for name in ("offset", "low", "high")}
        return replace(self, gain=width * self.gain, read=width * self.read, **values)

    def simulated(self, u: Tensor, generator: Generator) -> Tensor:
        """A measurement y of u, (B, ...)."""
        gain, read, offset = (_like(x, u) for x in (self.gain, self.read, self.offset))
        y = u
        if bool((gain > 0).any()):
            rates = ((u - offset).clamp(min=0) / gain.clamp(min=1e-30)).double().cpu()
            seeds = spawn_seeds(len(u), rates.device, generator).tolist()
            counts = [
                torch.poisson(rate, generator=torch.Generator().manual_seed(seed))
                for rate, seed in zip(rates, seeds, strict=True)
            ]
            y = torch.where(gain > 0, offset + gain * torch.stack(counts).to(u), u)
        y = y + read * randn_like(u, generator)
        return y.clamp(_like(self.low, u), _like(self.high, u)) if self.clips else y


def _like(value: Level, u: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=u.dtype, device=u.device)


def bounded(
    noise: Tensor | Sensor, y: Tensor, operator: Operator, bounds: Bounds | None
) -> Tensor | Sensor:
    """The noise as it is where nothing lies at the bounds, else a sensor that clips there."""
    if bounds is None:
        return noise
    low, high = (_like(bound, y) for bound in bounds)
    if not (operator.known(torch.ones_like(y)).bool() & ((y <= low) | (y >= high))).any():
        return noise
    sensor = noise if isinstance(noise, Sensor) else Sensor(read=noise)
    return replace(sensor, low=low, high=high)


def estimated_sensor(y: Tensor, operator: Operator) -> Sensor:
    """The gain and read noise of images y (B, C, H, W), from each: tensors (B, 1, 1, 1).

    Patches are sorted by their means into groups; in each the smoothest say the variance, by their
    fine waves; and a line through variances over means, robust against groups with texture, has the
    gain as its slope (0 where it falls). Below zero its start stands for an offset. What lies at an
    end of the values of y is left out: it may be clipped.
    """
    if len(operator.out_shape) != 3:
        raise UsageError(f"gain and read noise are estimated from images, and not by {operator!r}")
    whole = operator.known(torch.full_like(y[:1], math.nan)).isnan()[0]
    lines = [_line(image, whole) for image in y]
    gain, start = torch.tensor(lines, dtype=y.dtype, device=y.device)[..., None, None, None].unbind(
        1
    )
    offset = torch.where(start < 0, -start / gain.clamp(min=1e-30), 0.0)
    return Sensor(gain, start.clamp(min=0).sqrt(), offset)


def _line(y: Tensor, whole: Tensor) -> tuple[float, float]:
    """Slope and start of the variance of an image (C, H, W) over its mean."""
    y, whole = (y[:1], whole[:1]) if bool((y == y[:1]).all()) else (y, whole)
    inner = whole & (y > y.amin()) & (y < y.amax())
    each = [patches_of(y[c : c + 1], inner[c : c + 1], SIDE) for c in range(len(y))]
    patches = torch.cat([part for part in each if part is not None] or [y.new_zeros(0, 1, 1, 1)])
    if len(patches) < GROUPS * LEAST_GROUP:
        raise UsageError(
            f"gain and read noise need {GROUPS * LEAST_GROUP:,} patches of {SIDE} x {SIDE} pixels "
            f"that are measured and not clipped, and there are {len(patches):,}: give them, such "
            "as poisson:0.01,0.005"
        )
    means, coarse, fine = by_frequency(patches, SIDE + 1)
    groups = []
    for group in means.argsort().tensor_split(GROUPS):
        smooth = group[coarse[group].argsort()[: max(1, int(SMOOTHEST * len(group)))]]
        deviation = fine[smooth].abs().median() / MEDIAN_OF_NORMAL
        groups.append((means[smooth].mean(), deviation.square()))
    m, v = (torch.stack(values) for values in zip(*groups, strict=True))
    weights, fitted, slope, start = torch.ones_like(v), v, v[0], v[0]
    for _ in range(ROUNDS):
        fitted = fitted.clamp(min=LEAST_FITTED * v.median())
        w = weights / fitted.square()
        centre, level = (w * m).sum() / w.sum(), (w * v).sum() / w.sum()
        slope = (w * (m - centre) * (v - level)).sum() / (w * (m - centre).square()).sum()
        start = level - slope * centre
        fitted = start + slope * m
        off = v / fitted.clamp(min=LEAST_FITTED * v.median()) - 1
        scale = ROBUST * (off.abs().median() / MEDIAN_OF_NORMAL + 1e-6)
        weights = 1 / (1 + (off / scale).square())
    return (slope.item(), start.item()) if slope > 0 else (0.0, v.median().item())
