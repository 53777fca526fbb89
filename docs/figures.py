"""Draw the figures of docs/use/idea.md, by the library itself, and of records, into docs/images.

    python docs/figures.py                 all figures (a minute on one core)
    python docs/figures.py point chain     some of them
    python docs/figures.py evidence        log p(y) over noises and blurs (ten minutes)
    python docs/figures.py restored        a photograph with a box, and of half size (ten minutes)
    python docs/figures.py costs           of docs/records: restorers by their evaluations
    python docs/figures.py inputs          the digit and the face of the notebooks (two minutes)

Needs mmdgs[report], and for the photograph mmdgs[experiments]. Seeds are fixed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from PIL import Image
from torch import Tensor

import mmdgs
from mmdgs.demo.photograph import WHITE, drawn
from mmdgs.metrics import kl_divergence
from mmdgs.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    bare,
    density,
    grid,
    labelled,
    new_figure,
    scatter,
    square,
)
from mmdgs.restoration.folder import as_image, scores_of, simulated

IMAGES, RECORDS = (Path(__file__).parent / name for name in ("images", "records"))
COSTS = (
    ("inverse", "fair", "CIFAR-10, a mark for each of 4 tasks"),
    ("photo-restoration", "restored", "photographs, a mark for each of 10 tasks"),
)
LIMIT = 1.8
LEVEL = mmdgs.NoiseLevel(0.25)
CLEAN_POINT, NOISY_POINT = torch.tensor([[1.12, 0.66]]), torch.tensor([[0.98, 1.1]])
ZOOM = (0.1, 1.7)
"""The part of the plane around the point, for its posterior."""
INK = "#1f2933"


def point() -> Figure:
    """A clean point and its noise; the true posterior; the Gaussian with its two moments."""
    rings = mmdgs.data.rings_density().to(dtype=torch.float64)
    points, _ = grid(LIMIT, 240)
    x, x_t = CLEAN_POINT.double(), NOISY_POINT.double()
    true, q = rings.posterior(x_t, LEVEL), mmdgs.FullMoments(rings.denoiser())(x_t, LEVEL)
    figure, ((data, posterior, gaussian),) = new_figure(1, 3, inches=(8.4, 3.1))
    titles = (
        "1. x gets noise",
        "2. the true p(x | noisy x), enlarged",
        "3. the Gaussian with its moments",
    )
    for axis, title in zip((data, posterior, gaussian), titles, strict=True):
        square(axis, LIMIT, title, ticks=())
    density(data, rings.log_prob(points).exp(), LIMIT)
    data.annotate("", x_t[0].tolist(), x[0].tolist(), arrowprops={"arrowstyle": "->", "color": INK})
    _mark(data, x, GREEN, "clean x", (7, -4))
    for axis in (posterior, gaussian):
        _zoomed(axis, true.mixture(0).log_prob(points).exp())
    for axis in (data, posterior, gaussian):
        _mark(axis, x_t, ORANGE, "noisy x", (2, 8))
    _mark(posterior, true.mean, RED, "mean", (-34, -10))
    _ellipses(gaussian, q)
    scatter(
        gaussian,
        q.sample(60, generator=torch.Generator().manual_seed(0))[:, 0],
        RED,
        size=9,
        alpha=0.6,
    )
    return figure


def slope() -> Figure:
    """One dimension: the slope of the denoiser is the variance of the posterior."""
    mixture = mmdgs.targets.GaussianMixture(
        [0.5, 0.5], torch.tensor([[-1.0], [1.0]], dtype=torch.float64), 0.25
    )
    level = mmdgs.NoiseLevel(0.7)
    x_t = torch.linspace(-2.6, 2.6, 261, dtype=torch.float64)[:, None]
    q = mmdgs.FullMoments(mixture.denoiser())(x_t, level)
    std, mean, at = q.cov.diagonal().sqrt()[:, 0], q.mean[:, 0], x_t[:, 0]
    figure, ((left, right),) = new_figure(1, 2, inches=(8.4, 3.0))
    left.plot(at, mean, color=BLUE)
    left.fill_between(at, mean - std, mean + std, color=BLUE, alpha=0.15, linewidth=0)
    for place, colour in ((0.0, RED), (1.6, GREEN)):
        here = mixture.posterior(torch.tensor([[place]], dtype=torch.float64), level)
        incline, ends = here.covariance.item() / level.variance, torch.tensor([-0.55, 0.55])
        left.plot(place + ends, here.mean.item() + incline * ends, color=colour, linewidth=2.5)
        left.plot([place], [here.mean.item()], "o", color=colour, markersize=5)
        line = torch.linspace(-2, 2, 401, dtype=torch.float64)[:, None]
        right.plot(
            line[:, 0],
            here.mixture(0).log_prob(line).exp(),
            color=colour,
            label=f"noisy x = {place:g}",
        )
    labelled(left, "the denoiser D, and ± one standard deviation", "noisy x", "clean x")
    labelled(right, "p(x | noisy x) at the two points", "clean x", "density")
    right.legend(frameon=False, fontsize=8)
    return figure


def covariances() -> Figure:
    """One point: the posterior, and Gaussians of one variance, of one a coordinate, and of a full
    covariance.
    """
    rings = mmdgs.data.rings_density().to(dtype=torch.float64)
    denoiser, x_t = rings.denoiser(), NOISY_POINT.double()
    g = torch.Generator().manual_seed(0)
    data = rings.sample(20_000, generator=g)
    estimators = {
        "isotropic": mmdgs.IsotropicMoments.fit(denoiser, data, LEVEL, generator=g),
        "diagonal": mmdgs.DiagonalMoments(denoiser, probes=None),
        "full": mmdgs.FullMoments(denoiser),
    }
    points, area = grid(LIMIT, 240)
    log_true = rings.posterior(x_t, LEVEL).mixture(0).log_prob(points)
    figure, (axes,) = new_figure(1, 3, inches=(8.4, 3.1))
    for axis, (name, moments) in zip(axes, estimators.items(), strict=True):
        q = moments(x_t, LEVEL, generator=g)
        log_q = torch.distributions.MultivariateNormal(q.mean[0], q.cov.dense()[0]).log_prob(points)
        apart = kl_divergence(log_true, log_q, area)
        square(axis, LIMIT, f"{name}: KL {apart:.2f} nats", ticks=())
        _zoomed(axis, log_true.exp())
        _ellipses(axis, q)
    return figure


def digit() -> Figure:
    """A noisy digit: mean, standard deviation, draws, and walks along two components."""
    clean = read("digit.png")
    noisy = mmdgs.add_noise(
        clean, mmdgs.NoiseLevel(0.5), generator=torch.Generator().manual_seed(2)
    )
    settings = mmdgs.PosteriorSettings(0.5, components=2, draws=5)
    seen = mmdgs.image_posterior(mmdgs.load("mnist-energy"), noisy, settings)
    walks = seen.walk()
    rows = [
        (
            ("clean", clean),
            ("noisy", noisy),
            ("mean", seen.mean),
            ("std", seen.std / seen.std.max()),
        ),
        [(f"draw {i + 1}", draw) for i, draw in enumerate(seen.draws)],
        [
            (f"{step:+d} std" if step else "mean", image)
            for step, image in zip(range(-2, 3), walks[0], strict=True)
        ],
        [
            (f"{step:+d} std" if step else "mean", image)
            for step, image in zip(range(-2, 3), walks[1], strict=True)
        ],
    ]
    figure, axes = new_figure(4, 5, inches=(6.2, 5.6))
    for line, images, name in zip(
        axes, rows, ("", "draws", "component 1", "component 2"), strict=True
    ):
        for axis in line:
            axis.set_axis_off()
        for axis, (title, image) in zip(line, images, strict=False):
            axis.set_title(title, fontsize=8)
            axis.imshow(image[0], cmap="magma" if title == "std" else "gray", vmin=0, vmax=1)
        line[0].text(
            -0.12,
            0.5,
            name,
            rotation=90,
            va="center",
            ha="right",
            transform=line[0].transAxes,
            fontsize=8,
        )
    return figure


def chain() -> Figure:
    """Gibbs sampling in two dimensions: three sweeps, then a long chain beside the density."""
    mixture = mmdgs.data.mog_density().to(dtype=torch.float64)
    level, moments = mmdgs.NoiseLevel(0.5), mmdgs.FullMoments(mixture.denoiser())
    points, _ = grid(LIMIT, 240)
    figure, (axes,) = new_figure(1, 3, inches=(8.4, 3.1))
    titles = (
        "three sweeps: noise, then a draw",
        "one chain, 200 sweeps",
        "1,000 chains after 50 sweeps",
    )
    for axis, title in zip(axes, titles, strict=True):
        square(axis, LIMIT, title, ticks=())
        density(axis, mixture.log_prob(points).exp(), LIMIT)
    g = torch.Generator().manual_seed(18)
    x = torch.tensor([[-0.9, -1.0]], dtype=torch.float64)
    for _ in range(3):
        x_t = mmdgs.add_noise(x, level, generator=g)
        following = moments(x_t, level).sample(generator=g)
        for start, end, colour in ((x, x_t, ORANGE), (x_t, following, RED)):
            axes[0].annotate(
                "",
                end[0].tolist(),
                start[0].tolist(),
                arrowprops={"arrowstyle": "->", "color": colour},
            )
        axes[0].plot(*x[0].tolist(), "o", color=GREEN, markersize=5)
        x = following
    axes[0].plot(*x[0].tolist(), "o", color=GREEN, markersize=5)
    one = mmdgs.gibbs_chain(moments, x, level, steps=200, seed=0, progress=None)[:, 0]
    axes[1].plot(*one.mT, color=GREY, linewidth=0.5)
    scatter(axes[1], one, RED, size=8, alpha=0.8)
    start = 0.1 * torch.randn(1000, 2, generator=g, dtype=torch.float64)
    scatter(
        axes[2],
        mmdgs.gibbs_chain(moments, start, level, steps=50, seed=1, progress=None)[-1],
        RED,
        size=4,
    )
    return figure


def digits() -> Figure:
    """Chains of digits from noise, after some sweeps."""
    model, kept = mmdgs.load("mnist-energy"), (0, 1, 2, 5, 10, 20)
    plan = mmdgs.samplers.single_level_plan(
        model.posterior("diagonal"), model.level, steps=kept[-1]
    )
    start = plan.noise(model.shape, 6, generator=torch.Generator().manual_seed(0), centre=0.5)
    states = mmdgs.samplers.run(plan, start, seed=0, keep=kept, progress=None).samples
    figure, (axes,) = new_figure(1, len(kept), inches=(6.4, 2.0))
    for axis, sweeps, images in zip(axes, kept, states, strict=True):
        axis.imshow(mmdgs.data.image_grid(images, columns=2), cmap="gray")
        axis.set_title(f"{sweeps} sweep{'s' * (sweeps > 1)}" if sweeps else "start", fontsize=8)
        axis.set_axis_off()
    return figure


def photograph() -> Figure:
    """A noisy photograph, its posterior mean, standard deviation, and a draw."""
    truth, sigma = _china(320), 25 / 255
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))
    settings = mmdgs.PosteriorSettings(sigma, components=0, draws=1)
    seen = mmdgs.image_posterior(mmdgs.load("photo"), truth + sigma * noise, settings)
    shown = {"noisy": seen.noisy, "mean": seen.mean, "standard deviation": seen.std}
    return drawn({**shown, "one draw": seen.draws[0]})


def restored() -> Figure:
    """A photograph with a missing box, and one of half the size, restored: the middle of each."""
    truth, noise, side = _china(256), 0.02, 128
    model = mmdgs.load("photo").sized(*truth.shape[1:])
    figure, axes = new_figure(2, 6, 1.9)
    for row, operator in zip(
        axes,
        (mmdgs.operators.Box(model.shape, 64), mmdgs.operators.Downsample(model.shape, 2)),
        strict=True,
    ):
        y = simulated(truth[None], operator, noise, seed=0)
        draws = mmdgs.restore(model, y, operator, noise=noise, draws=4).draws[:, 0]
        measured = as_image(operator.known(y), model.shape)[0]
        measured = torch.nn.functional.interpolate(measured[None], truth.shape[1:])[0]
        std = (draws.var(0).mean(0).sqrt() / WHITE)[None].expand(3, -1, -1)
        images = (measured, draws.mean(0), std, draws[0], draws[1], truth)
        titles = ("measured", "mean", "standard deviation", "a draw", "another", "truth")
        parts = [_middle(image, side) for image in images]
        for axis, image, title in zip(row, parts, titles, strict=True):
            axis.imshow(image.clamp(0, 1).movedim(0, -1).numpy(), interpolation="nearest")
            bare(axis, title)
        seen, clean = _middle(draws[:, None], side), _middle(truth[None], side)
        print(operator, scores_of(draws[:, None], truth[None]), "middle", scores_of(seen, clean))
    return figure


def _china(side: int) -> Tensor:
    """A square of scikit-learn's photograph, (3, side, side): a roof, trees and sky."""
    from sklearn.datasets import load_sample_image

    top, left = 210 - side // 2, 330 - side // 2
    stored = load_sample_image("china.jpg")[top : top + side, left : left + side]
    return torch.from_numpy(stored.copy()).movedim(-1, 0) / 255


