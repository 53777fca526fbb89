"""The cases of `reproduce calibration`: networks at one level, with clean data to fit on and others to judge by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from mmdgs import losses
from mmdgs.data import toy
from mmdgs.denoisers import Denoiser, energy_denoiser, noise_denoiser
from mmdgs.errors import UsageError
from mmdgs.lab.experiment import Context
from mmdgs.lab.held_out import held_out_images
from mmdgs.lab.workspace import Part
from mmdgs.models import Model, from_pretrained
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import seeded
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings, train

SIGMAS = (0.1, 0.3, 1.0)
DIGITS_SIGMA, DIGITS_TRAINING = 0.4, 1_500
MORE = 3
"""Times as many images where no products are needed: of fitted variances, which vary much from image to image."""
MIXTURE, DIMENSIONS = "exact mixture", 16
BESIDE, BESIDE_SIGMA = "diffusers", 0.3
"""The column of a model that --many names, a folder that diffusers wrote; it is large, so at one level."""
Loaded = tuple[Model, Tensor, Tensor]
Kept = TypeVar("Kept")


@dataclass(frozen=True, eq=False)
class Case:
    """A denoiser at a level, data to fit on (of the network's training) and data it has not seen."""

    denoiser: Denoiser
    level: NoiseLevel
    fit: Tensor
    judge: Tensor

    @property
    def dim(self) -> int:
        return self.fit[0].numel()

    @cached_property
    def remembered(self) -> Denoiser:
        """The denoiser for estimators that need its means alone: each noisy batch is denoised once for all of them."""
        kept: dict[bytes, Tensor] = {}

        def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
            key = hashlib.sha256(x_t.cpu().contiguous().numpy().tobytes()).digest()
            if key not in kept:
                kept[key] = self.denoiser(x_t, level)
            return kept[key]

        return denoiser


def cases(context: Context, images: int, points: int, training: TrainingSettings) -> dict[str, Callable[[], Case]]:
    """Cases by name, each made when it is asked for: those of --case, or all; quick runs leave out large models."""
    found = _all_cases(context, images, points, training)
    return {name: found[name] for name in context.columns(found)}


def _all_cases(context: Context, images: int, points: int, training: TrainingSettings) -> dict[str, Callable[[], Case]]:
    found: dict[str, Callable[[], Case]] = {
        MIXTURE: partial(_mixture, context, points),
        "2-D energy": partial(_rings, context, points, training),
        "digits MLP": partial(_digits, context, points, training),
    }
    if context.quick and context.model is None:
        return found
    named = {"mnist": None, "cifar10": SIGMAS, "celeba": SIGMAS} if context.model is None else {context.model: SIGMAS}
    for name, sigmas in named.items():
        model = _once(partial(from_pretrained, name, device=context.device))
        loaded = _once(partial(_loaded, context, model, MORE * images))
        if sigmas is None or (context.model is not None and len(model().levels) == 1):
            found[name] = partial(_of_model, loaded, None)
        else:
            found |= {f"{name} {sigma:g}": partial(_of_model, loaded, sigma) for sigma in sigmas}
    if context.model is None:
        beside = _once(partial(_loaded, context, partial(_beside, context), MORE * images))
        found[f"{BESIDE} {BESIDE_SIGMA:g}"] = partial(_of_model, beside, BESIDE_SIGMA)
    return found


def _mixture(context: Context, points: int) -> Case:
    """The control: an exact denoiser, whose covariance needs no repair."""
    generator = seeded(context.seed)
    means = torch.randn(3, DIMENSIONS, generator=generator, dtype=torch.float64)
    factors = torch.randn(3, DIMENSIONS, DIMENSIONS, generator=generator, dtype=torch.float64) / DIMENSIONS**0.5
    target = GaussianMixture(torch.ones(3, dtype=torch.float64) / 3, means, factors @ factors.mT)
    fit, judge = (target.sample((points,), generator=generator).to(context.device) for _ in range(2))
    return Case(target.to(device=context.device).denoiser(), NoiseLevel(sigma=0.5), fit, judge)


def _rings(context: Context, points: int, training: TrainingSettings) -> Case:
    """The paper's 2-D energy on rings."""
    one, level = toy("rings"), NoiseLevel(sigma=0.2)
    x = one.sample(10_000, context.seed).to(context.device)
    network = _trained(context, "2-D energy", MLP(2, 2, seed=context.seed), energy_denoiser, x, level, training)
    judge = one.sample(points, context.seed + 1).to(context.device)
    return Case(energy_denoiser(network), level, x[:points], judge)


def _digits(context: Context, points: int, training: TrainingSettings) -> Case:
    """A small noise-predicting network on few data, as a newcomer has it."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    x = torch.from_numpy(load_digits().data / 16).float()
    x = x[torch.randperm(len(x), generator=seeded(context.seed))].to(context.device)
    level = NoiseLevel(sigma=DIGITS_SIGMA)
    start = MLP(64, 64, width=256, depth=3, seed=context.seed)
    network = _trained(context, "digits MLP", start, noise_denoiser, x[:DIGITS_TRAINING], level, training)
    return Case(noise_denoiser(network), level, x[:points], x[DIGITS_TRAINING:][:points])


def _trained(
    context: Context, name: str, network: nn.Module, adapter: Callable[[nn.Module], Denoiser], x: Tensor,
    level: NoiseLevel, training: TrainingSettings,
) -> nn.Module:  # fmt: skip
    network = network.to(context.device)

    def compute() -> Part:
        curve = train(
            network,
            lambda x, generator: losses.dsm(adapter(network), x, level, generator=generator),
            x,
            training,
            progress=f"training {name}",
        )
        return Part({"final_loss": curve[-100:].mean().item()}, dict(network.state_dict()))

    network.load_state_dict(context.workspace.part(f"network of {name}", (training, level.sigma), compute).tensors)
    return network.requires_grad_(False).eval()


def _once(load: Callable[[], Kept]) -> Callable[[], Kept]:
    """What was loaded is kept for the next level."""
    return lru_cache(maxsize=1)(load)


def _beside(context: Context) -> Model:
    if context.many is None:
        raise UsageError("name a folder of a diffusers model of images with --many")
    return from_pretrained(context.many, device=context.device)


def _loaded(context: Context, load: Callable[[], Model], images: int) -> Loaded:
    """A model, training images and held-out ones."""
    model = load()
    fit, judge = (held_out_images(context, model, split, images) for split in ("train", "test"))
    # Some sets are sorted by class: the first few must be of all classes.
    order = torch.randperm(images, generator=seeded(context.seed)).to(context.device)
    return model, fit[order[order < len(fit)]], judge[order[order < len(judge)]]


def _of_model(loaded: Callable[[], Loaded], sigma: float | None) -> Case:
    model, fit, judge = loaded()
    width = model.interval[1] - model.interval[0]
    level = model.level if sigma is None else NoiseLevel(sigma=sigma * width)
    return Case(model, level, fit, judge)
