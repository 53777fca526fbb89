"""Samplers by name: from settings, as the command line and experiments have them, to the plan for a model.

A model of one level has Gibbs chains at that level. For the samplers of a model of many levels:

    ancestral, ddim                          the model's own levels, as it was trained
    gibbs, gibbs-down, langevin, consistent  its own where they are variance exploding, else `exploding_levels`
    heun, multistep                          EDM's, within the model's range

Where no sampler is named: Gibbs chains of a model of one level; of one of many `gibbs-down` where the settings are of
Gibbs sampling (a covariance, sweeps ...), else `heun`, which costs 35 evaluations an image in place of thousands.

`steps` is how many levels are used, and `levels` stands in place of all this. A denoiser answers at any level by its
ratio sigma / alpha, so a variance-preserving model may well be sampled along a variance-exploding path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmdgs import samplers
from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError, nearest
from mmdgs.generation.settings import FIXED, Method
from mmdgs.guidance import GuidedDenoiser
from mmdgs.models import FitData, Model, load
from mmdgs.models.covariances import COVARIANCES, FITTED, own_covariance
from mmdgs.moments import ClippedDenoiser, ClippedMoments, Moments
from mmdgs.moments.calibrated import calibration_record
from mmdgs.samplers import Plan
from mmdgs.samplers.ancestral import LAST_NOISE, grey_levels
from mmdgs.samplers.langevin_rates import suggested_rate
from mmdgs.schedules import Levels, edm, geometric, subsampled

LEVELS, LARGEST, SMALLEST = 232, 50.0, 0.01
"""NCSNv2's levels for CIFAR-10 in [0, 1] (Song and Ermon, 2020); sigmas scale with the width of the interval."""
EDM_LEVELS, EDM_LARGEST, EDM_SMALLEST = 18, 40.0, 0.001
"""EDM's for data in [0, 1]: 80 to 0.002 in [-1, 1] (Karras et al., 2022)."""
CHAIN_STEPS = 20
CLIPPED_INTERVAL = (-1.0, 1.0)
"""Where diffusers' images lie: models of this interval have their means clipped, as there."""


@dataclass(frozen=True)
class Ingredients:
    """What a plan is made of: the denoiser (guided or not), the estimator where the sampler has one, the settings."""

    plain: Denoiser
    moments: Moments | None
    levels: Levels
    settings: Mapping[str, Any]  # of the resolved method
    model: Model

    @property
    def denoiser(self) -> Denoiser:
        """Clipped, where that is asked for."""
        return ClippedDenoiser(self.plain, self.model.interval) if self.settings["clip"] else self.plain

    @property
    def estimator(self) -> Moments:
        assert self.moments is not None, "the sampler has a covariance"
        return self.moments


def _within(model: Model, largest: float, smallest: float) -> tuple[float, float]:
    """Sigmas for data in [0, 1], scaled to the model's interval and kept within its range."""
    width = model.interval[1] - model.interval[0]
    return min(model.levels[0].ratio, width * largest), max(model.levels[-1].ratio, width * smallest)


def is_exploding(model: Model) -> bool:
    """Whether a model's levels are variance exploding: noise is added, and the data are not scaled down."""
    return all(level.alpha == 1 for level in model.levels)


def exploding_levels(model: Model, steps: int | None = None) -> Levels:
    """Variance-exploding levels: the model's own, or NCSNv2's geometric ones within the model's range."""
    if is_exploding(model):
        return _fewer(model.levels, steps, "even")
    count = min(LEVELS, len(model.levels)) if steps is None else steps
    return geometric(count, *_within(model, LARGEST, SMALLEST))


def trained_levels(model: Model, steps: int | None = None) -> Levels:
    """The model's own levels; fewer of variance-preserving ones from the cleanest on, as diffusers takes them."""
    return _fewer(model.levels, steps, "even" if is_exploding(model) else "leading")


def edm_levels(model: Model, steps: int | None = None) -> Levels:
    """EDM's levels within the model's range."""
    return edm(EDM_LEVELS if steps is None else steps, *_within(model, EDM_LARGEST, EDM_SMALLEST))


def _fewer(levels: Levels, steps: int | None, spacing: str) -> Levels:
    return levels if steps is None else subsampled(levels, steps, spacing)


@dataclass(frozen=True)
class Sampler:
    """A sampler: what can be set of it and to what it is set by itself, its levels, its plan."""

    defaults: Mapping[str, Any]
    levels: Callable[[Model, int | None], Levels]
    plan: Callable[[Ingredients], Plan]
    clips: bool = False  # by itself, where the model's data lie in CLIPPED_INTERVAL


def _gibbs(found: Ingredients, noise_first: bool = True) -> Plan:
    sweeps = found.settings["sweeps"]
    return samplers.gibbs_plan(found.estimator, found.levels, sweeps=sweeps, noise_first=noise_first)


