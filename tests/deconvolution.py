"""Whether a clean model is behind a noisy density on a grid (the paper's Appendix A.2).

A density q~ is q * k, for some distribution q and the noise k = N(0, sigma^2 I), if and only if

    phi(w) = F(q~)(w) / F(k)(w),    F(f)(w) = int f(x) exp(-i w'x) dx,
    F(k)(w) = exp(-sigma^2 |w|^2 / 2)

is positive semi-definite: no matrix phi(w_i - w_j) has a negative eigenvalue (Bochner; Wendland,
2004, Theorem 6.6). Then q = F^-1(phi). On a computer phi is known only where F(k) stands well above
rounding, so the test is one-sided: an eigenvalue below the tolerance proves that there is no clean
model, and its absence says that none of the frequencies that can be resolved speaks against one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

THRESHOLD = 1e-7
"""The least F(k) at which phi is used: the root of the relative error 1e-14 of a density in float64
and of its Fourier transform, so that the error of phi, and what is dropped, are at most this."""
MAX_FREQUENCIES = 1000
"""Rows of the matrix phi(w_i - w_j), whose eigenvalues take cubic time."""


@dataclass(frozen=True)
class Deconvolution:
    """What is left of a noisy density when the noise is divided out.

    `clean` is F^-1(phi) on the grid of the noisy density, from the frequencies |w| <= `cutoff`: a
    density if a clean model exists. `negative_mass` is int max(-q, 0), in which a clean model finer
    than 1 / cutoff also leaves ripples. `least_eigenvalue` is that of phi(w_i - w_j) / phi(0), and
    `tolerance` the most that rounding can take it below zero.
    """

    clean: Tensor
    phi: Tensor
    cell: float
    cutoff: float
    least_eigenvalue: float
    tolerance: float

    @property
    def exists(self) -> bool:
        """Whether phi is positive semi-definite: a clean model may exist."""
        return self.least_eigenvalue >= -self.tolerance

    @property
    def negative_mass(self) -> float:
        return self.clean.clamp(max=0).sum().abs().item() * self.cell

    def distance(self, density: Tensor) -> float:
        """int |q - density|, between the clean model and a density on the same grid."""
        return (self.clean - density).abs().sum().item() * self.cell


def deconvolve(noisy: Tensor, spacing: float, sigma: float) -> Deconvolution:
    """Divide N(0, sigma^2 I) out of a density on a grid, and test that the rest is a distribution.

    `noisy` has one axis for each dimension of x, all of one `spacing`; it need not be normalised.
    """
    cutoff = math.sqrt(-2 * math.log(THRESHOLD)) / sigma
    # What is folded back onto the cut-off comes from 1.5 times it, where F(k) is nothing.
    assert math.pi / spacing >= 1.25 * cutoff, "the grid is too coarse"
    cell = spacing**noisy.ndim
    axes = [2 * math.pi * torch.fft.fftfreq(n, spacing, dtype=torch.float64) for n in noisy.shape]
    square = torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(0)
    spectrum = torch.fft.fftn(noisy)
    ratio = spectrum / spectrum.flatten()[0] * (0.5 * sigma**2 * square).exp()
    phi = torch.where(square <= cutoff**2, ratio, torch.zeros_like(ratio))
    # Differences of frequencies in half the band stay in the band.
    order = square.flatten().argsort(stable=True)[:MAX_FREQUENCIES]
    order = order[square.flatten()[order] <= (cutoff / 2) ** 2]
    centres = torch.stack(torch.unravel_index(order, square.shape), dim=1)
    differences = (centres[:, None] - centres[None]) % torch.tensor(phi.shape)
    matrix = phi[tuple(differences.unbind(-1))]
    return Deconvolution(
        clean=torch.fft.ifftn(phi).real / cell,
        phi=phi,
        cell=cell,
        cutoff=cutoff,
        least_eigenvalue=torch.linalg.eigvalsh(matrix)[0].item(),
        tolerance=len(centres) * THRESHOLD,
    )
