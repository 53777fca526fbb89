"""Where the 2-D and MNIST experiments call the library's runners."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from mmdgs.cost import Cost
from mmdgs.denoisers import Denoiser
from mmdgs.files import tensors_to_bytes
from mmdgs.generation import sample
from mmdgs.models import Model
from mmdgs.moments import DiagonalMoments, IsotropicMoments, Moments
from mmdgs.moments.probes import Rademacher
from mmdgs.networks.classifier import ConvClassifier
from mmdgs.noise import CLEAN, NoiseLevel
from mmdgs.randomness import Generator
from mmdgs.samplers import Kernel, Plan, Run, gibbs_plan, run, run_plan
from mmdgs.schedules import Levels


def single_level(
    kernel: Kernel, level: NoiseLevel, x0: Tensor, steps: int, *, seed: int, last: bool = False, label: str | None
) -> Run:
    """Chains at one noise level; `samples` holds every state, or the last alone."""
    return run(kernel, x0, [(level, CLEAN)] * steps, seed=seed, burn_in=steps - 1 if last else 0, progress=label)


def along(plan: Plan, x0: Tensor, *, seed: int) -> tuple[Tensor, Cost]:
    """The last states of chains along a plan, and the cost of each."""
    found = run_plan(plan, x0, seed=seed, progress=None)
    return found.state.x, found.cost


def gibbs(moments: Moments, levels: Levels, *, sweeps: int, noise_first: bool = True) -> Plan:
    """Algorithm 2 of the paper."""
    return gibbs_plan(moments.denoiser, moments, levels, sweeps=sweeps, noise_first=noise_first)  # type: ignore[attr-defined]


def model_chains(
    model: Model, moments: Moments, count: int, steps: int, *, keep: Sequence[int], seed: int, label: str | None
) -> tuple[Tensor, float]:
    """States (kept, count, ...) of chains of a model from noise at its level, and the fraction repaired."""
    found = sample(model, count, steps=steps, posterior=moments, keep=keep, seed=seed, progress=label)
    return found.x, found.repaired


def posterior_of(model: Model, covariance: str, probes: int = 10) -> Moments:
    """The diagonal (by the paper's probes), isotropic or learned posterior of a model of one level."""
    if covariance == "diagonal":
        return DiagonalMoments(denoiser_of(model), probes=probes, design=Rademacher())
    return model.isotropic_posterior() if covariance == "isotropic" else model.posterior()


def denoiser_of(model: Model) -> Denoiser:
    """A model as a denoiser."""
    return model.denoiser


def weights_digest(model: Model) -> str:
    """The SHA-256 of a model's weights."""
    return hashlib.sha256(tensors_to_bytes(model.network.state_dict())).hexdigest()


def features_and_classes(classifier: Model, x: Tensor, batch: int = 500) -> tuple[Tensor, Tensor]:
    """A classifier's features (n, f) and class probabilities (n, c) of images in [0, 1), on the CPU."""
    network = classifier.network
    assert isinstance(network, ConvClassifier)
    with torch.no_grad():
        features = [network.features(some.to(next(network.parameters()).device)) for some in x.split(batch)]
        probabilities = [network.head(one).softmax(1).cpu() for one in features]
    return torch.cat([one.cpu() for one in features]), torch.cat(probabilities)


def isotropic_by_score(
    denoiser: Denoiser, x: Tensor, levels: NoiseLevel | Sequence[NoiseLevel], generator: Generator
) -> IsotropicMoments:
    """The isotropic variance by the paper's formula, from the mean squared score."""
    return IsotropicMoments.fit(denoiser, x, levels, generator=generator)
