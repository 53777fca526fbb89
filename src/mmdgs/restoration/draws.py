"""Draws from p(x | y) for measurements y = A x + noise: restoration with a denoiser.

Chains go down the noise levels with p(x | x_t, y) (moments/given.py, chains.py).

Draw j of measurement i depends on (seed, i, j) alone: not on how many there are of either.
(Arithmetic in a batch of another size rounds differently, and draws then differ by some 1e-5.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmdgs import samplers
from mmdgs.cost import Cost
from mmdgs.covariances import Covariance, Krylov
from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError
from mmdgs.memory import Batches, evenly
from mmdgs.models import Model
from mmdgs.models.model import as_model
from mmdgs.moments import GivenMoments, Moments
from mmdgs.moments.contract import estimator_and_denoiser, with_denoiser
from mmdgs.noise import NoiseLevel
from mmdgs.operators import Nonlinear, Operator, as_operator, measured
from mmdgs.operators.nonlinear import told_of
from mmdgs.randomness import Streams, child_seed
from mmdgs.restoration.chains import restoration_plan
from mmdgs.restoration.checks import check_model, in_room, noise_of, sized_model
from mmdgs.restoration.settings import GOOD, RestorationSettings, quality_named
from mmdgs.runtime import autocast, matmul_precision, progress_bar, ticks_of
from mmdgs.samplers import Info, Run, State
from mmdgs.sampling.engine import ADVICE, Watch, chains_at_once
from mmdgs.sampling.named import edm_levels
from mmdgs.sensors import Bounds, Sensor, bounded


@dataclass(frozen=True)
class Restored:
    """Draws of p(x | y) in [0, 1] units, not clipped: (draws, B, ...).

    `cost` is that of one draw, `noise` the standard deviation that was assumed, (1 or B, ...).
    `info` has averages over the steps, (draws, B) by name: "cg_iterations" and "cg_residual" where
    systems were solved by iterations. Of an operator that is not linear it has "linearisation" and
    "misfit" of the draws (operators/nonlinear.py). With particles it has "log_evidence", and
    "effective" (draws, B, steps), the effective share of the particles.
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
        """The standard deviation of the draws (two or more): how uncertain each pixel is."""
        return self.draws.std(0)

    def log_evidence(self) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """log p(y), by the runs of particles of all draws, and its standard error."""
        if "log_evidence" not in self.info:
            raise UsageError("the evidence is known of draws by several particles: particles=8")
        runs = self.info["log_evidence"]
        total = runs.logsumexp(0) - math.log(len(runs))
        error = (runs - total).exp().std(0) / math.sqrt(len(runs))
        return total, error


