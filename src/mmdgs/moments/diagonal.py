"""The diagonal of the covariance: by products with probes, or exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser, require_denoiser
from mmdgs.jacobians import linearised, mean_and_diagonal, mean_and_jacobian
from mmdgs.linalg.operators import Dense, Diagonal, raise_non_finite
from mmdgs.linalg.repair import FEW, error_size, lifted
from mmdgs.moments.contract import Floor, check_mean, floor_at, require_input, watch_rounding
from mmdgs.moments.probes import ProbeDesign, design_for, probed_diagonal
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator


@dataclass(frozen=True)
class DiagonalMoments:
    """The diagonal of the covariance by S products with probes v (eq. diag:approx; Bekas et al., 2007).

    `design` says which probes (probes.py): `Rademacher()` are the paper's, the mean of v * (v' J). None takes
    `Lattice()` for images (B, C, H, W), where it comes nearer with fewer products, and `Rademacher(smooth=True)` for
    all else: the paper's, filtered by their own noise.
    `probes=None` takes the exact diagonal, by d products, and so do d probes or more. Variances below
    floor (sigma / alpha)^2 are lifted to it; None takes the floor from the network's own error and that of the probes
    (linalg/repair.py).
    """

    denoiser: Denoiser
    probes: int | None = 10
    floor: Floor = None
    design: ProbeDesign | None = None

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)
        if self.probes is not None and (not isinstance(self.probes, int) or self.probes < 1):
            raise ValueError(f"probes must be a positive number, or None for the exact diagonal, got {self.probes}")

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        d, errors = math.prod(x_t.shape[1:]), None
        least, share = floor_at(level, self.floor)
        probes = self.probes if self.probes is not None and self.probes < d else None
        if probes is None and share > 0 and d <= FEW:
            mean, jacobian = mean_and_jacobian(self.denoiser, x_t, level)
            diagonal = jacobian.diagonal(dim1=1, dim2=2).reshape(x_t.shape)
            whole = Dense.from_matrix(0.5 * (jacobian + jacobian.mT), x_t.shape[1:])
            errors = error_size(whole.values).reshape(-1, *[1] * (x_t.ndim - 1))
        elif probes is None:
            mean, diagonal = mean_and_diagonal(self.denoiser, x_t, level)
        elif generator is None:
            raise TypeError("DiagonalMoments draws probes and needs generator=; or use probes=None")
        else:
            at = linearised(self.denoiser, x_t, level)
            diagonal, errors = probed_diagonal(at, self.design or design_for(x_t), probes, x_t, generator)
            mean = at.mean
        raise_non_finite("denoising covariance", diagonal)
        check_mean(self.denoiser, x_t, level, mean, diagonal)
        variances = level.tweedie * diagonal
        watch_rounding(self.denoiser, variances, level)
        errors = None if errors is None else level.tweedie * errors
        values, repaired = lifted(variances, least, share, errors)
        return Gaussian(mean, Diagonal(values, errors), repaired)