def _middle(image: Tensor, side: int) -> Tensor:
    first = (image.shape[-1] - side) // 2
    return image[..., first : first + side, first : first + side]


def evidence() -> Figure:
    """log p(y) of a blurred image over noises and over widths of the blur, by particles."""
    model = mmdgs.load("cifar10")
    heun = mmdgs.SamplerSettings(sampler="heun", steps=12)
    x = mmdgs.generate(model, heun, 1, progress=None).x
    width, noise = 1.2, 0.05
    widths, noises = (
        [0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4],
        [0.03, 0.04, 0.045, 0.05, 0.055, 0.06, 0.08],
    )
    blurs = [mmdgs.operators.Blur.gaussian(model.shape, of) for of in widths]
    true = blurs[widths.index(width)]
    y = true(x) + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    how = {"particles": 4, "runs": 4, "steps": 25}
    by_noise = mmdgs.evidence(model, y, true, noise=noises, **how)
    by_width = mmdgs.evidence(model, y, blurs, noise=noise, **how)
    figure, ((picture, left, right),) = new_figure(1, 3, inches=(8.4, 2.9))
    picture.imshow(y[0].clamp(0, 1).permute(1, 2, 0))
    picture.set(xticks=[], yticks=[], title="y")
    for axis, places, likely, at, name in (
        (left, noises, by_noise, noise, "noise"),
        (right, widths, by_width, width, "width of the blur, pixels"),
    ):
        log = likely.log[:, 0] - likely.log.max()
        axis.errorbar(places, log, likely.error[:, 0], color=BLUE, marker="o", capsize=2)
        axis.axvline(at, color=GREY, linestyle="--")
        labelled(axis, "", name, "log p(y) below its maximum, nats")
    print("noise", noises, by_noise.log[:, 0].tolist(), by_noise.error[:, 0].tolist())
    print("width", widths, by_width.log[:, 0].tolist(), by_width.error[:, 0].tolist())
    return figure


