"""Intervals with a guarantee: split conformal calibration on held-out images.

Clean images are noised and denoised, and the scores are |x - mean| / std, pixel by pixel, and |v' (x - mean)| / std
along each component v. Half of the images fit one factor for each, the other half says what it covers. The factor is

    the least f with  1 / (n + 1) sum_i (share of image i's scores that are at most f)  >=  0.9

over the n images that fit: then a pixel (or component) chosen at random in a new image of the same kind lies within f
standard deviations with probability 0.9 or more, whatever the network (Dunn, Wasserman and Ramdas, 2023). It holds on
average over images and pixels, not for every image.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.generation.posteriors import COVERED, Estimators, Factors, level_of
from mmdgs.linalg.components import TOLERANCE
from mmdgs.models import Model
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Streams
from mmdgs.runtime import progress_bar

LEAST = 20
"""Images that are needed in all: with fewer than 9 to fit, no finite factor has the guarantee."""


@dataclass(frozen=True)
class Conformal:
    """Factors at a sigma (for values in [0, 1]) and the coverage that they, and a Gaussian's, reach on other images."""

    sigma: float
    images: int
    pixel: float
    component: float
    coverage_pixel: float
    coverage_component: float
    before_pixel: float
    before_component: float

    @property
    def factors(self) -> Factors:
        return Factors(self.pixel, self.component)

    def record(self) -> dict[str, Any]:
        return asdict(self)


def conformal_factor(scores: Tensor, covered: float = COVERED) -> float:
    """The factor from scores (images, numbers); infinite where the images are too few."""
    images, numbers = scores.shape
    needed = math.ceil(covered * (images + 1) * numbers - 1e-9)
    if needed > images * numbers:
        return math.inf
    return scores.flatten().kthvalue(needed).values.item()


def calibrated_factors(
    model: Model,
    x: Tensor,
    sigma: float,
    *,
    components: int = 5,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    calibrated: bool | None = None,
    progress: str | None = "calibrating",
) -> Conformal:
    """Fit on every second of clean images x (n, C, H, W) in [0, 1], and check on the others."""
    level = level_of(model, sigma)
    if len(x) < LEAST:
        raise UsageError(f"calibration needs {LEAST} images or more, half to fit and half to check, got {len(x)}")
    made = Estimators.of(model, model.shape, calibrated=calibrated)
    pixels, along, before = [], [], math.nan
    with progress_bar(len(x), progress, unit="image") as bar:
        for i, image in enumerate(x):
            clean = model.scaled(image[None].float()).to(model.device)
            (own, others), before = _scores(made, clean, level, (components, tolerance), (seed, i))
            pixels.append(own)
            along.append(others)
            bar.update()
    found = []
    for scores in (torch.stack(pixels), torch.stack(along)):
        factor = conformal_factor(scores[::2])
        found.append((factor, *[(scores[1::2] <= f).double().mean().item() for f in (factor, before)]))
    (pixel, covers, pixel_before), (component, component_covers, component_before) = found
    return Conformal(sigma, len(x), pixel, component, covers, component_covers, pixel_before, component_before)


def _scores(
    made: Estimators, x: Tensor, level: NoiseLevel, wanted: tuple[int, float], stream: tuple[int, int]
) -> tuple[tuple[Tensor, Tensor], float]:
    """Scores of the pixels and of the components of one image (1, C, H, W), and how far intervals reach without them.

    `wanted` are how many components with which tolerance, and `stream` the seed and the image's number.
    """
    (components, tolerance), (seed, number) = wanted, stream
    x_t = add_noise(x, level, generator=Streams(seed, 1, number, purpose="conformal noise"))
    q = made.diagonal(x_t, level, generator=Streams(seed, 1, number, purpose="conformal probes"))
    error = x - q.mean
    pixels = (error.abs() / q.cov.diagonal().sqrt()).flatten().cpu()
    if not components:
        return (pixels, torch.zeros(1)), q.deviations(COVERED)
    found = made.full(x_t, level).components(components, tolerance=tolerance)
    return (pixels, (found.along(error).abs() / found.stds)[0].cpu()), q.deviations(COVERED)
