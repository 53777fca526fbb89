"""Draws from p(x | y) for measurements y = A x + noise: restoration with a denoiser.

Chains go down the noise levels with p(x | x_t, y) (moments/given.py):

    multistep   samplers/deterministic.py: its means, by the SDE with fresh noise at every level; at the last a draw
    bridge      samplers/ancestral.py: draws of it, level by level
    mirrored    samplers/mirrored.py: draws nearer to the truth, which spread too little

Draw j of measurement i depends on (seed, i, j) alone: not on how many there are of either. (Arithmetic in a batch of
another size rounds differently, and draws then differ by some 1e-5.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs.cost import Cost
from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError, unknown_name
from mmdgs.generation.engine import ADVICE, Watch, chains_at_once
from mmdgs.generation.methods import edm_levels
from mmdgs.memory import Batches, evenly
from mmdgs.models import Model
from mmdgs.models.model import as_model
from mmdgs.moments import GivenMoments, Moments
from mmdgs.moments.contract import estimator_and_denoiser, with_denoiser
from mmdgs.moments.given import GivenDenoiser
from mmdgs.noise import NoiseLevel
from mmdgs.operators import ESTIMATE, Operator, as_operator, estimated_noise, measured, noise_variances
from mmdgs.operators.measurements import unit_noise
from mmdgs.randomness import Generator, Streams, checked_seed, child_seed
from mmdgs.runtime import autocast, check_precision, matmul_precision, progress_bar, ticks_of
from mmdgs.samplers import Info, Multistep, Plan, Run, State, ancestral_plan, mirrored_plan, run

MULTISTEP, BRIDGE, MIRRORED = CHAINS = ("multistep", "bridge", "mirrored")


@dataclass(frozen=True)
class RestorationSettings:
    """How measurements are restored: what runs, and what the record of a run says; `restore` has what each one means.

    `posterior` is what is set of a covariance that is named, as `Model.posterior` takes it.
    """

    noise: float | Tensor | str
    covariance: str | Moments = "spectral"
    posterior: Mapping[str, Any] = field(default_factory=dict)
    chains: str = MULTISTEP
    steps: int = 25
    draws: int = 16
    seed: int = 0
    levels: Sequence[NoiseLevel] | None = None
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.chains not in CHAINS:
            raise unknown_name("chains", self.chains, CHAINS)
        _check_whole(steps=(self.steps, 2), draws=(self.draws, 1))
        check_precision(self.precision)
        checked_seed(self.seed)

    def estimator(self, model: Model) -> Moments:
        """The estimator of p(x | x_t)."""
        if isinstance(self.covariance, str):
            return model.posterior(self.covariance, **self.posterior)
        return self.covariance

    def path(self, model: Model) -> Sequence[NoiseLevel]:
        """The noise levels, the noisiest first."""
        return edm_levels(model, self.steps) if self.levels is None else tuple(self.levels)


@dataclass(frozen=True)
class Restored:
    """Draws of p(x | y) in [0, 1] units, not clipped: (draws, B, ...).

    `cost` is that of one draw, `noise` the standard deviation that was assumed, (1 or B, ...). `info` has averages over
    the steps, (draws, B) by name: "cg_iterations" and "cg_residual" where systems were solved by iterations.
    """

    draws: Float[Tensor, "draws batch ..."]
    cost: Cost
    seconds: float
    noise: Tensor
    info: dict[str, Float[Tensor, "draws batch"]]

    @property
    def mean(self) -> Float[Tensor, "batch ..."]:
        """The mean of the draws: the restoration with the least square error."""
        return self.draws.mean(0)

    @property
    def std(self) -> Float[Tensor, "batch ..."]:
        """The standard deviation of the draws, pixel by pixel: how uncertain the restoration is. It needs two draws."""
        return self.draws.std(0)


def restore(
    model: Model | Denoiser | Moments,
    y: Float[Tensor, "batch ..."],
    operator: Any,
    *,
    noise: float | Tensor | str,
    covariance: str | Moments | None = None,
    chains: str = MULTISTEP,
    steps: int = 25,
    draws: int = 16,
    seed: int = 0,
    levels: Sequence[NoiseLevel] | None = None,
    shape: Sequence[int] | None = None,
    interval: tuple[float, float] | None = None,
    first: int = 0,
    batch_size: int | None = None,
    callback: Watch | None = None,
    precision: str = "float32",
    progress: str | None = "restoring",
) -> Restored:
    """Draw images x given measurements y = A x + noise e of images with values in [0, 1]: from p(x | y), nearly.

    Chains take p(x | x_t, y) for a Gaussian. Where p(x | y) is one, draws by "bridge" are exact; where it has modes,
    y moves their weights too little, with any number of levels (docs/inverse.md, "Limits").
    y is (B, *out_shape). `operator` is one of `mmdgs.operators`, a LinearPhysics of deepinv, or what `as_operator`
    takes. `noise` is a standard deviation: a number, one a row (B,), one a measurement, or "estimate", which takes it
    from y (`operators.estimated_noise`). `covariance` is a name of `Model.posterior`, "spectral" unless given, or an
    estimator in the units of the model. `chains` are "multistep", which follows the conditioned means; "bridge", which
    draws at every level (with the exact covariance of Gaussian data it is exact in any number of steps); or "mirrored"
    for the nearest draws, whose spread is too small to be their uncertainty. Each draw takes `steps` evaluations of the
    model (and the products of its covariance), along EDM's levels within the model's range unless `levels` are given.
    `first` is the number of the first measurement, for parts of a larger set; `batch_size` is how many draws run at a
    time, and changes numbers by rounding alone. `callback(step, state, info, number)` is called after each step of a
    batch, whose first draw has this number; states are in the model's units.

    `model` may also be a denoiser, such as `mmdgs.noise_denoiser(net)`. It needs the `levels` that chains go along, the
    noisiest first; the `shape` of its images, where the operator does not know it; and the `interval` of its values,
    [0, 1] unless given. Its covariance is "krylov" unless given, which needs no fit. Or `model` may be an estimator of
    a model or of a denoiser, fitted (`SpectralMoments.fit`), calibrated (`mmdgs.calibrate`) or not: it is then the
    covariance.
    """
    given, source = estimator_and_denoiser(model)
    if given is not None and covariance is not None:
        raise UsageError(f"give an estimator, {type(given).__name__}, or a covariance, not both")
    bare = not isinstance(source, Model)
    if bare and levels is None:
        raise UsageError("a denoiser that is no Model needs levels=, such as mmdgs.schedules.edm(25, 80.0, 0.002)")
    shape = getattr(operator, "shape", None) if bare and shape is None else shape
    model = as_model(source, levels=levels, shape=shape, interval=interval)
    if given is not None:
        covariance = with_denoiser(given, model)
    settings = RestorationSettings(
        noise=noise,
        covariance=covariance or ("krylov" if bare else "spectral"),
        chains=chains,
        steps=steps,
        draws=draws,
        seed=seed,
        levels=levels,
        precision=precision,
    )
    return restore_by(
        settings, model, y, operator, first=first, batch_size=batch_size, callback=callback, progress=progress
    )


def restore_by(
    settings: RestorationSettings,
    model: Model,
    y: Float[Tensor, "batch ..."],
    operator: Any,
    *,
    first: int = 0,
    batch_size: int | None = None,
    callback: Watch | None = None,
    progress: str | None = "restoring",
) -> Restored:
    """`restore` with its settings in one object."""
    check_restoration(model, batch_size)
    found = as_operator(operator, model.shape, torch.empty(0, device=model.device))
    y = measured(y.detach(), found).to(model.device, torch.float32)
    tau = noise_of(settings.noise, y, found)
    low, high = model.interval
    # x = low + (high - low) u for u in [0, 1], so that A x = low A 1 + (high - low) A u, whatever A does to constants.
    offset = found(torch.full((1, *model.shape), low, device=model.device))
    y, tau = (high - low) * y + offset, (high - low) * tau
    levels, draws = settings.path(model), settings.draws
    work = _Work(settings, model, settings.estimator(model), levels, found, y, tau, first, callback)
    started, total = time.perf_counter(), len(y) * draws
    size = batch_size or evenly(total, chains_at_once(model))
    with progress_bar(total * len(levels), progress, unit="chain-step") as bar:
        made = list(Batches(size, "draws", ADVICE).over(total, lambda start, stop: work.run(start, stop, bar.update)))
    x = torch.cat([one.x.cpu() for one in made])

    def by_draw(values: Tensor) -> Tensor:
        return values.unflatten(0, (len(y), draws)).transpose(0, 1)

    info = {name: by_draw(torch.cat([one.info[name].cpu() for one in made])) for name in made[0].info}
    seconds = time.perf_counter() - started
    return Restored(by_draw((x - low) / (high - low)), made[0].cost, seconds, (tau / (high - low)).cpu(), info)


@dataclass(frozen=True)
class _Work:
    """Restores any range of draws, numbered draw by draw of the first measurement, then of the next."""

    settings: RestorationSettings
    model: Model
    moments: Moments
    levels: Sequence[NoiseLevel]
    operator: Operator
    y: Tensor
    tau: Tensor
    first: int
    callback: Watch | None

    def run(self, start: int, stop: int, tick: Any) -> Run:
        settings, device = self.settings, self.model.device
        rows = torch.arange(start, stop, device=self.y.device) // settings.draws
        seeds = [
            child_seed(settings.seed, f"restore {self.first + number // settings.draws} draw {number % settings.draws}")
            for number in range(start, stop)
        ]
        tau = self.tau if len(self.tau) == 1 else self.tau[rows]
        given = GivenMoments(self.moments, self.y[rows], self.operator, tau)
        plan = restoration_plan(given, self.levels, settings.chains)
        streams = Streams(seeds, len(seeds), purpose="start")
        x0 = plan.noise(self.model.shape, len(seeds), generator=streams, centre=sum(self.model.interval) / 2)
        with ticks_of(tick) as ticked, matmul_precision(settings.precision), autocast(settings.precision, device):

            def note(step: int, state: State, info: Info) -> None:
                if self.callback is not None:
                    self.callback(step, state, info, start)
                ticked(len(seeds))

            return run(plan, x0.to(device), seed=seeds, callback=note, progress=None)


def restoration_plan(given: GivenMoments, levels: Sequence[NoiseLevel], chains: str) -> Plan:
    """Chains of one of `CHAINS` down the levels, to draws of p(x | y)."""
    bridge = ancestral_plan(given, levels, mean_last=False)
    if chains == MULTISTEP:
        *above, last = bridge.steps
        return replace(bridge, steps=(*(one._replace(kernel=_ByMeans(given.denoiser)) for one in above), last))
    return mirrored_plan(given, levels) if chains == MIRRORED else bridge


@dataclass(frozen=True)
class _ByMeans:
    """`Multistep` with noise along conditioned means: with new probes, and word of the systems solved for them."""

    denoiser: GivenDenoiser

    def step(
        self, state: State, level: NoiseLevel, following: NoiseLevel, *, generator: Generator
    ) -> tuple[State, Info]:
        told: dict[str, Tensor] = {}

        def mean(x_t: Tensor, level: NoiseLevel) -> Tensor:
            found, info = self.denoiser.with_info(x_t, level, generator=generator)
            told.update(info)
            return found

        kernel = Multistep(mean, eta=1.0, midpoint=True)
        return kernel.step(state, level, following, generator=generator)[0], told


def check_restoration(model: Model, batch_size: int | None = None) -> None:
    """Refuse a model of one level, and a batch size that is none."""
    model.require_denoiser()
    if len(model.levels) < 2:
        raise UsageError(
            f"restoration goes down many noise levels, and this model was trained at {model.levels[0]} alone; use a "
            "model of many levels, such as cifar10 or celeba"
        )
    _check_whole(batch_size=(batch_size, 1))


def _check_whole(**numbers: tuple[int | None, int]) -> None:
    """Refuse numbers, each with the least it may be, that are not whole or too small."""
    for name, (value, least) in numbers.items():
        if value is not None and (not isinstance(value, int) or value < least):
            raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")


def noise_of(noise: float | Tensor | str, y: Tensor, operator: Operator) -> Tensor:
    """The standard deviation of the noise, of as many dimensions as y, for values in [0, 1]."""
    if isinstance(noise, str):
        if noise != ESTIMATE:
            raise UsageError(
                "the noise must be a standard deviation (a number, one a row, or one a measurement, in y's shape) or "
                f"{ESTIMATE!r}, got {noise!r}; for Poisson noise, where y = counts / peak, give one a measurement: "
                "noise=(y.clamp(min=1 / peak) / peak).sqrt()"
            )
        return noise_variances(estimated_noise(y, operator), operator, y).sqrt()
    return unit_noise(noise, operator, y)
