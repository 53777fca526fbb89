"""The numbers of the MNIST experiment: chains and their scores, and posteriors of held-out digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mmdgs.data import dequantised, load_images, spread
from mmdgs.errors import NonFiniteError
from mmdgs.generation import generate
from mmdgs.lab.experiment import Context
from mmdgs.lab.mnist_models import ENERGY, LEARNED, MnistSettings, Training
from mmdgs.lab.mnist_yardstick import Yardstick, score
from mmdgs.lab.workspace import Part
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics import calibration, fitted_floor, reliability
from mmdgs.models import Model
from mmdgs.moments import DiagonalMoments, Moments
from mmdgs.moments.probes import Rademacher
from mmdgs.noise import add_noise
from mmdgs.posterior import Gaussian
from mmdgs.pretrained import Pretrained
from mmdgs.randomness import Streams
from mmdgs.samplers import single_level_plan

METHODS = {"diagonal": "diagonal", "isotropic": "isotropic", "learned": "learned by KL"}
"""The posteriors compared: two from the energy trained by DSM, and a network trained by KL."""

KEPT = (0, 1, 5, 10, 20)
SHOWN = 25
UNCERTAIN = 0.05
"""A posterior is uncertain of a pixel where its own standard deviation is above this."""
FITTED = ", fitted floor"
"""Ends the label of a posterior whose floor was fitted."""
CHAIN_SEED, DATA_SEED, PROBE_SEED = 10, 20, 30
ROWS = {"cuda": 256, "cpu": 32}


@dataclass(frozen=True)
class Chains:
    """The chains of one posterior: their last states, and the first few along the way; none where they broke off."""

    method: str
    sigma: float
    values: dict[str, Any]
    last: Tensor  # (chains, 1, H, W)
    path: Tensor  # (kept, SHOWN, 1, H, W)


def kept_steps(settings: MnistSettings) -> tuple[int, ...]:
    """The steps whose states are drawn."""
    return (*(t for t in KEPT if t < settings.steps), settings.steps)


def posterior_of(training: Training, method: str, probes: int) -> Moments:
    """One of METHODS from a trained model; the diagonal by the paper's probes."""
    model = model_of(training)
    if method == "diagonal":
        return DiagonalMoments(model, probes=probes, design=Rademacher())
    return model.posterior("isotropic") if method == "isotropic" else model.posterior()


def model_of(training: Training) -> Model:
    """The run's model, which is there."""
    assert training.model is not None
    return training.model


def source(runs: Mapping[str, Training], method: str) -> Training:
    """The run a posterior comes from."""
    return runs[LEARNED if method == "learned" else ENERGY]


def methods(runs: Mapping[str, Training]) -> list[str]:
    """The posteriors that there are: a run that ended in NaN before its first validation left none."""
    return [method for method in METHODS if source(runs, method).model is not None]


def run_chains(
    context: Context, training: Training, method: str, settings: MnistSettings, *, quiet: bool = False
) -> Chains:
    """Gibbs chains from noise with one posterior at its model's noise level."""
    model = model_of(training)
    kept = kept_steps(settings)
    sigma = model.level.sigma
    asked = {
        "model": training.asked, "chains": settings.chains, "steps": settings.steps, "seed": context.seed,
        "probes": settings.probes if method == "diagonal" else None,
    }  # fmt: skip

    def compute() -> Part:
        posterior = posterior_of(training, method, settings.probes)
        label = None if quiet else f"chains, {METHODS[method]}, sigma {sigma:g}"
        try:
            plan, config = single_level_plan(posterior, model.level, steps=settings.steps), model.config
            found = generate(
                Pretrained(posterior.denoiser, model.levels, config.shape, config.interval, model.network, ""),
                plan, settings.chains, keep=kept, seed=context.seed + CHAIN_SEED, progress=label,
            )  # fmt: skip
        except NonFiniteError as error:
            return Part({"failed": str(error)})
        assert found.states is not None, "states were kept"
        if not torch.isfinite(found.states).all():
            return Part({"failed": "states that are not finite"})
        return Part(
            {"failed": None, "repaired": found.repaired},
            {"last": found.states[-1].clone(), "path": found.states[:, :SHOWN].clone()},
        )

    part = context.workspace.part(f"chains-{method}-{sigma:g}", asked, compute)
    none = torch.empty(0)
    return Chains(method, sigma, part.values, part.tensors.get("last", none), part.tensors.get("path", none))


def scores(
    context: Context, chains: Chains, training: Training, by: Yardstick, settings: MnistSettings
) -> dict[str, Any]:
    """The numbers of some chains' last states; `failed` alone where they broke off."""
    if chains.values["failed"] is not None:
        return {"failed": chains.values["failed"]}
    asked = {
        "model": training.asked, "chains": settings.chains, "steps": settings.steps, "seed": context.seed,
        "probes": settings.probes, "groups": settings.groups, "classifier": by.digest,
    }  # fmt: skip
    name = f"score-{chains.method}-{chains.sigma:g}"
    part = context.workspace.part(name, asked, lambda: Part(score(by, chains.last, settings.groups)))
    return {"failed": None, "repaired": chains.values["repaired"], **part.values}