def restore(
    model: Model | Denoiser | Moments,
    y: Float[Tensor, "batch ..."],
    operator: Any,
    *,
    noise: float | Tensor | Sensor | str,
    levels: Sequence[NoiseLevel] | None = None,
    shape: Sequence[int] | None = None,
    interval: tuple[float, float] | None = None,
    quality: str = GOOD,
    first: int = 0,
    callback: Watch | None = None,
    progress: str | None = "restoring",
    **settings: Any,
) -> Restored:
    """Draw images x in [0, 1] given measurements y = A x + noise e: from p(x | y), nearly.

    Chains take p(x | x_t, y) for a Gaussian. Where p(x | y) is one, draws by "bridge" are exact;
    where it has modes, y moves their weights too little, with any number of levels
    (docs/use/restore.md, "Limits"). y is (B, *out_shape). `operator` is one of `mmdgs.operators`, a
    LinearPhysics of deepinv, or what `as_operator` takes. `quality` (fast, good or best: 10, 25 or
    48 evaluations a draw) sets covariance and steps. `noise`, `levels` and the other settings
    (covariance, chains, steps, draws, particles, seed, precision, batch_size) are those of
    `RestorationSettings`. `first` is the number of the first measurement, for parts of a larger
    set. `callback(step, state, info, number)` is called after each step of a batch, whose first
    draw has this number; states are in the model's units.

    `model` may also be a denoiser, such as `mmdgs.noise_denoiser(net)`. It needs the `levels` that
    chains go along, the noisiest first; the `shape` of its images, where the operator does not know
    it; and the `interval` of its values, [0, 1] unless given. Its covariance is "krylov" unless
    given, which needs no fit. Or `model` may be an estimator of a model or of a denoiser, fitted
    (`SpectralMoments.fit`), calibrated (`mmdgs.calibrate`) or not: it is then the covariance. A
    model of any size takes the operator's, or that of `shape`, or else that of y.
    """
    moments, source = estimator_and_denoiser(model)
    covariance = settings.pop("covariance", None)
    of_quality, steps = quality_named(quality)
    settings = {"steps": steps, **settings}
    if moments is not None and covariance is not None:
        raise UsageError(f"give an estimator, {type(moments).__name__}, or a covariance, not both")
    if not isinstance(source, Model):
        if levels is None:
            raise UsageError(
                "a denoiser that is no Model needs levels=, such as "
                "mmdgs.schedules.edm(25, 80., 0.002)"
            )
        shape = getattr(operator, "shape", None) if shape is None else shape
        covariance = covariance or Krylov()
    elif source.any_size and shape is not None:
        source, shape = source.sized(*shape[1:]), None
    network = as_model(source, levels=levels, shape=shape, interval=interval)
    covariance = with_denoiser(moments, network) if moments is not None else covariance
    settings |= {"covariance": of_quality if covariance is None else covariance}
    settings_object = RestorationSettings(noise, levels=levels, **settings)
    restoration = Restoration.of(settings_object, network, y, operator, first)
    return restoration.draws(callback=callback, progress=progress)


