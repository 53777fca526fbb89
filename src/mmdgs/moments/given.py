"""Measurements beside x_t: p(x | x_t, y) for y = A x + noise, by any estimator of p(x | x_t).

y and x_t are independent given x, so the Gaussian that stands for p(x | x_t) is conditioned on y in
closed form (linalg/given.py). A sampler with this estimator draws from p(x | y). Noise that depends
on x is Gaussian near the mean given y, which a few steps find (sensors.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mmdgs.cost import spend
from mmdgs.linalg.given import Given
from mmdgs.linalg.operators import Diagonal
from mmdgs.linalg.spectral import Spectral
from mmdgs.moments.contract import Moments
from mmdgs.noise import NoiseLevel
from mmdgs.operators import Operator, as_operator, measured, noise_variances
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, Streams
from mmdgs.sensors import STEPS, Sensor


@dataclass(frozen=True)
class GivenDenoiser:
    """E[x | x_t, y]; without a generator an estimator has the same probes at every call and row."""

    moments: GivenMoments

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        return self.with_info(x_t, level)[0]

    def with_info(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The mean, and what is known of the systems that were solved: numbers (B,) by name."""
        probes = generator or Streams([0] * len(x_t), len(x_t), purpose="given")
        q = self.moments(x_t, level, generator=probes)
        spend(forwards=-1)  # the caller counts this evaluation, and so did the estimator
        return q.mean, q.cov.mean_info if isinstance(q.cov, Given) else {}


@dataclass(frozen=True)
class GivenMoments:
    """The posterior of an estimator, given measurements y = A x + noise e.

    y (B, *out_shape) has a row for each row of x_t, or one for all. `operator` is one of
    `mmdgs.operators`, a matrix, or what `as_operator` takes; one that does not know the shape of x
    needs `shape`. `noise` is a standard deviation (a number, one a row (B,), or one a measurement)
    or a `Sensor`. x, y and noise are in the units of the estimator's data.
    """

    moments: Moments
    y: Tensor = field(repr=False)
    operator: Any
    noise: float | Tensor | Sensor
    shape: tuple[int, ...] | None = None
    checked: tuple[Operator, Tensor, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        like = self.y if isinstance(self.y, Tensor) else None
        operator = as_operator(self.operator, self.shape, like)
        y = measured(self.y, operator)
        noise: Any = self.noise
        if not isinstance(noise, Sensor):
            noise = noise_variances(noise, operator, y)
        object.__setattr__(self, "checked", (operator, y, noise))

    @property
    def denoiser(self) -> GivenDenoiser:
        """The conditioned mean alone, for samplers without a covariance; not differentiable."""
        return GivenDenoiser(self)

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        operator, y, noise = self.checked
        given = q = self.moments(x_t, level, generator=generator)
        y = y.to(q.mean)
        if not isinstance(noise, Sensor):
            return q.given_checked(y, operator, noise.to(q.mean))
        spread = _spread(q, operator)
        for _ in range(STEPS):
            z, variances = noise.at(y, operator(given.mean), spread)
            given = q.given_checked(operator.known(z), operator, variances)
        return given


def _spread(q: Gaussian, operator: Operator) -> Tensor | float:
    """The variance of A x, as if x were uncorrelated; 0 where it would take many products."""
    if not isinstance(q.cov, Diagonal | Spectral):
        return 0.0
    variances = q.cov.diagonal()
    squares = operator.squares(variances)
    return operator(variances).abs() if squares is None else squares
