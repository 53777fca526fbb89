"""Functions of a covariance C that is known by its products alone: Lanczos' method, and an operator made of it.

k products with C, from a start vector z, give an orthonormal basis V (k, d) of the Krylov space z, Cz, ..., C^(k-1) z
and the tridiagonal T = V C V', whose eigenvalues are called Ritz values. Then

    f(C) z       ~  ||z|| V' f(T) e_1              sampling: f = sqrt (Chow and Saad, 2014)
    z' f(C) z    ~  ||z||^2 e_1' f(T) e_1          Gauss quadrature, right for polynomials f of degree 2k - 1
    tr f(C)      ~  the mean of s' f(C) s          signs s: stochastic Lanczos quadrature (Ubaru, Chen and Saad, 2017)

all exact where k reaches the dimension of an invariant space that holds z, so at k = d at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.linalg.operators import Covariance, Dense, floored, raise_non_finite, require_room, require_room_for_dense

Product = Callable[[Tensor], Tensor]
"""n products for each of B rows: v (n, B, d) -> C v (n, B, d). It cuts n to what its memory holds."""

Function = Callable[[Tensor], Tensor]

BASIS_NUMBERS = 1 << 24
"""How many numbers the bases of several start vectors a row may hold at once; more go through in chunks."""

BREAKDOWN = 50.0
"""A residual below so many roundings of C is taken for zero: the space is invariant.

A short residual is made a unit vector, and the roundings in it grow by as much: the next one is measured against
that. Rounding so counted left at most 19 where zero was due. One missed costs products only."""


@dataclass(frozen=True)
class KrylovSpace:
    """Krylov spaces of n start vectors for each of B rows, and C seen from inside them.

    basis (k, n, B, d); T by its diagonal and its couplings, (n, B, k) each: the last coupling leads out of the
    space. A space may be of a smaller dimension than k, `size` (n, B): its basis then ends in zeros, and a coupling
    of zero cuts off the rest of T. `norm` (n, B) is that of the start vectors.
    """

    basis: Tensor
    diagonal: Tensor
    coupling: Tensor
    size: Tensor
    norm: Tensor

    def below(self, floor: float) -> Tensor:
        """The fraction of Ritz values below a floor, (n, B)."""
        values = torch.linalg.eigvalsh(tridiagonal(self.diagonal, self.coupling[..., :-1]))
        foreign = (self.diagonal.shape[-1] - self.size) * (self.diagonal[..., 0] < floor)  # what stands beyond `size`
        return ((values < floor).sum(-1) - foreign) / self.size.clamp(min=1)

    def apply(self, f: Function) -> Tensor:
        """f(C) z, (n, B, d)."""
        inner = (_first_column(f, self.diagonal, self.coupling[..., :-1]) * self.norm[..., None]).to(self.basis.dtype)
        return torch.einsum("nbk,knbd->nbd", inner, self.basis)

    def quadratic(self, f: Function) -> Tensor:
        """z' f(C) z, (n, B)."""
        return self.norm.square() * _first_column(f, self.diagonal, self.coupling[..., :-1])[..., 0]

    def error(self, f: Function) -> Tensor:
        """An estimate of ||error|| / ||f(C) z|| for `apply`, (n, B); zero where the space is invariant.

        What more steps would change if T went on as its own mirror image, after Eshghi and Reichel (2021,
        "Estimating the error in matrix function approximations"); the larger of this step's and the last one's,
        since spectra with a gap make every other step idle. An estimate, not a bound.
        """
        k = self.diagonal.shape[-1]
        found = [self._mirrored(f, steps) for steps in range(max(1, k - 1), k + 1)]
        return torch.where(self.coupling[..., -1] == 0, 0.0, torch.stack(found).amax(0))

    def _mirrored(self, f: Function, steps: int) -> Tensor:
        diagonal, coupling = self.diagonal[..., :steps], self.coupling[..., :steps]
        short = _first_column(f, diagonal, coupling[..., :-1])
        mirrored = torch.cat([coupling, coupling[..., :-1].flip(-1)], -1)
        long = _first_column(f, torch.cat([diagonal, diagonal.flip(-1)], -1), mirrored)
        return (long - functional.pad(short, (0, steps))).norm(dim=-1) / long.norm(dim=-1)


def tridiagonal(diagonal: Tensor, coupling: Tensor) -> Tensor:
    """Symmetric tridiagonal matrices (..., k, k) from (..., k) and (..., k - 1)."""
    return torch.diag_embed(diagonal) + torch.diag_embed(coupling, 1) + torch.diag_embed(coupling, -1)


