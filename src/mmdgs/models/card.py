"""The card of a model: what it is, how to use it, and how it was trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmdgs.models.config import CLASSES, COVARIANCE, HEADS, MEAN_STD, VARIANCE_RATIO, ModelConfig

LICENCE = "license: mit\n"
STARTED = "Each run started from the averaged weights of the one before, with a new optimiser."


def model_card(config: ModelConfig, parameters: int, training: Mapping[str, Any] | None = None) -> str:
    """README.md of a model: what it is, how to use it, and (given `training`) the command and its numbers."""
    facts = {
        "network": f"{config.network}, {parameters / 1e6:.2f} million parameters",
        "output": config.param,
        "shape": "x".join(map(str, config.shape)),
        "noise levels" if config.sigmas else "noise level": _levels(config),
        "trained on": config.trained_on or "not said",
    }
    if config.runs:
        known = "not known" if config.trained_images is None else f"{config.trained_images:,}"
        facts["images seen in training"] = f"{known}, in {len(config.runs)} run{'s' * (len(config.runs) > 1)}"
    if config.head:
        facts["for the denoiser with the weights"] = config.head["denoiser"]
    if config.isotropic_variance is not None:
        facts["isotropic variance"] = f"{config.isotropic_variance:.6g}"
    tags = "image-classification" if config.param == CLASSES else "denoising, score-matching"
    lines = ["---", "library_name: mmdgs", LICENCE.strip(), f"tags: [{tags}]", "---", ""]
    lines += [f"# {_title(config)}", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    use = ["import mmdgs", "", 'model = mmdgs.load("THIS FOLDER")']
    if config.param == CLASSES:
        use += ["logits = model.network(images)"]
    elif config.param in HEADS:
        use = ["import mmdgs", "", 'model = mmdgs.load("ITS DENOISER")']
        named = "ocm" if config.param == VARIANCE_RATIO else "modulated"
        use += [f'posterior = model.posterior("{named}", head="THIS FOLDER")']
    else:
        use += ["level = model.levels[0]   # the noisiest"] if config.sigmas else []
        level = "level" if config.sigmas else "model.level"
        use += [f"q = model.posterior()(x_t, {level}, generator=generator)   # mean, covariance, samples"]
    lines += ["", "```python", *use, "```", ""]
    if training:
        lines += ["## Training", "", "```", str(training["command"]), "```", "", "| | |", "| --- | --- |"]
        lines += [f"| {key} | {_shown(value)} |" for key, value in training.items() if key != "command"]
        lines += [""]
    return "\n".join([*lines, *_runs(config)])


def _runs(config: ModelConfig) -> list[str]:
    """The runs of a model that was trained in several, each from the averaged weights of the one before."""
    if len(config.runs) < 2:
        return []
    names = {"steps": "steps", "images": "images", "minutes": "minutes", "device": "device", "init": "started from"}
    lines = ["## Runs", "", "The command above is the last. " + STARTED, ""]
    lines += [f"| run | {' | '.join(names.values())} |", "| --- " * (len(names) + 1) + "|"]
    for number, run in enumerate(config.runs, start=1):
        cells = [run.get(key) for key in names]
        said = ["" if cell is None else f"{cell:,}" if isinstance(cell, int) else _shown(cell) for cell in cells]
        lines.append(f"| {number} | {' | '.join(said)} |")
    return [*lines, ""]


def _levels(config: ModelConfig) -> str:
    """The levels in words: how many and from where to where, not each."""
    if not config.sigmas:
        return "none" if config.sigma is None else f"sigma {config.sigma:g}, alpha {config.alpha:g}"
    said = f"{len(config.sigmas)}, sigma {config.sigmas[0]:g} to {config.sigmas[-1]:g}"
    return f"{said}, alpha {config.alphas[0]:g} to {config.alphas[-1]:g}" if config.alphas else f"{said}, alpha 1"


def _title(config: ModelConfig) -> str:
    kind = {
        CLASSES: "classifier",
        MEAN_STD: "denoising posterior with learned mean and standard deviation",
        VARIANCE_RATIO: "head with the variances of a denoising posterior",
        COVARIANCE: "head with the covariance of a denoising posterior",
    }
    what = kind.get(config.param, f"denoising model ({config.param})")
    return f"A {what}" + (f" of {config.trained_on}" if config.trained_on else "")


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)
