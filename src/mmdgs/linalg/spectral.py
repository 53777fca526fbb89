"""Covariances in the basis of cosines: one variance a frequency, and one whose strength moves.

    C = Q diag(v) Q'     Q the orthonormal cosines (DCT-II) along every dimension, colours too
    C = M R M            R of that kind, M = T' diag(s) T with T the cosines along colours alone

At every pixel M scales the colours' sum and their differences, each by its own s: errors are large
at edges and small in the sky, and of lightness rather than of hue. M is symmetric and its inverse
is that of s, so that root, density and determinant are as cheap as those of R.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdgs.linalg.operators import (
    Covariance,
    Implicit,
    counted,
    einsum,
    matmul,
    require_room_for_dense,
    scaled,
)
from mmdgs.runtime import in_full_precision


@functools.lru_cache(maxsize=64)
def cosines(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal cosines (frequencies, places): the matrix of the DCT-II."""
    places = torch.arange(size, dtype=torch.float64)
    rows = (math.pi / size * (places + 0.5) * places[:, None]).cos() * math.sqrt(2 / size)
    rows[0] *= math.sqrt(0.5)
    return rows.to(device, dtype)


def to_cosines(x: Tensor, lead: int = 1) -> Tensor:
    """Q' x: the coefficients of x along every dimension but the first `lead`."""
    return _along_all(x, lead, inverse=False)


def from_cosines(coefficients: Tensor, lead: int = 1) -> Tensor:
    """Q c, the inverse of `to_cosines`."""
    return _along_all(coefficients, lead, inverse=True)


def squares_from_cosines(variances: Tensor, lead: int = 1) -> Tensor:
    """The variances of places from those of coefficients."""
    return _along_all(variances, lead, inverse=True, squared=True)


def resampled(variances: Tensor, sides: Sequence[int]) -> Tensor:
    """A spectrum (C, h, w) for images of other sides: log variances, linear in each frequency.

    Coefficient k of n has the frequency k / n, and a stationary field one variance a frequency,
    whatever its size. Beyond the highest frequency of the spectrum it goes on as it is there.
    """
    logs = variances.log()
    for dim, side in enumerate(sides, start=1):
        known = logs.shape[dim]
        places = (torch.arange(side).double() * known / side).clamp(max=known - 1).to(logs)
        low = places.long()
        below = logs.index_select(dim, low)
        above = logs.index_select(dim, (low + 1).clamp(max=known - 1))
        logs = below.lerp(above, (places - low).reshape(-1, *[1] * (logs.ndim - 1 - dim)))
    return logs.exp()


@in_full_precision
def _along_all(x: Tensor, lead: int, *, inverse: bool, squared: bool = False) -> Tensor:
    for dim in range(lead, x.ndim):
        basis = cosines(x.shape[dim], x.dtype, x.device)
        basis = basis.square() if squared else basis
        x = (x.movedim(dim, -1) @ (basis if inverse else basis.mT)).movedim(-1, dim)
    return x


