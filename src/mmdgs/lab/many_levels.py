"""Samplers over many levels on exact mixtures: how their laws approach the target, and what that costs.

No network is in it: the denoiser is the mixture's own, so what is missed is the sampler's doing alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.data import mog_density
from mmdgs.lab.drawing import BLUE, COLOURS, GREEN, GREY, ORANGE, RED, new_figure, open_axes
from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.lab.toys import together
from mmdgs.lab.workspace import Part
from mmdgs.metrics import mmd
from mmdgs.moments import DiagonalMoments, FullMoments, IsotropicMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.noise import NoiseLevel, transition
from mmdgs.randomness import seeded
from mmdgs.samplers import (
    Plan,
    ancestral_plan,
    consistent_plan,
    ddim_plan,
    fixed_variance_plan,
    gibbs_plan,
    heun_plan,
    langevin_plan,
    run as run_chains,
)
from mmdgs.schedules import Levels, geometric
from mmdgs.targets import GaussianMixture

FIRST, LAST = 8.0, 0.02
SWEEPS, PROBES = 3, 3
RATE = 0.1
FIT_POINTS = 4_000


@dataclass(frozen=True)
class ManyLevelSettings:
    """How many levels are tried, and how many chains judge them."""

    counts: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    chains: int = 1_000
    groups: int = 4


FULL = ManyLevelSettings()
QUICK = ManyLevelSettings(counts=(4, 16, 64), chains=400, groups=2)


def four_modes() -> GaussianMixture:
    """The paper's mixture in two dimensions."""
    return mog_density().to(dtype=torch.float64)


def two_modes() -> GaussianMixture:
    """Two modes of unequal weight in 64 dimensions, with correlations of their own."""
    generator = seeded(2)
    factors = torch.randn(2, 64, 64, generator=generator, dtype=torch.float64)
    covariances = 0.3 * (factors @ factors.mT / 64 + 0.1 * torch.eye(64, dtype=torch.float64))
    means = torch.zeros(2, 64, dtype=torch.float64)
    means[0, :8], means[1, :8] = 1.0, -1.0
    return GaussianMixture([0.7, 0.3], means, covariances)


TARGETS: dict[str, tuple[str, Callable[[], GaussianMixture]]] = {
    "four": ("four modes in 2-D", four_modes),
    "two": ("two modes in 64-D", two_modes),
}


def _diagonal(target: GaussianMixture) -> DiagonalMoments:
    return DiagonalMoments(target.denoiser(), probes=PROBES, design=Rademacher())


def _isotropic(target: GaussianMixture, levels: Levels) -> IsotropicMoments:
    x = target.sample((FIT_POINTS,), generator=seeded(3))
    return IsotropicMoments.fit(target.denoiser(), x, levels, generator=seeded(4))


Make = Callable[[GaussianMixture, Levels], Plan]
SAMPLERS: dict[str, tuple[str, str, Make]] = {
    "Langevin": (RED, "o-", lambda t, levels: langevin_plan(t.denoiser(), levels, rate=RATE)),
    "Gibbs (paper)": (BLUE, "o-", lambda t, levels: gibbs_plan(_diagonal(t), levels, sweeps=SWEEPS)),
    "Gibbs, down first": (
        BLUE,
        "s--",
        lambda t, levels: gibbs_plan(_diagonal(t), levels, sweeps=SWEEPS, noise_first=False),
    ),
    "consistent annealing": (RED, "s--", lambda t, levels: consistent_plan(t.denoiser(), levels)),
    "ancestral, small": (GREY, "o-", lambda t, levels: fixed_variance_plan(t.denoiser(), levels)),
    "ancestral, large": (GREY, "s--", lambda t, levels: fixed_variance_plan(t.denoiser(), levels, large=True)),
    "ancestral, isotropic": (ORANGE, "o-", lambda t, levels: ancestral_plan(_isotropic(t, levels), levels)),
    "ancestral, diagonal": (COLOURS["diagonal"], "o-", lambda t, levels: ancestral_plan(_diagonal(t), levels)),
    "ancestral, full": (
        COLOURS["diagonal"],
        "s--",
        lambda t, levels: ancestral_plan(FullMoments(t.denoiser()), levels),
    ),
    "DDIM": (GREEN, "o-", lambda t, levels: ddim_plan(t.denoiser(), levels)),
    "Heun": (GREEN, "s--", lambda t, levels: heun_plan(t.denoiser(), levels)),
}
SLOW = {("two", "ancestral, full")}
"""A dense eigendecomposition in 64 dimensions for each chain and step: left out."""


