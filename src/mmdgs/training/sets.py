"""The examples a recipe is trained and validated on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmdgs.data import TOYS, ImageSet, load_images, spread, toy
from mmdgs.errors import UsageError
from mmdgs.models import CLASSES, Model
from mmdgs.training.examples import Examples, TensorExamples, examples_of
from mmdgs.training.recipe import Recipe

FLIPPED = ("cifar10", "celeba")
"""Sets whose images may be mirrored; digits may not."""
VALIDATION_EXAMPLES = 2_000
HEAD_VALIDATION = {"cuda": 1_000, "cpu": 64}
"""Of a head, whose loss takes products with its denoiser's Jacobian."""
TOY_POINTS = 10_000


@dataclass(frozen=True)
class Sets:
    """Examples to train on and to validate on, with what the model must know of them."""

    train: Examples
    held_out: Examples
    shape: tuple[int, ...]
    classes: tuple[str, ...] = ()
    images: ImageSet | None = None  # those to train on, as they are stored


def read_sets(recipe: Recipe, device: torch.device, denoiser: Model | None = None) -> Sets:
    """The examples of a recipe, on a device; a head's are those of its denoiser in size and colours."""
    if recipe.data in TOYS:
        one = toy(recipe.data)
        points = recipe.limit or TOY_POINTS
        seed = recipe.training.seed
        held_out = one.sample(VALIDATION_EXAMPLES, seed + 1).to(device)
        return Sets(TensorExamples(one.sample(points, seed).to(device)), TensorExamples(held_out), (2,))

    size, channels = recipe.size, None
    if denoiser is not None and len(denoiser.shape) == 3:
        channels, height, width = denoiser.shape
        size = height if size is None and height == width else size

    def read(split: str, limit: int | None) -> ImageSet:
        found = load_images(
            recipe.data,
            split,
            data_dir=recipe.data_dir,
            size=size,
            channels=channels,
            unreadable=recipe.unreadable,
            limit=limit,
        )
        return found.to(device)

    labelled = recipe.param == CLASSES
    train, test = read("train", recipe.limit), read("test", None)
    if labelled and train.labels is None:
        raise UsageError(f"the data {recipe.data!r} has no labels to train a classifier on")
    most = VALIDATION_EXAMPLES if denoiser is None else HEAD_VALIDATION.get(device.type, HEAD_VALIDATION["cpu"])
    validation = spread(len(test), most).to(device)
    flips = recipe.data in FLIPPED if recipe.flips is None else recipe.flips
    return Sets(
        examples_of(train, flips=flips, labelled=labelled),
        examples_of(test.take(validation), labelled=labelled),
        train.shape,
        train.classes,
        train,
    )