def _first_column(f: Function, diagonal: Tensor, coupling: Tensor) -> Tensor:
    """f(T) e_1, (..., k)."""
    values, vectors = torch.linalg.eigh(tridiagonal(diagonal, coupling))
    return (vectors @ (f(values) * vectors[..., 0, :])[..., None])[..., 0]


@torch.no_grad()
def lanczos(
    product: Product, start: Tensor, steps: int, enough: Callable[[Tensor, Tensor], bool] | None = None
) -> KrylovSpace:
    """Krylov spaces of C from start vectors (n, B, d), by `steps` products or until all are invariant.

    `enough` may end it before: it is told T so far, by its diagonal and its couplings (n, B, k).

    Every new vector is made orthogonal to all before it, twice ("twice is enough", Giraud et al., 2005): at some
    tens of steps that costs little, and without it rounding brings back what was found long ago. Rows go on
    independently; T is in float64.
    """
    start = start.to(torch.promote_types(start.dtype, torch.float32))
    tolerance = BREAKDOWN * torch.finfo(start.dtype).eps
    norm = start.norm(dim=-1)
    vector = _unit(start, norm)
    basis = start.new_zeros(steps, *start.shape)
    diagonal, coupling, alive = [], [], [norm > 0]
    largest, rounding = torch.zeros_like(norm), torch.full_like(norm, tolerance)
    for j in range(steps):
        basis[j] = vector
        image = product(vector)
        diagonal.append((image * vector).sum(-1))
        for _ in range(2):
            inside = torch.einsum("knbd,nbd->knb", basis[: j + 1], image)
            image = image - torch.einsum("knb,knbd->nbd", inside, basis[: j + 1])
        length = image.norm(dim=-1)
        largest = torch.maximum(largest, torch.maximum(diagonal[-1].abs(), length))
        going = alive[-1] & (length > rounding * largest) if j + 1 < start.shape[-1] else torch.zeros_like(alive[-1])
        length = torch.where(going | length.isnan(), length, 0.0)
        coupling.append(length)
        rounding = tolerance * (largest / length).clamp(min=1.0)
        vector = _unit(image, length)
        alive.append(going)
        if not going.any() or (enough is not None and enough(torch.stack(diagonal, -1), torch.stack(coupling, -1))):
            break
    raise_non_finite("denoising covariance", (torch.stack(diagonal) + torch.stack(coupling)).movedim(-1, 0))
    within = torch.stack(alive[:-1], -1)
    # Beyond a row's own dimension stands a number at which every f is defined: one within the spectrum.
    values = torch.where(within, torch.stack(diagonal, -1), diagonal[0][..., None]).double()
    couplings = torch.stack(coupling, -1).double()
    return KrylovSpace(basis[: len(diagonal)], values, couplings, within.sum(-1), norm.double())


def _unit(vector: Tensor, norm: Tensor) -> Tensor:
    """vector / norm, and zero where the norm is."""
    return torch.where(norm[..., None] == 0, 0.0, vector / norm[..., None])


