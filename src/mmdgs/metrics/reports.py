"""One call that says whether to trust an estimator's uncertainty: `calibration_report(moments, data, level)`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.linalg.krylov import Krylov
from mmdgs.metrics.coverage import Reliability, reliability_of, standardised
from mmdgs.moments import Moments, require_batch
from mmdgs.moments.calibrated import JUDGING, posteriors
from mmdgs.noise import SAME_LEVEL, NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams

LEAST = 8
"""Examples below which nothing is fitted or judged."""
COVERED = 0.9
NOMINAL = (*(i / 20 for i in range(1, 20)), 0.98, 0.99, 0.995, 0.999)
"""Probabilities of intervals at which coverage is measured, as far as a calibration was fitted."""
LISTED = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Those that a report says in its line."""
SLACK = 0.5
"""How far beyond its interval data may lie, in its width, before they are taken for data of another range."""


@dataclass(frozen=True)
class CalibrationReport:
    """How an estimator's uncertainty fits clean examples that it has not seen, at one level.

    Trust it where `z_variance` is near 1 and `coverage` near 0.9. Above 1 it is too sure, below 1 too careful.
    """

    level: NoiseLevel
    examples: int
    z_variance: float  # the mean of z^2 over all numbers, z = (x - mean) / std; ideally 1
    mahalanobis: float  # the mean of (x - mean)' C^-1 (x - mean) / d, which counts correlations too; ideally 1
    coverage: float  # of mean +- 1.645 std; a Gaussian's is 0.9
    interval_coverage: float  # of `Gaussian.interval(0.9)`; ideally 0.9
    nats: float  # log-likelihood a number
    above_isotropic: float  # nats a number above one variance for all, fitted on these same examples
    repaired: float  # the fraction of eigenvalues or variances that were lifted to the floor
    covered: Mapping[float, float]  # by the probability of an interval, the share of numbers that it holds
    reliability: Reliability  # predicted against observed errors

    def __str__(self) -> str:
        return (
            f"sigma / alpha {self.level.ratio:.3g}, {self.examples} examples: z variance {self.z_variance:.3g} (1), "
            f"intervals of {self._listed()} (90% as a Gaussian's: {100 * self.coverage:.1f}%), "
            f"{self.above_isotropic:+.3f} nats a number against isotropic, {100 * self.repaired:.0f}% repaired"
        )

    def _listed(self) -> str:
        held = [f"{100 * p:g}% hold {100 * self.covered[p]:.1f}%" for p in LISTED if p in self.covered]
        return ", ".join(held)

    def to_json(self) -> dict[str, Any]:
        """All numbers, for a record."""
        return asdict(self)

    def figure(self) -> Any:
        """Predicted against observed errors, and coverage of intervals, as a matplotlib figure."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UsageError("figures need matplotlib: pip install 'mmdgs[lab]'") from error
        canvas = Figure(figsize=(8.5, 3.8), layout="constrained")
        left, right = canvas.subplots(1, 2)
        left.plot(self.reliability.predicted, self.reliability.observed, "o-")
        ends = [*self.reliability.predicted, *self.reliability.observed]
        scale = "log" if max(ends) > 3 * min(ends) else "linear"  # labels of a short log axis overlap
        left.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=1)
        left.set(
            xlabel="predicted standard deviation", ylabel="root mean square error", title="above the line: too sure",
            xscale=scale, yscale=scale,
        )  # fmt: skip
        right.plot([*self.covered], [*self.covered.values()], "o-")
        right.plot([0, 1], [0, 1], color="black", linewidth=1)
        right.set(xlabel="probability of the interval", ylabel="share it holds", title="below the line: too sure")
        canvas.suptitle(textwrap.fill(str(self), 120), fontsize=8)
        return canvas

    def save(self, path: str | Path) -> Path:
        """Write the figure; the ending of the name says its format."""
        self.figure().savefig(path, dpi=150)
        return Path(path)


def calibration_report(
    moments: Moments, data: Float[Tensor, "data ..."], level: NoiseLevel, *, seed: int = 0
) -> CalibrationReport:
    """Judge an estimator by clean data (N, ...): their noisy versions go in, and what comes out is compared with them.

    Give data that neither the network nor a calibration has seen.
    """
    check_examples(moments, data)
    check_level(moments.denoiser, level)
    return report_of(posteriors(moments, data, level, seed=seed, purpose=JUDGING), level, seed=seed)


def report_of(pairs: Iterable[tuple[Tensor, Gaussian]], level: NoiseLevel, *, seed: int = 0) -> CalibrationReport:
    """The same from batches of clean data and the posteriors of noisy versions of them."""
    sums: dict[str, float] = dict.fromkeys(("z", "distance", "nats", "repaired", "square"), 0.0)
    parts: dict[str, list[Tensor]] = {"z": [], "error": [], "variance": []}
    rows = 0
    for clean, q in pairs:
        rows += len(clean)
        z = standardised(clean, q)
        error = (clean - q.mean).double()
        sums["z"] += z.square().sum().item()
        sums["square"] += error.square().sum().item()
        sums["distance"] += q.cov.mahalanobis(clean - q.mean).double().sum().item()
        sums["nats"] += q.log_prob(clean).double().sum().item()
        repaired = q.repaired
        if repaired is None and isinstance(q.cov, Krylov):  # which knows it of a draw
            repaired = q.sample_with_info(generator=Streams(seed, len(clean), purpose="repair"))[1]["repaired"]
        sums["repaired"] += 0.0 if repaired is None else repaired.sum().item()
        for name, one in {"z": z, "error": error.square(), "variance": q.cov.diagonal().double()}.items():
            parts[name].append(one.expand_as(clean).flatten().float().cpu())
    z = torch.cat(parts["z"]).abs()
    numbers = len(z)
    isotropic = -0.5 * (math.log(2 * math.pi * sums["square"] / numbers) + 1)
    within = {p: _share_within(z, q.deviations(p)) for p in NOMINAL if p <= q.highest}  # the same for all rows
    return CalibrationReport(
        level,
        rows,
        sums["z"] / numbers,
        sums["distance"] / numbers,
        _share_within(z, replace(q, reach=None).deviations(COVERED)),
        within[COVERED],
        sums["nats"] / numbers,
        sums["nats"] / numbers - isotropic,
        sums["repaired"] / rows,
        within,
        reliability_of(torch.cat(parts["error"]), torch.cat(parts["variance"])),
    )


def _share_within(z: Tensor, half: float) -> float:
    return (z <= half).double().mean().item()


def check_examples(moments: Moments, x: Tensor) -> None:
    """Refuse data that no uncertainty can be judged by: too few, not finite, of another shape or range."""
    require_batch(x)
    if len(x) < LEAST:
        raise ValueError(f"need {LEAST} clean examples or more, got {len(x)}; 100 images are enough")
    if not torch.isfinite(x).all():
        raise ValueError("the data hold values that are not finite; take those examples out")
    denoiser = moments.denoiser
    shape, interval = getattr(denoiser, "shape", None), getattr(denoiser, "interval", None)
    if shape is not None and tuple(x.shape[1:]) != tuple(shape):
        raise ValueError(f"the data are of shape {tuple(x.shape[1:])} each, and the model's of {tuple(shape)}")
    if interval is None:
        return
    (low, high), ends = interval, (x.min().item(), x.max().item())
    width, middle = high - low, (low + high) / 2
    if ends[0] < low - SLACK * width or ends[1] > high + SLACK * width or ends[0] >= middle or ends[1] <= middle:
        raise ValueError(
            f"the data run from {ends[0]:.3g} to {ends[1]:.3g}, and the model's from {low:g} to {high:g}; "
            "scale values in [0, 1] with model.scaled(x)"
        )


def check_level(denoiser: object, level: NoiseLevel) -> None:
    """Refuse a level that a model was not trained for."""
    levels = getattr(denoiser, "levels", None)
    if not levels:
        return
    ratios = [one.ratio for one in levels]
    low, high = min(ratios) * math.exp(-SAME_LEVEL), max(ratios) * math.exp(SAME_LEVEL)
    if not low <= level.ratio <= high:
        known = f"{min(ratios):.4g} to {max(ratios):.4g}" if len(ratios) > 1 else f"{ratios[0]:.4g} alone"
        raise ValueError(f"the model was trained at sigma / alpha {known}, and has no level {level.ratio:.4g}")
