"""Conditioning on measurements of exact mixtures: which covariance gives draws of p(x | y) as wide
as their errors; with --model cifar10 or celeba held-out images are restored in their place.

No network is in it: the denoiser is the mixture's own, and p(x | y) is known. The mixture is of
8 x 8 images whose correlations and contrast change from place to place and from component to
component, so that one spectrum for all is wrong on purpose. Chains go down the levels by the bridge
of p(x | x_t, y), draw by draw; rows of `OTHER_CHAINS` by other levels, with the noise turned round
(samplers/mirrored.py), or by means (multistep).

    gap          10 log10 of the square error of the draws' mean over that of the optimal mean,
                 without what the finite number of draws adds
    calibration  spread over error (metrics/draws.py): 1 where right
    coverage     of central 90% intervals

Samples without measurements are judged too, by their energy distance from the mixture. Where azula
is installed its MMPS, PiGDM and DPS are beside ours (rivals.py). The one setting of each is that
with the least CRPS on measurements of another seed. Images are in inverse_networks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from experiments import inverse_networks, rivals
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results
from mmdgs.cost import PRODUCT
from mmdgs.denoisers import Denoiser
from mmdgs.metrics import calibration_ratio, coverage_of
from mmdgs.moments import (
    DiagonalMoments,
    ExactMoments,
    GivenMoments,
    IsotropicMoments,
    KrylovMoments,
    LowRankMoments,
    Moments,
    SpectralMoments,
)
from mmdgs.noise import NoiseLevel
from mmdgs.operators import Blur, Box, Mask, Matrix, Operator
from mmdgs.randomness import child_seed, randn_like, seeded
from mmdgs.report.page import Outcome, Section
from mmdgs.restoration.chains import restoration_plan
from mmdgs.restoration.settings import BRIDGE, MIRRORED, MULTISTEP
from mmdgs.samplers import Plan, ancestral_plan, run as run_chains
from mmdgs.schedules import Levels, edm, geometric
from mmdgs.targets import GaussianMixture
from mmdgs.workspace import Part

SHAPE = (1, 8, 8)
D = math.prod(SHAPE)
NOISE = 0.05
FIRST, LAST = 100.0, 0.01
"""The noisiest level is as far above the data's deviation as that of the models that ship."""
LOW_FIRST, LOW_LAST = 10.0, 0.03
"""Ends of `low_levels`, chosen on other measurements (seeds 1000 to 1009)."""
KNOTS, FIT_IMAGES = 20, 2_000
EXACT, FULL_ROW = "exact posterior", "full"
GAP = Measure("gap", "gap to the optimal mean, dB", 2, "less")
CALIBRATION = Measure("calibration", "spread over error", 3)
COVERAGE = Measure("coverage", "coverage of 90% intervals", 1, percent=True)
EVALUATIONS = Measure("evaluations", "evaluations", 0)
COMPARED, ENERGY = 10, Measure("energy", "energy distance", 4, "less")
"""Samples of the mixture itself for each that is judged without measurements."""


@cache
def changing_mixture() -> GaussianMixture:
    """Four kinds of 8 x 8 images, each with its own length of correlation and bright place."""
    generator = seeded(0, "changing mixture")
    places = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0)).double()
    means, covariances = [], []
    for length in (1.0, 2.0, 3.0, 4.0):
        centre = 7 * torch.rand(2, generator=generator, dtype=torch.float64)
        contrast = 0.2 + (-0.5 * ((places - centre) / 2).square().sum(1)).exp()
        correlation = (-0.5 * (torch.cdist(places, places) / length).square()).exp()
        noise = 1e-3 * torch.eye(D, dtype=torch.float64)
        covariances.append(contrast[:, None] * correlation * contrast + noise)
        means.append(0.5 * torch.randn(D, generator=generator, dtype=torch.float64))
    return GaussianMixture([0.4, 0.3, 0.2, 0.1], torch.stack(means), torch.stack(covariances))


@dataclass(frozen=True)
class ImageDenoiser:
    """A mixture's denoiser for images: their last dimension is not their size."""

    denoiser: Denoiser
    symmetric_jacobian: bool = True

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        return self.denoiser(x_t.flatten(1), level).reshape(x_t.shape)


def _fitted(kind: type[IsotropicMoments] | type[SpectralMoments]) -> Moments:
    x = changing_mixture().sample(FIT_IMAGES, generator=seeded(0, "fit")).reshape(-1, *SHAPE)
    return kind.fit(_denoiser(), x, geometric(KNOTS, FIRST, LAST), generator=seeded(0, "fit noise"))


