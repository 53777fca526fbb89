"""Systems S w = b by iterations, where a factor of S would be too large: conjugate gradients, and
Lanczos' method for covariances known by their products alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdgs.linalg.krylov import Krylov
from mmdgs.linalg.lanczos import lanczos, tridiagonal
from mmdgs.linalg.operators import einsum
from mmdgs.linalg.solvers import Solution, Solver

logger = logging.getLogger("mmdgs")

ITERATIONS = 500
"""Most iterations of a row, where the covariance costs no evaluations of a network."""
SLACK = 10.0
"""How much larger |C| may be than it looks along the directions of a solution."""


def _tolerance(dtype: torch.dtype) -> float:
    """The residual |b - S w| / |b| at which a row is solved."""
    return 1e-10 if dtype == torch.float64 else 1e-5


@dataclass(frozen=True)
class ConjugateGradients(Solver):
    """Preconditioned conjugate gradients, all rows at once; each row stops by its own residual.

    The gain C A' w is summed up on the way, so that it costs no product of its own. What did not
    converge within ITERATIONS is told by its residual, and once by a warning.
    """

    variances: Tensor
    preconditioner: Callable[[Tensor], Tensor] | None = None

    def solve(self, b: Tensor) -> Solution:
        dims = [1] * (b.ndim - 1)
        tolerance = _tolerance(b.dtype)
        w, residual = torch.zeros_like(b), b
        gain = torch.zeros(len(b), *self.operator.shape, dtype=b.dtype, device=b.device)
        size = _norm(b)
        alive = size > 0
        direction = previous = self._preconditioned(residual)
        slope = _inner(residual, previous)
        steps = torch.zeros_like(size)
        for _ in range(ITERATIONS):
            back = self.prior.apply(self.operator.adjoint(direction))
            image = self.operator(back) + self.variances * direction
            step = torch.where(alive, slope / _inner(direction, image), 0.0)
            w = w + step.reshape(-1, *dims) * direction
            gain = gain + step.reshape(-1, *[1] * (back.ndim - 1)) * back
            residual = residual - step.reshape(-1, *dims) * image
            steps += alive
            alive = alive & (_norm(residual) > tolerance * size)
            if not alive.any():
                break
            previous = self._preconditioned(residual)
            slope, before = _inner(residual, previous), slope
            turn = torch.where(alive, slope / before, 0.0)
            direction = previous + turn.reshape(-1, *dims) * direction
        else:
            _warn_once(type(self.prior).__name__, ITERATIONS)
        left = torch.where(size > 0, _norm(residual) / size, 0.0)
        return w, gain, {"cg_iterations": steps, "cg_residual": left}

    def _preconditioned(self, residual: Tensor) -> Tensor:
        return residual if self.preconditioner is None else self.preconditioner(residual)


@dataclass(frozen=True)
class LanczosSolver(Solver):
    """S^-1 for a covariance known by its products, indefinite where a network's Jacobian is.

    Conjugate gradients written as Lanczos' method: with D = diag(tau), the Krylov space of B = D^-1
    A C A' D^-1 from D^-1 b has Ritz pairs (u, theta), and D w = sum u (u' D^-1 b) / (theta + 1).
    Each product is with C itself. As in `Krylov.root` what lies below the floor is lifted: where a
    = A' D^-1 u has a' C a < floor |a|^2, C a is taken for floor a. And where C a is longer than it
    can be for a positive C, |C a|^2 <= |C| a' C a, it is cut to that length. Conjugate gradients
    themselves diverge there.
    """

    prior: Krylov
    variances: Tensor

    def solve(self, b: Tensor) -> Solution:
        tau, tolerance = self.variances.sqrt(), _tolerance(b.dtype)
        start = b / tau
        size = _norm(start).double()
        backs, images, residuals = [], [], []

        def product(v: Tensor) -> Tensor:
            back = self.operator.adjoint(v.reshape(b.shape).to(b.dtype) / tau)
            image = self.prior.unlifted(back[None])[0]
            backs.append(back.flatten(1))
            images.append(image.flatten(1))
            return (self.operator(image) / tau).flatten(1)[None]

        def solved(diagonal: Tensor, coupling: Tensor) -> bool:
            residuals.append(torch.where(size > 0, _residual(diagonal[0], coupling[0]), 0.0))
            return bool((torch.stack(residuals).amin(0) <= tolerance).all())

        most = min(self.prior.steps, start[0].numel())
        space = lanczos(product, start.flatten(1)[None], most, solved)
        if len(residuals) < len(backs):  # the last space is invariant, and nobody asked
            solved(space.diagonal, space.coupling)
        # A row ends where it was solved, whatever rows beside it need.
        history = torch.stack(residuals, 1)  # (B, k)
        unsolved = (history > tolerance).cummin(1).values
        kept = torch.cat([torch.ones_like(unsolved[:, :1]), unsolved[:, :-1]], 1)
        left = history.gather(1, kept.sum(1, keepdim=True) - 1)[:, 0]
        diagonal = torch.where(kept, space.diagonal[0], space.diagonal[0][:, :1])
        coupling = torch.where(kept[:, 1:], space.coupling[0][:, :-1], 0.0)
        values, vectors = torch.linalg.eigh(tridiagonal(diagonal, coupling))
        back, image = (
            vectors.mT @ (kept[..., None] * torch.stack(parts, 1)).double()
            for parts in (backs, images)
        )
        values, image = self._believed(values, back, image)
        weights = size[:, None] * vectors[:, 0] / (values + 1)
        inner = (vectors @ weights[..., None])[..., 0].to(space.basis)
        w = einsum("bk,kbm->bm", inner, space.basis[:, 0])
        gain = torch.einsum("bk,bkd->bd", weights, image).to(b.dtype)
        if bool((left > tolerance).any()):
            _warn_once("Krylov", self.prior.steps)
        info = {"cg_iterations": kept.sum(1).to(b.dtype), "cg_residual": left.to(b.dtype)}
        return w.to(b.dtype).reshape(b.shape) / tau, gain.reshape(-1, *self.operator.shape), info

    def _believed(self, values: Tensor, back: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """Ritz values (B, k) and products C a (B, k, d), as those of a covariance can be."""
        tiny = torch.finfo(back.dtype).tiny
        squares, lengths = back.square().sum(-1), image.norm(dim=-1)
        variances = torch.where(squares > 0, values / squares.clamp(min=tiny), 0.0)
        floor = self.prior.floor_among(variances)
        norm = (lengths / squares.clamp(min=tiny).sqrt()).amax(1, keepdim=True)
        longest = (SLACK * norm * values.clamp(min=0)).sqrt()
        cut = (longest / lengths.clamp(min=tiny)).clamp(max=1)
        small = (values < floor * squares)[..., None]
        image = torch.where(small, floor[..., None] * back, cut[..., None] * image)
        return torch.maximum(values, floor * squares), image


def _residual(diagonal: Tensor, coupling: Tensor) -> Tensor:
    """|b - (B + I) w| / |b| of Lanczos' solution, (B,), from T's diagonal and couplings (B, k)."""
    matrix = tridiagonal(diagonal.double(), coupling[:, :-1].double())
    matrix = matrix + torch.eye(diagonal.shape[-1], device=diagonal.device)
    first = torch.zeros_like(matrix[..., 0])
    first[:, 0] = 1
    # An indefinite T may be singular by accident: then the residual is large, and that is no error.
    solution, failed = torch.linalg.solve_ex(matrix, first)
    return torch.where(failed == 0, (coupling[:, -1] * solution[:, -1]).abs(), torch.inf)


@functools.cache
def _warn_once(kind: str, iterations: int) -> None:
    logger.warning(
        "conjugate gradients with a %s covariance did not converge in %d iterations; the info of "
        "each draw has its residual (cg_residual). Larger noise, or more steps of a Krylov "
        "covariance, make it smaller",
        kind,
        iterations,
    )


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def _norm(a: Tensor) -> Tensor:
    return a.flatten(1).norm(dim=1)
