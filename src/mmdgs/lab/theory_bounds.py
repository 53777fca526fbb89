"""Section 2.2 and a footnote of Appendix A.2 in numbers, in one dimension by quadrature.

The joint KL of a posterior q(x | x_t) bounds the marginal KL of what it samples, q(x) = int q(x | x_t) p~(x_t) dx_t:

    KL(p(x_t | x) p(x) || q(x | x_t) p~(x_t)) = KL(p || q) + E_p(x) KL(p(x_t | x) || q(x_t | x)) >= KL(p || q)

And for any energy g with a finite integral, this noisy model has the clean model exp(-g) / Z:

    q~(x_t) ~ int exp(-g(x) - (x_t - x)^2 / (2 sigma^2)) dx

The paper prints the integral without exp, and with 1 / sigma^2, which is noise of variance sigma^2 / 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.lab.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, labelled, new_figure
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.theory_existence import records_table
from mmdgs.metrics import deconvolve
from mmdgs.targets import GaussianMixture

LIMIT, POINTS = 9.0, 401  # of the grids: nine standard deviations beyond the outer means, at the strongest noise
SIGMAS = (0.1, 0.2, 0.4, 0.8)
SHIFT = 0.1
ROUNDING = 1e-10
SIGMA = 0.2
RECOVERED = 1e-6

Records = list[dict[str, Any]]
POSTERIORS = {
    "the true posterior": BLUE,
    "Gaussian, true moments": GREEN,
    "Gaussian, one variance": ORANGE,
    "Gaussian, half the variance": RED,
    f"Gaussian, mean + {SHIFT:g}": PURPLE,
}
ENERGIES = {
    "(x^2 - 1)^2": lambda x: (x.square() - 1).square(),
    "x^4": lambda x: x.pow(4),
    "x^2 + cos(3 x) / 2": lambda x: x.square() + 0.5 * (3 * x).cos(),
}
"""Energies g whose exp(-g) is no Gaussian mixture."""


def _line() -> tuple[Tensor, float]:
    return torch.linspace(-LIMIT, LIMIT, POINTS, dtype=torch.float64), 2 * LIMIT / (POINTS - 1)


def _log_normal(x: Tensor, mean: Tensor, variance: Tensor | float) -> Tensor:
    spread = torch.as_tensor(variance, dtype=x.dtype)
    return -0.5 * ((x - mean).square() / spread + spread.log() + math.log(2 * math.pi))


def joint_kl() -> tuple[Records, Section]:
    """Section 2.2: the joint KL of five posteriors, the marginal KL of what each samples, and the gap between them."""
    x, step = _line()
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    mixture = GaussianMixture(weights, weights.new_tensor([[-1.1], [0.0], [1.0]]), 0.2)
    log_p = mixture.log_prob(x[:, None])
    cases = [(name, sigma) for sigma in SIGMAS for name in POSTERIORS]
    records: Records = [{"posterior": n, "sigma": s, **_divergences(n, log_p, x, step, s)} for n, s in cases]
    text = (
        "A mixture of three Gaussians in one dimension. The joint KL is what training by KL minimises; the marginal KL "
        "is between the data and what one sweep from noised data samples. Their difference is "
        r"$E\, \mathrm{KL}(p(x_t \mid x) \,\|\, q(x_t \mid x))$, computed by itself. "
        "The bound is not tight: a smaller joint KL does not "
        "always mean a smaller marginal KL."
    )
    least = min(r["joint"] - r["marginal"] for r in records)
    off = max(abs(r["joint"] - r["marginal"] - r["conditional"]) for r in records)
    at = {(r["posterior"], r["sigma"]): r["joint"] for r in records}
    gaussians = [name for name in POSTERIORS if name.startswith("Gaussian")]
    closest = all(at[gaussians[0], s] <= at[name, s] for s in SIGMAS for name in gaussians)
    claims = [
        Claim("the joint KL is at least the marginal KL", least > -ROUNDING, f"smallest difference {least:.2g}"),
        Claim("their difference is the KL of the noising conditionals", off < ROUNDING, f"off by at most {off:.2g}"),
        Claim("of the Gaussians the one with the true moments has the least joint KL", closest),
    ]
    table = records_table("Joint and marginal KL in nats", records)
    caption = "Joint KL (solid) and marginal KL (dashed) of each Gaussian posterior, in nats."
    figure = Figure("theory_joint_kl", caption, _draw_joint(records))
    return records, Section("Section 2.2: the joint KL bounds the marginal KL", [text], [table], [figure], claims)


def _divergences(name: str, log_p: Tensor, x: Tensor, step: float, sigma: float) -> dict[str, float]:
    """The joint, marginal and conditional KL on a grid: rows x, columns x_t."""
    noise = _log_normal(x[None, :], x[:, None], sigma**2)  # log p(x_t | x)
    joint = log_p[:, None] + noise
    noised = torch.logsumexp(joint, 0) + math.log(step)  # log p~(x_t)
    posterior = joint - noised
    density = posterior.exp() * step
    mean = (density * x[:, None]).sum(0)
    variance = (density * (x[:, None] - mean).square()).sum(0)
    weight = noised.exp() * step
    one = (weight * variance).sum()
    log_q = {
        "the true posterior": lambda: posterior,
        "Gaussian, true moments": lambda: _log_normal(x[:, None], mean, variance),
        "Gaussian, one variance": lambda: _log_normal(x[:, None], mean, one),
        "Gaussian, half the variance": lambda: _log_normal(x[:, None], mean, variance / 2),
        f"Gaussian, mean + {SHIFT:g}": lambda: _log_normal(x[:, None], mean + SHIFT, variance),
    }[name]()
    log_joint = log_q + noised
    marginal = torch.logsumexp(log_joint, 1) + math.log(step)  # log q(x)
    mass = joint.exp() * step**2
    return {
        "joint": (mass * (joint - log_joint)).sum().item(),
        "marginal": (log_p.exp() * step * (log_p - marginal)).sum().item(),
        "conditional": (mass * (noise - (log_joint - marginal[:, None]))).sum().item(),
    }


def _draw_joint(records: Records) -> Canvas:
    canvas, axes = new_figure(1, 1, inches=(5.6, 3.4))
    axis = axes[0][0]
    for name, colour in list(POSTERIORS.items())[1:]:
        own = [r for r in records if r["posterior"] == name]
        sigmas = [r["sigma"] for r in own]
        axis.loglog(sigmas, [r["joint"] for r in own], "o-", color=colour, markersize=4)
        axis.loglog(sigmas, [r["marginal"] for r in own], "s--", color=colour, markersize=3, linewidth=1)
        text = name.removeprefix("Gaussian, ")
        axis.annotate(
            text, (sigmas[0], own[0]["joint"]), (-7, -2), "data", "offset points", color=colour, fontsize=7, ha="right"
        )
    axis.set_xticks(SIGMAS, [f"{s:g}" for s in SIGMAS])
    axis.set_xlim(SIGMAS[0] * 0.45, SIGMAS[-1] * 1.1)
    axis.minorticks_off()
    labelled(axis, "", r"noise level $\sigma$", "KL (nats)")
    return canvas


def always_clean() -> tuple[Records, Section]:
    """The footnote of Appendix A.2: noise an energy's density, deconvolve it, and get the energy's density back."""
    x, step = _line()
    records: Records = []
    for name, energy in ENERGIES.items():
        clean = (-energy(x)).exp()
        clean /= clean.sum() * step
        noisy, as_printed = (_noised(clean, x, step, variance) for variance in (SIGMA**2, SIGMA**2 / 2))
        result = deconvolve(noisy, step, SIGMA)
        records.append(
            {
                "energy": name,
                "exists": result.exists,
                "distance": result.distance(clean),
                "mean_error": _mean_error(clean, noisy, x, step),
                "variance_as_printed": ((as_printed * x.square()).sum() - (clean * x.square()).sum()).item() * step,
                "clean": clean.tolist(),
                "noisy": noisy.tolist(),
            }
        )
    text = (
        rf"$\tilde{{q}}$ is $\exp(-g)$ noised with $\sigma = {SIGMA:g}$, by quadrature. Dividing its Fourier transform "
        r"by the noise's gives $\exp(-g) / Z$ back. Its score needs an integral over $x$, which is why the paper sets "
        r"it aside. The paper prints $1 / \sigma^2$ in the exponent, without the 1/2: that noise has half the variance "
        "(last column)."
    )
    far = max(r["distance"] for r in records)
    off = max(r["mean_error"] for r in records)
    half = max(abs(r["variance_as_printed"] - SIGMA**2 / 2) for r in records)
    claims = [
        Claim("each noisy model has a clean model", all(r["exists"] for r in records)),
        Claim(r"it is $\exp(-g) / Z$", far < RECOVERED, rf"$\int |q - \exp(-g) / Z|$ at most {far:.1e}"),
        Claim(r"$x_t + \sigma^2 s$ is the mean of $x$ given $x_t$", off < 1e-3, f"off by at most {off:.1e}"),
        Claim(r"as printed, the noise has variance $\sigma^2 / 2$", half < ROUNDING, f"off by {half:.1e}"),
    ]
    table = records_table("Noisy models that have a clean one by construction", records)
    caption = r"The clean density $\exp(-g) / Z$ (blue) and the noisy model (grey)."
    figure = Figure("theory_always_clean", caption, _draw_clean(records, x))
    return records, Section("Appendix A.2, footnote: a model that has a clean one", [text], [table], [figure], claims)


def _noised(clean: Tensor, x: Tensor, step: float, variance: float) -> Tensor:
    return (_log_normal(x[:, None], x[None, :], variance).exp() * clean).sum(1) * step


def _mean_error(clean: Tensor, noisy: Tensor, x: Tensor, step: float) -> float:
    """How far x_t + sigma^2 (log q~)' is from E[x | x_t], where q~ is not small; the derivative by differences."""
    weights = _log_normal(x[:, None], x[None, :], SIGMA**2).exp() * clean
    mean = (weights * x).sum(1) / weights.sum(1)
    score = torch.gradient(noisy.log(), spacing=step)[0]
    inside = noisy > 1e-3 * noisy.max()
    return (x + SIGMA**2 * score - mean)[inside].abs().max().item()


def _draw_clean(records: Records, x: Tensor) -> Canvas:
    canvas, axes = new_figure(1, len(records), 2.6)
    for axis, record in zip(axes[0], records, strict=True):
        axis.fill_between(x, record["noisy"], color=GREY, alpha=0.35, linewidth=0)
        axis.plot(x, record["clean"], color=BLUE, linewidth=1.2)
        axis.set_xlim(-2.2, 2.2)
        labelled(axis, record["energy"], "x", "density" if record is records[0] else "")
    return canvas
