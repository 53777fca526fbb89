"""The posterior of an image whose noise is not the same everywhere, by draws of `mmdgs.restore`.

y = x + s e with s a map, a sensor's noise, clipped and unknown pixels are measurements by the
identity. Of n draws with mean m and deviation d a 90% interval is that of one draw more,

    m +- t d sqrt(1 + 1 / n),    t = z (1 + (z^2 + 1) / (4 n - 4)),    z = 1.645

(t is Student's quantile to the first order in 1 / n).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from mmdgs.covariances import Spectral
from mmdgs.linalg.operators import Diagonal
from mmdgs.moments.contract import with_denoiser
from mmdgs.operators import Mask
from mmdgs.posterior import Gaussian
from mmdgs.randomness import child_seed
from mmdgs.restoration.draws import Restoration
from mmdgs.restoration.settings import RestorationSettings
from mmdgs.uncertainty.estimators import DRAWS
from mmdgs.uncertainty.image import COVERED, ImagePosterior, PosteriorWork, scores_of

LEAST_DRAWS = 16
"""Whatever is shown: a standard deviation of so many is known within 18%."""
NONE = ("variances", "residuals", "skewness", "excess_kurtosis", "density", "grid", "reach")


def drawn_posterior(
    work: PosteriorWork,
    i: int,
    noisy: Tensor,
    truth: Tensor | None,
    remarks: tuple[str, ...],
    tick: Callable[[int], Any],
    doing: Callable[[str], Any],
) -> ImagePosterior:
    """That of image i of a run, (C, H, W)."""
    started, settings, named = time.perf_counter(), work.settings, work.images[i]
    shown, noise = settings.draws or 0, work.noise(i)
    doing(DRAWS)
    covariance = with_denoiser(work.given, work.model) if work.given else settings.draws_by
    how = RestorationSettings(
        noise,
        covariance or Spectral(),
        draws=max(LEAST_DRAWS, shown),
        seed=child_seed(settings.seed, f"posterior {i} draws"),
    )
    bounds = named.scale.bounds if work.bounds and named.scale else None
    known = Mask(~noisy.isnan())
    restoration = Restoration.of(
        how, work.model.sized(*noisy.shape[1:]), noisy[None], known, bounds=bounds
    )
    restored = restoration.draws(progress=None)
    tick(settings.parts)
    draws = restored.draws[:, 0]
    mean, std, count = draws.mean(0), draws.std(0), len(draws)
    normal = Gaussian(mean[None], Diagonal(std[None])).deviations(COVERED)
    reach = normal * (1 + (normal**2 + 1) / (4 * count - 4)) * math.sqrt(1 + 1 / count) * std
    none: dict[str, Any] = dict.fromkeys(NONE, mean.new_zeros(0))
    posterior = ImagePosterior(
        name=named.name,
        sigma=work.sigmas[i],
        noisy=noisy.nan_to_num(0.0).cpu().float(),
        mean=mean,
        std=std,
        low=mean - reach,
        high=mean + reach,
        draws=draws[:shown],
        directions=mean.new_zeros(0, *mean.shape),
        **none,
        truth=None if truth is None else truth.cpu().float(),
        region=None,
        tiles=1,
        cost=restored.cost.times(count),
        seconds=time.perf_counter() - started,
        remarks=(*remarks, _words(restoration, count, known)),
        model=work.model.source,
        command=work.command(i),
    )
    return replace(posterior, scores=scores_of(posterior))


def _words(restoration: Restoration, count: int, known: Mask) -> str:
    keep, deviations = known.keep.tensor, restoration.deviations
    low, high = (x.item() for x in deviations.expand_as(restoration.y)[0][keep].aminmax())
    said = f"Mean, standard deviations and intervals are those of {count} draws; there are no "
    said += f"components. The noise is {low:.3g} to {high:.3g}."
    missing = 100 * (1 - keep.float().mean().item())
    return said + (f" {missing:.2g}% of the values were not known." if missing else "")
