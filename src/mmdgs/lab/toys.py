"""The 2-D experiments' shared parts: sizes, trained networks, posteriors to compare, and chains as grids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mmdgs import losses
from mmdgs.data import TOYS, Toy, mog_density, toy
from mmdgs.denoisers import energy_denoiser
from mmdgs.lab.experiment import Context
from mmdgs.lab.grid import Cell, Grid, Results, together
from mmdgs.lab.workspace import Part
from mmdgs.metrics import effective_sample_size, mmd, mode_statistics
from mmdgs.moments import DiagonalMoments, ExactMoments, FullMoments, IsotropicMoments, LearnedMoments, Moments
from mmdgs.moments.isotropic import by_score
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, child_seed, seeded
from mmdgs.samplers import ExactGibbs, Gibbs, Kernel, run, single_level_plan
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings, train

LEVEL = NoiseLevel(sigma=0.2)
START_STD = 0.1
ENTROPY_DRAWS = 20_000  # for the mean log density of the data: a standard error below 0.01 nats

METHODS = {
    "learned": "learned diagonal",
    "isotropic": "analytic isotropic",
    "diagonal": "analytic diagonal",
    "full": "analytic full",
    "moments": "true moments",
    "exact": "exact Gibbs",
}
"""The posteriors compared: a network trained by KL, three from the energy trained by DSM, and two oracles that know the
density: a Gaussian with the true moments, and the true posterior itself."""
TRAINED = ("learned", "isotropic", "diagonal", "full")
FLOOR = "data"
"""The row of independent draws from the density: what a perfect sampler scores."""


@dataclass(frozen=True)
class ToySettings:
    """Sizes of the 2-D experiments; the defaults are the authors' where they have one."""

    points: int = 10_000
    training: TrainingSettings = field(default_factory=TrainingSettings)
    chain_steps: int = 10_000
    seeds: int = 5
    many_chains: int = 2_000  # per seed
    many_steps: int = 50


FULL = ToySettings()
QUICK = ToySettings(
    points=4_000,
    # A tenfold learning rate with decay gets in 1,500 steps about as far as the authors' 10,000.
    training=TrainingSettings(steps=1_500, learning_rate=1e-3, decay=True),
    chain_steps=3_000,
    many_chains=600,
    many_steps=30,
)


def toy_settings(context: Context) -> ToySettings:
    """The sizes a run asks for."""
    settings = QUICK if context.quick else FULL
    training = replace(settings.training, seed=context.seed)
    return replace(settings, training=training, seeds=context.seeds or settings.seeds)


@dataclass(frozen=True)
class Fitted:
    """A data set with everything that was learned from it."""

    toy: Toy
    data: Tensor
    moments: dict[str, Moments]

    def kernel(self, method: str) -> Kernel:
        """The Gibbs kernel of one of METHODS."""
        return ExactGibbs(self.density()) if method == "exact" else Gibbs(self.moments[method])

    def density(self) -> Any:
        return self.toy.density().to(device=self.data.device)


def fit(context: Context, settings: ToySettings, names: Sequence[str] | None = None) -> dict[str, Fitted]:
    """Train the energy and the baseline on each data set asked for (or take them from the folder), side by side."""
    toys = [toy(name) for name in names or context.data or TOYS]
    jobs = [partial(_trained, context, one, settings, kind) for one in toys for kind in ("energy", "learned")]
    together(context, jobs, "training")
    found = {}
    for one in toys:
        data = _data(context, one, settings)
        denoiser = energy_denoiser(_trained(context, one, settings, "energy"))
        noise = seeded(context.seed, "isotropic")
        moments: dict[str, Moments] = {
            "learned": LearnedMoments(_trained(context, one, settings, "learned")),
            "isotropic": IsotropicMoments.fit(denoiser, data, LEVEL, generator=noise, variance_of=by_score),
            "diagonal": DiagonalMoments(denoiser, probes=None),
            "full": FullMoments(denoiser),
            "moments": ExactMoments(one.density().to(device=context.device)),
        }
        found[one.name] = Fitted(one, data, moments)
    return found


def _trained(context: Context, one: Toy, settings: ToySettings, kind: str) -> MLP:
    """The energy trained by DSM ("energy") or the baseline trained by KL ("learned"), or what the folder has of it."""
    network = MLP(2, 2 if kind == "energy" else 4, seed=context.seed).to(context.device)

    def loss(x: Tensor, generator: Generator) -> Tensor:
        if kind == "energy":
            return losses.dsm(energy_denoiser(network), x, LEVEL, generator=generator)
        return losses.kl(LearnedMoments(network), x, LEVEL, generator=generator)

    def compute() -> Part:
        curve = train(network, loss, _data(context, one, settings), settings.training, progress=f"{one.title}: {kind}")
        return Part({"final_loss": curve[-100:].mean().item()}, dict(network.state_dict()))

    part = context.workspace.part(f"{one.name}-{kind}", (settings.points, settings.training), compute)
    network.load_state_dict(part.tensors)
    return network.requires_grad_(False).eval()