@cache
def _denoiser() -> ImageDenoiser:
    return ImageDenoiser(changing_mixture().denoiser())


def _low_rank(rest: str, products: int) -> LowRankMoments:
    fitted: Any = ROWS[rest]()
    return LowRankMoments(_denoiser(), fitted, products)


def _krylov(steps: int) -> KrylovMoments:
    return KrylovMoments(_denoiser(), steps=steps)


ROWS: dict[str, Callable[[], Moments]] = {
    "isotropic": cache(lambda: _fitted(IsotropicMoments)),
    "spectral": cache(lambda: _fitted(SpectralMoments)),
    "low rank, 1 product": partial(_low_rank, "spectral", 1),
    **{f"low rank, {n} products": partial(_low_rank, "spectral", n) for n in (2, 4, 8)},
    "low rank around isotropic, 2 products": partial(_low_rank, "isotropic", 2),
    "diagonal, 3 probes": lambda: DiagonalMoments(_denoiser(), probes=3),
    **{f"Krylov, {n} steps": partial(_krylov, n) for n in (8, 20)},
    FULL_ROW: lambda: ExactMoments(changing_mixture()),  # FullMoments without its 64 products
}


def restoration_levels(count: int) -> Levels:
    """EDM's, as `restore` has them."""
    return edm(count, FIRST, LAST)


def low_levels(count: int) -> Levels:
    """Of equal ratio, between `LOW_FIRST` and `LOW_LAST`."""
    return geometric(count, LOW_FIRST, LOW_LAST)


OTHER_CHAINS: dict[str, tuple[str, str, Callable[[int], Levels]]] = {
    "full, mirrored": (FULL_ROW, MIRRORED, low_levels),
    "Krylov, 20 steps, mirrored": ("Krylov, 20 steps", MIRRORED, low_levels),
    "low rank, 2 products, mirrored": ("low rank, 2 products", MIRRORED, low_levels),
    "low rank, 2 products, from 10": ("low rank, 2 products", BRIDGE, low_levels),
    "full, multistep": (FULL_ROW, MULTISTEP, restoration_levels),
    "low rank, 2 products, multistep": ("low rank, 2 products", MULTISTEP, restoration_levels),
    "spectral, multistep": ("spectral", MULTISTEP, restoration_levels),
}
"""Whose covariance, which chains, and along which levels."""
LOW = ("isotropic", "spectral", "low rank, 1 product", "low rank, 2 products")
ALONG_MEAN = "low rank, 2 products along the mean"
SAMPLED: dict[str, Callable[[], Moments | None]] = {
    EXACT: lambda: None,
    **{row: ROWS[row] for row in LOW},
    "low rank around isotropic, 1 product": partial(_low_rank, "isotropic", 1),
    ALONG_MEAN: lambda: replace(_low_rank("spectral", 2), along_draws=False),
    **{f"Krylov, {n} steps": partial(_krylov, n) for n in (2, 8)},
    FULL_ROW: ROWS[FULL_ROW],
}
"""Covariances of samples without measurements."""
RIVALS = {
    f"{name} (azula), {steps} steps": (name, steps)
    for name, steps in (("MMPS", 10), ("MMPS", 100), ("PiGDM", 100), ("DPS", 300))
}
TASKS: dict[str, Callable[[], Operator]] = {
    "deconvolution": lambda: Blur.gaussian(SHAPE, 1.5),
    "box": lambda: Box(SHAPE, 4),
    "imputation": lambda: Mask.random(SHAPE, 0.8, generator=seeded(0, "imputation")),
}


@dataclass(frozen=True)
class InverseSettings:
    """Measurements a seed, draws of each, levels, seeds, samples; and those of a rival's search."""

    images: int = 60
    draws: int = 12
    levels: int = 10
    seeds: int = 5
    samples: int = 400
    tuned_on: int = 10
    tuned_draws: int = 6
    rivals: tuple[str, ...] = tuple(RIVALS)


FULL = InverseSettings()
QUICK = InverseSettings(
    images=6, draws=4, seeds=2, samples=10, tuned_on=2, tuned_draws=3, rivals=tuple(RIVALS)[:1]
)


