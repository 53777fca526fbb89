"""The 2-D experiments' shared parts: sizes, trained networks, posteriors to compare, and chains as grids."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
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
from mmdgs.lab.second_order import SecondOrderMoments, second_order_loss
from mmdgs.lab.workspace import Part
from mmdgs.metrics import effective_sample_size, mmd, mode_statistics
from mmdgs.moments import (
    FLOOR as PAPER_FLOOR,
    DiagonalMoments,
    ExactMoments,
    FullMoments,
    IsotropicMoments,
    LearnedMoments,
    Moments,
)
from mmdgs.moments.isotropic import by_score
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import child_seed, seeded
from mmdgs.samplers import ExactGibbs, Gibbs, Kernel, run, single_level_plan
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings, train

LEVEL = NoiseLevel(sigma=0.2)
START_STD = 0.1
ENTROPY_DRAWS = 20_000  # for the mean log density of the data: a standard error below 0.01 nats

METHODS = {
    "learned": "learned diagonal",
    "second": "learned second order",
    "isotropic": "analytic isotropic",
    "diagonal": "analytic diagonal",
    "full": "analytic full",
    "moments": "true moments",
    "exact": "exact Gibbs",
}
"""The posteriors compared: a network trained by KL, four with the mean of the energy trained by DSM (their covariance
from a second network, or from the energy itself), and two oracles that know the density: a Gaussian with the true
moments, and the true posterior itself."""
TRAINED = ("learned", "second", "isotropic", "diagonal", "full")
OUTPUTS = {"energy": 2, "learned": 4, "second": 3}
"""The networks, and how many numbers each puts out."""
FLOOR = "data"
"""The row of independent draws from the density: what a perfect sampler scores."""


@dataclass(frozen=True)
class ToySettings:
    """Sizes of the 2-D experiments; the defaults are the authors' where they have one."""

    points: int = 10_000
    training: TrainingSettings = field(default_factory=TrainingSettings)
    second_order: bool = True
    seeds: int = 5  # each with its own data, networks and chains
    runs: int = 1  # single chains of a seed, and groups of many chains
    chain_steps: int = 10_000
    many_chains: int = 2_000  # per group
    many_steps: int = 50

    @property
    def methods(self) -> dict[str, str]:
        """The METHODS that are compared at this size."""
        return {name: title for name, title in METHODS.items() if name != "second" or self.second_order}


FULL = ToySettings()
QUICK = ToySettings(
    points=4_000,
    # A tenfold learning rate with decay gets in 1,500 steps about as far as the authors' 10,000.
    training=TrainingSettings(steps=1_500, learning_rate=1e-3, decay=True),
    second_order=False,
    seeds=1,
    runs=5,
    chain_steps=3_000,
    many_chains=600,
    many_steps=30,
)


def toy_settings(context: Context, **sizes: Any) -> ToySettings:
    """The sizes of a run: full or quick, with `sizes` in place of some, and as many seeds as it asks for."""
    settings = replace(QUICK if context.quick else FULL, **sizes)
    training = QUICK.training if context.short_training else settings.training
    return replace(settings, training=training, seeds=context.seeds or settings.seeds)


@dataclass(frozen=True)
class Fitted:
    """A data set of one seed with everything that was learned from it."""

    toy: Toy
    seed: int
    data: Tensor
    moments: dict[str, Moments]

    def kernel(self, method: str) -> Kernel:
        """The Gibbs kernel of one of METHODS."""
        return ExactGibbs(self.density()) if method == "exact" else Gibbs(self.moments[method])

    def density(self) -> Any:
        return self.toy.density().to(device=self.data.device)


Sets = Mapping[str, Sequence[Fitted]]
"""By the name of a data set: what was fitted with each seed."""


def fit(context: Context, settings: ToySettings, names: Sequence[str] | None = None) -> dict[str, list[Fitted]]:
    """Train the energy and the baseline on each data set asked for, once a seed (or take them from the folder)."""
    toys = [toy(name) for name in names or context.data or TOYS]
    seeds = range(context.seed, context.seed + settings.seeds)
    places = [(one, seed) for seed in seeds for one in toys]
    for kinds in [("energy", "learned"), ("second",)][: 1 + settings.second_order]:  # the last needs the first's mean
        jobs = [partial(_trained, context, *place, settings, kind) for place in places for kind in kinds]
        together(context, jobs, "training")
    return {one.name: [_fitted(context, one, seed, settings) for seed in seeds] for one in toys}


def _fitted(context: Context, one: Toy, seed: int, settings: ToySettings) -> Fitted:
    data = _data(context, one, settings, seed)
    trained = partial(_trained, context, one, seed, settings)
    denoiser = energy_denoiser(trained("energy"))
    noise = seeded(seed, "isotropic")
    moments: dict[str, Moments] = {
        "learned": LearnedMoments(trained("learned")),
        "isotropic": IsotropicMoments.fit(denoiser, data, LEVEL, generator=noise, variance_of=by_score),
        "diagonal": DiagonalMoments(denoiser, probes=None, floor=PAPER_FLOOR),
        "full": FullMoments(denoiser, floor=PAPER_FLOOR),
        "moments": ExactMoments(one.density().to(device=context.device)),
    }
    if settings.second_order:
        moments["second"] = SecondOrderMoments(denoiser, trained("second"))
    return Fitted(one, seed, data, moments)


