"""The untrained model of a recipe: a denoiser, a classifier, or a head for a fixed denoiser."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from mmdgs.denoisers import takes_level
from mmdgs.errors import UsageError
from mmdgs.models import CLASSES, COVARIANCE, VARIANCE_RATIO, Model, ModelConfig
from mmdgs.moments import FLOOR
from mmdgs.moments.fitted import fitted_spectrum
from mmdgs.moments.ocm import RatioScale
from mmdgs.networks.registry import conditional_options, preset
from mmdgs.networks.spectrum_head import SpectrumHead
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, child_seed
from mmdgs.schedules import parse_levels
from mmdgs.training.examples import Sets, some
from mmdgs.training.recipe import Recipe

HEADS = {VARIANCE_RATIO: ("unet", "mlp"), COVARIANCE: ("spectrum-head",)}
"""Networks that a head can be."""
SCALE_EXAMPLES = {"cuda": 128, "cpu": 32}
"""Examples to measure the scale of a head's ratios on, to some percent; the head corrects it."""


def new_model(
    recipe: Recipe, shape: tuple[int | None, ...], classes: tuple[str, ...] = ()
) -> Model:
    """The untrained model of a recipe, for data of this shape."""
    levels: Sequence[NoiseLevel] = parse_levels(recipe.levels) if recipe.levels is not None else ()
    if recipe.sigma is not None:
        levels = [NoiseLevel(alpha=recipe.alpha, sigma=recipe.sigma)]
    if (len(shape) == 3) == (preset(recipe.model)[0] == "mlp"):
        advice = "use an mlp for points, a unet for images"
        raise UsageError(f"the model {recipe.model!r} does not fit data of shape {shape}: {advice}")
    model = _model(recipe, shape, levels, classes=classes if recipe.param == CLASSES else ())
    if len(levels) > 1 and not takes_level(model.network):
        raise UsageError(f"the model {recipe.model!r} takes no noise level: train it at one sigma")
    return model


def new_head(recipe: Recipe, sets: Sets, denoiser: Model) -> Model:
    """The untrained head of a recipe: the mean variance of each level, measured on examples."""
    shape = sets.shape
    if shape != denoiser.shape:
        raise UsageError(
            f"the examples of {recipe.data} have shape {shape}, and the denoiser {denoiser.source} "
            f"takes {denoiser.shape}: use the data it was trained on, or --size"
        )
    network, _ = preset(recipe.model)
    if network not in HEADS[recipe.param] or (len(shape) == 3) == (network == "mlp"):
        use = "an mlp for points, a unet for images, a spectrum-head for the loss covariance"
        raise UsageError(f"{recipe.model!r} is no head for data of shape {shape}: use {use}")
    levels = denoiser.levels if recipe.levels is None else parse_levels(recipe.levels)
    if recipe.levels is not None and len(denoiser.levels) == 1:
        only = f"{denoiser.source} was trained at {denoiser.levels[0]} alone"
        raise UsageError(f"{only}: leave levels out")
    seed = child_seed(recipe.training.seed, "scale")
    x = denoiser.scaled(some(sets.train, SCALE_EXAMPLES, seed))
    if recipe.param == COVARIANCE:
        return _covariance_head(recipe, denoiser, levels, x, seed)
    scale = RatioScale.fit(denoiser, x, levels, seed=seed, probes=recipe.probes or 1)
    head = {"denoiser": denoiser.digest, "scale": scale.to_json()}
    return _model(recipe, shape, levels, interval=denoiser.interval, head=head)


def _covariance_head(
    recipe: Recipe, denoiser: Model, levels: Sequence[NoiseLevel], x: torch.Tensor, seed: int
) -> Model:
    """The untrained head of a covariance: the same spectrum of errors on x at every place."""
    ratios = [level.ratio for level in levels]
    options: dict[str, Any] = {"size": list(denoiser.shape[1:]), "ends": [min(ratios), max(ratios)]}
    options |= {"knots": 1} if min(ratios) == max(ratios) else {}
    options |= {"conditional": len(levels) > 1} | recipe.network
    recipe = dataclasses.replace(recipe, network=options)
    head = {"denoiser": denoiser.digest, "data_std": max(x.double().std().item(), FLOOR)}
    model = _model(recipe, denoiser.shape, levels, interval=denoiser.interval, head=head)
    network = model.network
    assert isinstance(network, SpectrumHead)
    table = []
    for ratio in network.ratios:
        nearest = min(levels, key=lambda level: abs(math.log(level.ratio / ratio)))
        streams = Streams(seed, len(x), purpose="spectrum")
        spectrum = fitted_spectrum(denoiser, x, nearest, generator=streams)
        table.append(0.9 * spectrum + 0.1 * spectrum.mean())  # few examples: no zero frequency
    network.log_variances.data.copy_(torch.stack(table).log())
    return model


def _model(
    recipe: Recipe, shape: Sequence[int | None], levels: Sequence[NoiseLevel], **more: Any
) -> Model:
    """The untrained model of a recipe at some levels; of many, the network takes the level."""
    network, options = preset(recipe.model)
    if len(levels) > 1:
        options |= conditional_options(network)
        alphas = tuple(level.alpha for level in levels)
        more["sigmas"] = tuple(level.sigma for level in levels)
        more["alphas"] = () if set(alphas) == {1.0} else alphas
    elif levels:
        more |= {"sigma": levels[0].sigma, "alpha": levels[0].alpha}
    more |= {"options": options | recipe.network, "trained_on": recipe.published().data}
    config = ModelConfig(network, recipe.param, tuple(shape), **more)
    return Model.build(config, seed=recipe.training.seed)
