"""The error of probes: the diagonal of a Jacobian estimated with few products, against the exact one."""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.jacobians import linearised
from mmdgs.lab.experiment import Context
from mmdgs.lab.mnist_measures import PROBE_SEED, model_of, noisy_digits, rows_at_once
from mmdgs.lab.mnist_models import MnistSettings, Training
from mmdgs.lab.workspace import Part
from mmdgs.models import Model
from mmdgs.moments import DiagonalMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.randomness import Streams

CHECKED_PROBES = 16
"""The number of probes at which the averages of single probes are checked by one estimator with so many."""


def probe_errors(context: Context, training: Training, settings: MnistSettings) -> dict[str, Any]:
    """The relative error of the probed diagonal of the Jacobian against the exact one, by number of probes.

    One probe's error in entry i is sum_(j != i) v_i v_j J_ij, so with S probes the mean square of the whole error is
    |J - diag J|_F^2 / S: that is what is expected of the numbers found.
    """
    asked = {
        "model": training.asked, "seed": context.seed, "images": settings.exact_images,
        "most": settings.most_probes, "repeats": settings.probe_repeats,
    }  # fmt: skip

    def compute() -> Part:
        model = model_of(training)
        x_t = noisy_digits(context, training, settings.exact_images)[1].to(context.device)
        jacobian = _jacobian(context, model, x_t)
        exact = jacobian.diagonal(dim1=1, dim2=2)
        length = exact.norm(dim=1)
        off = jacobian.square().sum((1, 2)) - exact.square().sum(1)
        singles = _single_probes(context, model, x_t, settings.most_probes * settings.probe_repeats)
        counts = [2**k for k in range(settings.most_probes.bit_length())]
        errors = []
        for count in counts:
            averages = singles.unflatten(0, (-1, count)).mean(1)
            errors.append(((averages - exact).norm(dim=2) / length).mean().item())
        own = DiagonalMoments(model, probes=CHECKED_PROBES, floor=-math.inf, design=Rademacher())
        q = own(x_t, model.level, generator=Streams(context.seed + PROBE_SEED + 2, len(x_t)))
        diagonal = q.cov.diagonal().double().cpu().flatten(1) / model.level.tweedie
        values = {
            "probes": counts,
            "error": errors,
            "expected": [(off / count).sqrt().div(length).mean().item() for count in counts],
            "slope": float(numpy.polyfit(numpy.log(counts), numpy.log(errors), 1)[0]),
            "checked_probes": CHECKED_PROBES,
            "checked_error": ((diagonal - exact).norm(dim=1) / length).mean().item(),
            "images": len(x_t),
            "negative": (exact < 0).double().mean().item(),
        }
        return Part(values)

    return context.workspace.part("probe-errors", asked, compute).values


def _jacobian(context: Context, model: Model, x_t: Tensor) -> Tensor:
    """The Jacobian of the denoiser (B, d, d), one product for each pixel.

    Each row of a large batch takes another pixel: products one by one at a few images are mostly overhead.
    """
    d = math.prod(x_t.shape[1:])
    found = []
    for pixels in torch.eye(d, device=x_t.device).split(max(1, rows_at_once(context) // len(x_t))):
        cotangents = pixels.repeat_interleave(len(x_t), 0).unflatten(1, x_t.shape[1:])
        at = linearised(model, x_t.repeat(len(pixels), 1, 1, 1), model.level)
        found.append(at.pull(cotangents[None])[0].double().cpu().flatten(1).unflatten(0, (len(pixels), len(x_t))))
    return torch.cat(found).transpose(0, 1)


def _single_probes(context: Context, model: Model, x_t: Tensor, total: int) -> Tensor:
    """`total` estimates of the Jacobian's diagonal at each x_t by one probe each, (total, B, d), negative ones kept."""
    single = DiagonalMoments(model, probes=1, floor=-math.inf, design=Rademacher())
    size = max(1, rows_at_once(context) // len(x_t))
    found = []
    for first in range(0, total, size):
        count = min(size, total - first)
        rows = Streams(context.seed + PROBE_SEED + 1, count * len(x_t), first_row=first * len(x_t))
        q = single(x_t.repeat(count, 1, 1, 1), model.level, generator=rows)
        found.append(q.cov.diagonal().double().cpu().flatten(1).unflatten(0, (count, len(x_t))) / model.level.tweedie)
    return torch.cat(found)
