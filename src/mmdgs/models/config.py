"""What a model is: its network by name, what the output means, an example's shape, noise levels."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from mmdgs import denoisers
from mmdgs.denoisers import Denoiser, Network, energy_denoiser, takes_level
from mmdgs.errors import UsageError, nearest, shown, unknown_name
from mmdgs.moments.ocm import RatioScale
from mmdgs.noise import AnyLevel, NoiseLevel
from mmdgs.version import __version__

FORMAT = 1
ANY_SIZE = (None, None)
"""The sides of images in the shape of a model that takes any."""
MOST_LEVELS, MOST_SHAPE = 10_000, 1 << 28
"""Noise levels of a model (DDPM has 1,000), and numbers of one example (16,384 x 16,384 pixels)."""


class SquaredErrorEnergy(nn.Module):
    """The energy ||x - net(x)||^2 / 2 (the authors' code), one value a row."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.with_level = network, takes_level(network)

    def forward(self, x: Tensor, level: AnyLevel) -> Tensor:
        reconstruction = self.network(x, level) if self.with_level else self.network(x)
        return 0.5 * (x - reconstruction).flatten(1).square().sum(1)


DENOISERS: dict[str, Callable[[Network], Denoiser]] = {
    "energy": energy_denoiser,
    "energy-squared": lambda network: energy_denoiser(SquaredErrorEnergy(network)),
    "score": denoisers.score_denoiser,
    "noise": denoisers.noise_denoiser,
    "clean": denoisers.clean_denoiser,
    "velocity": denoisers.velocity_denoiser,
    "edm": denoisers.edm_denoiser,
}
"""What a network's output can mean, where it gives E[x | x_t]."""

MEAN_STD, CLASSES = "mean-std", "classes"
HEADS = VARIANCE_RATIO, COVARIANCE = "variance-ratio", "covariance"
PARAMS = (*DENOISERS, MEAN_STD, CLASSES, *HEADS)
"""All a network's output can mean; the last four: mean and log standard deviation of p(x | x_t),
class logits, and the variances or the covariance of p(x | x_t) under another network's denoiser
(moments/ocm.py, moments/heads.py)."""


def check_param(param: str) -> None:
    if param not in PARAMS:
        raise unknown_name("parametrisation", param, PARAMS)


def check_level(alpha: float, sigma: float) -> NoiseLevel:
    """The level, or UsageError where there cannot be one."""
    try:
        return NoiseLevel(alpha=alpha, sigma=sigma)
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_levels(sigmas: Sequence[float], alphas: Sequence[float]) -> tuple[NoiseLevel, ...]:
    """The levels (alphas: none where all are 1); UsageError if lists differ or are not in order."""
    if alphas and len(alphas) != len(sigmas):
        counts = f"{len(alphas)} and {len(sigmas)}"
        raise UsageError(f"need as many alphas as sigmas, or none, got {counts}")
    pairs = zip(alphas or [1.0] * len(sigmas), sigmas, strict=True)
    levels = tuple(check_level(alpha, sigma) for alpha, sigma in pairs)
    for i, (noisier, cleaner) in enumerate(pairwise(level.ratio for level in levels)):
        if noisier <= cleaner:
            raise UsageError(
                f"levels must go from the noisiest to the cleanest, and {i + 1} (sigma / alpha "
                f"{cleaner:g}) is not cleaner than {i} ({noisier:g}); turn the list around"
            )
    return levels


@dataclass(frozen=True)
class ModelConfig:
    """All that is needed to build a model: what is in config.json."""

    network: str
    param: str
    shape: tuple[Any, ...]  # of an example; (3, None, None): images of any size
    options: dict[str, Any] = field(default_factory=dict)
    sigma: float | None = None
    alpha: float = 1.0
    sigmas: tuple[float, ...] = ()  # in place of sigma: many levels, the noisiest first
    alphas: tuple[float, ...] = ()  # of these; none: 1
    interval: tuple[float, float] = (0.0, 1.0)  # where the data's values lie
    classes: tuple[str, ...] = ()
    isotropic_variance: float | None = None
    inflation: dict[str, float] = field(default_factory=dict)  # of fresh noise, by estimator
    trained_on: str = ""  # a set (its part for training), or a set and a part: celeba:test
    head: dict[str, Any] = field(default_factory=dict)  # its denoiser, the scale of its numbers
    trained_images: int | None = None  # seen in training, over all runs; none: not known
    runs: tuple[dict[str, Any], ...] = ()  # of training: command, steps, images, start

    def __post_init__(self) -> None:
        check_param(self.param)
        for name in ("shape", "classes", "runs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("sigmas", "alphas", "interval"):
            object.__setattr__(self, name, _finite(name, getattr(self, name)))
        shape = shown(self.shape)
        fixed = self.shape[:1] if self.shape[1:] == ANY_SIZE else self.shape
        if not fixed or any(type(n) is not int or n < 1 for n in fixed):
            some = "[1, 28, 28], or [3, null, null] of images of any size"
            raise UsageError(f"shape must be that of an example, {some}, got {shape}")
        if math.prod(fixed) > MOST_SHAPE:
            raise UsageError(f"shape {shape} has more than {MOST_SHAPE:,} numbers an example")
        if self.param == CLASSES and not self.classes:
            raise UsageError("a classifier needs the names of its classes, and its data labels")
        if self.param != CLASSES and (self.sigma is None) == (not self.sigmas):
            raise UsageError(
                f"a model with parametrisation {self.param!r} needs sigma, the noise level it is "
                "for, or many sigmas (in a recipe: levels)"
            )
        if self.sigma is not None:
            check_level(self.alpha, self.sigma)
        check_levels(self.sigmas, self.alphas)
        if (self.param in HEADS) != bool(self.head):
            got = f"{shown(self.head)} and {self.param!r}"
            raise UsageError(
                f"head goes with the parametrisations {' and '.join(HEADS)}, got {got}"
            )
        if self.head:
            self._check_head()
        if any(not isinstance(run, dict) for run in self.runs):
            raise UsageError(f"runs must be a list of objects, got {shown(list(self.runs))}")
        if len(self.interval) != 2 or not self.interval[0] < self.interval[1]:
            interval = list(self.interval)
            raise UsageError(f"interval must be two numbers, the smaller first, got {interval}")
        variance = self.isotropic_variance
        if variance is not None and not 0 < variance < math.inf:
            raise UsageError(f"isotropic_variance must be positive and finite, got {variance}")
        factors = self.inflation.values()
        if not all(type(n) in (int, float) and 0 < n < math.inf for n in factors):
            raise UsageError(
                'inflation has a positive factor by estimator, such as {"spectral": 1.003}, got '
                f"{shown(self.inflation)}"
            )

    def _check_head(self) -> None:
        scale = "scale" if self.param == VARIANCE_RATIO else "data_std"
        if self.head.keys() != {"denoiser", scale} or not isinstance(self.head["denoiser"], str):
            raise UsageError(
                f"head must hold its denoiser's digest and its {scale}, got {sorted(self.head)}"
            )
        if self.param == VARIANCE_RATIO:
            _ = self.ratio_scale  # checked as it is made
        elif not isinstance(std := self.head[scale], int | float) or not 0 < std < math.inf:
            raise UsageError(f"the head's data_std must be positive, finite, got {shown(std)}")

    @property
    def ratio_scale(self) -> RatioScale:
        """The scale of a head's ratios."""
        return RatioScale(**self.head["scale"])

    @property
    def levels(self) -> tuple[NoiseLevel, ...]:
        """The noise levels the model is for, the noisiest first; a classifier has none."""
        if self.sigma is not None:
            return (NoiseLevel(alpha=self.alpha, sigma=self.sigma),)
        return check_levels(self.sigmas, self.alphas)

    @property
    def channels(self) -> int:
        """Numbers of a point, or colours of an image."""
        channels = self.shape[0]
        assert channels is not None
        return channels

    @property
    def inputs(self) -> int:
        """Numbers or channels of the network's input: a head sees the denoised image too."""
        return self.channels * (2 if self.param in HEADS else 1)

    @property
    def outputs(self) -> int:
        """Numbers or channels of the network's output."""
        if self.param == CLASSES:
            return len(self.classes)
        return self.channels * (2 if self.param in (MEAN_STD, COVARIANCE) else 1)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: object) -> ModelConfig:
        """Checked: every key known, none missing."""
        if content.get("mmdgs_format") != FORMAT:
            raise UsageError(f"{where} is no model of mmdgs: it has no mmdgs_format {FORMAT}")
        known = {name: _json_types(hint) for name, hint in typing.get_type_hints(cls).items()}
        values = {key: value for key, value in content.items() if not key.startswith("mmdgs_")}
        for key, value in values.items():
            if key not in known:
                raise UsageError(f"{where} has an unknown key {key!r}{nearest(key, known)}")
            if not isinstance(value, known[key]) or isinstance(value, bool):
                names = " or ".join(kind.__name__ for kind in known[key])
                raise UsageError(f"{where}: {key} must be {names}, got {shown(value)}")
        missing = {"network", "param", "shape"} - values.keys()
        if missing:
            raise UsageError(f"{where} lacks {', '.join(sorted(missing))}")
        try:
            return cls(**values)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UsageError(f"{where}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        return {"mmdgs_format": FORMAT, "mmdgs_version": __version__, **dataclasses.asdict(self)}


def _json_types(hint: Any) -> tuple[type, ...]:
    """The types that a field of a configuration may have in JSON."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    written: dict[Any, tuple[type, ...]] = {tuple: (list,), float: (float, int)}
    kinds = [typing.get_origin(option) or option for option in options]
    return tuple(json for kind in kinds for json in written.get(kind, (kind,)))


def _finite(name: str, values: Sequence[Any]) -> tuple[float, ...]:
    """A list of finite numbers, checked."""
    if len(values) > MOST_LEVELS:
        raise UsageError(f"{name} has {len(values):,} entries, more than {MOST_LEVELS:,}")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) < math.inf:
            raise UsageError(f"{name} must be finite numbers, got {shown(value)}")
    return tuple(map(float, values))


def shape_in_words(shape: Sequence[int | None]) -> str:
    """3x32x32, or 3 x any size."""
    if len(shape) > 2 and set(shape[1:]) == {None}:
        return f"{shape[0]} x any size"
    return "x".join(map(str, shape))