def run(context: Context) -> Outcome:
    """Restore with every covariance on every task; judge the draws by the truth and p(x | y)."""
    if context.model is not None:
        return inverse_networks.run(context)
    settings = context.sized(FULL, QUICK)
    beside = {row: RIVALS[row] for row in settings.rivals} if rivals.installed() else {}
    rows = (EXACT, *ROWS, *OTHER_CHAINS, *beside)
    cells = {(row, task): beside.get(row) for row in rows for task in TASKS}
    measures, seeds = partial(_measured, settings=settings), settings.seeds
    results = Grid("inverse", cells, measures, settings, "task", seeds=seeds).run(context)
    sections, records = [_section(results, settings)], {"mixtures": results.records()}
    if context.only is None:
        free: dict[tuple[str, str], None] = dict.fromkeys((row, "samples") for row in SAMPLED)
        own = partial(_samples, settings=settings)
        samples = Grid("samples", free, own, settings, "what", seeds=seeds).run(context)
        sections.append(_samples_section(samples, settings))
        records["samples"] = samples.records()
    return Outcome({"settings": asdict(settings), **records}, sections, left=results.open())


def _samples(cell: Cell, settings: InverseSettings) -> Part:
    """Ancestral samples of every seed: energy distances, and the evaluations of a sample."""
    mixture, levels = changing_mixture(), restoration_levels(settings.levels)
    moments, count, distances, evaluations = SAMPLED[cell.row](), settings.samples, [], 0.0
    for seed in cell.seeds:
        truth = mixture.sample(COMPARED * count, generator=seeded(seed, "compared"))
        if moments is None:
            x = mixture.sample(count, generator=seeded(seed, "exact"))
        else:
            noise = randn_like(truth.new_empty(count, *SHAPE), seeded(seed, "start"))
            plan = ancestral_plan(moments, levels)
            chains = run_chains(plan, levels[0].sigma * noise, seed=seed, progress=None)
            x, evaluations = chains.x.flatten(1), chains.cost.evaluations
        distances.append(energy_distance(x, truth))
    if cell.row == FULL_ROW:  # the exact moments count nothing, and the last step is a mean
        evaluations = len(levels) + (len(levels) - 1) * PRODUCT * D
    return Part({"energy": distances, "evaluations": evaluations})


def energy_distance(x: Tensor, y: Tensor) -> float:
    """2 E|x - y| - E|x - x'| - E|y - y'| of samples (n, d) and (m, d), without bias."""
    own = sum(torch.cdist(z, z).sum() / (len(z) * (len(z) - 1)) for z in (x, y))
    return (2 * torch.cdist(x, y).mean() - own).item()


def _measured(cell: Cell, settings: InverseSettings) -> Part:
    values: dict[str, Any] = {"gap": [], "calibration": [], "coverage": []}
    rival, steps = cell.what or ("", 0)
    if rival:
        values |= _tuned(rival, steps, cell.column, settings, cell.seeds[-1] + 1)
    for seed in cell.seeds:
        operator, truth, y = problem(cell.column, settings.images, seed)
        exact = changing_mixture().given(y, operator, NOISE)
        if cell.row == EXACT:
            draws, evaluations = exact.sample(settings.draws, generator=seeded(seed, "exact")), 0.0
        elif rival:
            known = (steps, settings.draws, values["setting"], seed)
            draws, evaluations = _by_rival(rival, y, operator, *known)
        else:
            draws, evaluations = _restored(cell.row, y, operator, settings, seed)
        for name, value in judged(draws, truth, exact.mean).items():
            values[name].append(value)
        # The exact moments count nothing; FullMoments takes a product for each dimension.
        full = OTHER_CHAINS.get(cell.row, (cell.row,))[0] == FULL_ROW
        values["evaluations"] = settings.levels * (1 + PRODUCT * D) if full else evaluations
    return Part(values)


def problem(task: str, images: int, seed: int) -> tuple[Operator, Tensor, Tensor]:
    """The operator, images and measurements of a seed."""
    operator = TASKS[task]()
    truth = changing_mixture().sample(images, generator=seeded(seed, "truth")).reshape(-1, *SHAPE)
    clean = operator(truth)
    return operator, truth, clean + NOISE * randn_like(clean, seeded(seed, "noise"))


def _tuned(
    name: str, steps: int, task: str, settings: InverseSettings, seed: int
) -> dict[str, Any]:
    """The setting of a rival with the least CRPS on measurements that are not scored."""
    operator, truth, y = problem(task, settings.tuned_on, seed)

    def score(setting: float) -> tuple[Tensor, Tensor]:
        return _by_rival(name, y, operator, steps, settings.tuned_draws, setting, seed)[0], truth

    return rivals.tuned(name, score)


