"""The models of experiments: small ones that are trained there and kept as a part, and checks of
those given.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from typing import Any

from experiments.experiment import Context
from mmdgs.errors import UsageError
from mmdgs.files import to_json
from mmdgs.models import Model, ModelConfig, load
from mmdgs.training import Recipe, TrainingSettings, train_model
from mmdgs.workspace import Part

QUICK_TRAINING = TrainingSettings(
    steps=800, batch_size=16, learning_rate=5e-3, warmup=20, decay=True, ema=0.95,
    checkpoint_every=None, validate_every=None,
)  # fmt: skip
"""Half a minute of a tiny network, after which pictures are no longer noise."""


def trained_here(context: Context, name: str, recipe: Recipe) -> Model:
    """The model of a recipe, trained or taken from the workspace."""

    def compute() -> Part:
        with tempfile.TemporaryDirectory() as folder:
            model, trained = train_model(
                recipe, folder, device=context.device, progress=f"training {name}"
            )
        values: dict[str, Any] = {"config": json.loads(to_json(model.config.to_json()))}
        values |= {"steps": len(trained.losses), "minutes": trained.seconds / 60}
        return Part(values, {key: value.cpu() for key, value in model.network.state_dict().items()})

    # Where the data files are does not matter.
    part = context.workspace.part(name, replace(recipe, data_dir=None), compute)
    config = ModelConfig.from_json(part.values["config"], name)
    model = Model.build(config, source=f"the tiny {name} trained here")
    model.network.load_state_dict(part.tensors)
    model.network.requires_grad_(False).eval()
    return model.to(context.device)


def model_of(context: Context, ships: str, quick: Recipe, train: str) -> Model:
    """The model that --model names, or the one that ships; quick runs train a tiny one where none
    is named.

    Where there is none, `train` is the command that makes one.
    """
    if context.model is None and context.quick:
        return trained_here(context, "model", quick)
    try:
        return load(context.model or ships, device=context.device)
    except UsageError as error:
        if context.model is not None:
            raise
        advice = f"or train one with `{train}` and name it with --model"
        raise UsageError(f"{error}; {advice}") from error


def check_colours(model: Model) -> None:
    """Refuse a model that --model names where it is not one of colour images."""
    if len(model.shape) != 3 or model.shape[0] != 3:
        raise UsageError(
            f"--model must be a model of colour images, and {model.source} is one of {model.shape}"
        )


def check_model(model: Model, advice: str = "") -> Model:
    """A model that --model names, refused where it is not one of colour images at many noise
    levels.
    """
    if len(model.levels) == 1:
        raise UsageError(
            f"--model must be a model of many noise levels, and {model.source} was trained at "
            f"{model.levels[0]} alone{advice}"
        )
    check_colours(model)
    return model
