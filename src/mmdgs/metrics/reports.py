"""Whether to trust an estimator's uncertainty: `calibration_report(moments, data, level)`.

With z = (x - mean) / std, every number by itself: if x comes from the posterior then E z^2 = 1, and
|z| < 1.645 for 90% of the numbers where it is Gaussian. E z^2 above 1: the posterior is too sure.
"""

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
from mmdgs.moments import Moments, require_batch
from mmdgs.moments.calibrated import JUDGING, posteriors
from mmdgs.noise import SAME_LEVEL, NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams

LEAST = 8  # examples below which nothing is fitted or judged
COVERED = 0.9
NOMINAL = (*(i / 20 for i in range(1, 20)), 0.98, 0.99, 0.995, 0.999)
"""Probabilities of intervals at which coverage is measured, as far as a calibration was fitted."""
LISTED = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Those that a report says in its line."""
BINS, LEAST_IN_BIN = 20, 100
"""Of a reliability diagram: bins, and numbers that one needs to be shown."""
SLACK = 0.5
"""How far beyond its interval, in its width, data may lie before they are of another range."""


def standardised(x: Float[Tensor, "batch ..."], posterior: Gaussian) -> Float[Tensor, "batch ..."]:
    """z = (x - mean) / std, in float64."""
    if x.shape != posterior.mean.shape:
        shapes = f"{tuple(posterior.mean.shape)}, got {tuple(x.shape)}"
        raise ValueError(f"x must have the posterior's shape {shapes}")
    return (x.double() - posterior.mean.double()) / posterior.cov.diagonal().double().sqrt()


@dataclass(frozen=True)
class Reliability:
    """Root mean squares of predicted deviation and of error, in bins of predicted deviation."""

    predicted: list[float]
    observed: list[float]
    counts: list[int]


def reliability_of(errors: Float[Tensor, " n"], variances: Float[Tensor, " n"]) -> Reliability:
    """From squared errors and variances, in bins of equal width in log std.

    A calibrated posterior has predicted = observed in every bin.
    """
    logs = variances.log()
    low, high = logs.min(), logs.max()
    place = ((logs - low) / (high - low).clamp(min=1e-12) * BINS).long().clamp(max=BINS - 1)
    counts = torch.bincount(place, minlength=BINS)
    kept = counts >= LEAST_IN_BIN
    sums = [torch.bincount(place, weights=x, minlength=BINS) for x in (variances, errors)]
    means = [(total[kept] / counts[kept]).sqrt().tolist() for total in sums]
    return Reliability(means[0], means[1], counts[kept].tolist())


@dataclass(frozen=True)
class CalibrationReport:
    """How an estimator's uncertainty fits clean examples that it has not seen, at one level.

    Trust it where `z_variance` is near 1 (above: too sure) and `coverage` near 0.9.
    """

    level: NoiseLevel
    examples: int
    z_variance: float  # the mean of z^2 over all numbers, z = (x - mean) / std; ideally 1
    mahalanobis: float  # the mean of (x - mean)' C^-1 (x - mean) / d, with correlations; ideally 1
    coverage: float  # of mean +- 1.645 std; a Gaussian's is 0.9
    interval_coverage: float  # of `Gaussian.interval(0.9)`; ideally 0.9
    nats: float  # log-likelihood a number
    above_isotropic: float  # nats a number above one variance for all, fitted on these examples
    repaired: float  # the fraction of eigenvalues or variances that were lifted to the floor
    covered: Mapping[float, float]  # the share of numbers in an interval, by its probability
    reliability: Reliability  # predicted against observed errors

    def __str__(self) -> str:
        known = {p: 100 * self.covered[p] for p in LISTED if p in self.covered}
        listed = ", ".join(f"{100 * p:g}% hold {share:.1f}%" for p, share in known.items())
        return (
            f"sigma / alpha {self.level.ratio:.3g}, {self.examples} examples: z variance "
            f"{self.z_variance:.3g} (1), intervals of {listed} (90% as a Gaussian's: "
            f"{100 * self.coverage:.1f}%), {self.above_isotropic:+.3f} nats a number against "
            f"isotropic, {100 * self.repaired:.0f}% repaired"
        )

    def to_json(self) -> dict[str, Any]:
        """All numbers, for a record."""
        return asdict(self)

    def figure(self) -> Any:
        """Predicted against observed errors, and coverage of intervals, as a matplotlib figure."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UsageError("figures need matplotlib: pip install 'mmdgs[report]'") from error
        canvas = Figure(figsize=(8.5, 3.8), layout="constrained")
        left, right = canvas.subplots(1, 2)
        left.plot(self.reliability.predicted, self.reliability.observed, "o-")
        ends = [*self.reliability.predicted, *self.reliability.observed]
        line, scale = [min(ends), max(ends)], "linear"
        if line[1] > 3 * line[0]:  # labels of a shorter logarithmic axis overlap
            scale = "log"
        left.plot(line, line, color="black", linewidth=1)
        left.set(xscale=scale, yscale=scale, title="above the line: too sure")
        left.set(xlabel="predicted standard deviation", ylabel="root mean square error")
        right.plot([*self.covered], [*self.covered.values()], "o-")
        right.plot([0, 1], [0, 1], color="black", linewidth=1)
        right.set(xlabel="probability of the interval", ylabel="share it holds")
        right.set(title="below the line: too sure")
        canvas.suptitle(textwrap.fill(str(self), 120), fontsize=8)
        return canvas

    def save(self, path: str | Path) -> Path:
        """Write the figure; the ending of the name says its format."""
        self.figure().savefig(path, dpi=150)
        return Path(path)