@dataclass(frozen=True)
class Restoration:
    """Measurements and all that their draws need, checked and resolved once by `of`.

    `y` (B, *out_shape) and the standard deviation of its `noise` (1 or B, ...), or its sensor, are
    for x in [0, 1]; `moments` and `levels` are in the model's units. The first measurement has the
    number `first`.
    """

    settings: RestorationSettings
    model: Model
    y: Tensor
    operator: Operator
    noise: Tensor | Sensor
    moments: Moments
    levels: Sequence[NoiseLevel]
    first: int

    @classmethod
    def of(
        cls,
        settings: RestorationSettings,
        model: Model,
        y: Tensor,
        operator: Any,
        first: int = 0,
        bounds: Bounds | None = None,
    ) -> Restoration:
        """Of one of this package's operators, or what `as_operator` takes.

        What of y lies at the `bounds` or beyond was clipped there (`Sensor`).
        """
        check_model(model)
        model = sized_model(model, y, operator)
        operator = as_operator(operator, model.shape, torch.empty(0, device=model.device))
        y = measured(y.detach(), operator).to(model.device, torch.float32)
        moments, levels = settings.covariance, settings.levels
        noise = bounded(noise_of(settings.noise, y, operator), y, operator, bounds)
        local = [part for part in (operator, noise) if isinstance(part, Nonlinear | Sensor)]
        if local and settings.particles > 1:
            raise UsageError(
                f"particles need linear measurements whose noise does not depend on x, got "
                f"{local[0]!r}: take one particle"
            )
        if len(local) > 1:
            raise UsageError(
                f"measurements that are not linear need noise that does not depend on x, got "
                f"{noise!r}"
            )
        if isinstance(moments, Covariance | str):
            moments = model.posterior(moments)
        moments = in_room(model, moments)
        settings = settings.of_model(model, moments)
        levels = edm_levels(model, settings.steps) if levels is None else tuple(levels)
        return cls(settings, model, y, operator, noise, moments, levels, first)

    @cached_property
    def offset(self) -> Tensor:
        """x = low + width u for u in [0, 1]: A x = low A 1 + width A u, whatever A does to 1."""
        low = torch.full((1, *self.model.shape), self.model.interval[0], device=self.model.device)
        return self.operator(low)

    @property
    def width(self) -> float:
        low, high = self.model.interval
        return high - low

    @cached_property
    def deviations(self) -> Tensor:
        """The standard deviation of the noise, (1 or B, ...); of a sensor that at y."""
        noise = self.noise
        return noise.variances(self.y).sqrt() if isinstance(noise, Sensor) else noise

    def draws(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        callback: Watch | None = None,
        progress: str | None = "restoring",
    ) -> Restored:
        """Draws for the measurements from start to stop."""
        size, began = self.settings.draws, time.perf_counter()
        stop = len(self.y) if stop is None else stop
        total = (stop - start) * size
        most = max(1, chains_at_once(self.model) // self.settings.particles)
        rows = self.settings.batch_size or evenly(total, most)
        with progress_bar(total * len(self.levels), progress, unit="chain-step") as bar:
            runs = list(
                Batches(rows, "draws", ADVICE).over(
                    stop * size,
                    lambda first, last: self._run(first, last, bar.update, callback),
                    start * size,
                )
            )

        def by_draw(values: list[Tensor]) -> Tensor:
            joined = torch.cat([part.cpu() for part in values])
            return joined.unflatten(0, (stop - start, size)).transpose(0, 1)

        info = {name: by_draw([run.info[name] for run in runs]) for name in runs[0].info}
        draws = (by_draw([run.x for run in runs]) - self.model.interval[0]) / self.width
        seconds = time.perf_counter() - began
        if "log_evidence" in info:  # of measurements for x in [0, 1]
            measurements = self.operator.known(torch.ones_like(self.y[:1])).sum().item()
            info["log_evidence"] += measurements * math.log(self.width)
        if isinstance(self.operator, Nonlinear):
            noise = self.deviations.expand(len(self.y), *self.deviations.shape[1:])[start:stop]
            info |= told_of(self.operator, draws, self.y[start:stop].cpu(), noise.cpu())
        cost = runs[0].cost.times(self.settings.particles)
        return Restored(draws, cost, seconds, self.deviations.cpu(), info)

    def _run(
        self, start: int, stop: int, tick: Callable[[int], object], callback: Watch | None
    ) -> Run:
        """The chains of the draws from start to stop, numbered by measurement, then draw."""
        settings, model, particles = self.settings, self.model, self.settings.particles
        numbers = torch.arange(start, stop).repeat_interleave(particles)
        rows = (numbers // settings.draws).to(self.y.device)
        names = [
            f"restore {self.first + number // settings.draws} draw {number % settings.draws}"
            + (f" particle {i % particles}" if particles > 1 else "")
            for i, number in enumerate(numbers.tolist())
        ]
        seeds = [child_seed(settings.seed, name) for name in names]
        noise: Any = self.noise
        if isinstance(noise, Sensor):
            noise = noise.rows(rows, len(self.y))
        elif len(noise) > 1:
            noise = noise[rows]
        y, operator = self.y[rows], self.operator
        if isinstance(operator, Nonlinear):
            operator = operator.in_units(self.model.interval[0], self.width)
        else:
            y = self.width * y + self.offset
            sensor = isinstance(noise, Sensor)
            noise = noise.scaled(self.width, self.offset) if sensor else self.width * noise
        given = GivenMoments(self.moments, y, operator, noise)
        plan = restoration_plan(
            given, self.levels, settings.chains, particles, settings.resample, settings.inflation
        )
        streams = Streams(seeds, len(seeds), purpose="start")
        centre = sum(model.interval) / 2
        x0 = plan.noise(model.shape, len(seeds), generator=streams, centre=centre).to(model.device)
        with (
            ticks_of(tick) as ticked,
            matmul_precision(settings.precision),
            autocast(settings.precision, model.device),
        ):

            def note(step: int, state: State, info: Info) -> None:
                if callback is not None:
                    callback(step, state, info, start)
                ticked(stop - start)

            chains = samplers.run(plan, x0, seed=seeds, callback=note, progress=None)
        # Every row is a draw by weight: the first of each run.
        first = {name: values[::particles] for name, values in chains.info.items()}
        return replace(chains, state=State(chains.x[::particles]), info=first)
