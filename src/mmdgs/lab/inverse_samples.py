"""Samples of an exact mixture without measurements: with which covariance few levels give them its law."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmdgs.lab.grid import Measure, Results
from mmdgs.lab.report import Section
from mmdgs.moments import ExactMoments, Moments
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import randn_like, seeded
from mmdgs.samplers import ancestral_plan, run as run_chains
from mmdgs.schedules import Levels
from mmdgs.targets import GaussianMixture

COMPARED = 10
"""Samples of the mixture itself for each that is judged."""
ENERGY = Measure("energy", "energy distance", 4, "less")
EVALUATIONS = Measure("evaluations", "evaluations", 0)


def energy_distance(x: Tensor, y: Tensor) -> float:
    """2 E|x - y| - E|x - x'| - E|y - y'| of samples (n, d) and (m, d), without bias: 0 on average for equal laws."""
    own = sum(torch.cdist(one, one).sum() / (len(one) * (len(one) - 1)) for one in (x, y))
    return (2 * torch.cdist(x, y).mean() - own).item()


def sampled(
    moments: Moments | None, mixture: GaussianMixture, levels: Levels, shape: Sequence[int], count: int, seed: int
) -> tuple[float, float]:
    """The energy distance of ancestral samples from the mixture, and the evaluations of each; None draws from it."""
    truth = mixture.sample(COMPARED * count, generator=seeded(seed, "compared"))
    if moments is None:
        return energy_distance(mixture.sample(count, generator=seeded(seed, "exact")), truth), 0.0
    first: NoiseLevel = levels[0]
    start = first.sigma * randn_like(truth.new_empty(count, *shape), seeded(seed, "start"))
    made = run_chains(ancestral_plan(moments, levels), start, seed=seed, progress=None)
    # The exact moments count nothing, and the last step is a mean.
    full = len(levels) + (len(levels) - 1) * 2 * math.prod(shape)
    evaluations = full if isinstance(moments, ExactMoments) else made.cost.evaluations
    return energy_distance(made.x.flatten(1), truth), evaluations


def samples_section(found: Results, levels: int, samples: int, seeds: int) -> Section:
    """The table of all rows."""
    text = [f"Samples of the same mixture without measurements, by ancestral sampling along the same {levels} levels."]
    note = (
        f"{samples:,} samples against {COMPARED * samples:,} of the mixture itself; ± 95% over {seeds} seeds. The "
        "estimate has no bias, so that it may be below zero."
    )
    title = "Energy distance from the mixture"
    table = found.table(title, [ENERGY, EVALUATIONS], head="covariance", note=note)
    return Section("Samples of exact mixtures", text, [table], [], [])
