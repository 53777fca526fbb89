"""What a model is: its network by name, what the output means, the shape of an example, the noise level."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

from torch import Tensor, nn

from mmdgs.denoisers import (
    Denoiser,
    Network,
    clean_denoiser,
    edm_denoiser,
    energy_denoiser,
    noise_denoiser,
    score_denoiser,
    takes_level,
    velocity_denoiser,
)
from mmdgs.errors import UsageError, nearest, shown, unknown_name
from mmdgs.moments.ocm import RatioScale
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.version import __version__

FORMAT = 1
MOST_LEVELS = 10_000
"""Noise levels of a model; those of DDPM are 1,000."""
MOST_SHAPE = 1 << 28
"""Numbers of one example: 16,384 x 16,384 pixels."""
KINDS: dict[str, tuple[type, ...]] = {
    "network": (str,),
    "param": (str,),
    "shape": (list,),
    "options": (dict,),
    "sigma": (float, int, type(None)),
    "alpha": (float, int),
    "sigmas": (list,),
    "alphas": (list,),
    "interval": (list,),
    "classes": (list,),
    "isotropic_variance": (float, int, type(None)),
    "trained_on": (str,),
    "head": (dict,),
    "trained_images": (int, type(None)),
    "runs": (list,),
}
"""What each key of config.json holds."""


class SquaredErrorEnergy(nn.Module):
    """The energy ||x - net(x)||^2 / 2 (the authors' code), one value a row."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.with_level = takes_level(network)

    def forward(self, x: Tensor, level: NoiseLevel | NoiseLevels) -> Tensor:
        reconstruction = self.network(x, level) if self.with_level else self.network(x)
        return 0.5 * (x - reconstruction).flatten(1).square().sum(1)


def _squared_error(network: Network) -> Denoiser:
    return energy_denoiser(SquaredErrorEnergy(network))


DENOISERS: dict[str, Callable[[Network], Denoiser]] = {
    "energy": energy_denoiser,
    "energy-squared": _squared_error,
    "score": score_denoiser,
    "noise": noise_denoiser,
    "clean": clean_denoiser,
    "velocity": velocity_denoiser,
    "edm": edm_denoiser,
}
"""What a network's output can mean, where it gives E[x | x_t]."""

MEAN_STD, CLASSES, VARIANCE_RATIO, COVARIANCE = "mean-std", "classes", "variance-ratio", "covariance"
HEADS = (VARIANCE_RATIO, COVARIANCE)
PARAMS = (*DENOISERS, MEAN_STD, CLASSES, *HEADS)
"""All a network's output can mean; the last four: mean and log standard deviation of p(x | x_t), class logits, and the
variances or the covariance of p(x | x_t) under another network's denoiser (moments/ocm.py, moments/modulated.py)."""


def check_param(param: str) -> None:
    """Refuse a parametrisation there is not."""
    if param not in PARAMS:
        raise unknown_name("parametrisation", param, PARAMS)


def check_level(alpha: float, sigma: float) -> None:
    """Refuse a noise level there cannot be."""
    try:
        NoiseLevel(alpha=alpha, sigma=sigma)
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_levels(sigmas: Sequence[float], alphas: Sequence[float]) -> None:
    """Refuse lists of levels that do not match, or that are not in order."""
    if alphas and len(alphas) != len(sigmas):
        raise UsageError(f"need as many alphas as sigmas, or none, got {len(alphas)} and {len(sigmas)}")
    for alpha, sigma in zip(alphas or repeat(1.0), sigmas, strict=False):
        check_level(alpha, sigma)
    ratios = [sigma / alpha for alpha, sigma in zip(alphas or repeat(1.0), sigmas, strict=False)]
    for i, (noisier, cleaner) in enumerate(pairwise(ratios)):
        if noisier <= cleaner:
            raise UsageError(
                f"levels must go from the noisiest to the cleanest, and {i + 1} (sigma / alpha {cleaner:g}) is not "
                f"cleaner than {i} ({noisier:g}); turn the list around, or sort it"
            )


@dataclass(frozen=True)
class ModelConfig:
    """All that is needed to build a model: what is in config.json."""

    network: str
    param: str
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    sigma: float | None = None
    alpha: float = 1.0
    sigmas: tuple[float, ...] = ()  # in place of sigma: many levels, the noisiest first
    alphas: tuple[float, ...] = ()  # of these; none: 1
    interval: tuple[float, float] = (0.0, 1.0)  # where the data's values lie
    classes: tuple[str, ...] = ()
    isotropic_variance: float | None = None
    trained_on: str = ""  # a set, where its part for training is meant, or a set and a part, such as celeba:test
    head: dict[str, Any] = field(default_factory=dict)  # of a head: for which denoiser, and the scale of its numbers
    trained_images: int | None = None  # seen in training, over all runs; none: not known
    runs: tuple[dict[str, Any], ...] = ()  # of training, in order: command, steps, images, where it started

    def __post_init__(self) -> None:
        check_param(self.param)
        for name in ("shape", "classes", "sigmas", "alphas", "interval", "runs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.shape or any(type(n) is not int or n < 1 for n in self.shape):
            raise UsageError(f"shape must be the shape of one example, such as [1, 28, 28], got {shown(self.shape)}")
        if math.prod(self.shape) > MOST_SHAPE:
            raise UsageError(f"shape {shown(self.shape)} has more numbers than the limit of {MOST_SHAPE:,} an example")
        for name in ("sigmas", "alphas", "interval"):
            self._check_numbers(name)
        if self.param == CLASSES and not self.classes:
            raise UsageError("a classifier needs the names of its classes, and its data labels")
        if self.param != CLASSES and (self.sigma is None) == (not self.sigmas):
            raise UsageError(
                f"a model with parametrisation {self.param!r} needs sigma, the noise level it is for, or many sigmas "
                "(in a recipe: levels)"
            )
        if self.sigma is not None:
            check_level(self.alpha, self.sigma)
        check_levels(self.sigmas, self.alphas)
        if (self.param in HEADS) != bool(self.head):
            raise UsageError(
                f"head goes with the parametrisations {' and '.join(HEADS)}, got {shown(self.head)} and {self.param!r}"
            )
        if self.head:
            self._check_head()
        if any(not isinstance(run, dict) for run in self.runs):
            raise UsageError(
                f"runs must be a list of objects, one for each run of training, got {shown(list(self.runs))}"
            )
        if len(self.interval) != 2 or not self.interval[0] < self.interval[1]:
            raise UsageError(f"interval must be two numbers, the smaller first, got {list(self.interval)}")
        if self.isotropic_variance is not None and not 0 < self.isotropic_variance < math.inf:
            raise UsageError(f"isotropic_variance must be positive and finite, got {self.isotropic_variance}")

    def _check_numbers(self, name: str) -> None:
        """Refuse a list that does not hold finite numbers alone."""
        values = getattr(self, name)
        if len(values) > MOST_LEVELS:
            raise UsageError(f"{name} has {len(values):,} entries, more than the limit of {MOST_LEVELS:,}")
        for value in values:
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < math.inf:
                raise UsageError(f"{name} must be finite numbers, got {shown(value)}")
        object.__setattr__(self, name, tuple(map(float, values)))

    def _check_head(self) -> None:
        scale = "scale" if self.param == VARIANCE_RATIO else "data_std"
        if not isinstance(self.head.get("denoiser"), str) or self.head.keys() != {"denoiser", scale}:
            raise UsageError(f"head must hold the digest of its denoiser and its {scale}, got {sorted(self.head)}")
        if self.param == COVARIANCE:
            std = self.head[scale]
            if not isinstance(std, int | float) or not 0 < std < math.inf:
                raise UsageError(f"the head's data_std must be positive and finite, got {shown(std)}")
            return
        try:
            self.ratio_scale  # noqa: B018  made to be checked
        except (TypeError, ValueError) as error:
            raise UsageError(f"the scale of the head is none: {error}") from error

    @property
    def ratio_scale(self) -> RatioScale:
        """The scale of a head's ratios."""
        return RatioScale(**self.head["scale"])

    @property
    def levels(self) -> tuple[NoiseLevel, ...]:
        """The noise levels the model is for, the noisiest first; a classifier has none."""
        if self.sigma is not None:
            return (NoiseLevel(alpha=self.alpha, sigma=self.sigma),)
        return tuple(
            NoiseLevel(alpha=a, sigma=s) for a, s in zip(self.alphas or repeat(1.0), self.sigmas, strict=False)
        )

    @property
    def inputs(self) -> int:
        """Numbers (or channels) that the network takes: a head sees the denoised image beside the noisy one."""
        return self.shape[0] * (2 if self.param in HEADS else 1)

    @property
    def outputs(self) -> int:
        """Numbers (or channels) that the network puts out."""
        if self.param == CLASSES:
            return len(self.classes)
        return self.shape[0] * (2 if self.param in (MEAN_STD, COVARIANCE) else 1)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: object) -> ModelConfig:
        """Checked: every key known, none missing."""
        known = [f.name for f in dataclasses.fields(cls)]
        values = {key: value for key, value in content.items() if key not in ("mmdgs_format", "mmdgs_version")}
        if content.get("mmdgs_format") != FORMAT:
            raise UsageError(f"{where} is no model of mmdgs: it has no mmdgs_format {FORMAT}")
        for key in values:
            if key not in known:
                raise UsageError(f"{where} has an unknown key {key!r}{nearest(key, known)}")
        missing = {"network", "param", "shape"} - values.keys()
        if missing:
            raise UsageError(f"{where} lacks {', '.join(sorted(missing))}")
        for key, value in values.items():
            kinds = KINDS[key]
            if not isinstance(value, kinds) or isinstance(value, bool):
                names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
                raise UsageError(f"{where}: {key} must be {names}, got {shown(value)}")
        try:
            return cls(**values)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UsageError(f"{where}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        return {"mmdgs_format": FORMAT, "mmdgs_version": __version__, **dataclasses.asdict(self)}
