"""Principal components of a covariance: its largest eigenvalues and their eigenvectors.

Exact where the covariance is a matrix, a diagonal or diagonal in cosines. Where it is known by its products, by block
Lanczos with full orthogonalisation: with V the basis so far and W = C V, both kept,

    Rayleigh-Ritz   V' W = Y diag(values) Y',   directions V Y,   residuals |W y - value V y| / value
    next block      W of the last block, orthogonal to V (twice), and random vectors where it vanishes
    in the end      a random vector and its space, which must not change what was found: equal variances would

so the residuals are those of the pairs themselves, and cost no product. An eigenvalue is off by at most its residual,
and far less where it stands apart. A region P has the covariance P C P'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.operators import Covariance, Dense, Diagonal, raise_non_finite, require_room
from mmdgs.linalg.spectral import Spectral, from_cosines
from mmdgs.randomness import Streams, randn

TOLERANCE = 0.01
BLOCK, CHECK = 1, 3
"""Start vectors, and products with a new random vector by which it is checked that no component was missed.

One start vector takes the fewest products, but finds only one direction of several with equal variances."""
MOST_A_COMPONENT = 40
"""Products for each component after which the search ends unless told otherwise, and the residuals say how far it came.
"""
VANISHED = 100.0
"""Roundings of the largest image below which a new direction is none."""

Product = Callable[[Tensor], Tensor]
Region = tuple[int, int, int, int]


@dataclass(frozen=True)
class Components:
    """The k largest variances of a batch of covariances, largest first, and unit vectors along which they lie.

    `directions` are of the shape of x, and zero outside the region where there is one. A residual is |C v - variance v|
    / variance; it is 0 where the components are exact. `products` is how many products with C each row took.
    """

    variances: Float[Tensor, "batch k"]
    directions: Float[Tensor, "batch k ..."]
    residuals: Float[Tensor, "batch k"]
    products: int = 0

    @property
    def stds(self) -> Float[Tensor, "batch k"]:
        """Standard deviations along the directions."""
        return self.variances.clamp(min=0).sqrt()

    def along(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch k"]:
        """The coordinates of x (B, ...) along the directions, (B, k)."""
        return torch.einsum("bd,bkd->bk", x.flatten(1), self.directions.flatten(2))


def checked_region(region: Region | None, shape: torch.Size) -> Region | None:
    """A region (x, y, width, height) of images (..., H, W), which must lie inside."""
    if region is None:
        return None
    if len(shape) < 2:
        raise UsageError(f"a region is one of an image (..., height, width), and the data have shape {tuple(shape)}")
    height, width = shape[-2:]
    if len(region) != 4 or not all(isinstance(one, int) for one in region):
        raise UsageError(f"a region is four whole numbers x, y, width, height, got {region!r}")
    x, y, w, h = region
    if x < 0 or y < 0 or w < 1 or h < 1 or x + w > width or y + h > height:
        raise UsageError(
            f"the region {x},{y},{w},{h} (x,y,width,height) does not lie within the image, which is {width} wide and "
            f"{height} high"
        )
    return region


def inside(x: Tensor, region: Region) -> Tensor:
    """The part of images (..., H, W) in a region."""
    left, top, width, height = region
    return x[..., top : top + height, left : left + width]


def principal_components(
    cov: Covariance,
    like: Tensor,
    k: int,
    region: Region | None = None,
    *,
    tolerance: float = TOLERANCE,
    most: int | None = None,
) -> Components:
    """The k largest components of a covariance of vectors `like` (B, ...); `most` bounds the products."""
    region = checked_region(region, like.shape[1:])
    part = like if region is None else inside(like, region)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= part[0].numel():
        raise UsageError(f"the number of components must be from 1 to {part[0].numel()}, got {k!r}")
    if isinstance(cov, Krylov) and cov.exact:
        cov = cov.as_dense()
    found = _exact(cov, like, k, region)
    if found is None:
        wide = _widened(like, region)
        products = _products(cov, like)
        narrow = (lambda v: v) if region is None else (lambda v: inside(v, region))

        def restricted(v: Tensor) -> Tensor:
            return narrow(products(wide(v.reshape(-1, *part.shape)))).reshape(v.shape)

        found = block_lanczos(restricted, part.flatten(1), k, tolerance=tolerance, most=most)
    directions = found.directions.reshape(-1, k, *part.shape[1:])
    if region is not None:
        directions = _widened(like, region)(directions.transpose(0, 1)).transpose(0, 1)
    return Components(found.variances, _signed(directions), found.residuals, found.products)


def _products(cov: Covariance, like: Tensor) -> Product:
    """C v for v (n, B, ...)."""
    if isinstance(cov, Krylov):
        # The largest eigenvalues are those that no floor lifts.
        return lambda v: (cov.scale * cov.product(v.flatten(2)) + cov.shift * v.flatten(2)).reshape(v.shape)
    return lambda v: torch.stack([cov.apply(one) for one in v])


def _widened(like: Tensor, region: Region | None) -> Product:
    """Vectors of a region (n, B, ...) as those of the whole, with zeros around."""
    if region is None:
        return lambda v: v

    def wide(v: Tensor) -> Tensor:
        whole = v.new_zeros(len(v), *like.shape)
        inside(whole, region).copy_(v)
        return whole

    return wide


def _exact(cov: Covariance, like: Tensor, k: int, region: Region | None) -> Components | None:
    """Components of a covariance whose eigenvectors are known; None where products have to find them."""
    rows = len(like)
    if isinstance(cov, Dense):
        if region is None:
            values, vectors = cov.values, cov.vectors
        else:
            places = torch.arange(like[0].numel(), device=like.device).reshape(like.shape[1:])
            kept = inside(places, region).flatten()
            part = Dense.from_matrix(cov.dense()[:, kept][:, :, kept], like.shape[1:])
            values, vectors = part.values, part.vectors
        values, order = values.topk(k, dim=1)
        directions = vectors.mT.gather(1, order[..., None].expand(-1, -1, vectors.shape[1]))
    elif isinstance(cov, Diagonal) or (isinstance(cov, Spectral) and region is None):
        variances = cov.variances.expand_as(like)
        variances = variances if region is None else inside(variances, region)
        values, order = variances.flatten(1).topk(k, dim=1)
        directions = torch.zeros(rows, k, variances[0].numel(), dtype=like.dtype, device=like.device)
        directions.scatter_(2, order[..., None], 1.0)
        if isinstance(cov, Spectral):
            directions = from_cosines(directions.reshape(-1, k, *like.shape[1:]), lead=2).flatten(2)
    else:
        return None
    return Components(values, directions, torch.zeros_like(values))


@torch.no_grad()
def block_lanczos(
    product: Product,
    like: Tensor,
    k: int,
    *,
    tolerance: float = TOLERANCE,
    most: int | None = None,
    block: int = BLOCK,
    told: Callable[[int, Tensor], None] | None = None,
) -> Components:
    """The k largest eigenpairs of symmetric C by products of v (n, B, d); `like` (B, d) gives shape, dtype and device.

    It ends when all residuals are below the tolerance, after `most` products, or with the whole space. Start vectors
    are the same at every call. `told(products, residuals)` is called after each block. Rows go on independently, but
    all until the last is done.
    """
    if not tolerance > 0:
        raise ValueError(f"the tolerance must be positive, got {tolerance}")
    space = _Space(product, like.detach(), min(like.shape[1], max(k + 1, most or MOST_A_COMPONENT * k)))
    new = space.random(block)
    checked, before = 0, like.new_zeros(len(like), k)  # the product that ends the check, and the variances before it
    while True:
        new = space.extended(new)
        if space.used < k:
            continue
        values, directions, errors = space.ritz(k)
        residuals = errors.norm(dim=-1) / values.abs().clamp(min=torch.finfo(values.dtype).tiny)
        if told is not None:
            told(space.used, residuals)
        good = bool((residuals <= tolerance).all())
        same = bool(((values - before).abs() <= tolerance * values.abs()).all())
        if space.full or (checked and space.used >= checked and good and same):
            return Components(values, directions, residuals, space.used)
        if space.used < checked:
            continue  # along the new vector's own space
        if good:
            checked, before, new = space.used + CHECK, values, space.random(1)
        elif checked:  # the basis holds several spaces: go on where the errors are largest
            order = residuals.argsort(1, descending=True)[:, :block, None].expand(-1, -1, errors.shape[2])
            new = errors.gather(1, order).transpose(0, 1)


class _Space:
    """An orthonormal basis V (m, B, d), m up to `most`, and its images C V."""

    def __init__(self, product: Product, like: Tensor, most: int) -> None:
        dtype = torch.promote_types(like.dtype, torch.float32)
        rows, d = like.shape
        require_room(
            2 * most * rows * d * dtype.itemsize,
            like.device,
            f"{most} vectors and their images of {rows} x {d} numbers",
            "use fewer products (most=), or fewer rows at a time",
        )
        self._product, self._streams = product, Streams(0, rows, purpose="components")
        self._basis, self._images = (torch.empty(most, rows, d, dtype=dtype, device=like.device) for _ in range(2))
        self._largest = torch.zeros(rows, dtype=dtype, device=like.device)
        self.used = 0

    @property
    def full(self) -> bool:
        return self.used == len(self._basis)

    def random(self, count: int) -> Tensor:
        """Random vectors (count, B, d)."""
        _, rows, d = self._basis.shape
        return randn((rows, count, d), self._basis, self._streams).transpose(0, 1)

    def extended(self, new: Tensor) -> Tensor:
        """Take new vectors (n, B, d) into the basis, as many as there is room for; returns their images."""
        new = _orthonormal(new[: len(self._basis) - self.used], self._basis[: self.used], self._largest, self._streams)
        own = slice(self.used, self.used + len(new))
        self._basis[own] = new
        images = self._images[own] = self._product(new)
        raise_non_finite("denoising covariance", images.transpose(0, 1))
        self.used = own.stop
        self._largest = torch.maximum(self._largest, images.norm(dim=-1).amax(0))
        return self._images[own]

    def ritz(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k largest Ritz values (B, k) and vectors (B, k, d), and what is left of each, C v - value v."""
        basis, images = self._basis[: self.used], self._images[: self.used]
        matrix = torch.einsum("mbd,nbd->bmn", basis, images).double()
        values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
        values, vectors = values[:, -k:].flip(1).to(basis.dtype), vectors[..., -k:].flip(2).to(basis.dtype)
        directions, pairs = (torch.einsum("mbd,bmk->bkd", one, vectors) for one in (basis, images))
        return values, directions, pairs - values[..., None] * directions


