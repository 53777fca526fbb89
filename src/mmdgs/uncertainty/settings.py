"""What is asked of the posterior of an image: options of `mmdgs posterior`, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mmdgs.covariances import Diagonal, Krylov
from mmdgs.errors import UsageError
from mmdgs.options import check_counts, option

PROBED, DRAWN = Diagonal(probes=10), Krylov()
Region = tuple[int, int, int, int]


@dataclass(frozen=True)
class PosteriorSettings:
    """The noise of images, their components and draws, and the covariances that these come from.

    `sigma` is a standard deviation for values in [0, 1], or "estimate", which takes it from each
    image. Mean, standard deviations and intervals come from the `diagonal`, draws and components
    from the full covariance by `krylov` spaces.
    """

    sigma: float | str
    simulate: bool = option(
        False,
        "The images are clean: add the noise first, and score the results.",
        flag="--simulate",
        show_default=False,
    )
    components: int = option(5, "Principal components of the uncertainty.", min=0)
    draws: int = option(8, "Draws of each image.", min=0)
    region: Region | None = option(
        None, "x,y,width,height: the components of this part of the image.", kind=str
    )
    tolerance: float = option(0.01, "Residual of each component.", min=1e-6, max=1.0)
    seed: int = option(0, "Seed of everything random.", min=0, max=2**63 - 1)
    diagonal: Diagonal = PROBED
    krylov: Krylov = DRAWN

    def __post_init__(self) -> None:
        from mmdgs.operators import ESTIMATE
        from mmdgs.randomness import checked_seed

        if isinstance(self.sigma, str):
            if self.sigma != ESTIMATE:
                raise UsageError(f"sigma must be a number, or {ESTIMATE}, got {self.sigma!r}")
            if self.simulate:
                raise UsageError(f"simulated noise needs sigma as a number, not {ESTIMATE}")
        elif not (isinstance(self.sigma, int | float) and 0 < self.sigma < math.inf):
            raise UsageError(f"sigma must be a positive number, got {self.sigma!r}")
        check_counts(self)
        checked_seed(self.seed)

    @property
    def parts(self) -> int:
        """How many parts the work on one image has, for a progress bar."""
        return self.draws + 3

    def to_json(self) -> dict[str, Any]:
        """Every setting, for records."""
        region, covariances = self.region and list(self.region), (self.diagonal, self.krylov)
        return vars(self) | {"region": region} | {c.name: c.to_json() for c in covariances}
