"""Samplers by name: from settings to the plan for a model.

A model of one level has Gibbs chains at that level. For the samplers of a model of many levels:

    ancestral, ddim                          the model's own levels, as it was trained
    gibbs, gibbs-down, langevin, consistent  its own where they are variance exploding, else
                                             `exploding_levels`
    heun, multistep                          EDM's, within the model's range

Where no sampler is named: Gibbs chains of a model of one level; of one of many `gibbs-down` where a
covariance or sweeps are set, else `heun`, which costs 35 evaluations an image in place of
thousands. (The paper's order of Gibbs over many levels has a bias, also for a Gaussian:
docs/use/sample.md.)

`steps` is how many levels are used, and `levels` overrides all this. A denoiser answers at any
level by its ratio sigma / alpha, so a variance-preserving model may well be sampled along a
variance-exploding path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mmdgs import samplers
from mmdgs.covariances import COVARIANCES, FITTED, FIXED, Estimated, as_covariance
from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError
from mmdgs.guidance import GuidedDenoiser
from mmdgs.models import FitData, Model, load
from mmdgs.models.estimators import own_covariance
from mmdgs.moments import ClippedDenoiser, ClippedMoments
from mmdgs.moments.calibrated import calibration_record
from mmdgs.samplers import DDIM, ConsistentAnnealed, FixedVariance, Heun, Kernel, Multistep, Plan
from mmdgs.samplers.ancestral import LAST_NOISE, grey_levels
from mmdgs.samplers.langevin import suggested_rate
from mmdgs.sampling.settings import SamplerSettings
from mmdgs.schedules import Levels, edm, geometric, subsampled

LEVELS, LARGEST, SMALLEST = 232, 50.0, 0.01
"""NCSNv2's levels for CIFAR-10 in [0, 1] (Song and Ermon, 2020); sigmas scale with the interval."""
EDM_LEVELS, EDM_LARGEST, EDM_SMALLEST = 18, 40.0, 0.001
"""EDM's for data in [0, 1]: 80 to 0.002 in [-1, 1] (Karras et al., 2022)."""
CHAIN_STEPS = 20
CLIPPED_INTERVAL = (-1.0, 1.0)
"""Where diffusers' images lie: models of this interval have their means clipped, as there."""
GUIDANCE = 2.0
GUIDE = "guide"
"""The folder inside a model's folder where its guide may be."""


def _within(model: Model, largest: float, smallest: float) -> tuple[float, float]:
    """Sigmas for data in [0, 1], scaled to the model's interval and kept within its range."""
    width = model.interval[1] - model.interval[0]
    first, last = model.levels[0].ratio, model.levels[-1].ratio
    return min(first, width * largest), max(last, width * smallest)


def is_exploding(model: Model) -> bool:
    """Whether a model's levels are variance exploding: noise is added to data as they are."""
    return all(level.alpha == 1 for level in model.levels)


def exploding_levels(model: Model, steps: int | None = None) -> Levels:
    """Variance-exploding levels: the model's own, or NCSNv2's geometric ones within its range."""
    if is_exploding(model):
        return _fewer(model.levels, steps, "even")
    count = min(LEVELS, len(model.levels)) if steps is None else steps
    return geometric(count, *_within(model, LARGEST, SMALLEST))


def trained_levels(model: Model, steps: int | None = None) -> Levels:
    """The model's own levels; fewer of variance-preserving ones as diffusers takes them."""
    return _fewer(model.levels, steps, "even" if is_exploding(model) else "leading")


def edm_levels(model: Model, steps: int | None = None) -> Levels:
    """EDM's levels within the model's range."""
    return edm(EDM_LEVELS if steps is None else steps, *_within(model, EDM_LARGEST, EDM_SMALLEST))


def _fewer(levels: Levels, steps: int | None, spacing: str) -> Levels:
    return levels if steps is None else subsampled(levels, steps, spacing)


@dataclass(frozen=True)
class Ingredients:
    """What a plan is made of: resolved settings, the denoiser (guided or not), the estimator."""

    settings: Any  # SamplerSettings, whose fields are filled in
    model: Model
    plain: Denoiser
    moments: Any  # Moments, where the sampler has a covariance that is estimated

    @property
    def denoiser(self) -> Denoiser:
        """Clipped, where that is asked for."""
        clip = self.settings.clip
        return ClippedDenoiser(self.plain, self.model.interval) if clip else self.plain

    def down(self, kernel: Callable[..., Kernel], **options: Any) -> Plan:
        """A kernel of the denoiser along all levels."""
        return Plan.down(kernel(self.denoiser, **options), self.settings.levels)


