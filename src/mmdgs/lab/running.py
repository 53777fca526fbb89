"""Where the 2-D and MNIST experiments call the library's runners."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmdgs.cost import Cost
from mmdgs.generation import generate
from mmdgs.models import Model
from mmdgs.moments import DiagonalMoments, Moments
from mmdgs.moments.probes import Rademacher
from mmdgs.networks.classifier import ConvClassifier
from mmdgs.noise import NoiseLevel
from mmdgs.samplers import Kernel, Plan, Run, run, single_level_plan


def single_level(
    kernel: Kernel, level: NoiseLevel, x0: Tensor, steps: int, *, seed: int, last: bool = False, label: str | None
) -> Run:
    """Chains at one noise level; `samples` holds every state, or the last alone."""
    keep = None if last else range(1, steps + 1)
    return run(single_level_plan(kernel, level, steps=steps), x0, seed=seed, keep=keep, progress=label)


def along(plan: Plan, x0: Tensor, *, seed: int) -> tuple[Tensor, Cost]:
    """The last states of chains along a plan, and the cost of each."""
    found = run(plan, x0, seed=seed, progress=None)
    return found.x, found.cost


def model_chains(
    model: Model, moments: Moments, count: int, steps: int, *, keep: Sequence[int], seed: int, label: str | None
) -> tuple[Tensor, float]:
    """States (kept, count, ...) of chains of a model from noise at its level, and the fraction repaired."""
    plan = single_level_plan(moments, model.level, steps=steps)
    found = generate(model, plan, count, keep=keep, seed=seed, progress=label)
    assert found.states is not None, "states were asked for"
    return found.states, found.repaired


def posterior_of(model: Model, covariance: str, probes: int = 10) -> Moments:
    """The diagonal (by the paper's probes), isotropic or learned posterior of a model of one level."""
    if covariance == "diagonal":
        return DiagonalMoments(model, probes=probes, design=Rademacher())
    return model.posterior(covariance)


def features_and_classes(classifier: Model, x: Tensor, batch: int = 500) -> tuple[Tensor, Tensor]:
    """A classifier's features (n, f) and class probabilities (n, c) of images in [0, 1), on the CPU."""
    network = classifier.network
    assert isinstance(network, ConvClassifier)
    with torch.no_grad():
        features = [network.features(some.to(next(network.parameters()).device)) for some in x.split(batch)]
        probabilities = [network.head(one).softmax(1).cpu() for one in features]
    return torch.cat([one.cpu() for one in features]), torch.cat(probabilities)
