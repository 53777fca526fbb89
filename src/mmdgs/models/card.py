"""The card of a model: what it is, how to use it, and how it was trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmdgs.models.config import (
    CLASSES,
    COVARIANCE,
    HEADS,
    MEAN_STD,
    VARIANCE_RATIO,
    ModelConfig,
    shape_in_words,
)

LICENCE = "license: mit\n"
TITLES = {
    CLASSES: "classifier",
    MEAN_STD: "denoising posterior with learned mean and standard deviation",
    VARIANCE_RATIO: "head with the variances of a denoising posterior",
    COVARIANCE: "head with the covariance of a denoising posterior",
}
RUNS = {key: key for key in ("steps", "images", "minutes", "device")} | {"init": "started from"}
"""What the table of runs shows, and the heads of its columns."""
LAST_RUN = (
    "The command above is the last. Each run started from the averaged weights of the one before, "
    "with a new optimiser."
)


def model_card(
    config: ModelConfig, parameters: int, training: Mapping[str, Any] | None = None
) -> str:
    """README.md of a model; `training` holds the command and its numbers."""
    facts = {
        "network": f"{config.network}, {parameters / 1e6:.2f} million parameters",
        "output": config.param,
        "shape": shape_in_words(config.shape),
        "noise levels" if config.sigmas else "noise level": _levels(config),
        "trained on": config.trained_on or "not said",
    }
    if config.runs:
        images = "not known" if config.trained_images is None else f"{config.trained_images:,}"
        runs = f"{len(config.runs)} run{'s' * (len(config.runs) > 1)}"
        facts["images seen in training"] = f"{images}, in {runs}"
    if config.head:
        facts["for the denoiser with the weights"] = config.head["denoiser"]
    if config.isotropic_variance is not None:
        facts["isotropic variance"] = f"{config.isotropic_variance:.6g}"
    if config.inflation:
        factors = (f"{factor:g} with {name}" for name, factor in config.inflation.items())
        facts["fresh noise of restoration, times"] = ", ".join(factors)
    tags = "image-classification" if config.param == CLASSES else "denoising, score-matching"
    title = f"# A {TITLES.get(config.param, f'denoising model ({config.param})')}"
    title += f" of {config.trained_on}" if config.trained_on else ""
    lines = ["---", "library_name: mmdgs", LICENCE.strip(), f"tags: [{tags}]", "---", "", title, ""]
    lines += [*_table(facts), "", "```python", "import mmdgs", "", *_example(config), "```", ""]
    if training:
        numbers = {key: value for key, value in training.items() if key != "command"}
        lines += ["## Training", "", "```", str(training["command"]), "```", ""]
        lines += [*_table(numbers), ""]
    if len(config.runs) > 1:
        lines += ["## Runs", "", LAST_RUN, "", _row(["run", *RUNS.values()])]
        lines += ["| --- " * (len(RUNS) + 1) + "|"]
        for number, run in enumerate(config.runs, start=1):
            values = ("" if run.get(key) is None else run[key] for key in RUNS)
            cells = (f"{value:,}" if isinstance(value, int) else value for value in values)
            lines += [_row([number, *cells])]
        lines += [""]
    return "\n".join(lines)


def _table(rows: Mapping[str, object]) -> list[str]:
    return ["| | |", "| --- | --- |", *(_row([key, value]) for key, value in rows.items())]


def _row(values: list[object]) -> str:
    cells = (f"{v:.6g}" if isinstance(v, float) and math.isfinite(v) else str(v) for v in values)
    return f"| {' | '.join(cells)} |"


def _example(config: ModelConfig) -> list[str]:
    """The lines of the example."""
    model = 'model = mmdgs.load("THIS FOLDER")'
    if config.param == CLASSES:
        return [model, "logits = model.network(images)"]
    if config.param in HEADS:
        kind = "Ocm" if config.param == VARIANCE_RATIO else "Modulated"
        posterior = f'posterior = model.posterior(mmdgs.covariances.{kind}("THIS FOLDER"))'
        return ['model = mmdgs.load("ITS DENOISER")', posterior]
    noisiest = ["level = model.levels[0]   # the noisiest"] if config.sigmas else []
    level = "level" if config.sigmas else "model.level"
    q = f"q = model.posterior()(x_t, {level}, generator=generator)   # mean, covariance, samples"
    return [model, *noisiest, q]


def _levels(config: ModelConfig) -> str:
    """The levels in words: how many and from where to where, not each."""
    if not config.sigmas:
        return "none" if config.sigma is None else f"sigma {config.sigma:g}, alpha {config.alpha:g}"
    alphas = f"{config.alphas[0]:g} to {config.alphas[-1]:g}" if config.alphas else "1"
    sigmas = f"{config.sigmas[0]:g} to {config.sigmas[-1]:g}"
    return f"{len(config.sigmas)}, sigma {sigmas}, alpha {alphas}"
