"""The diagonal of the covariance: by products with probes, or exact."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser, require_denoiser
from mmdgs.jacobians import chunks, linearised, mean_and_diagonal
from mmdgs.linalg.operators import Diagonal, floored, raise_non_finite
from mmdgs.moments.contract import FLOOR, require_input
from mmdgs.moments.probes import ProbeDesign, design_for
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator


@dataclass(frozen=True)
class DiagonalMoments:
    """The diagonal of the covariance by S products with probes v (eq. diag:approx; Bekas et al., 2007).

    `design` says which probes (probes.py): `Rademacher()` are the paper's, the mean of v * (v' J). None takes
    `Lattice()` for images (B, C, H, W), where it comes nearer with fewer products, and the paper's for all else.
    `probes=None` takes the exact diagonal, by d products. Variances below floor (sigma / alpha)^2 are lifted to it.
    """

    denoiser: Denoiser
    probes: int | None = 10
    floor: float = FLOOR
    design: ProbeDesign | None = None

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)
        if self.probes is not None and (not isinstance(self.probes, int) or self.probes < 1):
            raise ValueError(f"probes must be a positive number, or None for the exact diagonal, got {self.probes}")

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        if self.probes is None:
            mean, diagonal = mean_and_diagonal(self.denoiser, x_t, level)
        elif generator is None:
            raise TypeError("DiagonalMoments draws probes and needs generator=; or use probes=None")
        else:
            at = linearised(self.denoiser, x_t, level)
            design = self.design or design_for(x_t)
            v = design.draw(self.probes, x_t, generator)
            sums = design.diagonal(self.probes, x_t)
            for start, stop in chunks(self.probes, x_t):
                sums.add(v[start:stop], at.pull(v[start:stop]))
            mean, diagonal = at.mean, sums.estimate()
        raise_non_finite("denoising mean", mean)
        raise_non_finite("denoising covariance", diagonal)
        values, repaired = floored(level.tweedie * diagonal, self.floor * level.variance)
        return Gaussian(mean, Diagonal(values), repaired)
