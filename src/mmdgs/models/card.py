"""The card of a model: what it is, how to use it, and how it was trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmdgs.models.config import CLASSES, ModelConfig


def model_card(config: ModelConfig, parameters: int, training: Mapping[str, Any] | None = None) -> str:
    """README.md of a model: what it is, how to use it, and (given `training`) the command and its numbers."""
    facts = {
        "network": f"{config.network}, {parameters / 1e6:.2f} million parameters",
        "output": config.param,
        "shape": "x".join(map(str, config.shape)),
        "noise level": "none" if config.sigma is None else f"sigma {config.sigma:g}, alpha {config.alpha:g}",
        "trained on": config.trained_on or "not said",
    }
    if config.isotropic_variance is not None:
        facts["isotropic variance"] = f"{config.isotropic_variance:.6g}"
    lines = ["---", "library_name: mmdgs", "license: mit", "tags: [energy-based-model, score-matching]", "---", ""]
    lines += [f"# {config.trained_on or 'A'} {config.param} model", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    use = ["import mmdgs", "", 'model = mmdgs.load("THIS FOLDER")']
    if config.param == CLASSES:
        use += ["logits = model.network(images)"]
    else:
        use += ["q = model.posterior()(x_t, model.level, generator=generator)   # mean, covariance, samples"]
    lines += ["", "```python", *use, "```", ""]
    if training:
        lines += ["## Training", "", "```", str(training["command"]), "```", "", "| | |", "| --- | --- |"]
        lines += [f"| {key} | {_shown(value)} |" for key, value in training.items() if key != "command"]
        lines += [""]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)