@dataclass(frozen=True)
class Spectral(Covariance):
    """Q diag(variances) Q', variances (B, ...) of the coefficients, expanded for one spectrum."""

    variances: Tensor

    def diagonal(self) -> Tensor:
        return squares_from_cosines(self.variances)

    def dense(self) -> Tensor:
        require_room_for_dense(self.variances)
        shape = self.variances.shape[1:]
        eye = torch.eye(math.prod(shape)).to(self.variances).reshape(-1, *shape)
        basis = to_cosines(eye).flatten(1)  # (places, frequencies)
        return matmul(basis * self.variances.flatten(1)[:, None], basis.mT)

    def apply(self, v: Tensor) -> Tensor:
        return from_cosines(self.variances * to_cosines(v))

    def root(self, z: Tensor) -> Tensor:
        return from_cosines(self.variances.sqrt() * to_cosines(z))

    def variance_along(self, u: Tensor) -> Tensor:
        return (to_cosines(u, lead=2).square() * self.variances).flatten(2).sum(2)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        return counted(self.variances.flatten(1))

    def coordinates(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.variances.flatten(1), to_cosines(r).square().flatten(1)

    def affine(self, scale: float, shift: float) -> Spectral:
        return Spectral(scaled(self.variances, scale, shift))


@dataclass(frozen=True)
class Modulated(Implicit):
    """a M R M + b I, with log s (B, colours, H, W), and v of the same shape or one for all rows.

    Its root takes as many normals again where b > 0. Densities with b > 0 need a matrix.
    """

    log_scales: Tensor
    spectral: Spectral
    scale: float = 1.0
    shift: float = 0.0

    @property
    def like(self) -> Tensor:
        return self.log_scales

    @functools.cached_property
    def _scales(self) -> Tensor:
        return self.log_scales.exp()

    def _modulated(self, v: Tensor, scales: Tensor) -> Tensor:
        """T' diag(scales) T v: M v, or with 1 / s its inverse."""
        colours = cosines(v.shape[-3], v.dtype, v.device)
        by_colour = einsum("fc,...chw->...fhw", colours, v)
        return einsum("fc,...fhw->...chw", colours, scales * by_colour)

    def diagonal(self) -> Tensor:
        # R has no entry between the colours' sum and differences at a pixel.
        inner = self._scales.square() * squares_from_cosines(self.spectral.variances, lead=2)
        basis = cosines(inner.shape[1], inner.dtype, inner.device).square()
        return self.scale * einsum("fc,bfhw->bchw", basis, inner) + self.shift

    def dense(self) -> Tensor:
        d, like = self.dim, self.log_scales
        require_room_for_dense(like)
        eye = torch.eye(d, dtype=like.dtype, device=like.device)
        columns = self._modulated(eye.reshape(d, 1, *like.shape[1:]), self._scales).flatten(2)
        half = columns.transpose(0, 1)  # (B, d, d): M
        return self.scale * matmul(matmul(half, self.spectral.dense()), half.mT) + self.shift * eye

    def apply(self, v: Tensor) -> Tensor:
        inner = self._modulated(self.spectral.apply(self._modulated(v, self._scales)), self._scales)
        return self.scale * inner + self.shift * v if self.shift else self.scale * inner

    def normals(self, event_shape: torch.Size) -> torch.Size:
        return torch.Size([2, *event_shape]) if self.shift else event_shape

    def root(self, z: Tensor) -> Tensor:
        """sqrt(a) M R^(1/2) z, and where b > 0 sqrt(b) times the second half of z beside it."""
        first, second = z.unbind(1) if self.shift else (z, None)
        inner = math.sqrt(self.scale) * self._modulated(self.spectral.root(first), self._scales)
        return inner if second is None else inner + math.sqrt(self.shift) * second

    def variance_along(self, u: Tensor) -> Tensor:
        inner = self.spectral.variance_along(self._modulated(u, self._scales))
        return self.scale * inner + self.shift * u.square().flatten(2).sum(2)

    def mahalanobis(self, r: Tensor) -> Tensor:
        """|R^(-1/2) M^-1 r|^2 / a, where nothing was added."""
        if self.shift:
            return self.decomposed.mahalanobis(r)
        return self.spectral.mahalanobis(self._modulated(r, (-self.log_scales).exp())) / self.scale

    def logdet(self) -> Tensor:
        """log det R + 2 sum log s + d log a, where nothing was added."""
        if self.shift:
            return self.decomposed.logdet()
        scales = 2 * self.log_scales.flatten(1).sum(1)
        return self.spectral.logdet() + scales + self.dim * math.log(self.scale)

    def average(self) -> Spectral:
        """R with the mean square of the scales: the nearest spectrum that knows no place."""
        mean = self._scales.square().mean((-2, -1), keepdim=True)
        return Spectral(self.scale * mean * self.spectral.variances + self.shift)
