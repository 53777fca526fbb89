"""Operators of scanners: Fourier coefficients, coils of magnetic resonance, projections.

    Fourier  y = keep F x       of each channel, which is real
    Coils    y_c = keep F s_c x    of a complex image, by coils of sensitivities s_c
    Radon    y = sums of x over strips of one pixel's width, at some angles

F is the orthonormal Fourier transform along every side; frequency zero comes first, as in
torch.fft.fftn. Complex numbers are pairs of real ones: real, imaginary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmdgs.operators.contract import Constant, Operator
from mmdgs.operators.images import sides_of, zero_or_one
from mmdgs.runtime import in_full_precision


class _Frequencies(Operator):
    """Frequencies of images of some sides; `keep` is a mask of them, or of the last sides alone."""

    def __init__(
        self, shape: Sequence[int], coils: Sequence[int], sides: Sequence[int], keep: Tensor | None
    ) -> None:
        keep = torch.ones(tuple(sides), dtype=torch.bool) if keep is None else keep
        if keep.ndim > len(sides) or keep.shape != torch.Size(sides[len(sides) - keep.ndim :]):
            raise ValueError(f"the mask's shape {tuple(keep.shape)} does not fit {tuple(sides)}")
        super().__init__(shape, (*coils, *sides, 2))
        self.keep = Constant(zero_or_one(keep).expand(*sides)[..., None])
        self._dims = tuple(range(-len(sides), 0))

    def known(self, y: Tensor) -> Tensor:
        return torch.where(self.keep.at(y).bool(), y, 0.0)

    def _transformed(self, x: Tensor) -> Tensor:
        z = torch.fft.fftn(x, dim=self._dims, norm="ortho")
        return torch.view_as_real(z) * self.keep.at(z.real)

    def _back(self, y: Tensor) -> Tensor:
        z = torch.view_as_complex((y * self.keep.at(y)).contiguous())
        return torch.fft.ifftn(z, dim=self._dims, norm="ortho")


class Fourier(_Frequencies):
    """Fourier coefficients of each channel where a mask (H, W) keeps them (all: None).

    (C, H, W) -> (C, H, W, 2).
    """

    channelwise = True

    def __init__(self, shape: Sequence[int], keep: Tensor | None = None) -> None:
        super().__init__(shape, shape[:1], sides_of(shape, "Fourier"), keep)

    def _forward(self, x: Tensor) -> Tensor:
        return self._transformed(x)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._back(y).real


class Coils(_Frequencies):
    """Cartesian magnetic resonance by several coils: y_c = keep F (s_c x), (coils, H, W, 2).

    x (2, H, W) is a complex image as its real and imaginary part; with real=True x (1, H, W) is
    real, and a phase that is known is a factor of the maps. `maps` are the complex sensitivities
    s_c (coils, H, W), as ESPIRiT estimates them from the centre of k-space. `keep` (H, W), or (W,)
    for whole lines, is true where k-space was sampled. Volumes have one side more.
    """

    def __init__(self, maps: Tensor, keep: Tensor | None = None, *, real: bool = False) -> None:
        if not isinstance(maps, Tensor) or not maps.is_complex() or maps.ndim < 2:
            got = getattr(maps, "dtype", type(maps).__name__)
            raise ValueError(f"maps are a complex tensor (coils, height, width), got {got}")
        if not torch.isfinite(maps).all():
            raise ValueError("the maps of coils must be finite")
        sides = maps.shape[1:]
        super().__init__((1 if real else 2, *sides), maps.shape[:1], sides, keep)
        self._maps = Constant(torch.view_as_real(maps.resolve_conj()))

    def _maps_at(self, like: Tensor) -> Tensor:
        return torch.view_as_complex(self._maps.at(like))

    def _forward(self, x: Tensor) -> Tensor:
        image = x if self.shape[0] == 1 else torch.complex(x[:, :1], x[:, 1:])
        return self._transformed(self._maps_at(x) * image)

    def _adjoint(self, y: Tensor) -> Tensor:
        image = (self._maps_at(y).conj() * self._back(y)).sum(1, keepdim=True)
        return image.real if self.shape[0] == 1 else torch.cat([image.real, image.imag], 1)


class Radon(Operator):
    """Projections of each channel and slice (..., H, W) at angles in degrees, (..., angles, bins).

    Number b of an angle is the sum of x over a strip of one pixel's width, a pixel that lies in
    several strips counting by its area in each: exact for images that are constant in each pixel.
    At 0 degrees strips are columns, at 90 rows. The matrix is sparse, and so is its transpose.
    """

    channelwise = True

    def __init__(self, shape: Sequence[int], angles: Sequence[float]) -> None:
        *_, height, width = sides_of(shape, "Radon")
        turns = torch.as_tensor(angles, dtype=torch.float64).deg2rad().reshape(-1)
        if not len(turns) or not torch.isfinite(turns).all():
            raise ValueError(f"Radon needs one angle or more, in degrees, got {angles}")
        bins = math.ceil(math.hypot(height, width))
        bins += (bins - width) % 2  # strips at 0 degrees are columns, and not halves of two
        super().__init__(shape, (*shape[:-2], len(turns), bins))
        matrix = _strips(height, width, turns, bins)
        self.matrix, self.back = Constant(matrix), Constant(matrix.mT.coalesce())

    def _forward(self, x: Tensor) -> Tensor:
        return self._times(self.matrix, x, self.out_shape)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._times(self.back, y, self.shape)

    @in_full_precision
    def _times(self, matrix: Constant, x: Tensor, shape: Sequence[int]) -> Tensor:
        images = x.flatten(-2).reshape(-1, x.shape[-2] * x.shape[-1])
        return torch.sparse.mm(matrix.at(x), images.mT).mT.reshape(len(x), *shape)


def _strips(height: int, width: int, turns: Tensor, bins: int) -> Tensor:
    """The areas of pixels in strips, a sparse matrix (angles x bins, H x W).

    A pixel's shadow is the convolution of two boxes, as wide as cosine and sine of the angle.
    """
    rows, columns = (torch.arange(n).double() - (n - 1) / 2 for n in (height, width))
    cos, sin = turns.cos()[:, None, None], turns.sin()[:, None, None]
    places = (cos * columns + sin * rows[:, None] + bins / 2).flatten(1)[:, None]  # (angles, 1, n)
    wide, narrow = (side.abs().clamp(min=1e-7).flatten(1)[:, None] for side in (cos, sin))

    def below(t: Tensor) -> Tensor:
        """The area of a pixel below t, from its centre."""
        ends = [s * wide + u * narrow for s, u in ((1, 1), (-1, -1), (1, -1), (-1, 1))]
        up, down, *across = (0.5 * (t + end / 2).clamp(min=0).square() for end in ends)
        return (up + down - across[0] - across[1]) / (wide * narrow)

    first = places.floor().long() - 1
    strips = first + torch.arange(3)[:, None]  # of a shadow at most sqrt(2) wide
    areas = below(strips + 1 - places) - below(strips - places)
    angle = torch.arange(len(turns))[:, None, None]
    pixel = torch.arange(height * width).expand_as(strips)
    inside = (areas > 1e-8) & (strips >= 0) & (strips < bins)
    index = torch.stack([(angle * bins + strips)[inside], pixel[inside]])
    size = len(turns) * bins, height * width
    return torch.sparse_coo_tensor(index, areas[inside], size, check_invariants=True).coalesce()
