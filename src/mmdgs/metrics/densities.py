"""Densities on a grid: their divergence, and whether a clean model is behind a noisy one (the paper's Appendix A.2).

A density q~ is q * k, for some distribution q and the noise k = N(0, sigma^2 I), if and only if

    phi(w) = F(q~)(w) / F(k)(w),    F(f)(w) = int f(x) exp(-i w'x) dx,    F(k)(w) = exp(-sigma^2 |w|^2 / 2)

is positive semi-definite: no matrix phi(w_i - w_j) has a negative eigenvalue (Bochner; Wendland, 2004, Theorem
6.6). Then q = F^-1(phi). On a computer phi is known only where F(k) stands well above rounding, so the test is
one-sided: an eigenvalue below the tolerance proves that there is no clean model, and its absence says that none
of the frequencies that can be resolved speaks against one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

ACCURACY = 1e-14
"""Relative error of the values of a density in float64; its Fourier transform has then this error relative to F(0)."""

NYQUIST_MARGIN = 1.25
"""Largest frequency of the grid over the cut-off. |F(q~)| <= F(k) where a clean model exists; what is folded back
onto the cut-off w_c comes from 1.5 w_c and beyond, where F(k) = threshold^(1.5^2) < accuracy."""

MAX_FREQUENCIES = 1000
"""Rows of the matrix phi(w_i - w_j), whose eigenvalues take cubic time: half a second for this many."""


@dataclass(frozen=True)
class Deconvolution:
    """What is left of a noisy density when the noise is divided out.

    `clean` is F^-1(phi) on the grid of the noisy density, from the frequencies |w| <= `cutoff`, where F(k) is at
    least `threshold`: a density if a clean model exists. `negative_mass` is int max(-q, 0), in which a clean
    model finer than 1 / cutoff also leaves ripples. `least_eigenvalue` is that of phi(w_i - w_j) / phi(0), and
    `tolerance` the most that rounding can take it below zero.
    """

    clean: Float[Tensor, "..."]
    phi: Complex[Tensor, ...]
    cell: float
    threshold: float
    cutoff: float
    negative_mass: float
    least_eigenvalue: float
    tolerance: float
    frequencies: int

    @property
    def exists(self) -> bool:
        """Whether phi is positive semi-definite at the frequencies that were tried, so that a clean model may exist."""
        return self.least_eigenvalue >= -self.tolerance

    def distance(self, density: Float[Tensor, "..."]) -> float:
        """int |q - density|, between the clean model and a density on the same grid."""
        if density.shape != self.clean.shape:
            expected, got = tuple(self.clean.shape), tuple(density.shape)
            raise ValueError(f"the density must have the shape of the grid {expected}, got {got}")
        return (self.clean - density).abs().sum().item() * self.cell


def deconvolve(
    noisy: Float[Tensor, "..."],
    spacing: float,
    sigma: float,
    *,
    accuracy: float = ACCURACY,
    max_frequencies: int = MAX_FREQUENCIES,
) -> Deconvolution:
    """Divide the noise N(0, sigma^2 I) out of a density on a regular grid, and test that the rest is a distribution.

    `noisy` has one axis for each dimension of x, all of one `spacing`; it need not be normalised. Its values have
    the relative error `accuracy`, so phi = F(q~) / F(k) has the error accuracy / F(k). It is used where F(k) is at
    least sqrt(accuracy): there the error is at most sqrt(accuracy), and so is what is dropped, if the clean model
    is no finer than the noise. An eigenvalue of N x N numbers phi(w_i - w_j) has then an error of at most N times it.
    """
    for name, value in (("spacing", spacing), ("sigma", sigma)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if not 0 < accuracy < 1:
        raise ValueError(f"accuracy must be between 0 and 1, got {accuracy}")
    threshold = math.sqrt(accuracy)
    cutoff = math.sqrt(-2 * math.log(threshold)) / sigma
    _require_grid(noisy, spacing, cutoff, accuracy)
    noisy = noisy.double()
    cell = spacing**noisy.ndim
    axes = [2 * math.pi * torch.fft.fftfreq(n, spacing, dtype=torch.float64, device=noisy.device) for n in noisy.shape]
    square = torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(0)
    spectrum = torch.fft.fftn(noisy)
    ratio = spectrum / spectrum.flatten()[0] * (0.5 * sigma**2 * square).exp()
    phi = torch.where(square <= cutoff**2, ratio, torch.zeros_like(ratio))
    clean = torch.fft.ifftn(phi).real / cell
    # Differences of frequencies in half the band stay in the band.
    centres = _centres(square, (cutoff / 2) ** 2, max_frequencies)
    return Deconvolution(
        clean=clean,
        phi=phi,
        cell=cell,
        threshold=threshold,
        cutoff=cutoff,
        negative_mass=clean.clamp(max=0).sum().abs().item() * cell,
        least_eigenvalue=_least_eigenvalue(phi, centres),
        tolerance=len(centres) * accuracy / threshold,
        frequencies=len(centres),
    )


def _centres(square: Tensor, limit: float, count: int) -> Tensor:
    """Indices (N, d) of the `count` lowest frequencies with |w|^2 <= limit."""
    order = square.flatten().argsort(stable=True)[:count]
    order = order[square.flatten()[order] <= limit]
    return torch.stack(torch.unravel_index(order, square.shape), dim=1)


def _least_eigenvalue(phi: Tensor, centres: Tensor) -> float:
    """The smallest eigenvalue of the Hermitian matrix phi(w_i - w_j)."""
    shape = torch.tensor(phi.shape, device=phi.device)
    differences = (centres[:, None] - centres[None]) % shape
    return torch.linalg.eigvalsh(phi[tuple(differences.unbind(-1))])[0].item()


def _require_grid(noisy: Tensor, spacing: float, cutoff: float, accuracy: float) -> None:
    """Refuse what is no density, and a grid that is too coarse for the frequencies or too small for the density."""
    if noisy.ndim == 0 or not (torch.isfinite(noisy).all() and (noisy >= 0).all() and noisy.sum() > 0):
        raise ValueError("a density must be finite and non-negative on its grid, and not zero everywhere")
    if math.pi / spacing < NYQUIST_MARGIN * cutoff:
        raise ValueError(
            f"the grid is too coarse: deconvolution uses frequencies up to {cutoff:.3g} and needs a spacing of at most "
            f"{math.pi / (NYQUIST_MARGIN * cutoff):.3g}, got {spacing:.3g}"
        )
    edge = max((noisy.select(axis, end).max() / noisy.max()).item() for axis in range(noisy.ndim) for end in (0, -1))
    if edge > accuracy:
        raise ValueError(
            f"the grid is too small: the density at its edge is {edge:.1e} of the largest value, "
            f"and must be at most {accuracy:.0e}; widen the grid"
        )


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
