"""Draws of p(x | y) by weighted particles: exact in the limit, on problems with known answers.

Problems are mixtures with an exact denoiser and a known p(x | y):

    2-D             two modes, one coordinate measured; three measurements
    A1, A2          16 dimensions, 14 weak or 4 strong measurements (Qiu et al., 2026, arXiv
                    2602.04189), three draws of the noise
    digits          7 x 7 pixels, the lower three rows of fours and nines measured (MNIST, where
                    --data-dir has it)
    images          the 8 x 8 images of `inverse` and its three tasks

and what is measured is

    weight     a mode's share of the draws less the exact one, counted towards its share without
               measurements: above 0 where y moves too little (mean over measurements)
    gap        10 log10 of the square error of the draws' mean over the optimal one's (images)
    spread     spread over error (images): 1 where right
    evidence   the error of log p(y), mean over measurements, in nats

Beside bridges (one particle) and particles stand sweeps, in which each step goes back up to the
last level and down again, accepted by Metropolis' rule; TDS (Wu et al., 2023), whose twisting
function is the likelihood of the denoised point, and MCG-Diff (Cardoso et al., 2024), whose chains
go towards a noised y, both written here; and azula's MMPS, PiGDM and DPS (rivals.py).

With --model, images are restored by a network as in `inverse --model`: particles beside single
chains of as many evaluations.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from experiments import inverse, inverse_networks, rivals
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results
from experiments.inverse_networks import LOW_RANK, Ours
from mmdgs.cost import PRODUCT
from mmdgs.data import ImageSet, load_images, midpoints, spread
from mmdgs.errors import UsageError
from mmdgs.linalg.evidence import factored, log_evidence
from mmdgs.metrics import calibration_ratio
from mmdgs.metrics.suite import CELLS_16, TRUE_16, in_mode_16, matrix_16, prior_16
from mmdgs.moments import ExactMoments, GivenMoments
from mmdgs.noise import CLEAN, NoiseLevel, add_noise
from mmdgs.operators import Matrix
from mmdgs.posterior import Gaussian
from mmdgs.randomness import child_seed, randn_like, seeded, uniforms
from mmdgs.report.page import Outcome, Section
from mmdgs.restoration.chains import restoration_plan
from mmdgs.restoration.settings import BRIDGE, MULTISTEP
from mmdgs.samplers import Plan, TwistedParticles, run as run_chains
from mmdgs.samplers.particles import RESAMPLED_BELOW, effective_share, resampled_rows, seen_evidence
from mmdgs.schedules import Levels, edm
from mmdgs.targets import GaussianMixture
from mmdgs.workspace import Part

WEIGHT = Measure("weight", "error of the mode's weight", 3)
GAP = Measure("gap", "gap to the optimal mean, dB", 2, "less")
SPREAD = Measure("spread", "spread over error", 3)
EVIDENCE = Measure("evidence", "error of log p(y), nats", 3, "less")
EVALUATIONS = Measure("evaluations", "evaluations a draw", 0)
PARTICLES, SWEEPS = "particles", "bridge with sweeps"
TDS, MCG = "TDS", "MCG-Diff"
DIGITS, WIDTH = 300, 0.1
"""Digits of the mixture, and the standard deviation about each, which is the noise too."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
EXACT = 200_000
NETWORK_ROWS = {
    "spectral, multistep, 25 levels": Ours("spectral", 25, chains=MULTISTEP),
    **{
        f"{name.replace('-', ' ')}, {count} particle{'s' if count > 1 else ''}, {levels} levels": (
            Ours(name, levels, LOW_RANK if name == "low-rank" else {}, particles=count)
        )
        for name, cells in {
            "spectral": ((1, 25), (1, 100), (4, 25), (1, 400), (4, 100), (16, 25)),
            "low-rank": ((1, 25), (1, 100), (4, 25), (16, 6)),
        }.items()
        for count, levels in cells
    },
}
"""Of networks: particles and single chains that cost as much."""
NETWORK_IMAGES = 96
AZULA = {f"{name} (azula)": name for name in ("MMPS", "PiGDM", "DPS")}
AZULA["DiffPIR (azula)"] = rivals.PIR