def run(context: Context) -> Outcome:
    """Run every sampler with every number of levels on every target, and judge the last states."""
    settings = QUICK if context.quick else FULL
    wanted = [
        (target, sampler, count)
        for target in TARGETS
        for sampler in SAMPLERS
        if (target, sampler) not in SLOW
        for count in settings.counts
    ]
    together(context, [partial(_measured, context, *one, settings) for one in wanted], "samplers")
    records = [_measured(context, *one, settings) for one in wanted]
    floors = {name: _floor(make(), settings, context.seed) for name, (_, make) in TARGETS.items()}
    bias = _papers_order(settings)
    sections = [_convergence(records, floors, settings), _bias_section(bias)]
    return Outcome({"settings": asdict(settings), "samplers": records, "floors": floors, "bias": bias}, sections)


def _measured(context: Context, target: str, sampler: str, count: int, settings: ManyLevelSettings) -> dict[str, Any]:
    asked = {"target": target, "sampler": sampler, "levels": count, "seed": context.seed} | asdict(settings)

    def compute() -> Part:
        mixture = TARGETS[target][1]()
        plan = SAMPLERS[sampler][2](mixture, geometric(count, FIRST, LAST))
        chains = settings.chains * settings.groups
        x0 = mixture.noised(plan.start).sample((chains,), generator=seeded(context.seed + 1))
        result = run_chains(plan, x0, seed=context.seed + 2, progress=None)
        values = {"evaluations": result.cost.evaluations, **_judged(mixture, result.state.x, settings, context.seed)}
        return Part(values | {"forwards": result.cost.forwards, "products": result.cost.products})

    part = context.workspace.part(f"{target}-{sampler}-{count}".replace(" ", "_"), asked, compute)
    return {"target": target, "sampler": sampler, "levels": count, **part.values}


def _judged(mixture: GaussianMixture, x: Tensor, settings: ManyLevelSettings, seed: int) -> dict[str, list[float]]:
    """Of each group of samples: MMD from fresh draws, and how much less likely than draws they are, in nats."""
    likely = mixture.log_prob(mixture.sample((20_000,), generator=seeded(seed + 3))).mean().item()
    groups = x.split(settings.chains)
    return {
        "mmd": [
            mmd(g, mixture.sample((len(g),), generator=seeded(seed + 10 + i))) if torch.isfinite(g).all() else math.inf
            for i, g in enumerate(groups)
        ],
        "deficit": [likely - mixture.log_prob(g).mean().item() for g in groups],
    }


def _floor(mixture: GaussianMixture, settings: ManyLevelSettings, seed: int) -> float:
    """The MMD of draws from draws."""
    x = mixture.sample((settings.chains * settings.groups,), generator=seeded(seed + 5))
    return statistics.mean(_judged(mixture, x, settings, seed)["mmd"])


def _convergence(records: Sequence[dict[str, Any]], floors: dict[str, float], settings: ManyLevelSettings) -> Section:
    text = [
        "Every sampler walks down geometric noise levels with the exact denoiser of a Gaussian mixture. As levels grow "
        "its samples should become draws of the mixture: the kernel distance (MMD) should fall to that of draws from "
        "draws (dashed). A curve that levels off above it is a sampler with a bias that levels do not mend.",
        f"Gibbs has {SWEEPS} sweeps a level, Langevin 5 steps at rate {RATE:g}, diagonals {PROBES} probes; a product "
        "with the Jacobian counts as two evaluations.",
    ]
    tables = []
    for name, (title, _) in TARGETS.items():
        own = [r for r in records if r["target"] == name]
        shown = [count for count in settings.counts if count in (settings.counts[0], 16, settings.counts[-1])]
        header = ["sampler", *(f"{what}, {count} levels" for count in shown for what in ("MMD", "deficit"))]
        rows = []
        for sampler in dict.fromkeys(r["sampler"] for r in own):
            by = {r["levels"]: r for r in own if r["sampler"] == sampler}
            cells = [(statistics.mean(by[c]["mmd"]), statistics.mean(by[c]["deficit"])) for c in shown]
            rows.append([sampler, *(text for m, d in cells for text in (f"{m:.4f}", f"{d:.2f}"))])
        note = (
            f"MMD from fresh draws, of {settings.groups} groups of {settings.chains:,} chains; draws from draws "
            f"{floors[name]:.4f}. Deficit: how much less likely than draws, in nats; negative where too narrow."
        )
        tables.append(Table(f"{title[0].upper()}{title[1:]}", header, rows, note))
    caption = "MMD from the target against evaluations of the denoiser a sample; dashed: draws from draws."
    figure = Figure("many_levels", caption, _draw(records, floors))
    return Section("Laws of the samplers", text, tables, [figure])


