"""A pretrained network as a denoiser: at any noise level, with what must be known of its data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.compiled import Pure
from mmdgs.denoisers import Denoiser, HasPure, has_symmetric_jacobian
from mmdgs.errors import UsageError
from mmdgs.models import DENOISERS, Model
from mmdgs.moments import require_batch
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.pretrained.levels import LevelScale

SAME_RATIO = 1e-4
"""How much a ratio sigma / alpha may differ from the one of a single-level model, relatively."""


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A denoiser D(x_t, level) = E[x | x_t] from elsewhere, with the levels and the data it was trained on.

    `levels` are as trained, the noisiest first; others are answered too, by their ratio sigma / alpha.
    """

    denoiser: Denoiser
    levels: tuple[NoiseLevel, ...]
    shape: tuple[int, ...]  # of one example
    interval: tuple[float, float]  # where the data's values lie
    network: nn.Module
    source: str  # the path or name it came from

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        require_batch(x_t, level)
        return self.denoiser(x_t, level)

    def pure(self, level: NoiseLevel | NoiseLevels) -> Pure | None:
        """For the fast path."""
        return self.denoiser.pure(level) if isinstance(self.denoiser, HasPure) else None

    @property
    def symmetric_jacobian(self) -> bool:
        """Whether the denoiser's Jacobian is symmetric, as an energy's is."""
        return has_symmetric_jacobian(self.denoiser)

    @classmethod
    def of(cls, model: Model, source: str = "") -> Pretrained:
        """A model of mmdgs. One trained at a single level answers at its ratio sigma / alpha alone."""
        if model.config.param not in DENOISERS:
            raise UsageError(
                f"a model with parametrisation {model.config.param!r} is no denoiser, so it cannot be a Pretrained; "
                "use the model itself: model.posterior() for mean and std heads, model.network for classes"
            )
        config = model.config
        source = source or f"a {config.network} model" + (f" of {config.trained_on}" if config.trained_on else "")
        denoiser = ModelDenoiser(model.denoiser, LevelScale(model.levels))
        return cls(denoiser, model.levels, config.shape, config.interval, model.network, source)

    def scaled(self, x: Tensor) -> Tensor:
        """Values in [0, 1] as they lie in the data's interval."""
        low, high = self.interval
        return x if (low, high) == (0.0, 1.0) else low + (high - low) * x

    def to(self, device: torch.device | str) -> Pretrained:
        """Move the network; returns the same object."""
        self.network.to(device)
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are; a network without weights is on the CPU."""
        weights = next(self.network.parameters(), None)
        return torch.device("cpu") if weights is None else weights.device

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights (names, shapes, types and bytes): what results that are kept are known by."""
        return weights_digest(self.network.state_dict(), self.source)


def weights_digest(tensors: Mapping[str, Tensor], where: object) -> str:
    """SHA-256 of tensors with their names, shapes and types, in the order of the names."""
    if not tensors:
        raise UsageError(f"{where} holds no weights, so there is no digest to know it by; do not keep results of it")
    found = hashlib.sha256()
    for key in sorted(tensors):
        value = tensors[key].detach().cpu().contiguous()
        found.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


@dataclass(frozen=True)
class ModelDenoiser:
    """A model of mmdgs at any level: x_t rescaled to the alpha that the model has at the level's ratio."""

    denoiser: Denoiser
    scale: LevelScale

    @property
    def symmetric_jacobian(self) -> bool:
        return has_symmetric_jacobian(self.denoiser)

    def __call__(self, x_t: Tensor, level: NoiseLevel, /) -> Tensor:
        factor, own = self._own(level)
        return self.denoiser(factor * x_t, own)

    def _own(self, level: Any) -> tuple[Any, Any]:
        """The factor to rescale x_t by, and the model's level there: for all rows, or for each."""
        if len(self.scale.levels) == 1:
            self._require_same_ratio(level)
        alpha = self.scale.alpha(level)
        factor = alpha / level.alpha
        return factor, type(level)(alpha=alpha, sigma=factor * level.sigma)

    def pure(self, level: NoiseLevel | NoiseLevels) -> Pure | None:
        """For the fast path: the model's own, with the factor before its numbers."""
        factor, own = self._own(level)
        inner = self.denoiser.pure(own) if isinstance(self.denoiser, HasPure) else None
        if inner is None:
            return None
        function = inner.function
        return Pure(
            lambda x, f, *rest: function(f * x, *rest), level.alpha, (factor, *inner.numbers), inner.network, self
        )

    def _require_same_ratio(self, level: NoiseLevel | NoiseLevels) -> None:
        own = self.scale.levels[0]
        off = torch.as_tensor((level.sigma / level.alpha) / (own.sigma / own.alpha) - 1).abs().max().item()
        if off > SAME_RATIO:
            raise UsageError(
                f"this model was trained at {own} alone and knows no other sigma / alpha; got {level}: "
                "use a model of many levels"
            )
