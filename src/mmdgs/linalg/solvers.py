"""Systems S w = b in the space of measurements, S = A C A' + diag(tau^2), solved exactly.

S is diagonal, in pixels or in cosines, of low rank beside such a one, or small enough for a
Cholesky factor. Iterations are in iterations.py. Each solver returns w, the gain C A' w that goes
with it (of x's shape), and what is known of the solution, (B,) by name.
"""

from __future__ import annotations

import abc
import functools
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

MOST_EACH = 128
"""Measurements up to which an S that differs from row to row is factored for each row."""
MOST_SHARED = 1024
"""Measurements (of a channel, where S falls into channels) up to which a shared S is factored."""
MOST_NUMBERS = 1 << 29
"""Numbers of C A' (2 GB in float32) up to which a shared S is made for its factor."""

Solution = tuple[Tensor, Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Solver(abc.ABC):
    """S^-1 for a batch of rows. `prior` is C, of one row where all rows share one S."""

    prior: Covariance
    operator: Operator

    @abc.abstractmethod
    def solve(self, b: Tensor) -> Solution:
        """w = S^-1 b (B, *out_shape), C A' w (B, *shape), info."""

    def logdet(self) -> Tensor | None:
        """log det S - log det diag(tau^2), (B,) or (1,); None where it is not known."""
        return None

    def inverse_root(self) -> Tensor | None:
        """W (m, *out_shape) with S^-1 = W' W, where one S of few measurements serves all rows."""
        return None

    def _with_gain(self, w: Tensor) -> Solution:
        return w, self.prior.apply(self.operator.adjoint(w)), {}


@dataclass(frozen=True)
class DiagonalSolver(Solver):
    """S = diag(values), or Q diag(values) Q' in the cosines Q of y; values (B, *out_shape)."""

    variances: Tensor
    values: Tensor
    in_cosines: bool = False

    def solve(self, b: Tensor) -> Solution:
        if self.in_cosines:
            return self._with_gain(from_cosines(to_cosines(b) / self.values))
        return self._with_gain(b / self.values)

    def logdet(self) -> Tensor:
        return (self.values / self.variances).log().flatten(1).sum(1)

    def inverse_root(self) -> Tensor | None:
        shape = self.operator.out_shape
        if not self.in_cosines or len(self.values) != 1 or math.prod(shape) > MOST_SHARED:
            return None
        return from_cosines(torch.diag(self.values.flatten().rsqrt()).reshape(-1, *shape))


@dataclass(frozen=True)
class CholeskySolver(Solver):
    """S = L L' at the `places` of y (m,) that were measured; L (B, m, m), or (1, m, m) for all."""

    factor: Tensor
    places: Tensor
    noise: Tensor  # tau^2 at the places, (B, m) or (1, m)

    def solve(self, b: Tensor) -> Solution:
        seen = b.flatten(1)[:, self.places]
        if len(self.factor) == 1:
            inner = torch.cholesky_solve(seen.mT, self.factor[0]).mT
        else:
            inner = torch.cholesky_solve(seen[..., None], self.factor)[..., 0]
        w = torch.zeros_like(b).flatten(1).index_copy(1, self.places, inner)
        return self._with_gain(w.reshape(b.shape))

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal(dim1=1, dim2=2).log().sum(1) - self.noise.log().sum(1)

    def inverse_root(self) -> Tensor | None:
        if len(self.factor) != 1:
            return None
        rows = torch.linalg.inv(self.factor[0])
        wide = rows.new_zeros(len(rows), math.prod(self.operator.out_shape))
        wide = wide.index_copy(1, self.places, rows)
        return wide.reshape(-1, *self.operator.out_shape)


@dataclass(frozen=True)
class ChannelSolver(Solver):
    """S in cosines over the channels of y, where it falls into a block for each.

    L (C, m, m), at the `places` of a channel (m,) that were measured: for an A that is
    `channelwise`, one spectrum and one noise for all rows.
    """

    prior: Spectral
    factor: Tensor
    places: Tensor
    noise: Tensor  # tau^2, one number

    def solve(self, b: Tensor) -> Solution:
        seen = self._mixed(b).flatten(2)[..., self.places].movedim(0, 2)  # (C, m, B)
        inner = torch.cholesky_solve(seen.to(self.factor), self.factor).movedim(2, 0).to(b)
        w = torch.zeros_like(b).flatten(2).index_copy(2, self.places, inner).reshape(b.shape)
        return self._with_gain(self._mixed(w, back=True))

    def logdet(self) -> Tensor:
        ends = self.factor.diagonal(dim1=1, dim2=2)
        return (2 * ends.log() - self.noise.log()).sum()[None].to(self.noise)

    def inverse_root(self) -> Tensor | None:
        rows = torch.linalg.inv(self.factor).to(self.noise)
        wide = rows.new_zeros(*rows.shape[:2], math.prod(self.operator.out_shape[1:]))
        wide = wide.index_copy(2, self.places, rows)
        basis = cosines(len(rows), rows.dtype, rows.device)
        return (basis[:, None, :, None] * wide[:, :, None]).reshape(-1, *self.operator.out_shape)

    def _mixed(self, y: Tensor, *, back: bool = False) -> Tensor:
        """The cosines over channels of y, or y of them."""
        basis = cosines(y.shape[1], y.dtype, y.device)
        return einsum("kc,bc...->bk...", basis.mT if back else basis, y)


@dataclass(frozen=True)
class LowRankSolver(Solver):
    """S = S_0 + L diag(c) L', L = A F, by Woodbury's formula, with S_0 that of the rest (`inner`).

    S^-1 = S_0^-1 - Y diag(c) (I + N diag(c))^-1 Y',   Y = S_0^-1 L,   N = L' Y
    """

    prior: LowRank
    inner: Solver

    @functools.cached_property
    def _system(self) -> tuple[Tensor, Tensor, Tensor]:
        """Y (n, B, m), diag(c) (I + N diag(c))^-1 (B, n, n), log det (I + N diag(c)) (B,)."""
        factor, c = self.prior.factor
        columns = [self.operator(vector) for vector in factor]
        y = torch.stack([self.inner.solve(column)[0].flatten(1).double() for column in columns])
        n = torch.einsum("nbm,kbm->bnk", torch.stack(columns).flatten(2).double(), y)
        c = c.double()
        eye = torch.eye(len(y), dtype=n.dtype, device=n.device)
        system = eye + 0.5 * (n + n.mT) * c[:, None]
        core = c[..., None] * torch.linalg.inv(system)
        return y, core, torch.linalg.slogdet(system).logabsdet

    def solve(self, b: Tensor) -> Solution:
        y, core, _ = self._system
        along = torch.einsum("nbm,bm->bn", y, b.flatten(1).double())
        low = torch.einsum("nbm,bn->bm", y, (core @ along[..., None])[..., 0])
        return self._with_gain(self.inner.solve(b)[0] - low.to(b.dtype).reshape(b.shape))

    def logdet(self) -> Tensor | None:
        inner = self.inner.logdet()
        return None if inner is None else inner + self._system[2].to(inner)


def measured_places(operator: Operator, like: Tensor) -> Tensor:
    """The places of y, flat, that say something: all but those under a mask."""
    unknown = operator.known(like.new_full((1, *operator.out_shape), math.nan))
    return unknown.isnan().flatten().nonzero()[:, 0]


def cholesky_of_shared(
    prior: Covariance, operator: Operator, variances: Tensor, places: Tensor, like: Tensor
) -> CholeskySolver:
    """The factor of an S that is the same in all rows: `prior` is one row."""
    matrix = operator(prior.apply(_adjoint_at(operator, places, like))).flatten(1)[:, places]
    return _cholesky(prior, operator, matrix[None], variances, places)


def cholesky_of_channels(
    prior: Spectral, operator: Operator, variances: Tensor, places: Tensor, like: Tensor
) -> ChannelSolver:
    """The factors of an S that falls into channels; `places` are those of one channel."""
    # A' e of the first channel is that of each, and of cosines over them.
    rows = _adjoint_at(operator, places, like)[:, :1]
    image = from_cosines(prior.variances * to_cosines(rows, lead=2), lead=2)
    matrix = operator(image).flatten(2)[..., places].movedim(0, 1).double()  # (C, m, m)
    noise = variances.flatten()[0]
    eye = torch.eye(len(places), dtype=matrix.dtype, device=matrix.device)
    factor = torch.linalg.cholesky(0.5 * (matrix + matrix.mT) + noise * eye)
    return ChannelSolver(prior, operator, factor, places, noise)


@in_full_precision
def cholesky_of_rows(
    prior: Diagonal | Spectral, operator: Operator, variances: Tensor, places: Tensor, like: Tensor
) -> CholeskySolver:
    """The factors of an S of few measurements: S = G diag(v) G' in each row, G = A or A Q."""
    rows = _adjoint_at(operator, places, like)
    gains = (to_cosines(rows) if isinstance(prior, Spectral) else rows).flatten(1)
    matrix = torch.stack([(gains * v) @ gains.mT for v in prior.variances.flatten(1)])
    return _cholesky(prior, operator, matrix, variances, places)


def cholesky_of_dense(
    prior: Covariance, operator: Operator, variances: Tensor, like: Tensor
) -> CholeskySolver:
    """The factors of S where the covariance is known as a matrix."""
    places = measured_places(operator, like)
    inner = gain_of(prior.dense(), operator)[1][:, places][:, :, places]
    return _cholesky(prior, operator, inner, variances, places)


@in_full_precision
def gain_of(matrix: Tensor, operator: Operator) -> tuple[Tensor, Tensor]:
    """C A' (B, d, m) and A C A' (B, m, m) of dense covariances C (B, d, d)."""
    d = matrix.shape[1]
    eye = torch.eye(d, dtype=matrix.dtype, device=matrix.device).reshape(d, *operator.shape)
    if operator.by_rows:
        a = torch.stack([operator(e.expand(len(matrix), *e.shape)).flatten(1) for e in eye], 1)
    else:
        a = operator(eye).flatten(1)  # (d, m): A'
    across = matrix @ a
    return across, a.mT @ across


def _adjoint_at(operator: Operator, places: Tensor, like: Tensor) -> Tensor:
    """A' e for the basis vectors e of some places of y, (m, *shape)."""
    basis = like.new_zeros(len(places), math.prod(operator.out_shape))
    basis[torch.arange(len(places), device=like.device), places] = 1
    return operator.adjoint(basis.reshape(-1, *operator.out_shape))


def _cholesky(
    prior: Covariance, operator: Operator, matrix: Tensor, variances: Tensor, places: Tensor
) -> CholeskySolver:
    """The solver by the Cholesky factor of a symmetric matrix (B, m, m) plus the noise."""
    noise = variances.expand(len(variances), *operator.out_shape).flatten(1)[:, places]
    inner = 0.5 * (matrix + matrix.mT) + torch.diag_embed(noise)
    # In float64, where that costs little, S stays positive with noise far below the data's scale.
    exact = len(inner) == 1 or len(places) <= MOST_EACH
    factor = torch.linalg.cholesky(inner.double() if exact else inner).to(inner)
    return CholeskySolver(prior, operator, factor, places, noise)
