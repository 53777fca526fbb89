"""The paper's 2-D experiments: networks, the posteriors they give, and Gibbs chains with each."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mmdgs import losses
from mmdgs.data import Toy, mog_density, toy
from mmdgs.denoisers import energy_denoiser
from mmdgs.metrics import effective_sample_size, mmd, mode_coverage
from mmdgs.moments import (
    FLOOR as PAPER_FLOOR,
    DiagonalMoments,
    ExactMoments,
    FullMoments,
    IsotropicMoments,
    LearnedMoments,
    Moments,
)
from mmdgs.moments.fitted import by_score
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import child_seed, seeded
from mmdgs.report.drawing import BLUE, GREEN, GREY, ORANGE, PINK, PURPLE, RED, SLATE
from mmdgs.runtime import side_by_side
from mmdgs.samplers import ExactGibbs, Gibbs, Kernel, run, single_level_plan
from mmdgs.targets import GaussianMixture
from mmdgs.training import TrainingSettings, train
from mmdgs.workspace import Part, Workspace

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
"""The posteriors compared: a network trained by KL, three covariances of an energy trained by score
matching, and two that know the density: a Gaussian with the true moments, the true posterior."""
TRAINED = ("learned", "second", "isotropic", "diagonal", "full")
"""Those that come from a network; `second` is in the experiment table1 only."""
FLOOR = "data"
"""The row of independent draws from the density: what a perfect sampler scores."""
COLOURS = {
    "data": GREY, "learned": RED, "second": PINK, "isotropic": ORANGE, "diagonal": PURPLE,
    "full": BLUE, "moments": GREEN, "exact": SLATE,
}  # fmt: skip


@dataclass(frozen=True)
class ToySettings:
    """Sizes of the 2-D experiments; the defaults are the authors' where they have one."""

    points: int = 10_000
    training: TrainingSettings = field(default_factory=TrainingSettings)
    seeds: int = 5  # each with its own data, networks and chains
    runs: int = 1  # single chains of a seed, and groups of many chains
    chain_steps: int = 10_000
    many_chains: int = 2_000  # per group
    many_steps: int = 50


QUICK = ToySettings(
    points=4_000,
    # A tenfold learning rate with decay gets in 1,500 steps about as far as the authors' 10,000.
    training=TrainingSettings(steps=1_500, learning_rate=1e-3, decay=True),
    seeds=1,
    runs=5,
    chain_steps=3_000,
    many_chains=600,
    many_steps=30,
)


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

    def draws(self, count: int, generator: torch.Generator) -> Tensor:
        """Independent draws from the density (the data of the rings are evenly spaced)."""
        return self.toy.density().sample((count,), generator=generator).to(self.data)

    def start(self, count: int, generator: torch.Generator) -> Tensor:
        """The authors' starting point."""
        noise = torch.randn(count, 2, generator=generator)
        return (torch.tensor(self.toy.start) + START_STD * noise).to(self.data)


Sets = Mapping[str, Sequence[Fitted]]
"""By the name of a data set: what was fitted with each seed."""
Objective = Callable[[MLP], Callable[..., Tensor]]
"""From a network to its loss of (x, level, generator)."""
NETWORKS: dict[str, tuple[int, Objective]] = {
    "energy": (2, lambda network: partial(losses.dsm, energy_denoiser(network))),
    "learned": (4, lambda network: partial(losses.kl, LearnedMoments(network))),
}
"""How many numbers each network puts out, and its objective."""


@dataclass(frozen=True)
class Toys:
    """Where the 2-D experiments keep their parts, on what they run, and how large they are."""

    workspace: Workspace
    device: torch.device
    settings: ToySettings

    def together(self, jobs: Sequence[Callable[[], object]], label: str) -> None:
        """Run jobs side by side: one for each CPU thread, one at a time on an accelerator."""
        workers = torch.get_num_threads() if self.device.type == "cpu" else 1
        side_by_side(jobs, workers=workers, progress=label)

    def fit(self, names: Sequence[str], seed: int) -> dict[str, list[Fitted]]:
        """Train the energy and the baseline on each data set, once a seed from `seed` on."""
        sets = {name: toy(name) for name in names}
        seeds = range(seed, seed + self.settings.seeds)
        cells = itertools.product(seeds, sets.values(), NETWORKS)
        jobs = [partial(self.trained, data, number, kind) for number, data, kind in cells]
        self.together(jobs, "training")
        return {name: [self._fitted(data, n) for n in seeds] for name, data in sets.items()}

    def data(self, of: Toy, seed: int) -> Tensor:
        return of.sample(self.settings.points, seed).to(self.device)

    def trained(
        self, of: Toy, seed: int, kind: str, built: tuple[int, Objective] | None = None
    ) -> MLP:
        """A network of NETWORKS, or as `built` says, trained on a data set or from the folder."""
        outputs, objective = built or NETWORKS[kind]
        network = MLP(2, outputs, seed=seed).to(self.device)
        training = replace(self.settings.training, seed=seed)
        name = f"{of.name}-{kind}-{seed}"

        def compute() -> Part:
            loss, data = objective(network), self.data(of, seed)
            losses_of = train(
                network, lambda x, g: loss(x, LEVEL, generator=g), data, training, progress=name
            )
            return Part({"final_loss": losses_of[-100:].mean().item()}, dict(network.state_dict()))

        part = self.workspace.part(name, (self.settings.points, training), compute)
        network.load_state_dict(part.tensors)
        return network.requires_grad_(False).eval()

    def _fitted(self, of: Toy, seed: int) -> Fitted:
        data = self.data(of, seed)
        denoiser = energy_denoiser(self.trained(of, seed, "energy"))
        noise = seeded(seed, "isotropic")
        moments: dict[str, Moments] = {
            "learned": LearnedMoments(self.trained(of, seed, "learned")),
            "isotropic": IsotropicMoments.fit(
                denoiser, data, LEVEL, generator=noise, variance_of=by_score
            ),
            "diagonal": DiagonalMoments(denoiser, probes=None, floor=PAPER_FLOOR),
            "full": FullMoments(denoiser, floor=PAPER_FLOOR),
            "moments": ExactMoments(of.density().to(device=self.device)),
        }
        return Fitted(of, seed, data, moments)


