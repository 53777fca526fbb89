"""A spectrum whose strength changes from place to place.

C = M R M        R = Q diag(v) Q' diagonal in cosines, M = T' diag(s) T with T the cosines along colours alone

At every pixel M scales the colours' sum and their differences, each by its own s: errors are large at edges and small
in the sky, and of lightness rather than of hue. M is symmetric and its inverse is that of s, so that root, density and
determinant are as cheap as those of R.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.linalg.operators import MOST_DENSE, Covariance, Dense, einsum, matmul, require_room_for_dense
from mmdgs.linalg.spectral import Spectral, cosines, squares_from_cosines


def by_colour(x: Tensor) -> Tensor:
    """T x of images (..., colours, H, W)."""
    return einsum("fc,...chw->...fhw", cosines(x.shape[-3], x.dtype, x.device), x)


def to_colours(x: Tensor) -> Tensor:
    """T' x, the inverse of `by_colour`."""
    return einsum("fc,...fhw->...chw", cosines(x.shape[-3], x.dtype, x.device), x)


@dataclass(frozen=True)
class Modulated(Covariance):
    """a M R M + b I, with the logarithms of s (B, colours, H, W), and v of the same shape or one for all rows.

    Its root takes as many normals again where b > 0. Densities with b > 0 need a matrix.
    """

    log_scales: Tensor
    spectral: Spectral
    scale: float = 1.0
    shift: float = 0.0

    @cached_property
    def _scales(self) -> Tensor:
        return self.log_scales.exp()

    def _modulated(self, v: Tensor, scales: Tensor) -> Tensor:
        """M v, or with other scales its inverse."""
        return to_colours(scales * by_colour(v))

    def diagonal(self) -> Tensor:
        """The colours' sum and differences are uncorrelated at a pixel, as R has no entry between them."""
        inner = self._scales.square() * squares_from_cosines(self.spectral.variances, lead=2)
        basis = cosines(inner.shape[1], inner.dtype, inner.device).square()
        return self.scale * einsum("fc,bfhw->bchw", basis, inner) + self.shift

    def dense(self) -> Tensor:
        rows, shape = len(self.log_scales), self.log_scales.shape[1:]
        d = math.prod(shape)
        require_room_for_dense(rows, d, self.log_scales.dtype, self.log_scales.device)
        eye = torch.eye(d, dtype=self.log_scales.dtype, device=self.log_scales.device)
        inner = self._modulated(eye.reshape(d, 1, *shape), self._scales).flatten(2)  # (d, B, d): M, column by column
        half = inner.transpose(0, 1)
        return self.scale * matmul(matmul(half, self.spectral.dense()), half.mT) + self.shift * eye

    def apply(self, v: Tensor) -> Tensor:
        inner = self._modulated(self.spectral.apply(self._modulated(v, self._scales)), self._scales)
        return self.scale * inner + self.shift * v if self.shift else self.scale * inner

    def normals(self, event_shape: torch.Size) -> torch.Size:
        return event_shape if not self.shift else torch.Size([2, *event_shape])

    def root(self, z: Tensor) -> Tensor:
        """sqrt(a) M R^(1/2) z, and where b > 0 sqrt(b) times the second half of z beside it."""
        first, second = (z, None) if not self.shift else z.unbind(1)
        inner = math.sqrt(self.scale) * self._modulated(self.spectral.root(first), self._scales)
        return inner if second is None else inner + math.sqrt(self.shift) * second

    def variance_along(self, u: Tensor) -> Tensor:
        inner = self.spectral.variance_along(self._modulated(u, self._scales))
        return self.scale * inner + self.shift * u.square().flatten(2).sum(2)

    def mahalanobis(self, r: Tensor) -> Tensor:
        """|R^(-1/2) M^-1 r|^2 / a, where nothing was added."""
        if self.shift:
            return self._decomposed.mahalanobis(r)
        return self.spectral.mahalanobis(self._modulated(r, (-self.log_scales).exp())) / self.scale

    def logdet(self) -> Tensor:
        """log det R + 2 sum log s + d log a, where nothing was added."""
        if self.shift:
            return self._decomposed.logdet()
        d = math.prod(self.log_scales.shape[1:])
        return self.spectral.logdet() + 2 * self.log_scales.flatten(1).sum(1) + d * math.log(self.scale)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        return self._decomposed.spectrum()

    def coordinates(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self._decomposed.coordinates(r)

    @cached_property
    def _decomposed(self) -> Dense:
        shape = self.log_scales.shape[1:]
        if (d := math.prod(shape)) > MOST_DENSE:
            raise UsageError(
                f"eigenvalues of a spectrum that changes from place to place, and its density with noise added, need a "
                f"matrix of {d} x {d}, and the limit is {MOST_DENSE}: use draws, or variance_along for directions"
            )
        return Dense.from_matrix(self.dense(), shape)

    def affine(self, scale: float, shift: float) -> Modulated:
        return replace(self, scale=scale * self.scale, shift=scale * self.shift + shift)

    def average(self) -> Spectral:
        """R with the mean square of the scales: what is nearest to it among spectra that know no place."""
        mean = self._scales.square().mean((-2, -1), keepdim=True)
        return Spectral(self.scale * mean * self.spectral.variances + self.shift)
