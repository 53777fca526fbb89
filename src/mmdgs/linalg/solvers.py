"""Systems S w = b in the space of measurements, S = A C A' + diag(tau^2), solved exactly: where S is diagonal, or so
in cosines, of low rank beside such a one, or small enough for a Cholesky factor. Iterations are in iterations.py.

Each solver returns w, the gain C A' w that goes with it (of x's shape), and what is known of the solution, (B,) by
name.
"""

from __future__ import annotations

import abc
import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdgs.linalg.lowrank import LowRank
from mmdgs.linalg.operators import Covariance, Diagonal, einsum
from mmdgs.linalg.spectral import Spectral, cosines, from_cosines, to_cosines
from mmdgs.operators import Operator
from mmdgs.runtime import in_full_precision

logger = logging.getLogger("mmdgs")

MOST_EACH = 128
"""Measurements up to which an S that differs from row to row is factored for each: exact, and cheaper than iterations.
"""

MOST_SHARED = 1024
"""Measurements up to which an S that all rows share is factored, or its inverse written out: 4 MB, and milliseconds.

Of one channel, where S falls into one for each channel."""

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
class ChannelSolver(Solver):
    """S in cosines over the channels of y, where it falls into a block for each: L (C, m, m), at the `places` of a
    channel (m,) that were measured. For an A that is `channelwise`, one spectrum and one noise for all rows.
    """

    prior: Spectral  # one row
    operator: Operator
    factor: Tensor
    places: Tensor
    noise: Tensor  # tau^2, one number

    def solve(self, b: Tensor) -> Solution:
        seen = self._mixed(b).flatten(2)[..., self.places].movedim(0, 2).to(self.factor)  # (C, m, B)
        inner = torch.cholesky_solve(seen, self.factor).movedim(2, 0).to(b)
        w = self._mixed(torch.zeros_like(b).flatten(2).index_copy(2, self.places, inner).reshape(b.shape), back=True)
        return w, self.prior.apply(self.operator.adjoint(w)), {}

    def logdet(self) -> Tensor:
        ends = self.factor.diagonal(dim1=1, dim2=2)
        return (2 * ends.log() - self.noise.log()).sum()[None].to(self.noise)

    def inverse_root(self) -> Tensor | None:
        rows = torch.linalg.inv(self.factor).to(self.noise)
        wide = rows.new_zeros(*rows.shape[:2], math.prod(self.operator.out_shape[1:])).index_copy(2, self.places, rows)
        basis = cosines(len(rows), rows.dtype, rows.device)
        return (basis[:, None, :, None] * wide[:, :, None]).reshape(-1, *self.operator.out_shape)

    def _mixed(self, y: Tensor, *, back: bool = False) -> Tensor:
        """The cosines over channels of y, or y of them."""
        basis = cosines(y.shape[1], y.dtype, y.device)
        return einsum("kc,bc...->bk...", basis.mT if back else basis, y)


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


def measured_places(operator: Operator, like: Tensor) -> Tensor:
    """The places of y, flat, that say something: all but those under a mask."""
    return operator.known(like.new_full((1, *operator.out_shape), math.nan)).isnan().flatten().nonzero()[:, 0]


def cholesky_of_shared(
    prior: Covariance, operator: Operator, variances: Tensor, places: Tensor, like: Tensor
) -> CholeskySolver:
    """The factor of an S that is the same in all rows: `prior` is one row."""
    matrix = operator(prior.apply(_adjoint_at(operator, places, like))).flatten(1)[:, places]
    return _cholesky(prior, operator, matrix[None], variances, places)


def cholesky_of_channels(
    prior: Spectral, operator: Operator, variances: Tensor, places: Tensor, like: Tensor
) -> ChannelSolver:
    """The factors of an S that falls into a block for each channel; `places` are those of one channel."""
    rows = _adjoint_at(operator, places, like)[:, :1]  # of the first channel, and so of each, and of cosines over them
    image = from_cosines(prior.variances * to_cosines(rows, lead=2), lead=2)
    matrix = operator(image).flatten(2)[..., places].movedim(0, 1).double()  # (C, m, m)
    noise = variances.flatten()[0]
    eye = torch.eye(len(places), dtype=matrix.dtype, device=matrix.device)
    factor = torch.linalg.cholesky(0.5 * (matrix + matrix.mT) + noise * eye)
    return ChannelSolver(prior, operator, factor, places, noise)


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