@dataclass(frozen=True)
class Krylov(Covariance):
    """a L(C) + b I for a symmetric C known by its products; L lifts eigenvalues to at least `floor`.

    `root` and `mahalanobis` take `steps` products. `logdet` takes as many for each probe, and `diagonal` one a
    probe: signs (S, B, d) from `probes`, the same at every call. `variance_along` takes one product, in which only
    the variance itself can be lifted. Where d <= steps everything is exact, and nothing is drawn. `like` (B, ...)
    gives shape, dtype and device. The operator holds whatever the product holds (a network's graph) until dropped.
    """

    product: Product
    like: Tensor
    steps: int
    floor: float
    probes: Callable[[], Tensor] | None = None
    scale: float = 1.0
    shift: float = 0.0

    @property
    def dim(self) -> int:
        return math.prod(self.like.shape[1:])

    @property
    def least(self) -> float:
        """The smallest variance along any direction: the floor, after a L(C) + b I."""
        return self.scale * self.floor + self.shift

    @property
    def exact(self) -> bool:
        """Whether the steps reach every dimension."""
        return self.dim <= self.steps

    def diagonal(self) -> Tensor:
        """diag C: exact where d <= steps, else the mean of s * C s over the probes s, lifted to the floor."""
        if self.exact:
            return self.as_dense().diagonal()
        total, signs = torch.zeros_like(self.like).flatten(1), self._signs()
        for part in signs.split(self._at_once(1)):
            total += (part * self.product(part)).sum(0)
        variances = (total / len(signs)).clamp(min=self.floor)
        return (self.scale * variances + self.shift).reshape(self.like.shape)

    def dense(self) -> Tensor:
        return self.as_dense().dense()

    def as_dense(self) -> Dense:
        """The same covariance, formed by d products and decomposed."""
        rows, d = len(self.like), self.dim
        require_room_for_dense(rows, d, self.like.dtype, self.like.device)
        basis = torch.eye(d, dtype=self.like.dtype, device=self.like.device)
        parts = [self.product(part[:, None, :].expand(-1, rows, -1)) for part in basis.split(self._at_once(1))]
        matrix = torch.cat(parts).transpose(0, 1)
        cov = Dense.from_matrix(0.5 * (matrix + matrix.mT), self.like.shape[1:])
        lifted, _ = floored(cov.values, self.floor)
        return Dense(lifted, cov.vectors, cov.event_shape).affine(self.scale, self.shift)

    def apply(self, v: Tensor) -> Tensor:
        """C v: exact where d <= steps, else by one product, in which only the variance along v can be lifted.

        The same lift as in `variance_along`. A lift of every eigenvalue, as in `root`, would take `steps` products.
        """
        start = v.flatten(1)[None]
        if self.exact:
            return self._space(start).apply(self._of(lambda x: x))[0].reshape(v.shape).to(v.dtype)
        squares = start.square().sum(-1, keepdim=True)
        image = self.product(start)
        missing = (self.floor * squares - (start * image).sum(-1, keepdim=True)).clamp(min=0)
        image = image + torch.where(squares > 0, missing / squares, 0.0) * start
        return (self.scale * image + self.shift * start)[0].reshape(v.shape)

    def unlifted(self, v: Tensor) -> Tensor:
        """a C v + b v by one product, with nothing lifted; (B, ...)."""
        return (self.scale * self.product(v.flatten(1)[None])[0] + self.shift * v.flatten(1)).reshape(v.shape)

    def root(self, z: Tensor) -> Tensor:
        return self._space(z.flatten(1)[None]).apply(self._of(torch.sqrt))[0].reshape(z.shape).to(z.dtype)

    def root_with_info(self, z: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """C^(1/2) z, with the fraction of Ritz values that were lifted and the estimated relative error."""
        space = self._space(z.flatten(1)[None])
        f = self._of(torch.sqrt)
        info = {"repaired": space.below(self.floor), "krylov_error": space.error(f)}
        root = space.apply(f)[0].reshape(z.shape).to(z.dtype)
        return root, {name: value[0].to(root.dtype) for name, value in info.items()}

    def mahalanobis(self, r: Tensor) -> Tensor:
        """r' C^-1 r, (B,): from below where nothing is repaired, as Gauss quadrature of 1 / x is.

        The slowest to converge, above all where much is repaired: 1 / x is largest just where it has its kink.
        """
        return self._space(r.flatten(1)[None]).quadratic(self._of(torch.reciprocal))[0].to(r.dtype)

    def logdet(self) -> Tensor:
        return self.logdet_with_error()[0]

    def logdet_with_error(self) -> tuple[Tensor, Tensor]:
        """log det C and the standard error that the probes leave it, (B,) each; NaN for a single probe."""
        if self.exact:
            exact = self.as_dense().logdet()
            return exact, torch.zeros_like(exact)
        parts = self._signs().split(self._at_once(self.steps))
        terms = torch.cat([self._space(part).quadratic(self._of(torch.log)) for part in parts])
        error = (terms.var(0, correction=0) / (len(terms) - 1)).sqrt()
        return terms.mean(0).to(self.like.dtype), error.to(self.like.dtype)

    def variance_along(self, u: Tensor) -> Tensor:
        start = u.flatten(2)
        if self.exact:
            return self._space(start).quadratic(self._of(lambda x: x)).to(u.dtype)
        squares = start.square().sum(-1)
        variances = torch.maximum((start * self.product(start)).sum(-1), self.floor * squares)
        return self.scale * variances + self.shift * squares

    def affine(self, scale: float, shift: float) -> Krylov:
        return replace(self, scale=scale * self.scale, shift=scale * self.shift + shift)

    def _of(self, f: Function) -> Function:
        return lambda x: f(self.scale * x.clamp(min=self.floor) + self.shift)

    def _space(self, start: Tensor) -> KrylovSpace:
        n, rows, d = start.shape
        steps = min(self.steps, d)
        require_room(
            2 * n * rows * steps * d * start.dtype.itemsize,  # the basis, and what a step works on
            start.device,
            f"Krylov bases of {n * rows} x {steps} x {d} numbers",
            "use fewer steps, or fewer rows at a time",
        )
        return lanczos(self.product, start, steps)

    def _signs(self) -> Tensor:
        if self.probes is None:
            raise TypeError(
                "log_prob, logdet and diagonal draw probes here and need the generator= that the posterior was made "
                f"without; or take steps >= {self.dim}, where they are exact"
            )
        return self.probes()

    def _at_once(self, steps: int) -> int:
        return max(1, BASIS_NUMBERS // (steps * self.like.numel()))