@dataclass(frozen=True)
class Settings:
    """Chains for each measurement in the plane (of 16 dimensions half as many), of digits and of
    rivals, levels of `curves` and of all else but images; measurements, draws and levels of images.
    """

    chains: int = 16_000
    digits: int = 1_024
    rival_chains: int = 2_000
    curve_levels: int = 25
    images: int = 16
    draws: int = 8
    levels: int = 50
    image_levels: int = 25
    seeds: int = 5
    counts: tuple[int, ...] = COUNTS
    tuned_chains: int = 200
    rivals: tuple[str, ...] = tuple(AZULA)


FULL = Settings()
QUICK = Settings(
    chains=64, digits=64, rival_chains=64, curve_levels=4, images=2, draws=2, levels=8,
    image_levels=4, seeds=2, counts=(1, 8), tuned_chains=8, rivals=(),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Measurements y (n, m) of points of a mixture; `mode` says which points are in a mode."""

    mixture: GaussianMixture
    operator: Matrix
    noise: float
    y: Tensor
    mode: Callable[[Tensor], Tensor]
    first: float

    @cached_property
    def shares(self) -> tuple[float, list[float]]:
        """The mode's share without measurements, and given each of them, by many exact draws."""
        before = self.mixture.sample(EXACT, generator=seeded(0, "before"))
        given = [
            self.mixture.given(y, self.operator, self.noise).sample(
                EXACT, generator=seeded(0, "exact")
            )
            for y in self.y[:, None]
        ]
        return self._share(before), [self._share(x) for x in given]

    def _share(self, x: Tensor) -> float:
        return self.mode(x).double().mean().item()

    def levels(self, count: int) -> Levels:
        return edm(count, self.first, 0.01)


def _two_modes() -> Problem:
    means, variances = [[-1.5, -1.0], [1.5, 1.0]], [[0.09, 0.25], [0.16, 0.09]]
    mixture = GaussianMixture([0.5, 0.5], means, variances).to(dtype=torch.float64)
    y = torch.tensor([[0.35], [-0.4], [0.05]], dtype=torch.float64)
    operator = Matrix(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    return Problem(mixture, operator, 0.8, y, lambda x: x.sum(-1) > 0, 20.0)


def _sixteen(name: str, noise: float) -> Problem:
    """A1 or A2, with three draws of the noise."""
    mixture, matrix = prior_16(), matrix_16(name)
    clean = matrix @ torch.tensor(TRUE_16, dtype=torch.float64)
    y = clean + noise * randn_like(clean.expand(3, -1), seeded(0, "sixteen"))
    return Problem(mixture, Matrix(matrix), noise, y, in_mode_16, 40.0)


def _digits(data_dir: str | None) -> Problem:
    """Digits of 7 x 7 pixels, each with a Gaussian about it: of held-out ones the lower three rows
    are measured, which fit fours and nines. The mode is that of fours.
    """

    def pooled(images: ImageSet) -> Tensor:
        return avg_pool2d(midpoints(images.images).double(), 4).flatten(1)

    parts = (load_images("mnist", part, data_dir=data_dir) for part in ("train", "test"))
    known, others = (images.take(spread(len(images), DIGITS)) for images in parts)
    centres, labels = pooled(known), known.labels
    assert labels is not None
    assert others.labels is not None
    mixture = GaussianMixture(torch.full((DIGITS,), 1 / DIGITS), centres, WIDTH)
    mixture = mixture.to(dtype=torch.float64)
    operator = Matrix(torch.eye(49, dtype=torch.float64)[28:])

    def four(x: Tensor) -> Tensor:
        return labels[torch.cdist(x.reshape(-1, 49), centres).argmin(1)].view(x.shape[:-1]) == 4

    clean = operator(pooled(others)[(others.labels == 4) | (others.labels == 9)])
    y = clean + WIDTH * randn_like(clean, seeded(0, "digits"))
    shares = mixture.given(y, operator, WIDTH).weights @ (labels == 4).double()
    open_ones = y[(shares > 0.25) & (shares < 0.75)][:3]
    return Problem(mixture, operator, WIDTH, open_ones, four, 20.0)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "2-D": cache(_two_modes),
    **{f"{name}, {s:g}": cache(partial(_sixteen, name, s)) for name, s in CELLS_16},
}

Problems = Mapping[str, Callable[[], Problem]]
Method = tuple[str, float]
"""What draws, and its one number: particles, sweeps or a rival's setting."""


def run(context: Context) -> Outcome:
    """Curves on the plane, every problem with 1, 8 and 64 particles, and the tasks of images; or a
    network's images.
    """
    if context.model is not None:
        return inverse_networks.run(context, NETWORK_ROWS, NETWORK_IMAGES)
    if context.only is not None:
        raise UsageError("--only is for networks here: name one with --model")
    settings = context.sized(FULL, QUICK)
    several, few_levels = settings.counts, replace(settings, levels=settings.curve_levels)
    problems = dict(PROBLEMS)
    with contextlib.suppress(UsageError):  # no MNIST here
        digits = _digits(context.data_dir)
        problems["digits"] = lambda: digits
    beside = settings.rivals if rivals.installed() else ()
    few = [count for count in (1, 8, 64) if count in several] or list(several)
    # The longest cells first, since several are measured at a time.
    rows: dict[str, Method] = {_title(count): (PARTICLES, count) for count in reversed(few)}
    rows |= {name: (AZULA[name], 0) for name in beside}
    for name in OTHER_FILTERS:
        rows |= {f"{name}, {count} particles": (name, count) for count in few[1:]}
    modes: dict[Any, Any] = {(row, p): how for row, how in rows.items() for p in reversed(problems)}
    curves: dict[Any, Any] = {}
    for name, counts in {
        **dict.fromkeys((PARTICLES, TDS, MCG), several),
        SWEEPS: several[:4],
        **dict.fromkeys(beside, (1,)),
    }.items():
        curves |= {(name, count): (AZULA.get(name, name), count) for count in counts}
    ways = [(c, b) for c in reversed(few) for b in (RESAMPLED_BELOW, 0.0) if c > 1 or b]
    images: dict[Any, Any] = {(_title(*way), task): way for way in ways for task in inverse.TASKS}
    shares, own = partial(_shares, problems=problems), partial(_images, settings=settings)
    at = {"seeds": settings.seeds, "beside": True}
    grids = [
        Grid("images", images, own, settings, "task", **at),
        Grid("modes", modes, partial(shares, settings=settings), settings, "problem", **at),
        Grid("curves", curves, partial(shares, settings=few_levels), few_levels,
             "particles or sweeps", **at),
    ]  # fmt: skip
    results = [grid.run(context) for grid in grids]
    records = {grid.name: each.records() for grid, each in zip(grids, results, strict=True)}
    left = [name for each in results for name in each.open()]
    return Outcome({"settings": asdict(settings), **records}, _sections(*results), left=left)


def _count(row: str) -> int:
    """The particles of a row, by its title."""
    return int("".join(c for c in row if c.isdigit()) or 0)


def _title(count: int, below: float = RESAMPLED_BELOW) -> str:
    never = "" if below else ", never resampled"
    return "bridge (1 particle)" if count == 1 else f"{count} particles{never}"


def _shares(cell: Cell, settings: Settings, problems: Problems) -> Part:
    """The errors of mode weights and evidences of a method on a problem, or in the plane."""
    at = problems.get(cell.column, _two_modes)()
    (name, number), own = cell.what, {}
    count = {2: settings.chains, 16: settings.chains // 2}.get(at.mixture.dim, settings.digits)
    count = min(count, settings.rival_chains) if name in AZULA.values() else count
    before, shares = at.shares
    if name in AZULA.values():
        own = rivals.tuned(name, partial(_tuning, name, at, settings, cell.seeds[-1] + 1))
        number = own["setting"]
    weights, evidences, evaluations = [], [], 0.0
    for seed in cell.seeds:
        of_weights, of_evidence = [], []
        for i, y in enumerate(at.y[:, None]):
            draws, log, evaluations = _drawn(name, number, at, y, count, settings, seed + 1000 * i)
            share = at.mode(draws).double().mean().item()
            of_weights.append((share - shares[i]) * math.copysign(1.0, before - shares[i]))
            if log is not None:
                truth = at.mixture.log_evidence(y, at.operator, at.noise).item()
                of_evidence.append(abs(log - truth))
        weights.append(sum(of_weights) / len(of_weights))
        if of_evidence:
            evidences.append(sum(of_evidence) / len(of_evidence))
    values = {"weight": weights, "evaluations": evaluations, **own}
    return Part(values | ({"evidence": evidences} if evidences else {}))


def _tuning(
    name: str, at: Problem, settings: Settings, seed: int, setting: float
) -> tuple[Tensor, Tensor]:
    """A rival's draws and a draw of p(x | y) of other measurements, for the choice of a setting."""
    x = at.mixture.sample(len(at.y), generator=seeded(seed, "tuning"))
    clean = at.operator(x)
    y = clean + at.noise * randn_like(clean, seeded(seed, "tuning noise"))
    count = settings.tuned_chains
    each = [_drawn(name, setting, at, row, count, settings, seed)[0] for row in y[:, None]]
    return torch.stack(each, 1), x


def _drawn(
    name: str, number: float, at: Problem, y: Tensor, count: int, settings: Settings, seed: int
) -> tuple[Tensor, float | None, float]:
    """Draws (n, d) of p(x | y) for y (1, m), the estimate of log p(y), evaluations of a draw."""
    levels = at.levels(settings.levels)
    if name in AZULA.values():
        counted = rivals.Counted(at.mixture.denoiser())
        case = rivals.Problem(counted, y.repeat(count, 1), at.operator, at.noise, at.first)
        draws = case.draw(name, settings.levels, number, child_seed(seed, name))
        return draws, None, counted.cost.evaluations
    particles = 1 if name == SWEEPS else int(number)
    start = torch.empty(count // particles * particles, at.mixture.dim, dtype=torch.float64)
    x0 = levels[0].sigma * randn_like(start, seeded(seed, "start"))
    if name in OTHER_FILTERS:
        draws, logs = OTHER_FILTERS[name](at, y, x0, particles, levels, seed)
        cost = 1.0 + PRODUCT if name == TDS else 1.0
        log = _pooled(logs) if name == TDS else None
        return draws, log, particles * len(levels) * cost
    full = 1.0 + PRODUCT * at.mixture.dim  # the exact moments count nothing, FullMoments d products
    given = GivenMoments(ExactMoments(at.mixture), y, at.operator, at.noise)
    if name == SWEEPS:
        sweeps = int(number)
        return (
            swept(given, x0, levels, sweeps, seed),
            None,
            (len(levels) + 2 * sweeps * (len(levels) - 1)) * full,
        )
    plan = Plan.down(TwistedParticles(given, particles), levels)
    chains = run_chains(plan, x0, seed=seed, progress=None)
    logs = chains.info["log_evidence"][::particles]
    return chains.x, _pooled(logs), particles * len(levels) * full


def _pooled(logs: Tensor) -> float:
    return logs.logsumexp(0).item() - math.log(len(logs))


def swept(given: GivenMoments, x: Tensor, levels: Levels, sweeps: int, seed: int) -> Tensor:
    """Bridges whose every state is `sweeps` times noised to the level above and drawn anew.

    A proposal x' is taken with the probability of its weight over that of x, p^(y | x_s) /
    q(y | x_s, x_t), both seen from the same noisier state.
    """
    operator, y, variances = given.checked
    generator, above = seeded(seed, "sweeps"), None

    def evidence(x: Tensor, level: NoiseLevel) -> tuple[Gaussian, Tensor]:
        q = given.moments(x, level)
        cov = factored(q.mean, q.cov, y, operator, variances)
        return replace(q, cov=cov), log_evidence(q.mean, cov, y, operator, variances)

    for level, following in pairwise([*levels, CLEAN]):
        q, known = evidence(x, level)
        for _ in range(sweeps if above is not None else 0):
            x_t = add_noise(x, above, start=level, generator=generator)
            noisier, _ = evidence(x_t, above)
            bridge = noisier.given_checked(y, operator, variances).bridge(x_t, above, level)
            proposal = bridge.sample(generator=generator)
            _, likely = evidence(proposal, level)
            weights = [
                of - seen_evidence(given, noisier, (x_t, at), (above, level))
                for at, of in ((proposal, likely), (x, known))
            ]
            accepted = uniforms((len(x), 1), x, generator).log()[:, 0] < weights[0] - weights[1]
            x = torch.where(accepted[:, None], proposal, x)
            known = torch.where(accepted, likely, known)
        q = given.moments(x, level) if sweeps else q
        bridge = q.given_checked(y, operator, variances).bridge(x, level, following)
        x, above = bridge.sample(generator=generator), level
    return x


def tds(
    at: Problem, y: Tensor, x: Tensor, count: int, levels: Levels, seed: int
) -> tuple[Tensor, Tensor]:
    """The twisted diffusion sampler (Wu et al., 2023): draws, and log p(y) by each run.

    Steps have the variance of a point mass at D(x_t), moved by the gradient of the twisting
    function N(y; A D(x_t), tau^2 I + r^2 A A'), with r^2 = s^2 / (1 + s^2) at noise s as in PiGDM:
    without r^2 few particles survive the first levels.
    """
    generator, runs = seeded(seed, "tds"), len(x) // count
    matrix = at.operator.matrix.at(x)
    eye = torch.eye(len(matrix)).to(x)
    denoiser = at.mixture.denoiser()
    log_weights, total = x.new_zeros(runs, count), x.new_zeros(runs)

    def twisting(x_t: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor, Tensor]:
        """D(x_t), the log of the function, its gradient."""
        spread = level.variance / (1 + level.variance)
        cov = at.noise**2 * eye + spread * matrix @ matrix.mT
        with torch.enable_grad():
            x_t = x_t.detach().requires_grad_()
            mean = denoiser(x_t, level)
            normal = torch.distributions.MultivariateNormal(mean @ matrix.mT, cov)
            log = normal.log_prob(y.expand(len(x_t), -1))
            (gradient,) = torch.autograd.grad(log.sum(), x_t)
        return mean.detach(), log.detach(), gradient

    mean, log, gradient = twisting(x, levels[0])
    log_weights = log_weights + log.view(runs, count)
    for level, following in pairwise(levels):
        resampled = effective_share(log_weights) < RESAMPLED_BELOW
        u = uniforms((runs, 1), x, generator)
        index = resampled_rows(log_weights, u, resampled)
        total += torch.where(resampled, log_weights.logsumexp(1) - math.log(count), 0.0)
        log_weights = torch.where(resampled[:, None], 0.0, log_weights)
        x, mean, log, gradient = x[index], mean[index], log[index], gradient[index]
        kept = (following.sigma / level.sigma) ** 2
        centre, variance = (1 - kept) * mean + kept * x, following.sigma**2 * (1 - kept)
        moved = centre + variance * gradient
        x = moved + math.sqrt(variance) * randn_like(x, generator)
        before = log
        mean, log, gradient = twisting(x, following)
        change = ((x - moved).square() - (x - centre).square()).sum(1) / (2 * variance)
        log_weights = log_weights + (change + log - before).view(runs, count)
    normal = torch.distributions.MultivariateNormal(mean @ matrix.mT, at.noise**2 * eye)
    log_weights = log_weights + (normal.log_prob(y.expand(len(x), -1)) - log).view(runs, count)
    total += log_weights.logsumexp(1) - math.log(count)
    u = uniforms((len(x), 1), x, generator).view(runs, count)
    return mean[resampled_rows(log_weights, u, torch.ones_like(total, dtype=torch.bool))], total


def mcg_diff(
    at: Problem, y: Tensor, x: Tensor, count: int, levels: Levels, seed: int
) -> tuple[Tensor, Tensor]:
    """MCG-Diff (Cardoso et al., 2024): draws, and log p(y) of the chain by each run.

    With A = U S V' the number y_i = u_i' y / s_i is that of v_i' x at the noise tau / s_i. So
    chains are drawn towards y_i, meet it at the level of that noise (which is added to the levels),
    and go on from there without y. Steps have the variance of a point mass at D(x_t).
    """
    generator, runs = seeded(seed, "mcg"), len(x) // count
    u, s, v = torch.linalg.svd(at.operator.matrix.at(x), full_matrices=False)
    target, own = (y @ u / s)[0], at.noise / s
    sigmas = sorted({*(level.sigma for level in levels), *own.tolist()}, reverse=True)
    denoiser, log_weights, total = (
        at.mixture.denoiser(),
        x.new_zeros(runs, count),
        x.new_zeros(runs),
    )
    centre, variance, before = torch.zeros_like(x), sigmas[0] ** 2, x.new_zeros(len(x))
    mean = centre
    for i, sigma in enumerate(sigmas):
        ahead = (own <= sigma * (1 + 1e-9)).to(x)  # of these y_i is still to be met, or met here
        distance = (sigma**2 - own**2).clamp(min=0)
        along = centre @ v.mT
        gain = ahead * variance / (variance + distance)
        moved = along + gain * (target - along)
        spread = (variance * (1 - gain)).sqrt() * (randn_like(moved, generator))
        rest = math.sqrt(variance) * randn_like(x, generator)
        x = centre + rest + (moved + spread - along - rest @ v.mT) @ v
        normal = torch.distributions.Normal(along, (variance + distance).sqrt())
        known = (ahead * normal.log_prob(target)).sum(1)
        log_weights = log_weights + (known - before).view(runs, count)
        resampled = effective_share(log_weights) < RESAMPLED_BELOW
        index = resampled_rows(log_weights, uniforms((runs, 1), x, generator), resampled)
        total += torch.where(resampled, log_weights.logsumexp(1) - math.log(count), 0.0)
        log_weights, x = torch.where(resampled[:, None], 0.0, log_weights), x[index]
        still = (own < sigma * (1 - 1e-9)).to(x)
        potential = torch.distributions.Normal(x @ v.mT, distance.clamp(min=1e-30).sqrt())
        before = torch.where(still > 0, potential.log_prob(target), 0.0).sum(1)
        mean = denoiser(x, NoiseLevel(sigma))
        if i + 1 < len(sigmas):
            kept = (sigmas[i + 1] / sigma) ** 2
            centre, variance = (1 - kept) * mean + kept * x, sigmas[i + 1] ** 2 * (1 - kept)
    total += log_weights.logsumexp(1) - math.log(count) - s.log().sum()
    u = uniforms((len(x), 1), x, generator).view(runs, count)
    return mean[resampled_rows(log_weights, u, torch.ones_like(total, dtype=torch.bool))], total


def _images(cell: Cell, settings: Settings) -> Part:
    """The measures of `inverse` for bridges with so many particles; the exact covariance."""
    (count, below), task = cell.what, cell.column
    values: dict[str, Any] = {"gap": [], "spread": [], "evidence": []}
    mixture, levels = inverse.changing_mixture(), inverse.restoration_levels(settings.image_levels)
    for seed in cell.seeds:
        operator, truth, y = inverse.problem(task, settings.images, seed)
        exact = mixture.given(y, operator, inverse.NOISE)
        rows = y.repeat_interleave(settings.draws * count, 0)
        given = GivenMoments(ExactMoments(mixture), rows, operator, inverse.NOISE)
        plan = restoration_plan(given, levels, BRIDGE, count, below)
        start = levels[0].sigma * randn_like(
            rows.new_empty(len(rows), *inverse.SHAPE), seeded(seed, "start")
        )
        chains = run_chains(plan, start, seed=seed, progress=None)
        draws = chains.x[::count].unflatten(0, (settings.images, -1)).transpose(0, 1)
        judged = inverse.judged(draws, truth, exact.mean)
        values["gap"].append(judged["gap"])
        values["spread"].append(calibration_ratio(draws, truth))
        if count > 1:
            logs = chains.info["log_evidence"][::count].view(settings.images, -1)
            estimates = logs.logsumexp(1) - math.log(logs.shape[1])
            exact_log = mixture.log_evidence(y, operator, inverse.NOISE)
            values["evidence"].append((estimates - exact_log).abs().mean().item())
    if count == 1:
        del values["evidence"]
    values["evaluations"] = count * len(levels) * (1.0 + PRODUCT * inverse.D)
    return Part(values)


OTHER_FILTERS = {TDS: tds, MCG: mcg_diff}
"""Particle filters of others."""


def _sections(images: Results, modes: Results, curves: Results) -> list[Section]:
    figure = curves.curves(
        "particles",
        "Two modes in the plane, 25 levels: the error of a mode's weight by evaluations of a draw "
        "(left) and by the number of particles or sweeps (right).",
        WEIGHT,
        x=(EVALUATIONS, None),
        log="x",
    )
    texts = [
        "Weighted particles beside single bridges, sweeps and TDS, and azula's solvers with the "
        "setting of least CRPS on other measurements.",
        *rivals.left_out(),
        *rivals.settings_said([{**r, "task": r["problem"]} for r in modes.records()]),
    ]
    tables = []
    for results, measures, prefix in (
        (modes, (WEIGHT, EVIDENCE, EVALUATIONS), ""),
        (images, (GAP, SPREAD, EVIDENCE), "images: "),
    ):
        rows = {row: row for row in sorted(results.rows, key=_count)}
        tables += results.tables(measures, prefix, rows=rows, head="draws by")
    return [Section("Draws by weighted particles", texts, tables, [figure])]
