"""A Gaussian given measurements: N(m, C) and y = A x + tau e leave x Gaussian, with

    S     = A C A' + diag(tau^2)
    mean    m + C A' S^-1 (y - A m)
    cov     C - C A' S^-1 A C

A draw perturbs and solves: x0 ~ N(m, C) and y0 = A x0 + tau e give x0 + C A' S^-1 (y - y0), which
needs products with C, a root of C, A and its adjoint, and one system in the space of y
(solvers.py). None is iterated (iterations.py) where

    C is diagonal and A a mask, or both are diagonal in cosines       C's own kind of posterior
    C is diagonal and no two measurements share a pixel               S is diagonal
    C is diagonal in cosines, A gives each cosine of x one of y       so is S (`cosine_squares`)
    C is a matrix, or the same in all rows; y is not too large        Cholesky
    C is one spectrum, A measures some pixels of all channels         Cholesky, channel by channel
    C is known along a few directions, and its rest is one of these   Woodbury's formula

Measurements y = f(x) + tau e that are not linear have the tangent of f in place of A, at a mean
that Gauss-Newton steps find: from a, the next is the mean given y - f(a) + J a = J x + tau e.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from mmdgs.linalg import solvers
from mmdgs.linalg.iterations import ConjugateGradients, LanczosSolver
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.lowrank import LowRank
from mmdgs.linalg.operators import (
    Covariance,
    Dense,
    Diagonal,
    Implicit,
    matmul,
    require_room_for_dense,
)
from mmdgs.linalg.spectral import Modulated, Spectral, from_cosines, to_cosines
from mmdgs.operators import Mask, Operator
from mmdgs.operators.nonlinear import Nonlinear, Tangent


@dataclass(frozen=True)
class Given(Implicit):
    """a (C - C A' S^-1 A C) + b I for vectors `like` (B, ...), known by its products.

    Its root R is wide: it takes the normals of x0, of y0 and, where b > 0, of b I. `mean_info` is
    what is known of the system that was solved for the mean.
    """

    prior: Covariance
    operator: Operator
    variances: Tensor
    solver: solvers.Solver
    like: Tensor
    mean_info: Mapping[str, Tensor]
    scale: float = 1.0
    shift: float = 0.0

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
        """R z for normals z (B, n); info of C's root and of the systems of mean and draw.

        Over both systems iterations add up, and the larger residual stays. `like` is the mean.
        """
        if z.ndim != 2 or z.shape[1] != (count := sum(self._parts())):
            raise ValueError(
                f"a draw takes {count} normals a row (`normals`), got {tuple(z.shape)}"
            )
        first, second, third = z.split(self._parts(), 1)
        x, info = self.prior.root_with_info(first.reshape(-1, *self.like.shape[1:]))
        e = self.operator.known(second.reshape(-1, *self.operator.out_shape))
        _, gain, solved = self.solver.solve(self.operator(x) + self.variances.sqrt() * e)
        x = x - gain
        if isinstance(self.operator, Tangent):
            solved = {**solved, **self.operator.left(self.like + x, self.variances)}
        x = math.sqrt(self.scale) * x
        if self.shift > 0:
            x = x + math.sqrt(self.shift) * third.reshape(x.shape)
        together = {**self.mean_info, **solved}
        for name in self.mean_info.keys() & solved.keys():
            join = torch.add if name == "cg_iterations" else torch.maximum
            together[name] = join(self.mean_info[name], solved[name])
        return x, {**info, **together}

    def variance_along(self, u: Tensor) -> Tensor:
        variances = []
        for direction in u:
            image = self.prior.apply(direction)
            b = self.operator(image)
            taken = (b * self.solver.solve(b)[0]).flatten(1).sum(1)
            # Below zero by rounding, or where a Jacobian is indefinite.
            inner = ((direction * image).flatten(1).sum(1) - taken).clamp(min=0)
            variances.append(self.scale * inner + self.shift * direction.square().flatten(1).sum(1))
        return torch.stack(variances)

    def diagonal(self) -> Tensor:
        """By a root of S^-1 where one S serves all rows, else by the matrix."""
        root = self.solver.inverse_root()
        if root is None:
            return self.dense().diagonal(dim1=1, dim2=2).reshape(self.like.shape)
        taken = self.solver.prior.apply(self.operator.adjoint(root)).square().sum(0)
        return self.scale * (self.prior.diagonal() - taken) + self.shift

    def dense(self) -> Tensor:
        self.require_matrix()
        d, like = self.dim, self.like
        require_room_for_dense(like)
        matrix = self.prior.dense()
        across, _ = solvers.gain_of(matrix, self.operator)
        s = solvers.cholesky_of_dense(self.prior, self.operator, self.variances, like)
        half = torch.linalg.solve_triangular(s.factor, across[..., s.places].mT, upper=False)
        eye = torch.eye(d, dtype=like.dtype, device=like.device)
        return self.scale * (matrix - matmul(half.mT, half)) + self.shift * eye

    def mahalanobis(self, r: Tensor) -> Tensor:
        """r' C^-1 r + |A r / tau|^2, where nothing was added to the covariance."""
        if self.shift > 0:
            return self.decomposed.mahalanobis(r)
        seen = (self.operator(r).square() / self.variances).flatten(1).sum(1)
        return (self.prior.mahalanobis(r) + seen) / self.scale

    def logdet(self) -> Tensor:
        """log det C + log det tau^2 - log det S, where nothing was added and S is not iterated."""
        inner = self.solver.logdet()
        if self.shift > 0 or inner is None:
            return self.decomposed.logdet()
        return self.prior.logdet() - inner + self.dim * math.log(self.scale)


def conditioned(
    mean: Tensor, cov: Covariance, y: Tensor, operator: Operator, variances: Tensor
) -> tuple[Tensor, Covariance]:
    """Mean and covariance of N(mean, cov) given y = A x + e, e ~ N(0, diag(variances)).

    y is (B, *out_shape) or (1, *out_shape), and the variances have as many dimensions, of size 1
    where they are equal.
    """
    if isinstance(operator, Nonlinear):
        return _by_tangents(mean, cov, y, operator, variances)
    cov = cov.as_dense() if isinstance(cov, Krylov) and cov.exact else cov
    if isinstance(cov, Diagonal) and isinstance(operator, Mask):
        v, keep = cov.variances, operator.keep.at(mean)
        total = keep * v + variances
        return mean + keep * v / total * (y - mean), Diagonal(v * variances / total)
    gains, spectrum = operator.cosine_gains(mean), _spectrum(cov)
    if gains is not None and spectrum is not None and variances.numel() == len(variances):
        total = gains.square() * spectrum + variances
        change = from_cosines(gains * spectrum / total * to_cosines(y - operator(mean)))
        return mean + change, Spectral(spectrum * variances / total)
    b = operator.known(y - operator(mean))
    if isinstance(cov, LowRank):
        cov, solver = along_measurements(mean, cov, b, operator, variances)
    else:
        solver = solver_of(mean, cov, operator, variances)
    _, gain, info = solver.solve(b)
    return mean + gain, Given(cov, operator, variances, solver, mean, info)


def _by_tangents(
    mean: Tensor, cov: Covariance, y: Tensor, operator: Nonlinear, variances: Tensor
) -> tuple[Tensor, Covariance]:
    at = mean
    for _ in range(operator.steps):
        tangent = operator.tangent(at)
        seen = y - tangent.value + tangent(at)
        at, conditional = conditioned(mean, cov, seen, tangent, variances)
        given = cast(Given, conditional)  # a tangent has no structure by which it would be another
        cov = given.prior  # with the products that were spent: the first tangent's are kept
    left = tangent.left(at, variances) | tangent.misfit(at, y, variances)
    return at, replace(given, like=at, mean_info={**given.mean_info, **left})


def _spectrum(cov: Covariance) -> Tensor | None:
    """The variances of cosines, where the covariance is diagonal in them.

    One variance a row is that of cosines too; it is known by the layout of its tensor.
    """
    if isinstance(cov, Spectral):
        return cov.variances
    if not isinstance(cov, Diagonal):
        return None
    sizes = zip(cov.variances.shape[1:], cov.variances.stride()[1:], strict=True)
    return cov.variances if all(size == 1 or stride == 0 for size, stride in sizes) else None


def along_measurements(
    mean: Tensor, cov: LowRank, b: Tensor, operator: Operator, variances: Tensor
) -> tuple[LowRank, solvers.Solver]:
    """The covariance with its products spent where y says something, and the solver of its system.

    The first direction is A' S^-1 b with the rest's S, along which the mean would move; each next
    one is that of the covariance so far. With d products, or once a direction is not new, the mean
    is that of C itself.
    """
    solver = inner = solver_of(mean, cov.base, operator, variances)
    if not cov.count:  # they were spent along y before
        return cov, solvers.LowRankSolver(cov, operator, inner)
    extended = cov.bare
    for _ in range(cov.count):
        extended = extended.extended(operator.adjoint(solver.solve(b)[0]))
        if isinstance(inner, ConjugateGradients):
            solver = replace(inner, prior=extended)
        else:
            solver = solvers.LowRankSolver(extended, operator, inner)
    return extended, solver


def solver_of(
    mean: Tensor, cov: Covariance, operator: Operator, variances: Tensor, most: int | None = None
) -> solvers.Solver:
    """The solver of S; one S of all rows is factored up to `most` measurements (of a channel)."""
    most = solvers.MOST_SHARED if most is None else most
    most = min(most, solvers.MOST_NUMBERS // mean[0].numel())
    if isinstance(cov, Krylov):
        return LanczosSolver(cov, operator, variances)
    if isinstance(cov, Dense) and math.prod(operator.out_shape) <= 2 * mean[0].numel():
        return solvers.cholesky_of_dense(cov, operator, variances, mean)
    if isinstance(cov, Diagonal) and (squares := operator.squares(cov.variances)) is not None:
        return solvers.DiagonalSolver(cov, operator, variances, squares + variances)
    if isinstance(cov, Diagonal | Spectral) and not operator.by_rows:
        # One row fits any number of rows, where all are the same, and the noise's too.
        same = len(cov.variances) == 1 or cov.variances.stride(0) == 0
        shared = type(cov)(cov.variances[:1]) if same and len(variances) == 1 else None
        row = cov if shared is None else shared
        spectrum = _spectrum(row) if variances.numel() == len(variances) else None
        squares = None if spectrum is None else operator.cosine_squares(spectrum)
        if squares is not None:
            return solvers.DiagonalSolver(row, operator, variances, squares + variances, True)
        places = solvers.measured_places(operator, mean)
        if isinstance(shared, Spectral) and operator.channelwise and variances.numel() == 1:
            of_channel = places[: len(places) // mean.shape[1]]
            few = len(of_channel) <= most and len(of_channel) < mean[0, 0].numel()
            if mean.shape[1] > 1 and few:
                return solvers.cholesky_of_channels(shared, operator, variances, of_channel, mean)
        if shared is not None and len(places) <= most:
            return solvers.cholesky_of_shared(shared, operator, variances, places, mean)
        if len(places) <= solvers.MOST_EACH:
            return solvers.cholesky_of_rows(cov, operator, variances, places, mean)
    # S^-1 as if A were diagonal in cosines is a preconditioner. With the spectrum of cifar10 at
    # sigma 3 and noise 0.02 a box takes 26 iterations in place of 456, 80% missing pixels 94 in
    # place of 222, and a motion blur 112 in place of 444.
    power = operator.cosine_power(mean)
    spectrum = _spectrum(cov.average() if isinstance(cov, Modulated) else cov)
    if power is None or spectrum is None:
        return ConjugateGradients(cov, operator, variances)
    noise = variances.mean(tuple(range(1, variances.ndim)), keepdim=True)
    inverse = 1 / (power * spectrum + noise)
    return ConjugateGradients(
        cov, operator, variances, lambda r: operator.known(from_cosines(inverse * to_cosines(r)))
    )
