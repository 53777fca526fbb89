"""Training losses as pure functions: (model, x, level) -> one loss per example.

Denoising score matching has a weight lambda(level), which says how much each of many levels counts.
Through the denoiser's error x - D(x_t), in which every parametrisation is the same, the usual are

    score     1                             1/2 ||s - s*||^2        Vincent (2011); the paper's
    ncsnv2    sigma^2                       1/2 ||sigma s + e||^2   Song and Ermon (2019, eq. 6)
    noise     2 sigma^2                     ||eps - e||^2           Ho et al. (2020, eq. 14)
    edm       2 sigma^2 (1 + (r / d)^2)     w ||D - x||^2           Karras et al. (2022), table 1

where s* = -e / sigma, eps = -sigma s, and w = (r^2 + d^2) / (r d)^2 with r = sigma / alpha and d =
0.5, the data's standard deviation. All are sums over the numbers of an example, not means.

`ocm` and `covariance` train another network, beside a denoiser that stays as it is: see
moments/ocm.py and moments/heads.py. x is (B, ...), every loss (B,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmdgs.denoisers import DATA_STD, Denoiser, denoise
from mmdgs.moments import Moments
from mmdgs.moments.heads import SpectralHead
from mmdgs.moments.ocm import Head, ratio_target
from mmdgs.moments.probes import ProbeDesign
from mmdgs.noise import AnyLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator

Weighting = Callable[[AnyLevel], float | Tensor]
"""lambda(level), which multiplies 1/2 ||score error||^2."""


def score_weighting(level: AnyLevel) -> float | Tensor:
    """1: the error of the score itself, which the smallest sigma dominates."""
    return 1.0


def ncsnv2_weighting(level: AnyLevel) -> float | Tensor:
    """sigma^2: levels count alike."""
    return level.sigma**2


def noise_weighting(level: AnyLevel) -> float | Tensor:
    """2 sigma^2: the squared error of the noise."""
    return 2 * level.sigma**2


def edm_weighting(level: AnyLevel) -> float | Tensor:
    """Such that a network in `edm_denoiser` has errors that count alike at all levels."""
    return 2 * level.sigma**2 * (1 + (level.sigma / level.alpha / DATA_STD) ** 2)


WEIGHTINGS: dict[str, Weighting] = {
    "score": score_weighting,
    "ncsnv2": ncsnv2_weighting,
    "noise": noise_weighting,
    "edm": edm_weighting,
}
"""The weightings by name, for recipes."""


def _weighted(error: Tensor, weight: float | Tensor) -> Tensor:
    """Errors (B,) times a number, or one a row (B, 1, ...)."""
    return error * (weight.flatten() if isinstance(weight, Tensor) else weight)


def dsm(
    denoiser: Denoiser,
    x: Tensor,
    level: AnyLevel,
    *,
    generator: Generator,
    weighting: Weighting = score_weighting,
    stated: AnyLevel | None = None,
) -> Tensor:
    """Denoising score matching: lambda alpha^2 / (2 sigma^4) ||x - D(x_t)||^2.

    Vincent (2011); the paper's eq. dsm and dsm:mean. `stated` is what the denoiser gets in place
    of the level.
    """
    x_t = add_noise(x, level, generator=generator)
    error = (
        (x - denoise(denoiser, x_t, level if stated is None else stated)).flatten(1).square().sum(1)
    )
    return _weighted(error, weighting(level) * (0.5 * level.alpha**2 / level.sigma**4))


def kl(moments: Moments, x: Tensor, level: AnyLevel, *, generator: Generator) -> Tensor:
    """The joint KL up to a constant, -log q(x | x_t) (Bengio et al., 2013; eq. joint:kl)."""
    x_t = add_noise(x, level, generator=generator)
    estimator: Any = moments  # heads take levels of rows
    return -estimator(x_t, level, generator=generator).log_prob(x)


def ocm(
    head: Head,
    denoiser: Denoiser,
    x: Tensor,
    level: AnyLevel,
    *,
    generator: Generator,
    probes: int = 1,
    design: ProbeDesign | None = None,
    weight: Weighting = score_weighting,
) -> Tensor:
    """Optimal covariance matching: w ||h(x_t, D(x_t)) - y||^2, y = alpha v * (v' J), probes v.

    Ou et al. (2024). y is unbiased for r = alpha diag(J), so r is the minimiser for any number of
    probes and any weight w(level); the gradient goes into the head alone. `design` must be
    unbiased; None: `ocm.unbiased_design`.
    """
    x_t = add_noise(x, level, generator=generator)
    mean, target = ratio_target(
        denoiser, x_t, level, generator=generator, probes=probes, design=design
    )
    return _weighted((head(x_t, mean, level) - target).flatten(1).square().sum(1), weight(level))


def covariance(
    head: SpectralHead, denoiser: Denoiser, x: Tensor, level: AnyLevel, *, generator: Generator
) -> Tensor:
    """-log N(x; D(x_t), C) in nats, C by the head; the gradient goes into the head alone."""
    x_t = add_noise(x, level, generator=generator)
    with torch.no_grad():
        mean = denoise(denoiser, x_t, level)
    return -Gaussian(mean, head(x_t, mean, level)).log_prob(x)
