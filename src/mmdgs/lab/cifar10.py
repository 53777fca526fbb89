"""CIFAR-10 at one noise level: covariances by probes, Gibbs chains from noise, FID against their length, collapse.

The paper's figures on CIFAR-10 with sigma 0.3 and a score network, and the mode collapse of its appendix, in numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmdgs.data import dequantised, spread
from mmdgs.errors import UsageError
from mmdgs.generation import Method
from mmdgs.lab.cifar10_collapse import collapse_section
from mmdgs.lab.cifar10_report import Findings, chain_section, fid_section, map_section
from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.sampler_cells import Cells, Judge, References, file_name
from mmdgs.lab.single_level_chains import DATA, DRAWS, MEANS, PAPERS, ROWS, SPECTRAL, Chains
from mmdgs.lab.small_models import QUICK_TRAINING, check_colours, model_of
from mmdgs.lab.table2 import path
from mmdgs.lab.workspace import Part
from mmdgs.models import Model, from_pretrained, load
from mmdgs.moments import DiagonalMoments
from mmdgs.moments.probes import Lattice, ProbeDesign, Rademacher
from mmdgs.noise import add_noise
from mmdgs.randomness import Streams
from mmdgs.training import Recipe

MODEL, MANY = "cifar10-score", "cifar10"
CLASSIFIER = "cifar10-classifier"
SIGMA = 0.3
TRAIN = (
    f"mmdgs train --data cifar10 --model unet-paper --param score --sigma {SIGMA:g} --epochs 1000 --batch-size 100 "
    "--learning-rate 1e-4 --precision bf16 --out runs/cifar10-score"
)
"""How the paper trained its model."""
MAP_SEED = 20


@dataclass(frozen=True)
class Cifar10Settings:
    """Sizes; where the paper has a number, it is the default, but for the images (50,000)."""

    images: int = 10_000
    steps: tuple[int, ...] = (5, 10, 20, 40, 60, 100)
    curves: tuple[str, ...] = tuple(ROWS)
    probes: int = 3  # on lattices, which come nearer than the paper's 10 with signs everywhere (docs/probes.md)
    block: int = 2_500  # chains that are run and kept as one part
    long_rows: tuple[str, ...] = (PAPERS, SPECTRAL)
    long_chains: int = 250
    long_steps: tuple[int, ...] = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 500, 1_000)
    shown: int = 25
    map_images: int = 8
    map_probes: tuple[int, ...] = (1, 10, 100)
    lattice_probes: tuple[int, ...] = (3, 10)
    levels: int = 232  # of the model of many levels
    fit_images: int = 2_000
    batch_size: int = 500
    precision: str = "bf16"
    metrics: tuple[str, ...] = ("fid", "diversity")
    reference_limit: int | None = None


FULL = Cifar10Settings()
QUICK = Cifar10Settings(
    images=16, steps=(2, 4, 8), block=8, long_chains=25, long_steps=(0, 2, 4, 8, 16), map_images=3, map_probes=(1, 10),
    lattice_probes=(3,), levels=6, fit_images=16, batch_size=16, precision="float32", metrics=("diversity",),
    reference_limit=500,
)  # fmt: skip
QUICK_RECIPE = Recipe(
    data=DATA, size=16, limit=2_000, model="unet-tiny", param="score", sigma=SIGMA,
    training=QUICK_TRAINING,
)  # fmt: skip


def run(context: Context) -> Outcome:
    """Maps, chains, their FID and their collapse."""
    settings = context.sized(FULL, QUICK)
    model = single_level_model(context)
    many = _many_model(context, model)
    references = References(DATA, context.data_dir, model.shape[1], settings.reference_limit)
    judge_network = _classifier(context, model.shape)
    judge = Judge.of(context, settings.metrics, references, judge_network)
    of_long = Judge.of(context, ("diversity",), references, judge_network)
    chains = Chains(
        context, model, settings.probes, settings.fit_images, settings.batch_size, settings.block, settings.precision
    )
    data = references.load("test")
    # The data first: a classifier of another size is told of before the work.
    others = {"data (test images)": of_long(data.images[spread(len(data), settings.long_chains)], "test images")}
    maps = _maps(chains, references, settings)
    long = {row: chains.states(row, settings.long_chains, settings.long_steps) for row in settings.long_rows}
    collapse = {
        row: {
            str(t): _judged(chains, of_long, row, MEANS, t, x)
            for t, x in zip(settings.long_steps, own[MEANS], strict=True)
            if t > 0
        }
        for row, own in long.items()
    }
    if many is not None:
        others["many levels, Gibbs"] = _many(chains, many, of_long, settings)
    curves = {row: _curves(chains, judge, row, settings) for row in settings.curves}
    named = asdict(settings) | {"model": model.source, "sigma": model.levels[0].sigma, "many": many and many.source}
    shown = {row: {kind: x[:, : settings.shown] for kind, x in own.items()} for row, own in long.items()}
    found = Findings(named, context.quick, maps.values, maps.tensors, shown, collapse, others, curves)
    records = {"settings": named, "maps": maps.values, "curves": curves, "collapse": collapse, "beside": others}
    return Outcome(records, [part(found) for part in (map_section, chain_section, fid_section, collapse_section)])


def single_level_model(context: Context) -> Model:
    """The model that --model names, or the one that ships; quick runs train a tiny one."""
    model = model_of(context, MODEL, replace(QUICK_RECIPE, data=DATA, data_dir=context.data_dir), TRAIN)
    if len(model.levels) != 1:
        raise UsageError(
            f"--model must be a model of one noise level, and {model.source} has {len(model.levels)}: train one with "
            f"`{TRAIN}`; models of many levels are for `mmdgs reproduce table2`, or go to --many"
        )
    check_colours(model)
    return model


def _classifier(context: Context, shape: tuple[int, ...]) -> Model | None:
    """The classifier that --classifier names, or the one that ships, for images of its size."""
    name = context.classifier or (CLASSIFIER if shape == (3, 32, 32) else None)
    return None if name is None else load(name, device=context.device)


def _curves(chains: Chains, judge: Judge, row: str, settings: Cifar10Settings) -> dict[str, dict[str, Any]]:
    """The numbers of a row's draws and means after each number of steps."""
    found = chains.states(row, settings.images, settings.steps)
    return {
        kind: {
            str(t): _judged(chains, judge, row, kind, t, x) for t, x in zip(settings.steps, found[kind], strict=True)
        }
        for kind in (DRAWS, MEANS)
    }