def _ancestral(found: Ingredients) -> Plan:
    if found.moments is None:
        large = found.settings["covariance"] == "large"
        return samplers.fixed_variance_plan(found.denoiser, found.levels, large=large)
    last_noise = grey_levels(found.settings["last_noise"], found.model.interval)
    return samplers.ancestral_plan(found.moments, found.levels, last_noise=last_noise)


def _langevin(found: Ingredients) -> Plan:
    steps, rate = found.settings["sweeps"], found.settings["rate"]
    return samplers.langevin_plan(found.denoiser, found.levels, steps=steps, rate=rate)


def _ddim(found: Ingredients) -> Plan:
    # The kernel clamps by itself, for as in diffusers it wants the noise by the mean that was not clamped.
    interval = found.model.interval if found.settings["clip"] else None
    return samplers.ddim_plan(found.plain, found.levels, eta=found.settings["eta"], interval=interval)


GIBBS = {"covariance": None, "sweeps": 3, "clip": None}
GUIDED = {"guide": None, "guidance": None}
"""What samplers without a covariance take."""
GUIDANCE = 2.0
GUIDE = "guide"
"""The folder inside a model's folder where its guide may be."""

SAMPLERS: dict[str, Sampler] = {
    "gibbs": Sampler(GIBBS, exploding_levels, _gibbs),
    "gibbs-down": Sampler(GIBBS, exploding_levels, lambda found: _gibbs(found, noise_first=False)),
    "langevin": Sampler({"sweeps": 5, "rate": None, **GUIDED}, exploding_levels, _langevin),
    "consistent": Sampler(
        {"eta": None, "clip": None, **GUIDED},
        exploding_levels,
        lambda found: samplers.consistent_plan(found.denoiser, found.levels, eta=found.settings["eta"]),
    ),
    "ancestral": Sampler({"covariance": "small", "clip": None}, trained_levels, _ancestral, clips=True),
    "ddim": Sampler({"eta": 0.0, "clip": None, **GUIDED}, trained_levels, _ddim, clips=True),
    "heun": Sampler(
        {"churn": 0.0, "clip": None, **GUIDED},
        edm_levels,
        lambda found: samplers.heun_plan(found.denoiser, found.levels, churn=found.settings["churn"]),
    ),
    "multistep": Sampler(
        {"order": 2, "eta": 0.0, "clip": None, **GUIDED},
        edm_levels,
        lambda found: samplers.multistep_plan(
            found.denoiser, found.levels, order=found.settings["order"], eta=found.settings["eta"]
        ),
    ),
}
"""Samplers by the names they have on the command line."""
OF_GIBBS = (
    "covariance", "sweeps", "probes", "products", "products_below", "krylov_steps", "most_products", "symmetric",
    "floor", "head", "calibrated",
)  # fmt: skip
"""Settings that say that Gibbs sampling is meant, where no sampler is named."""


def _chain(found: Ingredients) -> Plan:
    steps, mean = found.settings["steps"], bool(found.settings["mean"])
    return samplers.single_level_plan(found.estimator, found.levels[0], steps=steps, mean=mean)


CHAIN = Sampler({"covariance": None, "clip": None, "mean": None}, lambda found, _: found.levels, _chain)
"""What "gibbs" is for a model of one level."""


def resolved(method: Method, model: Model) -> Method:
    """The method with every setting that applies filled in, levels included; what does not apply is refused."""
    model.require_denoiser()
    chosen_name = own_choice(method, model) if method.sampler is None else method.sampler
    sampler = _sampler(chosen_name, model)
    values = dict(sampler.defaults)
    name = f"the sampler {chosen_name!r}"
    if "covariance" in values:
        covariance = values["covariance"] or own_covariance(model) if method.covariance is None else method.covariance
        values |= {"covariance": covariance, **_covariance_defaults(covariance, chosen_name)}
        name += f" with the covariance {covariance!r}"
    if chosen_name == "ancestral" and values["covariance"] not in FIXED:
        values["last_noise"] = LAST_NOISE
    given = {key: value for key, value in vars(method).items() if value is not None}
    for key in given:
        if key not in values and key not in ("sampler", "levels", "steps"):
            takes = ", ".join(sorted([*values, "levels", "steps"])).replace("_", "-")
            raise UsageError(f"{name} takes no {key.replace('_', '-')}; it takes {takes}")
    values |= given | {"sampler": chosen_name}
    if "clip" in values and values["clip"] is None:
        values["clip"] = sampler.clips and model.interval == CLIPPED_INTERVAL
    single = sampler is CHAIN
    if single and method.levels is not None:
        raise UsageError(f"this model was trained at {model.levels[0]} alone and takes no other levels")
    try:
        chosen = method.levels if method.levels is not None else sampler.levels(model, method.steps)
        values["levels"] = chosen if method.levels is None else _fewer(chosen, method.steps, "even")
    except ValueError as error:
        raise UsageError(f"the levels of {name} cannot be made: {error}") from error
    if values.get("guide") is not None and values["guidance"] is None:
        values["guidance"] = GUIDANCE
    if "rate" in values and values["rate"] is None:
        values["rate"] = suggested_rate(values["levels"], values["sweeps"])
    if method.steps is None:
        values["steps"] = CHAIN_STEPS if single else len(values["levels"])
    return Method(**values)


