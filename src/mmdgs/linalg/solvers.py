"""Systems S w = b in the space of measurements, S = A C A' + diag(tau^2): a diagonal, a Cholesky factor, iterations.

Each solver returns w, the gain C A' w that goes with it (of x's shape), and what is known of the solution, (B,) by
name.
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

from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.lanczos import lanczos, tridiagonal
from mmdgs.linalg.lowrank import LowRank
from mmdgs.linalg.operators import Covariance, Diagonal, einsum
from mmdgs.linalg.spectral import Spectral, from_cosines, to_cosines
from mmdgs.operators import Operator
from mmdgs.runtime import in_full_precision

logger = logging.getLogger("mmdgs")

TOLERANCE = {torch.float64: 1e-10}
TOLERANCE_ELSE = 1e-5
"""The residual |b - S w| / |b| at which a row is solved, by dtype."""
ITERATIONS = 500
"""Most iterations of a row, where the covariance costs no evaluations of a network."""

MOST_EACH = 128
"""Measurements up to which an S that differs from row to row is factored for each: exact, and cheaper than iterations.
"""

MOST_SHARED = 1024
"""Measurements up to which an S that all rows share is factored, or its inverse written out: 4 MB, and milliseconds."""

Solution = tuple[Tensor, Tensor, Mapping[str, Tensor]]


class Solver(abc.ABC):
    """S^-1 for a batch of rows."""

    @abc.abstractmethod
    def solve(self, b: Tensor) -> Solution:
        """w = S^-1 b (B, *out_shape), C A' w (B, *shape), info."""

    def logdet(self) -> Tensor | None:
        """log det S - log det diag(tau^2), (B,) or (1,); None where it is not known."""
        return None

    def inverse_root(self) -> Tensor | None:
        """W (m, *out_shape) with S^-1 = W' W, where one of few measurements serves all rows; else None."""
        return None


@dataclass(frozen=True)
class DiagonalSolver(Solver):
    """S = diag(values), values (B, *out_shape)."""

    prior: Covariance
    operator: Operator
    variances: Tensor
    values: Tensor

    def solve(self, b: Tensor) -> Solution:
        w = b / self.values
        return w, self.prior.apply(self.operator.adjoint(w)), {}

    def logdet(self) -> Tensor:
        return (self.values / self.variances).log().flatten(1).sum(1)


@dataclass(frozen=True)
class CholeskySolver(Solver):
    """S = L L' at the `places` of y (m,) that were measured; L (B, m, m), or (1, m, m) where all rows have the same."""

    prior: Covariance
    operator: Operator
    factor: Tensor
    places: Tensor
    noise: Tensor  # tau^2 at the places, (B, m) or (1, m)

    def solve(self, b: Tensor) -> Solution:
        seen = b.flatten(1)[:, self.places]
        if len(self.factor) == 1:
            inner = torch.cholesky_solve(seen.mT, self.factor[0]).mT
        else:
            inner = torch.cholesky_solve(seen[..., None], self.factor)[..., 0]
        w = torch.zeros_like(b).flatten(1).index_copy(1, self.places, inner).reshape(b.shape)
        return w, self.prior.apply(self.operator.adjoint(w)), {}

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal(dim1=1, dim2=2).log().sum(1) - self.noise.log().sum(1)

    def inverse_root(self) -> Tensor | None:
        if len(self.factor) != 1:
            return None
        rows = torch.linalg.inv(self.factor[0])  # of L^-1, which has no number at places that were not measured
        wide = rows.new_zeros(len(rows), math.prod(self.operator.out_shape)).index_copy(1, self.places, rows)
        return wide.reshape(-1, *self.operator.out_shape)


@dataclass(frozen=True)
class CosineSolver(Solver):
    """S = Q diag(values) Q' in the cosines Q of y, with values (B, *out_shape): of an A with `cosine_squares`."""

    prior: Covariance
    operator: Operator
    variances: Tensor
    values: Tensor

    def solve(self, b: Tensor) -> Solution:
        w = from_cosines(to_cosines(b) / self.values)
        return w, self.prior.apply(self.operator.adjoint(w)), {}

    def logdet(self) -> Tensor:
        return (self.values / self.variances).log().flatten(1).sum(1)

    def inverse_root(self) -> Tensor | None:
        m = math.prod(self.operator.out_shape)
        if len(self.values) != 1 or m > MOST_SHARED:
            return None
        return from_cosines(torch.diag(self.values.flatten().rsqrt()).reshape(m, *self.operator.out_shape))


