"""A Gaussian given measurements: N(m, C) and y = A x + tau e leave x Gaussian, with

    S     = A C A' + diag(tau^2)
    mean    m + C A' S^-1 (y - A m)
    cov     C - C A' S^-1 A C

A draw perturbs and solves: x0 ~ N(m, C) and y0 = A x0 + tau e give x0 + C A' S^-1 (y - y0), which needs products with
C, a root of C, A and its adjoint, and one system in the space of y (solvers.py). None is iterated (iterations.py) where

    C is diagonal and A a mask, or C is diagonal in cosines and so is A            the posterior is of C's own kind
    C is diagonal and no two measurements share a pixel                            S is diagonal
    C is diagonal in cosines, and A gives each cosine of x one of y                so is S (`cosine_squares`)
    C is a matrix, or the same in all rows, and y is not too large; y is small     Cholesky
    C is one spectrum, and A measures some pixels of all channels                  Cholesky, channel by channel
    C is known along a few directions, and its rest is one of these                Woodbury's formula
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.linalg.iterations import ConjugateGradients, LanczosSolver
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.lowrank import LowRank
from mmdgs.linalg.modulated import Modulated
from mmdgs.linalg.operators import MOST_DENSE, Covariance, Dense, Diagonal, matmul, require_room_for_dense
from mmdgs.linalg.solvers import (
    MOST_EACH,
    MOST_SHARED,
    CosineSolver,
    DiagonalSolver,
    LowRankSolver,
    Solver,
    cholesky_of_channels,
    cholesky_of_dense,
    cholesky_of_rows,
    cholesky_of_shared,
    gain_of,
    measured_places,
)
from mmdgs.linalg.spectral import Spectral, from_cosines, to_cosines
from mmdgs.operators import Mask, Operator


@dataclass(frozen=True)
class Given(Covariance):
    """a (C - C A' S^-1 A C) + b I, known by its products. `like` (B, ...) gives shape, dtype and device.

    Its root R is wide: it takes the normals of x0, of y0 and, where b > 0, of b I. `mean_info` is what is known of the
    system that was solved for the mean.
    """

    prior: Covariance
    operator: Operator
    variances: Tensor
    solver: Solver
    like: Tensor
    mean_info: Mapping[str, Tensor]
    scale: float = 1.0
    shift: float = 0.0

    @property
    def dim(self) -> int:
        return math.prod(self.like.shape[1:])

    def apply(self, v: Tensor) -> Tensor:
        image = self.prior.apply(v)
        return self.scale * (image - self.solver.solve(self.operator(image))[1]) + self.shift * v

    def normals(self, event_shape: torch.Size) -> torch.Size:
        return torch.Size([sum(self._parts())])

    def _parts(self) -> tuple[int, int, int]:
        return self.dim, math.prod(self.operator.out_shape), self.dim if self.shift > 0 else 0

    def root(self, z: Tensor) -> Tensor:
        return self.root_with_info(z)[0]

    def root_with_info(self, z: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """R z for normals z (B, n); info of C's root, and over both systems the iterations and the larger residual."""
        if z.ndim != 2 or z.shape[1] != sum(self._parts()):
            raise ValueError(
                f"a draw takes {sum(self._parts())} normals a row, `normals` of them, got {tuple(z.shape)}"
            )
        rows = len(z)
        first, second, third = z.split(self._parts(), 1)
        x, info = self.prior.root_with_info(first.reshape(rows, *self.like.shape[1:]))
        e = self.operator.known(second.reshape(rows, *self.operator.out_shape))
        _, gain, found = self.solver.solve(self.operator(x) + self.variances.sqrt() * e)
        x = math.sqrt(self.scale) * (x - gain)
        if self.shift > 0:
            x = x + math.sqrt(self.shift) * third.reshape(x.shape)
        return x, {**info, **_both(self.mean_info, found)}

    def variance_along(self, u: Tensor) -> Tensor:
        found = []
        for direction in u:
            image = self.prior.apply(direction)
            b = self.operator(image)
            inner = (direction * image).flatten(1).sum(1) - (b * self.solver.solve(b)[0]).flatten(1).sum(1)
            inner = inner.clamp(min=0)  # below it by rounding, or where a Jacobian is indefinite
            found.append(self.scale * inner + self.shift * direction.square().flatten(1).sum(1))
        return torch.stack(found)

    def diagonal(self) -> Tensor:
        """The variances: where one S serves all rows by a root of its inverse, else by the matrix."""
        root = self.solver.inverse_root()
        if root is not None:
            prior = self.solver.prior  # type: ignore[attr-defined]  # one row, as S
            taken = prior.apply(self.operator.adjoint(root)).square().sum(0)
            return self.scale * (self.prior.diagonal() - taken) + self.shift
        return self.dense().diagonal(dim1=1, dim2=2).reshape(self.like.shape)

    def dense(self) -> Tensor:
        rows, d = len(self.like), self.dim
        if d > MOST_DENSE:
            raise UsageError(
                f"the variances or the density of {d} numbers given measurements need a matrix of {d} x {d}, and the "
                f"limit is {MOST_DENSE}: use draws, or variance_along for the directions that matter"
            )
        require_room_for_dense(rows, d, self.like.dtype, self.like.device)
        matrix = self.prior.dense()
        across, _ = gain_of(matrix, self.operator)
        found = cholesky_of_dense(self.prior, self.operator, self.variances, self.like)
        half = torch.linalg.solve_triangular(found.factor, across[..., found.places].mT, upper=False)
        eye = torch.eye(d, dtype=self.like.dtype, device=self.like.device)
        return self.scale * (matrix - matmul(half.mT, half)) + self.shift * eye

    def spectrum(self) -> tuple[Tensor, Tensor]:
        return self._decomposed().spectrum()

    def coordinates(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self._decomposed().coordinates(r)

    def _decomposed(self) -> Dense:
        return Dense.from_matrix(self.dense(), self.like.shape[1:])

    def mahalanobis(self, r: Tensor) -> Tensor:
        """r' C^-1 r + |A r / tau|^2, where nothing was added to the covariance."""
        if self.shift > 0:
            return self._decomposed().mahalanobis(r)
        seen = (self.operator(r).square() / self.variances).flatten(1).sum(1)
        return (self.prior.mahalanobis(r) + seen) / self.scale

    def logdet(self) -> Tensor:
        """log det C + log det tau^2 - log det S, where nothing was added to the covariance and S is not iterated."""
        inner = self.solver.logdet()
        if self.shift > 0 or inner is None:
            return self._decomposed().logdet()
        return self.prior.logdet() - inner + self.dim * math.log(self.scale)

    def affine(self, scale: float, shift: float) -> Given:
        return replace(self, scale=scale * self.scale, shift=scale * self.shift + shift)


def _both(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What two systems of the same kind took: iterations add up, and the larger residual stays."""
    if not one:
        return dict(other)
    return {
        "cg_iterations": one["cg_iterations"] + other["cg_iterations"],
        "cg_residual": torch.maximum(one["cg_residual"], other["cg_residual"]),
    }


def conditioned(
    mean: Tensor, cov: Covariance, y: Tensor, operator: Operator, variances: Tensor
) -> tuple[Tensor, Covariance]:
    """Mean and covariance of N(mean, cov) given y = A x + e, e ~ N(0, diag(variances)).

    y is (B, *out_shape) or (1, *out_shape), and the variances have as many dimensions, of size 1 where they are equal.
    """
    cov = cov.as_dense() if isinstance(cov, Krylov) and cov.exact else cov
    own = _of_own_kind(mean, cov, y, operator, variances)
    if own is not None:
        return own
    b = operator.known(y - operator(mean))
    if isinstance(cov, LowRank):
        cov, solver = _along_measurements(mean, cov, b, operator, variances)
    else:
        solver = _solver(mean, cov, operator, variances)
    _, gain, info = solver.solve(b)
    return mean + gain, Given(cov, operator, variances, solver, mean, info)


def _of_own_kind(
    mean: Tensor, cov: Covariance, y: Tensor, operator: Operator, variances: Tensor
) -> tuple[Tensor, Covariance] | None:
    """The posterior where C and A are diagonal in one basis: each coefficient is conditioned by itself."""
    if isinstance(cov, Diagonal) and isinstance(operator, Mask):
        v, keep = cov.variances, operator.keep.at(mean)
        total = keep * v + variances
        return mean + keep * v / total * (y - mean), Diagonal(v * variances / total)
    gains = operator.cosine_gains(mean)
    if gains is None or variances.numel() != len(variances):  # noise that differs from pixel to pixel
        return None
    if isinstance(cov, Spectral) or _isotropic(cov):
        v = cov.variances  # type: ignore[attr-defined]
        total = gains.square() * v + variances
        change = from_cosines(gains * v / total * to_cosines(y - operator(mean)))
        return mean + change, Spectral(v * variances / total)
    return None


def _isotropic(cov: Covariance) -> bool:
    """Whether each row has one variance, by the way its tensor is laid out."""
    if not isinstance(cov, Diagonal):
        return False
    sizes = zip(cov.variances.shape[1:], cov.variances.stride()[1:], strict=True)
    return all(size == 1 or stride == 0 for size, stride in sizes)


def _shared(cov: Covariance, variances: Tensor) -> Covariance | None:
    """The covariance as one row, which fits any number of rows, where all of them are the same, and the noise's too."""
    if not isinstance(cov, Spectral | Diagonal) or len(variances) != 1:
        return None
    v = cov.variances
    if len(v) != 1 and v.stride(0) != 0:
        return None
    return type(cov)(v[:1])


def _along_measurements(
    mean: Tensor, cov: LowRank, b: Tensor, operator: Operator, variances: Tensor
) -> tuple[LowRank, Solver]:
    """The covariance with its products spent where y says something, and the solver of its system.

    The first direction is A' S^-1 b with the rest's S, along which the mean would move; each next one is that of the
    covariance so far. With d products, or once a direction is not new, the mean is that of C itself.
    """
    inner = _solver(mean, cov.base, operator, variances)
    solver, found = inner, cov.bare
    for _ in range(cov.count):
        found = found.extended(operator.adjoint(solver.solve(b)[0]))
        if isinstance(inner, ConjugateGradients):
            solver = replace(inner, prior=found)
        else:
            solver = LowRankSolver(found, operator, inner)
    return found, solver


def _solver(mean: Tensor, cov: Covariance, operator: Operator, variances: Tensor) -> Solver:
    if isinstance(cov, Diagonal):
        squares = operator.squares(cov.variances)
        if squares is not None:
            return DiagonalSolver(cov, operator, variances, squares + variances)
    if isinstance(cov, Dense) and math.prod(operator.out_shape) <= 2 * math.prod(mean.shape[1:]):
        return cholesky_of_dense(cov, operator, variances, mean)
    shared = _shared(cov, variances)
    if variances.numel() == len(variances) and (isinstance(cov, Spectral) or _isotropic(cov)):
        one = cov if shared is None else shared
        values = operator.cosine_squares(one.variances)  # type: ignore[attr-defined]
        if values is not None:
            return CosineSolver(one, operator, variances, values + variances)
    if isinstance(cov, Diagonal | Spectral):
        places = measured_places(operator, mean)
        if isinstance(shared, Spectral) and variances.numel() == 1 and operator.channelwise and mean.shape[1] > 1:
            own = places[: len(places) // mean.shape[1]]
            if len(own) <= MOST_SHARED and len(own) < math.prod(mean.shape[2:]):
                return cholesky_of_channels(shared, operator, variances, own, mean)
        if shared is not None and len(places) <= MOST_SHARED:
            return cholesky_of_shared(shared, operator, variances, places, mean)
        if len(places) <= MOST_EACH:
            return cholesky_of_rows(cov, operator, variances, places, mean)
    if isinstance(cov, Krylov):
        return LanczosSolver(cov, operator, variances)
    return ConjugateGradients(cov, operator, variances, _preconditioner(cov, operator, variances, mean))


def _preconditioner(
    cov: Covariance, operator: Operator, variances: Tensor, like: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """S^-1 as if A were diagonal in cosines, with the power that it has there; none where it has no such power.

    With the spectrum of cifar10 at sigma 3 and noise 0.02 a box takes 26 iterations in place of 456, 80% missing pixels
    94 in place of 222, and a motion blur 112 in place of 444.
    """
    power = operator.cosine_power(like)
    cov = cov.average() if isinstance(cov, Modulated) else cov
    if power is None or not (isinstance(cov, Spectral) or _isotropic(cov)):
        return None
    noise = variances.mean(tuple(range(1, variances.ndim)), keepdim=True)
    inverse = 1 / (power * cov.variances + noise)  # type: ignore[attr-defined]
    return lambda residual: operator.known(from_cosines(inverse * to_cosines(residual)))
