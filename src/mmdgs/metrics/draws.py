"""Are draws from a posterior p(x | y) good, and is their spread that of their errors?

For `draws` (S, B, ...) of B posteriors and the `truth` (B, ...) behind each. If the draws are
right, truth and draws are exchangeable: S + 1 independent draws of one law. Then with the draws'
mean m and variance s^2 (over S - 1)

    E (x - m)^2 = (1 + 1 / S) E s^2          calibration_ratio
    the rank of x among the draws            uniform on 0 ... S: ranks; coverage_of weighs them

and CRPS, E|X - x| - E|X - X'| / 2 (Gneiting and Raftery, 2007), is least for the right law.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

SSIM_SIGMA, SSIM_REACH = 1.5, 5
SSIM_K1, SSIM_K2 = 0.01, 0.03
"""Wang et al. (2004): a Gaussian window of 11 x 11 pixels, and constants against 0 / 0."""
FITTED_WIDTHS = tuple(0.3 * (2 / 0.3) ** (i / 14) for i in range(15))
FITTED_SHIFTS, NODES, RIDGE = (0.0, 0.5, 1.0), 800, 1e-5
"""Laws that `coverage_weights` are fitted to, nodes of their integrals, and a ridge."""

Draws = Float[Tensor, "draws batch ..."]
Truth = Float[Tensor, "batch ..."]


def checked_draws(draws: Tensor, truth: Tensor, least: int = 2) -> tuple[Tensor, Tensor]:
    """Draws (S, N, ...) and their truths (N, ...) in float64: finite, and of matching shapes."""
    if draws.ndim < 2 or draws.shape[1:] != truth.shape:
        shapes = f"(draws, *{tuple(truth.shape)}), got {tuple(draws.shape)}"
        raise ValueError(f"draws must have a first dimension before the truth's: {shapes}")
    if len(draws) < least:
        raise ValueError(f"this needs at least {least} draws, got {len(draws)}")
    for name, x in (("draws", draws), ("truth", truth)):
        if not torch.isfinite(x).all():
            raise ValueError(f"the {name} must be finite")
    return draws.double(), truth.double()


def calibration_ratio(draws: Draws, truth: Truth) -> float:
    """Spread over error, root mean squares: 1 where right, below 1 where draws are too sure.

    sqrt((1 + 1 / S) sum s^2 / sum (x - m)^2): the first factor is for the error of the mean.
    """
    draws, truth = checked_draws(draws, truth)
    spread = (1 + 1 / len(draws)) * draws.var(0).sum()
    return (spread / (truth - draws.mean(0)).square().sum()).sqrt().item()


def ranks(draws: Draws, truth: Truth) -> Int[Tensor, "batch ..."]:
    """How many draws lie below the truth, 0 to S: uniform where the draws are right (SBC).

    A tie counts as below for every other draw. Talts et al. (2018).
    """
    below, ties = _below(*checked_draws(draws, truth, least=1))
    return below + ties // 2


def coverage_of(draws: Draws, truth: Truth, level: float = 0.9) -> float:
    """The share of numbers within the central interval of the law of their draws, from S of each.

    It is P(u in [(1 - level) / 2, (1 + level) / 2]) with u = F(x), F the distribution function of
    the law that draws of x come from: what S -> infinity gives, so numbers of draws compare. By
    ranks, weighted (`coverage_weights`); a tie counts as each order of its numbers alike.

    Right draws have exactly the level in the mean, of any law and for any S. Draws N(b, w^2) of
    truths N(0, 1), and what is a monotone function of both, are within 1.5 points with S >= 4 (w
    0.3 to 2, |b| <= 1); with S of 2 or 3 draws that are too wide read too high, by up to 15 points.
    Draws of two modes, each too narrow, were up to 3 points off. Weights go beyond [0, 1], so the
    mean of n independent numbers is noisier than a share: its standard deviation for right draws is
    1.9 / sqrt(n) with S = 4, 0.8 / sqrt(n) with 8 and 0.3 / sqrt(n) from 64 on.
    """
    below, ties = _below(*checked_draws(draws, truth))
    return held(below, ties, coverage_weights(len(draws), level)).mean().clamp(0, 1).item()


def _below(draws: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """How many draws lie below the truth, and how many are equal to it."""
    return (draws < truth).sum(0), (draws == truth).sum(0)


def held(below: Tensor, ties: Tensor, weights: Float[Tensor, " ranks"]) -> Tensor:
    """The weight of each rank (...); with ties the mean over the ranks that it may have."""
    sums = functional.pad(weights.cumsum(0), (1, 0)).to(below.device)
    return (sums[below + ties + 1] - sums[below]) / (ties + 1)


@cache
def coverage_weights(count: int, level: float) -> Float[Tensor, " ranks"]:
    """Weights h of the ranks 0 ... S of a truth, whose mean estimates the interval's coverage.

    With u = F(x) the rank is binomial, so E h(rank) is a polynomial in u that stands for the
    indicator of the interval. h begins as the share of the ranks inside (interpolated between order
    statistics), which with few draws is much too near to `level`. What is added to it has the sum
    zero, so that right draws keep the level, is symmetric, and is the least-squares correction of
    the coverage for draws N(b, w^2) of truths N(0, 1) over FITTED_WIDTHS and FITTED_SHIFTS.
    """
    if not 0 < level < 1:
        raise ValueError(f"the level of coverage must lie between 0 and 1, got {level}")
    ndtr, log_ndtr = torch.special.ndtr, torch.special.log_ndtr
    rank = torch.arange(count + 1, dtype=torch.float64)
    outer, tail = torch.minimum(rank, count - rank), (1 - level) / 2 * (count + 1)
    plain = (outer + 1 - tail).clamp(0, 1)
    x = torch.special.ndtri((torch.arange(NODES, dtype=torch.float64) + 0.5) / NODES)
    half = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64))
    log_choose = math.lgamma(count + 1) - torch.lgamma(rank + 1) - torch.lgamma(count - rank + 1)
    chances, covered = [], []
    for width in FITTED_WIDTHS:
        for shift in FITTED_SHIFTS:
            z = ((x - shift) / width)[:, None]
            log = log_choose + rank * log_ndtr(z) + (count - rank) * log_ndtr(-z)
            chances.append(log.exp().mean(0))
            covered.append(ndtr(shift + half * width) - ndtr(shift - half * width))
    design, missing = torch.stack(chances), torch.stack(covered) - torch.stack(chances) @ plain
    design = design + design.flip(1)  # symmetric
    design = design - design.mean(1, keepdim=True)  # of sum zero
    normal = design.mT @ design / len(design) + RIDGE * torch.eye(count + 1, dtype=torch.float64)
    added = torch.linalg.solve(normal, design.mT @ missing / len(design))
    return plain + added + added.flip(0)


def crps(draws: Draws, truth: Truth) -> Truth:
    """The continuous ranked probability score of each number, unbiased; smaller is better.

    The mean of |X_i - x| minus half the mean of |X_i - X_j| over pairs i != j.
    """
    draws, truth = checked_draws(draws, truth)
    count = len(draws)
    weights = 2 * torch.arange(count, dtype=torch.float64, device=draws.device) - (count - 1)
    pairs = torch.tensordot(weights, draws.sort(0).values, dims=1) / (count * (count - 1))
    return (draws - truth).abs().mean(0) - pairs


def psnr(x: Tensor, truth: Tensor, peak: float = 1.0) -> Tensor:
    """10 log10(peak^2 / mean square error) in dB: (B,) of images (B, ...), (S, B) of draws."""
    lead = x.ndim - truth.ndim
    if lead < 0 or x.shape[lead:] != truth.shape:
        shapes = f"{tuple(x.shape)} do not fit the truth's {tuple(truth.shape)}"
        raise ValueError(f"images of shape {shapes}")
    errors = (x.double() - truth.double()).square().flatten(lead + 1).mean(-1)
    return 10 * (peak**2 / errors).log10()


def ssim(x: Tensor, truth: Tensor, peak: float = 1.0) -> Float[Tensor, " batch"]:
    """The structural similarity of each pair of images (B, C, H, W) (Wang et al., 2004).

    Local moments by a Gaussian window of 11 x 11 pixels (standard deviation 1.5), where it fits
    into the image.
    """
    if x.ndim != 4 or x.shape != truth.shape or min(x.shape[2:]) < 2 * SSIM_REACH + 1:
        shapes = f"{tuple(x.shape)} and {tuple(truth.shape)}"
        need = f"(B, C, H, W) of one shape, with {2 * SSIM_REACH + 1} pixels a side or more"
        raise ValueError(f"ssim needs two batches {need}, got {shapes}")
    places = torch.arange(-SSIM_REACH, SSIM_REACH + 1, dtype=torch.float64, device=x.device)
    line = (-0.5 * (places / SSIM_SIGMA).square()).exp()
    line = line / line.sum()

    def local(image: Tensor) -> Tensor:
        across = functional.conv2d(image.flatten(0, 1)[:, None], line[None, None, None])
        both = functional.conv2d(across, line[None, None, :, None])
        return both.unflatten(0, image.shape[:2])[:, :, 0]

    a, b = x.double(), truth.double()
    mean_a, mean_b = local(a), local(b)
    var_a, var_b = local(a * a) - mean_a**2, local(b * b) - mean_b**2
    both = local(a * b) - mean_a * mean_b
    c1, c2 = (SSIM_K1 * peak) ** 2, (SSIM_K2 * peak) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * both + c2) / (var_a + var_b + c2)
    return (luminance * structure).flatten(1).mean(1)
