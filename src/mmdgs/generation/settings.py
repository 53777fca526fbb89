"""The settings of samplers, which are the options of `mmdgs sample`; importing them needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmdgs.errors import UsageError, unknown_name
from mmdgs.options import option

if TYPE_CHECKING:
    from mmdgs.schedules import Levels

FIXED = ("small", "large")
"""DDPM's covariances, for ancestral sampling only."""


@dataclass(frozen=True)
class Method:
    """A sampler by name, with its settings; None stands for the sampler's own choice (`resolved` fills it in)."""

    sampler: str | None = option(
        None,
        "gibbs, gibbs-down, langevin, consistent, ancestral, ddim, heun or multistep.",
        show_default="gibbs; over many levels heun",
    )
    levels: Levels | None = option(
        None, "Noise levels, such as geometric:232:50:0.01.", show_default="the model's, or EDM's", kind=str
    )
    steps: int | None = option(
        None,
        "Noise levels that are used; sweeps of a model of one level.",
        min=1,
        show_default="all; 18 of EDM's; 20 sweeps",
    )
    covariance: str | None = option(
        None,
        "diagonal, rademacher, lattice, ocm, isotropic, spectral, modulated, low-rank, krylov, full, "
        "learned, "
        f"{', '.join(FIXED)}.",
        flag=("--covariance", "--posterior"),
        show_default="auto",
    )
    head: str | None = option(
        None, "Of --covariance ocm or modulated: the folder of a head that train made for this model."
    )
    sweeps: int | None = option(None, "Steps at each level (gibbs, langevin).", min=1)
    probes: int | None = option(None, "Jacobian products for the diagonal [3].", min=1)
    products: int | None = option(None, "Jacobian products of --covariance low-rank [2].", min=1)
    products_below: float | None = option(
        None, "Of low-rank: products only below this sigma / alpha.", min=0, show_default="at all levels"
    )
    krylov_steps: int | None = option(None, "Steps of a Krylov draw [20].", min=1)
    most_products: int | None = option(None, "Jacobian products that a full covariance may cost [10000].", min=1)
    symmetric: bool | None = option(
        None,
        "Take the network's Jacobian as symmetric, for half the products (low-rank, krylov).",
        flag="--symmetric/--symmetrised",
        show_default="auto",
    )
    floor: float | None = option(
        None, "Smallest variance, in sigma^2 (the paper: 1e-6).", min=0, show_default="from the network's own error"
    )
    calibrated: bool | None = option(
        None,
        "Require the calibration that is kept with the model for this covariance, or leave it out.",
        flag="--calibrated/--uncalibrated",
        show_default="where one is kept",
    )
    rate: float | None = option(None, "Step size of Langevin, in sigma^2.", show_default="NCSNv2's for the levels")
    eta: float | None = option(None, "Fresh noise: of ddim, in [0, 1]; of multistep, 0 or more; of consistent.")
    churn: float | None = option(None, "Share of noise added before a step of heun [0].")
    order: int | None = option(None, "Of multistep: 2 or 3 [2].")
    guide: str | None = option(
        None, "A worse model of the same data, less trained or smaller: samples are led away from its errors."
    )
    guidance: float | None = option(
        None, "How far to go from the guide, 1 being as far as the model.", min=1, show_default="1; with --guide 2"
    )
    clip: bool | None = option(None, "Keep means in the data's interval.", flag="--clip/--no-clip", show_default="auto")
    last_noise: float | None = option(None, "Of ancestral: grey levels of noise that may stay in samples [2].")
    mean: bool | None = option(
        None, "Of one level: end with the posterior's mean, not a draw.", flag="--mean/--draw", show_default="draw"
    )

    def __post_init__(self) -> None:
        from mmdgs.generation.methods import SAMPLERS

        if self.sampler is not None and self.sampler not in SAMPLERS:
            raise unknown_name("sampler", self.sampler, SAMPLERS)
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value) and (name, value) != ("last_noise", math.inf):
                raise UsageError(f"{name.replace('_', '-')} must be a finite number, got {value}")

    def to_json(self) -> dict[str, Any]:
        """What is set, for records; of levels how many, the first and the last."""
        found = {key: value for key, value in vars(self).items() if value is not None}
        if self.levels is not None:
            ends = [[level.alpha, level.sigma] for level in (self.levels[0], self.levels[-1])]
            found["levels"] = {"count": len(self.levels), "first": ends[0], "last": ends[1]}
        return found