@dataclass(frozen=True)
class LowRankSolver(Solver):
    """S = S_0 + L diag(c) L', L = A F, where S_0 is the system of the rest (`inner`): Woodbury's formula.

    S^-1 = S_0^-1 - Y diag(c) (I + N diag(c))^-1 Y',   Y = S_0^-1 L,   N = L' Y
    """

    prior: LowRank
    operator: Operator
    inner: Solver

    @functools.cached_property
    def _system(self) -> tuple[Tensor, Tensor, Tensor]:
        """Y (n, B, m), diag(c) (I + N diag(c))^-1 (B, n, n) and log det (I + N diag(c)) (B,), in float64."""
        factor, c = self.prior.factor
        columns = [self.operator(one) for one in factor]
        solved = torch.stack([self.inner.solve(one)[0].flatten(1).double() for one in columns])
        n = torch.einsum("nbm,kbm->bnk", torch.stack(columns).flatten(2).double(), solved)
        c = c.double()
        system = torch.eye(len(solved), dtype=n.dtype, device=n.device) + 0.5 * (n + n.mT) * c[:, None]
        return solved, c[..., None] * torch.linalg.inv(system), torch.linalg.slogdet(system).logabsdet

    def solve(self, b: Tensor) -> Solution:
        solved, core, _ = self._system
        along = torch.einsum("nbm,bm->bn", solved, b.flatten(1).double())
        low = torch.einsum("nbm,bn->bm", solved, (core @ along[..., None])[..., 0])
        w = self.inner.solve(b)[0] - low.to(b.dtype).reshape(b.shape)
        return w, self.prior.apply(self.operator.adjoint(w)), {}

    def logdet(self) -> Tensor | None:
        inner = self.inner.logdet()
        return None if inner is None else inner + self._system[2].to(inner)


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
        w, residual = torch.zeros_like(b), b
        gain = torch.zeros(len(b), *self.operator.shape, dtype=b.dtype, device=b.device)
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
        return w, gain, {"cg_iterations": steps, "cg_residual": left}

    def _preconditioned(self, residual: Tensor) -> Tensor:
        return residual if self.preconditioner is None else self.preconditioner(residual)


