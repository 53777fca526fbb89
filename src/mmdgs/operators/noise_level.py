"""The noise of an image, from its patches: detail in them must not count as noise.

colour  The eigenvalues of the covariance of 3 x 3 patches, all channels together (Chen, Zhu and Heng, 2015): images
        lie near few dimensions and noise lies in all, so the largest eigenvalues are left out one by one until the
        mean of the rest is not above their median.
grey    The median of the fine coefficients (DCT) of the smoothest 4 x 4 patches, by their coarse coefficients.

Grey patches of few dimensions are all image, and the first estimator is too high there; `docs/posterior.md` has the
errors of both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MEDIAN_OF_NORMAL = 0.6744897501960817
"""The median of |z| for a standard normal z."""
COLOUR_SIDE, GREY_SIDE = 3, 4
SMOOTHEST = 0.3
"""The share of grey patches that counts."""
PATCHES_A_DIMENSION, LEAST_PATCHES = 10, 64


def noise_of_patches(y: Tensor, whole: Tensor) -> float | None:
    """The standard deviation of the noise in an image (C, H, W), where `whole` says which pixels count; None: too few.

    Channels that are all the same, as those of a grey image in colour, are taken for one.
    """
    if len(y) > 1 and bool((y == y[:1]).all()):
        y, whole = y[:1], whole[:1]
    if len(y) > 1:
        patches = _patches(y, whole, COLOUR_SIDE)
        if patches is not None and len(patches) >= PATCHES_A_DIMENSION * patches[0].numel():
            return _smallest_directions(patches.flatten(1))
    patches = _patches(y, whole, GREY_SIDE)
    if patches is None or len(patches) < LEAST_PATCHES:
        return None
    return _smoothest(patches)


def _patches(y: Tensor, whole: Tensor, side: int) -> Tensor | None:
    """Patches (n, C, side, side) all of whose pixels count, in float64."""
    if min(y.shape[1:]) < side:
        return None
    cut = functional.unfold(y[None].double(), side)[0].T
    kept = functional.unfold(whole[None].double(), side)[0].T.min(1).values > 0
    return cut[kept].reshape(-1, len(y), side, side)


def _smallest_directions(patches: Tensor) -> float:
    centred = patches - patches.mean(0)
    values = torch.linalg.eigvalsh(centred.T @ centred / len(centred)).flip(0)
    for first in range(len(values)):
        rest = values[first:]
        if rest.mean() <= rest.median():
            break
    return rest.mean().clamp(min=0).sqrt().item()


def _smoothest(patches: Tensor) -> float:
    side = patches.shape[-1]
    places = torch.arange(side, dtype=torch.float64, device=patches.device)
    basis = (torch.pi / side * (places + 0.5) * places[:, None]).cos() * (2 / side) ** 0.5
    basis[0] *= 0.5**0.5
    coefficients = basis @ patches @ basis.T
    frequency = places[:, None] + places
    coarse = coefficients[..., (frequency > 0) & (frequency < side - 1)].square().sum((1, 2))
    count = max(LEAST_PATCHES // 4, int(SMOOTHEST * len(patches)))
    fine = coefficients[coarse.argsort()[:count]][..., frequency >= side]
    return fine.abs().median().item() / MEDIAN_OF_NORMAL