@dataclass(frozen=True)
class HeldOut:
    """Test digits x, their noisy versions x_t, and the posterior of each; by label, such as "diagonal, 10 probes"."""

    x: Tensor
    x_t: Tensor
    posteriors: dict[str, Gaussian]
    methods: dict[str, str]  # label -> one of METHODS


def noisy_digits(context: Context, training: Training, count: int) -> tuple[Tensor, Tensor]:
    """Test digits, spread over the test set, dequantised, and noised at the model's level."""
    test = load_images("mnist", "test", data_dir=context.data_dir).images
    images = test[spread(len(test), count)]
    x = dequantised(images, Streams(context.seed + DATA_SEED, count))
    return x, add_noise(x, model_of(training).level, generator=Streams(context.seed + DATA_SEED + 1, count))


def held_out(context: Context, runs: Mapping[str, Training], settings: MnistSettings) -> HeldOut:
    """Each posterior at the same noisy digits; the diagonal with as many probes as chains use, and with many."""
    x, x_t = noisy_digits(context, runs[ENERGY], settings.held_out)
    found: dict[str, Gaussian] = {}
    names: dict[str, str] = {}
    for method in methods(runs):
        for probes in (settings.probes, settings.map_probes) if method == "diagonal" else (1,):
            label = f"{METHODS[method]}, {probes} probes" if method == "diagonal" else METHODS[method]
            found[label] = _posterior(context, source(runs, method), method, probes, x_t)
            names[label] = method
    return HeldOut(x, x_t, found, names)


def rows_at_once(context: Context) -> int:
    """How many images go through a network at a time."""
    return ROWS.get(context.device.type, ROWS["cpu"])


def _posterior(context: Context, training: Training, method: str, probes: int, x_t: Tensor) -> Gaussian:
    asked = {"model": training.asked, "count": len(x_t), "probes": probes, "seed": context.seed}
    rows = rows_at_once(context)

    def compute() -> Part:
        moments, level = posterior_of(training, method, probes), model_of(training).level
        means, variances, repaired = [], [], 0.0
        for first in range(0, len(x_t), rows):
            part = x_t[first : first + rows].to(context.device)
            q = moments(part, level, generator=Streams(context.seed + PROBE_SEED, len(part), first_row=first))
            means.append(q.mean.cpu())
            variances.append(q.cov.diagonal().cpu())
            repaired += 0.0 if q.repaired is None else q.repaired.sum().item() / len(x_t)
        return Part({"repaired": repaired}, {"mean": torch.cat(means), "variance": torch.cat(variances)})

    name = f"posterior-{method}-{probes}" if method == "diagonal" else f"posterior-{method}"
    part = context.workspace.part(name, asked, compute)
    repaired = torch.full((len(x_t),), part.values["repaired"])
    return Gaussian(part.tensors["mean"], Diagonal(part.tensors["variance"]), repaired)


def calibrations(found: HeldOut, background: Tensor) -> dict[str, dict[str, Any]]:
    """For each posterior its calibration over all pixels, those it is uncertain of, and the background; reliability.

    The diagonal of many probes also with the floor that fits every second digit, judged on the others.
    """
    records = {label: _calibration(found.x, q, background) for label, q in found.posteriors.items()}
    probed = [label for label, method in found.methods.items() if method == "diagonal"]
    if probed:
        q = found.posteriors[probed[-1]]
        floor = fitted_floor(found.x[::2], _taken(q, 0))
        judged = _taken(q, 1)
        variances = judged.cov.diagonal()
        lifted = (variances < floor).float().flatten(1).mean(1)
        judged = Gaussian(judged.mean, Diagonal(variances.clamp(min=floor)), lifted)
        records[probed[-1] + FITTED] = _calibration(found.x[1::2], judged, background) | {"floor": floor}
    return records


def _taken(q: Gaussian, first: int) -> Gaussian:
    """Every second posterior of a batch."""
    return Gaussian(q.mean[first::2], Diagonal(q.cov.diagonal()[first::2]))


def _calibration(x: Tensor, q: Gaussian, background: Tensor) -> dict[str, Any]:
    std = q.cov.diagonal().sqrt()
    places = {"all": None, "uncertain": std > UNCERTAIN, "background": background.expand_as(x)}
    return {
        **{where: asdict(calibration(x, q, mask)) for where, mask in places.items()},
        "reliability": asdict(reliability(x, q)),
        "repaired": 0.0 if q.repaired is None else q.repaired.mean().item(),
        "median_std": std.median().item(),
    }
