"""The models of experiments that ship or are named, or small ones that are trained there."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from typing import Any

from experiments.experiment import Context
from mmdgs.errors import UsageError
from mmdgs.files import to_json
from mmdgs.models import Model, ModelConfig, load
from mmdgs.models.levels import in_words
from mmdgs.training import Recipe, TrainingSettings, train_model
from mmdgs.workspace import Part

QUICK = Recipe(
    size=16, limit=2_000, model="unet-tiny", param="edm", levels="geometric:40:20:0.02",
    training=TrainingSettings(
        steps=800, batch_size=16, learning_rate=5e-3, warmup=20, decay=True, ema=0.95,
        checkpoint_every=None, validate_every=None,
    ),
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


def model_of(context: Context, ships: str, *, sigma: float | None = None, **data: Any) -> Model:
    """The colour model that --model names, or the one that ships: of one level with a `sigma`, else
    of many.

    Quick runs train a tiny one where none is named, on `data`: keys of a recipe.
    """
    if context.model is None and context.quick:
        level = {"levels": None, "level_draw": None, "weighting": None}
        level = {} if sigma is None else {**level, "param": "score", "sigma": sigma}
        model = trained_here(context, "model", replace(QUICK, **level, **data))
    else:
        model = load(context.model or ships, device=context.device)
    if (len(model.levels) == 1) != (sigma is not None) or model.shape[:1] != (3,):
        which = "many noise levels" if sigma is None else "one noise level"
        has = f"{model.source} has {in_words(model.levels)} of {model.shape}"
        raise UsageError(f"--model must be a model of colour images at {which}, and {has}")
    return model
