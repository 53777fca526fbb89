"""The settings of restoration, options of `mmdgs restore`; importing them needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmdgs.covariances import Covariance, LowRank, Spectral
from mmdgs.errors import UsageError, unknown_name
from mmdgs.options import check_counts, option
from mmdgs.runtime import check_precision

if TYPE_CHECKING:
    from torch import Tensor

    from mmdgs.models import Model
    from mmdgs.moments import Moments
    from mmdgs.noise import NoiseLevel
    from mmdgs.sensors import Sensor

MULTISTEP, BRIDGE, MIRRORED = CHAINS = ("multistep", "bridge", "mirrored")
RESAMPLED_BELOW = 0.5  # as of samplers.TwistedParticles, which needs torch
GOOD = "good"
QUALITIES: dict[str, tuple[Covariance, int]] = {
    "fast": (Spectral(), 10),
    GOOD: (Spectral(), 25),
    "best": (LowRank(1, symmetric=True), 16),
}
"""In one word: the covariance and the steps. A draw costs 10, 25 and 48 evaluations of the model,
where a product counts as two."""


def quality_named(quality: str) -> tuple[Covariance, int]:
    """The covariance and the steps of a quality."""
    if quality not in QUALITIES:
        raise unknown_name("quality", quality, QUALITIES)
    return QUALITIES[quality]


@dataclass(frozen=True)
class RestorationSettings:
    """How measurements are restored: what runs, and what the record of a run says.

    `noise` is a standard deviation for values in [0, 1]: a number, one a row (B,), one a
    measurement; a `mmdgs.sensors.Sensor`; or "estimate" or "estimate-poisson", which take it from y
    (`operators.estimated_noise`, `sensors.estimated_sensor`). `covariance` is
    one of `mmdgs.covariances`, its name, or an estimator in the units of the model. `chains` are
    "multistep", which follows the conditioned means; "bridge", which draws at every level (with the
    exact covariance of Gaussian data it is exact in any number of steps); or "mirrored" for the
    nearest draws, whose spread is too small to be their uncertainty. The fresh noise of "multistep"
    is multiplied by `inflation`; None is the model's (`ModelConfig.inflation`). Each draw takes
    `steps` evaluations of the model (and the products of its covariance), along EDM's levels within
    the model's range unless `levels` are given. With several `particles` ("bridge" alone) each draw
    is one of a run of so many by its weight (samplers/particles.py), for so many times the
    evaluations; they are resampled where their effective share falls below `resample`.
    `batch_size` is how many draws run at a time, and changes numbers by rounding alone.
    """

    noise: float | Tensor | Sensor | str
    covariance: Covariance | str | Moments = option(
        Spectral(),
        "spectral, low-rank, isotropic, diagonal, krylov ...",
        kind=str,
        show_default="by quality",
    )
    chains: str = option(
        MULTISTEP,
        "multistep; bridge; or mirrored: nearer to the truth, but draws differ too little.",
    )
    steps: int = option(
        25,
        "Noise levels: evaluations of the model for each draw, but for products.",
        min=2,
        show_default="by quality",
    )
    draws: int = option(16, "Draws of each image.", min=1)
    inflation: float | None = option(
        None,
        "Of --chains multistep: fresh noise times this; above 1 draws differ more.",
        show_default="the model's for the covariance: 1, or photo's own",
    )
    particles: int = option(
        1, "Of --chains bridge: weighted particles for each draw, so many times the work.", min=1
    )
    resample: float = option(
        RESAMPLED_BELOW,
        "Of particles: resample them where their effective share falls below this; 0: never.",
    )
    seed: int = option(0, "Seed of everything random.", min=0, max=2**63 - 1)
    levels: Sequence[NoiseLevel] | None = None
    precision: str = option("float32", "The network's: float32, tf32 or bf16.")
    batch_size: int | None = option(None, "Draws at a time.", min=1, show_default="by device")

    def __post_init__(self) -> None:
        from mmdgs.randomness import checked_seed

        if self.chains not in CHAINS:
            raise unknown_name("chains", self.chains, CHAINS)
        check_counts(self)
        if self.particles > 1 and self.chains != BRIDGE:
            raise UsageError(
                f"{self.particles} particles are weighted draws of chains {BRIDGE!r}, got "
                f"{self.chains!r}"
            )
        if self.inflation is not None and self.chains != MULTISTEP:
            raise UsageError(
                f"inflation is of the fresh noise of chains {MULTISTEP!r}, got {self.inflation} "
                f"with {self.chains!r}"
            )
        if self.inflation is not None and not 0.5 <= self.inflation <= 2:
            raise UsageError(
                f"inflation is a factor near 1 (0.5 to 2; photo has 1.003), got {self.inflation}"
            )
        if not 0 <= self.resample <= 1:
            raise UsageError(f"resample is a share of the particles, 0 to 1, got {self.resample}")
        if self.resample != RESAMPLED_BELOW and self.particles == 1:
            raise UsageError(
                f"resample is of several particles, and one was asked for: leave it out, or give "
                f"particles, got {self.resample}"
            )
        check_precision(self.precision)
        checked_seed(self.seed)

    def of_model(self, model: Model, moments: Moments) -> RestorationSettings:
        """The settings with what they leave to the model and its estimator."""
        if self.inflation is not None or self.chains != MULTISTEP:
            return self
        return replace(self, inflation=model.inflation(moments))

    def record(self) -> dict[str, Any]:
        """What draws depend on, for records; `mmdgs.identity` describes tensors and estimators."""
        from mmdgs.identity import input_record

        values = {name: value for name, value in vars(self).items() if name != "batch_size"}
        if isinstance(self.covariance, Covariance):
            del values["covariance"]
            return input_record(**values) | {"covariance": self.covariance.to_json()}
        return input_record(**values)
