"""Two published benchmarks with known posteriors: `mmdgs judge --suite SAMPLER.py`.

    A    16 dimensions, one of two modes unseen (Qiu et al., 2026, arXiv 2602.04189): 14 weak (A1)
         or 4 strong (A2) measurements of one x, noise 0.2 or 0.5, five draws of the noise, 500 of x
    B    Levy processes of 64 places (Zach, Haouchat and Unser, 2026, arXiv 2509.12821) with
         increments of Gauss, Laplace, Student and Bernoulli-Laplace; identity, deconvolution,
         imputation, Fourier; noise 25 dB below the median power

A sampler's file defines

    def sample(problem, draws, generator):      # -> (draws, N, d), a tensor or an array

with `problem` as below, all that it may use: neither truth nor prior are in it. Measured are

    A    RMSE to x; score-KSD (discrepancy.py) with the exact score, and over that of exact draws;
         the share of the mode x_1 + x_2 > 3 (which KSD does not see); the share of exact draws in
         the draws' 90% intervals
    B    the gap of the draws' mean, 10 log10 |m - x|^2 / |E[x | y] - x|^2 in dB, mean over signals;
         coverage of the draws' 90% intervals
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError, first_line
from mmdgs.levy import Gauss, Increments, Laplace, LevyProcess, Student
from mmdgs.metrics import Judgement, coverage_of, judge, score_ksd
from mmdgs.randomness import randn_like, seeded
from mmdgs.runtime import progress_bar
from mmdgs.targets import GaussianMixture

TRUE_16 = (3, 2, 0.5, -0.5, 1, 0.8, -0.6, 1.1, -0.9, 0.4, 0, -1.2, 0.7, -0.3, 0.5, -0.8)
NOISE_DRAWS, GROUPS = 5, 10
"""Of A: measurements of the one x, and the parts into which its draws are cut to be judged."""
MANY = 20_000  # exact draws that intervals and modes of A are held against
SIGNALS, SNR = 1_000, 25.0
"""Of B: signals whose median power sets the noise, so many dB below it."""
BURN_IN, SWEEPS, APART = 300, 2_000, 20
"""Of the reference: sweeps before it counts, for the mean, and from one exact draw to the next."""
NOISIEST = 20.0  # over the largest signal
KERNEL_TAPS, KERNEL_WIDTH, LOW = 13, 2.0, 5
KEPT = "1001001011001100011101000101010111010011001110011010010101101011"
"""The mask of B's authors: places that are not missing, and frequencies from the fifth on."""


@dataclass(frozen=True)
class Problem:
    """y = A x + noise e for N measurements: y (N, m), A (m, d), and a denoiser of x.

    denoiser(x_t, level) is E[x | x_t] (B, d), differentiable, for NoiseLevels of ratio `noisiest`
    (where x is lost) and below.
    """

    name: str
    y: Tensor
    matrix: Tensor
    noise: float
    denoiser: Denoiser
    noisiest: float

    @property
    def cases(self) -> int:
        return len(self.y)

    @property
    def dim(self) -> int:
        return self.matrix.shape[1]