def _orthonormal(new: Tensor, basis: Tensor, largest: Tensor, streams: Streams) -> Tensor:
    """Vectors (n, B, d) made orthonormal and orthogonal to the basis; those that vanish become random ones."""
    least = VANISHED * torch.finfo(new.dtype).eps * largest
    done = basis
    for vector in new:
        vector = _without(vector, done)
        norm = vector.norm(dim=-1)
        gone = norm <= least
        if bool(gone.any()):
            other = _without(randn(vector.shape, vector, streams), done)
            vector = torch.where(gone[:, None], other, vector)
            norm = vector.norm(dim=-1)
        # Once more after the division: what is left of a long vector may be mostly rounding.
        vector = _without(vector / norm[:, None], done)
        done = torch.cat([done, (vector / vector.norm(dim=-1, keepdim=True))[None]])
    return done[len(basis) :]


def _without(vector: Tensor, basis: Tensor) -> Tensor:
    """A vector (B, d) less its part in the basis (m, B, d), twice."""
    for _ in range(2):
        vector = vector - torch.einsum("mb,mbd->bd", torch.einsum("mbd,bd->mb", basis, vector), basis)
    return vector


def _signed(directions: Tensor) -> Tensor:
    """Directions (B, k, ...) whose largest number is positive: else rounding decides."""
    flat = directions.flatten(2)
    peaks = flat.gather(2, flat.abs().argmax(2, keepdim=True))
    return torch.where(peaks < 0, -flat, flat).reshape(directions.shape)
