"""Which covariance: how likely held-out images are under each posterior of their noisy versions, level by level.

A posterior is a density, so no sampler is needed to judge it: the logarithm of N(x; mean, C) in nats a number. All
have the same mean; what differs is C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property, lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import counting
from mmdgs.errors import UsageError
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Cell, Grid, Measure, Results
from mmdgs.lab.held_out import ACROSS, chosen_levels, costs, data_of, held_out_images, over_levels, titles
from mmdgs.lab.report import Section
from mmdgs.lab.workspace import Part, axis
from mmdgs.metrics.reports import report_of
from mmdgs.models import COVARIANCE, Model, from_pretrained
from mmdgs.models.covariances import head_beside
from mmdgs.moments import CalibratedMoments, DiagonalMoments, IsotropicMoments, KrylovMoments, Moments
from mmdgs.moments.calibrated import fit_floor_and_scale, posteriors
from mmdgs.moments.spectral import SpectralMoments
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams

MODEL = "cifar10"
AT_ONCE = {"cuda": 64, "cpu": 8}  # images
ISOTROPIC, DIAGONAL, SPECTRAL, MODULATED, KRYLOV = ROWS = "isotropic", "diagonal", "spectral", "modulated", "Krylov"
NATS = Measure("nats", "log-likelihood", 2, "more")
GAIN = Measure("gain", "nats a number above isotropic", 2, "more")


@dataclass(frozen=True)
class CovarianceSettings:
    """How many held-out images, training images to fit on, levels, probes of the diagonal, and Krylov steps."""

    images: int = 64
    fit_images: int = 500
    floor_images: int = 32  # of them, for the floor of the diagonal
    levels: int = axis(6)
    probes: int = 3
    krylov_images: int = 8
    krylov_steps: int = 20
    krylov_probes: int = 2
    krylov_floor: float = 0.1  # of the isotropic variance: smaller eigenvalues of a network's Jacobian are its errors


FULL = {"cuda": CovarianceSettings(images=512, krylov_images=64, krylov_probes=10), "cpu": CovarianceSettings()}
QUICK = CovarianceSettings(
    images=4, fit_images=8, floor_images=4, levels=2, krylov_images=2, krylov_steps=3, krylov_probes=1
)


def run(context: Context) -> Outcome:
    """The likelihoods at every level."""
    settings = context.sized(FULL.get(context.device.type, FULL["cpu"]), QUICK)
    model = from_pretrained(context.model or MODEL, device=context.device)
    data = data_of(model)
    if settings.images < 2:
        raise UsageError(f"--images must be at least 2, for an interval; got {settings.images}")
    counts = {"train": settings.fit_images, "test": settings.images}
    images = cache(lambda split: held_out_images(context, model, split, counts[split]))  # read once, where it is needed
    at = lru_cache(maxsize=1)(lambda level: Estimators(model, level, settings, context.seed, images))
    levels = chosen_levels(model.levels, settings.levels)
    rows = [row for row in ROWS if row != MODULATED or head_beside(model, COVARIANCE) is not None]
    cells = {(row, ratio): level for ratio, level in levels.items() for row in rows}
    found = Grid("covariances", cells, lambda cell: at(cell.what).measure(cell), (settings, model), ACROSS).run(context)
    named = asdict(settings) | {"model": model.source, "data": data}
    records = {"settings": named, "levels": found.records()}
    return Outcome(records, [_section(found, settings, named, context.quick)], left=found.open())


@dataclass(eq=False)
class Estimators:
    """The covariances of a model at a level, fitted on training images and judged on held-out ones."""

    model: Model
    level: NoiseLevel
    settings: CovarianceSettings
    seed: int
    images: Callable[[str], Tensor]  # of "train" and "test"

    def measure(self, cell: Cell) -> Part:
        """Nats a number of each image, the same above isotropic, and the evaluations of one draw.

        Of the modulated covariance also nats above the spectral one, and how its uncertainty fits the errors.
        """
        moments = self.moments(cell.row)
        x = self.images("test")[: self.settings.krylov_images if cell.row == KRYLOV else None]
        pairs: Iterable[tuple[Tensor, Gaussian]] = judged(moments, x, self.level, seed=self.seed)
        if cell.row == MODULATED:
            pairs = list(pairs)  # for its likelihood, and for its report
        if cell.row in (ISOTROPIC, SPECTRAL):
            nats = self.isotropic if cell.row == ISOTROPIC else self.spectral_nats
        else:
            nats = nats_of(pairs)
        streams = Streams(self.seed, 1, purpose="cost")
        with counting() as cost:
            moments(x[:1], self.level, generator=streams).sample(generator=streams)
        gain = nats - self.isotropic[: len(x)]
        values = {"nats": nats.tolist(), "gain": gain.tolist(), "evaluations": cost.evaluations}
        if cell.row == MODULATED:
            report = report_of(pairs, self.level, seed=self.seed)
            values["above_spectral"] = (nats - self.spectral_nats).tolist()
            values |= {"z_variance": report.z_variance, "interval_coverage": report.interval_coverage}
        return Part(values)

    def moments(self, row: str) -> Moments:
        """The estimator of a row."""
        if row in (SPECTRAL, DIAGONAL):
            return self.spectral if row == SPECTRAL else self._diagonal()
        if row == MODULATED:
            return self.model.posterior("modulated", calibrated=False)
        # Cosines are a rotation: the mean of the spectrum is the mean square of the errors themselves.
        variance, settings = self.spectral.variances[self.level].mean().item(), self.settings
        if row == ISOTROPIC:
            return IsotropicMoments(self.model, LevelTable.of({self.level: variance}))
        floor = settings.krylov_floor * variance / self.level.variance
        return KrylovMoments(self.model, steps=settings.krylov_steps, floor=floor, probes=settings.krylov_probes)

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

    def _diagonal(self) -> CalibratedMoments:
        """The diagonal with the floor and the scale under which training images are likeliest."""
        x = self.images("train")[: self.settings.floor_images]
        moments = DiagonalMoments(self.model, probes=self.settings.probes)
        found = fit_floor_and_scale(moments, x, self.level, seed=self.seed)
        return CalibratedMoments(moments, LevelTable.of({self.level: found}))


def judged(moments: Moments, x: Tensor, level: NoiseLevel, *, seed: int) -> Iterator[tuple[Tensor, Gaussian]]:
    """Batches of images, and the posteriors of noisy versions of them, the same for all estimators."""
    rows = AT_ONCE.get(x.device.type, AT_ONCE["cpu"])
    return posteriors(moments, x, level, seed=seed, purpose="judged", rows=rows)


def likelihoods(
    moments: Moments, x: Float[Tensor, "batch ..."], level: NoiseLevel, *, seed: int
) -> Float[Tensor, " batch"]:
    """log N(x; mean, C) / d of each x under the posterior of a noisy version of it, in nats."""
    return nats_of(judged(moments, x, level, seed=seed))


def nats_of(pairs: Iterable[tuple[Tensor, Gaussian]]) -> Float[Tensor, " batch"]:
    """log N(x; mean, C) / d of each x under its posterior."""
    found = [q.log_prob(clean) / clean[0].numel() for clean, q in pairs]
    return torch.cat(found).detach().double().cpu()


def _section(found: Results, settings: CovarianceSettings, named: dict[str, object], quick: bool) -> Section:
    text = [
        "Isotropic and spectral variances are fitted on training images, and so are floor and scale of the diagonal "
        f"({settings.probes} probes). Krylov is the full covariance of the network's Jacobian by "
        f"{settings.krylov_steps} steps, its eigenvalues at least {settings.krylov_floor:g} of the isotropic variance.",
        *(["This is the quick version: so few images say nothing."] if quick else []),
        *found.unfinished(),
    ]
    note = (
        f"{settings.images} held-out images of {named['data']} (Krylov: the first {settings.krylov_images}), "
        f"{settings.fit_images} to fit on, of {named['model']}; ± 95% over images. In brackets: evaluations of one "
        "draw, a product with the Jacobian counting as two."
    )
    title = "Likelihood, nats a number; of all but isotropic, how much above it on the same images"
    table = found.table(
        title, [NATS], head="covariance", note=note, rows=costs(found), columns=titles(found), against=ISOTROPIC
    )
    caption = "Nats a number above the isotropic covariance, on the same images; 95% over images."
    figure = over_levels(found, "covariances", caption, [(GAIN, "x")])
    claims = [] if quick else [found.below(row, ISOTROPIC, NATS) for row in found.rows if row != ISOTROPIC]
    return Section("Which covariance", text, [table], [figure], claims)
