"""What is asked of the posterior of an image: options of `mmdgs posterior`, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmdgs.covariances import Covariance, Diagonal, Krylov, Spectral
from mmdgs.errors import UsageError
from mmdgs.options import check_counts, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmdgs.sensors import Sensor

PRODUCTS = Krylov()
Region = tuple[int, int, int, int]
OF_FIXED_SIZE = {"components": 5, "draws": 8, "diagonal": Diagonal(probes=10)}
OF_ANY_SIZE = {"components": 3, "draws": 4, "diagonal": Diagonal(probes=3)}
"""What is not set, by whether a model takes images of any size: a photograph has a hundred times
the numbers of a stamp. Draws are by a spectrum that is kept with such a model."""
QUICK = {"components": 0, "draws": 2, "diagonal": Diagonal(probes=3)}
"""The settings of `mmdgs posterior --quick`."""


@dataclass(frozen=True)
class PosteriorSettings:
    """The noise of images, their components and draws, and the covariances that these come from.

    `sigma` is a standard deviation for values in [0, 1], or "estimate", which takes it from each
    image. Noise that is not the same everywhere is a tensor (C, H, W), a `mmdgs.sensors.Sensor`, or
    "estimate-poisson": then mean and standard deviations are those of draws by `mmdgs.restore`, and
    there are no components. Of one sigma mean, standard deviations and intervals come from the
    `diagonal`, draws from `draws_by`,
    components from the full covariance by products, as of `krylov` spaces. Draws by a spectrum take
    their strength at each pixel from the diagonal.

    Of a model of any size the components are those of a `region`: unless given, the most uncertain
    one of a large image. They see `margin` pixels around it. What is None is set by the model
    (`of_model`).
    """

    sigma: float | str | Tensor | Sensor = "estimate"
    simulate: bool = option(
        False,
        "The images are clean: add the noise first, and score the results.",
        flag="--simulate",
        show_default=False,
    )
    components: int | None = option(
        None,
        "Principal components of the uncertainty.",
        min=0,
        show_default="5; of a model of any size 3",
    )
    draws: int | None = option(
        None, "Draws of each image.", min=0, show_default="8; of a model of any size 4"
    )
    region: Region | None = option(
        None,
        "x,y,width,height: the components of this part of the image.",
        kind=str,
        show_default="all; of a large image for a model of any size the most uncertain part",
    )
    margin: int = option(
        32, "Pixels around the region that its components see (models of any size).", min=0
    )
    tolerance: float = option(0.01, "Residual of each component.", min=1e-6, max=1.0)
    seed: int = option(0, "Seed of everything random.", min=0, max=2**63 - 1)
    diagonal: Diagonal | None = None
    draws_by: Covariance | None = option(
        None,
        "Covariance of the draws: krylov, spectral, low-rank ...",
        kind=str,
        show_default="krylov; of a model of any size spectral",
    )
    krylov: Krylov = PRODUCTS

    def __post_init__(self) -> None:
        from torch import Tensor

        from mmdgs.operators import ESTIMATE
        from mmdgs.randomness import checked_seed
        from mmdgs.sensors import ESTIMATE_POISSON, Sensor

        if isinstance(self.sigma, str):
            if self.sigma not in (ESTIMATE, ESTIMATE_POISSON):
                words = f"{ESTIMATE} or {ESTIMATE_POISSON}"
                raise UsageError(f"sigma must be a number, or {words}, got {self.sigma!r}")
            if self.simulate:
                raise UsageError(
                    "simulated noise needs sigma as a number, such as 0.1 for values in [0, 1]"
                )
        elif isinstance(self.sigma, Tensor | Sensor):
            pass  # checked with the image
        elif not (isinstance(self.sigma, int | float) and 0 < self.sigma < math.inf):
            raise UsageError(f"sigma must be a positive number, got {self.sigma!r}")
        check_counts(self)
        checked_seed(self.seed)

    def of_model(self, *, any_size: bool, spectrum: bool) -> PosteriorSettings:
        """With everything set, for a model of images of one or of any size; whether it has a
        `spectrum` says how a model of any size draws.
        """
        defaults: dict[str, Any] = {
            **(OF_ANY_SIZE if any_size else OF_FIXED_SIZE),
            "draws_by": Spectral() if any_size and spectrum else self.krylov,
        }
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **unset)

    @property
    def parts(self) -> int:
        """How many parts the work on one image has, for a progress bar."""
        return (self.draws or 0) + 3

    def to_json(self) -> dict[str, Any]:
        """Every setting, for records."""
        from mmdgs.identity import input_record

        covariances = {name: getattr(self, name) for name in ("diagonal", "draws_by", "krylov")}
        described = {name: c and c.to_json() for name, c in covariances.items()}
        sigma = input_record(sigma=self.sigma)
        return vars(self) | sigma | {"region": self.region and list(self.region)} | described
