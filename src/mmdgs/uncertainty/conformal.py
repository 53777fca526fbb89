"""Intervals with a guarantee: split conformal calibration on held-out images.

Clean images are noised and denoised, and the scores are |x - mean| / std, pixel by pixel, and
|v' (x - mean)| / std along each component v. Half of the images fit one factor for each, the other
half says what it covers. The factor is

    the least f with  1 / (n + 1) sum_i (share of image i's scores that are at most f)  >=  0.9

over the n images that fit: then a pixel (or component) chosen at random in a new image of the same
kind lies within f standard deviations with probability 0.9 or more, whatever the network (Dunn,
Wasserman and Ramdas, 2023). It holds on average over images and pixels, not for every image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.noise import add_noise
from mmdgs.randomness import Streams, child_seed
from mmdgs.runtime import progress_bar
from mmdgs.uncertainty.estimators import Estimators, level_of, settings_for
from mmdgs.uncertainty.image import COVERED
from mmdgs.uncertainty.settings import PosteriorSettings

LEAST = 20
"""Images that are needed in all: with fewer than 9 to fit, no finite factor has the guarantee."""


@dataclass(frozen=True)
class Conformal:
    """Factors at a sigma (for values in [0, 1]), and the coverage of them and of a Gaussian's on
    other images.
    """

    sigma: float
    images: int
    pixel: float
    component: float
    coverage_pixel: float
    coverage_component: float
    before_pixel: float
    before_component: float

    @property
    def words(self) -> str:
        """What is said of it on the pages."""
        return (
            f"90% intervals are calibrated on {self.images} held-out images: {self.pixel:.3g} "
            f"standard deviations for pixels, {self.component:.3g} for components. On the half "
            f"that was not fitted to they cover {100 * self.coverage_pixel:.1f}% of the pixels and "
            f"{100 * self.coverage_component:.1f}% of the components."
        )


def conformal_factor(scores: Tensor, covered: float = COVERED) -> float:
    """The factor from scores (images, numbers); infinite where the images are too few."""
    images, numbers = scores.shape
    needed = math.ceil(covered * (images + 1) * numbers - 1e-9)
    if needed > images * numbers:
        return math.inf
    return scores.flatten().kthvalue(needed).values.item()


def calibrated_factors(model: Model, x: Tensor, settings: PosteriorSettings) -> Conformal:
    """Fit on every second of clean images x (n, C, H, W) in [0, 1], and check on the others."""
    sigma = float(settings.sigma)  # type: ignore[arg-type]  # checked: a number
    level = level_of(model, sigma)
    if len(x) < LEAST:
        raise UsageError(
            f"calibration needs {LEAST} images or more, half to fit and half to check, got {len(x)}"
        )
    settings = replace(settings_for(model, settings), draws=0, region=None)
    estimators = Estimators.of(model, x.shape[1:], settings)
    seed = child_seed(settings.seed, "conformal")
    pixels, along, gaussian = [], [], math.nan
    with progress_bar(len(x), "calibrating", unit="image") as bar:
        for i, image in enumerate(x):

            def streams(purpose: str, row: int = i) -> Streams:
                return Streams(seed, 1, row, purpose=f"conformal {purpose}")

            clean = model.scaled(image[None].float()).to(model.device)
            x_t = add_noise(clean, level, generator=streams("noise"))
            estimates = estimators.at(x_t, level, streams)
            q = estimates.q
            error, gaussian = clean - q.mean, q.deviations(COVERED)
            pixels.append((error.abs() / q.cov.diagonal().sqrt()).flatten().cpu())
            if settings.components:
                components = estimates.components(settings)[0]
                along.append((components.along(error).abs() / components.stds)[0].cpu())
            else:
                along.append(torch.zeros(1))
            bar.update()
    kinds = []
    for scores in (torch.stack(pixels), torch.stack(along)):
        factor = conformal_factor(scores[::2])
        covers = [(scores[1::2] <= f).double().mean().item() for f in (factor, gaussian)]
        kinds.append((factor, *covers))
    return Conformal(sigma, len(x), *(value for pair in zip(*kinds, strict=True) for value in pair))
