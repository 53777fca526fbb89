"""Divergences between densities, by quadrature on a grid."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_divergence(log_p: Tensor, log_q: Tensor, cell: float) -> float:
    """KL(p || q) = sum p (log p - log q) cell, from log densities on the points of a regular grid.

    The grid must hold all but a negligible part of p: it is refused where p does not sum to 1 within 1e-3.
    """
    p = log_p.double().exp()
    mass = p.sum().item() * cell
    if not abs(mass - 1) <= 1e-3:  # so that NaN is refused too
        raise ValueError(f"the grid must hold the whole of p, but p sums to {mass:.4f} on it; widen or refine the grid")
    terms = torch.where(p > 0, p * (log_p.double() - log_q.double()), torch.zeros_like(p))
    return terms.sum().item() * cell
