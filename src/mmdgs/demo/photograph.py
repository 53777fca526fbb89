"""A photograph in the demo: the posterior of a noisy one, and one restored from a smaller image.

The photograph comes with matplotlib: a portrait of Grace Hopper by the US Navy (public domain).
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from matplotlib.cbook import get_sample_data
from matplotlib.figure import Figure as Canvas
from PIL import Image
from torch import Tensor

from mmdgs.models import load
from mmdgs.models.shipped import PHOTO
from mmdgs.operators import Downsample
from mmdgs.report.drawing import bare, new_figure
from mmdgs.report.page import Figure, Section
from mmdgs.restoration.draws import restore
from mmdgs.restoration.folder import scores_of, simulated
from mmdgs.uncertainty.image import image_posterior
from mmdgs.uncertainty.settings import PosteriorSettings
from mmdgs.workspace import Part, Workspace

SIGMA, NOISE = 25 / 255, 0.02
SIDE, RESTORED_SIDE = 256, 128
CENTRE = (190, 256)
"""Row and column in the photograph: the face."""
DRAWS, QUALITY = 8, "fast"
SHOWN = ("noisy", "measured", "mean", "standard deviation", "draw 1", "draw 2")
WHITE = 0.08
"""The standard deviation that is shown white."""


def clean_photograph(side: int) -> Tensor:
    """A square part of the photograph, (3, side, side) in [0, 1]."""
    top, left = (place - side // 2 for place in CENTRE)
    path = get_sample_data("grace_hopper.jpg", asfileobj=False)
    stored = torch.from_numpy(numpy.array(Image.open(str(path)).convert("RGB")))
    return stored[top : top + side, left : left + side].permute(2, 0, 1) / 255


def photograph(workspace: Workspace, device: torch.device, seed: int) -> tuple[Section, Any]:
    """The section of the page, and what it measured."""
    depends = {"seed": seed, "sides": (SIDE, RESTORED_SIDE), "draws": DRAWS, "quality": QUALITY}
    seen = workspace.part("photograph", depends, lambda: _posterior(device, seed))
    again = workspace.part("photograph-restored", depends, lambda: _restored(device, seed))
    text = [
        "The model `photo` takes photographs of any size. Intervals are judged here by the clean "
        "photograph, which the model has not seen."
    ]
    rows = {name: part.values for name, part in (("posterior", seen), ("restored", again))}
    first = (
        f"Noise of sigma {SIGMA:.3f}: the mean has {seen.values['psnr']:.1f} dB. Where the "
        "standard deviation is bright (white: "
        f"{WHITE}) the mean is a guess; {seen.values['covered']:.1%} of the numbers lie in their "
        "90% intervals."
    )
    second = (
        f"An image of half the size with noise {NOISE}, restored by {DRAWS} draws of 10 "
        f"evaluations each: the mean has {again.values['psnr']:.1f} dB, and 90% intervals of the "
        f"draws hold {again.values['covered']:.1%} of the numbers."
    )
    figures = [
        Figure(name, words, drawn({title: images[title] for title in SHOWN if title in images}))
        for name, words, images in (
            ("photograph", first, seen.tensors),
            ("photograph_restored", second, again.tensors),
        )
    ]
    return Section("A photograph", text, figures=figures), rows


def _posterior(device: torch.device, seed: int) -> Part:
    model, truth = load(PHOTO, device=device), clean_photograph(SIDE)
    settings = PosteriorSettings(SIGMA, simulate=True, components=0, draws=2, seed=seed)
    seen = image_posterior(model, truth, settings)
    shown = {"noisy": seen.noisy, "mean": seen.mean, "standard deviation": seen.std}
    return Part(
        _values(seen.scores, seen.seconds),
        shown | {f"draw {i}": draw for i, draw in enumerate(seen.draws, 1)},
    )


def _restored(device: torch.device, seed: int) -> Part:
    model, truth = load(PHOTO, device=device), clean_photograph(RESTORED_SIDE)
    operator = Downsample(tuple(truth.shape), 2)
    y = simulated(truth[None], operator, NOISE, seed=seed)
    how: dict[str, Any] = {"quality": QUALITY, "draws": DRAWS, "seed": seed}
    restored = restore(model, y.to(device), operator, noise=NOISE, progress="photograph", **how)
    draws = restored.draws[:, 0].cpu()
    values = _values(scores_of(draws[:, None], truth[None]), restored.seconds)
    names = ("mean", "standard deviation", "draw 1", "draw 2")
    shown = zip(names, (draws.mean(0), draws.std(0), *draws[:2]), strict=True)
    return Part(values, {"measured": y[0].cpu(), **dict(shown)})


def _values(scores: dict[str, float], seconds: float) -> dict[str, float]:
    return {"psnr": scores["psnr_mean"], "covered": scores["coverage_90"], "seconds": seconds}


def drawn(images: dict[str, Tensor]) -> Canvas:
    """A row of images, by title; standard deviations are averages over its colours."""
    canvas, (axes,) = new_figure(1, len(images), 2.4)
    for axis, (title, image) in zip(axes, images.items(), strict=True):
        if title == "standard deviation":
            grey = image.square().mean(0).sqrt() / WHITE
            axis.imshow(grey.numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        else:
            axis.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
        bare(axis, title)
    return canvas
