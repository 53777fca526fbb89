"""What the 2-D experiments share: their sizes, the trained networks, the posteriors to compare, the chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mmdgs import losses
from mmdgs.data import TOYS, Toy, toy
from mmdgs.denoisers import energy_denoiser
from mmdgs.lab.experiment import Context
from mmdgs.lab.workspace import Part
from mmdgs.metrics import effective_sample_size, mmd, mode_statistics
from mmdgs.moments import DiagonalMoments, ExactMoments, FullMoments, IsotropicMoments, LearnedMoments, Moments
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, seeded
from mmdgs.runtime import side_by_side
from mmdgs.samplers import ExactGibbs, Gibbs, Kernel, Run, run, single_level_plan
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
"""The posteriors compared: a network trained by KL, three that come from the energy trained by DSM, and two
oracles that know the density: a Gaussian with the true moments, and the true posterior itself."""

ORACLES = ("moments", "exact")


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


def settings_for(context: Context) -> ToySettings:
    """The sizes a run asks for."""
    settings = QUICK if context.quick else FULL
    settings = replace(settings, training=replace(settings.training, seed=context.seed))
    return settings if context.seeds is None else replace(settings, seeds=context.seeds)


def toys_for(context: Context, default: tuple[str, ...] = tuple(TOYS)) -> list[Toy]:
    """The data sets a run asks for."""
    return [toy(name) for name in context.datasets or default]


@dataclass(frozen=True)
class Fitted:
    """A data set with everything that was learned from it."""

    toy: Toy
    data: Tensor
    moments: dict[str, Moments]

    def kernel(self, method: str) -> Kernel:
        """The Gibbs kernel of one of METHODS."""
        if method == "exact":
            return ExactGibbs(self.toy.density().to(device=self.data.device))
        return Gibbs(self.moments[method])

    @property
    def isotropic_variance(self) -> float:
        fitted = self.moments["isotropic"]
        assert isinstance(fitted, IsotropicMoments)
        return fitted.variances[LEVEL]


def _trained(context: Context, one: Toy, settings: ToySettings, kind: str) -> MLP:
    """The energy trained by DSM ("energy") or the baseline trained by KL ("learned"), or what the folder has of it."""
    network = MLP(2, 2 if kind == "energy" else 4, seed=context.seed).to(context.device)
    asked = {"points": settings.points, "seed": context.seed, **asdict(settings.training)}

    def loss(x: Tensor, generator: Generator) -> Tensor:
        if kind == "energy":
            return losses.dsm(energy_denoiser(network), x, LEVEL, generator=generator)
        return losses.kl(LearnedMoments(network), x, LEVEL, generator=generator)

    def compute() -> Part:
        curve = train(network, loss, _data(context, one, settings), settings.training, progress=f"{one.title}: {kind}")
        return Part({"final_loss": curve[-100:].mean().item()}, dict(network.state_dict()) | {"losses": curve})

    part = context.workspace.part(f"{one.name}-{kind}", asked, compute)
    network.load_state_dict({key: value for key, value in part.tensors.items() if key != "losses"})
    return network.requires_grad_(False).eval()


def _data(context: Context, one: Toy, settings: ToySettings) -> Tensor:
    return one.sample(settings.points, context.seed).to(context.device)


def together(context: Context, jobs: Sequence[Callable[[], object]], label: str) -> None:
    """Run jobs side by side: one for each CPU thread that torch may use, one at a time on an accelerator."""
    workers = torch.get_num_threads() if context.device.type == "cpu" else 1
    side_by_side(jobs, workers=workers, progress=label)


def fit(context: Context, toys: Sequence[Toy], settings: ToySettings) -> list[Fitted]:
    """Train the energy and the baseline on each data set (or take them from the folder)."""
    jobs = [partial(_trained, context, one, settings, kind) for one in toys for kind in ("energy", "learned")]
    together(context, jobs, "training")
    found = []
    for one in toys:
        data = _data(context, one, settings)
        denoiser = energy_denoiser(_trained(context, one, settings, "energy"))
        moments: dict[str, Moments] = {
            "learned": LearnedMoments(_trained(context, one, settings, "learned")),
            "isotropic": IsotropicMoments.fit_by_score(denoiser, data, LEVEL, generator=seeded(context.seed)),
            "diagonal": DiagonalMoments(denoiser, probes=None),
            "full": FullMoments(denoiser),
            "moments": ExactMoments(one.density().to(device=context.device)),
        }
        found.append(Fitted(one, data, moments))
    return found


def _start(one: Toy, chains: int, seed: int, device: torch.device) -> Tensor:
    return (torch.tensor(one.start) + START_STD * torch.randn(chains, 2, generator=seeded(seed))).to(device)


def _run(fitted: Fitted, method: str, x0: Tensor, steps: int, seed: int, burn_in: int = 0) -> Run:
    label = f"{fitted.toy.title}: {METHODS[method]}"
    plan = single_level_plan(fitted.kernel(method), LEVEL, steps=steps)
    return run(plan, x0, seed=seed, keep=range(burn_in + 1, steps + 1), progress=label)


def single_chains(context: Context, fitted: Fitted, method: str, settings: ToySettings) -> Part:
    """The authors' protocol: `seeds` single chains of `chain_steps` steps, each against the training data."""
    asked = {**asdict(settings), "seed": context.seed, "method": method}

    def compute() -> Part:
        x0 = _start(fitted.toy, settings.seeds, context.seed, context.device)
        result = _run(fitted, method, x0, settings.chain_steps, context.seed)
        chain = result.samples
        values: dict[str, Any] = {
            "mmd": [mmd(chain[:, c], fitted.data) for c in range(settings.seeds)],
            "ess": [effective_sample_size(chain[:, c : c + 1]) for c in range(settings.seeds)],
            "repaired": result.repaired,
        }
        if fitted.toy.modes is not None:
            each = [mode_statistics(chain[:, c : c + 1], fitted.toy.modes) for c in range(settings.seeds)]
            values |= {"mode_weights": [m.weights for m in each], "mode_switches": [m.switches[0] for m in each]}
        return Part(values, {"samples": chain[:, 0]})

    return context.workspace.part(f"{fitted.toy.name}-single-{method}", asked, compute)


