"""Which covariance: how likely held-out images are under each posterior of their noisy versions, level by level.

A posterior is a density, so this asks it directly, without a sampler in between: the logarithm of N(x; mean, C) in
nats a number. All have the same mean; what differs is C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.cost import counting
from mmdgs.errors import UsageError
from mmdgs.lab.drawing import COLOURS, ORANGE, PINK, bars, new_figure, open_axes
from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.held_out import chosen_levels, data_of, held_out
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.lab.workspace import Part
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics import interval
from mmdgs.metrics.coverage import fitted_floor
from mmdgs.models import Model, from_pretrained
from mmdgs.moments import DiagonalMoments, IsotropicMoments, KrylovMoments, Moments
from mmdgs.moments.spectral import SpectralMoments
from mmdgs.noise import LevelTable, NoiseLevel, add_noise
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams

MODEL = "cifar10"
SEED = 60
ROWS = {"cuda": 64, "cpu": 8}  # images at a time
ISOTROPIC, DIAGONAL, SPECTRAL, KRYLOV = "isotropic", "diagonal", "spectral", "Krylov"
STYLES = {
    ISOTROPIC: (ORANGE, "o-"),
    DIAGONAL: (COLOURS["diagonal"], "o-"),
    SPECTRAL: (PINK, "o-"),
    KRYLOV: (COLOURS["full"], "s--"),
}


@dataclass(frozen=True)
class CovarianceSettings:
    """How many held-out images, training images to fit on, levels, probes of the diagonal, and Krylov steps."""

    images: int = 64
    fit_images: int = 500
    floor_images: int = 32  # of them, for the floor of the diagonal
    levels: int = 6
    probes: int = 3
    krylov_images: int = 8
    krylov_steps: int = 20
    krylov_probes: int = 2
    krylov_floor: float = 0.1  # of the isotropic variance: smaller eigenvalues of a network's Jacobian are its errors


FULL = {"cuda": CovarianceSettings(images=512, krylov_images=64, krylov_probes=10), "cpu": CovarianceSettings()}
QUICK = CovarianceSettings(
    images=4, fit_images=8, floor_images=4, levels=2, krylov_images=2, krylov_steps=3, krylov_probes=1
)


def run(context: Context) -> Outcome:
    """The likelihoods at every level."""
    settings = context.sized(FULL.get(context.device.type, FULL["cpu"]), QUICK)
    model = from_pretrained(context.model or MODEL, device=context.device)
    data = data_of(model)
    if settings.images < 2:
        raise UsageError(f"--images must be at least 2, for an interval; got {settings.images}")
    wanted = {"train": settings.fit_images, "test": settings.images}
    images = cache(lambda split: held_out(context, model, split, wanted[split], SEED))  # read once, where it is needed
    levels = [_level(context, model, level, settings, images) for level in chosen_levels(model.levels, settings.levels)]
    named = asdict(settings) | {"model": model.source, "data": data}
    return Outcome({"settings": named, "levels": levels}, [section(levels, named, quick=context.quick)])


def _level(
    context: Context,
    model: Model,
    level: NoiseLevel,
    settings: CovarianceSettings,
    images: Callable[[str], Tensor],
) -> dict[str, Any]:
    """All covariances at one level, with the images of each split."""
    asked = {"model": model.digest, "seed": context.seed, "level": [level.alpha, level.sigma], **asdict(settings)}

    def compute() -> Part:
        seed = context.seed + SEED
        fit, x = images("train"), images("test")
        spectral = SpectralMoments.fit(model, fit, [level], generator=Streams(seed + 1, len(fit)))
        # Cosines are a rotation: this is the mean square of the errors themselves.
        variance = spectral.variances[level].mean().item()
        floor = settings.krylov_floor * variance / level.variance
        estimators: dict[str, Moments] = {
            ISOTROPIC: IsotropicMoments(model, LevelTable.of({level: variance})),
            DIAGONAL: _diagonal(model, fit[: settings.floor_images], level, settings.probes, seed + 2),
            SPECTRAL: spectral,
            KRYLOV: KrylovMoments(model, steps=settings.krylov_steps, floor=floor, probes=settings.krylov_probes),
        }
        counts = {
            name: min(settings.krylov_images, settings.images) if name == KRYLOV else settings.images
            for name in estimators
        }
        found = {
            name: likelihoods(moments, x[: counts[name]], level, seed=seed + 3) for name, moments in estimators.items()
        }
        costs = {name: _evaluations(moments, x[:1], level, seed) for name, moments in estimators.items()}
        return Part(
            {
                name: _summary(own, found[ISOTROPIC][: len(own)]) | {"evaluations": costs[name]}
                for name, own in found.items()
            }
        )

    ratio = level.sigma / level.alpha
    part = context.workspace.part(f"level-{ratio:.4g}", asked, compute)
    return {"ratio": ratio, "alpha": level.alpha, "sigma": level.sigma, "covariances": part.values}


def _diagonal(model: Model, x: Tensor, level: NoiseLevel, probes: int, seed: int) -> DiagonalMoments:
    """The diagonal with the floor under which training images are likeliest."""
    found = list(_posteriors(DiagonalMoments(model, probes=probes), x, level, seed))
    means, variances = (torch.cat(parts) for parts in zip(*((q.mean, q.cov.diagonal()) for _, q in found), strict=True))
    limit = fitted_floor(x, Gaussian(means, Diagonal(variances)))
    return DiagonalMoments(model, probes=probes, floor=limit / level.variance)


def _posteriors(moments: Moments, x: Tensor, level: NoiseLevel, seed: int) -> Iterator[tuple[Tensor, Gaussian]]:
    """Some rows of x at a time, and the posteriors of noisy versions of them.

    Each row has random streams of its own: one for its noise, one for what an estimator draws.
    """
    rows = ROWS.get(x.device.type, ROWS["cpu"])
    for first in range(0, len(x), rows):
        clean = x[first : first + rows]
        noise, own = (Streams(seed + i, len(clean), first_row=first) for i in range(2))
        yield clean, moments(add_noise(clean, level, generator=noise), level, generator=own)


def likelihoods(
    moments: Moments, x: Float[Tensor, "batch ..."], level: NoiseLevel, *, seed: int
) -> Float[Tensor, " batch"]:
    """log N(x; mean, C) / d of each x under the posterior of a noisy version of it, in nats."""
    found = [q.log_prob(clean) / clean[0].numel() for clean, q in _posteriors(moments, x, level, seed)]
    return torch.cat(found).detach().double().cpu()


def _evaluations(moments: Moments, x: Tensor, level: NoiseLevel, seed: int) -> float:
    """What a posterior and a draw from it cost."""
    streams = Streams(seed, len(x))
    with counting() as cost:
        moments(x, level, generator=streams).sample(generator=streams)
    return cost.evaluations


def _summary(own: Tensor, isotropic: Tensor) -> dict[str, Any]:
    """The mean, and how much above isotropic on the same images, each with a 95% interval over images."""
    (nats, half), (gain, gain_half) = (interval(values.tolist()) for values in (own, own - isotropic))
    return {"images": len(own), "nats": nats, "interval": half, "gain": gain, "gain_interval": gain_half}


# --- the report ---------------------------------------------------------------------------------------------------

Level = Mapping[str, Any]


def section(levels: Sequence[Level], settings: Mapping[str, Any], *, quick: bool) -> Section:
    """The table, the figure and the verdict."""
    text = [
        "The likelihood of held-out images under the posterior of their noisy versions, in nats a number: higher is "
        "better, and the mean is the same for all. Isotropic and spectral variances are fitted on training images, "
        f"the floor of the diagonal ({settings['probes']} probes) too. Krylov is the full covariance of the network's "
        f"Jacobian by {settings['krylov_steps']} steps, its eigenvalues at least {settings['krylov_floor']:g} of "
        "the isotropic variance.",
        "This is the quick version: so few images say nothing." if quick else verdict(levels),
    ]
    names = list(STYLES)
    header = ["covariance", *(f"sigma / alpha {level['ratio']:.3g}" for level in levels), "evaluations"]
    rows = [
        [name, *(_cell(level, name) for level in levels), f"{levels[0]['covariances'][name]['evaluations']:g}"]
        for name in names
    ]
    best = frozenset((names.index(_best(level)), 1 + j) for j, level in enumerate(levels))
    note = (
        f"{settings['images']} held-out images of {settings['data']} (Krylov: the first {settings['krylov_images']}), "
        f"{settings['fit_images']} to fit on, of {settings['model']}; ± 95% over images. Evaluations are those of one "
        "draw, a product with the Jacobian counting as two."
    )
    title = "Likelihood, nats a number; of all but isotropic, how much above it on the same images"
    table = Table(title, header, rows, note, best=best)
    draw = _draw(levels) if len(levels) > 1 else _draw_bars(levels[0])
    caption = "Nats a number above the isotropic covariance, on the same images; 95% over images."
    return Section("Which covariance", text, [table], [Figure("covariances", caption, draw)])


def _cell(level: Level, name: str) -> str:
    one = level["covariances"][name]
    if name == ISOTROPIC:
        return f"{one['nats']:.2f} ± {one['interval']:.2f}"
    return f"{one['gain']:+.2f} ± {one['gain_interval']:.2f}"


def _best(level: Level) -> str:
    """By the gain over isotropic on the same images: rows have different numbers of them."""
    own = level["covariances"]
    return max(own, key=lambda name: own[name]["gain"])


def verdict(levels: Sequence[Level]) -> str:
    """Where each covariance is likelier than one variance for all, and by how much; and the likeliest of all."""
    said = []
    for name in STYLES:
        if name == ISOTROPIC:
            continue
        own = [level["covariances"][name] for level in levels]
        wins = sum(one["gain"] > one["gain_interval"] for one in own)
        gains = [one["gain"] for one in own]
        said.append(
            f"{name} is likelier than isotropic at {wins} of {len(levels)} levels (from {min(gains):+.2f} to "
            f"{max(gains):+.2f} nats a number)"
        )
    first = [_best(level) for level in levels]
    most = max(STYLES, key=first.count)
    return f"{'; '.join(said)}. The likeliest is {most}, at {first.count(most)} of {len(levels)} levels."


def _draw(levels: Sequence[Level]) -> Canvas:
    canvas, axes = new_figure(1, 1, 3.4)
    canvas.set_size_inches(6.8, 3.4)
    axis = axes[0][0]
    ratios = [level["ratio"] for level in levels]
    for name, (colour, style) in STYLES.items():
        own = [level["covariances"][name] for level in levels]
        gains, spread = [one["gain"] for one in own], [one["gain_interval"] for one in own]
        axis.errorbar(
            ratios, gains, spread, fmt=style, color=colour, markersize=4, linewidth=1.3, capsize=2, label=name
        )
    axis.set_xscale("log")
    axis.set_xlabel("sigma / alpha", fontsize=9)
    axis.set_ylabel("nats a number above isotropic", fontsize=9)
    open_axes(axis, 8)
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return canvas


def _draw_bars(level: Level) -> Canvas:
    """The same for a model of one level, where there is nothing to draw against."""
    canvas, axes = new_figure(1, 1, 2.4)
    canvas.set_size_inches(6.0, 2.2)
    own = [level["covariances"][name] for name in STYLES]
    colours = [colour for colour, _ in STYLES.values()]
    bars(axes[0][0], list(STYLES), [one["gain"] for one in own], [one["gain_interval"] for one in own], colours)
    axes[0][0].set_xlabel("nats a number above isotropic", fontsize=9)
    return canvas


EXPERIMENT = Experiment(
    "covariances",
    "Which covariance: the likelihood of held-out images",
    "Isotropic, diagonal, spectral and full (Krylov) covariances of one network (--model, else the CIFAR-10 model that "
    "ships), by the likelihood of held-out images under the posteriors of their noisy versions, level by level.",
    run,
)
