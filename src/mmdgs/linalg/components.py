"""Principal components of a covariance: its largest eigenvalues and their eigenvectors.

Exact where the covariance is a matrix, a diagonal or diagonal in cosines. Where it is known by its
products, by Lanczos' method with full orthogonalisation: with V the basis so far and W = C V, both
kept,

    Rayleigh-Ritz   V' W = Y diag(values) Y',   directions V Y,   residuals |W y - v V y| / v
    next vector     the last one's image, orthogonal to V (twice); a random one where it vanishes
    in the end      a random vector and its space, which must not change the pairs: a space of one
                    start vector holds only one direction of several with equal variances

so the residuals are those of the pairs themselves, and cost no product. An eigenvalue is off by at
most its residual, and far less where it stands apart. A region P has the covariance P C P'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.lanczos import Product, without
from mmdgs.linalg.operators import Covariance, Dense, Diagonal, raise_non_finite, require_room
from mmdgs.linalg.spectral import Spectral, from_cosines
from mmdgs.randomness import Streams, randn

TOLERANCE = 0.01
CHECK = 3
"""Products with a new random vector by which it is checked that no component was missed."""
MOST_A_COMPONENT = 40
"""Products for each component after which the search ends; the residuals say how far it came."""
VANISHED = 100.0
"""Roundings of the largest image below which a new direction is none."""

Region = tuple[int, int, int, int]


@dataclass(frozen=True)
class Components:
    """The k largest variances of a batch of covariances, largest first, and their directions.

    `directions` are unit vectors of the shape of x, and zero outside the region where there is one.
    A residual is |C v - variance v| / variance; it is 0 where the components are exact. `products`
    is how many products with C each row took.
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
        raise UsageError(f"a region needs images (..., height, width), got shape {tuple(shape)}")
    if len(region) != 4 or not all(isinstance(number, int) for number in region):
        raise UsageError(f"a region is four whole numbers x, y, width, height, got {region!r}")
    height, width = shape[-2:]
    x, y, w, h = region
    if x < 0 or y < 0 or w < 1 or h < 1 or x + w > width or y + h > height:
        raise UsageError(
            f"the region {x},{y},{w},{h} (x,y,width,height) does not lie within the image, "
            f"which is {width} wide and {height} high"
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
    """The k largest components for vectors `like` (B, ...); `most` bounds the products."""
    region = checked_region(region, like.shape[1:])
    lead, part = like.ndim - 1, like if region is None else inside(like, region)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= part[0].numel():
        raise UsageError(f"the number of components must be from 1 to {part[0].numel()}, got {k!r}")

    def narrow(v: Tensor) -> Tensor:
        return v if region is None else inside(v, region)

    def wide(v: Tensor) -> Tensor:
        if region is None:
            return v
        whole = v.new_zeros(*v.shape[:-lead], *like.shape[1:])
        inside(whole, region).copy_(v)
        return whole

    def product(v: Tensor) -> Tensor:
        whole = wide(v.reshape(-1, *part.shape))
        # The largest eigenvalues are those that no floor lifts.
        image = (
            cov.unlifted(whole)
            if isinstance(cov, Krylov)
            else torch.stack([cov.apply(vector) for vector in whole])
        )
        return narrow(image).reshape(v.shape)

    if isinstance(cov, Krylov) and cov.exact:
        cov = cov.as_dense()
    pairs = _exact(cov, like, k, narrow)
    if pairs is None:
        pairs = largest_pairs(product, part.flatten(1), k, tolerance=tolerance, most=most)
    directions = wide(pairs.directions.reshape(-1, k, *part.shape[1:]))
    return Components(pairs.variances, _signed(directions), pairs.residuals, pairs.products)


def _exact(cov: Covariance, like: Tensor, k: int, narrow: Product) -> Components | None:
    """Components where the eigenvectors are known; None where products have to find them."""
    whole = narrow(like).shape == like.shape
    if isinstance(cov, Dense):
        if not whole:
            places = torch.arange(like[0].numel(), device=like.device).reshape(like.shape[1:])
            kept = narrow(places).flatten()
            cov = Dense.from_matrix(cov.dense()[:, kept][:, :, kept], like.shape[1:])
        values, order = cov.values.topk(k, dim=1)
        directions = cov.vectors.mT.gather(1, order[..., None].expand(-1, -1, cov.vectors.shape[1]))
    elif isinstance(cov, Diagonal) or (isinstance(cov, Spectral) and whole):
        variances = narrow(cov.variances.expand_as(like)).flatten(1)
        values, order = variances.topk(k, dim=1)
        directions = like.new_zeros(len(like), k, variances.shape[1])
        directions.scatter_(2, order[..., None], 1.0)
        if isinstance(cov, Spectral):
            directions = from_cosines(directions.reshape(-1, k, *like.shape[1:]), lead=2).flatten(2)
    else:
        return None
    return Components(values, directions, torch.zeros_like(values))


@torch.no_grad()
def largest_pairs(
    product: Product, like: Tensor, k: int, *, tolerance: float = TOLERANCE, most: int | None = None
) -> Components:
    """The k largest eigenpairs of symmetric C, by products of v (n, B, d), for rows `like` (B, d).

    It ends when all residuals are below the tolerance, after `most` products, or with the whole
    space. Start vectors are the same at every call. Rows go on independently, but all until the
    last is done.
    """
    if not tolerance > 0:
        raise ValueError(f"the tolerance must be positive, got {tolerance}")
    rows, d = like.shape
    dtype = torch.promote_types(like.dtype, torch.float32)
    most = min(d, max(k + 1, most or MOST_A_COMPONENT * k))
    what = f"{most} vectors and their images of {rows} x {d} numbers"
    advice = "use fewer products (most=), or fewer rows at a time"
    require_room(2 * most * rows * d * dtype.itemsize, like.device, what, advice)
    all_vectors, all_images = (
        torch.empty(most, rows, d, dtype=dtype, device=like.device) for _ in range(2)
    )
    streams = Streams(0, rows, purpose="components")

    def random() -> Tensor:
        return randn((rows, d), all_vectors, streams)

    vector, largest = random(), all_vectors.new_zeros(rows)
    # The product that ends the check, and the variances before it.
    checked, before = 0, like.new_zeros(rows, k)
    for used in range(1, most + 1):
        basis, images = all_vectors[:used], all_images[:used]
        basis[-1] = _next(vector, basis[:-1], largest, random)
        images[-1] = product(basis[-1:])[0]
        vector = images[-1]
        raise_non_finite("denoising covariance", vector)
        largest = torch.maximum(largest, vector.norm(dim=-1))
        if used < k:
            continue
        matrix = torch.einsum("mbd,nbd->bmn", basis, images).double()
        values, turn = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
        values, turn = values[:, -k:].flip(1).to(dtype), turn[..., -k:].flip(2).to(dtype)
        directions, pairs = (torch.einsum("mbd,bmk->bkd", v, turn) for v in (basis, images))
        errors = pairs - values[..., None] * directions
        residuals = errors.norm(dim=-1) / values.abs().clamp(min=torch.finfo(dtype).tiny)
        good = bool((residuals <= tolerance).all())
        same = bool(((values - before).abs() <= tolerance * values.abs()).all())
        if checked and used >= checked and good and same:
            break
        if used < checked:
            continue  # along the new vector's own space
        if good:
            checked, before, vector = used + CHECK, values, random()
        elif checked:  # the basis holds several spaces: go on where the error is largest
            worst = residuals.argsort(1, descending=True)[:, :1, None].expand(-1, -1, d)
            vector = errors.gather(1, worst)[:, 0]
    return Components(values, directions, residuals, used)


def _next(vector: Tensor, basis: Tensor, largest: Tensor, random: Callable[[], Tensor]) -> Tensor:
    """A vector (B, d) made orthonormal to the basis, or a random one where nothing is left."""
    vector = without(without(vector, basis), basis)
    norm = vector.norm(dim=-1)
    gone = norm <= VANISHED * torch.finfo(vector.dtype).eps * largest
    if bool(gone.any()):
        vector = torch.where(gone[:, None], without(without(random(), basis), basis), vector)
        norm = vector.norm(dim=-1)
    # Once more after the division: what is left of a long vector may be mostly rounding.
    vector = without(without(vector / norm[:, None], basis), basis)
    return vector / vector.norm(dim=-1, keepdim=True)


def _signed(directions: Tensor) -> Tensor:
    """Directions (B, k, ...) whose largest number is positive: else rounding decides."""
    flat = directions.flatten(2)
    peaks = flat.gather(2, flat.abs().argmax(2, keepdim=True))
    return torch.where(peaks < 0, -flat, flat).reshape(directions.shape)