def _draw(records: Sequence[dict[str, Any]], floors: dict[str, float]) -> Canvas:
    canvas, axes = new_figure(1, len(TARGETS), 4.6)
    canvas.set_size_inches(11.5, 4.6)
    for axis, (name, (title, _)) in zip(axes[0], TARGETS.items(), strict=True):
        for sampler, (colour, style, _) in SAMPLERS.items():
            own = [r for r in records if r["target"] == name and r["sampler"] == sampler]
            points = [(r["evaluations"], statistics.mean(r["mmd"])) for r in own]
            if points:
                axis.loglog(
                    *zip(*points, strict=True), style, color=colour, markersize=3.5, linewidth=1.2, label=sampler
                )
        axis.axhline(floors[name], color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("evaluations of the denoiser", fontsize=9)
        open_axes(axis, 8)
    axes[0][0].set_ylabel("MMD from the target", fontsize=9)
    axes[0][0].legend(fontsize=7, frameon=False, loc="upper right")
    return canvas


def _papers_order(settings: ManyLevelSettings) -> list[dict[str, Any]]:
    """The variance of Algorithm 2 on a Gaussian of variance 1, exactly: every map is linear there."""
    found = []
    for noise_first in (True, False):
        for sweeps in (1, 3, 10):
            for count in settings.counts:
                variance = _gibbs_variance(geometric(count, FIRST, LAST), sweeps, noise_first)
                excess = variance - 1
                found.append({"noise_first": noise_first, "sweeps": sweeps, "levels": count, "excess": excess})
    return found


def _gibbs_variance(levels: Sequence[NoiseLevel], sweeps: int, noise_first: bool) -> float:
    """Noise up adds b^2; down is x_s = c x_t + noise with c and the noise's variance from the bridge (posterior.py)."""
    variance = 1 + levels[0].sigma ** 2
    for noisier, cleaner in pairwise(levels):
        _, b = transition(cleaner, noisier)
        shrink = 1 / (1 + noisier.sigma**2)  # D = x_t shrink, C = sigma^2 shrink
        gain = b**2 / noisier.sigma**2
        slope = gain * shrink + 1 - gain
        fresh = gain**2 * noisier.sigma**2 * shrink + gain * cleaner.sigma**2
        for sweep in range(sweeps):
            up = 0.0 if sweep == 0 and not noise_first else b**2
            variance = slope**2 * (variance + up) + fresh
    return variance / (1 + levels[-1].sigma ** 2) ** 2  # the last step takes the mean


def _bias_section(bias: Sequence[dict[str, Any]]) -> Section:
    most = max(one["levels"] for one in bias)
    last = {(one["noise_first"], one["sweeps"]): one["excess"] for one in bias if one["levels"] == most}
    text = [
        "In the paper's Algorithm 2 every sweep begins with noise, the first at a pair of levels too, though the state "
        "comes from the noisier level already. With close levels a sweep is a Langevin step whose size is the levels' "
        "difference in variance, so the chain lags behind the falling levels: for a Gaussian by one part in 2 K - 1 "
        "of its variance with K sweeps, in the limit of many levels. All maps are linear there, and the law is exact:",
        f"with {most} levels the variance is too large by "
        + ", ".join(f"{100 * last[True, k]:.1f}% ({k} sweep{'s' * (k > 1)})" for k in (1, 3, 10))
        + "; where the first sweep only goes down, by "
        + ", ".join(f"{100 * last[False, k]:+.1f}%" for k in (1, 3, 10))
        + ".",
    ]
    canvas, axes = new_figure(1, 1, 3.6)
    canvas.set_size_inches(5.6, 3.6)
    axis = axes[0][0]
    for noise_first, style in ((True, "o-"), (False, "s--")):
        for sweeps, colour in ((1, RED), (3, BLUE), (10, GREEN)):
            own = [o for o in bias if o["noise_first"] == noise_first and o["sweeps"] == sweeps]
            label = f"{sweeps} sweep{'s' * (sweeps > 1)}" + ("" if noise_first else ", down first")
            x, y = [o["levels"] for o in own], [100 * o["excess"] for o in own]
            axis.plot(x, y, style, color=colour, markersize=3.5, linewidth=1.2, label=label)
    axis.axhline(0, color="black", linewidth=0.8)
    counts = sorted({one["levels"] for one in bias})
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlabel("levels", fontsize=9)
    axis.set_ylabel("excess variance, %", fontsize=9)
    axis.legend(fontsize=7, frameon=False, ncols=2)
    open_axes(axis, 8)
    caption = "Excess of the samples' variance for a standard Gaussian: the paper's order (solid), down first (dashed)."
    return Section("The order of Gibbs sweeps", text, (), [Figure("many_levels_order", caption, canvas)])


EXPERIMENT = Experiment(
    "many-levels",
    "Samplers over many noise levels, on exact mixtures",
    "Langevin, Gibbs, consistent annealing, ancestral sampling, DDIM and Heun with an exact denoiser.",
    run,
)
