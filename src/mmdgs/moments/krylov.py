"""The full covariance without forming it, by products with the Jacobian (linalg/krylov.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from mmdgs.denoisers import Denoiser, require_denoiser
from mmdgs.jacobians import linearised
from mmdgs.linalg.components import TOLERANCE, Components
from mmdgs.linalg.krylov import Krylov
from mmdgs.moments.contract import Floor, check_mean, covariance_product, floor_at, require_input
from mmdgs.moments.probes import design_for, probed_diagonal
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, Streams, signs, spawn_seeds


@dataclass(frozen=True)
class KrylovMoments:
    """The full covariance without forming it: `steps` products with the symmetrised Jacobian for each draw (krylov.py).

    Draws, densities and variances along directions converge to FullMoments' as steps grow, and are theirs where
    d <= steps. Ritz values below floor (sigma / alpha)^2 are lifted to it, and None takes the floor from the network's
    own error (linalg/repair.py); how many, and the estimated relative error of a draw, are in a run's info
    ("repaired", "krylov_error") and in `Gaussian.sample_with_info`. Densities draw `probes` signs, and the diagonal
    is that of DiagonalMoments with as many probes, raised by what was lifted. `symmetric` says whether the Jacobian
    is symmetric, which halves the work; None asks the denoiser: energies' are. The posterior holds the graph of its
    forward pass until it is dropped.
    """

    denoiser: Denoiser
    steps: int = 20
    floor: Floor = None
    symmetric: bool | None = None
    probes: int = 10

    def __post_init__(self) -> None:
        require_denoiser(self.denoiser)
        for name in ("steps", "probes"):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise ValueError(f"{name} must be a positive whole number, got {given!r}")

    def __call__(
        self, x_t: Float[Tensor, "batch ..."], level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        require_input(x_t, level, self.denoiser)
        at = linearised(self.denoiser, x_t, level, symmetric=self.symmetric)
        mean = at.mean
        check_mean(self.denoiser, x_t, level, mean)

        product = covariance_product(at, x_t, level)

        # Probes are few numbers' worth of randomness until they are needed, which in a chain they never are.
        d = math.prod(x_t.shape[1:])
        seeds = None if generator is None or d <= self.steps else spawn_seeds(len(x_t), x_t.device, generator)

        def probes() -> Tensor:
            assert seeds is not None
            drawn = signs((len(x_t), self.probes, d), mean, Streams(seeds.tolist(), len(x_t)))
            return drawn.transpose(0, 1)

        def estimate() -> Tensor:
            assert seeds is not None
            streams = Streams(seeds.tolist(), len(x_t), purpose="diagonal")
            return level.tweedie * probed_diagonal(at, design_for(mean), self.probes, mean, streams)[0]

        least, share = floor_at(level, self.floor)
        cov = Krylov(product, mean, self.steps, least, share=share)
        return Gaussian(mean, cov if seeds is None else replace(cov, probes=probes, estimate=estimate))


def components(
    denoiser: Denoiser,
    x_t: Float[Tensor, "batch ..."],
    level: NoiseLevel,
    k: int,
    region: tuple[int, int, int, int] | None = None,
    *,
    tolerance: float = TOLERANCE,
    most: int | None = None,
    symmetric: bool | None = None,
) -> Components:
    """The k principal components of p(x | x_t), by products with the symmetrised Jacobian (`Gaussian.components`).

    `symmetric` says whether the Jacobian is symmetric, which halves the work; None asks the denoiser.
    """
    q = KrylovMoments(denoiser, steps=1, symmetric=symmetric)(x_t, level)
    return q.components(k, region, tolerance=tolerance, most=most)