def _trained(context: Context, one: Toy, seed: int, settings: ToySettings, kind: str) -> MLP:
    """The energy trained by DSM, the baseline by KL ("learned") or the second-order score, or what the folder has."""
    network = MLP(2, OUTPUTS[kind], seed=seed).to(context.device)
    training = replace(settings.training, seed=seed)
    name = f"{one.name}-{kind}-{seed}"

    def objective() -> Callable[..., Tensor]:
        if kind == "energy":
            return partial(losses.dsm, energy_denoiser(network))
        if kind == "learned":
            return partial(losses.kl, LearnedMoments(network))
        mean = energy_denoiser(_trained(context, one, seed, settings, "energy"))
        return partial(second_order_loss, SecondOrderMoments(mean, network))

    def compute() -> Part:
        loss, data = objective(), _data(context, one, settings, seed)
        curve = train(network, lambda x, g: loss(x, LEVEL, generator=g), data, training, progress=name)
        return Part({"final_loss": curve[-100:].mean().item()}, dict(network.state_dict()))

    part = context.workspace.part(name, (settings.points, training), compute)
    network.load_state_dict(part.tensors)
    return network.requires_grad_(False).eval()


def _data(context: Context, one: Toy, settings: ToySettings, seed: int) -> Tensor:
    return one.sample(settings.points, seed).to(context.device)


def single_chains(context: Context, sets: Sets, settings: ToySettings, methods: Sequence[str] | None = None) -> Results:
    """The authors' protocol: single chains of `chain_steps` steps for each seed, each against its training data."""
    cells = {(method, name): method for name in sets for method in methods or settings.methods}
    measure = partial(_single, sets, settings)
    return Grid("single", cells, measure, depends=settings, across="data", beside=True).run(context)


def _single(sets: Sets, settings: ToySettings, cell: Cell) -> Part:
    values: dict[str, Any] = {"mmd": [], "ess": [], "repaired": []}
    every = range(1, settings.chain_steps + 1)
    samples = []
    for fitted in sets[cell.column]:
        x0 = _start(fitted, settings.runs, seeded(fitted.seed, "single start"))
        plan = single_level_plan(fitted.kernel(cell.row), LEVEL, steps=settings.chain_steps)
        result = run(plan, x0, seed=fitted.seed, keep=every, progress=f"{cell.name}, {fitted.seed}")
        chains = result.samples.split(1, dim=1)
        values["mmd"] += [mmd(chain[:, 0], fitted.data) for chain in chains]
        values["ess"] += [effective_sample_size(chain) for chain in chains]
        values["repaired"].append(result.repaired)
        if fitted.toy.modes is not None:
            switches = [mode_statistics(chain, fitted.toy.modes).switches[0] for chain in chains]
            values["switches"] = [*values.get("switches", ()), *switches]
        samples.append(result.samples[:, 0])
    return Part(values | {"repaired": statistics.mean(values["repaired"])}, {"samples": samples[0]})


def many_chains(context: Context, sets: Sets, settings: ToySettings, start: str) -> Results:
    """The sound protocol: groups of many chains from the density ("density") or the authors' start, to fresh data."""
    cells = {(method, name): start for name in sets for method in (*settings.methods, FLOOR)}
    measure = partial(_many, sets, settings)
    return Grid(f"many-{start}", cells, measure, depends=settings, across="data", beside=True).run(context)


def _many(sets: Sets, settings: ToySettings, cell: Cell) -> Part:
    parts = [_many_of_seed(fitted, settings, cell) for fitted in sets[cell.column]]
    values: dict[str, Any] = {key: [number for part in parts for number in part[key]] for key in parts[0]}
    if "repaired" in values:
        values |= {"repaired": statistics.mean(values["repaired"])}
    return Part(values)


def _many_of_seed(fitted: Fitted, settings: ToySettings, cell: Cell) -> dict[str, list[float]]:
    one, seed, count = fitted.toy, fitted.seed, settings.runs * settings.many_chains
    values: dict[str, list[float]] = {}
    if cell.row == FLOOR:
        x = draws(one, count, seeded(seed, "floor")).to(fitted.data)
    else:
        begin = seeded(seed, "many start")
        x0 = draws(one, count, begin).to(fitted.data) if cell.what == "density" else _start(fitted, count, begin)
        plan = single_level_plan(fitted.kernel(cell.row), LEVEL, steps=settings.many_steps)
        result = run(plan, x0, seed=child_seed(seed, "many"), progress=f"{cell.name}, {seed}")
        x, values["repaired"] = result.x, [result.repaired]
    groups = x.split(settings.many_chains)
    # Cut to 32 bits, as when scikit-learn drew these data: they stay the same.
    fresh = one.sample(settings.points, child_seed(seed, "fresh data") % 2**32).to(x)
    values |= against_truth(fitted.density(), groups, [fresh] * len(groups), mean_log_density(one.name, cell.seed))
    if one.modes is not None:
        weights = [mode_statistics(group[None], one.modes).weights for group in groups]
        values |= {f"mode_{k}": list(shares) for k, shares in enumerate(zip(*weights, strict=True))}
    return values


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
