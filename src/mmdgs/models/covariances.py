"""Covariances by name: the names of the command line and of `Model.posterior`, each with its estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdgs.errors import UsageError, unknown_name
from mmdgs.models.config import COVARIANCE, MEAN_STD, VARIANCE_RATIO
from mmdgs.models.fits import isotropic_moments, spectral_moments
from mmdgs.moments import (
    DiagonalMoments,
    FullMoments,
    KrylovMoments,
    LowRankMoments,
    ModulatedMoments,
    Moments,
    OcmMoments,
)
from mmdgs.moments.full import MOST_PRODUCTS
from mmdgs.moments.probes import Lattice, Rademacher

if TYPE_CHECKING:
    from mmdgs.models.model import Model


def _head(model: Model, head: Any, covariance: str, kind: str) -> Any:
    from mmdgs.models.heads import LOSS, load_head  # heads are loaded as models are

    head = head_beside(model, kind) if head is None else head
    if head is None:
        raise UsageError(
            f"the covariance {covariance!r} needs its head: say --head FOLDER, which `mmdgs train --loss {LOSS[kind]}` "
            "made for the model"
        )
    return load_head(head, model, kind=kind)


def head_beside(model: Model, kind: str) -> Path | None:
    """The head of a kind that is kept in a model's own folder."""
    return model.beside(BESIDE[kind])


BESIDE = {VARIANCE_RATIO: "ocm-head", COVARIANCE: "covariance-head"}
"""Folders inside a model's folder where its heads may be."""


PROBED = {"probes": 3, "floor": None}

COVARIANCES: dict[str, tuple[dict[str, Any], Callable[[Model, Mapping[str, Any]], Moments]]] = {
    "diagonal": (PROBED, lambda model, given: DiagonalMoments(model, given["probes"], given["floor"])),
    "rademacher": (PROBED, lambda model, given: DiagonalMoments(model, given["probes"], given["floor"], Rademacher())),
    "lattice": (PROBED, lambda model, given: DiagonalMoments(model, given["probes"], given["floor"], Lattice())),
    "ocm": (
        {"head": None, "floor": None},
        lambda model, given: OcmMoments(model, _head(model, given["head"], "ocm", VARIANCE_RATIO), given["floor"]),
    ),
    "modulated": (
        {"head": None},
        lambda model, given: ModulatedMoments(model, _head(model, given["head"], "modulated", COVARIANCE)),
    ),
    "isotropic": ({}, lambda model, given: isotropic_moments(model, given.get("levels"), given.get("data"))),
    "spectral": ({}, lambda model, given: spectral_moments(model, given.get("data"))),
    "krylov": (
        {"krylov_steps": 20, "floor": None, "symmetric": None},
        lambda model, given: KrylovMoments(model, given["krylov_steps"], given["floor"], symmetric=given["symmetric"]),
    ),
    "low-rank": (
        {"products": 2, "products_below": None, "floor": None, "symmetric": None},
        lambda model, given: LowRankMoments(
            model,
            spectral_moments(model, given.get("data")),
            given["products"],
            given["floor"],
            given["symmetric"],
            below=given["products_below"],
        ),
    ),
    "full": (
        {"most_products": MOST_PRODUCTS, "floor": None},
        lambda model, given: FullMoments(model, given["floor"], given["most_products"]),
    ),
    "learned": ({}, lambda model, given: model.learned()),
}
"""What can be set of each covariance, with its default, and its estimator.

"diagonal" takes the probes that suit the data, "rademacher" the paper's and "lattice" those for images. A floor is
relative to (sigma / alpha)^2 (the paper's results are with 1e-6); None takes it from the network's own error."""

FITTED: dict[str, tuple[str, ...]] = {"isotropic": ("data", "levels"), "spectral": ("data",), "low-rank": ("data",)}
"""Those that are estimated from data (one variance for all pixels, or one for each frequency; the rest of "low-rank" is
"spectral"), and what else they take."""


def own_covariance(model: Model) -> str:
    """The covariance of a model where none is named."""
    return "learned" if model.param == MEAN_STD else "diagonal"


def make_moments(model: Model, covariance: str | None, given: Mapping[str, Any]) -> Moments:
    """The estimator of a covariance by name, with the settings that are given in place of its defaults."""
    name = own_covariance(model) if covariance is None else covariance
    if name not in COVARIANCES:
        raise unknown_name("covariance", name, COVARIANCES)
    defaults, make = COVARIANCES[name]
    known = (*defaults, *FITTED.get(name, ()))
    for key in given:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it has no settings"
            raise UsageError(f"the covariance {name!r} takes no {key}; {takes}")
    return make(model, {**defaults, **given})
