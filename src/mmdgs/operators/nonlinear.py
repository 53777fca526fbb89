"""Nonlinear measurements y = f(x) + noise, by their tangents: f(x) ~ f(a) + J (x - a).

A Gaussian is conditioned on them by Gauss-Newton steps (linalg/given.py): each takes the tangent at
the mean that the last one found. What remains is told with draws, in standard deviations of the
noise (root mean squares over the measurements):

    linearisation  f(x) - f(a) - J (x - a) for a draw x and the mean a: small where tangents hold
    misfit         y - f(x): about 1, or less
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.operators.contract import CHECK_SEED, Composed, Operator, as_operator, tried_by_rows

logger = logging.getLogger("mmdgs")

LINEARISATION, MISFIT = "linearisation", "misfit"
LARGE = 0.3
"""A linearisation that is warned of. Of curves of four independent Gaussian numbers, means of draws
were within 0.2 standard deviations and widths within 6% with 0.1, within 0.4 and 20% with 0.4."""
STEPS = 4
"""Of Gauss-Newton: along a chain each level's are few, since the next level goes on from there."""
Function = Callable[[Tensor], Tensor]


class Nonlinear(Operator):
    """A function of batches that is not linear; it has no adjoint, but a tangent at each point."""

    def __init__(
        self, function: Function, shape: Sequence[int], out_shape: Sequence[int], steps: int
    ) -> None:
        super().__init__(shape, out_shape)
        self.function, self.steps = function, steps

    def tangent(self, at: Tensor) -> Tangent:
        """The derivative at points (B, *shape), a linear operator for each row."""
        return Tangent(self.function, at)

    def in_units(self, low: float, width: float) -> Nonlinear:
        """The same function of x = low + width u."""
        function = self.function
        return Nonlinear(
            lambda x: function((x - low) / width), self.shape, self.out_shape, self.steps
        )

    def _forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def _adjoint(self, y: Tensor) -> Tensor:
        raise UsageError(f"{self!r} is not linear and has no adjoint; its tangents have")


class Tangent(Operator):
    """J v for rows v of one batch, each at a point of its own."""

    by_rows = True

    def __init__(self, function: Function, at: Tensor) -> None:
        self.function, self.at = function, at
        self.value, self._pull, *_ = torch.func.vjp(function, at)
        # J v as the derivative of J' u by u: forward mode has no formula for some layers.
        _, self._push, *_ = torch.func.vjp(lambda u: self._pull(u)[0], torch.zeros_like(self.value))
        super().__init__(at.shape[1:], self.value.shape[1:])

    def cosine_power(self, like: Tensor) -> Tensor | None:
        """The mean square of J's rows, as if it were that of each frequency."""
        if self.out_shape != self.shape:
            return None
        signs = torch.ones_like(self.at)
        signs.view(-1)[::2] = -1
        power = self._forward(signs).square().flatten(1).mean(1)
        return power.reshape(-1, *[1] * len(self.shape)).expand_as(self.at)

    def left(self, x: Tensor, variances: Tensor) -> dict[str, Tensor]:
        """How far f(x) is from the tangent there, in standard deviations of the noise, (B,)."""
        off = self.function(x) - self.value - self._forward(x - self.at)
        return {LINEARISATION: _size(off, variances)}

    def misfit(self, x: Tensor, y: Tensor, variances: Tensor) -> dict[str, Tensor]:
        return {MISFIT: _size(y - self.function(x), variances)}

    def _forward(self, x: Tensor) -> Tensor:
        pushed: Tensor = self._push(x)[0]
        return pushed

    def _adjoint(self, y: Tensor) -> Tensor:
        pulled: Tensor = self._pull(y)[0]
        return pulled


def told_of(operator: Nonlinear, draws: Tensor, y: Tensor, noise: Tensor) -> dict[str, Tensor]:
    """Linearisation, of two draws or more, and misfit of draws (draws, B, ...), by name.

    The tangent is at the mean of the draws. A large one is warned of.
    """
    tangent, variances = operator.tangent(draws.mean(0)), noise.square()
    told = {MISFIT: torch.stack([tangent.misfit(x, y, variances)[MISFIT] for x in draws])}
    if len(draws) > 1:
        left = [tangent.left(x, variances)[LINEARISATION] for x in draws]
        told[LINEARISATION] = torch.stack(left)
        if (worst := told[LINEARISATION].median().item()) > LARGE:
            logger.warning(
                "%r is %.2g standard deviations of the noise off its tangent, over the width of "
                "the draws: they are not those of p(x | y)", operator, worst
            )  # fmt: skip
    return told


def _size(error: Tensor, variances: Tensor) -> Tensor:
    return (error.square() / variances).flatten(1).mean(1).sqrt()


def nonlinear(
    function: Function, shape: Sequence[int], *, steps: int = STEPS, name: str | None = None
) -> Nonlinear:
    """A differentiable torch function of batches (B, *shape) as an operator, by its tangents.

    It must be finite a little outside of [0, 1] too, where means of a chain lie. It is tried once,
    on numbers from a fixed seed, and refused where its derivative is zero (steps, as of
    quantisation) or where it does not tell x from -x (phase retrieval).
    """
    name = str(name or getattr(function, "__name__", type(function).__name__))
    if steps < 1:
        raise ValueError(f"Gauss-Newton takes one step or more, got {steps}")
    generator = torch.Generator().manual_seed(CHECK_SEED)
    x = 1.5 * torch.rand(3, *shape, generator=generator) - 0.25
    out = tried_by_rows(name, function, x)
    operator = Nonlinear(function, shape, out.shape[1:], steps)
    if torch.equal(function(-x), out):
        raise ValueError(
            f"{name} is the same for x and -x, as intensities and the magnitudes of phase "
            "retrieval are: the posterior has a mode for each, and tangents follow one of them at "
            "random. Of numbers that are not negative take x * x.abs() in place of x * x"
        )
    tangent = operator.tangent(x)
    slopes = tangent.adjoint(torch.randn(out.shape, generator=generator))
    if not torch.isfinite(slopes).all():
        raise ValueError(f"the derivative of {name} is not finite")
    if not slopes.any():
        raise ValueError(
            f"the derivative of {name} is zero everywhere, as that of rounding is: measure what is "
            "rounded, by a linear operator, with the noise step / sqrt(12)"
        )
    return operator


def compose(*operators: Any) -> Operator:
    """The operators one after another: compose(blur, smaller) blurs first.

    With one that is not linear the whole is not.
    """
    if not operators:
        raise ValueError("compose needs at least one operator, got none")
    parts = [as_operator(operator) for operator in operators]
    if len(parts) == 1:
        return parts[0]
    whole = Composed(*parts)
    steps = [part.steps for part in parts if isinstance(part, Nonlinear)]
    return Nonlinear(whole, whole.shape, whole.out_shape, max(steps)) if steps else whole
