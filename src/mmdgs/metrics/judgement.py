"""Are draws right as far as the truth can tell? Tests by exchange, for any dependence in a case.

If draws come from p(x | y), then the truth and its S draws are S + 1 exchangeable vectors. So the
law of any statistic under that hypothesis is known: in every case let a random one of the S + 1
play the truth. The numbers of a vector stay together, so neighbouring pixels may depend on each
other as they like; only the cases must be independent.

    calibration   spread over error (draws.py), 1 where right; below: too sure
    coverage      of central 90% intervals
    bias          the mean rank of the truth, 0 to 1, less 1/2; above zero: draws are too low
    ranks         a histogram, with the band that holds all its bins at once with probability 95%
    CRPS          and what it would be if the draws were right, half the mean distance of two draws

All of these pass draws of the prior, which ignore y. Where exact draws of the same posteriors are
known (`exact`), two tests more see that, since the draws and the exact ones are exchangeable where
the draws are right:

    CRPS          against that of the exact draws; the two sets of a case change places at random
    means         their distance from those of the exact draws; single draws change places
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mmdgs.metrics.draws import checked_draws, coverage_weights, crps, held
from mmdgs.randomness import seeded

LEVEL, BAND = 0.9, 0.95
FEW_BINS, BINS, MOST_BINS = 5, 20, 60
CHUNK = 1 << 22  # numbers of draws that are ranked at a time
FALSE_ALARM = 0.01
"""The chance that right draws are called wrong, shared among all tests (Bonferroni)."""
TESTS, TESTS_BESIDE = 4, 6  # of a task, without and with exact draws
LEAST_EXCHANGES = 999
LEAST_DRAWS, LEAST_CASES = 4, 10


@dataclass(frozen=True)
class Chance:
    """A statistic, its central 95% where draws are right, and its two-sided p-value."""

    value: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Beside:
    """What exact draws of the same posteriors say."""

    crps: float  # of the exact draws
    crps_p: float
    correlation: float  # of the draws' means with those of the exact draws, over cases
    distance: float  # squared, between these means, over its mean where draws are right
    distance_p: float


@dataclass(frozen=True)
class Judgement:
    """What `judge` found; histogram, expected and the band are shares of the bins."""

    draws: int
    cases: int
    numbers: int
    tests: int  # that share the chance of a false alarm
    calibration: Chance
    coverage: Chance
    bias: Chance
    ranks: float  # p-value of the histogram's largest deviation
    crps: float
    crps_expected: float
    beside: Beside | None
    histogram: list[float]
    expected: list[float]
    low: list[float]
    high: list[float]

    @cached_property
    def problems(self) -> list[str]:
        """What is wrong with the draws, beyond chance: each test has its share of `FALSE_ALARM`."""
        limit, problems = FALSE_ALARM / self.tests, []
        ratio, covered, bias, beside = self.calibration, self.coverage, self.bias, self.beside
        if ratio.p < limit:
            kind = "too sure" if 2 * ratio.value < ratio.low + ratio.high else "too wide"
            chance = f"by chance {ratio.low:.3f} to {ratio.high:.3f}"
            problems.append(f"{kind}, spread over error {ratio.value:.3f} ({chance})")
        if covered.p < limit:
            chance = f"by chance {100 * covered.low:.1f}% to {100 * covered.high:.1f}%"
            problems.append(f"90% intervals hold {100 * covered.value:.1f}% ({chance})")
        if bias.p < limit:
            kind = "low" if bias.value > 0 else "high"
            problems.append(f"too {kind}, mean rank of the truth {0.5 + bias.value:.3f}")
        if self.ranks < limit:
            problems.append("the rank histogram leaves its band")
        if beside is not None and beside.crps_p < limit:
            problems.append(f"CRPS {self.crps:.4g}, exact draws have {beside.crps:.4g}")
        if beside is not None and beside.distance_p < limit:
            problems.append(
                f"the means are not those of p(x | y), {beside.distance:.3g} times as far as by "
                f"chance (correlation with exact ones over cases {beside.correlation:.2f})"
            )
        return problems

    @property
    def verdict(self) -> str:
        """One line."""
        size = f"{self.draws} draws of {self.cases} cases"
        if self.problems:
            return f"wrong: {'; '.join(self.problems)} ({size})"
        ratio, covered = self.calibration.value, 100 * self.coverage.value
        numbers = f"spread over error {ratio:.3f}, coverage {covered:.1f}%"
        return f"no sign against the draws: {numbers} ({size})"


@dataclass(frozen=True)
class _Cases:
    """Each of the S + 1 vectors as the truth of N cases: sums over its numbers, (S + 1, N, ...)."""

    spread: Tensor
    error: Tensor
    inside: Tensor
    rank: Tensor
    bins: Tensor

    def statistics(self, truths: Tensor) -> Tensor:
        """Calibration, coverage, bias, histogram (..., 3 + bins) if `truths` (..., N) are true."""
        case = torch.arange(truths.shape[-1])
        ratio = (self.spread[truths, case].sum(-1) / self.error[truths, case].sum(-1)).sqrt()
        shares = (self.inside, self.rank, *self.bins.unbind(-1))
        means = [share[truths, case].mean(-1) for share in shares]
        means[0] = means[0].clamp(0, 1)  # as `coverage_of` does
        return torch.stack([ratio, *means], -1)


def judge(
    draws: Tensor, truth: Tensor, *, exact: Tensor | None = None, tasks: int = 1, seed: int = 0
) -> Judgement:
    """Judge draws (S, N, ...) of N independent cases by the truth (N, ...) behind each.

    `exact` are as many draws of the exact posteriors, where they are known. Right draws are called
    wrong with a probability of at most 1% in all `tasks` together: each test has its share.
    """
    draws, truth = checked_draws(draws, truth, LEAST_DRAWS)
    count, cases = len(draws), len(truth)
    if cases < LEAST_CASES:
        raise ValueError(
            f"draws are judged by {LEAST_CASES} independent cases or more, got {cases}"
        )
    tests = tasks * (TESTS if exact is None else TESTS_BESIDE)
    # The least p is then half of a test's share.
    exchanges = max(LEAST_EXCHANGES, math.ceil(4 * tests / FALSE_ALARM))
    vectors = torch.cat([truth[None], draws]).reshape(count + 1, cases, -1)
    sums = _exchanged(vectors, bins_for(count + 1))
    generator = seeded(seed, "exchange")
    observed = sums.statistics(torch.zeros(cases, dtype=torch.long))
    sizes = [(part, cases) for part in _parts(exchanges, cases)]
    truths = (torch.randint(count + 1, size, generator=generator) for size in sizes)
    null = torch.cat([sums.statistics(part) for part in truths])
    calibration, coverage, bias = (_test(observed[i].item(), null[:, i]) for i in range(3))
    expected, deviation = null[:, 3:].mean(0), null[:, 3:].std(0).clamp(min=1e-12)
    largest = ((null[:, 3:] - expected).abs() / deviation).amax(1)
    own = ((observed[3:] - expected).abs() / deviation).max()
    half = largest.quantile(BAND) * deviation
    score = crps(draws, truth)
    pairs = ((draws - truth).abs().mean(0) - score).mean().item()
    beside = None if exact is None else _beside(draws, exact, truth, exchanges, seed)
    band = (expected - half).clamp(min=0), expected + half
    histograms = [x.tolist() for x in (observed[3:], expected, *band)]
    return Judgement(
        count, cases, math.prod(truth.shape[1:]), tests, calibration, coverage, bias,
        _share_above(own, largest), score.mean().item(), pairs, beside, *histograms,
    )  # fmt: skip


def _beside(draws: Tensor, exact: Tensor, truth: Tensor, exchanges: int, seed: int) -> Beside:
    """Draws against exact draws of the same posteriors, (S, N, ...) each."""
    exact, _ = checked_draws(exact, truth)
    count, cases = len(draws), len(truth)
    if exact.shape != draws.shape:
        shapes = f"{tuple(draws.shape)}, got {tuple(exact.shape)}"
        raise ValueError(f"exact draws must have the shape of the draws {shapes}")
    own, best = (crps(x, truth).reshape(cases, -1).mean(1) for x in (draws, exact))
    generator = seeded(seed, "exchange with exact draws")
    flips = 2.0 * torch.randint(2, (exchanges, cases), generator=generator) - 1
    pool = torch.cat([draws, exact]).reshape(2 * count, -1)
    pool = (pool - pool.mean(0)) / pool.std(0).clamp(min=1e-300)
    label = torch.cat([torch.ones(count), -torch.ones(count)]).double() / count
    apart, null = (label @ pool).square().mean(), []
    for part in _parts(exchanges, pool.shape[1]):
        order = torch.rand(part, 2 * count, generator=generator).argsort(1)  # one for all cases
        null.append((label[order] @ pool).square().mean(1))
    distances = torch.cat(null)
    means = (x.mean(0).reshape(cases, -1) for x in (draws, exact))
    a, b = (mean - mean.mean(0) for mean in means)
    sizes = (a.square().sum() * b.square().sum()).sqrt().clamp(min=1e-300)
    crps_p = _share_above((own - best).mean(), flips.double() @ (own - best) / cases)
    ratio, distance_p = (apart / distances.mean()).item(), _share_above(apart, distances)
    return Beside(best.mean().item(), crps_p, ((a * b).sum() / sizes).item(), ratio, distance_p)


def _share_above(value: Tensor, null: Tensor) -> float:
    """The p-value of a statistic that is large where draws are wrong."""
    return (1 + int((null >= value).sum())) / (len(null) + 1)


def _parts(total: int, numbers: int) -> list[int]:
    """So many exchanges of so many numbers each, cut so that they fit into memory."""
    size = max(1, CHUNK // numbers)
    return [min(size, total - first) for first in range(0, total, size)]


def bins_for(ranks: int) -> int:
    """Bins of a histogram of so many ranks: equally many in each, else one each if few."""
    whole = [bins for bins in range(FEW_BINS, BINS + 1) if ranks % bins == 0]
    if whole:
        return whole[-1]
    return ranks if ranks <= MOST_BINS else BINS


def _test(value: float, null: Tensor) -> Chance:
    ends = torch.tensor([(1 - BAND) / 2, (1 + BAND) / 2], dtype=null.dtype)
    low, high = null.quantile(ends).tolist()
    below, above = int((null <= value).sum()), int((null >= value).sum())
    return Chance(value, low, high, min(1.0, 2 * (1 + min(below, above)) / (len(null) + 1)))


def _exchanged(vectors: Tensor, bins: int) -> _Cases:
    """The parts of all statistics with each of the vectors (S + 1, N, d) as the truth."""
    total, _, d = vectors.shape
    count = total - 1
    mean, square = vectors.mean(0), (vectors - vectors.mean(0)).square().sum(0)
    # Without vector j the others' mean is mean - c / S, their squares less by c^2 (S + 1) / S.
    centred = vectors - mean
    error = (centred * total / count).square().sum(-1)
    spread = (square - centred.square() * total / count).clamp(min=0)  # rounding if all are equal
    spread = ((1 + 1 / count) * spread / (count - 1)).sum(-1)
    weights = coverage_weights(count, LEVEL)
    inside, rank, shares = [], [], []
    for part in vectors.split(max(1, CHUNK // (total * d)), dim=1):
        below, ties = _below(part)
        ranks = below + ties // 2
        inside.append(held(below, ties, weights).mean(-1))
        rank.append(ranks.double().mean(-1) / count - 0.5)
        place = ranks * bins // total
        shares.append(torch.stack([(place == b).double().mean(-1) for b in range(bins)], -1))
    return _Cases(spread, error, torch.cat(inside, 1), torch.cat(rank, 1), torch.cat(shares, 1))


def _below(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the others lie below each number of (S + 1, n, d), and how many are equal."""
    lines = vectors.movedim(0, -1).contiguous()
    ordered = lines.sort(dim=-1).values
    below = torch.searchsorted(ordered, lines)
    ties = torch.searchsorted(ordered, lines, right=True) - below - 1
    return below.movedim(-1, 0), ties.movedim(-1, 0)
