"""Which covariance makes clean images likely: held-out likelihoods over the levels of one model.

log N(x; mean, C) a number of each clean image x under the posterior of a noisy version of it, in
nats, and above that of one variance for all numbers (isotropic).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.drawing import legend
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results, axis
from experiments.held_out import data_of, held_out_images
from mmdgs import covariances
from mmdgs.cost import counting
from mmdgs.metrics.reports import report_of
from mmdgs.models import COVARIANCE, Model, load
from mmdgs.models.estimators import head_beside
from mmdgs.moments import (
    CalibratedMoments,
    DiagonalMoments,
    IsotropicMoments,
    KrylovMoments,
    Moments,
    SpectralMoments,
    calibrated,
)
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams
from mmdgs.report.drawing import new_figure
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.schedules import geometric
from mmdgs.workspace import Part

MODEL, ACROSS = "cifar10", "sigma / alpha"
ISOTROPIC, DIAGONAL, SPECTRAL, MODULATED, KRYLOV = ROWS = (
    *("isotropic", "diagonal", "spectral", "modulated", "Krylov"),
)
PROBES = 3  # of the diagonal
AT_ONCE = {"cuda": 64, "cpu": 8}  # images
NATS = Measure("nats", "log-likelihood", 2, "more")
GAIN = Measure("gain", "nats a number above isotropic", 2, "more")
Pairs = list[tuple[Tensor, Gaussian]]


@dataclass(frozen=True)
class LevelSettings:
    """How many held-out images and training images to fit on, levels, probes and Krylov steps."""

    images: int = 64
    fit_images: int = 500
    floor_images: int = 32  # of them, for the floor of the diagonal
    levels: int = axis(6)
    krylov_images: int = 8
    krylov_steps: int = 20
    krylov_probes: int = 2
    krylov_floor: float = 0.1  # of the isotropic variance: smaller eigenvalues are errors


FULL = {
    "cuda": LevelSettings(images=512, krylov_images=64, krylov_probes=10),
    "cpu": LevelSettings(),
}
QUICK = LevelSettings(4, 8, 4, levels=2, krylov_images=2, krylov_steps=3, krylov_probes=1)


def run(context: Context) -> Outcome:
    """The likelihoods of held-out images at the levels of one model."""
    settings = context.sized(FULL.get(context.device.type, FULL["cpu"]), QUICK)
    model = load(context.model or MODEL, device=context.device)
    data, counts = data_of(model), {"train": settings.fit_images, "test": settings.images}
    images = cache(lambda split: held_out_images(context, model, split, counts[split]))
    at = lru_cache(maxsize=1)(
        lambda level: Estimators(model, level, settings, context.seed, images)
    )
    modulated = head_beside(model, COVARIANCE) is not None
    rows = [row for row in ROWS if row != MODULATED or modulated]
    levels = chosen_levels(model.levels, settings.levels)
    cells = {(row, ratio): level for ratio, level in levels.items() for row in rows}

    def measure(cell: Cell) -> Part:
        return at(cell.what).measure(cell)

    results = Grid("covariances", cells, measure, (settings, model), ACROSS).run(context)
    named = asdict(settings) | {"model": model.source, "data": data}
    section = _section(results, settings, f"{data}, of {model.source}")
    return Outcome({"settings": named, "levels": results.records()}, [section], left=results.open())


def chosen_levels(levels: Sequence[NoiseLevel], count: int) -> dict[float, NoiseLevel]:
    """About `count` levels by sigma / alpha, equally far apart in its logarithm, ends included."""
    by = {float(f"{level.sigma / level.alpha:.4g}"): level for level in levels}
    if len(by) <= count:
        return by
    aims = [level.sigma for level in geometric(count, max(by), min(by))]
    nearest = [min(by, key=lambda ratio: abs(math.log(ratio / aim))) for aim in aims]
    return {ratio: by[ratio] for ratio in nearest}


@dataclass(eq=False)
class Estimators:
    """The covariances of a model at a level, fitted on training images, judged on held-out ones."""

    model: Model
    level: NoiseLevel
    settings: LevelSettings
    seed: int
    images: Callable[[str], Tensor]  # of "train" and "test"

    def measure(self, cell: Cell) -> Part:
        """Nats a number of each image, also above isotropic, and the evaluations of one draw.

        Of the modulated covariance also nats above the spectral one, and its calibration.
        """
        moments, x = self.moments(cell.row), self.images("test")
        x = x[: self.settings.krylov_images if cell.row == KRYLOV else None]
        pairs: Pairs = []
        if cell.row in (ISOTROPIC, SPECTRAL):
            nats = self.isotropic if cell.row == ISOTROPIC else self.spectral_nats
        elif cell.row == MODULATED:
            pairs = list(judged(moments, x, self.level, seed=self.seed))
            nats = _nats_of(pairs)
        else:
            nats = likelihoods(moments, x, self.level, seed=self.seed)
        streams = Streams(self.seed, 1, purpose="cost")
        with counting() as cost:
            moments(x[:1], self.level, generator=streams).sample(generator=streams)
        gain = (nats - self.isotropic[: len(x)]).tolist()
        values = {"nats": nats.tolist(), "gain": gain, "evaluations": cost.evaluations}
        if pairs:
            report = report_of(pairs, self.level, seed=self.seed)
            values["above_spectral"] = (nats - self.spectral_nats).tolist()
            values |= {key: getattr(report, key) for key in ("z_variance", "interval_coverage")}
        return Part(values)

    def moments(self, row: str) -> Moments:
        """The estimator of a row."""
        if row == SPECTRAL:
            return self.spectral
        if row == MODULATED:
            return self.model.posterior(covariances.Modulated(calibrated=False))
        if row == DIAGONAL:  # with floor and scale under which training images are likeliest
            x = self.images("train")[: self.settings.floor_images]
            probed = DiagonalMoments(self.model, probes=PROBES)
            fitted = calibrated.fit_floor_and_scale(probed, x, self.level, seed=self.seed)
            return CalibratedMoments(probed, LevelTable.of({self.level: fitted}))
        # Cosines are a rotation: the mean of the spectrum is the mean square of the errors.
        variance, settings = self.spectral.variances[self.level].mean().item(), self.settings
        if row == ISOTROPIC:
            return IsotropicMoments(self.model, LevelTable.of({self.level: variance}))
        floor = settings.krylov_floor * variance / self.level.variance
        steps, probes = settings.krylov_steps, settings.krylov_probes
        return KrylovMoments(self.model, steps=steps, floor=floor, probes=probes)

    @cached_property
    def isotropic(self) -> Tensor:
        """The likelihoods that the others are compared with."""
        return likelihoods(self.moments(ISOTROPIC), self.images("test"), self.level, seed=self.seed)

    @cached_property
    def spectral_nats(self) -> Tensor:
        """Those that the modulated covariance is compared with."""
        return likelihoods(self.spectral, self.images("test"), self.level, seed=self.seed)

    @cached_property
    def spectral(self) -> SpectralMoments:
        fit = self.images("train")
        streams = Streams(self.seed, len(fit), purpose="fit")
        return SpectralMoments.fit(self.model, fit, [self.level], generator=streams)


def judged(
    moments: Moments, x: Tensor, level: NoiseLevel, *, seed: int
) -> Iterator[tuple[Tensor, Gaussian]]:
    """Batches of images, and posteriors of noisy versions of them, the same for all estimators."""
    rows = AT_ONCE.get(x.device.type, AT_ONCE["cpu"])
    return calibrated.posteriors(moments, x, level, seed=seed, purpose="judged", rows=rows)


def likelihoods(
    moments: Moments, x: Float[Tensor, "batch ..."], level: NoiseLevel, *, seed: int
) -> Float[Tensor, " batch"]:
    """log N(x; mean, C) / d of each x under the posterior of a noisy version of it, in nats."""
    return _nats_of(judged(moments, x, level, seed=seed))


def _nats_of(pairs: Iterable[tuple[Tensor, Gaussian]]) -> Tensor:
    nats = [q.log_prob(clean) / clean[0].numel() for clean, q in pairs]
    return torch.cat(nats).detach().double().cpu()


def _section(results: Results, settings: LevelSettings, source: str) -> Section:
    text = [
        "Isotropic and spectral variances are fitted on training images, and so are floor and "
        f"scale of the diagonal ({PROBES} probes). Krylov is the full covariance of the network's "
        f"Jacobian by {settings.krylov_steps} steps, its eigenvalues at least "
        f"{settings.krylov_floor:g} of the isotropic variance."
    ]
    note = (
        f"{settings.images} held-out images of {source} (Krylov: the first "
        f"{settings.krylov_images}), {settings.fit_images} to fit on; ± 95% over images. In "
        "brackets: evaluations of one draw, a product with the Jacobian counting as two."
    )
    title = "Likelihood, nats a number; of all but isotropic, how much above it on the same images"
    costs = {row: part.values["evaluations"] for (row, _), part in results.parts.items()}
    rows = {row: f"{row} ({cost:g})" for row, cost in costs.items()}
    columns = {ratio: f"{ACROSS} {ratio:.3g}" for ratio in results.columns}
    shown: Any = {"head": "covariance", "note": note, "rows": rows, "columns": columns}
    table = results.table(title, [NATS], against=ISOTROPIC, **shown)
    caption = "Nats a number above the isotropic covariance, on the same images; 95% over images."
    canvas, axes = new_figure(1, 1, inches=(5.8, 3.4))
    results.draw(axes[0][0], GAIN, log="x")
    legend(canvas)
    others = [row for row in results.rows if row != ISOTROPIC]
    claims = [results.below(row, ISOTROPIC, NATS) for row in others]
    figures = [Figure("covariances", caption, canvas)]
    return Section("Which covariance", text, [table], figures, claims)
