"""The estimators of an image's posterior, and what they compute of it, in the model's units.

mean, std, intervals   the diagonal covariance by probes, with the calibration kept with the model
draws                  a covariance with correlations. A fitted spectrum R knows no place: it
                       takes its strength from the diagonal,

                           C = diag(s) R diag(s),   s^2 = var / diag R at every pixel

                       (means over the channels and WINDOW x WINDOW pixels)
components             the largest eigenvalues of the full covariance by block Lanczos, with
                       skewness and excess kurtosis along each; of a region and its context
                       (regions.py) where the model takes images of any size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.covariances import Spectral
from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError
from mmdgs.linalg.components import Components, inside
from mmdgs.linalg.operators import Diagonal
from mmdgs.linalg.spectral import Modulated, Spectral as SpectralCovariance
from mmdgs.models import Model
from mmdgs.models.fits import FitStore
from mmdgs.models.weights import SPECTRAL
from mmdgs.moments import Moments, SpectralMoments, higher_moments
from mmdgs.moments.calibrated import calibration_record
from mmdgs.moments.contract import with_denoiser
from mmdgs.noise import NoiseLevel
from mmdgs.operators.measurements import check_unit_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams
from mmdgs.uncertainty.regions import LARGE, around, most_uncertain
from mmdgs.uncertainty.settings import PosteriorSettings, Region
from mmdgs.uncertainty.tiles import fitted_denoiser

Purposes = Callable[[str], Streams]
"""The random streams of a purpose."""
WINDOW = 9
"""Photographs were as likely under this as under the best spectrum without place, or likelier by
0.01 nats a number; with a strength for single pixels some were less likely by 0.08."""
MEAN, DRAWS, COMPONENTS = "mean and uncertainty", "draws", "components"


def level_of(model: Model, sigma: float) -> NoiseLevel:
    """The level of noise of this standard deviation for values in [0, 1], if the model knows it."""
    check_unit_noise(sigma)
    own, width = own_sigmas(model), model.interval[1] - model.interval[0]
    if own and not 0.99 * own[0] <= sigma <= 1.01 * own[-1]:
        known = f"{own[0]:.3g} alone" if len(own) == 1 else f"from {own[0]:.3g} to {own[-1]:.3g}"
        raise UsageError(
            f"the model knows sigma {known}, for values in [0, 1], and sigma is {sigma:.3g}"
        )
    return NoiseLevel(sigma=sigma * width)


def own_sigmas(model: Model) -> list[float]:
    """The noise that a model was trained with, for values in [0, 1], rising."""
    width = model.interval[1] - model.interval[0]
    return sorted(level.ratio / width for level in model.levels)


def settings_for(model: Model, settings: PosteriorSettings) -> PosteriorSettings:
    """Settings with everything set that is left to the model."""
    spectrum = model.any_size and settings.draws_by is None
    spectrum = spectrum and FitStore(model, SPECTRAL).best_of() is not None
    return settings.of_model(any_size=model.any_size, spectrum=spectrum)


@dataclass(frozen=True)
class Estimators:
    """The posteriors of images of one size: the calibrated diagonal, the full covariance, and the
    one of draws (None: the full one).

    An estimator that was given is the first, and the others too where it has correlations.
    """

    model: Model
    denoiser: Denoiser
    diagonal: Moments
    full: Moments
    drawn: Moments | None
    given: bool

    @classmethod
    def of(
        cls,
        model: Model,
        shape: Sequence[int],
        settings: PosteriorSettings,
        given: Moments | None = None,
    ) -> Estimators:
        """Those of a model for images of a shape (C, H, W)."""
        settings = settings_for(model, settings)
        denoiser, by = fitted_denoiser(model, *shape[-2:]), settings.draws_by
        both = given or model.posterior(settings.diagonal), model.posterior(settings.krylov)
        diagonal, full = (with_denoiser(moments, denoiser) for moments in both)
        drawn = None
        if settings.draws and by != settings.krylov:
            # Of a spectrum the diagonal has the calibration.
            by = replace(by, calibrated=False) if isinstance(by, Spectral) else by
            drawn = with_denoiser(model.posterior(by), denoiser)
        return cls(model, denoiser, diagonal, full, drawn, given is not None)

    def calibrations(self, levels: Sequence[NoiseLevel]) -> dict[str, Any]:
        """The calibration of each, for records."""
        each = {"diagonal": self.diagonal, "krylov": self.full, "draws": self.drawn}
        return {
            name: calibration_record(moments, levels)
            for name, moments in each.items()
            if moments is not None
        }

    def at(self, x_t: Tensor, level: NoiseLevel, streams: Purposes) -> ImageEstimates:
        """What they say of one image x_t (1, C, H, W)."""
        q = self.diagonal(x_t, level, generator=streams("probes"))
        return ImageEstimates(self, x_t, level, streams, q)


@dataclass(frozen=True)
class Part:
    """What components see: a denoiser of x_t (1, C, h, w); their region in the whole image."""

    denoiser: Denoiser
    x_t: Tensor
    region: Region | None


@dataclass(frozen=True)
class ImageEstimates:
    """Estimators at one image, (1, C, H, W); `q` is its diagonal posterior."""

    of: Estimators
    x_t: Tensor
    level: NoiseLevel
    streams: Purposes
    q: Gaussian

    @property
    def _given(self) -> bool:
        """Whether an estimator that was given has correlations."""
        return self.of.given and not isinstance(self.q.cov, Diagonal)

    @cached_property
    def full(self) -> Gaussian:
        """With the full covariance; it holds the graph of a forward pass."""
        if self._given:
            return self.q
        return self.of.full(self.x_t, self.level, generator=self.streams("signs"))

    @cached_property
    def drawn(self) -> Gaussian:
        """That of the draws."""
        moments = None if self._given else self.of.drawn
        if moments is None:
            return self.full
        if isinstance(moments, SpectralMoments):
            spectral = moments.covariance(self.x_t, self.level)
            return replace(self.q, cov=with_strength(spectral, self.q.cov.diagonal()))
        return moments(self.x_t, self.level, generator=self.streams("signs"))

    def components(self, settings: PosteriorSettings) -> tuple[Components, Components, Part]:
        """Those of the region or image; the same in the part that they come from; that part."""
        x_t, model, region = self.x_t, self.of.model, settings.region
        height, width = x_t.shape[2:]
        if region is None and model.any_size and height * width > LARGE:
            region = most_uncertain(self.q.cov.diagonal()[0].sqrt())
        k, tolerance = settings.components or 0, settings.tolerance
        if region is None or not model.any_size:
            whole = self.full.components(k, region, tolerance=tolerance)
            return whole, whole, Part(self.of.denoiser, x_t, region)
        box = around(region, height, width, settings.margin)
        part = Part(fitted_denoiser(model, box[3], box[2]), inside(x_t, box).contiguous(), region)
        moments = self.of.diagonal if self._given else self.of.full
        q = with_denoiser(moments, part.denoiser)(
            part.x_t, self.level, generator=self.streams("signs")
        )
        corner = region[0] - box[0], region[1] - box[1]
        own = q.components(k, (*corner, *region[2:]), tolerance=tolerance)
        directions = own.directions.new_zeros(1, k, *x_t.shape[1:])
        inside(directions, box).copy_(own.directions)
        return replace(own, directions=directions), own, part


def with_strength(spectral: SpectralCovariance, variances: Tensor) -> Modulated:
    """A spectrum R whose strength at each pixel is that of variances (B, C, H, W) around it."""
    own, theirs = (
        functional.avg_pool2d(
            v.mean(1, keepdim=True), WINDOW, 1, WINDOW // 2, count_include_pad=False
        )
        for v in (spectral.diagonal(), variances)
    )
    return Modulated((0.5 * (theirs / own).log()).expand_as(variances), spectral)


def computed(
    estimates: ImageEstimates,
    settings: PosteriorSettings,
    tick: Callable[[int], Any],
    doing: Callable[[str], Any],
) -> tuple[Region | None, dict[str, Tensor]]:
    """The region of the components, and all arrays of one image by name, in the model's units."""
    tick(1)
    q, x_t, draws = estimates.q, estimates.x_t, []
    if settings.draws:
        doing(DRAWS)
    for j in range(settings.draws or 0):
        draws.append(estimates.drawn.sample(generator=estimates.streams(f"draw {j}")))
        tick(1)
    none, empty = x_t.new_zeros(1, 0, *x_t.shape[1:]), x_t.new_zeros(1, 0)
    arrays = {"mean": q.mean, "std": q.cov.diagonal().sqrt()}
    arrays["draws"] = torch.stack(draws, 1) if draws else none
    names = ("variances", "residuals", "skewness", "excess_kurtosis", "density", "grid")
    arrays |= {"directions": none, **dict.fromkeys(names, empty)}
    region = settings.region
    if settings.components:
        doing(COMPONENTS)
        components, own, part = estimates.components(settings)
        higher = higher_moments(part.denoiser, part.x_t, estimates.level, own.directions)
        marginal, region = higher.marginal(), part.region
        arrays |= {"directions": components.directions, "variances": components.variances}
        arrays |= {"residuals": components.residuals, "skewness": higher.skewness}
        arrays |= {"excess_kurtosis": higher.excess_kurtosis, "density": marginal.density}
        arrays |= {"grid": marginal.grid[None]}
    tick(2)
    return region, {name: value.detach().cpu()[0] for name, value in arrays.items()}
