"""Lanczos' method: functions of a matrix C that is known by its products alone.

k products with C, from a start vector z, give an orthonormal basis V (k, d) of the Krylov space z,
Cz, ..., C^(k-1) z and the tridiagonal T = V C V', whose eigenvalues are called Ritz values. Then

    f(C) z       ~  ||z|| V' f(T) e_1       sampling: f = sqrt (Chow and Saad, 2014)
    z' f(C) z    ~  ||z||^2 e_1' f(T) e_1   Gauss quadrature, right for degrees up to 2k - 1
    tr f(C)      ~  the mean of s' f(C) s   signs s: stochastic Lanczos quadrature
                                            (Ubaru, Chen and Saad, 2017)

all exact where k reaches the dimension of an invariant space that holds z, so at k = d at the
latest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from mmdgs.linalg.operators import einsum, raise_non_finite

Product = Callable[[Tensor], Tensor]
"""n products for each of B rows: v (n, B, d) -> C v (n, B, d). It cuts n to what its memory holds.
"""

Function = Callable[[Tensor], Tensor]

BREAKDOWN = 50.0
"""A residual below so many roundings of C is taken for zero: the space is invariant.

A short residual is made a unit vector, and the roundings in it grow by as much: the next one is
measured against that. Rounding so counted left at most 19 where zero was due. One missed costs
products only."""


@dataclass(frozen=True)
class KrylovSpace:
    """Krylov spaces of n start vectors for each of B rows, and C seen from inside them.

    basis (k, n, B, d); T by its diagonal and its couplings, (n, B, k) each: the last coupling leads
    out of the space. A space may be of a smaller dimension than k, `size` (n, B): its basis then
    ends in zeros, and a coupling of zero cuts off the rest of T. `norm` (n, B) is that of the start
    vectors.
    """

    basis: Tensor
    diagonal: Tensor
    coupling: Tensor
    size: Tensor
    norm: Tensor

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Ritz values (n, B, k) and the eigenvectors of T (n, B, k, k)."""
        return torch.linalg.eigh(tridiagonal(self.diagonal, self.coupling[..., :-1]))

    @property
    def quadrature(self) -> tuple[Tensor, Tensor]:
        """Ritz values and weights (n, B, k) of sum 1: z' f(C) z = ||z||^2 sum w f(values)."""
        values, vectors = self._eigen
        return values, vectors[..., 0, :].square()

    def below(self, floor: float | Tensor) -> Tensor:
        """The fraction (n, B) of Ritz values below a floor, one number or (n, B, 1)."""
        # What stands beyond `size` is no Ritz value.
        foreign = (self.diagonal.shape[-1] - self.size) * (self.diagonal[..., :1] < floor)[..., 0]
        return ((self._eigen[0] < floor).sum(-1) - foreign) / self.size.clamp(min=1)

    def apply(self, f: Function) -> Tensor:
        """f(C) z, (n, B, d)."""
        inner = _first_column(f, *self._eigen) * self.norm[..., None]
        return einsum("nbk,knbd->nbd", inner.to(self.basis.dtype), self.basis)

    def quadratic(self, f: Function) -> Tensor:
        """z' f(C) z, (n, B)."""
        values, weights = self.quadrature
        return self.norm.square() * (weights * f(values)).sum(-1)

    def error(self, f: Function) -> Tensor:
        """An estimate (not a bound) of ||error|| / ||f(C) z|| for `apply`, (n, B).

        What more steps would change if T went on as its own mirror image, after Eshghi and Reichel
        (2021, "Estimating the error in matrix function approximations"); the larger of this step's
        and the last one's, since spectra with a gap make every other step idle. Zero where the
        space is invariant.
        """
        k = self.diagonal.shape[-1]
        errors = [self._mirrored(f, steps) for steps in range(max(1, k - 1), k + 1)]
        return torch.where(self.coupling[..., -1] == 0, 0.0, torch.stack(errors).amax(0))

    def _mirrored(self, f: Function, steps: int) -> Tensor:
        diagonal, coupling = self.diagonal[..., :steps], self.coupling[..., :steps]
        short = tridiagonal(diagonal, coupling[..., :-1])
        long = tridiagonal(
            torch.cat([diagonal, diagonal.flip(-1)], -1),
            torch.cat([coupling, coupling[..., :-1].flip(-1)], -1),
        )
        few, many = (_first_column(f, *torch.linalg.eigh(matrix)) for matrix in (short, long))
        return (many - functional.pad(few, (0, steps))).norm(dim=-1) / many.norm(dim=-1)


def tridiagonal(diagonal: Tensor, coupling: Tensor) -> Tensor:
    """Symmetric tridiagonal matrices (..., k, k) from (..., k) and (..., k - 1)."""
    above, below = torch.diag_embed(coupling, 1), torch.diag_embed(coupling, -1)
    return torch.diag_embed(diagonal) + above + below


def _first_column(f: Function, values: Tensor, vectors: Tensor) -> Tensor:
    """f(T) e_1, (..., k), by the eigenvalues and eigenvectors of T."""
    return (vectors @ (f(values) * vectors[..., 0, :])[..., None])[..., 0]


def without(vector: Tensor, basis: Tensor) -> Tensor:
    """A vector (B, d) less its part in the orthonormal basis (k, B, d)."""
    return vector - einsum("kb,kbd->bd", einsum("kbd,bd->kb", basis, vector), basis)


@torch.no_grad()
def lanczos(
    product: Product,
    start: Tensor,
    steps: int,
    enough: Callable[[Tensor, Tensor], bool] | None = None,
) -> KrylovSpace:
    """Krylov spaces of C from start vectors (n, B, d), by `steps` products at the most.

    It ends where all spaces are invariant, or where `enough` says so of T so far, by its diagonal
    and its couplings (n, B, k). Every new vector is made orthogonal to all before it, twice ("twice
    is enough", Giraud et al., 2005): at some tens of steps that costs little, and without it
    rounding brings back what was found long ago. Rows go on independently; T is in float64.
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
            inside = einsum("knbd,nbd->knb", basis[: j + 1], image)
            image = image - einsum("knb,knbd->nbd", inside, basis[: j + 1])
        length = image.norm(dim=-1)
        largest = torch.maximum(largest, torch.maximum(diagonal[-1].abs(), length))
        going = alive[-1] & (length > rounding * largest)
        if j + 1 == start.shape[-1]:
            going = torch.zeros_like(going)
        length = torch.where(going | length.isnan(), length, 0.0)
        coupling.append(length)
        rounding = tolerance * (largest / length).clamp(min=1.0)
        vector = _unit(image, length)
        alive.append(going)
        if not going.any():
            break
        if enough is not None and enough(torch.stack(diagonal, -1), torch.stack(coupling, -1)):
            break
    both = torch.stack(diagonal) + torch.stack(coupling)
    raise_non_finite("denoising covariance", both.movedim(-1, 0))
    within = torch.stack(alive[:-1], -1)
    # Beyond a row's own dimension stands a number of the spectrum, where every f is defined.
    values = torch.where(within, torch.stack(diagonal, -1), diagonal[0][..., None]).double()
    couplings = torch.stack(coupling, -1).double()
    return KrylovSpace(basis[: len(diagonal)], values, couplings, within.sum(-1), norm.double())


def _unit(vector: Tensor, norm: Tensor) -> Tensor:
    """vector / norm, and zero where the norm is."""
    return torch.where(norm[..., None] == 0, 0.0, vector / norm[..., None])