def own_choice(method: Method, model: Model) -> str:
    """The sampler where none is named.

    The paper's order of Gibbs over many levels has a bias, also for a Gaussian (docs/samplers.md), so it is not chosen
    by itself.
    """
    if len(model.levels) == 1:
        return "gibbs"
    return "gibbs-down" if any(getattr(method, key) is not None for key in OF_GIBBS) else "heun"


def _sampler(name: str, model: Model) -> Sampler:
    if len(model.levels) > 1:
        return SAMPLERS[name]
    if name != "gibbs":
        raise UsageError(
            f"the sampler {name!r} needs a model of many noise levels, and this one was trained at "
            f"{model.levels[0]} alone: use gibbs"
        )
    return CHAIN


def _covariance_defaults(covariance: str, sampler: str) -> dict[str, Any]:
    known = [*COVARIANCES, *(FIXED if sampler == "ancestral" else ())]
    if covariance not in known:
        like = nearest(covariance, known)
        raise UsageError(
            f"the sampler {sampler!r} has no covariance {covariance!r}{like}; choose one of {', '.join(known)}"
        )
    if covariance in FIXED:
        return {}
    # Variances that were fitted are right as they are: a calibration only adds the reach of their intervals.
    return {**COVARIANCES[covariance][0], "calibrated": False if covariance in FITTED else None}


def make_plan(method: Method, model: Model, *, data: FitData | None = None) -> Plan:
    """The plan of a method for a model; a covariance that is fitted is fitted on `data`, or taken from what is kept."""
    method = resolved(method, model)
    levels = method.levels or ()
    denoiser, moments = _denoiser(method, model), _moments(method, model, data)
    if method.clip and moments is not None:
        moments = ClippedMoments(moments, model.interval)
    try:
        assert method.sampler is not None, "it was resolved"
        return _sampler(method.sampler, model).plan(Ingredients(denoiser, moments, levels, vars(method), model))
    except ValueError as error:
        raise UsageError(f"the sampler {method.sampler!r} cannot run so: {error}") from error


def _moments(method: Method, model: Model, data: FitData | None) -> Moments | None:
    """The estimator of a resolved method, where its sampler has one."""
    if method.covariance is None or method.covariance in FIXED:
        return None
    given = {key: getattr(method, key) for key in COVARIANCES[method.covariance][0]}
    fitting = {"data": data, "levels": method.levels}
    given |= {key: fitting[key] for key in FITTED.get(method.covariance, ())}
    return model.posterior(method.covariance, calibrated=method.calibrated, **given)


def _denoiser(method: Method, model: Model) -> Denoiser:
    """The model, led away from its guide where that is asked for: the guide that is named, or that came with it."""
    if method.guidance is None:
        return model
    source = model.beside(GUIDE) if method.guide is None else method.guide
    if source is None:
        raise UsageError(
            f"--guidance {method.guidance:g} leads samples away from a worse model, and none came with {model.source}: "
            "say --guide MODEL, the same network trained for less time, or a smaller one"
        )
    guide = load(source, device=model.device)
    guide.require_denoiser()
    if (guide.shape, guide.interval) != (model.shape, model.interval):
        raise UsageError(
            f"the guide {guide.source} has data of shape {guide.shape} in {guide.interval}, and the model "
            f"{model.source} of {model.shape} in {model.interval}: take a worse model of the same data"
        )
    return GuidedDenoiser(model, guide, method.guidance)


def settings_of(method: Method, model: Model, data: FitData | None = None) -> dict[str, Any]:
    """What the record of a run says of its method: every setting, its calibration, the data of variances, its head."""
    whole = resolved(method, model)
    found: dict[str, Any] = {"method": whole.to_json()}
    if whole.covariance is not None and whole.covariance not in FIXED:
        moments = None if whole.calibrated is False else _moments(whole, model, data)
        found["calibration"] = calibration_record(moments, whole.levels or ())
    if data is not None and method.covariance is not None:
        found[method.covariance] = data.record()
    if method.head is not None:
        found["head"] = load(method.head).digest
    return found