def costs() -> Figure:
    """CRPS above the lowest of each task against evaluations, by the records of restoration."""
    figure, (axes,) = new_figure(1, 2, inches=(8.4, 3.4))
    looks = {"spectral": (BLUE, "o"), "low rank": (ORANGE, "s"), "PiGDM": (GREEN, "^"),
             "MMPS": (RED, "v"), "DPS": (GREY, "D"), "DiffPIR": (INK, "P")}  # fmt: skip
    for axis, (name, cells, title) in zip(axes, COSTS, strict=True):
        cells = json.loads((RECORDS / f"{name}.json").read_text())[cells]
        cells = [cell for cell in cells if not cell["row"].endswith("not inflated")]
        tasks: dict[str, list[dict[str, Any]]] = {}
        for cell in cells:
            tasks.setdefault(cell["task"], []).append(cell)
        for alike in (alike for alike in tasks.values() if len(alike) > 2):  # rivals, too
            crps = [float(numpy.mean(cell["crps"])) for cell in alike]
            for cell, own in zip(alike, crps, strict=True):
                look = next((look for name, look in looks.items() if name in cell["row"]), None)
                if look is not None:
                    above = 100 * (own / min(crps) - 1)
                    axis.plot(
                        cell["evaluations"], above, look[1], color=look[0], markersize=5, alpha=0.85
                    )
        axis.set(xscale="log", ylim=(-1, 34))
        labelled(axis, title, "evaluations of a draw", "CRPS above the lowest, %")
    for name, (colour, mark) in looks.items():
        axes[0].plot([], [], mark, color=colour, markersize=5, label=name)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def inputs() -> None:
    """docs/images/digit.png and face.png: samples of the models that ship, so nobody's."""
    digit = mmdgs.generate(
        mmdgs.load("mnist-energy"), mmdgs.SamplerSettings(steps=20, mean=True), 16, progress=None
    ).x[7]
    face = mmdgs.generate(
        mmdgs.load("celeba"), mmdgs.SamplerSettings(sampler="heun", steps=12), 2, progress=None
    ).x[1]
    for name, image in (("digit.png", digit), ("face.png", face)):
        pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1).squeeze(-1)
        Image.fromarray(pixels.numpy()).save(IMAGES / name, optimize=True)


