"""Heads for optimal covariance matching: what a recipe with the loss ocm trains, beside a denoiser that is fixed."""

from __future__ import annotations

import torch
from torch import Tensor

from mmdgs import losses
from mmdgs.data import spread
from mmdgs.denoisers import Compiled
from mmdgs.errors import UsageError
from mmdgs.models import Model, ModelConfig, load
from mmdgs.moments.ocm import RatioScale
from mmdgs.networks.registry import conditional_options, preset
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, Streams
from mmdgs.schedules import parse_levels
from mmdgs.training.contract import PerExampleLoss
from mmdgs.training.examples import Examples
from mmdgs.training.levels import level_draw
from mmdgs.training.recipe import Recipe

NETWORKS = ("unet", "mlp")
SCALE_EXAMPLES = {"cuda": 128, "cpu": 32}
"""Examples on which the scale of the ratios is measured: off by some percent, which the head makes good."""
SCALE_SEED = 3
"""Added to the run's seed for their noise and probes."""


def frozen_denoiser(recipe: Recipe, device: torch.device) -> Model:
    """The denoiser of a recipe, on the device, its weights fixed."""
    assert recipe.denoiser is not None, "the recipe was checked"
    found = load(recipe.denoiser, device=device)
    found.network.requires_grad_(False).eval()
    return found


def head_levels(recipe: Recipe, denoiser: Model) -> tuple[NoiseLevel, ...]:
    """The levels a head is trained at: the recipe's, or the denoiser's own."""
    if recipe.levels is None:
        return denoiser.levels
    if len(denoiser.levels) == 1:
        raise UsageError(f"{denoiser.source} was trained at {denoiser.levels[0]} alone: leave levels out")
    return parse_levels(recipe.levels)


def new_head(recipe: Recipe, denoiser: Model, shape: tuple[int, ...], examples: Examples) -> Model:
    """The untrained head of a recipe, which says the mean variance of each level; its scale is measured on examples."""
    if shape != denoiser.shape:
        raise UsageError(
            f"the examples of {recipe.data} have shape {shape}, and the denoiser {denoiser.source} takes "
            f"{denoiser.shape}: use the data it was trained on, with --size where that helps"
        )
    network, options = preset(recipe.model)
    if network not in NETWORKS or (len(shape) == 3) == (network == "mlp"):
        raise UsageError(
            f"the model {recipe.model!r} is no head for data of shape {shape}: use an mlp for points, a unet for images"
        )
    levels = head_levels(recipe, denoiser)
    options |= conditional_options(network) if len(levels) > 1 else {}
    count = SCALE_EXAMPLES.get(examples.device.type, SCALE_EXAMPLES["cpu"])
    indices = spread(len(examples), count)
    seed = recipe.training.seed + SCALE_SEED
    x = denoiser.scaled(examples.take(indices, Streams(seed, len(indices))))
    scale = RatioScale.fit(denoiser, x, levels, seed=seed + 1, probes=recipe.probes or 1)
    alphas = [level.alpha for level in levels]
    many = len(levels) > 1
    config = ModelConfig(
        network=network,
        options=options | recipe.network,
        param=recipe.param,
        shape=shape,
        sigma=None if many else levels[0].sigma,
        alpha=1.0 if many else levels[0].alpha,
        sigmas=tuple(level.sigma for level in levels) if many else (),
        alphas=tuple(alphas) if many and set(alphas) != {1.0} else (),
        interval=denoiser.interval,
        trained_on=recipe.published().data,
        head={"denoiser": denoiser.digest, "scale": scale.to_json()},
    )
    return Model.build(config, seed=recipe.training.seed)


def ocm_loss_of(model: Model, denoiser: Model, recipe: Recipe, *, compiled: bool = False) -> PerExampleLoss:
    """The loss of a head, each level weighted by the size of its targets; the head through torch.compile if asked."""
    head = model.head_of(Compiled(model.network) if compiled else model.network)
    drawn = level_draw(model.levels, recipe.level_draw)

    def loss(x: Tensor, generator: Generator) -> Tensor:
        x = denoiser.scaled(x)
        level = drawn(x, generator)
        probes = recipe.probes or 1
        return losses.ocm(head, denoiser, x, level, generator=generator, probes=probes, weight=head.scale.weight)

    return loss
