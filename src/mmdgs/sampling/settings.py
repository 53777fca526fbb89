"""The settings of samplers: the options of `mmdgs sample`; importing them needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmdgs.covariances import COVARIANCES, Covariance
from mmdgs.errors import UsageError, unknown_name
from mmdgs.options import option

if TYPE_CHECKING:
    from mmdgs.schedules import Levels

NAMES = (
    "gibbs", "gibbs-down", "langevin", "consistent", "ancestral", "ddim", "heun", "multistep",
)  # fmt: skip
"""Samplers by the names they have on the command line; sampling/named.py has what each is."""


@dataclass(frozen=True)
class SamplerSettings:
    """A sampler by name, with its settings; None is the sampler's own choice (`named.resolved`)."""

    sampler: str | None = option(
        None, f"{', '.join(NAMES)}.", show_default="gibbs; over many levels heun"
    )
    levels: Levels | None = option(
        None,
        "Noise levels, such as geometric:232:50:0.01.",
        show_default="the model's, or EDM's",
        kind=str,
    )
    steps: int | None = option(
        None,
        "Noise levels that are used; sweeps of a model of one level.",
        min=1,
        show_default="all; 18 of EDM's; 20 sweeps",
    )
    covariance: Covariance | str | None = option(
        None, f"{', '.join(COVARIANCES)}.", show_default="auto", kind=str
    )
    sweeps: int | None = option(None, "Steps at each level (gibbs, langevin).", min=1)
    rate: float | None = option(
        None, "Step size of Langevin, in sigma^2.", show_default="NCSNv2's for the levels"
    )
    eta: float | None = option(
        None, "Fresh noise: of ddim, in [0, 1]; of multistep, 0 or more; of consistent."
    )
    churn: float | None = option(None, "Share of noise added before a step of heun [0].")
    order: int | None = option(None, "Of multistep: 2 or 3 [2].")
    guide: str | None = option(
        None,
        "A worse model of the same data, less trained or smaller: samples are led away from it.",
    )
    guidance: float | None = option(
        None,
        "How far to go from the guide, 1 being as far as the model.",
        min=1,
        show_default="1; with --guide 2",
    )
    clip: bool | None = option(
        None, "Keep means in the data's interval.", flag="--clip/--no-clip", show_default="auto"
    )
    last_noise: float | None = option(
        None, "Of ancestral: grey levels of noise that may stay in samples [2]."
    )
    mean: bool | None = option(
        None,
        "Of one level: end with the posterior's mean, not a draw.",
        flag="--mean/--draw",
        show_default="draw",
    )

    def __post_init__(self) -> None:
        if self.sampler is not None and self.sampler not in NAMES:
            raise unknown_name("sampler", self.sampler, NAMES)
        for name, value in vars(self).items():
            if not isinstance(value, float) or math.isfinite(value):
                continue
            if (name, value) != ("last_noise", math.inf):
                raise UsageError(f"{name.replace('_', '-')} must be a finite number, got {value}")

    def to_json(self) -> dict[str, Any]:
        """What is set, for records; of levels how many, the first and the last."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        if isinstance(self.covariance, Covariance):
            values["covariance"] = self.covariance.to_json()
        if self.levels is not None:
            first, last = (
                [level.alpha, level.sigma] for level in (self.levels[0], self.levels[-1])
            )
            values["levels"] = {"count": len(self.levels), "first": first, "last": last}
        return values