@dataclass(frozen=True)
class Case:
    """A problem, its truth (N, d), exact draws (S, N, d) by count and generator, and the numbers of
    draws (S, N, d), mostly one a measurement; of A draws are many, and are judged in groups.
    """

    problem: Problem
    truth: Tensor
    exact: Callable[[int, torch.Generator], Tensor]
    numbers: Callable[[Tensor], dict[str, list[float]]]
    groups: int = 1

    def judged(self, draws: Tensor, exact: Tensor, tasks: int, seed: int) -> Judgement:
        """Beside as many exact draws; in groups, where the truth is no draw, by another of them."""
        name, truth = self.problem.name, self.truth[None]
        if self.groups > 1:
            truth = self.exact(self.groups, seeded(seed, f"{name} truth"))
        draws, exact = (_grouped(x, self.groups) for x in (draws, exact))
        return judge(draws, truth.flatten(0, 1), exact=exact, tasks=tasks, seed=seed)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Draws (S, N, d) as (S / groups, groups N, d)."""
    return x.unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2)


# --- A


@cache
def prior_16() -> GaussianMixture:
    """The prior of A: two modes in the first two coordinates."""
    far, variances = torch.zeros(2, 16).double(), torch.ones(2, 16).double()
    far[1, :2], variances[1, :2] = 3.0, 2.0
    return GaussianMixture([0.8, 0.2], far, variances).to(dtype=torch.float64)


def matrix_16(name: str) -> Tensor:
    """The matrix of A1 (14, 16) or A2 (4, 16)."""
    if name == "A2":
        return 3.0 * torch.eye(16).double()[:4]
    weak = torch.linspace(0.1, 0.75, 14, dtype=torch.float64)
    return weak[:, None] * torch.eye(16).double()[2:]


def in_mode_16(x: Tensor) -> Tensor:
    return x[..., :2].sum(-1) > 3


def case_16(matrix: str, noise: float, seed: int, denoiser: Denoiser | None = None) -> Case:
    """A cell of A; with another denoiser than the exact one its draws are judged all the same."""
    prior, a, name = prior_16(), matrix_16(matrix), f"{matrix}, {noise:g}"
    x = torch.tensor(TRUE_16).double().expand(NOISE_DRAWS, -1)
    clean = x @ a.mT
    y = clean + noise * randn_like(clean, seeded(seed, f"{name} noise"))
    posterior = prior.given(y, a, noise)
    problem = Problem(name, y, a, noise, denoiser or prior.denoiser(), 40.0)

    def exact(count: int, generator: torch.Generator) -> Tensor:
        return posterior.sample(count, generator=generator)

    def ksd(draws: Tensor) -> Tensor:
        scale = 1 / (torch.linalg.svdvals(a).median().item() + 1)
        scores = ((y - draws @ a.mT) @ a / noise**2) + prior.score(draws)
        pairs = zip(draws.unbind(1), scores.unbind(1), strict=True)
        return draws.new_tensor([score_ksd(*pair, scale) for pair in pairs])

    @cache
    def best(count: int) -> Tensor:
        """The root of the mean square of exact draws' score-KSD, over some sets of them."""
        sets = [ksd(exact(count, seeded(seed, f"reference {number}"))) for number in range(4)]
        return torch.stack(sets).square().mean(0).sqrt()

    @cache
    def many() -> Tensor:
        return exact(MANY, seeded(seed, "many"))

    def numbers(draws: Tensor) -> dict[str, list[float]]:
        low, high = draws.quantile(torch.tensor([0.05, 0.95]).to(draws), 0)
        own = ksd(draws)
        values = {
            "rmse": (draws - x).square().mean((0, 2)).sqrt(),
            "ksd": own,
            "ksd_ratio": own / best(len(draws)),
            "mode": in_mode_16(draws).double().mean(0),
            "coverage": ((many() > low) & (many() < high)).double().mean((0, 2)),
        }
        return {name: each.tolist() for name, each in values.items()}

    return Case(problem, x, exact, numbers, GROUPS)


CELLS_16 = [(matrix, noise) for matrix in ("A1", "A2") for noise in (0.2, 0.5)]

# --- B

INCREMENTS: dict[str, Increments] = {
    "Gauss": Gauss(0.25),
    "Laplace": Laplace(1.0),
    "Bernoulli-Laplace": Laplace(1.0, 0.1),
    "Student 1": Student(1),
    "Student 2": Student(2),
    "Student 3": Student(3),
}


def _mask() -> Tensor:
    return torch.tensor([letter == "1" for letter in KEPT])


