"""How many probes: the error of the probed diagonal of the Jacobian against the exact one, on noisy digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from matplotlib.figure import Figure as Canvas

from mmdgs.lab.drawing import GREY, PURPLE, labelled, new_figure, plain_logs
from mmdgs.lab.experiment import Context
from mmdgs.lab.mnist_models import MnistSettings, noisy_digits
from mmdgs.lab.probes import error_of, jacobian
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.workspace import Part
from mmdgs.models import Model
from mmdgs.moments import DiagonalMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.randomness import Streams
from mmdgs.tables import Table

CHECKED_PROBES = 16
"""The number of probes at which products with the matrix are checked by products with the network."""
SLOPE, NEAR = -0.5, 0.15
"""A slope this near to the expected one counts as it: a fit over few powers of two has an error of some hundredths."""


def probe_errors(context: Context, model: Model, settings: MnistSettings) -> dict[str, Any]:
    """The relative error of the probed diagonal of the Jacobian against the exact one, by number of probes.

    One probe's error in entry i is sum_(j != i) v_i v_j J_ij, so with S probes the mean square of the whole error is
    |J - diag J|_F^2 / S: that is what is expected of the numbers found.
    """

    def compute() -> Part:
        x_t = noisy_digits(context, model.level, settings.exact_images)[1].to(context.device)
        matrices = [jacobian(model, one[None], model.level, None, "exact diagonal").double().cpu() for one in x_t]
        exact = torch.stack([one.diagonal() for one in matrices])
        length = exact.norm(dim=1)
        off = torch.stack([one.square().sum() for one in matrices]) - length.square()
        counts = [2**k for k in range(settings.most_probes.bit_length())]
        products = settings.most_probes * settings.probe_repeats
        errors = []
        for count in counts:
            draws = products // count
            own = [error_of(one, model.shape, Rademacher(), count, draws, context.seed) for one in matrices]
            errors.append(sum(own) / len(own))
        probed = DiagonalMoments(model, probes=CHECKED_PROBES, floor=-math.inf, design=Rademacher())
        q = probed(x_t, model.level, generator=Streams(context.seed, len(x_t), purpose="checked probes"))
        checked = q.cov.diagonal().double().cpu().flatten(1) / model.level.tweedie
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


def probe_section(found: dict[str, Any]) -> Section:
    """The errors, and the power at which they fall."""
    text = [
        "Rademacher probes give the diagonal of the Jacobian with an error that falls as one over the root of their "
        f"number; the expected error is computed from the exact Jacobian ({found['images']} noisy digits). "
        f"{100 * found['negative']:.1f}% of the exact diagonal is negative: the network's own error.",
    ]
    lines = zip(found["probes"], found["error"], found["expected"], strict=True)
    rows = [[f"{count}", f"{error:.3f}", f"{expected:.3f}"] for count, error, expected in lines]
    table = Table("Relative error of the diagonal", ["probes", "measured", "expected"], rows)
    slope = found["slope"]
    claim = Claim(f"the error falls as the probes to the power {SLOPE}", abs(slope - SLOPE) < NEAR, f"{slope:.3f}")
    caption = "Relative error (Euclidean norm) of the probed diagonal, mean over digits and draws."
    return Section("How many probes", text, [table], [Figure("mnist_probes", caption, _draw(found))], [claim])


def _draw(errors: Mapping[str, Any]) -> Canvas:
    canvas, axes = new_figure(1, 1, inches=(4.6, 3.2))
    axis, checked = axes[0][0], errors["checked_probes"]
    axis.loglog(errors["probes"], errors["expected"], color=GREY, linestyle="--", linewidth=1.2, label="expected")
    axis.loglog(errors["probes"], errors["error"], "o-", color=PURPLE, markersize=4, label="products with the matrix")
    label = f"products with the network, {checked}"
    axis.loglog(checked, errors["checked_error"], "o", mfc="none", mec="black", markersize=9, label=label)
    plain_logs(axis)
    axis.set_xticks(errors["probes"], [str(n) for n in errors["probes"]])
    axis.legend(fontsize=8, frameon=False)
    labelled(axis, "", "probes", "relative error of the diagonal")
    return canvas
