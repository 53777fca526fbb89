"""Designs of probes: how near so many products with a Jacobian come to its diagonal.

A Jacobian is computed whole, which costs no more than its exact diagonal does; then every design is tried on the matrix
by the library's own estimator, with many draws of the signs, and no network is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdgs.generation import Method, generate, make_plan
from mmdgs.jacobians import linearised
from mmdgs.lab.drawing import BLUE, COLOURS, GREEN, GREY
from mmdgs.lab.experiment import Context
from mmdgs.lab.workspace import Part
from mmdgs.models import Model
from mmdgs.moments import DiagonalMoments
from mmdgs.moments.probes import Hadamard, Lattice, ProbeDesign, Rademacher
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Streams
from mmdgs.runtime import progress_bar

DESIGNS: dict[str, tuple[str, str, ProbeDesign]] = {
    "Rademacher (paper)": (GREY, "o-", Rademacher()),
    "Hadamard": (GREEN, "^:", Hadamard()),
    "lattice": (COLOURS["diagonal"], "s--", Lattice(smooth=False)),
    "lattice, filtered": (BLUE, "o-", Lattice()),
}
"""Designs: how each is drawn, and what it is."""
YARDSTICK = "Rademacher (paper)"
IMAGE_SEED, NOISE_SEED, SIGN_SEED = 1, 2, 3
"""What is added to the seed for the images, their noise, and the signs of the probes."""
ROWS_AT_ONCE = {"cpu": 8, "cuda": 256}
"""Rows of a Jacobian that go through the network together: each is a product at another copy of the image."""


@dataclass(frozen=True)
class ProbeSettings:
    """How many products, how often, on how many images, and at which sigma / alpha of a model of many levels."""

    counts: tuple[int, ...] = (1, 2, 3, 5, 10, 20, 50, 100)
    draws: int = 20  # of the signs
    digits: int = 3
    images: int = 1  # a level
    ratios: tuple[float, ...] = (0.1, 0.7, 3.0, 12.0)
    sampling_steps: int = 20
    window: int | None = None  # only the middle pixels of the Jacobian, so many a side


def _images(context: Context, model: Model, name: str, count: int, settings: ProbeSettings) -> Tensor:
    """Samples of the model itself (count, C, H, W), so that no data are needed."""
    single = len(model.levels) == 1
    method = Method("gibbs" if single else "ddim", steps=settings.sampling_steps)
    asked = {"model": model.digest, "method": method.to_json(), "seed": context.seed, "count": count}

    def compute() -> Part:
        plan = make_plan(method, model)
        made = generate(model, plan, count, seed=context.seed + IMAGE_SEED, progress=f"samples of {name}")
        assert made.x is not None
        low, high = model.interval
        return Part({}, {"x": low + (high - low) * made.x})

    return context.workspace.part(f"{name}-samples", asked, compute).tensors["x"].to(context.device)


def jacobian(model: Model, x_t: Tensor, level: NoiseLevel, window: int | None, label: str) -> Tensor:
    """dD/dx_t at one image (1, C, H, W) as a matrix, or only how its middle window depends on itself."""
    inner = torch.zeros(x_t.shape[1:], dtype=torch.bool)
    inner[(slice(None), *(_middle(side, window) for side in x_t.shape[2:]))] = True
    places = inner.flatten().nonzero()[:, 0].to(x_t.device)
    size = min(len(places), ROWS_AT_ONCE.get(x_t.device.type, ROWS_AT_ONCE["cuda"]))
    at = linearised(model, x_t.expand(size, -1, -1, -1), level)
    found = []
    with progress_bar(len(places), label, "product") as bar:
        for own in places.split(size):
            v = x_t.new_zeros(size, x_t[0].numel())
            v[torch.arange(len(own), device=own.device), own] = 1
            found.append(at.pull(v.reshape(1, size, *x_t.shape[1:]))[0].flatten(1)[: len(own), places])
            bar.update(len(own))
    return torch.cat(found)


def _middle(side: int, window: int | None) -> slice:
    if window is None or window >= side:
        return slice(None)
    return slice((side - window) // 2, (side - window) // 2 + window)


def errors(matrix: Tensor, shape: tuple[int, ...], settings: ProbeSettings, seed: int) -> dict[str, list[float]]:
    """|estimate - diagonal| / |diagonal| of each design at each count, the mean over draws of the signs."""
    level, exact = NoiseLevel(sigma=1.0), matrix.diagonal()
    rows = matrix.new_zeros(settings.draws, *shape)
    found: dict[str, list[float]] = {}
    for name, (_, _, design) in DESIGNS.items():
        found[name] = []
        for count in settings.counts:
            moments = DiagonalMoments(_linear(matrix), probes=count, floor=-math.inf, design=design)
            q = moments(rows, level, generator=Streams(seed, settings.draws))
            off = q.cov.diagonal().flatten(1) - exact
            found[name].append((off.norm(dim=1) / exact.norm()).mean().item())
    return found


def _linear(matrix: Tensor) -> Any:
    """The denoiser x -> J x, whose Jacobian is known."""

    def denoiser(x: Tensor, level: NoiseLevel) -> Tensor:
        return (x.flatten(1) @ matrix.mT).reshape(x.shape)

    return denoiser


def measured(context: Context, model: Model, name: str, settings: ProbeSettings) -> list[dict[str, Any]]:
    """Records of a model: one for each level and image, each a part that a later run finds again."""
    single = len(model.levels) == 1
    levels = model.levels if single else tuple(NoiseLevel(sigma=ratio) for ratio in settings.ratios)
    images = _images(context, model, name, settings.digits if single else settings.images, settings)
    return [_one(context, model, name, images, level, i, settings) for level in levels for i in range(len(images))]


def _one(
    context: Context,
    model: Model,
    name: str,
    images: Tensor,
    level: NoiseLevel,
    number: int,
    settings: ProbeSettings,
) -> dict[str, Any]:
    ratio = level.sigma / level.alpha
    asked = {
        "model": model.digest, "ratio": ratio, "image": number, "seed": context.seed,
        "sampling_steps": settings.sampling_steps, "window": settings.window,
    }  # fmt: skip

    def whole() -> Part:
        stream = Streams(context.seed + NOISE_SEED, 1, first_row=number)
        x_t = add_noise(images[number : number + 1], level, generator=stream)
        label = f"{name}, sigma/alpha {ratio:g}, image {number + 1}"
        return Part({}, {"jacobian": jacobian(model, x_t, level, settings.window, label)})

    def compute() -> Part:
        # Kept by itself: other designs are then tried without asking the network again.
        matrix = context.workspace.part(f"{name}-{ratio:g}-{number}-jacobian", asked, whole).tensors["jacobian"]
        matrix = matrix.to(context.device)
        side = [min(size, settings.window or size) for size in images.shape[2:]]
        exact = matrix.diagonal()
        return Part({
            "model": name, "ratio": ratio, "image": number,
            "products_of_the_exact_diagonal": len(matrix),
            "flat_error": ((exact - exact.mean()).norm() / exact.norm()).item(),
            "error": errors(matrix, (images.shape[1], *side), settings, context.seed + SIGN_SEED),
        })  # fmt: skip

    designs = [repr(design) for _, _, design in DESIGNS.values()]
    also = {"designs": designs, "counts": settings.counts, "draws": settings.draws}
    return context.workspace.part(f"{name}-{ratio:g}-{number}", asked | also, compute).values


def averaged(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, float], dict[str, list[float]]]:
    """Errors by (model, sigma / alpha), the mean over images."""
    keys = dict.fromkeys((r["model"], r["ratio"]) for r in records)
    found = {}
    for key in keys:
        own = [r["error"] for r in records if (r["model"], r["ratio"]) == key]
        found[key] = {name: torch.tensor([one[name] for one in own]).mean(0).tolist() for name in own[0]}
    return found


def needed(counts: Sequence[int], found: Sequence[float], target: float) -> float:
    """The number of products at which a curve of errors falls to the target, between counts along a power law.

    The first count where it starts below; infinite where it stays above.
    """
    if found[0] <= target:
        return float(counts[0])
    for i in range(1, len(counts)):
        if found[i] <= target:
            share = math.log(found[i - 1] / target) / math.log(found[i - 1] / found[i])
            return counts[i - 1] * (counts[i] / counts[i - 1]) ** share
    return math.inf
