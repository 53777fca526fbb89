"""Repair of a learned covariance: values too small to be believed are lifted to a floor.

A true covariance has no negative eigenvalue and no negative variance. Where a network's Jacobian
(or an estimate of its diagonal) has some, they are error and nothing else, so their root mean
square s is the size of the error of all values. A value below some share of s says nothing but that
it is small. Without data the floor is

    floor = SHARE * s,    s^2 = sum_i w_i min(v_i, 0)^2 / sum_i w_i [v_i < 0],

within `least` and 1e6 `least` (1e-6 and 1 in units of (sigma / alpha)^2: an error above what a flat
prior would leave says no more than that), for the values v of one covariance: eigenvalues or
variances (w = 1), or Ritz values with their quadrature weights. An exact denoiser has no negative
values beyond rounding, and its covariance stays as it is. Variances by probes have an error of
their own, which is another at every number: there the floor is at least SHARE times that. The
variances of few numbers hardly ever have negative ones among them; there the eigenvalues of the
whole Jacobian, which exact variances take anyway, tell its error. With data there is a better
floor: `mmdgs.calibrate`.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger("mmdgs")

SHARE = 0.75
"""Of s: the smallest share at which held-out images are at most 0.1 nats a number less likely than
under an isotropic covariance, for every network that was tried (docs/use/calibrate.md)."""
SPAN = 1e6
"""The largest floor over the least, which is 1e-6 of the noise's variance."""
WATCHED, MUCH = 10, 0.05
"""Posteriors of a process that are looked at, and the share lifted that deserves a warning."""
FEW = 16
"""Numbers of an example up to which exact variances ask the eigenvalues for their error."""

_seen = 0


def error_floor(
    values: Tensor, least: float, share: float = SHARE, weights: Tensor | None = None
) -> Tensor:
    """The floor of each row of values (B, ...), (B, 1, ...)."""
    floor = (share * error_size(values, weights)).clamp(least, SPAN * least)
    return floor.reshape(-1, *[1] * (values.ndim - 1))


def error_size(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """s, the root mean square of the negative ones of each row of values (B, ...): (B,)."""
    rows = values.flatten(1)
    squares, counts = rows.clamp(max=0).square(), (rows < 0).to(rows.dtype)
    if weights is not None:
        squares, counts = weights.flatten(1) * squares, weights.flatten(1) * counts
    # Without a negative value both sums are zero, and so is s.
    return (squares.sum(1) / counts.sum(1).clamp(min=torch.finfo(rows.dtype).tiny)).sqrt()


def lifted(
    values: Tensor, least: float, share: float = 0.0, errors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Finite values (B, ...) lifted to a floor, and the fraction (B,) of each row that was lifted.

    The floor is `least`; with a share it is that of `error_floor`, or the same share of the values'
    standard errors where these are larger.
    """
    if share == 0:
        return values.clamp(min=least), (values < least).flatten(1).to(values.dtype).mean(1)
    floor = error_floor(values, least, share)
    if errors is not None:
        floor = torch.maximum(floor, (share * errors).clamp(max=SPAN * least))
    repaired = (values < floor).flatten(1).to(values.dtype).mean(1)
    watch(repaired)
    return torch.maximum(values, floor), repaired


def watch(repaired: Tensor) -> None:
    """Warn once a process where much of a covariance was lifted.

    Only the first posteriors are looked at: looking makes a GPU wait.
    """
    global _seen
    if _seen >= WATCHED:
        return
    _seen += 1
    share = repaired.mean().item()
    if share > MUCH:
        _seen = WATCHED
        logger.warning(
            "%.0f%% of this posterior's variances are smaller than the network's own error and "
            "were raised to it: they are a cautious guess. With 100 clean examples they can be "
            "fitted: moments = mmdgs.calibrate(moments, data, levels)",
            100 * share,
        )
