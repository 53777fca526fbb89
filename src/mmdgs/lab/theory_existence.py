"""Appendix A.2 in numbers: which noisy densities have a clean model, in one and in two dimensions.

With the noise k = N(0, sigma^2 I), five densities q~ that look alike:

    a mixture noised with k                     its clean model is known
    the same times 1 + a cos(2 x_1 / sigma)     a clean model for a small, none for a large
    exp(-|x|^4)                                 none: its Fourier transform decays slower than any Gaussian
    a Gaussian narrower than the noise          none

The ripple is exact for components as wide as the noise, N(m, sigma^2): divided by F(k), the noised component times
cos(2 x / sigma) is the component times exp(4) cos(4 x / sigma - c), so the clean model is positive if a < exp(-4).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.lab.drawing import BLUE, GREEN, GREY, RED, density, labelled, new_figure, plain_logs, square
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.toys import four_gaussians
from mmdgs.metrics import Deconvolution, deconvolve
from mmdgs.noise import NoiseLevel
from mmdgs.tables import Table
from mmdgs.targets import GaussianMixture

SIGMA = 0.2
FAINT, STRONG = 0.01, 0.05  # amplitudes of the ripple on both sides of exp(-4) = 0.018
NARROW = 0.95  # standard deviation of the narrow Gaussian, relative to the noise
FLAT_SIGMA = 0.25  # noise for exp(-|x|^4), whose standard deviation in one dimension is 0.58
LIMIT = 3.6  # of the grid: nine standard deviations beyond the outer means
VIEW = 2.0  # of the pictures
TEX = {"sigma": r"\sigma", "alpha": r"\alpha", "exp(-|x|^4)": r"\exp(-|x|^4)"}
SYMBOLS = r"\b(?:sigma|alpha)\b|exp\(-\|x\|\^4\)"
FOUND = ("exists", "least_eigenvalue", "tolerance", "frequencies", "cutoff", "threshold", "negative_mass")


@dataclass(frozen=True)
class _Case:
    title: str
    noisy: Tensor
    sigma: float
    result: Deconvolution
    clean: Tensor | None = None

    def record(self) -> dict[str, Any]:
        known = {"density": self.title, "dimension": self.noisy.ndim, "sigma": self.sigma}
        found = {name: getattr(self.result, name) for name in FOUND}
        return known | found | {"distance": None if self.clean is None else self.result.distance(self.clean)}


def records_table(title: str, records: Sequence[Mapping[str, Any]], without: Sequence[str] = ()) -> Table:
    """The numbers of records; lists of them are left out, but for points."""
    names = [k for k, v in records[0].items() if (not isinstance(v, list) or k == "x_t") and k not in without]
    rows = [[_text(record[name]) for name in names] for record in records]
    return Table(title, [_heading(name) for name in names], rows)


def _heading(name: str) -> str:
    words = name.replace("_", " ").replace("kl ", "KL, ")
    return "$x_t$" if name == "x_t" else with_symbols(words)


def with_symbols(text: str) -> str:
    """A text with the names of symbols as mathematics."""
    return re.sub(SYMBOLS, lambda found: f"${TEX.get(found.group(), found.group())}$", text)


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-6 else f"{value:.4g}"
    return f"({value[0]:g}, {value[1]:g})" if isinstance(value, list) else with_symbols(str(value))


def existence(quick: bool) -> tuple[list[dict[str, Any]], Section]:
    """Deconvolve each density and test what is left."""
    line, plane = _cases(1, 641), _cases(2, 97 if quick else 193)
    records = [case.record() for case in (*line, *plane)]
    text = [
        r"A noisy density $\tilde{q}$ has a clean model if and only if $\phi = F(\tilde{q}) / F(k)$ is positive "
        rf"semi-definite, with $F$ the Fourier transform and $k$ the noise. $\phi$ is used where $F(k)$ is at least "
        rf"{records[0]['threshold']:.0e}, and tested by the least eigenvalue of the matrix "
        r"$\phi(\omega_i - \omega_j) / \phi(0)$. Distance: $\int |q - p|$ of the recovered $q$ from the clean density "
        "$p$ where it is known.",
        "A ripple of 1% on the noisy density is one of 55% on the clean one, which it leaves a density; one of 5% "
        "leaves none. The negative mass under the ripple of 1% comes from the cut-off in frequency.",
    ]
    far = max(r["distance"] for r in records if r["distance"] is not None)
    right = [case.result.exists for case in (*line, *plane)] == 2 * [True, True, False, False, False]
    claims = [
        Claim("the first two densities have a clean model, the other three have none, in both dimensions", right),
        Claim("the clean density is recovered where it is known", far < 1e-6, rf"$\int |q - p|$ {far:.1e}"),
    ]
    table = records_table("Is there a clean model?", records, without=("frequencies", "cutoff", "threshold"))
    on_line = (
        "Top: the noisy density (grey), the recovered $q$ (blue, its negative part red) and the true clean density "
        r"(dashed). Bottom: $|\phi|$, which nowhere exceeds $\phi(0) = 1$ (dotted) if there is a clean model."
    )
    on_plane = "Top: the noisy density. Bottom: the recovered $q$, blue where positive and red where negative."
    figures = [
        Figure("theory_existence_line", on_line, _draw_line(line)),
        Figure("theory_existence_plane", on_plane, _draw_plane(plane)),
    ]
    return records, Section("Appendix A.2: does a clean model exist?", text, [table], figures, claims)


def _cases(dimension: int, points: int) -> list[_Case]:
    """The densities on a grid (points,) * dimension, deconvolved; the first axis of the grid is x_1."""
    line = torch.linspace(-LIMIT, LIMIT, points, dtype=torch.float64)
    x = torch.stack(torch.meshgrid(*[line] * dimension, indexing="ij"), dim=-1)
    square_norm = x.square().sum(-1)
    mixture = four_gaussians() if dimension == 2 else _three()
    noised = mixture.noised(NoiseLevel(sigma=SIGMA)).log_prob(x).exp()
    ripple = (2 / SIGMA * x[..., 0]).cos()
    densities = [
        ("noised mixture", noised, SIGMA),
        (f"with a ripple of {FAINT:.0%}", noised * (1 + FAINT * ripple), SIGMA),
        (f"with a ripple of {STRONG:.0%}", noised * (1 + STRONG * ripple), SIGMA),
        ("exp(-|x|^4)", (-square_norm.square()).exp(), FLAT_SIGMA),
        (f"Gaussian of width {NARROW:g} sigma", (-0.5 * square_norm / (NARROW * SIGMA) ** 2).exp(), SIGMA),
    ]
    spacing = 2 * LIMIT / (points - 1)
    truth = {0: mixture.log_prob(x).exp()}
    return [
        _Case(title, noisy / (noisy.sum() * spacing**dimension), sigma, deconvolve(noisy, spacing, sigma), truth.get(i))
        for i, (title, noisy, sigma) in enumerate(densities)
    ]


def _three() -> GaussianMixture:
    """Three Gaussians in one dimension, as wide as the noise."""
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    return GaussianMixture(weights, weights.new_tensor([[-1.1], [0.0], [1.0]]), SIGMA)


def _verdict(axis: Axes, case: _Case) -> None:
    verdict = "clean model" if case.result.exists else "no clean model"
    axis.set_title(f"{with_symbols(case.title)}\n{verdict}", fontsize=8, color=GREEN if case.result.exists else RED)


def _draw_line(cases: list[_Case]) -> Canvas:
    canvas, axes = new_figure(2, len(cases), 2.3)
    for top, bottom, case in zip(axes[0], axes[1], cases, strict=True):
        x = torch.linspace(-LIMIT, LIMIT, len(case.noisy))
        q = case.result.clean
        top.fill_between(x, case.noisy, color=GREY, alpha=0.35, linewidth=0)
        top.fill_between(x, q.clamp(max=0), color=RED, alpha=0.5, linewidth=0)
        top.plot(x, q, color=BLUE, linewidth=1)
        if case.clean is not None:
            top.plot(x, case.clean, color="black", linewidth=0.9, linestyle=(0, (3, 3)))
        top.set_xlim(-VIEW, VIEW)
        labelled(top, "", "", "density" if case is cases[0] else "")
        _verdict(top, case)
        w = 2 * math.pi * torch.fft.fftshift(torch.fft.fftfreq(len(x), 2 * LIMIT / (len(x) - 1)))
        inside = w.abs() <= case.result.cutoff
        bottom.semilogy(w[inside], torch.fft.fftshift(case.result.phi).abs()[inside], color=BLUE, linewidth=1)
        bottom.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        bottom.set(ylim=(1e-3, 10))
        plain_logs(bottom, (1.0,))
        labelled(bottom, "", "frequency", r"$|\phi|$" if case is cases[0] else "")
    return canvas


def _draw_plane(cases: list[_Case]) -> Canvas:
    canvas, axes = new_figure(2, len(cases), 2.2)
    for top, bottom, case in zip(axes[0], axes[1], cases, strict=True):
        largest = case.result.clean.abs().max().item()
        density(top, case.noisy.mT, LIMIT, interpolation="bilinear")
        density(bottom, case.result.clean.mT, LIMIT, "RdBu", vmin=-largest, vmax=largest, interpolation="bilinear")
        for axis in (top, bottom):
            square(axis, VIEW, ticks=range(-2, 3))
            axis.label_outer()
        _verdict(top, case)
        bottom.set_title(f"negative mass {case.result.negative_mass:.2g}", fontsize=8)
    axes[0][0].set_ylabel("noisy density", fontsize=8)
    axes[1][0].set_ylabel("recovered $q$", fontsize=8)
    return canvas