def _judged(chains: Chains, judge: Judge, row: str, kind: str, steps: int, x: Tensor) -> dict[str, Any]:
    """The numbers of draws or means after so many steps, as a part."""
    asked = {
        "model": chains.model.digest, "row": row, "kind": kind, "steps": steps, "images": len(x),
        "seed": chains.context.seed, "judge": judge.key(), "probes": chains.probes, "fit_images": chains.fit_images,
        "precision": chains.precision,
    }  # fmt: skip
    name = file_name(f"score-{row}-{kind}-{steps}-of-{len(x)}")
    return chains.context.workspace.part(name, asked, lambda: Part(judge(x, f"{row}, {kind}, {steps} steps"))).values


def _many_model(context: Context, beside: Model) -> Model | None:
    """The model of many levels that --many names, or the one that ships; quick runs have none by themselves."""
    if context.many is None and context.quick:
        return None
    if context.many is None:
        try:
            found = from_pretrained(MANY, device=context.device)
        except UsageError:  # it did not come along
            return None
        return found if found.shape == beside.shape else None
    model = from_pretrained(context.many, device=context.device)
    if len(model.levels) == 1:
        raise UsageError(f"--many must be a model of many noise levels, and {context.many} was trained at one")
    if model.shape != beside.shape:
        raise UsageError(f"--many must be a model of images {beside.shape}, got one of {model.shape}")
    return model


def _many(chains: Chains, model: Model, judge: Judge, settings: Cifar10Settings) -> dict[str, Any]:
    """As many images of a model of many levels, by the paper's Algorithm 2."""
    context = chains.context
    method = Method("gibbs", path(model, settings.levels), covariance="rademacher", probes=3, sweeps=3)
    cells = Cells(context, model, DATA, settings.fit_images, settings.batch_size, settings.precision, settings.shown)
    part = cells.sampled("many levels", method, settings.long_chains, [context.seed], judge, {"judge": judge.key()})
    return part.values


def _maps(chains: Chains, references: References, settings: Cifar10Settings) -> Part:
    """Standard deviations of the posterior of some noisy test images by each design, and their errors."""
    context, model = chains.context, chains.model
    designs: list[tuple[str, ProbeDesign, int]] = [
        *((f"Rademacher, {n}", Rademacher(), n) for n in settings.map_probes),
        *((f"lattice, {n}", Lattice(), n) for n in settings.lattice_probes),
    ]
    asked = {
        "model": model.digest,
        "seed": context.seed,
        "count": settings.map_images,
        "designs": [d[0] for d in designs],
    }

    def compute() -> Part:
        stored = references.load("test").images
        images = stored[spread(len(stored), settings.map_images)]
        count, level = len(images), model.levels[0]
        clean = model.scaled(dequantised(images, Streams(context.seed + MAP_SEED, count))).to(context.device)
        x_t = add_noise(clean, level, generator=Streams(context.seed + MAP_SEED + 1, count))
        estimate = _estimator(model, x_t, context.seed + MAP_SEED + 2)
        exact = estimate(None, None)
        found = {"x": images, "x_t": chains.stored(x_t), "exact": exact}
        errors = {}
        for name, design, probes in designs:
            found[name] = estimate(design, probes)
            errors[name] = _error(found[name], exact)
        errors["one variance for all"] = _error(exact.mean().expand_as(exact), exact)
        negative = (exact < 0).double().mean().item()
        return Part({"errors": errors, "negative": negative}, found)

    return context.workspace.part("maps", asked, compute)


def _estimator(model: Model, x_t: Tensor, seed: int) -> Callable[[ProbeDesign | None, int | None], Tensor]:
    """Variances at x_t by a design, on the CPU; without one the exact ones. Negative ones are kept."""

    def estimate(design: ProbeDesign | None, probes: int | None) -> Tensor:
        moments = DiagonalMoments(model, probes=probes, floor=-torch.inf, design=design)
        with torch.no_grad():
            q = moments(x_t, model.levels[0], generator=Streams(seed, len(x_t)))
        return q.cov.diagonal().cpu()

    return estimate


def _error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact|, over all images."""
    return ((found - exact).double().norm() / exact.double().norm()).item()


EXPERIMENT = Experiment(
    "cifar10",
    "CIFAR-10: one noise level, Gibbs chains from noise",
    "Covariances by 1, 10 and 100 probes, chains every 10 steps, FID against Gibbs steps, and mode collapse of a score "
    "network at sigma 0.3 (--model; --many and --classifier add to the collapse).",
    run,
)
