"""Maximum mean discrepancy with a sum of Gaussian kernels, in blocks; score-KSD; KL on a grid.

    MMD^2 = mean k(a, a') + mean k(b, b') - 2 mean k(a, b),   k(x, y) = sum_i exp(-|x - y|^2 / b_i)

the biased V-statistic (Gretton et al., 2012), as the authors of the paper computed it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 1024  # a block of 1024 x 1024 float32 distances is 4 MB, which stays in a core's cache
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Bandwidths of the authors' convention, as multiples of the mean pairwise squared distance."""


def mmd(
    a: Float[Tensor, "n d"],
    b: Float[Tensor, "m d"],
    bandwidths: str | Sequence[float] = "mean-distance",
) -> float:
    """The squared MMD between samples a and b.

    bandwidths="mean-distance" is the authors' convention: b_i = (mean squared distance between
    distinct points of both sets together) x {1/4, 1/2, 1, 2, 4}. A sequence of numbers gives the
    b_i themselves: [0.25, 0.5, 1, 2, 4] is the paper's text.
    """
    for name, points in (("a", a), ("b", b)):
        if not isinstance(points, Tensor):
            raise ValueError(f"{name} must be a torch tensor, got {type(points).__name__}")
        if points.ndim != 2 or len(points) == 0 or not points.is_floating_point():
            got = f"{points.dtype} {tuple(points.shape)}"
            raise ValueError(f"{name} must be floating-point points (n, d), got {got}")
        if not torch.isfinite(points).all():
            raise ValueError(f"{name} holds values that are not finite")
    if a.shape[1] != b.shape[1] or a.dtype != b.dtype or a.device != b.device:
        kinds = [(x.shape[1], x.dtype, str(x.device)) for x in (a, b)]
        raise ValueError(f"a and b must match in dimension, dtype and device, got {kinds}")
    centre = torch.cat([a, b]).mean(0)  # small numbers keep ||x||^2 + ||y||^2 - 2 x'y accurate
    a, b = a - centre, b - centre
    if bandwidths == "mean-distance":
        points = torch.cat([a, b]).double()
        n = len(points)
        # The mean over pairs i != j is 2 n / (n - 1) times the total variance.
        mean = 2 * ((points - points.mean(0)).square().sum().item() / n) * n / (n - 1)
        if mean == 0:
            return 0.0  # all points are one point
        bandwidths = [mean * factor for factor in FACTORS]
    if isinstance(bandwidths, str) or not isinstance(bandwidths, Iterable):
        raise ValueError(f"bandwidths must be 'mean-distance' or numbers, got {bandwidths!r}")
    scales = sorted(float(width) for width in bandwidths)
    if not scales or not all(math.isfinite(width) and width > 0 for width in scales):
        raise ValueError(f"bandwidths must be positive numbers, got {list(bandwidths)}")
    within = _kernel_mean(a, a, scales) + _kernel_mean(b, b, scales)
    return within - 2 * _kernel_mean(a, b, scales)


def _kernel_mean(x: Tensor, y: Tensor, scales: list[float]) -> float:
    """The mean of k over all pairs."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    # Where scales halve, exp(-d / b) of each further kernel is the square of the last.
    halving = all(math.isclose(2 * small, large, rel_tol=1e-9) for small, large in pairwise(scales))
    for distances, weight in _distance_blocks(x, y):
        if halving:
            power = distances.mul_(-1 / scales[-1]).exp_()
            block = power.sum(dtype=torch.float64)
            for _ in scales[1:]:
                block += power.square_().sum(dtype=torch.float64)
        else:
            block = torch.zeros_like(total)
            for b in scales:
                block += (distances * (-1 / b)).exp_().sum(dtype=torch.float64)
        total += weight * block
    return total.item() / (len(x) * len(y))


def _distance_blocks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Blocks of squared distances, and how often each counts: twice off the diagonal of x, x."""
    same = x is y
    for i, rows in enumerate(x.split(BLOCK)):
        for j, columns in enumerate(y.split(BLOCK)):
            if not same or j >= i:
                yield squared_distances(rows, columns), 2 if same and j > i else 1


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """||x_i - y_j||^2 (n, m) for rows (n, d) and (m, d), by a product: centre them first."""
    norms = x.square().sum(1)[:, None] + y.square().sum(1)
    return torch.addmm(norms, x, y.mT, alpha=-2).clamp_(min=0)


def score_ksd(x: Float[Tensor, "n d"], scores: Float[Tensor, "n d"], scale: float = 1.0) -> float:
    """The kernel Stein discrepancy of samples from the law with these scores at them, over sqrt(d).

    sqrt(sum_ij u(x_i, x_j) / d) / n, where with r = x_i - x_j, the kernel k = (c^2 + |r|^2)^(-1/2)
    and c = `scale`

        u = s_i' s_j k + (s_i - s_j)' r k^3 + d k^3 - 3 |r|^2 k^5

    (Gorham and Mackey, 2017; normalised as in Qiu et al., 2026, arXiv 2602.04189). It falls with
    n^(-1/2) to 0 for samples of that law, and does not see the weights of separate modes.
    """
    if x.ndim != 2 or x.shape != scores.shape or not scale > 0:
        shapes = f"{tuple(x.shape)} and {tuple(scores.shape)}, scale {scale}"
        raise ValueError(f"samples and scores must be (n, d), and the scale positive: {shapes}")
    centred = x - x.mean(0)
    distances = squared_distances(centred, centred)
    k = (scale**2 + distances).rsqrt()
    along = scores @ centred.mT  # s_i' x_j
    own = along.diagonal()
    pulls = own[:, None] - along + own - along.mT  # (s_i - s_j)' (x_i - x_j)
    u = (scores @ scores.mT) * k + (pulls + x.shape[1]) * k**3 - 3 * distances * k**5
    return math.sqrt(max(0.0, u.sum().item()) / x.shape[1]) / len(x)


def kl_divergence(log_p: Tensor, log_q: Tensor, cell: float) -> float:
    """KL(p || q) = sum p (log p - log q) cell, from log densities on a regular grid.

    A grid on which p does not sum to 1 within 1e-3 is refused.
    """
    p = log_p.double().exp()
    mass = p.sum().item() * cell
    if not abs(mass - 1) <= 1e-3:  # so that NaN is refused too
        raise ValueError(f"p sums to {mass:.4f} on the grid, not to 1; widen or refine the grid")
    terms = torch.where(p > 0, p * (log_p.double() - log_q.double()), torch.zeros_like(p))
    return terms.sum().item() * cell
