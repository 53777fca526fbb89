"""Posteriors of held-out digits in the MNIST experiment: their calibration, and the error of probed diagonals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data import dequantised, load_images, spread
from mmdgs.jacobians import linearised
from mmdgs.lab.experiment import Context
from mmdgs.lab.grid import Cell, Grid
from mmdgs.lab.mnist_models import ENERGY, LEARNED, SIGMA, MnistSettings, Training
from mmdgs.lab.running import posterior_of
from mmdgs.lab.workspace import Part
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics import calibration, fitted_floor, reliability
from mmdgs.models import Model
from mmdgs.moments import DiagonalMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams

METHODS = {"diagonal": "diagonal", "isotropic": "isotropic", "learned": "learned by KL"}
"""The posteriors compared: two from the energy trained by DSM, and a network trained by KL."""
UNCERTAIN = 0.05
"""A posterior is uncertain of a pixel where its own standard deviation is above this."""
FITTED = ", fitted floor"
"""Ends the label of a posterior whose floor was fitted."""
CHECKED_PROBES = 16
"""The number of probes at which the averages of single probes are checked by one estimator with so many."""
ROWS = {"cuda": 256, "cpu": 32}
"""Images that go through a network at a time."""


def source(runs: Mapping[str, Training], method: str) -> Training:
    """The run that a posterior comes from."""
    return runs[LEARNED if method == "learned" else ENERGY]


def methods(runs: Mapping[str, Training]) -> list[str]:
    """The posteriors that there are: a run that ended in NaN before its first validation left none."""
    return [method for method in METHODS if source(runs, method).model is not None]


def rows_at_once(device: torch.device) -> int:
    return ROWS.get(device.type, ROWS["cpu"])


@dataclass(frozen=True)
class HeldOut:
    """Test digits x, their noisy versions x_t, and the posterior of each; by label, such as "diagonal, 10 probes"."""

    x: Tensor
    x_t: Tensor
    posteriors: dict[str, Gaussian]
    methods: dict[str, str]  # label -> one of METHODS

    def drawn(self) -> list[str]:
        """The posteriors to draw: of those of one method the last, which has the most probes."""
        return list({method: label for label, method in self.methods.items()}.values())


def noisy_digits(context: Context, level: NoiseLevel, count: int) -> tuple[Tensor, Tensor]:
    """Test digits, spread over the test set, dequantised, and noised at a level."""
    test = load_images("mnist", "test", data_dir=context.data_dir).images
    x = dequantised(test[spread(len(test), count)], Streams(context.seed, count, purpose="held out"))
    return x, add_noise(x, level, generator=Streams(context.seed, count, purpose="noise"))


def held_out(context: Context, runs: Mapping[str, Training], settings: MnistSettings) -> HeldOut:
    """Each posterior at the same noisy digits; the diagonal with as many probes as chains use, and with many."""
    x, x_t = noisy_digits(context, NoiseLevel(sigma=SIGMA), settings.held_out)
    labels: dict[str, tuple[str, int]] = {}
    for method in methods(runs):
        for probes in (settings.probes, settings.map_probes) if method == "diagonal" else (0,):
            labels[METHODS[method] + (f", {probes} probes" if probes else "")] = (method, probes)
    cells = {(label, SIGMA): one for label, one in labels.items()}
    measure = partial(_posterior, context, runs, x_t)
    found = Grid("posterior", cells, measure, depends=settings, beside=True).run(context)
    posteriors = {}
    for (label, _), part in found.parts.items():
        repaired = torch.full((len(x),), part.values["repaired"])
        posteriors[label] = Gaussian(part.tensors["mean"], Diagonal(part.tensors["variance"]), repaired)
    return HeldOut(x, x_t, posteriors, {label: method for label, (method, _) in labels.items()})


def _posterior(context: Context, runs: Mapping[str, Training], x_t: Tensor, cell: Cell) -> Part:
    method, probes = cell.what
    model = source(runs, method).left
    moments = posterior_of(model, method, probes)
    found = []
    for first in range(0, len(x_t), rows := rows_at_once(context.device)):
        batch = x_t[first : first + rows].to(context.device)
        streams = Streams(context.seed, len(batch), first_row=first, purpose="probes")
        found.append(moments(batch, model.level, generator=streams))
    repaired = sum(q.repaired.sum().item() for q in found if q.repaired is not None) / len(x_t)
    variances = torch.cat([q.cov.diagonal().cpu() for q in found])
    return Part({"repaired": repaired}, {"mean": torch.cat([q.mean.cpu() for q in found]), "variance": variances})


def calibrations(found: HeldOut, background: Tensor) -> dict[str, dict[str, Any]]:
    """For each posterior its calibration over all pixels, those it is uncertain of, and the background; reliability.

    The diagonal of many probes also with the floor that fits every second digit, judged on the others.
    """
    records = {label: _calibration(found.x, q, background) for label, q in found.posteriors.items()}
    for label in (label for label in found.drawn() if found.methods[label] == "diagonal"):
        q = found.posteriors[label]
        fitted, judged = (Gaussian(q.mean[i::2], Diagonal(q.cov.diagonal()[i::2])) for i in (0, 1))
        floor, variances = fitted_floor(found.x[::2], fitted), judged.cov.diagonal()
        lifted = (variances < floor).float().flatten(1).mean(1)
        judged = Gaussian(judged.mean, Diagonal(variances.clamp(min=floor)), lifted)
        records[label + FITTED] = _calibration(found.x[1::2], judged, background) | {"floor": floor}
    return records


def _calibration(x: Tensor, q: Gaussian, background: Tensor) -> dict[str, Any]:
    std = q.cov.diagonal().sqrt()
    places = {"all": None, "uncertain": std > UNCERTAIN, "background": background.expand_as(x)}
    return {
        **{where: asdict(calibration(x, q, mask)) for where, mask in places.items()},
        "reliability": asdict(reliability(x, q)),
        "repaired": 0.0 if q.repaired is None else q.repaired.mean().item(),
        "median_std": std.median().item(),
    }


def probe_errors(context: Context, model: Model, settings: MnistSettings) -> dict[str, Any]:
    """The relative error of the probed diagonal of the Jacobian against the exact one, by number of probes.

    One probe's error in entry i is sum_(j != i) v_i v_j J_ij, so with S probes the mean square of the whole error is
    |J - diag J|_F^2 / S: that is what is expected of the numbers found.
    """

    def compute() -> Part:
        x_t = noisy_digits(context, model.level, settings.exact_images)[1].to(context.device)
        jacobian = _jacobian(model, x_t)
        exact = jacobian.diagonal(dim1=1, dim2=2)
        length = exact.norm(dim=1)
        off = jacobian.square().sum((1, 2)) - exact.square().sum(1)
        singles = _single_probes(model, x_t, settings.most_probes * settings.probe_repeats, context.seed)
        counts = [2**k for k in range(settings.most_probes.bit_length())]
        averages = [singles.unflatten(0, (-1, count)).mean(1) for count in counts]
        errors = [((one - exact).norm(dim=2) / length).mean().item() for one in averages]
        streams = Streams(context.seed, len(x_t), purpose="checked probes")
        checked = _probed(model, x_t, CHECKED_PROBES, streams)
        values = {
            "probes": counts,
            "error": errors,
            "expected": [(off / count).sqrt().div(length).mean().item() for count in counts],
            "slope": float(numpy.polyfit(numpy.log(counts), numpy.log(errors), 1)[0]),
            "checked_probes": CHECKED_PROBES,
            "checked_error": ((checked - exact).norm(dim=1) / length).mean().item(),
            "images": len(x_t),
            "negative": (exact < 0).double().mean().item(),
        }
        return Part(values)

    return context.workspace.part("probe-errors", settings, compute).values


def _jacobian(model: Model, x_t: Tensor) -> Tensor:
    """The Jacobian of the denoiser (B, d, d), one product for each pixel.

    Each row of a large batch takes another pixel: products one by one at a few images are mostly overhead.
    """
    found = []
    pixels = torch.eye(math.prod(x_t.shape[1:]), device=x_t.device)
    for some in pixels.split(max(1, rows_at_once(x_t.device) // len(x_t))):
        cotangents = some.repeat_interleave(len(x_t), 0).unflatten(1, x_t.shape[1:])
        at = linearised(model, x_t.repeat(len(some), 1, 1, 1), model.level)
        found.append(at.pull(cotangents[None])[0].double().cpu().flatten(1).unflatten(0, (len(some), len(x_t))))
    return torch.cat(found).transpose(0, 1)


def _single_probes(model: Model, x_t: Tensor, total: int, seed: int) -> Tensor:
    """`total` estimates of the Jacobian's diagonal at each x_t by one probe each, (total, B, d)."""
    found = []
    for first in range(0, total, size := max(1, rows_at_once(x_t.device) // len(x_t))):
        count = min(size, total - first)
        rows = Streams(seed, count * len(x_t), first_row=first * len(x_t), purpose="single probes")
        found.append(_probed(model, x_t.repeat(count, 1, 1, 1), 1, rows).unflatten(0, (count, len(x_t))))
    return torch.cat(found)


def _probed(model: Model, x_t: Tensor, probes: int, streams: Streams) -> Tensor:
    """The diagonal of the Jacobian (B, d) by Rademacher probes, negative values kept."""
    moments = DiagonalMoments(model, probes=probes, floor=-math.inf, design=Rademacher())
    variances = moments(x_t, model.level, generator=streams).cov.diagonal()
    return variances.double().cpu().flatten(1) / model.level.tweedie