def single_chains(sets: Sequence[Fitted], settings: ToySettings, method: str) -> Part:
    """The authors' protocol: single long chains, each against its training data.

    The samples are those of the first chain of the first seed.
    """
    values: dict[str, Any] = {"mmd": [], "ess": [], "repaired": []}
    samples = []
    for fitted in sets:
        x0 = fitted.start(settings.runs, seeded(fitted.seed, "single start"))
        plan = single_level_plan(fitted.kernel(method), LEVEL, steps=settings.chain_steps)
        label = f"{method}, {fitted.toy.name}, {fitted.seed}"
        keep = range(1, settings.chain_steps + 1)
        result = run(plan, x0, seed=fitted.seed, keep=keep, progress=label)
        chains = result.samples.split(1, dim=1)
        values["mmd"] += [mmd(chain[:, 0], fitted.data) for chain in chains]
        values["ess"] += [effective_sample_size(chain) for chain in chains]
        values["repaired"].append(result.repaired)
        if fitted.toy.modes is not None:
            switches = [mode_coverage(chain, fitted.toy.modes).switches[0] for chain in chains]
            values["switches"] = [*values.get("switches", ()), *switches]
        samples.append(result.samples[:, 0])
    return Part(values | {"repaired": statistics.mean(values["repaired"])}, {"samples": samples[0]})


def many_chains(
    sets: Sequence[Fitted], settings: ToySettings, method: str, start: str, seed: int
) -> Part:
    """Groups of many chains from the density ("density") or the authors' start, against fresh data;
    for the method FLOOR as many independent draws.
    """
    parts = [_many(fitted, settings, method, start, seed) for fitted in sets]
    values: dict[str, Any] = {
        key: [number for part in parts for number in part[key]] for key in parts[0]
    }
    if "repaired" in values:
        values["repaired"] = statistics.mean(values["repaired"])
    return Part(values)


def _many(
    fitted: Fitted, settings: ToySettings, method: str, start: str, entropy_seed: int
) -> dict[str, list[float]]:
    data, seed, count = fitted.toy, fitted.seed, settings.runs * settings.many_chains
    values: dict[str, list[float]] = {}
    if method == FLOOR:
        x = fitted.draws(count, seeded(seed, "floor"))
    else:
        begin = fitted.draws if start == "density" else fitted.start
        plan = single_level_plan(fitted.kernel(method), LEVEL, steps=settings.many_steps)
        x0, label = begin(count, seeded(seed, "many start")), f"{method}, {data.name}, {seed}"
        result = run(plan, x0, seed=child_seed(seed, "many"), progress=label)
        x, values["repaired"] = result.x, [result.repaired]
    groups = x.split(settings.many_chains)
    # Cut to 32 bits, as when scikit-learn drew these data: they stay the same.
    fresh = data.sample(settings.points, child_seed(seed, "fresh data") % 2**32).to(x)
    expected = mean_log_density(data.name, entropy_seed)
    values |= against_truth(fitted.density(), groups, [fresh] * len(groups), expected)
    if data.modes is not None:
        weights = [mode_coverage(group[None], data.modes).weights for group in groups]
        values |= {f"mode_{k}": list(shares) for k, shares in enumerate(zip(*weights, strict=True))}
    return values


def against_truth(
    density: Any, groups: Sequence[Tensor], references: Sequence[Tensor], expected: float
) -> dict[str, list[float]]:
    """For each group of samples (n, d): its MMD to its reference, and its log-density deficit.

    The deficit is E_p[log p(x)] (`expected`) - mean log p(sample), p the true density, in nats: how
    much less likely samples are than data. It sees blur finer than the kernels of the MMD.
    """
    pairs = zip(groups, references, strict=True)
    return {
        "mmd": [mmd(x, reference) if x.isfinite().all() else math.inf for x, reference in pairs],
        "deficit": [expected - density.log_prob(group).mean().item() for group in groups],
    }


@cache
def mean_log_density(name: str, seed: int) -> float:
    """E_p[log p(x)] of a set's density p, from independent draws."""
    density = toy(name).density()
    draws = density.sample((ENTROPY_DRAWS,), generator=seeded(seed, "entropy"))
    return density.log_prob(draws).mean().item()


def four_gaussians() -> GaussianMixture:
    """The paper's mixture of four Gaussians, in float64."""
    return mog_density().to(dtype=torch.float64)