def _by_rival(
    name: str, y: Tensor, operator: Operator, steps: int, draws: int, setting: float, seed: int
) -> tuple[Tensor, float]:
    """As `_restored`, by azula's code, with a matrix: azula differentiates at every product."""
    counted = rivals.Counted(_denoiser())
    matrix = Matrix(operator(torch.eye(D, dtype=y.dtype).reshape(-1, *SHAPE)).flatten(1).mT, SHAPE)
    problem = rivals.Problem(counted, y.flatten(1).repeat(draws, 1), matrix, NOISE, FIRST)
    drawn = problem.draw(name, steps, setting, child_seed(seed, name))
    return drawn.unflatten(0, (draws, -1)), counted.cost.evaluations


def _plan(row: str, y: Tensor, operator: Operator, count: int) -> Plan:
    """The chains of a row along so many levels."""
    of, chains, levels = OTHER_CHAINS.get(row, (row, BRIDGE, restoration_levels))
    given = GivenMoments(ROWS[of](), y, operator, NOISE)
    return restoration_plan(given, levels(count), chains)


def _restored(
    row: str, y: Tensor, operator: Operator, settings: InverseSettings, seed: int
) -> tuple[Tensor, float]:
    """Draws (draws, images, ...), and the evaluations of each."""
    rows = y.repeat(settings.draws, *[1] * (y.ndim - 1))
    plan = _plan(row, rows, operator, settings.levels)
    start = plan.start.sigma * randn_like(rows.new_empty(len(rows), *SHAPE), seeded(seed, "start"))
    chains = run_chains(plan, start, seed=seed, progress=None)
    return chains.x.unflatten(0, (settings.draws, -1)), chains.cost.evaluations


def judged(draws: Tensor, truth: Tensor, optimal: Tensor) -> dict[str, float]:
    """Gap, calibration and coverage of draws (S, B, ...); NaN where a draw is not finite."""
    if not draws.isfinite().all():
        return dict.fromkeys(("gap", "calibration", "coverage"), math.nan)
    finite = draws.var(0).mean() / len(draws)  # what the mean of S draws adds to its error
    error = (draws.mean(0) - truth).square().mean() - finite
    gap = 10 * (error / (optimal - truth).square().mean()).clamp(min=1e-12).log10().item()
    ratio, covered = calibration_ratio(draws, truth), coverage_of(draws, truth)
    return {"gap": gap, "calibration": ratio, "coverage": covered}


def _section(results: Results, settings: InverseSettings) -> Section:
    text = [
        f"Measurements of a mixture of 8 x 8 images with noise {NOISE:g}: a Gaussian blur of 1.5 "
        "pixels, a missing box of 4 x 4, and 80% of the pixels missing. Chains go down "
        f"{settings.levels} noise levels from {FIRST:g} to {LAST:g}, by the bridge of p(x | x_t, "
        "y); a product with the Jacobian counts as two evaluations. Rows 'mirrored' and 'from 10' "
        f"have as many levels from {LOW_FIRST:g} to {LOW_LAST:g}, equal in ratio; mirrored chains "
        "draw x and go on with the noise turned round. Rows 'multistep' follow the means.",
        *rivals.left_out(),
        *rivals.settings_said(results.records()),
    ]
    note = (
        f"{settings.images} measurements, {settings.draws} draws of each; ± 95% over "
        f"{settings.seeds} seeds. The exact posterior shows what the number of measurements and "
        "draws alone does."
    )
    rows, measures = [r for r in results.rows if r != EXACT], (GAP, CALIBRATION, COVERAGE)
    shown = {"head": "covariance", "note": note, "compared": rows}
    tables = results.tables((*measures, EVALUATIONS), **shown)
    return Section("Draws of p(x | y) on exact mixtures", text, tables)


def _samples_section(results: Results, settings: InverseSettings) -> Section:
    text = f"Samples of the same mixture by ancestral sampling along {settings.levels} levels."
    note = (
        f"{settings.samples:,} samples against {COMPARED * settings.samples:,} of the mixture "
        f"itself; ± 95% over {settings.seeds} seeds. The estimate has no bias, so that it may be "
        "below zero."
    )
    title, measures = "Energy distance from the mixture", [ENERGY, EVALUATIONS]
    table = results.table(title, measures, head="covariance", note=note)
    return Section("Samples of exact mixtures", [text], [table])