def many_chains(context: Context, fitted: Fitted, method: str, start: str, settings: ToySettings) -> Part:
    """The sound protocol: many chains from the density ("data") or from the authors' start ("start"), to fresh data."""
    asked = {**asdict(settings), "seed": context.seed, "method": method, "start": start}
    one, chains = fitted.toy, settings.seeds * settings.many_chains

    def compute() -> Part:
        x0 = (
            draws(one, chains, context.seed + 1).to(context.device)
            if start == "data"
            else _start(one, chains, context.seed + 1, context.device)
        )
        steps = settings.many_steps
        result = _run(fitted, method, x0, steps, context.seed + 1, burn_in=steps - 1)
        groups = result.samples[0].split(settings.many_chains)
        values: dict[str, Any] = {**against_truth(one, groups, settings, context.seed), "repaired": result.repaired}
        if one.modes is not None:
            values["mode_weights"] = [mode_statistics(group[None], one.modes).weights for group in groups]
        return Part(values, {"samples": result.samples[0]})

    return context.workspace.part(f"{one.name}-many-{start}-{method}", asked, compute)


def data_floor(context: Context, one: Toy, settings: ToySettings) -> dict[str, list[float]]:
    """The numbers of `many_chains` for independent draws from the true density: what a perfect sampler scores."""
    groups = draws(one, settings.seeds * settings.many_chains, context.seed + 2).split(settings.many_chains)
    return against_truth(one, groups, settings, context.seed)


def against_truth(one: Toy, groups: Sequence[Tensor], settings: ToySettings, seed: int) -> dict[str, list[float]]:
    """For each group of samples (n, 2): its MMD to fresh data, and its log-density deficit.

    The deficit is E_p[log p(x)] - mean log p(sample), p the true density, in nats: how much less likely the
    samples are than data. It sees blur that is finer than the kernels of the MMD.
    """
    reference, density = fresh_data(one, settings, seed).to(groups[0]), one.density().to(groups[0].device)
    expected = mean_log_density(one.name, seed)
    return {
        "mmd": [mmd(group, reference) for group in groups],
        "deficit": [expected - density.log_prob(group).mean().item() for group in groups],
    }


@cache
def mean_log_density(name: str, seed: int) -> float:
    """E_p[log p(x)] of a set's density p, from independent draws."""
    return toy(name).density().log_prob(draws(toy(name), ENTROPY_DRAWS, seed + 3)).mean().item()


def draws(one: Toy, n: int, seed: int) -> Tensor:
    """Independent draws from the set's density (scikit-learn's rings are evenly spaced, not independent)."""
    return one.density().sample((n,), generator=seeded(seed))


def fresh_data(one: Toy, settings: ToySettings, seed: int) -> Tensor:
    """Data that no network was trained on: the set drawn with another seed."""
    return one.sample(settings.points, seed + 1_000_003)