@dataclass(frozen=True)
class Sampler:
    """A sampler: what can be set of it and to what it is set by itself, its levels, its plan."""

    defaults: Mapping[str, Any]
    levels: Callable[[Model, int | None], Levels]
    plan: Callable[[Ingredients, Any], Plan]  # from the parts, and the settings among them
    clips: bool = False  # by itself, where the model's data lie in CLIPPED_INTERVAL


def _gibbs(parts: Ingredients, s: Any, noise_first: bool = True) -> Plan:
    return samplers.gibbs_plan(parts.moments, s.levels, sweeps=s.sweeps, noise_first=noise_first)


def _langevin(parts: Ingredients, s: Any) -> Plan:
    return samplers.langevin_plan(parts.denoiser, s.levels, steps=s.sweeps, rate=s.rate)


def _ancestral(parts: Ingredients, s: Any) -> Plan:
    if parts.moments is None:
        return parts.down(FixedVariance, large=s.covariance.name == "large")
    last_noise = grey_levels(s.last_noise, parts.model.interval)
    return samplers.ancestral_plan(parts.moments, s.levels, last_noise=last_noise)


def _ddim(parts: Ingredients, s: Any) -> Plan:
    # The kernel clamps by itself: as in diffusers it wants the noise by the mean before clamping.
    return Plan.down(DDIM(parts.plain, s.eta, parts.model.interval if s.clip else None), s.levels)


def _chain(parts: Ingredients, s: Any) -> Plan:
    level, mean = s.levels[0], bool(s.mean)
    return samplers.single_level_plan(parts.moments, level, steps=s.steps, mean=mean)


GIBBS = {"covariance": None, "sweeps": 3, "clip": None}
GUIDED = {"clip": None, "guide": None, "guidance": None}
"""What samplers without a covariance take."""

SAMPLERS: dict[str, Sampler] = {
    "gibbs": Sampler(GIBBS, exploding_levels, _gibbs),
    "gibbs-down": Sampler(GIBBS, exploding_levels, partial(_gibbs, noise_first=False)),
    "langevin": Sampler(
        {"sweeps": 5, "rate": None, "guide": None, "guidance": None}, exploding_levels, _langevin
    ),
    "consistent": Sampler(
        {"eta": None, **GUIDED},
        exploding_levels,
        lambda parts, s: parts.down(ConsistentAnnealed, eta=s.eta),
    ),
    "ancestral": Sampler({"covariance": "small", "clip": None}, trained_levels, _ancestral, True),
    "ddim": Sampler({"eta": 0.0, **GUIDED}, trained_levels, _ddim, True),
    "heun": Sampler(
        {"churn": 0.0, **GUIDED}, edm_levels, lambda parts, s: parts.down(Heun, churn=s.churn)
    ),
    "multistep": Sampler(
        {"order": 2, "eta": 0.0, **GUIDED},
        edm_levels,
        lambda parts, s: parts.down(Multistep, order=s.order, eta=s.eta),
    ),
}
CHAIN = Sampler(
    {"covariance": None, "clip": None, "mean": None}, lambda model, _: model.levels, _chain
)
"""What "gibbs" is for a model of one level."""


def _sampler(name: str, model: Model) -> Sampler:
    if len(model.levels) > 1:
        return SAMPLERS[name]
    if name != "gibbs":
        needs = f"the sampler {name!r} needs a model of many noise levels"
        raise UsageError(f"{needs}, and this one was trained at {model.levels[0]}: use gibbs")
    return CHAIN