def read(name: str) -> Tensor:
    """A picture of docs/images as (C, H, W) in [0, 1]."""
    pixels = torch.as_tensor(numpy.array(Image.open(IMAGES / name))) / 255
    return pixels[None] if pixels.ndim == 2 else pixels.movedim(-1, 0)


def _mark(axis: Axes, place: Tensor, colour: str, name: str, offset: tuple[int, int]) -> None:
    axis.plot(*place[0].tolist(), "o", color=colour, markersize=6, markeredgecolor="white")
    axis.annotate(
        name, place[0].tolist(), offset, textcoords="offset points", fontsize=8, color=INK
    )


def _zoomed(axis: Axes, values: Tensor) -> None:
    density(axis, values, LIMIT)
    axis.set(xlim=ZOOM, ylim=ZOOM)


def _ellipses(axis: Axes, q: mmdgs.Gaussian) -> None:
    """One and two standard deviations of a Gaussian in the plane."""
    values, vectors = torch.linalg.eigh(q.cov.dense()[0])
    turn = torch.rad2deg(torch.atan2(vectors[1, 1], vectors[0, 1])).item()
    for reach in (1, 2):
        width, height = (2 * reach * values.sqrt()).flip(0).tolist()
        axis.add_patch(
            Ellipse(
                q.mean[0].tolist(), width, height, angle=turn, fill=False, color=RED, linewidth=1.4
            )
        )


FIGURES: dict[str, Callable[[], Figure]] = {
    "point": point,
    "slope": slope,
    "covariances": covariances,
    "digit": digit,
    "chain": chain,
    "digits": digits,
    "evidence": evidence,
    "photograph": photograph,
    "restored": restored,
    "costs": costs,
}


PHOTOGRAPHS = ("photograph", "restored")
"""Drawn as JPEG files."""
SLOW = ("evidence", "restored")
"""Drawn only by name."""


def main(names: list[str]) -> None:
    """Draw the figures that are named, or all."""
    unknown = set(names) - {*FIGURES, "inputs"}
    if unknown:
        raise SystemExit(
            f"no figure {sorted(unknown)[0]!r}; there are {', '.join(FIGURES)}, and inputs"
        )
    if "inputs" in names:
        inputs()
    for name in names or [name for name in FIGURES if name not in SLOW]:
        if name in FIGURES:
            ending = "jpg" if name in PHOTOGRAPHS else "png"
            metadata = {"Software": ""} if ending == "png" else None
            FIGURES[name]().savefig(IMAGES / f"idea_{name}.{ending}", dpi=110, metadata=metadata)


if __name__ == "__main__":
    main(sys.argv[1:])
