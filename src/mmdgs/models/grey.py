"""Grey images by a model of colours: what was measured once counts once.

A grey image g is one of three equal channels, and the mean of three noisy channels knows as much of
it as a measurement with a third of the variance. So with z = g + sigma e, for e of one channel,

    D(z, sigma) = mean over the channels of D3((z, z, z), sqrt(3) sigma)

A grey image with noise that is repeated in three channels, with noise taken for independent, would
count thrice: on photographs the error of the mean was 2 to 7 dB larger. Covariances follow by the
same relation, Cov[g | z] = sigma^2 dD/dz; a spectrum is that of the channels' sum, over three.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mmdgs.denoisers import Denoiser, has_symmetric_jacobian, subtracts_noise
from mmdgs.files import sha256_of
from mmdgs.models.fits import FitStore
from mmdgs.models.model import Model
from mmdgs.models.weights import ISOTROPIC, SPECTRAL
from mmdgs.noise import LevelTable

WIDER = math.sqrt(3)


@dataclass(frozen=True)
class GreyDenoiser:
    """A denoiser of colours (B, 3, H, W) for grey images (B, 1, H, W)."""

    denoiser: Denoiser

    @property
    def symmetric_jacobian(self) -> bool:
        return has_symmetric_jacobian(self.denoiser)

    @property
    def subtracts(self) -> bool:
        return subtracts_noise(self.denoiser)

    def __call__(self, x_t: Tensor, level: Any, /) -> Tensor:
        wider = replace(level, sigma=WIDER * level.sigma)
        return self.denoiser(x_t.expand(-1, 3, -1, -1), wider).mean(1, keepdim=True)


class GreyModel(Model):
    """A model of colours for grey images: its weights, and levels that are lower by sqrt(3)."""

    def __init__(self, colours: Model) -> None:
        vars(self).update(vars(colours))
        self.colours = colours
        self._denoiser = GreyDenoiser(colours)
        self.levels = tuple(replace(level, sigma=level.sigma / WIDER) for level in colours.levels)
        self.shape = (1, *colours.shape[1:])
        self.folder = None  # whose fits are of colours

    @property
    def digest(self) -> str:
        return sha256_of("grey", self.colours.digest)

    def inherited_fit(self, kind: str) -> LevelTable | None:
        """The fit of colours as one of grey images; calibrations have no units, and stay."""
        spectral = kind in (SPECTRAL, ISOTROPIC)
        table = FitStore(self.colours, SPECTRAL if spectral else kind).best_of()
        if table is None:
            return None
        values = table.values[:, :1] / 3 if spectral else table.values
        values = values.flatten(1).mean(1) if kind == ISOTROPIC else values
        return LevelTable(table.ratios / WIDER, values)
