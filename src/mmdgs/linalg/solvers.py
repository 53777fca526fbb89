"""Systems S w = b in the space of measurements, S = A C A' + diag(tau^2): a diagonal, a Cholesky factor, iterations.

Each solver returns w, the gain C A' w that goes with it (of x's shape), and what is known of the solution, (B,) by name.
"""

from __future__ import annotations

import abc
import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdgs.linalg.operators import Covariance
from mmdgs.operators import Operator

logger = logging.getLogger("mmdgs")

TOLERANCE = {torch.float64: 1e-10}
TOLERANCE_ELSE = 1e-5
"""The residual |b - S w| / |b| at which a row is solved, by dtype."""
ITERATIONS = 500
"""Most iterations of a row, where the covariance costs no evaluations of a network."""

Solution = tuple[Tensor, Tensor, Mapping[str, Tensor]]


class Solver(abc.ABC):
    """S^-1 for a batch of rows."""

    @abc.abstractmethod
    def solve(self, b: Tensor) -> Solution:
        """w = S^-1 b (B, *out_shape), C A' w (B, *shape), info."""

    def logdet(self) -> Tensor | None:
        """log det S, (B,) or (1,); None where it is not known."""
        return None


@dataclass(frozen=True)
class DiagonalSolver(Solver):
    """S = diag(values), values (B, *out_shape)."""

    prior: Covariance
    operator: Operator
    values: Tensor

    def solve(self, b: Tensor) -> Solution:
        w = b / self.values
        return w, self.prior.apply(self.operator.adjoint(w)), {}

    def logdet(self) -> Tensor:
        return self.values.log().flatten(1).sum(1)


@dataclass(frozen=True)
class CholeskySolver(Solver):
    """S = L L', L (B, m, m), or (1, m, m) where all rows have the same."""

    prior: Covariance
    operator: Operator
    factor: Tensor

    def solve(self, b: Tensor) -> Solution:
        if len(self.factor) == 1:
            w = torch.cholesky_solve(b.flatten(1).mT, self.factor[0]).mT
        else:
            w = torch.cholesky_solve(b.flatten(1)[..., None], self.factor)[..., 0]
        w = w.reshape(b.shape).to(b.dtype)
        return w, self.prior.apply(self.operator.adjoint(w)), {}

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal(dim1=1, dim2=2).log().sum(1)


@dataclass(frozen=True)
class ConjugateGradients(Solver):
    """Preconditioned conjugate gradients, all rows at once; each row stops by its own residual.

    The gain C A' w is summed up on the way, so that it costs no product of its own. What did not converge within
    `iterations` is told by its residual, and once by a warning.
    """

    prior: Covariance
    operator: Operator
    variances: Tensor
    preconditioner: Callable[[Tensor], Tensor] | None = None
    iterations: int = ITERATIONS

    def solve(self, b: Tensor) -> Solution:
        dims = [1] * (b.ndim - 1)
        tolerance = TOLERANCE.get(b.dtype, TOLERANCE_ELSE)
        w, gain, residual = torch.zeros_like(b), 0.0, b
        size = _norm(b)
        alive = size > 0
        direction = previous = self._preconditioned(residual)
        slope = _inner(residual, previous)
        steps = torch.zeros_like(size)
        for _ in range(self.iterations):
            back = self.prior.apply(self.operator.adjoint(direction))
            image = self.operator(back) + self.variances * direction
            step = torch.where(alive, slope / _inner(direction, image), 0.0)
            w = w + step.reshape(-1, *dims) * direction
            gain = gain + step.reshape(-1, *[1] * (back.ndim - 1)) * back
            residual = residual - step.reshape(-1, *dims) * image
            steps += alive
            alive = alive & (_norm(residual) > tolerance * size)
            if not alive.any():
                break
            previous = self._preconditioned(residual)
            slope, before = _inner(residual, previous), slope
            turn = torch.where(alive, slope / before, 0.0)
            direction = previous + turn.reshape(-1, *dims) * direction
        if alive.any():
            _warn_once(type(self.prior).__name__, self.iterations)
        left = torch.where(size > 0, _norm(residual) / size, 0.0)
        return w, torch.as_tensor(gain), {"cg_iterations": steps, "cg_residual": left}

    def _preconditioned(self, residual: Tensor) -> Tensor:
        return residual if self.preconditioner is None else self.preconditioner(residual)


@functools.cache
def _warn_once(kind: str, iterations: int) -> None:
    logger.warning(
        "conjugate gradients with a %s covariance did not converge in %d iterations; the info of each draw has its "
        "residual (cg_residual). Larger noise, or more steps of a Krylov covariance, make it smaller",
        kind,
        iterations,
    )


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def _norm(a: Tensor) -> Tensor:
    return a.flatten(1).norm(dim=1)


def cholesky_of_shared(prior: Covariance, operator: Operator, variances: Tensor, like: Tensor) -> CholeskySolver:
    """The factor of an S that is the same in all rows: `prior` is one row."""
    m = math.prod(operator.out_shape)
    basis = torch.eye(m, dtype=like.dtype, device=like.device).reshape(m, *operator.out_shape)
    matrix = operator(prior.apply(operator.adjoint(basis))).flatten(1)
    return CholeskySolver(prior, operator, _factor(matrix[None], variances, operator))


def gain_of(matrix: Tensor, operator: Operator) -> tuple[Tensor, Tensor]:
    """C A' (B, d, m) and A C A' (B, m, m) of dense covariances C (B, d, d)."""
    rows, d, _ = matrix.shape
    across = operator(matrix.reshape(rows * d, *operator.shape)).reshape(rows, d, -1)
    m = across.shape[-1]
    inner = operator(across.mT.reshape(rows * m, *operator.shape)).reshape(rows, m, m)
    return across, inner


def cholesky_of_dense(prior: Covariance, operator: Operator, variances: Tensor) -> CholeskySolver:
    """The factors of S where the covariance is known as a matrix."""
    _, inner = gain_of(prior.dense(), operator)
    return CholeskySolver(prior, operator, _factor(inner, variances, operator))


def _factor(matrix: Tensor, variances: Tensor, operator: Operator) -> Tensor:
    """The Cholesky factor of a symmetric matrix (B, m, m) plus the noise."""
    noise = variances.expand(len(variances), *operator.out_shape).flatten(1)
    return torch.linalg.cholesky(0.5 * (matrix + matrix.mT) + torch.diag_embed(noise))