def _convolution(d: int) -> Tensor:
    """Around a circle, with a Gaussian kernel."""
    places = torch.arange(d).double()
    apart = (places[:, None] - places + d // 2) % d - d // 2
    kernel = (-0.5 * (apart / KERNEL_WIDTH).square()).exp() * (apart.abs() <= KERNEL_TAPS // 2)
    return kernel / kernel.sum(1, keepdim=True)


def _fourier(d: int) -> Tensor:
    """Real and imaginary parts of the low and some other frequencies, orthonormal."""
    frequencies = [f for f in range(d // 2 + 1) if f < LOW or KEPT[f] == "1"]
    turns = torch.tensor(frequencies).double()[:, None] * torch.arange(d) / d
    angle = 2 * math.pi * turns
    ends = torch.tensor([f in (0, d // 2) for f in frequencies])
    real = angle.cos()
    real[ends] /= math.sqrt(2)
    return torch.cat([real, angle.sin()[~ends]]) / math.sqrt(d / 2)


TASKS: dict[str, Callable[[int], Tensor]] = {
    "identity": lambda d: torch.eye(d).double(),
    "deconvolution": _convolution,
    "imputation": lambda d: torch.eye(d).double()[_mask()],
    "Fourier": _fourier,
}


@dataclass(frozen=True)
class Levy:
    """A cell of B: a law of increments, and a task."""

    law: str
    task: str

    @property
    def process(self) -> LevyProcess:
        return LevyProcess(INCREMENTS[self.law])

    def case(self, signals: int, seed: int, denoiser: Denoiser | None = None) -> Case:
        """So many signals; the denoiser is that by Gibbs unless given."""
        process, name = self.process, f"{self.law}, {self.task}"
        a = TASKS[self.task](process.dim)
        power = (process.sample(SIGNALS, seeded(0, self.law)) @ a.mT).square().mean(1).median()
        noise = math.sqrt(power.item() / 10 ** (SNR / 10))
        truth = process.sample(signals, seeded(seed, f"{self.law} truth"))
        clean = truth @ a.mT
        y = clean + noise * randn_like(clean, seeded(seed, f"{name} noise"))
        denoiser = denoiser or process.denoiser(seed=seed)
        noisiest = NOISIEST * truth.square().mean(1).max().sqrt().item()

        def exact(count: int, generator: torch.Generator) -> Tensor:
            chain = process.sweeps(y, a, noise, APART * count, BURN_IN, generator)
            return torch.stack([sweep.x for sweep in islice(chain, APART - 1, None, APART)])

        @cache
        def optimal() -> Tensor:
            chain = process.sweeps(y, a, noise, SWEEPS, BURN_IN, seeded(seed, f"{name} Gibbs"))
            return torch.stack([sweep.mean for sweep in chain]).mean(0)

        def numbers(draws: Tensor) -> dict[str, list[float]]:
            errors = [(x - truth).square().sum(1) for x in (draws.mean(0), optimal())]
            gaps = 10 * (errors[0] / errors[1]).log10()
            return {"gap": gaps.tolist(), "coverage": [coverage_of(draws, truth)]}

        return Case(Problem(name, y, a, noise, denoiser, noisiest), truth, exact, numbers)


SUITE_OF_B = (
    Levy("Gauss", "Fourier"),
    Levy("Laplace", "deconvolution"),
    Levy("Student 1", "imputation"),
    Levy("Bernoulli-Laplace", "identity"),
)
"""Every kind of increment and every task once."""


def suite(cases: int, seed: int) -> list[Case]:
    """All of A, and four cells of B with so many signals."""
    of_a = [case_16(matrix, noise, seed) for matrix, noise in CELLS_16]
    return of_a + [cell.case(cases, seed) for cell in SUITE_OF_B]


Sampler = Callable[[Problem, int, torch.Generator], Tensor | np.ndarray]


def load_sampler(path: Path) -> Sampler:
    """The function `sample` of the user's own Python file, which is run."""
    form = "sample(problem, draws, generator)"
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(f"--suite needs a Python file with {form}: {path}")
    try:
        sampler: Sampler | None = runpy.run_path(str(path), run_name=f"_suite_{path.stem}").get(
            "sample"
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{path} failed when it was run: {reason}") from error
    if not callable(sampler):
        raise UsageError(f"{path} must define {form} -> (draws, N, d)")
    return sampler


def sampled(sampler: Sampler, problem: Problem, draws: int, seed: int) -> Tensor:
    """Draws (draws, N, d) of a sampler, checked."""
    try:
        generator = seeded(seed, f"{problem.name} sampler")
        x = torch.as_tensor(sampler(problem, draws, generator)).detach()
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}; --debug shows where"
        raise UsageError(f"the sampler failed on {problem.name}: {reason}") from error
    shape = (draws, problem.cases, problem.dim)
    if x.shape != shape or not x.is_floating_point():
        need = f"floating-point draws {shape} of {problem.name}: (draws, N, d)"
        raise UsageError(f"sample(...) must return {need}; got {x.dtype} {tuple(x.shape)}")
    if not x.isfinite().all():
        raise UsageError(f"the draws of {problem.name} hold numbers that are not finite")
    return x.double().cpu()


class Judged(NamedTuple):
    """A sampler's judgement on a problem, its numbers, and those of as many exact draws."""

    judgement: Judgement
    numbers: Mapping[str, list[float]]
    exact: Mapping[str, list[float]]


def judged_suite(sampler: Sampler, cases: int, draws: int, seed: int) -> dict[str, Judged]:
    """A sampler on every problem, by its name; of A with `GROUPS` times as many draws."""
    judged, problems = {}, suite(cases, seed)
    with progress_bar(len(problems), "judging", unit="problem") as bar:
        for case in problems:
            name, count = case.problem.name, case.groups * draws
            own = sampled(sampler, case.problem, count, seed)
            exact = case.exact(count, seeded(seed, f"{name} exact"))
            judgement = case.judged(own, exact, tasks=len(problems), seed=seed)
            judged[name] = Judged(judgement, case.numbers(own), case.numbers(exact))
            bar.update()
    return judged


def row_of(name: str, judged: Mapping[str, Judged]) -> str:
    """A line for the table of docs/results/benchmarks.md."""
    cells = []
    for each in judged.values():
        x = {name: f"{fmean(values):.2f}" for name, values in each.numbers.items()}
        shown = ("gap", "coverage") if "gap" in x else ("rmse", "ksd_ratio", "mode", "coverage")
        cells.append(" / ".join(x[name] for name in shown))
    return f"| {name} | {' | '.join(cells)} |"
