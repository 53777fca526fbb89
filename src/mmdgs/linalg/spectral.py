"""Covariances that are diagonal in the basis of cosines.

C = Q diag(v) Q'        Q the orthonormal basis of cosines (DCT-II) along every dimension, colours included
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdgs.linalg.operators import Covariance, matmul, require_room_for_dense, scaled
from mmdgs.runtime import in_full_precision


@functools.lru_cache(maxsize=64)
def cosines(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal cosines over so many places, (frequencies, places): the matrix of the DCT-II."""
    places, frequencies = torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64)[:, None]
    rows = (math.pi / size * (places + 0.5) * frequencies).cos() * math.sqrt(2 / size)
    rows[0] *= math.sqrt(0.5)
    return rows.to(device, dtype)


def to_cosines(x: Tensor, lead: int = 1) -> Tensor:
    """Q' x: the coefficients of x along every dimension but the first `lead`."""
    return _along_all(x, lead, inverse=False)


def from_cosines(coefficients: Tensor, lead: int = 1) -> Tensor:
    """Q c, the inverse of `to_cosines`."""
    return _along_all(coefficients, lead, inverse=True)


@in_full_precision
def _along_all(x: Tensor, lead: int, *, inverse: bool, squared: bool = False) -> Tensor:
    """Products with the cosines (or their squares) along every dimension but the first ones."""
    for dim in range(lead, x.ndim):
        basis = cosines(x.shape[dim], x.dtype, x.device)
        basis = basis.square() if squared else basis
        x = (x.movedim(dim, -1) @ (basis if inverse else basis.mT)).movedim(-1, dim)
    return x


def squares_from_cosines(variances: Tensor, lead: int = 1) -> Tensor:
    """The variances of places from those of coefficients, along every dimension but the first `lead`."""
    return _along_all(variances, lead, inverse=True, squared=True)


@dataclass(frozen=True)
class Spectral(Covariance):
    """Q diag(variances) Q', with variances (B, ...) of the coefficients; an expanded tensor serves for one spectrum."""

    variances: Tensor

    def diagonal(self) -> Tensor:
        return squares_from_cosines(self.variances)

    def dense(self) -> Tensor:
        rows, shape = len(self.variances), self.variances.shape[1:]
        d = math.prod(shape)
        require_room_for_dense(rows, d, self.variances.dtype, self.variances.device)
        basis = to_cosines(torch.eye(d).to(self.variances).reshape(d, *shape)).flatten(1)  # (places, frequencies)
        return matmul(basis * self.variances.flatten(1)[:, None], basis.mT)

    def apply(self, v: Tensor) -> Tensor:
        return from_cosines(self.variances * to_cosines(v))

    def root(self, z: Tensor) -> Tensor:
        return from_cosines(self.variances.sqrt() * to_cosines(z))

    def variance_along(self, u: Tensor) -> Tensor:
        return (to_cosines(u, lead=2).square() * self.variances).flatten(2).sum(2)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        return (values := self.variances.flatten(1)), values.new_ones(()).expand_as(values)

    def coordinates(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.variances.flatten(1), to_cosines(r).square().flatten(1)

    def affine(self, scale: float, shift: float) -> Spectral:
        return Spectral(scaled(self.variances, scale, shift))