def _data(context: Context, one: Toy, settings: ToySettings) -> Tensor:
    return one.sample(settings.points, context.seed).to(context.device)


def single_chains(
    context: Context, sets: Mapping[str, Fitted], settings: ToySettings, methods: Sequence[str] = tuple(METHODS)
) -> Results:
    """The authors' protocol: `seeds` single chains of `chain_steps` steps, each against the training data."""
    cells = {(method, name): method for name in sets for method in methods}
    measure = partial(_single, sets, settings)
    return Grid("single", cells, measure, depends=settings, across="data", beside=True).run(context)


def _single(sets: Mapping[str, Fitted], settings: ToySettings, cell: Cell) -> Part:
    fitted = sets[cell.column]
    x0 = _start(fitted, settings.seeds, seeded(cell.seed, "single start"))
    plan = single_level_plan(fitted.kernel(cell.row), LEVEL, steps=settings.chain_steps)
    every = range(1, settings.chain_steps + 1)
    result = run(plan, x0, seed=cell.seed, keep=every, progress=cell.name)
    chains = result.samples.split(1, dim=1)
    values: dict[str, Any] = {
        "mmd": [mmd(chain[:, 0], fitted.data) for chain in chains],
        "ess": [effective_sample_size(chain) for chain in chains],
        "repaired": result.repaired,
    }
    if fitted.toy.modes is not None:
        values["switches"] = [mode_statistics(chain, fitted.toy.modes).switches[0] for chain in chains]
    return Part(values, {"samples": result.samples[:, 0]})


def many_chains(context: Context, sets: Mapping[str, Fitted], settings: ToySettings, start: str) -> Results:
    """The sound protocol: groups of many chains from the density ("density") or the authors' start, to fresh data."""
    cells = {(method, name): start for name in sets for method in (*METHODS, FLOOR)}
    measure = partial(_many, sets, settings)
    return Grid(f"many-{start}", cells, measure, depends=settings, across="data", beside=True).run(context)


def _many(sets: Mapping[str, Fitted], settings: ToySettings, cell: Cell) -> Part:
    fitted = sets[cell.column]
    one, count = fitted.toy, settings.seeds * settings.many_chains
    values: dict[str, Any] = {}
    if cell.row == FLOOR:
        x = draws(one, count, seeded(cell.seed, "floor")).to(fitted.data)
    else:
        begin = seeded(cell.seed, "many start")
        x0 = draws(one, count, begin).to(fitted.data) if cell.what == "density" else _start(fitted, count, begin)
        plan = single_level_plan(fitted.kernel(cell.row), LEVEL, steps=settings.many_steps)
        result = run(plan, x0, seed=child_seed(cell.seed, "many"), progress=cell.name)
        x, values["repaired"] = result.x, result.repaired
    groups = x.split(settings.many_chains)
    # scikit-learn takes seeds of 32 bits.
    fresh = one.sample(settings.points, child_seed(cell.seed, "fresh data") % 2**32).to(x)
    values |= against_truth(fitted.density(), groups, [fresh] * len(groups), mean_log_density(one.name, cell.seed))
    if one.modes is not None:
        weights = [mode_statistics(group[None], one.modes).weights for group in groups]
        values |= {f"mode_{k}": list(shares) for k, shares in enumerate(zip(*weights, strict=True))}
    return Part(values, {"samples": x})


def _start(fitted: Fitted, chains: int, generator: torch.Generator) -> Tensor:
    return (torch.tensor(fitted.toy.start) + START_STD * torch.randn(chains, 2, generator=generator)).to(fitted.data)


def against_truth(
    density: Any, groups: Sequence[Tensor], references: Sequence[Tensor], expected: float
) -> dict[str, list[float]]:
    """For each group of samples (n, d): its MMD to its reference, and its log-density deficit.

    The deficit is E_p[log p(x)] (`expected`) - mean log p(sample), p the true density, in nats: how much less likely
    the samples are than data. It sees blur that is finer than the kernels of the MMD.
    """
    return {
        "mmd": [
            mmd(group, reference) if torch.isfinite(group).all() else math.inf
            for group, reference in zip(groups, references, strict=True)
        ],
        "deficit": [expected - density.log_prob(group).mean().item() for group in groups],
    }


def four_gaussians() -> GaussianMixture:
    """The paper's mixture of four Gaussians, in float64."""
    return mog_density().to(dtype=torch.float64)


@cache
def mean_log_density(name: str, seed: int) -> float:
    """E_p[log p(x)] of a set's density p, from independent draws."""
    return toy(name).density().log_prob(draws(toy(name), ENTROPY_DRAWS, seeded(seed, "entropy"))).mean().item()


def draws(one: Toy, n: int, generator: torch.Generator) -> Tensor:
    """Independent draws from the set's density (scikit-learn's rings are evenly spaced, not independent)."""
    return one.density().sample((n,), generator=generator)