def calibration_report(
    moments: Moments, data: Float[Tensor, "data ..."], level: NoiseLevel, *, seed: int = 0
) -> CalibrationReport:
    """Judge an estimator by clean data (N, ...) that neither network nor calibration has seen."""
    check_examples(moments, data)
    check_level(moments.denoiser, level)
    return report_of(posteriors(moments, data, level, seed=seed, purpose=JUDGING), level, seed=seed)


def report_of(
    pairs: Iterable[tuple[Tensor, Gaussian]], level: NoiseLevel, *, seed: int = 0
) -> CalibrationReport:
    """The same from batches of clean data and the posteriors of noisy versions of them."""
    sums: dict[str, float] = dict.fromkeys(("z", "distance", "nats", "repaired", "square"), 0.0)
    parts: dict[str, list[Tensor]] = {"z": [], "error": [], "variance": []}
    rows = 0
    for clean, q in pairs:
        rows += len(clean)
        z, error = standardised(clean, q), (clean - q.mean).double()
        sums["z"] += z.square().sum().item()
        sums["square"] += error.square().sum().item()
        sums["distance"] += q.cov.mahalanobis(clean - q.mean).double().sum().item()
        sums["nats"] += q.log_prob(clean).double().sum().item()
        repaired = q.repaired
        if repaired is None and isinstance(q.cov, Krylov):  # which knows it of a draw
            streams = Streams(seed, len(clean), purpose="repair")
            repaired = q.sample_with_info(generator=streams)[1]["repaired"]
        sums["repaired"] += 0.0 if repaired is None else repaired.sum().item()
        variance = q.cov.diagonal().double()
        for name, x in {"z": z, "error": error.square(), "variance": variance}.items():
            parts[name].append(x.expand_as(clean).flatten().float().cpu())
    z = torch.cat(parts["z"]).abs()
    numbers, nats = len(z), sums["nats"] / len(z)
    isotropic = -0.5 * (math.log(2 * math.pi * sums["square"] / numbers) + 1)

    def share_within(half: float) -> float:
        return (z <= half).double().mean().item()

    # Deviations are the same for all rows.
    covered = {p: share_within(q.deviations(p)) for p in NOMINAL if p <= q.highest}
    return CalibrationReport(
        level,
        examples=rows,
        z_variance=sums["z"] / numbers,
        mahalanobis=sums["distance"] / numbers,
        coverage=share_within(replace(q, reach=None).deviations(COVERED)),
        interval_coverage=covered[COVERED],
        nats=nats,
        above_isotropic=nats - isotropic,
        repaired=sums["repaired"] / rows,
        covered=covered,
        reliability=reliability_of(torch.cat(parts["error"]), torch.cat(parts["variance"])),
    )


def check_examples(moments: Moments, x: Tensor) -> None:
    """Refuse data that no uncertainty can be judged by: too few, not finite, of another range."""
    require_batch(x)
    if len(x) < LEAST:
        raise ValueError(f"need {LEAST} clean examples or more, got {len(x)}; 100 are enough")
    if not torch.isfinite(x).all():
        raise ValueError("the data hold values that are not finite; take those examples out")
    denoiser, got = moments.denoiser, tuple(x.shape[1:])
    shape, interval = getattr(denoiser, "shape", got), getattr(denoiser, "interval", None)
    if len(got) != len(shape) or any(
        n not in (None, own) for n, own in zip(shape, got, strict=True)
    ):
        raise ValueError(f"the data are of shape {got} each, and the model's of {tuple(shape)}")
    if interval is None:
        return
    (low, high), least, most = interval, x.min().item(), x.max().item()
    slack, middle = SLACK * (high - low), (low + high) / 2
    if least < low - slack or most > high + slack or least >= middle or most <= middle:
        raise ValueError(
            f"the data run from {least:.3g} to {most:.3g}, and the model's from {low:g} to "
            f"{high:g}; scale values in [0, 1] with model.scaled(x)"
        )


def check_level(denoiser: object, level: NoiseLevel) -> None:
    """Refuse a level that a model was not trained for."""
    ratios = sorted(known.ratio for known in getattr(denoiser, "levels", None) or ())
    if not ratios:
        return
    low, high = ratios[0] * math.exp(-SAME_LEVEL), ratios[-1] * math.exp(SAME_LEVEL)
    if not low <= level.ratio <= high:
        known = f"{ratios[0]:.4g} to {ratios[-1]:.4g}" if len(ratios) > 1 else f"{ratios[0]:.4g}"
        trained = f"the model was trained at sigma / alpha {known}"
        raise ValueError(f"{trained}, and has no level {level.ratio:.4g}")