@dataclass(frozen=True)
class LanczosSolver(Solver):
    """S^-1 for a covariance known by its products, which may be indefinite where a network's Jacobian is.

    Conjugate gradients written as Lanczos' method: with D = diag(tau), the Krylov space of B = D^-1 A C A' D^-1 from
    D^-1 b has Ritz pairs (u, theta), and D w = sum u (u' D^-1 b) / (theta + 1). Each product is with C itself. As in
    `Krylov.root` what lies below the floor is lifted: where a = A' D^-1 u has a' C a < floor |a|^2, C a is taken for
    floor a. And where C a is longer than it can be for a positive C, |C a|^2 <= |C| a' C a, it is cut to that length.
    Conjugate gradients themselves diverge there.
    """

    prior: Krylov
    operator: Operator
    variances: Tensor

    def solve(self, b: Tensor) -> Solution:
        rows, tau = len(b), self.variances.sqrt()
        start = b / tau
        size = _norm(start).double()
        tolerance = TOLERANCE.get(b.dtype, TOLERANCE_ELSE)
        backs, images, residuals = [], [], []

        def product(v: Tensor) -> Tensor:
            back = self.operator.adjoint(v.reshape(b.shape).to(b.dtype) / tau)
            image = self.prior.unlifted(back)
            backs.append(back.flatten(1))
            images.append(image.flatten(1))
            return (self.operator(image) / tau).flatten(1)[None]

        def solved(diagonal: Tensor, coupling: Tensor) -> bool:
            residuals.append(torch.where(size > 0, _residual(diagonal[0], coupling[0]), 0.0))
            return bool((torch.stack(residuals).amin(0) <= tolerance).all())

        space = lanczos(product, start.flatten(1)[None], min(self.prior.steps, start[0].numel()), solved)
        if len(residuals) < len(backs):  # the last space is invariant, and nobody asked
            solved(space.diagonal, space.coupling)
        # A row ends where it was solved, whatever rows beside it need: what comes after does not count.
        open_ = (torch.stack(residuals, 1) > tolerance).cummin(1).values
        kept = torch.cat([torch.ones_like(open_[:, :1]), open_[:, :-1]], 1)  # (B, k)
        left = torch.stack(residuals, 1).gather(1, kept.sum(1, keepdim=True) - 1)[:, 0]
        values, vectors = _cut(space.diagonal[0], space.coupling[0], kept)
        back, image = (vectors.mT @ (kept[..., None] * torch.stack(one, 1)).double() for one in (backs, images))
        values, image = self._believed(values, back, image)
        weights = size[:, None] * vectors[:, 0] / (values + 1)
        w = einsum("bk,kbm->bm", (vectors @ weights[..., None])[..., 0].to(space.basis), space.basis[:, 0])
        gain = torch.einsum("bk,bkd->bd", weights, image).to(b.dtype).reshape(rows, *self.operator.shape)
        if bool((left > tolerance).any()):
            _warn_once("Krylov", self.prior.steps)
        info = {"cg_iterations": kept.sum(1).to(b.dtype), "cg_residual": left.to(b.dtype)}
        return w.to(b.dtype).reshape(b.shape) / tau, gain, info

    def _believed(self, values: Tensor, back: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """Ritz values (B, k) and products C a (B, k, d) with vectors a, as those of a covariance can be."""
        tiny = torch.finfo(back.dtype).tiny
        squares, lengths = back.square().sum(-1), image.norm(dim=-1)
        floor = self.prior.floor_among(torch.where(squares > 0, values / squares.clamp(min=tiny), 0.0))
        norm = (lengths / squares.clamp(min=tiny).sqrt()).amax(1, keepdim=True)
        longest = (SLACK * norm * values.clamp(min=0)).sqrt()
        cut = (longest / lengths.clamp(min=tiny)).clamp(max=1)
        small = (values < floor * squares)[..., None]
        return torch.maximum(values, floor * squares), torch.where(
            small, floor[..., None] * back, cut[..., None] * image
        )


def _cut(diagonal: Tensor, coupling: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of T (B, k, k) with what is not kept cut off."""
    inside = torch.where(kept, diagonal, diagonal[:, :1])
    return torch.linalg.eigh(tridiagonal(inside, torch.where(kept[:, 1:], coupling[:, :-1], 0.0)))


SLACK = 10.0
"""How much larger |C| may be than it looks along the directions of a solution."""


def _residual(diagonal: Tensor, coupling: Tensor) -> Tensor:
    """|b - (B + I) w| / |b| of Lanczos' solution, (B,), from T by its diagonal and couplings (B, k)."""
    k = diagonal.shape[-1]
    matrix = tridiagonal(diagonal.double(), coupling[:, :-1].double()) + torch.eye(k, device=diagonal.device)
    first = torch.zeros_like(matrix[..., 0])
    first[:, 0] = 1
    # An indefinite T may be singular by accident: then the residual is large, and that is no error.
    solution, failed = torch.linalg.solve_ex(matrix, first)
    return torch.where(failed == 0, (coupling[:, -1] * solution[:, -1]).abs(), torch.inf)


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


def measured_places(operator: Operator, like: Tensor) -> Tensor:
    """The places of y, flat, that say something: all but those under a mask."""
    return operator.known(like.new_full((1, *operator.out_shape), math.nan)).isnan().flatten().nonzero()[:, 0]


def cholesky_of_shared(
    prior: Covariance, operator: Operator, variances: Tensor, places: Tensor, like: Tensor
) -> CholeskySolver:
    """The factor of an S that is the same in all rows: `prior` is one row."""
    matrix = operator(prior.apply(_adjoint_at(operator, places, like))).flatten(1)[:, places]
    return _cholesky(prior, operator, matrix[None], variances, places)


def _adjoint_at(operator: Operator, places: Tensor, like: Tensor) -> Tensor:
    """A' e for the basis vectors e of some places of y, (m, *shape)."""
    basis = like.new_zeros(len(places), math.prod(operator.out_shape))
    basis[torch.arange(len(places), device=like.device), places] = 1
    return operator.adjoint(basis.reshape(-1, *operator.out_shape))


@in_full_precision
def cholesky_of_rows(
    prior: Diagonal | Spectral, operator: Operator, variances: Tensor, places: Tensor, like: Tensor
) -> CholeskySolver:
    """The factors of an S of few measurements that differs from row to row: S = G diag(v) G', G = A or A Q."""
    rows = _adjoint_at(operator, places, like)
    gains = (to_cosines(rows) if isinstance(prior, Spectral) else rows).flatten(1)
    matrix = torch.stack([(gains * v) @ gains.mT for v in prior.variances.flatten(1)])
    return _cholesky(prior, operator, matrix, variances, places)


@in_full_precision
def gain_of(matrix: Tensor, operator: Operator) -> tuple[Tensor, Tensor]:
    """C A' (B, d, m) and A C A' (B, m, m) of dense covariances C (B, d, d): A is made a matrix too, once."""
    d = matrix.shape[1]
    eye = torch.eye(d, dtype=matrix.dtype, device=matrix.device).reshape(d, *operator.shape)
    a = operator(eye).flatten(1)  # (d, m): A'
    across = matrix @ a
    return across, a.mT @ across


def cholesky_of_dense(prior: Covariance, operator: Operator, variances: Tensor, like: Tensor) -> CholeskySolver:
    """The factors of S where the covariance is known as a matrix."""
    places = measured_places(operator, like)
    inner = gain_of(prior.dense(), operator)[1][:, places][:, :, places]
    return _cholesky(prior, operator, inner, variances, places)


def _cholesky(
    prior: Covariance, operator: Operator, matrix: Tensor, variances: Tensor, places: Tensor
) -> CholeskySolver:
    """The solver by the Cholesky factor of a symmetric matrix (B, m, m) plus the noise."""
    noise = variances.expand(len(variances), *operator.out_shape).flatten(1)[:, places]
    inner = 0.5 * (matrix + matrix.mT) + torch.diag_embed(noise)
    # Where it costs little it is in float64, in which it stays positive with noise far below the data's scale.
    exact = len(inner) == 1 or len(places) <= MOST_EACH
    factor = torch.linalg.cholesky(inner.double() if exact else inner).to(inner)
    return CholeskySolver(prior, operator, factor, places, noise)
