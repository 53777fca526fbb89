"""Covariances of p(x | x_t) by name: what can be set of each, with its default, help and bounds.

A covariance is one frozen dataclass: the argument of `Model.posterior`, a group of options of the
command line, and an entry in records. Importing them needs no torch.

    Diagonal(probes=3)              by probes that suit the data
    RademacherDiagonal, LatticeDiagonal     by the paper's probes, and by those for images
    Ocm(head), Modulated(head)      by a head that was trained for the model
    Isotropic, Spectral             fitted to data: one variance a level, or also a frequency
    LowRank(products=2)             Jacobian products with Spectral for the rest
    Krylov(steps=20), Full          the whole covariance, by products or as a matrix
    Learned                         that of a model with mean and std heads
    Small, Large                    DDPM's, for ancestral sampling only

A floor is relative to (sigma / alpha)^2 (the paper's results are with 1e-6); None takes it from the
network's own error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar

from mmdgs.errors import UsageError, unknown_name
from mmdgs.options import option, option_name


@dataclass(frozen=True)
class Covariance:
    """A kind of covariance by its `name`; a `fitted` one is estimated from data."""

    name: ClassVar[str] = ""
    fitted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{option_name(field)} must be a finite number, got {value}")

    def __str__(self) -> str:
        return self.name

    def to_json(self) -> dict[str, Any]:
        """The name, and every setting that is not None, for records."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name} | {
            name: value if isinstance(value, bool | int | float) else str(value)
            for name, value in values.items()
            if value is not None
        }


@dataclass(frozen=True)
class Small(Covariance):
    name = "small"


@dataclass(frozen=True)
class Large(Covariance):
    name = "large"


@dataclass(frozen=True)
class Estimated(Covariance):
    """A covariance that `Model.posterior` has an estimator of.

    A calibration that is kept with the model (`mmdgs.calibrate`) is used, unless `calibrated` is
    False; where it is True there must be one.
    """

    _: KW_ONLY
    calibrated: bool | None = option(
        None,
        "Require the calibration that is kept with the model for this covariance, or leave it out.",
        flag="--calibrated/--uncalibrated",
        show_default="where one is kept",
    )


@dataclass(frozen=True)
class Floored(Estimated):
    """A covariance with a floor, in place of which a calibration has its own."""

    _: KW_ONLY
    floor: float | None = option(
        None,
        "Smallest variance, in sigma^2 (the paper: 1e-6).",
        min=0,
        show_default="from the network's own error",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor is not None and self.calibrated:
            raise UsageError(
                f"a calibration has its own floor: leave out the floor {self.floor:g} or calibrated"
            )


@dataclass(frozen=True)
class OfHead(Estimated):
    """A covariance by a head: a folder, on the hub, or a model; None: the one beside the model."""

    head: Any = option(
        None,
        "Of --covariance ocm or modulated: the folder of a head that train made for this model.",
        kind=str,
    )


@dataclass(frozen=True)
class Symmetrised(Floored):
    """A covariance by products with the Jacobian, symmetrised unless it is taken as `symmetric`."""

    _: KW_ONLY
    symmetric: bool | None = option(
        None,
        "Take the network's Jacobian as symmetric, for half the products (low-rank, krylov).",
        flag="--symmetric/--symmetrised",
        show_default="auto",
    )


@dataclass(frozen=True)
class Diagonal(Floored):
    name = "diagonal"
    probes: int = option(3, "Jacobian products for the diagonal.", min=1)


@dataclass(frozen=True)
class RademacherDiagonal(Diagonal):
    name = "rademacher"


@dataclass(frozen=True)
class LatticeDiagonal(Diagonal):
    name = "lattice"


@dataclass(frozen=True)
class Ocm(OfHead, Floored):
    name = "ocm"


@dataclass(frozen=True)
class Isotropic(Estimated):
    name, fitted = "isotropic", True


@dataclass(frozen=True)
class Spectral(Estimated):
    name, fitted = "spectral", True


@dataclass(frozen=True)
class Modulated(OfHead):
    name = "modulated"


@dataclass(frozen=True)
class LowRank(Symmetrised):
    name, fitted = "low-rank", True
    products: int = option(2, "Jacobian products of --covariance low-rank.", min=1)
    below: float | None = option(
        None,
        "Of low-rank: products only below this sigma / alpha.",
        name="products_below",
        min=0,
        show_default="at all levels",
    )


@dataclass(frozen=True)
class Krylov(Symmetrised):
    name = "krylov"
    steps: int = option(20, "Steps of a Krylov draw.", name="krylov_steps", min=1)


@dataclass(frozen=True)
class Full(Floored):
    name = "full"
    most_products: int = option(10_000, "Jacobian products that a full covariance may cost.", min=1)


@dataclass(frozen=True)
class Learned(Estimated):
    name = "learned"


COVARIANCES: dict[str, type[Covariance]] = {
    kind.name: kind
    for kind in (
        Diagonal, RademacherDiagonal, LatticeDiagonal, Ocm, Isotropic, Spectral, Modulated,
        LowRank, Krylov, Full, Learned, Small, Large,
    )
}  # fmt: skip
"""By the names they have on the command line."""
FITTED = [name for name, kind in COVARIANCES.items() if kind.fitted]
FIXED = (Small.name, Large.name)
OPTIONS = {option_name(field) for kind in COVARIANCES.values() for field in fields(kind)}


def named(name: str, options: Mapping[str, Any] | None = None) -> Covariance:
    """A covariance by name, with options by the names they have on the command line."""
    if name not in COVARIANCES:
        raise unknown_name("covariance", name, COVARIANCES)
    return with_options(COVARIANCES[name](), options or {})


def with_options(covariance: Covariance, options: Mapping[str, Any]) -> Covariance:
    """A covariance with other settings, by the names they have on the command line."""
    known = {option_name(field): field.name for field in fields(covariance)}
    for key in options:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it has no settings"
            said = f"the covariance {covariance.name!r} takes no {key}; {takes}"
            raise UsageError(said.replace("_", "-"))
    return replace(covariance, **{known[key]: value for key, value in options.items()})


def as_covariance(covariance: Covariance | str) -> Covariance:
    """A covariance as it is; by its name, with its defaults."""
    return named(covariance) if isinstance(covariance, str) else covariance
