"""How likely measurements are under a Gaussian, and what is left of it once x is seen with noise.

    log N(y; A m, S),  S = A C A' + diag(tau^2)        the evidence of y = A x + tau e
    C - C (C + w I)^-1 C = w C (C + w I)^-1            the covariance given z = x + sqrt(w) e

Both are asked of a covariance whose S has a factor: diagonal in pixels or cosines, a matrix, or one
of these with a few directions beside it. Where S is iterated, log det S is not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.linalg.given import along_measurements, solver_of
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.lowrank import LowRank
from mmdgs.linalg.operators import Covariance, Dense, Diagonal, einsum, mapped
from mmdgs.linalg.solvers import LowRankSolver
from mmdgs.linalg.spectral import Spectral
from mmdgs.operators import Operator

MOST_FACTORED = 4096
"""Measurements (of a channel) up to which S is factored where iterations would solve it sooner."""


@dataclass(frozen=True)
class Updated:
    """base + F diag(c) F': F (n, B, ...), c (B, n)."""

    base: Diagonal | Spectral
    factor: tuple[Tensor, Tensor]

    def apply(self, v: Tensor) -> Tensor:
        f, c = self.factor
        along = einsum("nb...,b...->bn", f, v) * c
        return self.base.apply(v) + einsum("nb...,bn->b...", f, along)


Factored = Diagonal | Spectral | Dense | LowRank | Updated
"""Covariances whose evidence has a closed form."""


def factored(
    mean: Tensor, cov: Covariance, y: Tensor, operator: Operator, variances: Tensor
) -> Factored:
    """The covariance, with the products it may spend made along the measurements."""
    if isinstance(cov, Krylov) and cov.exact:
        return cov.as_dense()
    if isinstance(cov, LowRank):
        b = operator.known(y - operator(mean))
        cov = replace(along_measurements(mean, cov, b, operator, variances)[0], count=0)
    if not isinstance(cov, Factored):
        raise UsageError(
            f"the evidence of measurements is not known with a {type(cov).__name__} covariance: "
            "use spectral, isotropic, diagonal, low-rank or full"
        )
    return cov


def log_evidence(
    mean: Tensor, cov: Factored, y: Tensor, operator: Operator, variances: Tensor
) -> Tensor:
    """log N(y; A m, A C A' + diag(tau^2)) over the measurements that say something, (B,)."""
    base = cov.base if isinstance(cov, LowRank | Updated) else cov
    solver = solver_of(mean, base, operator, variances, MOST_FACTORED)
    if isinstance(cov, LowRank | Updated):
        solver = LowRankSolver(cov, operator, solver)  # type: ignore[arg-type]
    logdet = solver.logdet()
    if logdet is None:
        raise UsageError(
            f"the evidence of {math.prod(operator.out_shape)} measurements by {operator!r} is not "
            f"known with a {type(base).__name__} covariance: a system without structure is "
            f"factored up to {MOST_FACTORED:,} measurements (of a channel), fewer of large images. "
            "Take another operator, or one particle"
        )
    b = operator.known(y - operator(mean))
    distance = (b * solver.solve(b)[0]).flatten(1).double().sum(1)
    known = operator.known(torch.ones_like(b[:1]))
    noise = (known * (2 * math.pi * variances).log()).flatten(1).double().sum(1)
    return -0.5 * (distance + logdet.double() + noise)


def seen(mean: Tensor, cov: Factored, z: Tensor, variance: float) -> tuple[Tensor, Factored]:
    """Mean and covariance of N(mean, cov) given z = x + e, e ~ N(0, variance I)."""
    if isinstance(cov, LowRank):
        # w C (C + w I)^-1 = w I - w^2 (C + w I)^-1, and the inverse is the base's with a few
        # directions taken off.
        factor, change = cov.affine(1.0, variance).inverse_factor
        left: Any = Updated(_shrunk(cov.base, variance), (variance * factor, -change))
    else:
        left = _shrunk(cov, variance)
    # C (C + w I)^-1 r = C_left r / w
    return mean + left.apply(z - mean) / variance, left


def _shrunk(cov: Any, variance: float) -> Any:
    """w C (C + w I)^-1, of the same kind."""

    def shrunk(values: Tensor) -> Tensor:
        return variance * values / (values + variance)

    if isinstance(cov, Dense):
        return replace(cov, values=shrunk(cov.values))
    return type(cov)(mapped(cov.variances, shrunk))


def rows_of(cov: Any, index: Tensor) -> Any:
    """The covariances of some rows, in this order."""
    if isinstance(cov, Dense):
        return replace(cov, values=cov.values[index], vectors=cov.vectors[index])
    if isinstance(cov, LowRank):
        v, w = (vectors[:, index] for vectors in cov.pairs())
        rest, like = rows_of(cov.rest, index), cov.like[index]
        return replace(cov, rest=rest, like=like, pairs=lambda: (v, w))
    x = cov.variances
    shared = len(x) == 1 or x.stride(0) == 0
    return type(cov)(x[:1].expand(len(index), *x.shape[1:]) if shared else x[index])