def resolved(settings: SamplerSettings, model: Model) -> SamplerSettings:
    """The settings with all that apply filled in, levels too; what does not apply is refused."""
    model.require_denoiser()
    gibbs = settings.covariance is not None or settings.sweeps is not None
    default = "gibbs" if len(model.levels) == 1 else "gibbs-down" if gibbs else "heun"
    name = settings.sampler or default
    sampler = _sampler(name, model)
    values = dict(sampler.defaults)
    words = f"the sampler {name!r}"
    if "covariance" in values:
        covariance = as_covariance(
            settings.covariance or values["covariance"] or own_covariance(model)
        )
        if isinstance(covariance, Estimated):
            # Variances that were fitted are right as they are: a calibration only adds the reach of
            # their intervals.
            if covariance.fitted and covariance.calibrated is None:
                covariance = replace(covariance, calibrated=False)
            values |= {"last_noise": LAST_NOISE} if name == "ancestral" else {}
        elif name != "ancestral":
            known = ", ".join(name for name in COVARIANCES if name not in FIXED)
            raise UsageError(f"{words} has no covariance {covariance.name!r}; use one of {known}")
        words += f" with the covariance {covariance.name!r}"
        settings = replace(settings, covariance=covariance)
    given = {key: value for key, value in vars(settings).items() if value is not None}
    for key, value in given.items():
        if key not in values and key not in ("sampler", "levels", "steps"):
            takes = ", ".join(sorted([*values, "levels", "steps"])).replace("_", "-")
            said = f"{key.replace('_', '-')} (got {value!r})"
            raise UsageError(f"{words} takes no {said}; it takes {takes}")
    values |= given | {"sampler": name}
    if "clip" in values and values["clip"] is None:
        values["clip"] = sampler.clips and model.interval == CLIPPED_INTERVAL
    if sampler is CHAIN and settings.levels is not None:
        level = model.levels[0]
        raise UsageError(f"this model was trained at {level} alone and takes no other levels")
    try:
        if settings.levels is None:
            values["levels"] = sampler.levels(model, settings.steps)
        else:
            values["levels"] = _fewer(settings.levels, settings.steps, "even")
    except ValueError as error:
        raise UsageError(f"the levels of {words} cannot be made: {error}") from error
    if values.get("guide") is not None and values["guidance"] is None:
        values["guidance"] = GUIDANCE
    if "rate" in values and values["rate"] is None:
        values["rate"] = suggested_rate(values["levels"], values["sweeps"])
    if settings.steps is None:
        values["steps"] = CHAIN_STEPS if sampler is CHAIN else len(values["levels"])
    return SamplerSettings(**values)


def prepare(
    settings: SamplerSettings, model: Model, *, data: FitData | None = None
) -> tuple[Plan, dict[str, Any]]:
    """The plan of settings for a model, and what a run's record says of it.

    A covariance that is fitted is fitted on `data`, or taken from what is kept. The record has
    every setting, the calibration, the data of variances, the digest of a head.
    """
    settings = resolved(settings, model)
    covariance, moments = settings.covariance, None
    record: dict[str, Any] = {"sampler": settings.to_json()}
    if data is not None and not getattr(covariance, "fitted", False):
        raise UsageError(
            f"data to fit variances on (--data) are for the covariances {', '.join(FITTED)}, got "
            f"{covariance.name if isinstance(covariance, Estimated) else settings.sampler}"
        )
    if isinstance(covariance, Estimated):
        moments = model.posterior(covariance, data=data, levels=settings.levels)
        record["calibration"] = calibration_record(moments, settings.levels or ())
        if data is not None:
            record[covariance.name] = data.record()
        if (head := getattr(covariance, "head", None)) is not None:
            record["head"] = load(head).digest
        moments = ClippedMoments(moments, model.interval) if settings.clip else moments
    sampler = _sampler(settings.sampler or "", model)
    try:
        parts = Ingredients(settings, model, _denoiser(settings, model), moments)
        plan = sampler.plan(parts, settings)
    except ValueError as error:
        what = f"invalid settings for the sampler {settings.sampler!r}"
        raise UsageError(f"{what}: {error}") from error
    return plan, record


def make_plan(settings: SamplerSettings, model: Model, *, data: FitData | None = None) -> Plan:
    """The plan of settings for a model (`prepare` has the record too)."""
    return prepare(settings, model, data=data)[0]


def _denoiser(settings: SamplerSettings, model: Model) -> Denoiser:
    """The model, led away from the guide that is named, or that came with it, where asked for."""
    if settings.guidance is None:
        return model
    source = model.beside(GUIDE) if settings.guide is None else settings.guide
    if source is None:
        raise UsageError(
            f"--guidance {settings.guidance:g} needs a worse model, and none came with "
            f"{model.source}: say --guide MODEL, the same network trained less, or a smaller one"
        )
    guide = load(source, device=model.device)
    guide.require_denoiser()
    if (guide.shape, guide.interval) != (model.shape, model.interval):
        raise UsageError(
            f"the guide {guide.source} has data of {guide.shape} in {guide.interval}, the model "
            f"of {model.shape} in {model.interval}: take one trained on the model's data"
        )
    return GuidedDenoiser(model, guide, settings.guidance)
