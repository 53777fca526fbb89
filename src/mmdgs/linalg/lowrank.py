"""A covariance known along a few directions by products, and by a simple one, the rest, elsewhere.

k products W = C V with orthonormal directions V (d x k) say all of C along V: with T = V' W the law
of x is

    x = W T^-1 V' x + e        e independent of V' x, of the covariance C - W T^-1 W'

Only the covariance of e, which has no part along V, is not known. It is taken from the rest R, a
covariance that is diagonal in pixels or in cosines:

    C^ = W T^-1 W' + R - R V (V' R V)^-1 V' R

whose last part is the covariance of R given V' x. C^ V = W holds exactly, C^ is positive definite
where T and R are, and at k = d it is C. (As an update of R it is that of Broyden, Fletcher,
Goldfarb and Shanno, in blocks.) Ritz pairs with a projection of R to the complement of V would
leave out the correlations between V and the rest, which are the residuals of the pairs and are
known.

With B = a R + b I all that is asked of a C^ + b I comes from the eigenpairs (values, Q) of a matrix
of 2 k columns,

    a C^ + b I = B^1/2 (I + Q diag(values - 1) Q') B^1/2
    log det    = log det B + sum log values
    root         B^1/2 (I + Q diag(sqrt(values) - 1) Q')       d normals; the signs of Q cancel
    inverse      B^-1/2 (I + Q diag(1 / values - 1) Q') B^-1/2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from mmdgs.linalg.lanczos import Product, without
from mmdgs.linalg.operators import (
    Diagonal,
    Implicit,
    einsum,
    matmul,
    raise_non_finite,
    require_room_for_dense,
)
from mmdgs.linalg.repair import error_floor
from mmdgs.linalg.spectral import Spectral
from mmdgs.randomness import Streams, randn

Rest = Diagonal | Spectral
Pairs = tuple[Tensor, Tensor]
"""Directions V and their images C V, (k, B, d) each; a direction of zeros counts for nothing."""

SLACK = 10.0
"""How much larger |C| may be than along the directions and in the rest before an image is cut."""
VANISHED = 1e-5
"""The share of a direction left without its part along others below which it is none."""


@dataclass(frozen=True)
class LowRank(Implicit):
    """a C^ + b I for vectors `like` (B, ...); `pairs` is asked when it is first needed.

    `count` products may be spent: `bare` has spent none, and `extended` adds a direction. Unless
    `fixed` says that all is to be of one covariance, a draw spends them along itself (`for_draw`):
    it is then nearer to one of C, and not quite of the density that `logdet` and `mahalanobis`
    have. A direction along which the variance is below `floor`, or with a `share` below that of the
    rule of repair.py, is a network's error: it is dropped, and left to the rest.
    """

    rest: Rest
    like: Tensor
    product: Product
    count: int
    pairs: Callable[[], Pairs]
    floor: float
    share: float = 0.0
    fixed: bool = True
    scale: float = 1.0
    shift: float = 0.0

    @classmethod
    def along(
        cls,
        rest: Rest,
        start: Tensor,
        product: Product,
        count: int,
        floor: float,
        share: float = 0.0,
        fixed: bool = True,
    ) -> LowRank:
        """With the Krylov space of a start vector (B, ...), which nears large variances."""
        pairs = cache(lambda: krylov_pairs(product, start.flatten(1), count))
        return cls(rest, start, product, count, pairs, floor, share, fixed)

    @property
    def base(self) -> Rest:
        """a R + b I."""
        return self.rest.affine(self.scale, self.shift)

    @property
    def bare(self) -> LowRank:
        """The same without a direction: the rest alone."""
        none = self.like.new_zeros(0, len(self.like), self.dim)
        return replace(self, pairs=lambda: (none, none))

    def extended(self, direction: Tensor) -> LowRank:
        """With one more direction (B, ...), for one product; one that lies in V is dropped."""
        v, w = self.pairs()
        new = orthonormal(direction.flatten(1).to(v.dtype), v)[None]
        image = self.product(new)
        raise_non_finite("denoising covariance", image[0])
        pairs = torch.cat([v, new]), torch.cat([w, image])
        return replace(self, pairs=lambda: pairs, fixed=True)

    def for_draw(self, z: Tensor) -> LowRank:
        """With directions along the draw of z (B, ...): B^-1/2 z, then what products show missing.

        Along the first, C^ v = C v makes B^-1/2 C^ B^-1/2 z exact, whose root is what a draw needs.
        """
        cov, direction = self.bare, self._power(-0.5).apply(z)
        for _ in range(self.count):
            cov = cov.extended(direction)
            v, w = (vectors[-1].reshape(z.shape).to(z.dtype) for vectors in cov.pairs())
            direction = self._power(-1.0).apply(self.scale * w + self.shift * v)
        return cov

    def _power(self, power: float) -> Rest:
        """A power of B."""
        return type(self.rest)(self.base.variances.pow(power))

    @cached_property
    def _believed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """V and W (k, B, d) with a diagonal T, its values (B, k), the fraction dropped (B,)."""
        v, w = (vectors.double() for vectors in self.pairs())
        t = torch.einsum("kbd,lbd->bkl", v, w)
        # A direction of zeros is kept from being turned into others by a value of its own.
        apart = torch.where((v == 0).all(-1).mT, 1 + 2 * t.abs().sum((1, 2))[:, None], 0.0)
        values, turn = torch.linalg.eigh(0.5 * (t + t.mT) + torch.diag_embed(apart))
        v, w = (torch.einsum("kbd,bkl->lbd", vectors, turn) for vectors in (v, w))
        none = v.norm(dim=-1).mT < 0.5
        inside = torch.einsum("lbd,kbd->lkb", v, w)
        w = w - torch.einsum("lkb,lbd->kbd", inside, v)  # what leads out of V
        floor = error_floor(values, self.floor, self.share) if self.share else self.floor
        small = (values < floor) & ~none
        dropped = small.double().sum(1) / (~none).sum(1).clamp(min=1)
        none = none | small
        values = torch.where(none, 1.0, values)
        # C positive: |C v|^2 <= |C| v' C v. A longer image is a network's error.
        rest = self.rest.variances.flatten(1).amax(1, keepdim=True).double()
        norm = torch.cat([torch.where(none, 0.0, values), rest.expand(len(values), 1)], 1)
        longest = (SLACK * norm.amax(1, keepdim=True) * values).sqrt()
        cut = (longest / w.norm(dim=-1).mT.clamp(min=torch.finfo(w.dtype).tiny)).clamp(max=1)
        w = values.mT[..., None] * v + cut.mT[..., None] * w
        kept = (~none).mT[..., None]
        return kept * v, kept * w, values, dropped

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """values (B, n) and Q (n, B, d), n = 2 k at the most."""
        v, w, variances, _ = self._believed
        k, like = len(v), self.like
        if not k:
            return like.new_zeros(len(like), 0), like.new_zeros(0, len(like), self.dim)
        across = _each(type(self.rest)(self.rest.variances.double()), v, like.shape)
        inner = torch.einsum("kbd,lbd->bkl", v, across)
        none = inner.diagonal(dim1=1, dim2=2) == 0
        core = inner.new_zeros(len(inner), 2 * k, 2 * k)
        core[:, :k, :k] = -torch.linalg.inv(inner + torch.diag_embed(none.to(inner)))
        core[:, k:, k:] = torch.diag_embed(1 / variances)
        white = _each(self._power(-0.5), torch.cat([across, w]), like.shape)
        basis, triangle = torch.linalg.qr(white.permute(1, 2, 0))
        inside = self.scale * triangle @ core @ triangle.mT
        change, turn = torch.linalg.eigh(0.5 * (inside + inside.mT))
        values = (1 + change).clamp(min=torch.finfo(like.dtype).eps)
        return values.to(like.dtype), (basis @ turn).permute(2, 0, 1).to(like.dtype)

    @cached_property
    def _factor(self) -> Tensor:
        """F (n, B, d): a C^ + b I = B + F diag(values - 1) F'."""
        return _each(self._power(0.5), self._eigen[1], self.like.shape)

    @property
    def factor(self) -> tuple[Tensor, Tensor]:
        """F (n, B, ...) and c (B, n): this is `base` + F diag(c) F'."""
        return self._factor.reshape(-1, *self.like.shape), self._eigen[0] - 1

    @property
    def inverse_factor(self) -> tuple[Tensor, Tensor]:
        """G (n, B, ...) and c (B, n): the inverse is that of `base` + G diag(c) G'."""
        values, q = self._eigen
        factor = _each(self._power(-0.5), q, self.like.shape)
        return factor.reshape(-1, *self.like.shape), 1 / values - 1

    def apply(self, v: Tensor) -> Tensor:
        along = einsum("nbd,bd->bn", self._factor, v.flatten(1)) * (self._eigen[0] - 1)
        return self.base.apply(v) + einsum("nbd,bn->bd", self._factor, along).reshape(v.shape)

    def root(self, z: Tensor) -> Tensor:
        return self.root_with_info(z)[0]

    def root_with_info(self, z: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`root(z)`, and the fraction of the directions that were dropped."""
        if not self.fixed:
            return self.for_draw(z).root_with_info(z)
        values, q = self._eigen
        along = einsum("nbd,bd->bn", q, z.flatten(1)) * (values.sqrt() - 1)
        low = einsum("nbd,bn->bd", self._factor, along).reshape(z.shape)
        return self.base.root(z) + low, {"dropped": self._believed[3].to(z.dtype)}

    def variance_along(self, u: Tensor) -> Tensor:
        squares = einsum("nbd,mbd->mbn", self._factor, u.flatten(2)).square() * (self._eigen[0] - 1)
        return self.base.variance_along(u) + squares.sum(-1)

    def diagonal(self) -> Tensor:
        low = einsum("nbd,bn->bd", self._factor.square(), self._eigen[0] - 1)
        return self.base.diagonal() + low.reshape(self.like.shape)

    def dense(self) -> Tensor:
        require_room_for_dense(self.like)
        f = self._factor.movedim(0, 2)  # (B, d, n)
        low = matmul(f * (self._eigen[0] - 1)[:, None], f.mT)
        return self.base.dense().expand(len(f), -1, -1) + low

    def mahalanobis(self, r: Tensor) -> Tensor:
        values, q = self._eigen
        white = self._power(-0.5).apply(r)
        low = einsum("nbd,bd->bn", q, white.flatten(1)).square() * (1 / values - 1)
        return white.square().flatten(1).sum(1) + low.sum(1)

    def logdet(self) -> Tensor:
        return self.base.logdet() + self._eigen[0].log().sum(1)


def _each(cov: Rest, v: Tensor, shape: torch.Size) -> Tensor:
    """C v for each of v (n, B, d), for vectors of `shape` (B, ...)."""
    return torch.stack([cov.apply(u.reshape(shape)).flatten(1) for u in v]) if len(v) else v


def orthonormal(vector: Tensor, basis: Tensor) -> Tensor:
    """A unit vector (B, d) orthogonal to the basis (k, B, d); zero where nothing is left of it."""
    size = vector.norm(dim=-1, keepdim=True)
    vector = torch.where(size > 0, vector / size, 0.0)
    vector = without(without(vector, basis), basis)
    left = vector.norm(dim=-1, keepdim=True)
    # Once more: what is left of a vector that nearly lay in the basis may be mostly rounding.
    vector = without(torch.where(left > VANISHED, vector / left, 0.0), basis)
    left = vector.norm(dim=-1, keepdim=True)
    return torch.where(left > 0.5, vector / left, 0.0)


@torch.no_grad()
def krylov_pairs(product: Product, start: Tensor, count: int) -> Pairs:
    """An orthonormal basis of start, C start, ... (B, d), of `count` vectors, and its images.

    Where the space is invariant it goes on with vectors that are the same in every row and at every
    call.
    """
    rows, d = start.shape
    vector = start.to(torch.promote_types(start.dtype, torch.float32))
    basis = images = vector.new_zeros(0, rows, d)
    for j in range(min(count, d)):
        new = orthonormal(vector, basis)
        gone = new.norm(dim=-1) == 0
        if bool(gone.any()):
            other = randn(new.shape, new, Streams([0] * rows, rows, purpose=f"low rank {j}"))
            new = torch.where(gone[:, None], orthonormal(other, basis), new)
        image = product(new[None])
        raise_non_finite("denoising covariance", image[0])
        basis, images = torch.cat([basis, new[None]]), torch.cat([images, image])
        vector = image[0]
    return basis, images
